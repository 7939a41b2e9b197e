/* Any bytes as somebody's modules, with 0x01 between them: what is made of them must be pairs. The first ends
 * with a function that reaches a kernel and whatever is imported, so that there is something to be made. */
#include <stdlib.h>
#include <string.h>

#include "base/lines.h"
#include "rag/common.h"
#include "rag/import.h"
#include "rag/pair.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char OWN[] = "\nfrom .b import *\nfrom .c.d import f as g\n@triton.jit\ndef k(x):\n    f(g(x))\n"
                          "class F(Function):\n  def forward(ctx, x):\n    k(x)\n"
                          "  def backward(ctx, d):\n    k(d)\n";

/* repo/a.py is the first, repo/b.py, repo/c/__init__.py and repo/c/d.py the next. */
static char *read_part(void *arg, const char *path)
{
    static const char *const paths[] = {"repo/a.py", "repo/b.py", "repo/c/__init__.py", "repo/c/d.py"};
    const char *text = arg;
    for (size_t i = 0; i < KA_COUNT(paths); i++) {
        size_t len = strcspn(text, "\x01");
        if (strcmp(path, paths[i]) == 0)
            return ka_format("%.*s%s", (int)len, text, i == 0 ? OWN : "");
        text += len + (text[len] != '\0');
    }
    return NULL;
}

/* Notices are comments, whatever the file's head holds. */
static void heading(void *arg, const struct ka_module *module, struct ka_buf *out)
{
    KA_AUTO_BUF struct ka_buf notices = {0};
    (void)arg;
    ka_module_notices(module, &notices);
    const char *cursor = ka_buf_str(&notices), *end = cursor + notices.len;
    struct ka_line line;
    while (ka_line_next(&cursor, end, &line))
        if (!ka_line_starts(line, "#"))
            abort();
    ka_buf_puts(out, ka_buf_str(&notices));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *text = ka_strndup((const char *)data, size);
    struct ka_follow *follow = ka_follow_new(read_part, text);
    struct ka_import_units units;
    struct ka_pair pair;
    if (ka_import_split(follow, "repo/a.py", heading, NULL, &units, NULL) == 0) {
        for (size_t i = 0; i < units.count; i++) {
            const char *source = units.items[i].source;
            if ((source == NULL) == (units.items[i].why == NULL))
                abort();
            if (source && ka_pair_parse("repo/imported/a.py", source, strlen(source), &pair, NULL) == 0)
                ka_pair_free(&pair);
        }
        ka_import_free(&units);
    }
    KA_AUTO_BUF struct ka_buf common = {0};
    ka_common_words(text, text + strcspn(text, "\x01"), &common);
    ka_follow_free(follow);
    free(text);
    return 0;
}
