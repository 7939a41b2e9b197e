/* SHA-256 as lower-case hex, for content addresses and "unchanged?" questions, and as browsers want it. */
#ifndef KA_HASH_H
#define KA_HASH_H

#include "base.h"

#define KA_HASH_HEX 65
#define KA_HASH_BASE64 45

void ka_hash_hex(const void *bytes, size_t len, char out[static KA_HASH_HEX]);
void ka_hash_base64(const void *bytes, size_t len, char out[static KA_HASH_BASE64]);

/* Are two texts the same? Takes a time that does not hang on where they differ. */
bool ka_same_secret(const char *a, const char *b);

/* From the system's random source. Ends the program if there is none: seeds must be secret. */
uint64_t ka_random_u64(void);

#endif
