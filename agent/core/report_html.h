/* report.html: the same run for a browser, as one file that needs nothing else: no script, no picture, no font from elsewhere. Every
 * text of the run is escaped, and the page forbids the browser to load or run anything.
 *
 * Reads what report.h reads and, of the verdict, "per_shape". Everything may be missing or of another type. Pure. */
#ifndef KA_REPORT_HTML_H
#define KA_REPORT_HTML_H

#include <jansson.h>

#include "base/base.h"

/* Append the page to `out`. -EINVAL when `result` is no object; -EFBIG, -ENOMEM; `out` is then unchanged. */
int ka_report_html(const json_t *result, struct ka_buf *out, struct ka_err *err);

#endif
