/* Embedding requests and answers as data: texts go in, one vector each comes out. Pure: no sockets, no clock.
 */
#ifndef KA_EMBEDDINGS_H
#define KA_EMBEDDINGS_H

#include "base/base.h"

struct ka_vectors {
    float *values; /* count rows of dim values, in the order of the texts, all finite; owned */
    size_t count, dim;
};

void ka_vectors_free(struct ka_vectors *vectors); /* the content; leaves it zeroed */

/* The body of POST {base}/embeddings; free() it. Bytes that are not UTF-8 travel as U+FFFD. */
char *ka_embeddings_request_json(const char *model, const char *const *texts, size_t count,
                                 struct ka_err *err);

/* `count` vectors from the endpoint's body. -EREMOTEIO when it reports an error; -EBADMSG when it is not
 * JSON, a vector is missing or doubled, their lengths differ or exceed 65536, or a value is not a finite
 * number. */
int ka_embeddings_parse(const char *body, size_t len, size_t count, struct ka_vectors *vectors,
                        struct ka_err *err);

#endif
