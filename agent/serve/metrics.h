/* What the service says of itself to Prometheus (text format 0.0.4): the runs that are in its ledger, and the
 * process. */
#ifndef KA_METRICS_H
#define KA_METRICS_H

#include "base/base.h"
#include "queue.h"

void ka_metrics_write(const struct ka_queue *queue, const struct ka_cards *cards, struct ka_buf *out);

#endif
