/* `kernel-agent doctor`: what this machine gives, and what is lost without what it does not give. */
#ifndef KA_DOCTOR_H
#define KA_DOCTOR_H

/* argv[0] is "doctor"; options: --json, --python PATH, and those that name endpoints and a model, which are
 * asked what models they have. Prints to stdout; blocks (a few seconds, for importing torch, at most ten
 * for each endpoint). Returns 0 when candidates can be run here, 6 when a required sandbox layer is missing,
 * 2 for usage, or without ka-jail or a Python whose torch and triton are recent enough. */
int ka_doctor_main(int argc, char **argv);

#endif
