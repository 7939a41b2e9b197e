/* Who is on which card. Knows no child and no kernel. */
#include "cards.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/files.h"
#include "base/log.h"

#define EMPTIED 'e'           /* the first byte of the gate: who has it wants the card empty */
#define PAUSE_NS 1000000000LL /* a turn for those who wait: they look four times a second */

struct card {
    char *name;              /* NULL: it is not named */
    unsigned runs, children; /* beside those that have, or ask for, it to themselves */
    unsigned asking;         /* children that are stopped until they have it so */
    bool ours;               /* the lock is held alone */
    bool alone;              /* one child has it to itself */
    bool awaited;            /* by one that is to have it so */
    bool emptied;            /* that one wants it empty */
    bool aside;              /* its children are stopped, and the lock is given up */
    int using;               /* its descriptor holds the lock of those at work, shared or alone; -1 */
    int gate;                /* that of whoever is alone; -1 */
};

struct ka_cards {
    size_t count;
    unsigned children;
    bool told; /* that there are no locks */
    struct card list[KA_CARDS_MAX];
};

/* ---- the list ---- */

static bool is_name(const char *text, size_t len)
{
    for (size_t i = 0; i < len; i++)
        if (!isalnum((unsigned char)text[i]) && !strchr("-_.:/", text[i]))
            return false;
    return len > 0;
}

static bool has(const struct ka_cards *cards, const char *text, size_t len)
{
    for (size_t i = 0; i < cards->count; i++)
        if (strlen(cards->list[i].name) == len && memcmp(cards->list[i].name, text, len) == 0)
            return true;
    return false;
}

static int add(struct ka_cards *cards, const char *text, size_t len, struct ka_err *err)
{
    if (!is_name(text, len))
        return ka_fail(err, -EINVAL, "gpus: '%.*s' is no GPU's number or name", (int)len, text);
    if (has(cards, text, len))
        return ka_fail(err, -EINVAL, "gpus: %.*s is there twice", (int)len, text);
    if (cards->count == KA_CARDS_MAX)
        return ka_fail(err, -EINVAL, "gpus: more than %d", KA_CARDS_MAX);
    cards->list[cards->count++] = (struct card){.name = ka_strndup(text, len), .using = -1, .gate = -1};
    return 0;
}

int ka_cards_new(const char *names, unsigned children, struct ka_cards **out, struct ka_err *err)
{
    struct ka_cards *cards = ka_calloc(1, sizeof(*cards));
    int rc = 0;
    cards->children = children ? children : 1;
    if (!*names)
        cards->list[cards->count++] = (struct card){.using = -1, .gate = -1};
    for (const char *at = names; *names && at && rc == 0;) {
        at += strspn(at, " ");
        size_t len = strcspn(at, ","), end = len;
        while (end && at[end - 1] == ' ')
            end--;
        rc = add(cards, at, end, err);
        at = at[len] ? at + len + 1 : NULL;
    }
    if (rc) {
        ka_cards_free(cards);
        return rc;
    }
    *out = cards;
    return 0;
}

static void close_at(int *fd)
{
    ka_close_at(fd);
    *fd = -1;
}

void ka_cards_free(struct ka_cards *cards)
{
    if (!cards)
        return;
    for (size_t i = 0; i < cards->count; i++) {
        free(cards->list[i].name);
        close_at(&cards->list[i].using);
        close_at(&cards->list[i].gate);
    }
    free(cards);
}

size_t ka_cards_count(const struct ka_cards *cards)
{
    return cards->count;
}

const char *ka_cards_name(const struct ka_cards *cards, size_t card)
{
    return cards->list[card].name;
}

size_t ka_cards_take(struct ka_cards *cards)
{
    size_t least = 0;
    for (size_t i = 1; i < cards->count; i++)
        if (cards->list[i].runs < cards->list[least].runs)
            least = i;
    cards->list[least].runs++;
    return least;
}

void ka_cards_give(struct ka_cards *cards, size_t card)
{
    cards->list[card].runs--;
}

/* ---- locks ---- */

static int open_lock(const struct card *card, const char *what, struct ka_err *err)
{
    const char *given = getenv("RUNTIME_DIRECTORY"), *folder = given ? given : getenv("XDG_RUNTIME_DIR");
    KA_AUTO_FREE char *name = ka_strdup(card->name ? card->name : "0");
    for (char *at = name; *at; at++)
        if (*at == '/')
            *at = '_';
    KA_AUTO_FREE char *path =
        ka_format("%s/kernel-agent-%s-%u-%s.lock", folder && folder[0] == '/' ? folder : "/tmp", what,
                  (unsigned)getuid(), name);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    return fd >= 0 ? fd : ka_fail(err, -errno, "%s: %s", path, strerror(errno));
}

