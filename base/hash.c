/* Digest (OpenSSL's libcrypto) and random bytes (the kernel's). */
#include "hash.h"

#include <errno.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>

void ka_hash_hex(const void *bytes, size_t len, char out[static KA_HASH_HEX])
{
    unsigned char digest[EVP_MAX_MD_SIZE];
    unsigned int size = 0;
    if (EVP_Digest(bytes, len, digest, &size, EVP_sha256(), NULL) != 1 || size != 32) {
        fputs("kernel-agent: SHA-256 is not available in libcrypto\n", stderr);
        abort();
    }
    for (unsigned int i = 0; i < size; i++)
        snprintf(out + (size_t)2 * i, 3, "%02x", digest[i]);
}

void ka_random(void *bytes, size_t len)
{
    unsigned char *at = bytes;
    while (len) {
        ssize_t n = getrandom(at, len, 0);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0) {
            perror("kernel-agent: getrandom");
            abort();
        }
        at += n;
        len -= (size_t)n;
    }
}

uint64_t ka_random_u64(void)
{
    uint64_t value;
    ka_random(&value, sizeof(value));
    return value;
}
