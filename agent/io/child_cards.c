/* Who of the children is on a card, who is stopped there, and whose turn it is to have it alone.
 *
 * A child that times kernels shares its card like any other until it asks. Then it is stopped at once and is
 * nobody that others would have to wait for, so that two who ask never wait for each other, and whatever it
 * says, it computes nothing while somebody else times. Knows nothing of what requests and results mean. */
#include "child_internal.h"

#include <errno.h>
#include <sys/socket.h>

#include "base/log.h"
#include "cards.h"

#define LOOK_MS 50          /* whether somebody wants a card alone: nobody tells */
#define LONG_NS 5000000000u /* people are told of a wait that takes longer */

/* docs/protocol.md, "Turns": the child's two words, and ours. */
enum { ASKS = '?', IS_THROUGH = '.', BEGINS = '!' };

static bool is_on_cards(const struct child *c)
{
    return c->owner->cards && ka_child_req_is_gpu(c->req);
}

static bool is_ending(const struct child *c)
{
    return c->cancelled || c->timed_out || c->starved;
}

/* ---- stopping ---- */

uint64_t ka_child_paused_ns(const struct child *c)
{
    return c->paused_ns + (c->paused ? uv_hrtime() - c->paused_at : 0);
}

/* Of a tool and what it watches only the one would stop; a cold child is its jail's supervisor. They are
 * waited for. True: it is stopped. */
static bool pause_child(struct child *c)
{
    if (c->paused || is_ending(c) || c->req->local_sockets || !ka_zygote_pause(&c->job, true))
        return c->paused;
    c->paused = true;
    c->owner->paused++;
    c->paused_at = uv_hrtime();
    c->left_ms = uv_timer_get_due_in(&c->timer);
    uv_timer_stop(&c->timer);
    return true;
}

static void resume_child(struct child *c)
{
    if (!c->paused)
        return;
    c->paused_ns = ka_child_paused_ns(c);
    c->paused = false;
    c->owner->paused--;
    ka_zygote_pause(&c->job, false);
    if (!is_ending(c))
        uv_timer_start(&c->timer, ka_child_on_deadline, c->left_ms, 0);
}

static bool shares_card(const struct child *c, size_t card)
{
    return c->on_card == SHARES_CARD && c->req->card == card;
}

/* True: something has changed. */
static bool look_at_card(struct ka_children *cs, size_t card)
{
    unsigned there = 0, paused = 0, before = cs->paused;
    bool wanted = ka_cards_is_wanted(cs->cards, card);
    if (!wanted && !ka_cards_step_back(cs->cards, card))
        return false;
    for (struct child *c = cs->first; c; c = c->next) {
        if (!shares_card(c, card))
            continue;
        if (wanted)
            pause_child(c);
        else
            resume_child(c);
        there++;
        paused += c->paused;
    }
    if (wanted && there && paused == there)
        ka_cards_step_aside(cs->cards, card);
    return cs->paused != before;
}

/* ---- who waits ---- */

static bool waits_for_card(const struct child *c)
{
    return c->asks || (c->state == QUEUED && is_on_cards(c) && (c->alone || c->req->turns));
}

static void say_that_it_waits(struct child *c)
{
    struct ka_card_use use;
    if (c->said || !waits_for_card(c) || uv_hrtime() - c->since < LONG_NS)
        return;
    ka_cards_look(c->owner->cards, c->req->card, &use);
    if (!use.alone)
        return; /* it is full, or between two turns */
    c->said = true;
    ka_log(KA_LOG_INFO, "waiting for what others %s on the GPU", use.timed ? "time" : "check");
}

/* Whoever waits tries each time: that a card can be had now is nobody's to tell. */
static void on_look(uv_timer_t *timer)
{
    struct ka_children *cs = timer->data;
    bool changed = cs->kept_out, there = false, waits = false;
    for (size_t card = 0; card < ka_cards_count(cs->cards); card++)
        changed |= look_at_card(cs, card);
    for (struct child *c = cs->first; c; c = c->next) {
        say_that_it_waits(c);
        there |= c->on_card == SHARES_CARD;
        waits |= waits_for_card(c);
    }
    if (changed || waits)
        ka_child_kick(cs);
    if (cs->kept_out || there || waits)
        uv_timer_start(timer, on_look, LOOK_MS, 0);
}

void ka_child_watch_cards(struct ka_children *cs)
{
    if (!uv_is_active((uv_handle_t *)&cs->look))
        uv_timer_start(&cs->look, on_look, LOOK_MS, 0);
}

/* Who began already, and holds memory there, goes before who did not. */
static bool goes_before(const struct child *a, const struct child *b)
{
    return a->asks != b->asks ? a->asks : a->since < b->since;
}

/* The one who is to have the card alone next; NULL: nobody waits for that. */
static const struct child *next_alone(const struct ka_children *cs, size_t card)
{
    const struct child *next = NULL;
    for (const struct child *c = cs->first; c; c = c->next)
        if (waits_for_card(c) && (c->asks || c->alone) && c->req->card == card && !is_ending(c) &&
            (!next || goes_before(c, next)))
            next = c;
    return next;
}

