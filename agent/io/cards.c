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
    unsigned runs, children; /* beside the one that has it to itself */
    bool ours;               /* alone */
    bool alone;              /* one child has it to itself */
    bool awaited;            /* by one that is to have it so */
    bool emptied;            /* that one wants it empty */
    bool aside;              /* its children are stopped, and the lock is given up */
    bool lent;               /* gate and lock are those of that child, not of ka_cards_seize() */
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
static bool is_locked(int fd)
{
    struct flock found = {.l_type = F_RDLCK, .l_whence = SEEK_SET};
    return fcntl(fd, F_OFD_GETLK, &found) == 0 && found.l_type != F_UNLCK;
}

static bool is_gate_closed(const struct card *card)
{
    KA_AUTO_CLOSE int gate = open_lock(card, "bench", NULL);
    return gate >= 0 && is_locked(gate);
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
    if (card->alone || card->awaited || card->aside || card->children >= cards->children)
        return false;
    if (!card->ours && (is_gate_closed(card) || (card->children == 0 && share(cards, card)))) {
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

int ka_cards_wait(struct ka_cards *cards, size_t i)
{
    struct card *card = &cards->list[i];
    int rc = lock(card->using, F_WRLCK);
    card->ours = rc == 0;
    return rc;
}

void ka_cards_release(struct ka_cards *cards, size_t i)
{
    struct card *card = &cards->list[i];
    if (card->ours && card->gate >= 0 && pwrite(card->gate, "\n", 1, 0) < 0)
        ka_log(KA_LOG_DEBUG, "a GPU's lock: %s", strerror(errno)); /* then nobody pauses */
    card->ours = false;
    close_at(&card->using);
    close_at(&card->gate);
}

static int try_seize(struct ka_cards *cards, size_t i, bool emptied, struct ka_err *err)
{
    struct card *card = &cards->list[i];
    if ((card->children && !card->aside) || card->gate >= 0)
        return ka_fail(err, -EBUSY, "this process uses the GPU itself");
    int rc = card->gate = open_lock(card, "bench", err);
    if (rc >= 0)
        rc = card->using = open_lock(card, "gpu", err);
    if (rc >= 0 && (rc = lock(card->gate, F_WRLCK)) == -EAGAIN)
        rc = ka_fail(err, -EBUSY, "another benchmark is running: two would time each other");
    if (rc == 0) {
        say_emptied(card->gate, emptied);
        rc = ka_cards_wait(cards, i);
    }
    if (rc && rc != -EAGAIN)
        ka_cards_release(cards, i);
    return rc;
}

int ka_cards_seize(struct ka_cards *cards, size_t *card, struct ka_err *err)
{
    size_t waits = cards->count, i = 0;
    int rc = -EBUSY;
    for (; i < cards->count; i++) {
        rc = try_seize(cards, i, true, err);
        if (rc == 0)
            break;
        if (rc == -EAGAIN && waits == cards->count)
            waits = i;
        else if (rc == -EAGAIN)
            ka_cards_release(cards, i);
    }
    if (waits < cards->count && rc == 0)
        ka_cards_release(cards, waits);
    else if (waits < cards->count)
        rc = -EAGAIN;
    if (rc == 0 || rc == -EAGAIN)
        *card = rc == 0 ? i : waits;
    return rc;
}

/* Gate and lock; true where files cannot be locked too. */
static bool lend(struct ka_cards *cards, struct card *card, size_t i, bool *elsewhere)
{
    struct ka_err err;
    if (card->ours)
        return true;
    int rc = card->gate >= 0 ? ka_cards_wait(cards, i) : try_seize(cards, i, card->emptied, &err);
    *elsewhere |= rc == -EAGAIN || rc == -EBUSY;
    card->lent = card->gate >= 0;
    return rc != -EAGAIN && rc != -EBUSY;
}

bool ka_cards_enter_alone(struct ka_cards *cards, size_t i, bool emptied, bool *elsewhere)
{
    struct card *card = &cards->list[i];
    if (card->alone)
        return false;
    if (!card->awaited && !card->ours && is_just_released(card)) {
        *elsewhere = true;
        return false;
    }
    card->awaited = true;
    card->emptied = emptied;
    if ((card->children && !card->aside) || !lend(cards, card, i, elsewhere))
        return false;
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
    if (card->lent && !card->alone)
        ka_cards_release(cards, i);
    card->lent = card->lent && card->alone;
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
    return gate >= 0 && is_locked(gate) && !says_emptied(gate);
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
    *use = (struct ka_card_use){.runs = card->runs,
                                .children = card->children + card->alone,
                                .alone =
                                    card->alone || card->awaited || (card->gate < 0 && is_gate_closed(card))};
}
