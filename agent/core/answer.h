/* From what a model answered to a new backward text.
 *
 * A model may answer in four ways, tried in this order: tool calls (`submit_file {"content"}` with the whole
 * backward part, `submit_patch {"patch"}`; several calls apply one after the other), the last fenced block
 * that is a patch or a whole backward part, or a patch in plain text. What a model thinks aloud in
 * <think>...</think> before its answer does not count. Markdown fences inside tool arguments
 * are taken off; a forward part that comes back, recognised by the marker line, is ignored.
 *
 * Every failure is a sentence that the model can act on: send it back as it is. Pure; reads hostile bytes. */
#ifndef KA_ANSWER_H
#define KA_ANSWER_H

#include "base/base.h"
#include "chat.h"

/* A backward part longer than this is refused. */
#define KA_ANSWER_MAX_BYTES ((size_t)512 << 10)

/* The tools a request offers. */
extern const struct ka_chat_tool ka_answer_tools[];
extern const size_t ka_answer_tool_count;

/* Append the new backward part (tidied, see ka_compose_tidy) to `out`. `forward` is the forward part as the
 * model saw it, `backward` the current backward part, "" if there is none yet; a patch sees both as one pair.
 * `tools`: the one who answers has the tools above; else the messages speak of blocks and patches only, for a
 * person too. Errors: -ECONNREFUSED the model refused, -ENODATA no code or patch in it, -EPROTO a tool call
 * that cannot be read, -EINVAL code that cannot be a backward part or a patch that is none, -EALREADY nothing
 * changed, -EFBIG too long or cut by the length limit; and those of ka_patch_apply. `out` is then
 * unchanged. */
int ka_answer_apply(const struct ka_chat_answer *answer, const char *forward, const char *backward,
                    bool tools, struct ka_buf *out, struct ka_err *err);

/* Does the answer say, in place of code, that nothing is left to gain? */
#define KA_ANSWER_NOTHING "Nothing is left to gain"
bool ka_answer_is_nothing(const struct ka_chat_answer *answer);

#endif
