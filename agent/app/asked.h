/* From the program's options to the settings of a run. */
#ifndef KA_ASKED_H
#define KA_ASKED_H

#include "app.h"
#include "opts.h"

/* Words that a child would find out to be wrong after seconds, and say so in its own words: -EINVAL with
 * `err`. */
int ka_settings_check(const struct ka_opts *opts, struct ka_err *err);

/* What the program's options, checked, ask of a run in this process. With `with_model` false no model
 * answers, and the options about it are not looked at. A negative code with `err` where they do not fit;
 * `settings` is then empty. Free with ka_settings_free(). */
int ka_settings_init(struct ka_settings *settings, const struct ka_opts *opts, const struct ka_app *app,
                     bool with_model, struct ka_err *err);

#endif
