/* Events read from where they are kept: the run's journal and the queue's entries. Knows no socket; nothing
 * is remembered but how far a client has come. */
#include "stream.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "agent/core/fields.h"
#include "agent/core/request.h"
#include "base/files.h"

#define PIECE ((size_t)256 << 10)
#define LINE_MAX_BYTES ((size_t)8 << 20)

/* `text` is one line. */
static void put_text(struct ka_buf *out, const char *id, const char *type, const char *text, size_t len)
{
    ka_buf_printf(out, "id: %s\nevent: %s\ndata: ", id, type);
    ka_buf_add(out, text, len);
    ka_buf_puts(out, "\n\n");
}

static void put_entry(struct ka_buf *out, const char *id, const char *type, const struct ka_entry *entry)
{
    json_auto_t *doc = ka_entry_json(entry);
    KA_AUTO_FREE char *text = json_dumps(doc, JSON_COMPACT | JSON_REAL_PRECISION(15));
    put_text(out, id, type, text, strlen(text));
}

/* ---- a run */

struct run_stream {
    const struct ka_queue *queue;
    char id[KA_ENTRY_ID];
    bool follow;              /* until the run has ended, not only what there is */
    uint64_t attempt, offset; /* of its run.jsonl; a line begins there */
};

/* Whole lines from the offset on. */
static int read_lines(struct run_stream *stream, const char *folder, struct ka_buf *text)
{
    KA_AUTO_FREE char *path = ka_path_join(folder, "run.jsonl");
    KA_AUTO_CLOSE int fd = open(path, O_RDONLY | O_CLOEXEC);
    char before = '\n';
    if (fd < 0)
        return -errno;
    if (stream->offset && (pread(fd, &before, 1, (off_t)stream->offset - 1) != 1 || before != '\n'))
        stream->offset = 0;
    for (size_t size = PIECE; size <= LINE_MAX_BYTES; size *= 2) {
        KA_AUTO_FREE char *bytes = ka_calloc(1, size);
        ssize_t got = pread(fd, bytes, size, (off_t)stream->offset);
        const char *last = got > 0 ? memrchr(bytes, '\n', (size_t)got) : NULL;
        if (last)
            return ka_buf_add(text, bytes, (size_t)(last + 1 - bytes));
        if (got < (ssize_t)size)
            return 0;
    }
    return -EFBIG;
}

static void put_lines(struct run_stream *stream, const struct ka_buf *text, struct ka_buf *out)
{
    const char *at = ka_buf_str(text), *end = at + text->len, *newline;
    for (; at < end && (newline = memchr(at, '\n', (size_t)(end - at))); at = newline + 1) {
        char id[48];
        json_auto_t *line = json_loadb(at, (size_t)(newline - at), 0, NULL);
        stream->offset += (uint64_t)(newline + 1 - at);
        snprintf(id, sizeof(id), "%llu:%llu", (unsigned long long)stream->attempt,
                 (unsigned long long)stream->offset);
        if (line) /* a kill may have left half a line */
            put_text(out, id, ka_text_of(line, "event", "line"), at, (size_t)(newline - at));
    }
}

static bool more_of_run(void *arg, struct ka_buf *out)
{
    struct run_stream *stream = arg;
    KA_AUTO_BUF struct ka_buf text = {0};
    const struct ka_entry *entry = ka_queue_find(stream->queue, stream->id);
    if (!entry)
        return false;
    const char *folder = ka_queue_folder(stream->queue, stream->id);
    if (stream->attempt != (uint64_t)entry->attempt) {
        stream->attempt = (uint64_t)entry->attempt;
        stream->offset = 0;
    }
    int rc = folder ? read_lines(stream, folder, &text) : 0;
    put_lines(stream, &text, out);
    if (rc == 0 && (text.len || !ka_entry_ended(entry)))
        return text.len || stream->follow;
    char id[48];
    snprintf(id, sizeof(id), "%llu:%llu", (unsigned long long)stream->attempt,
             (unsigned long long)stream->offset);
    put_entry(out, id, "end", entry);
    return false;
}

int ka_stream_run(const struct ka_queue *queue, struct ka_call *call, const char *id, bool follow)
{
    struct run_stream *stream = ka_calloc(1, sizeof(*stream));
    *stream = (struct run_stream){.queue = queue, .follow = follow};
    snprintf(stream->id, sizeof(stream->id), "%s", id);
    if (!ka_request_event(ka_call_header(call, "Last-Event-ID"), ':', &stream->attempt, &stream->offset) ||
        stream->offset > INT64_MAX)
        stream->attempt = stream->offset = 0;
    int rc = ka_call_stream(call, more_of_run, free, stream);
    if (rc)
        free(stream);
    return rc;
}

/* ---- the queue */

struct queue_stream {
    const struct ka_queue *queue;
    bool first;       /* all are new to the client */
    uint64_t version; /* that it has seen */
};

static bool more_of_queue(void *arg, struct ka_buf *out)
{
    struct queue_stream *stream = arg;
    uint64_t version = ka_queue_version(stream->queue);
    char id[48];
    if (!stream->first && version == stream->version)
        return true;
    snprintf(id, sizeof(id), "%llu", (unsigned long long)version);
    for (size_t i = 0; i < ka_queue_count(stream->queue); i++) {
        const struct ka_entry *entry = ka_queue_at(stream->queue, i);
        if (!entry || (!stream->first && ka_queue_version_at(stream->queue, i) <= stream->version))
            continue;
        put_entry(out, id, "run", entry);
    }
    stream->first = false;
    stream->version = version;
    return true;
}

int ka_stream_queue(const struct ka_queue *queue, struct ka_call *call)
{
    struct queue_stream *stream = ka_calloc(1, sizeof(*stream));
    *stream = (struct queue_stream){.queue = queue};
    stream->first = !ka_request_event(ka_call_header(call, "Last-Event-ID"), '\0', &stream->version, NULL) ||
                    stream->version > ka_queue_version(queue); /* the clock was set back */
    int rc = ka_call_stream(call, more_of_queue, free, stream);
    if (rc)
        free(stream);
    return rc;
}
