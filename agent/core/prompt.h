/* Prompts: the templates of prompts/ filled with the facts of a run, fitted into a token budget.
 *
 * The template language has two things. `{{name}}` is replaced by a value (without its final newlines, never
 * looked at again). `{{#name}}` ... `{{/name}}` is shown only if the value is not empty; such tags alone on
 * their line vanish with it. It is strict: an unknown name or a section that is not closed is an error with
 * file and line.
 *
 * Names that the templates may use: stub, entry, grads, device, forward, inspect, draft, draft_report,
 * candidate, verdict, facts, pairs, lessons, history, direction, tools, no_tools. The lines of `forward` and
 * `candidate` come numbered, as facts name them (place.h). Pure: templates come in as texts
 * (agent/disk/prompt_files.h reads them). */
#ifndef KA_PROMPT_H
#define KA_PROMPT_H

#include "base/base.h"
#include "chat.h"

#define KA_PROMPT_BUDGET ((size_t)60000) /* tokens, where the caller has no wish */
#define KA_PROMPT_BYTES_PER_TOKEN 3.5    /* an estimate that errs on the safe side for code */
#define KA_PROMPT_MAX_BYTES ((size_t)8 << 20)

enum ka_prompt_phase {
    KA_PROMPT_DRAFT,
    KA_PROMPT_FIX,
    KA_PROMPT_OPTIMISE,
};

enum ka_prompt_file {
    KA_PROMPT_FILE_SYSTEM,
    KA_PROMPT_FILE_DRAFT,
    KA_PROMPT_FILE_FIX,
    KA_PROMPT_FILE_OPTIMISE,
    KA_PROMPT_FILE_COUNT,
};

struct ka_prompt_template {
    const char *name; /* for errors: the path it came from */
    const char *text;
};

/* One retrieved pair. `schedule`: its tags for people, or NULL. */
struct ka_prompt_pair {
    const char *id;
    const char *schedule;
    const char *backward; /* and what it uses of the forward */
    double similarity;
    bool distant;     /* less similar than was asked for */
    const char *math; /* its docstring, or NULL */
};

/* What an earlier run taught: rag/lessons.h. */
struct ka_prompt_lesson {
    const char *kind, *finding, *change;
};

/* The facts of a run. Texts may be NULL, which is the same as empty; only `stub` and `forward` must be there.
 * No text may hold the dims or seeds of hidden shapes. */
struct ka_prompt_input {
    enum ka_prompt_phase phase;
    bool tools;          /* does the endpoint take tools? else the model is told to send a fenced block */
    const char *stub;    /* name of the stub */
    const char *grads;   /* "x, w" */
    const char *device;  /* "the CPU interpreter, compiled for sm_90" */
    const char *forward; /* source */
    const char *inspect; /* ka_describe_inspect */
    const char *draft;   /* backward part made by the differentiator */
    const char *draft_report; /* ka_describe_draft */
    const char
        *candidate; /* current backward part: what a patch applies to. In phase draft: the draft, or none */
    bool repair;    /* phase fix: the candidate was to be faster than one that is verified */
    const char *verdict; /* what failed, or what passed */
    const char *facts;   /* ka_describe_facts, timings, roofline */
    const struct ka_prompt_pair *pairs;
    size_t pair_count;
    const struct ka_prompt_lesson *lessons; /* the best first */
    size_t lesson_count;
    const char *const *history; /* one line per tried move, oldest first */
    size_t history_count;
    const char
        *direction;       /* of several questions that differ in nothing else; last, for caches of prefixes */
    size_t budget_tokens; /* 0: KA_PROMPT_BUDGET */
    double bytes_per_token; /* 0: KA_PROMPT_BYTES_PER_TOKEN */
};

/* Of the budget, what one part may take: an even larger forward, candidate or draft is worth nothing cut. */
struct ka_prompt_share {
    const char *part; /* name in the templates */
    double share;
};
extern const struct ka_prompt_share ka_prompt_shares[];
extern const size_t ka_prompt_share_count;

/* What a part adds to the messages, its heading and what explains it counted. */
struct ka_prompt_part {
    const char *name; /* "system", a name of the templates, or "instructions": the rest of the user message */
    size_t tokens;
};
#define KA_PROMPT_PARTS 13

/* Messages ready to send, and what had to be left out (for the log). Owns all of it. */
struct ka_prompt {
    struct ka_chat_message *messages;
    size_t count;
    char **dropped;
    size_t dropped_count;
    size_t tokens, budget; /* estimated */
    struct ka_prompt_part parts[KA_PROMPT_PARTS];
    size_t part_count;
    size_t lessons; /* of the input, so many of the first are shown */
};

/* Fill a template. Errors: -EINVAL with "name:line: what", -EFBIG; `out` is then unchanged. */
struct ka_prompt_var {
    const char *name;
    const char *value; /* NULL is empty */
};
int ka_prompt_render(const struct ka_prompt_template *template, const struct ka_prompt_var *vars,
                     size_t count, struct ka_buf *out, struct ka_err *err);

/* Are all templates well formed? What a program should ask once, at start. -EINVAL as above. */
int ka_prompt_check(const struct ka_prompt_template templates[KA_PROMPT_FILE_COUNT], struct ka_err *err);

/* A system and a user message for the input's phase. Pairs are listed from the most similar down. First each
 * part is held to its share: pairs go from the least similar up (never the first), lessons from the last,
 * history from the oldest, of other texts the last lines. Where the budget does not hold all then, the other
 * pairs go, then lessons, then history.
 * -E2BIG when it does not hold the rest either; -EINVAL as above. Free with ka_prompt_free; untouched on
 * failure. */
int ka_prompt_build(const struct ka_prompt_template templates[KA_PROMPT_FILE_COUNT],
                    const struct ka_prompt_input *input, struct ka_prompt *out, struct ka_err *err);

/* Append the model's answer and why it could not be used (a sentence of ka_answer_apply), so that the next
 * completion can mend it. Tool calls are answered as such, unless their arguments are no JSON, which
 * endpoints may refuse to read back: those become text. Of a text, at most KA_PROMPT_RETRY_BYTES come back;
 * calls that are longer become text as well. `answer` NULL: nothing is known of it. */
#define KA_PROMPT_RETRY_BYTES ((size_t)32 << 10)
void ka_prompt_add_retry(struct ka_prompt *prompt, const struct ka_chat_answer *answer, const char *problem);

void ka_prompt_free(struct ka_prompt *prompt); /* leaves it zeroed */

#endif
