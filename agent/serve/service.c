/* The service from its options to its end. Knows who uses whom, no route and no run. */
#include "service.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "about.h"
#include "agent/app/logging.h"
#include "agent/io/group.h"
#include "agent/io/httpd.h"
#include "agent/io/loop.h"
#include "agent/io/notify.h"
#include "agent/io/signals.h"
#include "api.h"
#include "base/files.h"
#include "base/log.h"
#include "queue.h"
#include "retire.h"
#include "watch.h"

#define TOKEN_MIN 16
#define CONNECTIONS_MAX 256
#define STREAMS_MAX 128
#define IDLE_S 30
#define REQUEST_S 60

struct service {
    struct ka_app app;
    struct ka_opts *opts;
    ka_service_read_fn read;
    void *read_arg;
    bool draining;
    struct ka_signals *signals;
    struct ka_notify *notify;
    struct ka_retire *retire;
    struct ka_watch *watch;
    struct ka_httpd *httpd;
    struct ka_api api;
    char *folder, *address_file;
    char *token;
};

char *ka_service_folder(const struct ka_opts *opts)
{
    const char *state = getenv("XDG_STATE_HOME"), *home = getenv("HOME");
    char here[PATH_MAX];
    if (opts->state && opts->state[0] == '/')
        return ka_strdup(opts->state);
    if (opts->state)
        return getcwd(here, sizeof(here)) ? ka_path_join(here, opts->state) : NULL;
    if (state && state[0] == '/')
        return ka_path_join(state, "kernel-agent");
    return home && home[0] == '/' ? ka_path_join(home, ".local/state/kernel-agent") : NULL;
}

static int make_folder(struct service *service, const struct ka_opts *opts, struct ka_err *err)
{
    service->folder = ka_service_folder(opts);
    if (!service->folder)
        return ka_fail(err, -ENOENT, "--state DIR is missing: there is neither XDG_STATE_HOME nor HOME");
    KA_AUTO_FREE char *above = ka_path_parent(service->folder);
    int rc = ka_mkdirs(above, err);
    return rc ? rc : ka_private_folder(service->folder, err);
}

int ka_service_token(const char *path, char **token, struct ka_err *err)
{
    KA_AUTO_BUF struct ka_buf text = {0};
    struct stat st;
    int rc = ka_file_read(path, 4096, &text, err);
    if (rc)
        return rc;
    const char *bytes = ka_buf_str(&text);
    size_t from = strspn(bytes, " \t\r\n"), len = strcspn(bytes + from, " \t\r\n");
    if (len < TOKEN_MIN || bytes[from + len + strspn(bytes + from + len, " \t\r\n")])
        rc = ka_fail(err, -EINVAL, "%s: a token is one word of at least %d characters", path, TOKEN_MIN);
    else
        *token = ka_strndup(bytes + from, len);
    if (rc == 0 && stat(path, &st) == 0 && (st.st_mode & 077))
        ka_log(KA_LOG_WARN, "%s: others can read the token (chmod 600)", path);
    explicit_bzero(text.data, text.len);
    return rc;
}

static int open_socket(struct service *service, const struct ka_opts *opts, int *fd, struct ka_err *err)
{
    KA_AUTO_FREE char *own = ka_format("unix:%s/socket", service->folder);
    const char *address = opts->address ? opts->address : own;
    int rc = opts->token_file ? ka_service_token(opts->token_file, &service->token, err) : 0;
    if (rc == 0 && !service->token && !ka_httpd_is_unix(address))
        rc = ka_fail(err, -EINVAL,
                     "--address %s: every user of this machine reaches a TCP port: --token-file FILE is "
                     "missing (or use unix:PATH)",
                     address);
    return rc ? rc : ka_httpd_listen(address, fd, err);
}

/* Clients of this user find the service by its folder. */
static int start_http(struct service *service, const struct ka_opts *opts, int fd, struct ka_err *err)
{
    KA_AUTO_FREE char *address = ka_httpd_address(fd);
    const struct ka_httpd_conf conf = {.max_body = KA_SUBMISSION_MAX,
                                       .max_connections = CONNECTIONS_MAX,
                                       .max_streams = STREAMS_MAX,
                                       .idle_s = IDLE_S,
                                       .request_s = REQUEST_S,
                                       .begun = ka_api_begun,
                                       .whole = ka_api_whole,
                                       .arg = &service->api};
    service->api.token = service->token;
    service->api.app = &service->app;
    service->api.about = ka_about_fixed(&service->app, opts);
    service->api.clients.per_second = service->api.strangers.per_second = opts->rate;
    int rc = ka_httpd_new(service->app.loop, &conf, fd, &service->httpd, err);
    service->address_file = ka_path_join(service->folder, "address");
    if (rc == 0)
        rc = ka_file_replace(service->address_file, address, strlen(address), err);
    if (rc == 0)
        ka_log(KA_LOG_INFO, "listening on %s, state in %s", address, service->folder);
    return rc;
}

