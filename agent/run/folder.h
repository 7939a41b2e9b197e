/* The folder of a run below `out`: <name>-<date>-<random>, readable, sorted by time, never taken twice. */
#ifndef KA_RUN_FOLDER_H
#define KA_RUN_FOLDER_H

#include "base/base.h"

/* Made, with those above it; *dir is its absolute path: free() it. */
int ka_run_folder_make(const char *out, const char *name, char **dir, struct ka_err *err);

/* "attn" of "some/attn.py"; free() it. */
char *ka_run_folder_name(const char *path);

#endif
