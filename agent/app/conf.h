/* The configuration file: lines of `key = value`, comments from `#`, nothing else.
 *
 *     # ~/.config/kernel-agent/config
 *     base_url = "https://llm.example/v1"
 *     topk = 4
 *     min_sim = 0.6
 *     no_wait = true
 *
 * Values are strings in double quotes (\" \\ \n \t), strings in single quotes (as they are), integers,
 * numbers, true and false. Keys are letters, digits, `_` and `-`; `-` means `_`. A key may occur once. There
 * are no sections. Pure but for the path helper, which only joins texts. */
#ifndef KA_CONF_H
#define KA_CONF_H

#include "base/base.h"

#define KA_CONF_MAX_BYTES ((size_t)256 << 10)
#define KA_CONF_MAX_KEYS 256

enum ka_conf_type {
    KA_CONF_STRING,
    KA_CONF_INTEGER,
    KA_CONF_NUMBER,
    KA_CONF_BOOLEAN,
};

/* Valid during the callback only. An integer also sets `number`. */
struct ka_conf_value {
    enum ka_conf_type type;
    const char *string;
    int64_t integer;
    double number;
    bool boolean;
};

/* One setting. `key` has `_` for `-`. Returns 0, or a negative code with a sentence in `err` (an unknown key,
 * a wrong type, a value out of range), which gets "name:line: " in front and ends the parsing. */
typedef int (*ka_conf_fn)(void *arg, const char *key, const struct ka_conf_value *value, int line,
                          struct ka_err *err);

/* Calls `fn` for each setting, in order. -EINVAL with "name:line: what" for anything that is not understood,
 * for a key that occurs twice, and for a secret in the file (`api_key`: use `api_key_file`); -EFBIG past the
 * caps; or what `fn` returned. */
int ka_conf_parse(const char *text, size_t len, const char *name, ka_conf_fn fn, void *arg,
                  struct ka_err *err);

/* "$XDG_CONFIG_HOME/kernel-agent/config", else "$HOME/.config/kernel-agent/config", from the values given
 * (NULL, empty or relative ones do not count); NULL when neither is there. free() it. */
char *ka_conf_default_path(const char *xdg_config_home, const char *home);

#endif
