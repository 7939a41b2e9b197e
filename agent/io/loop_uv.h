/* What is below agent/io/loop.h, for the files of this folder. */
#ifndef KA_LOOP_UV_H
#define KA_LOOP_UV_H

#include <uv.h>

struct ka_loop;

uv_loop_t *ka_loop_uv(struct ka_loop *loop);

#endif
