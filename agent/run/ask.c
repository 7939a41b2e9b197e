/* One question to the model, over HTTP or through the mailbox, and its answer made into a candidate.
 *
 * The question is written into the state before it is sent. A run that is resumed in the middle of one asks
 * the same question again; in the mailbox that finds the answer that may lie there by now. */
#include "ask.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "agent/core/answer.h"
#include "agent/core/describe.h"
#include "agent/core/fields.h"
#include "agent/core/prompt.h"
#include "agent/core/short_diff.h"
#include "agent/disk/prompt_files.h"
#include "agent/io/mailbox.h"
#include "base/each.h"
#include "base/lines.h"
#include "base/log.h"
#include "base/utf8.h"
#include "events.h"
#include "expected.h"

/* ---- what the model is told */

static bool has_tools(const struct ka_run *run)
{
    return run->settings.answers == KA_BACKEND_OPENAI;
}

struct question {
    struct ka_prompt_input input;
    struct ka_prompt prompt;
    struct ka_snapshot current; /* what a patch applies to; zero when there is none */
    struct ka_buf inspect, draft_report, facts, grads;
    struct ka_prompt_pair *pairs;
    char **history;
    size_t history_count;
};

static void question_free(struct question *question)
{
    ka_prompt_free(&question->prompt);
    ka_snapshot_free(&question->current);
    ka_buf_free(&question->inspect);
    ka_buf_free(&question->draft_report);
    ka_buf_free(&question->facts);
    ka_buf_free(&question->grads);
    free(question->pairs);
    for (size_t i = 0; i < question->history_count; i++)
        free(question->history[i]);
    free(question->history);
}

static void tell_pairs(struct question *question, const struct ka_run *run)
{
    question->pairs = ka_calloc(json_array_size(run->retrieved), sizeof(*question->pairs));
    KA_EACH(run->retrieved, i, pair) {
        question->pairs[i] = (struct ka_prompt_pair){
            .id = json_string_value(json_object_get(pair, "id")),
            .schedule = json_string_value(json_object_get(pair, "schedule")),
            .backward = json_string_value(json_object_get(pair, "backward")),
            .math = json_string_value(json_object_get(pair, "math")),
            .distant = json_is_true(json_object_get(pair, "distant")),
            .similarity = json_number_value(json_object_get(pair, "similarity")),
        };
    }
    question->input.pairs = question->pairs;
    question->input.pair_count = json_array_size(run->retrieved);
}

/* Does the file in hand, snapshot `id`, build on that candidate? */
static bool builds_on(const struct ka_run *run, int64_t id, int64_t candidate)
{
    while (id && id != candidate) {
        struct ka_snapshot snapshot;
        if (ka_state_snapshot_head(run->state, id, &snapshot, NULL))
            return false;
        id = snapshot.parent < id ? snapshot.parent : 0;
        ka_snapshot_free(&snapshot);
    }
    return id != 0;
}

#define DIFF_LINES 14 /* of an idea that did not work */

/* What an attempt that was not kept had changed, indented below its line. */
static void tell_change(const struct ka_run *run, int64_t id, struct ka_buf *out)
{
    struct ka_snapshot tried = {0}, from = {0};
    KA_AUTO_BUF struct ka_buf diff = {0};
    if (ka_state_snapshot_head(run->state, id, &tried, NULL))
        return;
    if (tried.parent && tried.parent < id &&
        ka_state_snapshot_head(run->state, tried.parent, &from, NULL) == 0)
        ka_short_diff(from.backward, tried.backward, DIFF_LINES, &diff);
    if (diff.len)
        ka_buf_puts(out, "\n  What it changed:\n");
    const char *cursor = ka_buf_str(&diff), *end = cursor + diff.len;
    struct ka_line line;
    while (ka_line_next(&cursor, end, &line))
        ka_buf_printf(out, "      %.*s%s", (int)line.len, line.at, cursor < end ? "\n" : "");
    ka_snapshot_free(&tried);
    ka_snapshot_free(&from);
}

/* Of an attempt that was not kept: a model's idea that is not to be had again. */
static bool is_lost(const json_t *told)
{
    return ka_is_text(told, "origin", "llm") &&
           (json_is_false(json_object_get(told, "verified")) || json_is_false(json_object_get(told, "kept")));
}

/* An attempt in one line: what was tried and what came of it; and what it changed where that was lost. The
 * candidates of the turn under way are not judged yet. */
