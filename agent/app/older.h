/* Spellings of the earlier program with this name, for its command lines: what each means today. Names that
 * only changed are aliases in the table of settings (opts.c); here are the letters, and what has no setting
 * of its own. Pure. */
#ifndef KA_OLDER_H
#define KA_OLDER_H

#include <stdbool.h>
#include <stddef.h>

struct ka_older {
    const char *name;           /* without dashes */
    bool has_value;             /* which is not looked at */
    const char *option, *value; /* the setting that it stands for, or NULL */
    const char *text;           /* what is said when it is used */
    bool refused;
};

/* The entry for an option, or NULL. */
const struct ka_older *ka_older_find(const char *name, size_t len);

/* The option that a letter ("-r") stands for, or NULL. */
const char *ka_older_letter(char letter);

/* What is said of a --backend of the earlier program, or NULL. */
const char *ka_older_backend(const char *name);

#endif
