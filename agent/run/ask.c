/* The questions of a turn to the model, over HTTP or through the mailbox, and answers made into candidates.
 *
 * What a question says follows from the state at the beginning of its turn, and from its slot. A run that is
 * resumed in the middle of one asks the same question again; in the mailbox that finds the answer that may
 * lie there by now. */
#include "ask.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "agent/core/answer.h"
#include "agent/core/describe.h"
#include "agent/core/direction.h"
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
#include "history.h"
#include "learn.h"

/* ---- what the model is told */

static bool has_tools(const struct ka_run *run)
{
    return run->settings.answers == KA_BACKEND_OPENAI;
}

struct question {
    struct ka_prompt_input input;
    struct ka_prompt prompt;
    struct ka_snapshot current; /* what a patch applies to; zero when there is none */
    struct ka_buf inspect, draft_report, facts, grads, direction;
    struct ka_prompt_pair *pairs;
    json_t *lessons; /* those that there is a place for if they fit */
    struct ka_prompt_lesson *told;
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
    ka_buf_free(&question->direction);
    free(question->pairs);
    json_decref(question->lessons);
    free(question->told);
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

static void tell_lessons(struct question *question, const struct ka_run *run)
{
    question->lessons = ka_run_lessons_for(run, question->current.verdict);
    question->told = ka_calloc(json_array_size(question->lessons), sizeof(*question->told));
    KA_EACH(question->lessons, i, lesson)
        question->told[i] = (struct ka_prompt_lesson){.kind = ka_text_of(lesson, "kind", ""),
                                                      .finding = ka_text_of(lesson, "finding", ""),
                                                      .change = ka_text_of(lesson, "change", "")};
    question->input.lessons = question->told;
    question->input.lesson_count = json_array_size(question->lessons);
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

/* What an attempt that was not kept had changed, indented below its line; of one that was written anew among
 * others of its turn, what it has that the one in hand has not. */
static void tell_change(const struct question *question, const struct ka_run *run, const json_t *told,
                        struct ka_buf *out)
{
    struct ka_snapshot tried = {0}, from = {0};
    KA_AUTO_BUF struct ka_buf diff = {0};
    int64_t id = json_integer_value(json_object_get(told, "snapshot"));
    bool anew = false;
    if (ka_state_snapshot_head(run->state, id, &tried, NULL))
        return;
    if (tried.parent && tried.parent < id &&
        ka_state_snapshot_head(run->state, tried.parent, &from, NULL) == 0)
        ka_short_diff(from.backward, tried.backward, DIFF_LINES, &diff);
    else if ((anew = !tried.parent && json_object_get(told, "direction") && question->current.backward))
        ka_short_diff(question->current.backward, tried.backward, DIFF_LINES, &diff);
    if (diff.len)
        ka_buf_puts(out, anew ? "\n  How it differs from the current file:\n" : "\n  What it changed:\n");
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
    return ka_is_text(told, "origin", "llm") && json_object_get(told, "snapshot") &&
           (json_is_false(json_object_get(told, "verified")) || json_is_false(json_object_get(told, "kept")));
}

/* An attempt in one line: what was tried and what came of it; and what it changed where that was lost. What
 * the turn under way has brought so far is not told: its questions say the same whenever they are put. */
static void tell_history(struct question *question, const struct ka_run *run)
{
    const struct ka_job *job = &run->job;
    bool moves = false; /* what comes after a verified attempt */
    question->history = ka_calloc(json_array_size(run->history), sizeof(char *));
    KA_EACH(run->history, i, entry) {
        struct ka_buf line = {0};
        json_auto_t *told = json_copy(entry);
        json_t *id = json_object_get(entry, "snapshot");
        if (json_integer_value(json_object_get(entry, "turn")) == job->turn)
            continue;
        bool verified = json_is_true(json_object_get(entry, "verified"));
        bool held = id && builds_on(run, job->current, json_integer_value(id));
        if (id && (moves ? verified || !held : json_object_get(entry, "direction") != NULL))
            json_object_set_new(told, "kept", json_boolean(held)); /* a repair holds on to what is wrong */
        moves = moves || verified;
        ka_describe_attempt(told, &line);
        if (is_lost(told))
            tell_change(question, run, told, &line);
        question->history[question->history_count++] = ka_buf_steal(&line);
    }
    question->input.history = (const char *const *)question->history;
    question->input.history_count = question->history_count;
}

static void tell_direction(struct question *question, const struct ka_job *job, int slot)
{
    if (job->slot_count < 2)
        return;
    ka_direction(job->phase, job->turn, slot, &question->direction);
    question->input.direction = ka_buf_str(&question->direction);
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

static int question_build(struct question *question, struct ka_run *run, int slot, struct ka_err *err)
{
    const enum ka_job_phase phase = run->job.phase;
    const int64_t snapshot = run->job.current;
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
    input->repair = ka_job_repairs(&run->job);
    input->verdict = json_string_value(json_object_get(question->current.verdict, "facts"));
    if (question->current.facts)
        ka_describe_facts(question->current.facts, &question->facts);
    input->facts = ka_buf_str(&question->facts);
    input->budget_tokens = (size_t)run->settings.context_tokens;
    tell_grads(question, run);
    tell_pairs(question, run);
    tell_lessons(question, run);
    tell_history(question, run);
    tell_direction(question, &run->job, slot);
    rc = ka_prompts_load(run->settings.prompts, &files, templates, err);
    if (rc == 0)
        rc = ka_prompt_build(templates, input, &question->prompt, err);
    ka_prompts_free(files);
    return rc;
}

/* ---- what came back */

static void count_tokens(struct ka_run *run, long in, long out, long cached)
{
    ka_number_add(run->totals, "requests", 1);
    ka_number_add(run->totals, "tokens_cached", cached > 0 ? cached : 0);
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

/* An answer that is no use: its slot's next question has to tell of it, if the turn asks once more, and
 * questions of later turns. It is saved, so that a resumed run asks the same. `answer` NULL: it could not be
 * read. */
static void refuse(struct ka_run *run, int slot, const char *problem, const struct ka_chat_answer *answer)
{
    const struct ka_job *job = &run->job;
    char key[16];
    snprintf(key, sizeof(key), "%d", slot);
    json_object_set_new(run->feedback, key,
                        json_pack("{s:i, s:s, s:o}", "turn", job->turn, "problem", problem, "answer",
                                  answer ? answer_json(answer) : json_null()));
    ka_run_put(run, "feedback", run->feedback);
    ka_record_add(run->record, "bad_answer",
                  json_pack("{s:i, s:s}", "question", job->slots[slot].question, "problem", problem));
    if (job->slot_count > 1)
        ka_run_history_add(run, slot,
                           json_pack("{s:s, s:s, s:s}", "phase", ka_job_phase_name(job->phase), "origin",
                                     "llm", "unusable", problem));
    ka_run_post_answer(run, KA_EV_BAD_ANSWER, slot);
}

static void tell_feedback(const struct ka_run *run, int slot, struct ka_prompt *prompt)
{
    char key[16];
    snprintf(key, sizeof(key), "%d", slot);
    const json_t *feedback = json_object_get(run->feedback, key);
    const char *problem = json_string_value(json_object_get(feedback, "problem"));
    json_t *doc = json_object_get(feedback, "answer");
    if (!problem || json_integer_value(json_object_get(feedback, "turn")) != run->job.turn)
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

static void take_answer(struct ka_run *run, int slot, const struct ka_chat_answer *answer)
{
    struct ka_snapshot current = {0};
    KA_AUTO_BUF struct ka_buf backward = {0};
    struct ka_err err;
    json_t *heard = answer_json(answer);
    json_object_set_new(heard, "question", json_integer(run->job.slots[slot].question));
    ka_record_add(run->record, "answer", heard);
    if (run->job.phase == KA_PHASE_OPTIMISE && ka_answer_is_nothing(answer)) {
        ka_log(KA_LOG_INFO, "%s: the model sees nothing left to gain", run->name);
        ka_run_post_answer(run, KA_EV_NO_CANDIDATE, slot);
        return;
    }
    if (run->job.current && ka_state_snapshot_head(run->state, run->job.current, &current, &err))
        ka_log(KA_LOG_ERROR, "%s: %s", run->name, err.msg);
    int rc = ka_answer_apply(answer, run->forward, current.backward ? current.backward : "", has_tools(run),
                             &backward, &err);
    ka_snapshot_free(&current);
    if (rc) {
        ka_log(KA_LOG_INFO, "%s: the answer cannot be used: %s", run->name, err.msg);
        refuse(run, slot, err.msg, answer);
        return;
    }
    char note[280];
    note_of(answer, note, sizeof(note));
    ka_run_post_candidate(run, slot, ka_buf_str(&backward), "llm", note, false);
}

/* The endpoint, or the mailbox, has none: the turn goes on with the answers to its other questions.
 * `refused`: the same request will not be taken later either. */
static void without_answer(struct ka_run *run, int slot, const char *message, bool refused)
{
    json_decref(run->failure);
    run->failure = json_pack("{s:s, s:s}", "kind", "llm", "message", message);
    if (refused)
        json_object_set_new(run->failure, "refused", json_true());
    ka_run_put(run, "failure", run->failure);
    ka_record_add(run->record, "failure", json_copy(run->failure));
    if (run->job.slot_count > 1)
        ka_log(KA_LOG_WARN, "%s: question %d has no answer: %s", run->name, run->job.slots[slot].question,
               message);
    ka_run_post_answer(run, KA_EV_LLM_FAILED, slot);
}

/* ---- over HTTP */

static void on_trace(void *arg, const char *event, const char *text)
{
    const struct ka_asked *asked = arg;
    if (strcmp(event, "adapt") == 0 || strcmp(event, "next") == 0)
        ka_log(KA_LOG_INFO, "%s: question %d: %s", asked->run->name, asked->question, text);
    ka_record_add(asked->run->record, "llm_trace",
                  json_pack("{s:i, s:s, s:s}", "question", asked->question, "what", event, "text", text));
}

static void on_llm(void *arg, uint64_t op, const struct ka_llm_result *result)
{
    struct ka_asked *asked = arg;
    if (result->status == KA_LLM_CANCELLED || op != asked->llm_op)
        return; /* the run is being interrupted or freed */
    struct ka_run *run = asked->run;
    asked->llm_op = 0;
    count_tokens(run, result->tokens_in, result->tokens_out, result->tokens_cached);
    ka_record_add(run->record, "llm",
                  json_pack("{s:i, s:i, s:s, s:s, s:I, s:I, s:f, s:I, s:I, s:I}", "question", asked->question,
                            "status", (int)result->status, "message", result->message, "endpoint",
                            result->endpoint, "http", (json_int_t)result->http_status, "tries",
                            (json_int_t)result->attempts, "seconds", result->seconds, "tokens_in",
                            (json_int_t)result->tokens_in, "tokens_out", (json_int_t)result->tokens_out,
                            "tokens_cached", (json_int_t)result->tokens_cached));
    if (result->status == KA_LLM_OK)
        take_answer(run, asked->slot, result->answer);
    else
        without_answer(run, asked->slot, result->message, result->status == KA_LLM_REFUSED_BY_ENDPOINT);
}

static void send_http(struct ka_run *run, struct ka_asked *asked, const struct ka_prompt *prompt)
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
    if (ka_llm_start(run->app->llm, &request, on_trace, on_llm, asked, &asked->llm_op, &err))
        ka_run_fail(run, KA_EV_INTERNAL, "internal", "%s", err.msg);
}

/* ---- through the mailbox */

static void take_mail(struct ka_run *run, int slot, int rc, const struct ka_chat_answer *answer,
                      const char *problem)
{
    free(run->waiting_for);
    run->waiting_for = NULL;
    if (rc == 0) {
        count_tokens(run, answer->tokens_in, answer->tokens_out, answer->tokens_cached);
        take_answer(run, slot, answer);
        return;
    }
    count_tokens(run, 0, 0, 0);
    ka_log(KA_LOG_WARN, "%s: %s", run->name, problem);
    refuse(run, slot, problem, NULL);
}

static void on_mail(void *arg, int rc, struct ka_chat_answer *answer, const char *message)
{
    if (rc == -ECANCELED)
        return; /* the run is being interrupted or freed */
    struct ka_asked *asked = arg;
    asked->mail = NULL;
    take_mail(asked->run, asked->slot, rc, answer, message);
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

static char *request_path(const struct ka_mailbox *box, int question)
{
    return ka_format("%s/%s-%03d.request.md", box->dir, box->run, question);
}

static void send_mailbox(struct ka_run *run, struct ka_asked *asked, const struct ka_prompt *prompt)
{
    struct ka_err err;
    struct ka_mailbox box = mailbox_of(run);
    KA_AUTO_FREE char *path = request_path(&box, asked->question);
    unsigned number = (unsigned)asked->question;
    struct ka_chat_request request = {
        .model = run->settings.model,
        .messages = prompt->messages,
        .message_count = prompt->count,
    };
    int rc = ka_mailbox_write(&box, number, &request, &err);
    if (rc && rc != -EEXIST) { /* answered before the process was ended: the answer is taken */
        without_answer(run, asked->slot, err.msg, false);
        return;
    }
    if (run->settings.no_wait)
        return;
    ka_log(KA_LOG_INFO, "%s: waiting for an answer to %s", run->name, path);
    if (ka_mailbox_watch(run->app->loop, &box, number, on_mail, asked, &asked->mail, &err))
        ka_run_fail(run, KA_EV_INTERNAL, "internal", "%s", err.msg);
}

void ka_run_await(struct ka_run *run)
{
    if (run->settings.answers != KA_BACKEND_MAILBOX || !run->settings.no_wait || run->finished ||
        run->job.state == KA_JOB_CHECK)
        return;
    struct ka_mailbox box = mailbox_of(run);
    struct ka_err err;
    int first = -1;
    for (int i = 0; i < KA_JOB_SLOTS; i++) {
        struct ka_chat_answer answer = {0};
        if (!ka_job_is_open(&run->job, i))
            continue;
        int rc = ka_mailbox_poll(&box, (unsigned)run->job.slots[i].question, NULL, &answer, &err);
        if (rc != -EAGAIN) { /* what comes next looks for further ones */
            take_mail(run, i, rc, &answer, err.msg);
            ka_chat_answer_free(&answer);
            return;
        }
        first = first < 0 ? i : first;
        KA_AUTO_FREE char *path = request_path(&box, run->job.slots[i].question);
        ka_log(KA_LOG_INFO, "%s: the question is in %s; answer it, then use --resume", run->name, path);
    }
    if (first < 0)
        return;
    run->waiting_for = request_path(&box, run->job.slots[first].question);
    run->waiting = run->finished = true;
    ka_record_add(run->record, "waiting", json_pack("{s:s}", "request", run->waiting_for));
    run->done(run, true, run->arg);
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

static void put_question(struct ka_run *run, int slot)
{
    const enum ka_job_phase phase = run->job.phase;
    struct ka_asked *asked = &run->asked[slot];
    struct question question = {0};
    struct ka_err err;
    if (question_build(&question, run, slot, &err)) {
        question_free(&question);
        ka_run_fail(run, KA_EV_INTERNAL, "internal", "%s", err.msg);
        return;
    }
    asked->question = run->job.slots[slot].question;
    for (size_t i = 0; i < question.prompt.dropped_count; i++)
        ka_log(KA_LOG_INFO, "%s: left out of the prompt: %s", run->name, question.prompt.dropped[i]);
    if (run->ends_at_question) {
        end_at(run, &question, phase);
        question_free(&question);
        return;
    }
    if (json_array_size(question.lessons))
        ka_run_lessons_told(run, slot, question.current.verdict, question.lessons, question.prompt.lessons);
    tell_feedback(run, slot, &question.prompt);
    ka_log_progress(run->name, "%s: asking the model (%d of %d, about %zu tokens)", ka_job_phase_name(phase),
                    asked->question, run->job.limits.max_iters, question.prompt.tokens);
    ka_record_add(run->record, "prompt",
                  json_pack("{s:i, s:s, s:o}", "question", asked->question, "phase", ka_job_phase_name(phase),
                            "messages", messages_json(&question.prompt)));
    if (run->settings.answers == KA_BACKEND_MAILBOX)
        send_mailbox(run, asked, &question.prompt);
    else
        send_http(run, asked, &question.prompt);
    question_free(&question);
}

void ka_run_ask(struct ka_run *run)
{
    for (int i = 0; i < KA_JOB_SLOTS && !run->finished; i++) {
        if (!ka_job_is_open(&run->job, i))
            continue;
        if (run->job.state != KA_JOB_CHECK && !run->settings.no_wait && !run->ends_at_question)
            ka_expected_prepare(run); /* the oracle works while the model thinks */
        if (run->asked[i].question != run->job.slots[i].question)
            put_question(run, i);
    }
}

void ka_run_ask_cancel(struct ka_run *run)
{
    for (int i = 0; i < KA_JOB_SLOTS; i++) {
        struct ka_asked *asked = &run->asked[i];
        uint64_t op = asked->llm_op;
        asked->llm_op = 0;
        if (op)
            ka_llm_cancel(run->app->llm, op);
        if (asked->mail)
            ka_mailbox_stop(asked->mail);
        asked->mail = NULL;
    }
}
