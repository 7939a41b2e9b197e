/* Patches as models write them: located by context, never by faith in line numbers.
 *
 * Two spellings are read. The envelope:
 *
 *     *** Begin Patch
 *     *** Update File: softmax.py
 *     @@ def softmax_bwd
 *      context line
 *     -old line
 *     +new line
 *     *** End Patch
 *
 * (`@@ text` names a line above the hunk, several such lines nest; the hunk may begin with that line or its
 * decorators, and one of additions only goes below it. `*** Add File` replaces all that is not protected;
 * `*** End of File` pins a hunk to the end) and the unified diff, whose line numbers only choose between
 * equal matches.
 *
 * A hunk's context and removed lines are looked for exactly, then without trailing blanks, then with another
 * indentation (the same shift for every line; added lines get it too). It must match in one place: a hunk
 * that fits nowhere or in two places is an error that tells the model what to do, never a guess.
 *
 * Protected lines (the user's forward part) may be context and nothing else. Text before `*** Begin Patch`
 * and after `*** End Patch` is ignored. File names are not looked at: there is one file. */
#ifndef KA_PATCH_H
#define KA_PATCH_H

#include "base/base.h"

/* Caps on what is read; past them a patch is refused with -EFBIG. */
#define KA_PATCH_MAX_BYTES ((size_t)1 << 20)
#define KA_PATCH_MAX_LINES ((size_t)20000)
#define KA_PATCH_MAX_HUNKS ((size_t)256)

/* Apply `patch` to `text`, whose first `protected_lines` lines may not change, and append the result to `out`
 * (lines end in a newline, the last one too). All hunks are found in the original text, so their order does
 * not matter. Errors, each with a sentence naming hunk and patch line: -EINVAL not a patch, -ENOENT context
 * not found, -EEXIST found in several places, -EPERM touches the protected part, -EBUSY hunks overlap,
 * -EFBIG. `out` is then unchanged. */
int ka_patch_apply(const char *text, const char *patch, size_t protected_lines, struct ka_buf *out,
                   struct ka_err *err);

/* Does the text hold something that looks like a patch (an envelope, or a unified diff with a hunk)? */
bool ka_patch_is_in(const char *text);

#endif
