/* Where a pair is divided. */
#include "marker.h"

#include "lines.h"

const char *ka_marker_find(const char *text, size_t len, const char **after)
{
    const char *cursor = text;
    struct ka_line line;
    while (ka_line_next(&cursor, text + len, &line)) {
        if (ka_line_is(ka_line_strip(line), KA_MARKER)) {
            *after = cursor;
            return line.at;
        }
    }
    return NULL;
}