static void wipe(char **token)
{
    if (*token)
        explicit_bzero(*token, strlen(*token));
    free(*token);
    *token = NULL;
}

/* ---- what changes while it runs ---- */

/* The token of the settings that were read; -EINVAL where a port would be left without one. */
static int read_token(const struct service *service, const struct ka_opts *fresh, char **token,
                      struct ka_err *err)
{
    if (fresh->token_file)
        return ka_service_token(fresh->token_file, token, err);
    if (service->opts->address && !ka_httpd_is_unix(service->opts->address))
        return ka_fail(err, -EINVAL, "--token-file: a port wants one");
    return 0;
}

static void adopt(struct service *service, struct ka_opts *fresh)
{
    static const char *const names[] = {"jobs",      "rate",      "log-level",  "log-format", "quiet",
                                        "keep-days", "keep-runs", "token-file", NULL};
    KA_AUTO_BUF struct ka_buf left = {0};
    struct ka_opts *opts = service->opts;
    ka_opts_adopt(opts, fresh, names, &left);
    ka_logging_setup(opts);
    service->api.clients.per_second = service->api.strangers.per_second = opts->rate;
    json_object_set_new(service->api.about, "jobs", json_integer(opts->jobs));
    ka_log(KA_LOG_INFO, "the settings were read again");
    if (left.len)
        ka_log(KA_LOG_WARN, "these changes count from the next start on: %s", ka_buf_str(&left));
    ka_queue_begin(service->api.queue);
}

static void on_hangup(void *arg)
{
    struct service *service = arg;
    struct ka_opts fresh;
    struct ka_err err;
    char *token = NULL;
    if (service->draining)
        return;
    ka_notify_reloading(service->notify);
    int rc = service->read(service->read_arg, &fresh, &err);
    bool read = rc == 0;
    if (rc == 0)
        rc = read_token(service, &fresh, &token, &err);
    if (rc) {
        ka_log(KA_LOG_ERROR, "the settings stay as they are: %s", err.msg);
    } else {
        wipe(&service->token);
        service->api.token = service->token = token;
        adopt(service, &fresh);
    }
    if (read)
        ka_opts_free(&fresh);
    ka_notify_say(service->notify, "READY=1");
}

/* ---- life ---- */

static void on_drained(void *arg)
{
    struct service *service = arg;
    ka_signals_stop(service->signals);
    ka_notify_stop(service->notify);
    ka_loop_stop(service->app.loop);
}

static void on_stop(void *arg)
{
    struct service *service = arg;
    service->draining = true;
    ka_notify_say(service->notify, "STOPPING=1");
    ka_retire_stop(service->retire);
    ka_watch_stop(service->watch);
    ka_log(KA_LOG_INFO, "ending; the next service goes on with what runs (a second signal ends it at once)");
    ka_queue_drain(service->api.queue, on_drained, service);
}

static int start(struct service *service, const struct ka_opts *opts, struct ka_err *err)
{
    int fd = -1, rc = make_folder(service, opts, err);
    if (rc == 0)
        rc = ka_queue_open(&service->app, opts, service->folder, &service->api.queue, err);
    if (rc == 0)
        rc = open_socket(service, opts, &fd, err);
    if (rc == 0)
        rc = start_http(service, opts, fd, err);
    if (rc == 0 && opts->watch)
        rc = ka_watch_start(service->app.loop, service->api.queue, opts->watch, &service->watch, err);
    return rc;
}

int ka_service_run(struct ka_opts *opts, ka_service_read_fn read, void *arg, struct ka_err *err)
{
    struct service service = {.opts = opts, .read = read, .read_arg = arg};
    ka_group_step_down();
    int code = ka_app_open(&service.app, opts, true, opts->jobs, err);
    if (code == 0 && start(&service, opts, err))
        code = 2;
    if (code == 0) {
        service.signals = ka_signals_start(service.app.loop, on_stop, &service);
        ka_signals_on_hangup(service.signals, on_hangup);
        service.retire = ka_retire_start(service.app.loop, service.api.queue, opts);
        service.notify = ka_notify_start(service.app.loop);
        ka_queue_begin(service.api.queue);
        ka_notify_say(service.notify, "READY=1");
        ka_loop_run(service.app.loop);
        unlink(service.address_file);
    }
    ka_httpd_close(service.httpd);
    ka_queue_free(service.api.queue);
    json_decref(service.api.about);
    ka_app_close(&service.app);
    free(service.folder);
    free(service.address_file);
    wipe(&service.token);
    return code;
}