static void tell_history(struct question *question, const struct ka_run *run)
{
    const struct ka_job *job = &run->job;
    size_t count = json_array_size(run->history);
    size_t open =
        job->turn_left < job->limits.candidates ? (size_t)(job->limits.candidates - job->turn_left) : 0;
    question->history = ka_calloc(count, sizeof(char *));
    KA_EACH(run->history, i, entry) {
        struct ka_buf line = {0};
        json_auto_t *told = json_copy(entry);
        if (ka_is_text(entry, "phase", "optimise") && i + open < count)
            json_object_set_new(
                told, "kept",
                json_boolean(
                    builds_on(run, job->current, json_integer_value(json_object_get(entry, "snapshot")))));
        ka_describe_attempt(told, &line);
        if (is_lost(told))
            tell_change(run, json_integer_value(json_object_get(entry, "snapshot")), &line);
        question->history[question->history_count++] = ka_buf_steal(&line);
    }
    question->input.history = (const char *const *)question->history;
    question->input.history_count = question->history_count;
}

static void tell_grads(struct question *question, const struct ka_run *run)
{
    KA_EACH(run->grads, i, name)
        ka_buf_printf(&question->grads, "%s%s", i ? ", " : "", json_string_value(name));
    question->input.grads = ka_buf_str(&question->grads);
}

static enum ka_prompt_phase prompt_phase(enum ka_job_phase phase)
{
    switch (phase) {
    case KA_PHASE_DRAFT:
        return KA_PROMPT_DRAFT;
    case KA_PHASE_FIX:
        return KA_PROMPT_FIX;
    case KA_PHASE_OPTIMISE:
        break;
    }
    return KA_PROMPT_OPTIMISE;
}

static int question_build(struct question *question, struct ka_run *run, enum ka_job_phase phase,
                          int64_t snapshot, struct ka_err *err)
{
    struct ka_prompt_template templates[KA_PROMPT_FILE_COUNT];
    struct ka_prompts *files = NULL;
    int rc = snapshot ? ka_state_snapshot_get(run->state, snapshot, &question->current, err) : 0;
    if (rc)
        return rc;
    const char *draft = json_string_value(json_object_get(run->draft, "backward"));
    bool gpu = strcmp(run->settings.device, "cuda") == 0;
    struct ka_prompt_input *input = &question->input;
    input->phase = prompt_phase(phase);
    input->tools = has_tools(run);
    input->stub = json_string_value(json_object_get(json_object_get(run->inspect, "stub"), "name"));
    input->device = gpu ? "an NVIDIA GPU"
                        : "the CPU interpreter of Triton, and compiled for the target without running there";
    input->forward = run->forward;
    ka_describe_inspect(run->inspect, &question->inspect);
    ka_describe_shapes(run->shapes, &question->inspect);
    input->inspect = ka_buf_str(&question->inspect);
    bool shown = question->current.backward && draft && strcmp(question->current.backward, draft) == 0;
    input->draft = phase == KA_PHASE_DRAFT || (phase == KA_PHASE_FIX && !shown) ? draft : NULL;
    if (run->draft)
        ka_describe_draft(run->draft, &question->draft_report);
    input->draft_report = ka_buf_str(&question->draft_report);
    input->candidate = question->current.backward;
    input->verdict = json_string_value(json_object_get(question->current.verdict, "facts"));
    if (question->current.facts)
        ka_describe_facts(question->current.facts, &question->facts);
    input->facts = ka_buf_str(&question->facts);
    input->budget_tokens = (size_t)run->settings.context_tokens;
    tell_grads(question, run);
    tell_pairs(question, run);
    tell_history(question, run);
    rc = ka_prompts_load(run->settings.prompts, &files, templates, err);
    if (rc == 0)
        rc = ka_prompt_build(templates, input, &question->prompt, err);
    ka_prompts_free(files);
    return rc;
}

/* ---- what came back */

static void count_tokens(struct ka_run *run, long in, long out)
{
    ka_number_add(run->totals, "requests", 1);
    ka_number_add(run->totals, "tokens_in", in > 0 ? in : 0);
    ka_number_add(run->totals, "tokens_out", out > 0 ? out : 0);
}

