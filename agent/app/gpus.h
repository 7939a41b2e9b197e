/* The NVIDIA GPUs of this machine. */
#ifndef KA_GPUS_H
#define KA_GPUS_H

#include <jansson.h>

/* Their names, "NVIDIA GPU" where the driver does not tell (new reference); empty: there is none. Opens no
 * device. */
json_t *ka_gpus_find(void);

#endif
