/* Digest (OpenSSL's libcrypto) and random bytes (the kernel's). */
#include "hash.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define BYTES 32

static void digest_of(const void *bytes, size_t len, unsigned char digest[static EVP_MAX_MD_SIZE])
{
    unsigned int size = 0;
    if (EVP_Digest(bytes, len, digest, &size, EVP_sha256(), NULL) != 1 || size != BYTES) {
        fputs("kernel-agent: SHA-256 is not available in libcrypto\n", stderr);
        abort();
    }
}

void ka_hash_hex(const void *bytes, size_t len, char out[static KA_HASH_HEX])
{
    unsigned char digest[EVP_MAX_MD_SIZE];
    digest_of(bytes, len, digest);
    for (size_t i = 0; i < BYTES; i++)
        snprintf(out + 2 * i, 3, "%02x", digest[i]);
}

void ka_hash_base64(const void *bytes, size_t len, char out[static KA_HASH_BASE64])
{
    unsigned char digest[EVP_MAX_MD_SIZE];
    digest_of(bytes, len, digest);
    EVP_EncodeBlock((unsigned char *)out, digest, BYTES);
}

bool ka_same_secret(const char *a, const char *b)
{
    char digests[2][KA_HASH_HEX];
    ka_hash_hex(a, strlen(a), digests[0]);
    ka_hash_hex(b, strlen(b), digests[1]);
    return CRYPTO_memcmp(digests[0], digests[1], KA_HASH_HEX) == 0;
}

uint64_t ka_random_u64(void)
{
    uint64_t value;
    if (getentropy(&value, sizeof(value)) != 0) {
        perror("kernel-agent: getentropy");
        abort();
    }
    return value;
}
