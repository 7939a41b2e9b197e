/* From a forward file to the pairs that are most like it: store, built-in embedder and index together.
 *
 * One handle belongs to one thread. It reads the matrix once, when it is opened; a store that grows is seen
 * by the next open. The rules of what is found and what is left out are those of rag/index.h. */
#ifndef KA_SEARCH_H
#define KA_SEARCH_H

#include <jansson.h>

#include "index.h"

struct ka_search;

/* `store` must outlive the search. Errors as ka_store_each_vector(). */
int ka_search_open(struct ka_store *store, struct ka_search **out, struct ka_err *err);
void ka_search_close(struct ka_search *search); /* NULL is fine */

struct ka_search_query {
    const char *forward; /* source of a forward file or a pair; only its forward part counts */
    size_t topk;         /* 1 .. KA_INDEX_TOPK_MAX */
    double min_sim;
    const char *exclude;  /* "a,b": substrings of paths to leave out; NULL or "" for none */
    bool keep_duplicates; /* also give pairs that are the query itself */
};

struct ka_search_hit {
    char *id, *path, *op, *schedule;
    char *math;   /* its docstring: rag/excerpt.h */
    char *code;   /* its backward with what that uses of the forward */
    char *common; /* words that both forwards have (rag/common.h); "": alike in structure alone */
    double similarity;
};

struct ka_search_excluded {
    char *id;
    char *why; /* "near-duplicate of the query (similarity 0.998)" */
};

struct ka_search_result {
    struct ka_search_hit *hits; /* most similar first */
    size_t count;
    struct ka_search_excluded *excluded; /* near-duplicates only: a path that was named needs no report */
    size_t excluded_count;
};

/* -EINVAL when the query has nothing to compare or topk is out of range, or the store's errors; *out is then
 * untouched. No hit is no error. Free with ka_search_result_free(). */
int ka_search_run(struct ka_search *search, const struct ka_search_query *query, struct ka_search_result *out,
                  struct ka_err *err);
void ka_search_result_free(struct ka_search_result *result);

/* {"hits": [{"id", "similarity", "path", "op", "schedule": [], "both_have": []}],
 * "excluded": [{"id", "why"}]} (new reference). */
json_t *ka_search_json(const struct ka_search_result *result);

/* "a,b" as a list of strings; free() the list and nothing else. Blanks around names and empty names are
 * dropped. */
char **ka_search_split(const char *text, size_t *count);
/* The same as a JSON array (new reference). */
json_t *ka_search_split_json(const char *text);

#endif