static json_t *answer_json(const struct ka_chat_answer *answer)
{
    json_t *calls = json_array();
    for (size_t i = 0; i < answer->call_count; i++)
        json_array_append_new(calls,
                              json_pack("{s:s?, s:s?, s:s?}", "id", answer->calls[i].id, "name",
                                        answer->calls[i].name, "arguments", answer->calls[i].arguments));
    return json_pack("{s:s?, s:s?, s:s?, s:s?, s:o}", "text", answer->text, "refusal", answer->refusal,
                     "finish_reason", answer->finish_reason, "model", answer->model, "calls", calls);
}

/* Borrows all texts from `doc`; only `calls` is to be freed. */
static struct ka_chat_answer answer_of_json(const json_t *doc)
{
    json_t *calls = json_object_get(doc, "calls");
    struct ka_chat_answer answer = {
        .text = (char *)json_string_value(json_object_get(doc, "text")),
        .refusal = (char *)json_string_value(json_object_get(doc, "refusal")),
        .calls = ka_calloc(json_array_size(calls), sizeof(*answer.calls)),
        .call_count = json_array_size(calls),
    };
    KA_EACH(calls, i, call) {
        answer.calls[i] = (struct ka_chat_call){
            .id = (char *)json_string_value(json_object_get(call, "id")),
            .name = (char *)ka_text_of(call, "name", "?"),
            .arguments = (char *)json_string_value(json_object_get(call, "arguments")),
        };
    }
    return answer;
}

/* What the next question has to tell of the last answer; it is saved, so that a resumed run asks the same.
 * `answer` NULL: it could not be read. `problem` NULL: it was good. */
static void set_feedback(struct ka_run *run, const char *problem, const struct ka_chat_answer *answer)
{
    json_t *doc = problem ? json_pack("{s:s, s:o}", "problem", problem, "answer",
                                      answer ? answer_json(answer) : json_null())
                          : json_null();
    json_decref(run->feedback);
    run->feedback = doc;
    ka_run_put(run, "feedback", doc);
}

static void tell_feedback(const struct ka_run *run, struct ka_prompt *prompt)
{
    const char *problem = json_string_value(json_object_get(run->feedback, "problem"));
    json_t *doc = json_object_get(run->feedback, "answer");
    if (!problem)
        return;
    struct ka_chat_answer answer = answer_of_json(doc);
    ka_prompt_add_retry(prompt, json_is_object(doc) ? &answer : NULL, problem);
    free(answer.calls);
}

/* The first paragraph of prose in the answer: what the model says it did. */
static void note_of(const struct ka_chat_answer *answer, char *out, size_t size)
{
    const char *text = answer->text ? answer->text : "";
    text += strspn(text, " \t\r\n#");
    size_t len = 0;
    while (text[len]) {
        const char *line = text + len;
        size_t end = strcspn(line, "\n");
        if (strspn(line, " \t\r") == end || ka_starts_with(line, "```") || ka_starts_with(line, "*** "))
            break;
        len += end + (line[end] == '\n');
    }
    ka_utf8_line(text, len, out, size);
}

static void take_answer(struct ka_run *run, const struct ka_chat_answer *answer)
{
    struct ka_snapshot current = {0};
    KA_AUTO_BUF struct ka_buf backward = {0};
    struct ka_err err;
    ka_record_add(run->record, "answer", answer_json(answer));
    if (run->job.current && ka_state_snapshot_head(run->state, run->job.current, &current, &err))
        ka_log(KA_LOG_ERROR, "%s: %s", run->name, err.msg);
    if (run->job.phase == KA_PHASE_OPTIMISE && ka_answer_is_nothing(answer)) {
        ka_snapshot_free(&current);
        ka_log(KA_LOG_INFO, "%s: the model sees nothing left to gain", run->name);
        set_feedback(run, NULL, NULL);
        ka_run_post_type(run, KA_EV_NO_CANDIDATE);
        return;
    }
    int rc = ka_answer_apply(answer, run->forward, current.backward ? current.backward : "", has_tools(run),
                             &backward, &err);
    ka_snapshot_free(&current);
    if (rc) {
        ka_log(KA_LOG_INFO, "%s: the answer cannot be used: %s", run->name, err.msg);
        ka_record_add(run->record, "bad_answer", json_pack("{s:s}", "problem", err.msg));
        set_feedback(run, err.msg, answer);
        ka_run_post_type(run, KA_EV_BAD_ANSWER);
        return;
    }
    char note[280];
    note_of(answer, note, sizeof(note));
    set_feedback(run, NULL, NULL);
    ka_run_post_candidate(run, ka_buf_str(&backward), "llm", note);
}

