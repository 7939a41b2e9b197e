/* The run's journal. Knows lines, not their meaning. */
#include "record.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "agent/core/redact.h"
#include "base/files.h"
#include "base/log.h"

struct ka_record {
    int fd;
    char *path;
    char **secrets;
    bool failed;
};

/* After a crash in the middle of a line, start a new one. */
static int end_half_line(int fd)
{
    off_t size = lseek(fd, 0, SEEK_END);
    char last = '\n';
    if (size > 0 && pread(fd, &last, 1, size - 1) == 1 && last != '\n')
        return write(fd, "\n", 1) == 1 ? 0 : -errno;
    return 0;
}

int ka_record_open(const char *path, const char *const *secrets, struct ka_record **out, struct ka_err *err)
{
    int fd = open(path, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (fd < 0)
        return ka_fail(err, -errno, "%s: cannot write: %s", path, strerror(errno));
    int rc = end_half_line(fd);
    if (rc) {
        close(fd);
        return ka_fail(err, rc, "%s: cannot write: %s", path, strerror(-rc));
    }
    struct ka_record *record = ka_calloc(1, sizeof(*record));
    record->fd = fd;
    record->path = ka_strdup(path);
    size_t count = 0;
    while (secrets && secrets[count])
        count++;
    record->secrets = ka_calloc(count + 1, sizeof(char *));
    for (size_t i = 0; i < count; i++)
        record->secrets[i] = ka_strdup(secrets[i]);
    *out = record;
    return 0;
}

void ka_record_close(struct ka_record *record)
{
    if (!record)
        return;
    close(record->fd);
    for (char **secret = record->secrets; *secret; secret++) {
        explicit_bzero(*secret, strlen(*secret));
        free(*secret);
    }
    free(record->secrets);
    free(record->path);
    free(record);
}

static double clock_seconds(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

void ka_record_add(struct ka_record *record, const char *kind, json_t *doc)
{
    json_auto_t *line = json_pack("{s:f, s:f, s:s}", "t", clock_seconds(CLOCK_REALTIME), "cpu",
                                  clock_seconds(CLOCK_PROCESS_CPUTIME_ID), "event", kind);
    json_object_update(line, doc);
    json_decref(doc);
    KA_AUTO_FREE char *text = json_dumps(line, JSON_COMPACT);
    KA_AUTO_BUF struct ka_buf clean = {0};
    int rc = text ? ka_redact(text, (const char *const *)record->secrets, &clean) : -EINVAL;
    rc = rc ? rc : ka_buf_puts(&clean, "\n");
    rc = rc ? rc : ka_fd_write(record->fd, clean.data, clean.len);
    if (rc && !record->failed) {
        record->failed = true;
        ka_log(KA_LOG_ERROR, "%s: cannot write the run's record: %s", record->path, strerror(-rc));
    }
}
