/* The NVIDIA GPUs of this machine. */
#ifndef KA_GPUS_H
#define KA_GPUS_H

#include <jansson.h>

/* Their names, "NVIDIA GPU" where the driver does not tell (new reference); empty: there is none. Opens no
 * device. */
json_t *ka_gpus_find(void);

/* Those that children may use, as CUDA_VISIBLE_DEVICES has them, with commas: `asked` (NULL: not asked), else
 * that variable, else all there are by number. "": none, or none that can be told apart. free() it. */
char *ka_gpus_names(const char *asked);

#endif