/* ---- over HTTP */

static void on_trace(void *arg, const char *event, const char *text)
{
    struct ka_run *run = arg;
    ka_record_add(run->record, "llm_trace", json_pack("{s:s, s:s}", "what", event, "text", text));
}

static void on_llm(void *arg, uint64_t op, const struct ka_llm_result *result)
{
    struct ka_run *run = arg;
    if (result->status == KA_LLM_CANCELLED || op != run->llm_op)
        return; /* the run is being interrupted or freed */
    run->llm_op = 0;
    count_tokens(run, result->tokens_in, result->tokens_out);
    ka_record_add(run->record, "llm",
                  json_pack("{s:i, s:s, s:I, s:I, s:f, s:I, s:I}", "status", (int)result->status, "message",
                            result->message, "http", (json_int_t)result->http_status, "tries",
                            (json_int_t)result->attempts, "seconds", result->seconds, "tokens_in",
                            (json_int_t)result->tokens_in, "tokens_out", (json_int_t)result->tokens_out));
    if (result->status == KA_LLM_OK)
        take_answer(run, result->answer);
    else
        ka_run_fail(run, KA_EV_LLM_FAILED, "llm", "%s", result->message);
}

static void send_http(struct ka_run *run, const struct ka_prompt *prompt)
{
    struct ka_err err;
    struct ka_chat_request request = {
        .model = run->settings.model,
        .messages = prompt->messages,
        .message_count = prompt->count,
        .tools = ka_answer_tools,
        .tool_count = ka_answer_tool_count,
        .reasoning_effort = run->settings.reasoning_effort[0] ? run->settings.reasoning_effort : NULL,
        .stream = true,
    };
    if (ka_llm_start(run->app->llm, &request, on_trace, on_llm, run, &run->llm_op, &err))
        ka_run_fail(run, KA_EV_INTERNAL, "internal", "%s", err.msg);
}

/* ---- through the mailbox */

static void take_mail(struct ka_run *run, int rc, const struct ka_chat_answer *answer, const char *problem)
{
    free(run->waiting_for);
    run->waiting_for = NULL;
    if (rc == 0) {
        count_tokens(run, answer->tokens_in, answer->tokens_out);
        take_answer(run, answer);
        return;
    }
    count_tokens(run, 0, 0);
    ka_record_add(run->record, "bad_answer", json_pack("{s:s}", "problem", problem));
    set_feedback(run, problem, NULL);
    ka_log(KA_LOG_WARN, "%s: %s", run->name, problem);
    ka_run_post_type(run, KA_EV_BAD_ANSWER);
}

static void on_mail(void *arg, int rc, struct ka_chat_answer *answer, const char *message)
{
    if (rc == -ECANCELED)
        return; /* the run is being interrupted or freed */
    struct ka_run *run = arg;
    run->mail = NULL;
    take_mail(run, rc, answer, message);
}

static struct ka_mailbox mailbox_of(const struct ka_run *run)
{
    /* Who says --resume --no-wait has finished writing; while watching, an answer may still grow. */
    return (struct ka_mailbox){
        .dir = run->settings.mailbox,
        .run = strrchr(run->dir, '/') + 1,
        .settle_ms = run->settings.no_wait ? 0 : 1000,
        .every_ms = 1000,
    };
}

static void remember_request(struct ka_run *run, const struct ka_mailbox *box, unsigned number)
{
    free(run->waiting_for);
    run->waiting_for = ka_format("%s/%s-%03u.request.md", box->dir, box->run, number);
}

/* --no-wait: take the answer that is there, or end the process with the question put. */
static void look_once(struct ka_run *run, const struct ka_mailbox *box, unsigned number)
{
    struct ka_chat_answer answer = {0};
    struct ka_err err;
    int rc = ka_mailbox_poll(box, number, NULL, &answer, &err);
    if (rc != -EAGAIN) {
        take_mail(run, rc, &answer, err.msg);
        ka_chat_answer_free(&answer);
        return;
    }
    run->waiting = run->finished = true;
    ka_log(KA_LOG_INFO, "%s: the question is in %s; answer it, then use --resume", run->name,
           run->waiting_for);
    ka_record_add(run->record, "waiting", json_pack("{s:s}", "request", run->waiting_for));
    run->done(run, true, run->arg);
}

