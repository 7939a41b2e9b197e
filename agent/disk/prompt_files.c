/* Reading the prompt templates. Must not know what they say. */
#include "prompt_files.h"

#include "base/files.h"

#include <stdlib.h>
#include <string.h>

#define MAX_TEMPLATE_BYTES ((size_t)256 << 10)

struct ka_prompts {
    char *paths[KA_PROMPT_FILE_COUNT];
    char *texts[KA_PROMPT_FILE_COUNT];
};

int ka_prompts_load(const char *dir, struct ka_prompts **out,
                    struct ka_prompt_template templates[KA_PROMPT_FILE_COUNT], struct ka_err *err)
{
    static const char *const names[KA_PROMPT_FILE_COUNT] = {
        [KA_PROMPT_FILE_SYSTEM] = "system.md",
        [KA_PROMPT_FILE_DRAFT] = "draft.md",
        [KA_PROMPT_FILE_FIX] = "fix.md",
        [KA_PROMPT_FILE_OPTIMISE] = "optimise.md",
    };
    struct ka_prompts *prompts = ka_calloc(1, sizeof(*prompts));
    struct ka_prompt_template read[KA_PROMPT_FILE_COUNT];
    int rc = 0;
    for (int i = 0; i < KA_PROMPT_FILE_COUNT && rc == 0; i++) {
        struct ka_buf text = {0};
        prompts->paths[i] = ka_path_join(dir, names[i]);
        rc = ka_file_read(prompts->paths[i], MAX_TEMPLATE_BYTES, &text, err);
        prompts->texts[i] = ka_buf_steal(&text);
        read[i] = (struct ka_prompt_template){prompts->paths[i], prompts->texts[i]};
    }
    rc = rc ? rc : ka_prompt_check(read, err);
    if (rc) {
        ka_prompts_free(prompts);
        return rc;
    }
    memcpy(templates, read, sizeof(read));
    *out = prompts;
    return 0;
}

void ka_prompts_free(struct ka_prompts *prompts)
{
    for (int i = 0; prompts && i < KA_PROMPT_FILE_COUNT; i++) {
        free(prompts->paths[i]);
        free(prompts->texts[i]);
    }
    free(prompts);
}
