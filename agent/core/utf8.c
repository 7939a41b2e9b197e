/* UTF-8 checking and cleaning. Knows nothing of what the text is for. */
#include "utf8.h"

#include <string.h>

static bool continues(const char *bytes, size_t count)
{
    for (size_t i = 1; i < count; i++)
        if (((unsigned char)bytes[i] & 0xC0) != 0x80)
            return false;
    return true;
}

size_t ka_utf8_sequence(const char *bytes, size_t len)
{
    if (len == 0)
        return 0;
    unsigned char first = (unsigned char)bytes[0];
    if (first < 0x80)
        return 1;
    size_t need = first >= 0xC2 && first <= 0xDF   ? 2
                  : (first & 0xF0) == 0xE0         ? 3
                  : first >= 0xF0 && first <= 0xF4 ? 4
                                                   : 0;
    if (need == 0 || need > len || !continues(bytes, need))
        return 0;
    unsigned char second = (unsigned char)bytes[1];
    bool overlong = (first == 0xE0 && second < 0xA0) || (first == 0xF0 && second < 0x90);
    bool surrogate = first == 0xED && second >= 0xA0;
    bool past_end = first == 0xF4 && second >= 0x90;
    return overlong || surrogate || past_end ? 0 : need;
}

int ka_utf8_repair(const char *bytes, size_t len, struct ka_buf *out)
{
    size_t valid = 0; /* length of the run of valid bytes at `bytes` */
    int rc = 0;
    while (len && rc == 0) {
        size_t step = ka_utf8_sequence(bytes + valid, len - valid);
        valid += step;
        if (step && valid < len)
            continue;
        rc = ka_buf_add(out, bytes, valid);
        bool bad = valid < len;
        if (rc == 0 && bad)
            rc = ka_buf_puts(out, "\xEF\xBF\xBD");
        bytes += valid + bad;
        len -= valid + bad;
        valid = 0;
    }
    return rc;
}

void ka_utf8_line(const char *bytes, size_t len, char *line, size_t size)
{
    size_t out = 0;
    while (len) {
        size_t step = ka_utf8_sequence(bytes, len);
        const char *from = step ? bytes : "?";
        unsigned char first = (unsigned char)from[0];
        bool control = first < 0x20 || first == 0x7F || (first == 0xC2 && (unsigned char)from[1] < 0xA0);
        size_t take = control || step == 0 ? 1 : step;
        if (control)
            from = " ";
        if (out + take >= size)
            break;
        if (*from != ' ' || (out && line[out - 1] != ' ')) {
            memcpy(line + out, from, take);
            out += take;
        }
        bytes += step ? step : 1;
        len -= step ? step : 1;
    }
    if (out && line[out - 1] == ' ')
        out--;
    line[out] = '\0';
}