static void send_mailbox(struct ka_run *run, const struct ka_prompt *prompt)
{
    struct ka_err err;
    struct ka_mailbox box = mailbox_of(run);
    unsigned number = (unsigned)run->job.iters;
    struct ka_chat_request request = {
        .model = run->settings.model,
        .messages = prompt->messages,
        .message_count = prompt->count,
    };
    int rc = ka_mailbox_write(&box, number, &request, &err);
    remember_request(run, &box, number);
    if (rc && rc != -EEXIST) { /* answered before the process was ended: the answer is taken */
        ka_run_fail(run, KA_EV_LLM_FAILED, "llm", "%s", err.msg);
        return;
    }
    if (run->settings.no_wait) {
        look_once(run, &box, number);
        return;
    }
    ka_log(KA_LOG_INFO, "%s: waiting for an answer to %s", run->name, run->waiting_for);
    if (ka_mailbox_watch(run->app->loop, &box, number, on_mail, run, &run->mail, &err))
        ka_run_fail(run, KA_EV_INTERNAL, "internal", "%s", err.msg);
}

/* ---- one turn */

static json_t *messages_json(const struct ka_prompt *prompt)
{
    json_t *list = json_array();
    for (size_t i = 0; i < prompt->count; i++)
        json_array_append_new(list, json_pack("{s:s, s:s}", "role", prompt->messages[i].role, "content",
                                              prompt->messages[i].content));
    return list;
}

static json_t *question_json(const struct ka_run *run, const struct question *question,
                             enum ka_job_phase phase)
{
    const struct ka_prompt *prompt = &question->prompt;
    json_t *parts = json_array(), *left_out = json_array();
    for (size_t i = 0; i < prompt->part_count; i++)
        json_array_append_new(parts, json_pack("{s:s, s:I}", "name", prompt->parts[i].name, "tokens",
                                               (json_int_t)prompt->parts[i].tokens));
    for (size_t i = 0; i < prompt->dropped_count; i++)
        json_array_append_new(left_out, json_string(prompt->dropped[i]));
    return json_pack("{s:s, s:s, s:s, s:I, s:I, s:f, s:o, s:o, s:o}", "file", run->file, "stub",
                     question->input.stub, "phase", ka_job_phase_name(phase), "tokens",
                     (json_int_t)prompt->tokens, "budget", (json_int_t)prompt->budget, "bytes_per_token",
                     KA_PROMPT_BYTES_PER_TOKEN, "parts", parts, "left_out", left_out, "messages",
                     messages_json(prompt));
}

/* The run is over, and what it would have asked is kept. */
static void end_at(struct ka_run *run, const struct question *question, enum ka_job_phase phase)
{
    run->question = question_json(run, question, phase);
    run->waiting = run->finished = true;
    run->done(run, true, run->arg);
}

void ka_run_ask(struct ka_run *run, enum ka_job_phase phase, int64_t snapshot)
{
    struct question question = {0};
    struct ka_err err;
    if (question_build(&question, run, phase, snapshot, &err)) {
        question_free(&question);
        ka_run_fail(run, KA_EV_INTERNAL, "internal", "%s", err.msg);
        return;
    }
    for (size_t i = 0; i < question.prompt.dropped_count; i++)
        ka_log(KA_LOG_INFO, "%s: left out of the prompt: %s", run->name, question.prompt.dropped[i]);
    if (run->ends_at_question) {
        end_at(run, &question, phase);
        question_free(&question);
        return;
    }
    tell_feedback(run, &question.prompt);
    ka_log_progress(run->name, "%s: asking the model (%d of %d, about %zu tokens)", ka_job_phase_name(phase),
                    run->job.iters, run->job.limits.max_iters, question.prompt.tokens);
    ka_record_add(run->record, "prompt",
                  json_pack("{s:s, s:o}", "phase", ka_job_phase_name(phase), "messages",
                            messages_json(&question.prompt)));
    if (!run->settings.no_wait) /* the oracle works while the model thinks */
        ka_expected_prepare(run);
    if (run->settings.answers == KA_BACKEND_MAILBOX)
        send_mailbox(run, &question.prompt);
    else
        send_http(run, &question.prompt);
    question_free(&question);
}

void ka_run_ask_cancel(struct ka_run *run)
{
    uint64_t op = run->llm_op;
    run->llm_op = 0;
    if (op)
        ka_llm_cancel(run->app->llm, op);
    if (run->mail)
        ka_mailbox_stop(run->mail);
    run->mail = NULL;
}
