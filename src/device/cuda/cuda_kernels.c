/* SPDX-License-Identifier: Apache-2.0 */
/* The crews' kernel tables of this device, by name. */
#include <string.h>

#include "cuda_int.h"
#include "loom/loom_int.h"

extern const lf__loom_kernels lf__loom_cuda;

const void *lf__cuda_kernels(void *context, const char *crew)
{
    (void)context;
    return strcmp(crew, "loom") == 0 ? &lf__loom_cuda : NULL;
}
