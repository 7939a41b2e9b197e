/* How many requests a client may send: a bucket for each client and one for all of them, which fill up again
 * at a steady rate. Pure; the time is the caller's, in seconds that only grow. */
#ifndef KA_RATE_H
#define KA_RATE_H

#include "base/base.h"

/* So many clients are told apart; one more takes the place of the one that was silent for longest. */
#define KA_RATE_CLIENTS 256
#define KA_RATE_BURST 4 /* seconds' worth of requests that may come at once */
#define KA_RATE_ALL 4   /* clients' worth that all of them may send together */

struct ka_rate_bucket {
    uint64_t client;
    double spent, seen; /* requests not yet made up for, and when that was so */
};

struct ka_rate {
    double per_second; /* of one client; 0: no limit */
    struct ka_rate_bucket all, clients[KA_RATE_CLIENTS];
};

/* May this client (a hash of who it is) send a request now? 0: yes, and it counts. Else the whole seconds
 * after which it may, from 1; a request that is refused costs nothing. */
unsigned ka_rate_take(struct ka_rate *rate, uint64_t client, double now);

#endif
