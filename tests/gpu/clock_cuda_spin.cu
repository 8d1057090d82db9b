/* SPDX-License-Identifier: Apache-2.0 */
/* Work of known length for t_clock_cuda.c. */
#include <cuda_runtime_api.h>
#include <stdint.h>

extern "C" cudaError_t clock_cuda_spin(cudaStream_t stream, const int64_t *ns);

/* *ns is read when the kernel runs, so a captured one can last longer in each replay. */
static __global__ void spin(const volatile int64_t *ns)
{
    const int64_t length = *ns;
    int64_t from, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(from));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    while (now - from < length);
}

cudaError_t clock_cuda_spin(cudaStream_t stream, const int64_t *ns)
{
    spin<<<1, 1, 0, stream>>>(ns);
    return cudaGetLastError();
}
