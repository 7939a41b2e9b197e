/* A bucket holds what was spent, so that one full of zeros is a client who has not asked yet. */
#include "rate.h"

#include <math.h>

static struct ka_rate_bucket *find(struct ka_rate *rate, uint64_t client, double now)
{
    struct ka_rate_bucket *oldest = rate->clients;
    for (size_t i = 0; i < KA_RATE_CLIENTS; i++) {
        struct ka_rate_bucket *bucket = &rate->clients[i];
        if (bucket->client == client && bucket->seen > 0)
            return bucket;
        if (bucket->seen < oldest->seen)
            oldest = bucket;
    }
    *oldest = (struct ka_rate_bucket){.client = client, .seen = now};
    return oldest;
}

static void refill(struct ka_rate_bucket *bucket, double per_second, double now)
{
    bucket->spent = fmax(0, bucket->spent - fmax(0, now - bucket->seen) * per_second);
    bucket->seen = fmax(bucket->seen, now);
}

/* Seconds until there is room for one more. */
static double wait_of(const struct ka_rate_bucket *bucket, double per_second)
{
    return (bucket->spent + 1 - fmax(1, per_second * KA_RATE_BURST)) / per_second;
}

unsigned ka_rate_take(struct ka_rate *rate, uint64_t client, double now)
{
    double own = rate->per_second, all = own * KA_RATE_ALL;
    if (own <= 0)
        return 0;
    struct ka_rate_bucket *bucket = find(rate, client, now);
    refill(bucket, own, now);
    refill(&rate->all, all, now);
    double wait = fmax(wait_of(bucket, own), wait_of(&rate->all, all));
    if (wait > 1e-9)
        return (unsigned)fmax(1, ceil(wait));
    bucket->spent++;
    rate->all.spent++;
    return 0;
}
