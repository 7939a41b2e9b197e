/* The page's bytes, and the policy that names its script and its style by their hashes. */
#include "web.h"

#include <string.h>

#include "agent/io/httpd.h"
#include "base/base.h"
#include "base/hash.h"

/* The linker's own way to take a file as it is; the Makefile knows that this object hangs on it. */
__asm__(".pushsection .rodata\n"
        ".global ka_web_page, ka_web_page_end\n"
        "ka_web_page: .incbin \"agent/serve/page/index.html\"\n"
        "ka_web_page_end: .byte 0\n"
        ".popsection\n");
extern const char ka_web_page[], ka_web_page_end[];

/* The source list for what stands between <tag> and </tag>, once in the page. */
static void put_source(struct ka_buf *policy, const char *open, const char *close)
{
    char hash[KA_HASH_BASE64];
    const char *from = strstr(ka_web_page, open) + strlen(open), *to = strstr(from, close);
    ka_hash_base64(from, (size_t)(to - from), hash);
    ka_buf_printf(policy, " 'sha256-%s';", hash);
}

void ka_web_reply(struct ka_call *call)
{
    KA_AUTO_BUF struct ka_buf policy = {0};
    ka_buf_puts(&policy, "default-src 'none'; script-src");
    put_source(&policy, "<script>", "</script>");
    ka_buf_puts(&policy, " style-src");
    put_source(&policy, "<style>", "</style>");
    ka_buf_puts(&policy, " img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none';"
                         " frame-ancestors 'none'; require-trusted-types-for 'script'");
    const char *headers[] = {"Content-Security-Policy", policy.data, "Referrer-Policy", "no-referrer", NULL};
    const struct ka_reply reply = {.status = 200,
                                   .type = "text/html; charset=utf-8",
                                   .body = ka_web_page,
                                   .len = (size_t)(ka_web_page_end - ka_web_page),
                                   .headers = headers};
    ka_call_reply(call, &reply);
}
