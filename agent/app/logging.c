/* From options to the log's level and form. */
#include "logging.h"

#include <unistd.h>

#include "base/log.h"
#include "opts.h"

void ka_logging_setup(const struct ka_opts *opts)
{
    enum ka_log_level level = opts->quiet ? KA_LOG_ERROR : ka_log_level_of(opts->log_level);
    ka_log_setup(level, isatty(STDERR_FILENO) && level == KA_LOG_INFO, ka_log_form_of(opts->log_format));
    if (opts->older)
        ka_log(KA_LOG_INFO, "%s", opts->older);
}
