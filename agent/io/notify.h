/* What systemd is told of this service (sd_notify(3)): a datagram to the socket that NOTIFY_SOCKET names, and
 * where WATCHDOG_USEC asks for it, one from the loop every so often: a loop that hangs is started anew.
 * Without NOTIFY_SOCKET all of this does nothing. Loop thread only. */
#ifndef KA_NOTIFY_H
#define KA_NOTIFY_H

struct ka_loop;
struct ka_notify;

/* Takes both variables out of the environment: children are no services. */
struct ka_notify *ka_notify_start(struct ka_loop *loop);
/* "READY=1" and the like; several lines are one datagram. NULL is fine, as below. */
void ka_notify_say(struct ka_notify *notify, const char *text);
/* "RELOADING=1", which "READY=1" ends. */
void ka_notify_reloading(struct ka_notify *notify);
/* From the loop. */
void ka_notify_stop(struct ka_notify *notify);

#endif
