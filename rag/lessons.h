/* Lessons: what was wrong with a backward, and the few changed lines that mended it, kept across runs in one
 * SQLite file of the user's own. It is no pair store: that may be shipped, read-only, and is made anew.
 *
 * A lesson has the kind of its finding, the finding, the change, the words and the vector of the forward that
 * it was learned on (the embedder of the pair store, which also weighs), the device, the audience, the run
 * that proved it, and in how many runs it was shown, helped, and was in vain since it last helped. One that
 * was in vain KA_LESSONS_PATIENCE times in a row goes. Of the same kind, device and audience, what is called
 * the same (but for its numbers) is one lesson: a later one takes the place of one that was in vain. Of more
 * than KA_LESSONS_MAX, those go that were neither learned nor of help for the longest time.
 *
 * *Audience* is who was sent the code that the lesson is made of. It is shown to nobody else.
 *
 * Each call opens the file, does one transaction, and closes it: any thread, several processes. What is read
 * is outside bytes: rows that are no lessons are passed over. Errors are negative errno with a sentence and a
 * remedy: -ENOENT no file, -EILSEQ damaged or none of lessons, -EPROTO made by a newer program, -EBUSY locked
 * too long, -EROFS may not be written, -ENOSPC, -EIO. */
#ifndef KA_LESSONS_H
#define KA_LESSONS_H

#include <jansson.h>

#include "embed.h"

#define KA_LESSONS_MAX 200
#define KA_LESSONS_PATIENCE 3
#define KA_LESSONS_NEAR 3 /* of each kind */

/* Where it is: ka_user_data() of this name. */
#define KA_LESSONS_NAME "lessons.db"

struct ka_lessons_query {
    const float *vector; /* KA_EMBED_DIM numbers, of unit length */
    const char *device, *audience;
};

/* The nearest of each kind for that device and audience, the most similar first: a new array of {"id",
 * "kind", "finding", "change", "similarity"}. */
int ka_lessons_near(const char *path, const struct ka_lessons_query *query, json_t **out, struct ka_err *err);

/* What a run taught: {"told": [{"id", "end": "shown" | "helped" | "vain"}], "learned": [{"kind", "finding",
 * "change", "words", "device", "audience", "run", and "same": the finding or the change}]}, learned on the
 * forward of `vector`. All of it or nothing. File and folder are made where they are missing, for this user
 * alone to read. */
int ka_lessons_keep(const char *path, const float *vector, const json_t *taught, struct ka_err *err);

/* All, by id: a new array of these members with "shown", "helped" and "vain". */
int ka_lessons_list(const char *path, json_t **out, struct ka_err *err);

/* Forget one, or with 0 all. -ENOENT where there is none of that id; *gone is how many went. */
int ka_lessons_forget(const char *path, int64_t id, size_t *gone, struct ka_err *err);

#endif
