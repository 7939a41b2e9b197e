/* The settings of a run as a value. Knows nothing of what a run does with them. */
#include "settings.h"

#include <stdlib.h>
#include <string.h>

/* The texts, one after the other; NULL past the last. */
static char **text_at(struct ka_settings *s, size_t i)
{
    char **texts[] = {&s->out,   &s->sweep,           &s->rag_exclude, &s->backend,          &s->mailbox,
                      &s->model, &s->draft,           &s->prompts,     &s->device,           &s->target,
                      &s->dtype, &s->require_sandbox, &s->sanitizer,   &s->reasoning_effort, &s->path};
    return i < KA_COUNT(texts) ? texts[i] : NULL;
}

void ka_settings_copy(struct ka_settings *to, const struct ka_settings *from)
{
    *to = *from;
    for (size_t i = 0; text_at(to, i); i++)
        *text_at(to, i) = ka_strdup(*text_at(to, i));
}

void ka_settings_set(char **text, const char *value)
{
    char *copy = ka_strdup(value);
    free(*text);
    *text = copy;
}

void ka_settings_free(struct ka_settings *settings)
{
    for (size_t i = 0; text_at(settings, i); i++)
        free(*text_at(settings, i));
    memset(settings, 0, sizeof(*settings));
}
