/* SPDX-License-Identifier: Apache-2.0 */
/* The crews' kernel tables of this device, by name. */
#include <string.h>

#include "cuda_int.h"
/* The list is all that this file knows of the crews. */
extern const struct lf__loom_kernels lf__loom_cuda;   /* loom/cuda */
extern const struct lf__nexus_kernels lf__nexus_cuda; /* nexus/cuda */
extern const struct lf__scope_kernels lf__scope_cuda; /* scope/cuda */

const void *lf__cuda_kernels(void *context, const char *crew)
{
    (void)context;
    if (strcmp(crew, "loom") == 0) return &lf__loom_cuda;
    if (strcmp(crew, "scope") == 0) return &lf__scope_cuda;
    return strcmp(crew, "nexus") == 0 ? &lf__nexus_cuda : NULL;
}
