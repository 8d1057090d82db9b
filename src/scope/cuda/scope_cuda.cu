/* SPDX-License-Identifier: Apache-2.0 */
/* The step clock on CUDA: a stamp is a kernel of one thread that reads the device's clock. It is launched in stream order and
 * knows no step, so a captured one counts for whatever step is open when its graph is replayed. */
#include "scope_cuda.h"

static __global__ void scope_stamp(const lf__stamp stamp)
{
    int64_t now_ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now_ns));
    lf__meter_stamp(&stamp, now_ns);
}

cudaError_t lf__scope_cuda_stamp(cudaStream_t stream, const lf__stamp *stamp)
{
    scope_stamp<<<1, 1, 0, stream>>>(*stamp);
    return cudaGetLastError();
}
