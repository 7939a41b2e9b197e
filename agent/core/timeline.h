/* When each child of a run ran: a drawing for report.html, a table for report.md. Nothing is written without
 * children. Pure.
 *
 * `children`: [{"op": "oracle", "part": "2 of 4" | null, "start": seconds since the run began, "end":
 * seconds, "warm": bool, "status": "ok" | "error" | "died" | "timeout" | "cancelled", "cases": 12}], in order
 * of their start. Everything may be missing or of another type: a child without a start is left out. */
#ifndef KA_TIMELINE_H
#define KA_TIMELINE_H

#include <jansson.h>

#include "page.h"

/* A row for each child; where they are many, a row holds those of one operation that did not run at the same
 * time. */
void ka_timeline_html(struct ka_page *page, const json_t *children);

/* A row for each operation: how many, their seconds, the longest. */
void ka_timeline_markdown(struct ka_page *page, const json_t *children);

#endif
