/* The few things every C file here uses: error values, a bounded byte buffer, small helpers.
 *
 * Convention of the whole program: a function that can fail returns 0 or a negative errno-like code;
 * out-parameters come last and are untouched on failure. `struct ka_err *err` may be NULL; otherwise
 * it receives a sentence for people, made where the error happened, with file, line and remedy where
 * there are such. Nothing here blocks, and nothing here is shared between threads. */
#ifndef KA_BASE_H
#define KA_BASE_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KA_PRINTF(fmt_at, args_at) __attribute__((format(printf, fmt_at, args_at)))
#define KA_COUNT(array) (sizeof(array) / sizeof((array)[0]))

/* A message for people, always valid UTF-8. Empty when nothing failed. */
struct ka_err {
    char msg[1024];
};

/* Write the message (if err is not NULL) and return `code`, so that `return ka_fail(...)` reads well.
 * Arguments may be text from outside, cut anywhere. */
int ka_fail(struct ka_err *err, int code, const char *fmt, ...) KA_PRINTF(3, 4);

/* Growable bytes, always followed by a NUL that is not counted. Zero-initialise, or set only `max`. `max`
 * caps the length: 0 means KA_BUF_MAX. A failed add changes nothing, and all later ones fail like it: a text
 * may be written piece by piece and looked after at its end, by `failed`. What is capped elsewhere and far
 * smaller than KA_BUF_MAX cannot fail. */
#define KA_BUF_MAX ((size_t)1 << 30)
struct ka_buf {
    char *data; /* NULL until the first add; use ka_buf_str() to read */
    size_t len;
    size_t cap;
    size_t max;
    int failed; /* what the first failed add returned; cleared with the content */
};

/* -EFBIG past the cap. */
int ka_buf_add(struct ka_buf *buf, const void *bytes, size_t len);
int ka_buf_puts(struct ka_buf *buf, const char *text);
/* With every byte that is not part of valid UTF-8 replaced by U+FFFD. */
int ka_buf_repair(struct ka_buf *buf, const char *bytes, size_t len);
/* Bytes as they are, but what a format with a precision ("%.900s") adds is made valid UTF-8: it may have cut
 * a character. */
int ka_buf_printf(struct ka_buf *buf, const char *fmt, ...) KA_PRINTF(2, 3);
/* Drop `n` bytes from the front. */
void ka_buf_consume(struct ka_buf *buf, size_t n);
void ka_buf_clear(struct ka_buf *buf);            /* keeps the memory */
void ka_buf_free(struct ka_buf *buf);             /* keeps `max` */
const char *ka_buf_str(const struct ka_buf *buf); /* never NULL */
/* Hand the bytes over to the caller (free()). The buffer is empty afterwards. */
char *ka_buf_steal(struct ka_buf *buf);

/* A variable that is given back where its name ends, on every way out: a buffer; a pointer, by free(). */
#define KA_AUTO_BUF __attribute__((cleanup(ka_buf_free)))
#define KA_AUTO_FREE __attribute__((cleanup(ka_free_at)))
void ka_free_at(void *pointer);

/* These, and buffers, end the program with a message when memory is gone: for small things only. */
void *ka_calloc(size_t count, size_t size);
void *ka_realloc(void *memory, size_t count, size_t size); /* neither is 0 */
char *ka_strdup(const char *text);                         /* NULL gives NULL */
char *ka_strndup(const char *text, size_t len);
char *ka_format(const char *fmt, ...) KA_PRINTF(1, 2);

/* A pointer to a new zeroed item at the array's end, with `count` moved past it. The array grows at powers of
 * two, so that its address changes rarely; free() it. Ends the program without memory, like those above. */
#define KA_APPEND(items, count)                                                                              \
    ((count)++, (items) = ka_grow((items), (count), sizeof(*(items))), &(items)[(count)-1])
void *ka_grow(void *items, size_t count, size_t size); /* room for `count` items, the last of them zeroed */

/* splitmix64 (Steele, Lea, Flood 2014): a good mix of 64 bits, and the numbers that it makes of a counter.
 * Every seed is good. */
uint64_t ka_mix64(uint64_t x);
uint64_t ka_random_next(uint64_t *state);

bool ka_starts_with(const char *text, const char *prefix);
bool ka_ends_with(const char *text, const char *suffix);

/* The first byte that is no white space; NULL where there is none. */
const char *ka_first_byte(const char *bytes, size_t len);

#endif
