/* What a run found, for people: report.md, and report.html as one file that needs nothing else: no script, no
 * picture, no font from elsewhere. Every text of the run is escaped, and the page forbids the browser to load
 * or run anything.
 *
 * Reads the result object (`--json`) and, where they are there, these further members of the run's record:
 *
 *     "file", "error"  {"kind", "message", "file", "line", "remedy", "traceback"}
 *     "failures"       the verdict's facts
 *     "per_shape"      of the verdict
 *     "history"        attempts in order, see ka_describe_attempt
 *     "measured"       result of the operation facts for the best candidate
 *     "modelled_cost"  of the best candidate
 *     "draft_report"   the differentiator's report
 *     "children"       when each child ran, see timeline.h
 *     "device_answers" [{"line", "asked", "answer"}]
 *
 * Everything may be missing or of another type: what cannot be read is left out. Both forms come from one
 * list of sections; a section says where it is told. Pure. */
#ifndef KA_REPORT_H
#define KA_REPORT_H

#include <jansson.h>

#include "base/base.h"

/* Append the report to `out`. -EINVAL when `result` is no object; -EFBIG, -ENOMEM; `out` is then
 * unchanged. */
int ka_report_markdown(const json_t *result, struct ka_buf *out, struct ka_err *err);
int ka_report_html(const json_t *result, struct ka_buf *out, struct ka_err *err);

#endif
