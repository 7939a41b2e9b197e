/* The prompt templates on disk: system.md, draft.md, fix.md and optimise.md of one folder, checked when they
 * are read so that a broken template is found before it is used. Blocking. */
#ifndef KA_PROMPT_FILES_H
#define KA_PROMPT_FILES_H

#include "agent/core/prompt.h"

struct ka_prompts;

/* Read and check the folder's templates. `templates` views texts that `*out` owns: free it with
 * ka_prompts_free when the templates are not needed any more. Errors: those of ka_file_read, and -EINVAL with
 * "path:line: what" for a template that is not well formed; `*out` and `templates` are then untouched. */
int ka_prompts_load(const char *dir, struct ka_prompts **out,
                    struct ka_prompt_template templates[KA_PROMPT_FILE_COUNT], struct ka_err *err);

void ka_prompts_free(struct ka_prompts *prompts); /* NULL is fine */

#endif
