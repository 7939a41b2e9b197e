/* Compiled kernels on disk. Knows nothing of compilers. */
#include "cache.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/files.h"
#include "base/hash.h"

#define ENTRY_MAX ((size_t)64 << 20)
#define SUFFIX ".json"
#define LEFTOVER_S 3600 /* a file that a killed process was writing */

struct ka_cache {
    char *root, *folder;
    uint64_t max_bytes, bytes; /* `bytes`: at the last look, and what we added since */
    bool looked;               /* at what lies there: by the first put, which is on a thread */
    pthread_mutex_t lock;      /* held while something is added */
};

struct item {
    char *path;
    uint64_t bytes;
    struct timespec used;
    bool is_entry;
};

struct items {
    struct item *list;
    size_t count;
};

bool ka_cache_is_key(const char *text)
{
    size_t len = text ? strspn(text, "0123456789abcdef") : 0;
    return len == KA_HASH_HEX - 1 && text[len] == '\0';
}

static bool is_word(const char *text)
{
    size_t len = 0;
    while (text[len] && isalnum((unsigned char)text[len]))
        len++;
    return len && len < 64 && text[len] == '\0';
}

/* ---- looking at everything ---- */

static bool is_entry(const char *name)
{
    KA_AUTO_FREE char *key = ka_strdup(name);
    if (!ka_ends_with(name, SUFFIX))
        return false;
    key[strlen(key) - strlen(SUFFIX)] = '\0';
    return ka_cache_is_key(key);
}

static void look_into(const char *folder, struct items *items)
{
    struct stat st;
    DIR *dir = opendir(folder);
    for (struct dirent *at; dir && (at = readdir(dir));) {
        if (fstatat(dirfd(dir), at->d_name, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(st.st_mode))
            *KA_APPEND(items->list, items->count) = (struct item){
                ka_path_join(folder, at->d_name), (uint64_t)st.st_size, st.st_mtim, is_entry(at->d_name)};
    }
    if (dir)
        closedir(dir);
}

static void look(const char *root, struct items *items)
{
    DIR *dir = opendir(root);
    for (struct dirent *at; dir && (at = readdir(dir));) {
        if (!is_word(at->d_name))
            continue;
        KA_AUTO_FREE char *folder = ka_path_join(root, at->d_name);
        look_into(folder, items);
    }
    if (dir)
        closedir(dir);
}

static void free_items(struct items *items)
{
    for (size_t i = 0; i < items->count; i++)
        free(items->list[i].path);
    free(items->list);
    memset(items, 0, sizeof(*items));
}

static uint64_t sum(const struct items *items)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < items->count; i++)
        bytes += items->list[i].bytes;
    return bytes;
}

void ka_cache_measure(const char *root, size_t *entries, uint64_t *bytes)
{
    struct items items = {0};
    look(root, &items);
    *entries = 0;
    for (size_t i = 0; i < items.count; i++)
        *entries += items.list[i].is_entry;
    *bytes = sum(&items);
    free_items(&items);
}

/* ---- eviction ---- */

static int by_use(const void *a, const void *b)
{
    const struct timespec *x = &((const struct item *)a)->used, *y = &((const struct item *)b)->used;
    if (x->tv_sec != y->tv_sec)
        return x->tv_sec < y->tv_sec ? -1 : 1;
    return x->tv_nsec < y->tv_nsec ? -1 : x->tv_nsec > y->tv_nsec;
}

/* Leftovers of killed processes, and then the oldest until `want` more bytes fit with some room. */
static void make_room(struct ka_cache *cache, uint64_t want)
{
    struct items items = {0};
    look(cache->root, &items);
    cache->looked = true;
    cache->bytes = sum(&items);
    if (items.count)
        qsort(items.list, items.count, sizeof(*items.list), by_use);
    uint64_t goal = cache->max_bytes - cache->max_bytes / 10;
    bool full = cache->bytes + want > cache->max_bytes;
    for (size_t i = 0; i < items.count; i++) {
        const struct item *item = &items.list[i];
        bool leftover = !item->is_entry && time(NULL) - item->used.tv_sec > LEFTOVER_S;
        bool goes = leftover || (item->is_entry && full && cache->bytes + want > goal);
        if (goes && (unlink(item->path) == 0 || errno == ENOENT))
            cache->bytes -= item->bytes < cache->bytes ? item->bytes : cache->bytes;
    }
    free_items(&items);
}

/* ---- public ---- */

int ka_cache_open(const char *root, const char *toolchain, uint64_t max_bytes, struct ka_cache **out,
                  struct ka_err *err)
{
    if (!is_word(toolchain))
        return ka_fail(err, -EINVAL, "'%s' is no name of a toolchain", toolchain);
    struct ka_cache *cache = ka_calloc(1, sizeof(*cache));
    pthread_mutex_init(&cache->lock, NULL);
    cache->root = ka_strdup(root);
    cache->folder = ka_path_join(root, toolchain);
    cache->max_bytes = max_bytes;
    KA_AUTO_FREE char *parent = ka_path_parent(root);
    int rc = ka_mkdirs(parent, err);
    if (rc == 0)
        rc = ka_private_folder(root, err);
    if (rc == 0)
        rc = ka_private_folder(cache->folder, err);
    if (rc)
        ka_cache_close(cache);
    else
        *out = cache;
    return rc;
}

void ka_cache_close(struct ka_cache *cache)
{
    if (!cache)
        return;
    pthread_mutex_destroy(&cache->lock);
    free(cache->root);
    free(cache->folder);
    free(cache);
}

const char *ka_cache_folder(const struct ka_cache *cache)
{
    return cache->folder;
}

static char *entry_path(const struct ka_cache *cache, const char *key)
{
    return ka_format("%s/%s" SUFFIX, cache->folder, key);
}

json_t *ka_cache_get(struct ka_cache *cache, const char *key)
{
    struct stat st;
    if (!ka_cache_is_key(key))
        return NULL;
    KA_AUTO_FREE char *path = entry_path(cache, key);
    KA_AUTO_CLOSE int fd = open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    KA_AUTO_BUF struct ka_buf text = {0}; /* at once: json_loadfd() asks the kernel for each byte */
    if (fd < 0 || fstat(fd, &st) != 0 || !S_ISREG(st.st_mode) || ka_fd_read(fd, ENTRY_MAX, &text))
        return NULL;
    json_t *entry = json_loadb(ka_buf_str(&text), text.len, 0, NULL);
    if (entry)
        futimens(fd, NULL);
    return entry;
}

int ka_cache_put(struct ka_cache *cache, const char *key, const json_t *entry, struct ka_err *err)
{
    if (!ka_cache_is_key(key))
        return ka_fail(err, -EINVAL, "'%s' is no key", key);
    KA_AUTO_FREE char *text = json_dumps(entry, JSON_COMPACT), *path = entry_path(cache, key);
    if (!text)
        return ka_fail(err, -EINVAL, "an entry that is no JSON");
    size_t len = strlen(text);
    if (len > ENTRY_MAX || len > cache->max_bytes)
        return ka_fail(err, -EFBIG, "an entry of %zu bytes is too large for the cache", len);
    pthread_mutex_lock(&cache->lock);
    if (!cache->looked || cache->bytes + len > cache->max_bytes)
        make_room(cache, len);
    int rc = ka_file_replace(path, text, len, err);
    if (rc == 0)
        cache->bytes += len;
    pthread_mutex_unlock(&cache->lock);
    return rc;
}
