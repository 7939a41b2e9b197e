/* A client's options, checked against the service's. Knows no HTTP. */
#include "allowed.h"

#include <errno.h>
#include <string.h>

#include "agent/app/asked.h"
#include "base/each.h"

static const char *const allowed[] = {
    "sweep",      "topk",        "min-sim",          "rag-exclude",    "no-retrieval",    "backend",
    "model",      "draft",       "max-iters",        "candidates",     "patience-parity", "patience-perf",
    "max-tokens", "max-cost",    "min-rel-impr",     "no-optimise",    "device",          "target",
    "dtype",      "max-seconds", "reasoning-effort", "context-tokens",
};

static bool is_allowed(const char *name)
{
    size_t i = 0;
    while (i < KA_COUNT(allowed) && strcmp(allowed[i], name) != 0)
        i++;
    return i < KA_COUNT(allowed);
}

/* 0 is no budget at all. */
static bool exceeds(double asked, double own)
{
    return own > 0 && (asked <= 0 || asked > own);
}

static int check_budgets(const struct ka_settings *own, const struct ka_settings *asked, struct ka_err *err)
{
    const struct {
        const char *name;
        double own, asked;
    } budgets[] = {
        {"max-iters", own->max_iters, asked->max_iters},
        {"candidates", own->candidates, asked->candidates},
        {"max-tokens", own->max_tokens, asked->max_tokens},
        {"max-seconds", own->max_seconds, asked->max_seconds},
        {"max-cost", own->max_cost, asked->max_cost},
    };
    for (size_t i = 0; i < KA_COUNT(budgets); i++)
        if (exceeds(budgets[i].asked, budgets[i].own))
            return ka_fail(err, -EINVAL, "options: %s: this service allows at most %g", budgets[i].name,
                           budgets[i].own);
    return 0;
}

static int set_all(struct ka_opts *asked, const json_t *options, struct ka_err *err)
{
    KA_EACH_MEMBER(options, name, value) {
        struct ka_err why;
        const char *text = json_string_value(value);
        if (!is_allowed(name))
            return ka_fail(err, -EINVAL, "options: '%.100s' is not for clients to set", name);
        if (strcmp(name, "backend") == 0 && ka_starts_with(text, "mailbox:"))
            return ka_fail(err, -EINVAL, "options: backend: a mailbox is not for clients to set");
        if (ka_opts_set(asked, name, text, &why))
            return ka_fail(err, -EINVAL, "options: %.900s", why.msg);
    }
    return 0;
}

int ka_allowed_settings(const struct ka_opts *service, const struct ka_app *app, const json_t *options,
                        struct ka_settings *out, struct ka_err *err)
{
    struct ka_opts asked = *service; /* what is set of it is in `run` alone */
    struct ka_settings made;
    ka_settings_copy(&asked.run, &service->run);
    asked.run.no_wait = false;
    int rc = set_all(&asked, options, err);
    if (rc == 0)
        rc = check_budgets(&service->run, &asked.run, err);
    if (rc == 0)
        rc = ka_settings_check(&asked, err);
    if (rc == 0)
        rc = ka_settings_init(&made, &asked, app, true, err);
    ka_settings_free(&asked.run);
    if (rc == 0)
        *out = made;
    return rc ? -EINVAL : 0;
}
