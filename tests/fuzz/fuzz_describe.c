/* Any JSON as what a child or an earlier process wrote: told in Markdown without a fault. */
#include <stdlib.h>

#include "agent/core/describe.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    int (*const all[])(const json_t *, struct ka_buf *) = {ka_describe_inspect, ka_describe_shapes,
                                                           ka_describe_draft,   ka_describe_facts,
                                                           ka_describe_attempt, ka_describe_dims};
    json_t *doc = json_loadb((const char *)data, size, JSON_DECODE_ANY, NULL);
    if (!doc)
        return 0;
    for (size_t i = 0; i < KA_COUNT(all); i++) {
        struct ka_buf out = {0};
        if (all[i](doc, &out))
            abort();
        ka_buf_free(&out);
    }
    struct ka_describe_sums sums;
    ka_describe_sum(doc, &sums);
    json_decref(doc);
    return 0;
}
