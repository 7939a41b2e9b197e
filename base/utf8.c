/* UTF-8 checking and cleaning. Knows nothing of what the text is for. */
#include "utf8.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
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

/* Bytes that the lead byte at `bytes` announces; 1 for any other byte. */
static size_t announced(const char *bytes)
{
    unsigned char first = (unsigned char)bytes[0];
    return first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : first >= 0xC2 ? 2 : 1;
}

char *ka_utf8_clean(char *text)
{
    size_t left = text ? strlen(text) : 0;
    for (char *at = text; left;) {
        size_t step = ka_utf8_sequence(at, left);
        if (step == 0 && announced(at) > left && continues(at, left)) { /* cut by the end */
            *at = '\0';
            break;
        }
        if (step == 0)
            *at = '?';
        at += step ? step : 1;
        left -= step ? step : 1;
    }
    return text;
}

/* The number of a \uXXXX at `text`; -1 when there is none. */
static int32_t unicode_escape(const char *text, size_t len)
{
    char digits[5] = "";
    if (len < 6 || text[0] != '\\' || text[1] != 'u')
        return -1;
    memcpy(digits, text + 2, 4);
    return strspn(digits, "0123456789abcdefABCDEF") == 4 ? (int32_t)strtol(digits, NULL, 16) : -1;
}

/* Length of the escape at `text`, which is mended. */
static size_t clean_escape(char *text, size_t len)
{
    int32_t value = unicode_escape(text, len);
    if (value < 0)
        return len < 2 || (unsigned char)text[1] >= 0x80 ? 1 : 2;
    if (value >= 0xD800 && value < 0xDC00) {
        int32_t low = unicode_escape(text + 6, len - 6);
        if (low >= 0xDC00 && low < 0xE000)
            return 12;
    }
    if (value == 0 || (value >= 0xD800 && value < 0xE000))
        memcpy(text + 2, "fffd", 4);
    return 6;
}

void ka_utf8_clean_json(char *text, size_t len)
{
    for (size_t i = 0; i < len;) {
        if (text[i] == '\\') {
            i += clean_escape(text + i, len - i);
            continue;
        }
        size_t step = ka_utf8_sequence(text + i, len - i);
        if (step == 0)
            text[i] = '?';
        i += step ? step : 1;
    }
}