/* 0, -EAGAIN: others hold it; -errno. The lock is the descriptor's, not the process': what it closes
 * elsewhere does not let go of it. */
static int lock(int fd, short type)
{
    struct flock wanted = {.l_type = type, .l_whence = SEEK_SET};
    if (fcntl(fd, F_OFD_SETLK, &wanted) == 0)
        return 0;
    return errno == EACCES ? -EAGAIN : -errno;
}

/* Without a lock of its own, so that it never keeps anybody out. */
static bool is_locked(int fd, short against)
{
    struct flock found = {.l_type = against, .l_whence = SEEK_SET};
    return fcntl(fd, F_OFD_GETLK, &found) == 0 && found.l_type != F_UNLCK;
}

static bool is_gate_closed(const struct card *card)
{
    KA_AUTO_CLOSE int gate = open_lock(card, "bench", NULL);
    return gate >= 0 && is_locked(gate, F_RDLCK);
}

static bool is_used(const struct card *card)
{
    KA_AUTO_CLOSE int using = open_lock(card, "gpu", NULL);
    return using >= 0 && is_locked(using, F_WRLCK);
}

size_t ka_cards_pick(const struct ka_cards *cards)
{
    size_t open = cards->count;
    for (size_t i = 0; i < cards->count; i++) {
        if (is_gate_closed(&cards->list[i]))
            continue;
        if (!is_used(&cards->list[i]))
            return i;
        open = open < i ? open : i;
    }
    return open < cards->count ? open : 0;
}

static bool says_emptied(int gate)
{
    char first = 0;
    return pread(gate, &first, 1, 0) == 1 && first == EMPTIED;
}

/* A write is also what is taken for the end of somebody's turn (is_just_released), so only where need be. */
static void say_emptied(int gate, bool emptied)
{
    char first = emptied ? EMPTIED : '\n';
    if (says_emptied(gate) != emptied && pwrite(gate, &first, 1, 0) < 0)
        ka_log(KA_LOG_DEBUG, "a GPU's lock: %s", strerror(errno)); /* then others are stopped, or ended */
}

/* Whether somebody had the card alone a moment ago: the time of the file, which is empty before the first
 * time, says so to every process. */
static bool is_just_released(const struct card *card)
{
    struct stat status;
    struct timespec now;
    KA_AUTO_CLOSE int gate = open_lock(card, "bench", NULL);
    if (gate < 0 || fstat(gate, &status) || !status.st_size || clock_gettime(CLOCK_REALTIME, &now))
        return false;
    long long since =
        (now.tv_sec - status.st_mtim.tv_sec) * 1000000000LL + now.tv_nsec - status.st_mtim.tv_nsec;
    return since >= 0 && since < PAUSE_NS;
}

/* Where files cannot be locked, things go on as if nobody else were there. */
static int share(struct ka_cards *cards, struct card *card)
{
    struct ka_err err;
    int fd = open_lock(card, "gpu", &err), rc = fd < 0 ? fd : lock(fd, F_RDLCK);
    if (rc == 0) {
        card->using = fd;
        return 0;
    }
    if (fd >= 0)
        close(fd);
    if (rc == -EAGAIN)
        return rc;
    if (!cards->told)
        ka_log(KA_LOG_WARN, "a benchmark would not know that this GPU is used: %s",
               fd < 0 ? err.msg : strerror(-rc));
    cards->told = true;
    return 0;
}

bool ka_cards_enter(struct ka_cards *cards, size_t i, bool *elsewhere)
{
    struct card *card = &cards->list[i];
    if (card->alone || card->awaited || card->aside || card->children + card->asking >= cards->children)
        return false;
    if (is_gate_closed(card) || (card->children == 0 && share(cards, card))) {
        *elsewhere = true;
        return false;
    }
    card->children++;
    return true;
}

void ka_cards_leave(struct ka_cards *cards, size_t i)
{
    struct card *card = &cards->list[i];
    if (--card->children)
        return;
    if (!card->ours && !card->aside)
        close_at(&card->using);
    card->aside = false;
}

/* ---- alone ---- */

