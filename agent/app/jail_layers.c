/* One harmless program in the jail, and the jail's report. Knows no layer by itself beyond the sentence on
 * what is lost without it. */
#include "jail_layers.h"

#include <string.h>

#include "agent/io/probe.h"

#define OUTPUT_MAX 65536
#define PATIENCE_MS 120000
#define WORDS_MAX 6

static const struct ka_layer layers[] = {
    {"limits", "a candidate can use all memory, processor time and file sizes"},
    {"caps", "a candidate started by root keeps root's powers"},
    {"pid", "leftover processes are found by their process group; setsid and setpgid are refused"},
    {"mount", "no size cap on a candidate's files; chmod, touch and extended attributes are refused"},
    {"net", "the filter of system calls alone keeps a candidate off the network"},
    {"landlock", "a candidate can read every file that this user can read"},
    {"seccomp", "a candidate can make every system call: sockets, ptrace, kernel interfaces"},
    {"cgroup", "memory is capped for each process, not summed over a check"},
};

const struct ka_layer *ka_layers_list(size_t *count)
{
    *count = KA_COUNT(layers);
    return layers;
}

int ka_layers_run(const char *jail, const char *scratch, const char *const *program, struct ka_buf *out,
                  struct ka_buf *report)
{
    const char *argv[8 + WORDS_MAX + 1] = {jail,   "--scratch",   scratch, "--require",
                                           "none", "--result-fd", "3",     "--"};
    const char *env[] = {NULL};
    for (size_t i = 0; program[i] && i < WORDS_MAX; i++)
        argv[8 + i] = program[i];
    return ka_probe_report(argv, env, PATIENCE_MS, out, report, NULL);
}

json_t *ka_layers_ask(const char *jail, const char *scratch, struct ka_err *err)
{
    static const char *const program[] = {"/bin/true", NULL};
    KA_AUTO_BUF struct ka_buf out = {.max = OUTPUT_MAX}, report = {.max = OUTPUT_MAX};
    ka_layers_run(jail, scratch, program, &out, &report);
    json_t *said = json_loads(ka_buf_str(&report), 0, NULL);
    if (!said)
        ka_fail(err, 0, "%s said nothing about its layers: %.300s", jail, ka_buf_str(&out));
    return said;
}

bool ka_layers_hold(const json_t *report, const char *name)
{
    return json_is_true(json_object_get(json_object_get(report, "layers"), name));
}

const char *ka_layers_level(const json_t *report)
{
    bool all = true;
    for (size_t i = 0; i < KA_COUNT(layers); i++)
        all = all && (strcmp(layers[i].name, "cgroup") == 0 || ka_layers_hold(report, layers[i].name));
    if (all)
        return "full";
    bool files = ka_layers_hold(report, "landlock") || ka_layers_hold(report, "mount");
    return files && ka_layers_hold(report, "seccomp") && ka_layers_hold(report, "limits") &&
                   ka_layers_hold(report, "caps")
               ? "reduced"
               : "missing";
}

json_t *ka_layers_lost(const json_t *report)
{
    json_t *lost = json_array();
    for (size_t i = 0; report && i < KA_COUNT(layers); i++)
        if (!ka_layers_hold(report, layers[i].name))
            json_array_append_new(lost,
                                  json_pack("{s:s, s:s}", "layer", layers[i].name, "lost", layers[i].lost));
    return lost;
}
