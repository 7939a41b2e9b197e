#include "older.h"

#include <string.h>

#include "base/base.h"

#define SERVED                                                                                               \
    "models are asked over HTTP: serve the checkpoint behind an OpenAI-compatible endpoint and name it by "  \
    "--base-url URL and --model NAME; without a model: --backend none"

static const struct ka_older rows[] = {
    {"compiler", false, "draft", "differentiator", "is --draft differentiator", false},
    {"rag", false, "no-retrieval", "false",
     "is the default: similar pairs are looked up, unless --no-retrieval is given", false},
    {"mode", true, NULL, NULL, "changes nothing: every run has the phases draft, grad-check and optimise",
     false},
    {"checkpoint", true, NULL, NULL, SERVED, true},
};

static const struct {
    char letter;
    const char *option;
} letters[] = {{'r', "reasoning-effort"}, {'c', "context-tokens"}};

const struct ka_older *ka_older_find(const char *name, size_t len)
{
    for (size_t i = 0; i < KA_COUNT(rows); i++)
        if (strlen(rows[i].name) == len && memcmp(rows[i].name, name, len) == 0)
            return &rows[i];
    return NULL;
}

const char *ka_older_letter(char letter)
{
    for (size_t i = 0; i < KA_COUNT(letters); i++)
        if (letters[i].letter == letter)
            return letters[i].option;
    return NULL;
}

const char *ka_older_backend(const char *name)
{
    static const char *const local[] = {"triton", "torch", "vllm", "stub"};
    for (size_t i = 0; i < KA_COUNT(local); i++)
        if (strcmp(local[i], name) == 0)
            return SERVED;
    return NULL;
}