static int wait_for_lock(struct card *card)
{
    int rc = lock(card->using, F_WRLCK);
    card->ours = rc == 0;
    return rc;
}

static void release(struct card *card)
{
    if (card->ours && card->gate >= 0 && pwrite(card->gate, "\n", 1, 0) < 0)
        ka_log(KA_LOG_DEBUG, "a GPU's lock: %s", strerror(errno)); /* then nobody pauses */
    card->ours = false;
    close_at(&card->using);
    close_at(&card->gate);
}

/* Gate and lock. 0; -EAGAIN: the gate is ours, and others are still at work; -EBUSY: it is somebody else's;
 * another error: there is no file to lock. */
static int seize(struct card *card)
{
    int rc = 0;
    if (card->gate < 0) {
        rc = card->gate = open_lock(card, "bench", NULL);
        if (rc >= 0)
            rc = card->using = open_lock(card, "gpu", NULL);
        if (rc >= 0 && (rc = lock(card->gate, F_WRLCK)) == -EAGAIN)
            rc = -EBUSY;
    }
    if (rc == 0) {
        say_emptied(card->gate, card->emptied);
        rc = wait_for_lock(card);
    }
    if (rc && rc != -EAGAIN)
        release(card);
    return rc;
}

/* Where files cannot be locked the card is had all the same. */
bool ka_cards_enter_alone(struct ka_cards *cards, size_t i, bool emptied, bool *elsewhere)
{
    struct card *card = &cards->list[i];
    if (card->alone)
        return false;
    if (!card->awaited && is_just_released(card)) {
        *elsewhere = true;
        return false;
    }
    card->awaited = true;
    card->emptied = emptied;
    if (card->children && !card->aside)
        return false;
    int rc = seize(card);
    if (rc == -EAGAIN || rc == -EBUSY) {
        *elsewhere = true;
        return false;
    }
    card->awaited = false;
    card->alone = true;
    return true;
}

void ka_cards_leave_alone(struct ka_cards *cards, size_t i, bool began)
{
    struct card *card = &cards->list[i];
    if (began)
        card->alone = false;
    else
        card->awaited = false;
    if (card->gate >= 0 && !card->alone)
        release(card);
}

/* ---- turns ---- */

void ka_cards_turn_ask(struct ka_cards *cards, size_t i)
{
    cards->list[i].asking++;
    ka_cards_leave(cards, i);
}

bool ka_cards_turn_begin(struct ka_cards *cards, size_t i, bool *elsewhere)
{
    bool begins = ka_cards_enter_alone(cards, i, false, elsewhere);
    cards->list[i].asking -= begins;
    return begins;
}

void ka_cards_turn_end(struct ka_cards *cards, size_t i)
{
    struct card *card = &cards->list[i];
    ka_cards_leave_alone(cards, i, true);
    card->children++;
    card->aside = true;
}

void ka_cards_turn_drop(struct ka_cards *cards, size_t i)
{
    cards->list[i].asking--;
    ka_cards_leave_alone(cards, i, false);
}

/* ---- making way ---- */

bool ka_cards_is_wanted(const struct ka_cards *cards, size_t i)
{
    const struct card *card = &cards->list[i];
    if (card->alone || card->awaited)
        return !card->emptied;
    if (card->gate >= 0)
        return false;
    KA_AUTO_CLOSE int gate = open_lock(card, "bench", NULL);
    return gate >= 0 && is_locked(gate, F_RDLCK) && !says_emptied(gate);
}

void ka_cards_step_aside(struct ka_cards *cards, size_t i)
{
    struct card *card = &cards->list[i];
    if (!card->ours && !card->aside)
        close_at(&card->using);
    card->aside = true;
}

bool ka_cards_step_back(struct ka_cards *cards, size_t i)
{
    struct card *card = &cards->list[i];
    if (!card->aside)
        return true;
    if (card->alone || card->awaited)
        return false;
    if (!card->ours && (is_gate_closed(card) || share(cards, card)))
        return false;
    card->aside = false;
    return true;
}

void ka_cards_look(const struct ka_cards *cards, size_t i, struct ka_card_use *use)
{
    const struct card *card = &cards->list[i];
    bool timed = card->alone || (card->gate < 0 && is_gate_closed(card));
    *use = (struct ka_card_use){.runs = card->runs,
                                .children = card->children + card->asking + card->alone,
                                .timed = timed,
                                .alone = timed || card->awaited};
}
