/* The page's own parts. Must not decide anything. */
#include "report_html.h"

#include "base/each.h"
#include "fields.h"

#include <math.h>

#define PLOT_WIDTH 640.0
#define PLOT_LEFT 120.0 /* names */
#define PLOT_RIGHT 20.0
#define ROW_HEIGHT 24.0
#define ROWS_MAX 64
#define MARKS 3

const char ka_html_head[] =
    "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src "
    "'unsafe-inline'\">\n"
    "<meta name=\"viewport\" content=\"width=device-width\">\n"
    "<meta name=\"color-scheme\" content=\"light dark\">\n"
    "<style>\n"
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 "
    "1em;color:#222;background:#fff}\n"
    "table{border-collapse:collapse;margin:1em 0}th,td{border-bottom:1px solid #ddd;padding:.2em .8em .2em "
    "0;text-align:left;"
    "vertical-align:top}\n"
    "td.n{text-align:right;font-variant-numeric:tabular-nums}.good{color:#176f2c}.bad{color:#b3261e}\n"
    "pre{background:#f6f6f6;padding:.8em;overflow:auto}svg{max-width:100%}svg text{font:12px "
    "system-ui,sans-serif;fill:#222}\n"
    ".warm{fill:#3b6ea5}.cold{fill:#9dbbd8}.lost{fill:#b3261e}.off{fill:#aaa}\n"
    "@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}th,td{border-color:#444}pre{"
    "background:#242424}"
    ".good{color:#7fcf92}.bad{color:#f28b82}svg text{fill:#ddd}"
    "svg [stroke=\"#222\"]{stroke:#ddd}svg [stroke=\"#ddd\"]{stroke:#444}svg [fill=\"#176f2c\"]{fill:#7fcf92}"
    "svg [fill=\"#b3261e\"]{fill:#f28b82}"
    ".warm{fill:#7fb0e0}.cold{fill:#3d5f80}.lost{fill:#f28b82}.off{fill:#777}}\n"
    "</style>\n<title>";

/* NAN where there is none. */
static double number_of(const json_t *object, const char *name)
{
    return ka_number_of(object, name, NAN);
}

/* ---- the plot */

/* Rows of marks over a logarithmic axis. */
struct plot {
    const char *names[ROWS_MAX];
    double values[ROWS_MAX][MARKS]; /* NAN: no mark */
    size_t rows;
    double low, high; /* of the axis: exponents of ten */
};

static double place(const struct plot *plot, double value)
{
    double at = value > 0 ? fmin(fmax(log10(value), plot->low), plot->high) : plot->low;
    return PLOT_LEFT + (at - plot->low) / (plot->high - plot->low) * (PLOT_WIDTH - PLOT_LEFT - PLOT_RIGHT);
}

static void fit_axis(struct plot *plot)
{
    double low = INFINITY, high = -INFINITY;
    for (size_t i = 0; i < plot->rows; i++)
        for (size_t k = 0; k < MARKS; k++) {
            double value = plot->values[i][k];
            low = value > 0 ? fmin(low, log10(value)) : low;
            high = value > 0 ? fmax(high, log10(value)) : high;
        }
    if (!(low <= high)) /* nothing to be seen */
        low = high = 0;
    plot->low = floor(low) - 0.2;
    plot->high = ceil(high) + 0.2;
}

static void open_svg(struct ka_page *page, const struct plot *plot, const char *title)
{
    double bottom = ROW_HEIGHT * (double)plot->rows, height = bottom + ROW_HEIGHT;
    ka_page_putf(
        page,
        "<svg role=\"img\" viewBox=\"0 0 %.0f %.0f\" width=\"%.0f\" height=\"%.0f\">\n<title>%s</title>\n",
        PLOT_WIDTH, height, PLOT_WIDTH, height, title);
    for (int i = 0; i <= 40 && ceil(plot->low) + i <= plot->high; i++) {
        double x = place(plot, pow(10, ceil(plot->low) + i));
        ka_page_putf(page, "<line x1=\"%.1f\" y1=\"0\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"#ddd\"/>", x, x,
                     bottom);
        ka_page_putf(page, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"middle\">1e%.0f</text>\n", x,
                     bottom + 16, ceil(plot->low) + i);
    }
    for (size_t i = 0; i < plot->rows; i++) {
        ka_page_putf(page, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"end\">", PLOT_LEFT - 8,
                     ROW_HEIGHT * ((double)i + 0.5) + 4);
        ka_page_text(page, plot->names[i]);
        ka_page_put(page, "</text>\n");
    }
}

void ka_html_plot_gradients(struct ka_page *page, const json_t *gradients)
{
    struct plot plot = {0};
    KA_EACH(gradients, i, gradient) {
        if (plot.rows == ROWS_MAX || !ka_page_text_of(gradient, "name"))
            continue;
        plot.names[plot.rows] = ka_page_text_of(gradient, "name");
        double *values = plot.values[plot.rows++];
        values[0] = number_of(gradient, "error");
        values[1] = number_of(gradient, "baseline_error");
        values[2] = number_of(gradient, "limit");
    }
    if (plot.rows == 0)
        return;
    fit_axis(&plot);
    open_svg(page, &plot, "Error against tolerance, for each gradient");
    for (size_t i = 0; i < plot.rows; i++) {
        const double *values = plot.values[i];
        double y = ROW_HEIGHT * ((double)i + 0.5);
        bool good = values[0] <= values[2];
        if (isfinite(values[2]))
            ka_page_putf(
                page,
                "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"#222\" stroke-width=\"2\"/>",
                place(&plot, values[2]), y - 8, place(&plot, values[2]), y + 8);
        if (isfinite(values[1]))
            ka_page_putf(page, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"4\" fill=\"none\" stroke=\"#777\"/>",
                         place(&plot, values[1]), y);
        if (isfinite(values[0]))
            ka_page_putf(page, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"4\" fill=\"%s\"/>\n",
                         place(&plot, values[0]), y, good ? "#176f2c" : "#b3261e");
    }
    ka_page_put(page, "</svg>\n<p>Full circle: error. Ring: eager PyTorch in the same dtype. Bar: what is "
                      "tolerated.</p>\n");
}

void ka_html_shapes(struct ka_page *page, const json_t *shapes)
{
    ka_page_put(page, "<table>\n<tr><th>shape</th><th>kind</th><th>cases</th><th>verdict</th>"
                      "<th>error of each gradient (tolerated)</th></tr>\n");
    KA_EACH(shapes, i, shape) {
        double failed = number_of(shape, "cases_failed");
        ka_page_put(page, "<tr><td>");
        ka_page_value(page, json_object_get(shape, "shape"));
        ka_page_put(page, "</td><td>");
        ka_page_value(page, json_object_get(shape, "kind"));
        ka_page_put(page, "</td>");
        ka_page_number(page, shape, "cases");
        if (json_is_true(json_object_get(shape, "skipped")))
            ka_page_put(page, "<td>skipped</td>");
        else if (failed > 0)
            ka_page_putf(page, "<td class=\"bad\">%.0f failed</td>", failed);
        else
            ka_page_put(page, "<td class=\"good\">passed</td>");
        ka_page_put(page, "<td>");
        KA_EACH(json_object_get(shape, "gradients"), k, gradient) {
            ka_page_put(page, k ? ", " : "");
            ka_page_value(page, json_object_get(gradient, "name"));
            ka_page_putf(page, " %.2g (%.2g)", number_of(gradient, "error"), number_of(gradient, "limit"));
        }
        ka_page_put(page, "</td></tr>\n");
    }
    ka_page_mark(page, KA_TABLE_END);
}
