/* What only the page has: its head, tables of shapes and plots. See report.h. Pure. */
#ifndef KA_REPORT_HTML_H
#define KA_REPORT_HTML_H

#include "page.h"

/* Up to the text of <title>. */
extern const char ka_html_head[];

/* Error, eager error and limit of each gradient, on a logarithmic axis. */
void ka_html_plot_gradients(struct ka_page *page, const json_t *gradients);

/* "per_shape" of the result. */
void ka_html_shapes(struct ka_page *page, const json_t *shapes);

/* "per_shape" of its speed: a table, and a bar for each time. */
void ka_html_times(struct ka_page *page, const json_t *shapes);

#endif
