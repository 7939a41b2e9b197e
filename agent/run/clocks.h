/* What nvidia-smi says of a GPU while something is timed: clocks, temperature, power, and what holds the
 * clocks down. Read every other second on a thread; nothing is ever set. Loop thread only. */
#ifndef KA_CLOCKS_H
#define KA_CLOCKS_H

#include <jansson.h>

struct ka_clocks;
struct ka_loop;

/* `done` runs once, on the loop, after ka_clocks_stop(); it owns the list [{"sm_mhz", "memory_mhz",
 * "max_sm_mhz", "celsius", "watts", "throttle"}], an entry a reading of that GPU; empty where there is
 * no nvidia-smi on PATH. `throttle` is the driver's word of bits. `gpu`: its number or UUID, copied. */
struct ka_clocks *ka_clocks_start(struct ka_loop *loop, const char *gpu,
                                  void (*done)(void *arg, json_t *readings), void *arg);
/* The handle is gone. Once. */
void ka_clocks_stop(struct ka_clocks *clocks);

#endif
