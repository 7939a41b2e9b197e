/* One run that the service took on: what was asked for, how it stands, what it came to. A value, with its
 * document: the same in the ledger and for clients. */
#ifndef KA_ENTRY_H
#define KA_ENTRY_H

#include <jansson.h>

#include "base/base.h"
#include "base/hash.h"

#define KA_ENTRY_ID 17 /* 16 hexadecimal digits */

enum ka_entry_state {
    KA_ENTRY_QUEUED,
    KA_ENTRY_RUNNING,
    KA_ENTRY_DONE,   /* there is a verdict on the file: verified, not_verified, unusable */
    KA_ENTRY_FAILED, /* there is none, for a reason that is not the file's */
    KA_ENTRY_CANCELLED,
};
#define KA_ENTRY_STATES 5

struct ka_entry {
    char id[KA_ENTRY_ID];
    char hash[KA_HASH_HEX]; /* of source and options: the same twice is one run */
    char *name;
    json_t *options; /* as submitted: name -> text */
    int priority;
    enum ka_entry_state state;
    int attempt; /* from 1; each begins afresh, in a folder of its own */
    int starts;  /* of this attempt: more than one where the service was ended under it */
    double submitted, started, ended; /* unix seconds; 0: not yet */
    double not_before;                /* queued: when it may start */
    int exit_code;                    /* the program's, for this run; once it has ended */
    char *verdict;                    /* of the result object; NULL */
    char *reason;                     /* why it is as it is, for people; NULL */
    /* Of the last attempt that ended: */
    double tokens_in, tokens_out, cost; /* money, where prices are known */
    double gpu_seconds;                 /* of its children, where it ran on one */
    char *gpu;                          /* the one that its last start was given; NULL: none, or not named */
    int child_failures;                 /* children that died or took too long */
    char *folder;                       /* of the run, once it has ended; NULL: there is none */
};

struct ka_entry *ka_entry_new(const char *name, const char *source, json_t *options, int priority);
void ka_entry_free(struct ka_entry *entry);

bool ka_entry_ended(const struct ka_entry *entry);
const char *ka_entry_state_name(enum ka_entry_state state);
/* KA_ENTRY_STATES: there is no such state. */
enum ka_entry_state ka_entry_state_of(const char *name);

/* What it took, of the result object of its last attempt. */
void ka_entry_spent(struct ka_entry *entry, const json_t *result);

/* New reference. */
json_t *ka_entry_json(const struct ka_entry *entry);
/* NULL for a document that is none. */
struct ka_entry *ka_entry_read(const char *id, const json_t *doc);

/* 16 hexadecimal digits? */
bool ka_entry_is_id(const char *text, size_t len);

/* What would be the hash of such a run. */
void ka_entry_hash(const char *source, const json_t *options, char out[static KA_HASH_HEX]);

#endif
