/* Any JSON as what the children of a benchmark wrote: judged and told without a fault. */
#include <stdlib.h>
#include <string.h>

#include "agent/core/bench_result.h"
#include "agent/core/bench_text.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    json_t *doc = json_loadb((const char *)data, size, 0, NULL);
    if (!doc)
        return 0;
    json_t *shapes = json_pack("[{s:i, s:{s:i}}]", "id", 0, "dims", "M", 8);
    const struct ka_bench_facts facts = {.shapes = shapes,
                                         .ceilings = json_object_get(doc, "ceilings"),
                                         .timed = json_object_get(doc, "timed"),
                                         .wall_seconds = 1e6,
                                         .min_rel_impr = 0.02};
    json_t *result = ka_bench_result(&facts);
    struct ka_buf out = {0};
    if (!result)
        abort();
    ka_bench_text(result, &out);
    if (!out.len)
        abort();
    char *text = json_dumps(result, JSON_COMPACT); /* as bench.json: finite numbers, valid UTF-8 */
    if (!text)
        abort();
    free(text);
    ka_buf_free(&out);
    json_decref(result);
    json_decref(shapes);
    json_decref(doc);
    return 0;
}
