/* Words of two sources, and which of them are the same. Knows no store and no similarity. */
#include "common.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "base/marker.h"
#include "lex.h"

#define WORDS_MAX 256
#define SHOWN_MAX 8

struct words {
    char *items[WORDS_MAX];
    size_t count;
};

static bool is_any(const char *word, const char *const *list)
{
    for (; *list; list++)
        if (strcmp(word, *list) == 0)
            return true;
    return false;
}

static bool has(const struct words *words, const char *word)
{
    for (size_t i = 0; i < words->count; i++)
        if (strcmp(words->items[i], word) == 0)
            return true;
    return false;
}

/* Takes over `word`. */
static void add(struct words *words, char *word)
{
    static const char *const usual[] = {"tl.load",
                                        "tl.store",
                                        "tl.arange",
                                        "tl.program_id",
                                        "tl.constexpr",
                                        "tl.float32",
                                        "tl.float16",
                                        "tl.bfloat16",
                                        "tl.int32",
                                        "tl.int64",
                                        "tl.num_programs",
                                        "tl.zeros",
                                        "tl.full",
                                        "tl.where",
                                        "tl.cdiv",
                                        "tl.static_range",
                                        "tl.multiple_of",
                                        "tl.range",
                                        "tl.float64",
                                        "kernel",
                                        "fwd",
                                        "forward",
                                        "triton",
                                        "jit",
                                        "impl",
                                        "inner",
                                        "fused",
                                        NULL};
    if (words->count < WORDS_MAX && strlen(word) > 1 && !is_any(word, usual) && !has(words, word))
        words->items[words->count++] = word;
    else
        free(word);
}

/* "softmax_fwd_kernel" has three. */
static void add_name(struct words *words, const char *name)
{
    for (size_t len; *name; name += len + (name[len] == '_')) {
        len = strcspn(name, "_");
        char *word = ka_strndup(name, len);
        for (char *c = word; *c; c++)
            *c = (char)tolower((unsigned char)*c);
        add(words, word);
    }
}

static void read_words(const char *source, struct words *words)
{
    const char *below, *marker = ka_marker_find(source, strlen(source), &below);
    struct ka_tokens t = {0};
    struct ka_block block;
    if (ka_lex(source, marker ? (size_t)(marker - source) : strlen(source), &t, NULL))
        return;
    for (size_t at = 0; ka_block_next(&t, &at, &block);) {
        if (block.is_class || !ka_block_decorated(&t, &block, "jit"))
            continue;
        KA_AUTO_FREE char *name = ka_token_text(&t, block.name);
        add_name(words, name);
        for (size_t i = block.name; i + 2 < block.end; i++) {
            if (!ka_token_is(&t, i, "tl") || !ka_token_is(&t, i + 1, "."))
                continue;
            KA_AUTO_FREE char *member = ka_token_text(&t, i + 2);
            add(words, ka_format("tl.%s", member));
        }
    }
    ka_tokens_free(&t);
}

static void free_words(struct words *words)
{
    for (size_t i = 0; i < words->count; i++)
        free(words->items[i]);
}

void ka_common_words(const char *query, const char *other, struct ka_buf *out)
{
    struct words a = {.count = 0}, b = {.count = 0};
    size_t shown = 0;
    read_words(query, &a);
    read_words(other, &b);
    for (size_t i = 0; i < a.count && shown < SHOWN_MAX; i++)
        if (has(&b, a.items[i]))
            ka_buf_printf(out, "%s%s", shown++ ? ", " : "", a.items[i]);
    free_words(&a);
    free_words(&b);
}
