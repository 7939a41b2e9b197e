/* The page at `/`: one file, agent/serve/page/index.html, which is part of the program. */
#ifndef KA_WEB_H
#define KA_WEB_H

struct ka_call;

/* With headers that allow a browser its own script and style and nothing else: no other host, no markup that
 * came with data, no frame around it. */
void ka_web_reply(struct ka_call *call);

#endif
