/* Counts over the queue's entries, made when they are asked for. */
#include "metrics.h"

#include <dirent.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "agent/io/cards.h"

#define WORDS 3
#define EXIT_NO_JAIL 6 /* a layer of the jail is missing */

static const char *const verdicts[WORDS] = {"verified", "not_verified", "unusable"};

struct counts {
    size_t states[KA_ENTRY_STATES], verdicts[WORDS], ended, attempts, no_jail, child_failures;
    double seconds, tokens_in, tokens_out, cost, gpu_seconds, waits;
};

static void count(struct counts *counts, const struct ka_entry *entry, double now)
{
    counts->states[entry->state]++;
    counts->attempts += (size_t)entry->attempt;
    counts->tokens_in += entry->tokens_in;
    counts->tokens_out += entry->tokens_out;
    counts->cost += entry->cost;
    counts->gpu_seconds += entry->gpu_seconds;
    counts->child_failures += (size_t)entry->child_failures;
    counts->no_jail += entry->state == KA_ENTRY_FAILED && entry->exit_code == EXIT_NO_JAIL;
    if (entry->state == KA_ENTRY_QUEUED && now - entry->submitted > counts->waits)
        counts->waits = now - entry->submitted;
    for (size_t i = 0; entry->verdict && i < WORDS; i++)
        counts->verdicts[i] += strcmp(entry->verdict, verdicts[i]) == 0;
    if (ka_entry_ended(entry) && entry->started > 0 && entry->ended >= entry->started) {
        counts->ended++;
        counts->seconds += entry->ended - entry->started;
    }
}

static void head(struct ka_buf *out, const char *name, const char *type, const char *help)
{
    ka_buf_printf(out, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

static double resident_bytes(void)
{
    unsigned long pages = 0;
    FILE *file = fopen("/proc/self/statm", "re");
    if (file && fscanf(file, "%*u %lu", &pages) != 1)
        pages = 0;
    if (file)
        fclose(file);
    return (double)pages * (double)sysconf(_SC_PAGESIZE);
}

static size_t open_descriptors(void)
{
    size_t open = 0;
    DIR *dir = opendir("/proc/self/fd");
    while (dir && readdir(dir))
        open++;
    if (dir)
        closedir(dir);
    return open > 3 ? open - 3 : 0; /* ".", "..", and that of the folder */
}

/* One family after the other, as the format wants it. */
static void write_cards(const struct ka_cards *cards, struct ka_buf *out)
{
    static const struct {
        const char *name, *help;
    } families[] = {
        {"kernel_agent_gpu_runs", "Runs that have the GPU."},
        {"kernel_agent_gpu_children", "Jailed children at work on the GPU."},
        {"kernel_agent_gpu_benchmark", "1 while a benchmark has the GPU alone, or waits for that."},
    };
    for (size_t f = 0; cards && f < KA_COUNT(families); f++) {
        head(out, families[f].name, "gauge", families[f].help);
        for (size_t i = 0; i < ka_cards_count(cards); i++) {
            struct ka_card_use use;
            const char *name = ka_cards_name(cards, i);
            ka_cards_look(cards, i, &use);
            const unsigned values[] = {use.runs, use.children, use.alone};
            ka_buf_printf(out, "%s{gpu=\"%s\"} %u\n", families[f].name, name ? name : "0", values[f]);
        }
    }
}

void ka_metrics_write(const struct ka_queue *queue, const struct ka_cards *cards, struct ka_buf *out)
{
    struct counts counts = {.ended = 0};
    time_t now = time(NULL);
    for (size_t i = 0; i < ka_queue_count(queue); i++)
        if (ka_queue_at(queue, i))
            count(&counts, ka_queue_at(queue, i), (double)now);
    head(out, "kernel_agent_runs", "gauge", "Runs in the ledger by state.");
    for (int i = 0; i < KA_ENTRY_STATES; i++)
        ka_buf_printf(out, "kernel_agent_runs{state=\"%s\"} %zu\n",
                      ka_entry_state_name((enum ka_entry_state)i), counts.states[i]);
    head(out, "kernel_agent_verdicts", "gauge", "Runs in the ledger by verdict.");
    for (size_t i = 0; i < WORDS; i++)
        ka_buf_printf(out, "kernel_agent_verdicts{verdict=\"%s\"} %zu\n", verdicts[i], counts.verdicts[i]);
    head(out, "kernel_agent_attempts", "gauge", "Attempts of the runs in the ledger.");
    ka_buf_printf(out, "kernel_agent_attempts %zu\n", counts.attempts);
    head(out, "kernel_agent_run_seconds", "summary", "From the start of a run to its end.");
    ka_buf_printf(out, "kernel_agent_run_seconds_sum %.3f\nkernel_agent_run_seconds_count %zu\n",
                  counts.seconds, counts.ended);
    head(out, "kernel_agent_tokens", "gauge", "Tokens of the runs in the ledger that have ended.");
    ka_buf_printf(out, "kernel_agent_tokens{direction=\"in\"} %.0f\n", counts.tokens_in);
    ka_buf_printf(out, "kernel_agent_tokens{direction=\"out\"} %.0f\n", counts.tokens_out);
    head(out, "kernel_agent_cost", "gauge", "Money for these tokens, where prices are set.");
    ka_buf_printf(out, "kernel_agent_cost %.6f\n", counts.cost);
    head(out, "kernel_agent_gpu_seconds", "gauge", "Seconds of jailed children of runs on a GPU.");
    ka_buf_printf(out, "kernel_agent_gpu_seconds %.3f\n", counts.gpu_seconds);
    head(out, "kernel_agent_child_failures", "gauge", "Jailed children that died or took too long.");
    ka_buf_printf(out, "kernel_agent_child_failures %zu\n", counts.child_failures);
    head(out, "kernel_agent_jail_failures", "gauge",
         "Runs that failed since a layer of the jail is missing.");
    ka_buf_printf(out, "kernel_agent_jail_failures %zu\n", counts.no_jail);
    head(out, "kernel_agent_oldest_queued_seconds", "gauge", "Since the oldest queued run was submitted.");
    ka_buf_printf(out, "kernel_agent_oldest_queued_seconds %.0f\n", counts.waits);
    write_cards(cards, out);
    head(out, "process_resident_memory_bytes", "gauge", "Resident memory of the service alone.");
    ka_buf_printf(out, "process_resident_memory_bytes %.0f\n", resident_bytes());
    head(out, "process_open_fds", "gauge", "Open descriptors of the service.");
    ka_buf_printf(out, "process_open_fds %zu\n", open_descriptors());
}
