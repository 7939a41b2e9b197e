/* What a client may ask of a run. Folders, the jail and everything that the service shares are the service's
 * own; a budget that the service has may be made smaller, never larger. */
#ifndef KA_ALLOWED_H
#define KA_ALLOWED_H

#include <jansson.h>

#include "agent/app/app.h"
#include "agent/app/opts.h"

/* The service's options with the client's (name -> text) in place of its own. -EINVAL with a sentence that
 * names the option; `out` is then empty. Free it with ka_settings_free(). */
int ka_allowed_settings(const struct ka_opts *service, const struct ka_app *app, const json_t *options,
                        struct ka_settings *out, struct ka_err *err);

#endif
