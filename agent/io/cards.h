/* The GPUs of a process, its *cards*: each run has one, its children share it, so many at a time, and what
 * times kernels has one alone.
 *
 * Alone among all processes of this user that have the same runtime folder ($RUNTIME_DIRECTORY, as systemd
 * sets it, else $XDG_RUNTIME_DIR, else /tmp): two locked files a card say so. Whoever uses a card shares the
 * lock of the one; whoever is to have it alone first takes the other, at which nobody begins anything on that
 * card any more, and those at work make way: their children are stopped where they are, and go on later. Who
 * wants it empty, since it needs the memory, waits for their end instead, and says so in the file. The locks
 * keep order between programs that keep to them; they are no wall. Loop thread only. */
#ifndef KA_CARDS_H
#define KA_CARDS_H

#include "base/base.h"

#define KA_CARDS_MAX 64

struct ka_cards;

/* `names`: as CUDA_VISIBLE_DEVICES has them, with commas; "": one card that is not named, and children find
 * for themselves. At most `children` of them on a card at a time. -EINVAL: not such a list. */
int ka_cards_new(const char *names, unsigned children, struct ka_cards **out, struct ka_err *err);
void ka_cards_free(struct ka_cards *cards); /* NULL is fine */

size_t ka_cards_count(const struct ka_cards *cards);
const char *ka_cards_name(const struct ka_cards *cards, size_t card); /* NULL: it is not named */

/* The card with the fewest runs has one more, until that is given back. */
size_t ka_cards_take(struct ka_cards *cards);
void ka_cards_give(struct ka_cards *cards, size_t card);
/* For what only times: one that nobody is on, else one that nobody has alone, else the first. Nothing is
 * taken. */
size_t ka_cards_pick(const struct ka_cards *cards);

/* One more child on a card; false: not now. `*elsewhere` is set where that is since another process has the
 * card, or waits to have it, alone: of its end nobody tells. */
bool ka_cards_enter(struct ka_cards *cards, size_t card, bool *elsewhere);
/* The same for one that has the card to itself, since it times kernels: it begins when those at work have
 * made way, or, where it wants the card `emptied`, are through; until it leaves nobody else begins or goes
 * on. From the first call on nobody begins before it; one that never began has to leave too. For a second
 * after somebody had the card alone it is not yet to be had so again: else those who check would wait for as
 * long as others have something to time. */
bool ka_cards_enter_alone(struct ka_cards *cards, size_t card, bool emptied, bool *elsewhere);
void ka_cards_leave(struct ka_cards *cards, size_t card);
void ka_cards_leave_alone(struct ka_cards *cards, size_t card, bool began);

/* A child at work asks for the card alone, for as long as it times: the caller has stopped it, and it is no
 * longer one of those at work, but keeps its place among the children. Nobody waits for it, so that no two
 * can wait for each other: where another process wants the card empty, it has that with this one's memory. */
void ka_cards_turn_ask(struct ka_cards *cards, size_t card);
/* Its turn, under the conditions of ka_cards_enter_alone(). It may go on. */
bool ka_cards_turn_begin(struct ka_cards *cards, size_t card, bool *elsewhere);
/* The turn is over: it is at work again, and the caller has stopped it as all the others there are, until
 * ka_cards_step_back(). If the child itself is over, ka_cards_leave_alone() does. */
void ka_cards_turn_end(struct ka_cards *cards, size_t card);
/* It asked, and waits no longer: it is over. */
void ka_cards_turn_drop(struct ka_cards *cards, size_t card);

/* Whether our children on a card are to make way for one that has it alone, or waits to. */
bool ka_cards_is_wanted(const struct ka_cards *cards, size_t card);
/* All our children on the card are stopped: it may be had alone. */
void ka_cards_step_aside(struct ka_cards *cards, size_t card);
/* They are to go on; false: not yet. Until then none begins. */
bool ka_cards_step_back(struct ka_cards *cards, size_t card);

struct ka_card_use {
    unsigned runs, children; /* of this process; also those that are stopped */
    bool timed;              /* a child has it alone, or another process, or that waits for it */
    bool alone;              /* the same, or a child of ours waits for it */
};
void ka_cards_look(const struct ka_cards *cards, size_t card, struct ka_card_use *use);

#endif
