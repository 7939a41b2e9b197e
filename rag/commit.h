/* The commit that a repository's folder stands at, read from .git without running git or anything of it. */
#ifndef KA_COMMIT_H
#define KA_COMMIT_H

#include "base/base.h"

/* Of HEAD's text: the hash that it holds, or the name of the ref that it points to ("refs/heads/main"); NULL
 * for anything else. free() it. */
char *ka_commit_hash(const char *text);
char *ka_commit_ref(const char *text);

/* Of packed-refs: the hash of that ref; NULL. free() it. */
char *ka_commit_packed(const char *text, const char *ref);

/* Of the repository in `root`, which may be a worktree; NULL: it is none, or it has no commit. free() it. */
char *ka_commit_find(const char *root);

#endif