/* ---- places ---- */

bool ka_child_enter_card(struct child *c)
{
    struct ka_children *cs = c->owner;
    size_t card = c->req->card;
    if (!is_on_cards(c))
        return true;
    if (!c->alone && ka_cards_enter(cs->cards, card, &cs->kept_out))
        c->on_card = SHARES_CARD;
    else if (c->alone && next_alone(cs, card) == c &&
             ka_cards_enter_alone(cs->cards, card, c->req->emptied, &cs->kept_out))
        c->on_card = HAS_CARD;
    if (c->on_card == SHARES_CARD || waits_for_card(c))
        ka_child_watch_cards(cs);
    return c->on_card != OFF_CARD;
}

void ka_child_leave_card(struct child *c)
{
    struct ka_cards *cards = c->owner->cards;
    if (!is_on_cards(c))
        return;
    if (c->asks)
        ka_cards_turn_drop(cards, c->req->card);
    else if (c->on_card == SHARES_CARD)
        ka_cards_leave(cards, c->req->card);
    else if (c->on_card == HAS_CARD || c->alone)
        ka_cards_leave_alone(cards, c->req->card, c->on_card == HAS_CARD);
    c->asks = false;
    c->on_card = OFF_CARD;
}

bool ka_child_alone_from_start(struct child *c)
{
    if (c->alone || !c->req->turns || !is_on_cards(c))
        return false;
    ka_child_leave_card(c);
    c->alone = true;
    c->since = uv_hrtime();
    c->state = QUEUED;
    c->owner->running--;
    c->owner->queued++;
    ka_child_kick(c->owner);
    return true;
}

/* ---- turns ---- */

/* A child that does not read what it waits for has no room for it some day: that is its own affair. */
static void say_begins(const struct child *c)
{
    const char word = BEGINS;
    if (send(c->turns_fd, &word, 1, MSG_NOSIGNAL | MSG_DONTWAIT) != 1)
        ka_log(KA_LOG_DEBUG, "a child was not told that it has its GPU alone");
}

static void ask(struct child *c)
{
    if (!pause_child(c))
        return; /* it is at its end */
    uv_poll_stop(&c->turns);
    ka_cards_turn_ask(c->owner->cards, c->req->card);
    c->on_card = OFF_CARD;
    c->asks = true;
    c->said = false;
    c->since = uv_hrtime();
    ka_child_watch_cards(c->owner);
    ka_child_kick(c->owner);
}

static void end_turn(struct child *c)
{
    if (c->alone || c->on_card != HAS_CARD)
        return;
    pause_child(c); /* as those who made way are, with whom it goes on */
    ka_cards_turn_end(c->owner->cards, c->req->card);
    c->on_card = SHARES_CARD;
    look_at_card(c->owner, c->req->card);
    ka_child_watch_cards(c->owner);
    ka_child_kick(c->owner);
}

/* One byte at a time. Whoever says anything else than is due has no more turns. */
static void on_word(uv_poll_t *poll, int status, int events)
{
    struct child *c = poll->data;
    char word = 0;
    (void)events;
    ssize_t n = status < 0 ? 0 : recv(c->turns_fd, &word, 1, MSG_DONTWAIT);
    if (n < 0 && (errno == EINTR || errno == EAGAIN))
        return;
    if (n == 1 && word == ASKS && c->alone)
        say_begins(c);
    else if (n == 1 && word == ASKS && c->on_card == SHARES_CARD)
        ask(c);
    else if (n == 1 && word == IS_THROUGH && c->on_card == HAS_CARD)
        end_turn(c);
    else {
        uv_poll_stop(poll);
        end_turn(c);
    }
}

int ka_child_turns_open(struct child *c, struct ka_err *err)
{
    int ends[2];
    if (!c->req->turns || !is_on_cards(c))
        return 0;
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
        return ka_fail(err, -errno, "no channel for a child's turns: %s", uv_strerror(-errno));
    c->turns_fd = ends[0];
    c->fds[KA_ZYGOTE_FDS - 1] = ends[1];
    ka_child_own(c, &c->turns);
    uv_poll_init(ka_loop_uv(c->owner->loop), &c->turns, c->turns_fd);
    return 0;
}

void ka_child_turns_listen(struct child *c)
{
    if (c->turns_fd >= 0)
        uv_poll_start(&c->turns, UV_READABLE, on_word);
}

static void begin_turn(struct child *c)
{
    c->asks = false;
    c->on_card = HAS_CARD;
    say_begins(c);
    ka_child_turns_listen(c);
    resume_child(c);
}

void ka_child_give_turns(struct ka_children *cs)
{
    for (struct child *c = cs->first; c; c = c->next)
        if (c->asks && next_alone(cs, c->req->card) == c &&
            ka_cards_turn_begin(cs->cards, c->req->card, &cs->kept_out))
            begin_turn(c);
}
