/* Files as whole values: read with a cap, written so that a reader or a crash never sees a half one.
 * Blocking; for small files only. Errors: negative errno, with the path and the reason in `err`. */
#ifndef KA_FILES_H
#define KA_FILES_H

#include <sys/types.h>

#include "base.h"

/* Append the file's bytes to `out`. -EFBIG when it holds more than `max` bytes. Regular files only. */
int ka_file_read(const char *path, size_t max, struct ka_buf *out, struct ka_err *err);

/* Write beside `path`, fsync, rename over it. The old content survives every failure (disk full too). */
int ka_file_write(const char *path, const void *bytes, size_t len, struct ka_err *err);

/* The same without waiting for the disk: who reads it sees the old content or the new one, but a loss of
 * power may leave it empty. For what can be made again. */
int ka_file_replace(const char *path, const void *bytes, size_t len, struct ka_err *err);

/* All bytes, to and from a descriptor. Reading ends at the end or, with -EFBIG, past `max` bytes; `out` is
 * then as it was. */
int ka_fd_write(int fd, const char *bytes, size_t len);
int ka_fd_read(int fd, size_t max, struct ka_buf *out);

/* What a socket brought, and the descriptor that came with it. Bytes, 0 at the end, -errno. */
ssize_t ka_fd_receive(int socket, char *text, size_t size, int *fd);

/* A descriptor that is closed where its name ends; -1 is none. */
#define KA_AUTO_CLOSE __attribute__((cleanup(ka_close_at)))
void ka_close_at(const int *fd);

/* Write a file that is made again when it is missing or half: neither durable nor atomic. */
int ka_file_put(const char *path, const void *bytes, size_t len, struct ka_err *err);

/* Like mkdir -p, mode 0755. An existing directory is no error. */
int ka_mkdirs(const char *path, struct ka_err *err);

/* The disk has the folder's names, once this returns 0. */
int ka_folder_sync(const char *path, struct ka_err *err);

/* A folder that only this user can write to, made if it is missing (its parent is there). -EACCES for any
 * other. */
int ka_private_folder(const char *path, struct ka_err *err);

/* Remove a folder and all below it; never follows links. Missing is no error. */
int ka_rmtree(const char *path, struct ka_err *err);

/* "dir/name"; free() it. */
char *ka_path_join(const char *dir, const char *name);

/* The folder that holds `path`: "." for a plain name; free() it. */
char *ka_path_parent(const char *path);

/* The running program's folder; NULL where the kernel does not tell. free() it. */
char *ka_program_folder(void);

/* A folder of this user's for what can be made again: $XDG_CACHE_HOME/kernel-agent/`name`, else below
 * ~/.cache; NULL without a home. It may not exist. free() it. */
char *ka_user_cache(const char *name);

/* The same for what cannot be made again: $XDG_DATA_HOME/kernel-agent/`name`, else below ~/.local/share. */
char *ka_user_data(const char *name);

/* Absolute, resolved path of an existing file; NULL with `err` set when there is none. free() it. */
char *ka_path_real(const char *path, struct ka_err *err);

#endif
