/* SPDX-License-Identifier: Apache-2.0 */
/* NexusSync on CUDA: scaling a chunk. */
#include <cuda_bf16.h>

#include "nexus_cuda.h"

enum { THREADS = 256, MOST_BLOCKS = 4096 };

/* x: (count), multiplied in place, rounded to nearest even */
static __global__ void scale_f32(float *x, int64_t count, float factor)
{
    const int64_t step = (int64_t)gridDim.x * THREADS;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < count; i += step) x[i] *= factor;
}

static __global__ void scale_bf16(__nv_bfloat16 *x, int64_t count, float factor)
{
    const int64_t step = (int64_t)gridDim.x * THREADS;
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < count; i += step)
        x[i] = __float2bfloat16_rn(__bfloat162float(x[i]) * factor);
}

cudaError_t lf__nexus_cuda_scale(cudaStream_t stream, void *data, int64_t count, int bf16, float factor)
{
    if (count <= 0) return cudaSuccess;
    int64_t blocks = (count + THREADS - 1) / THREADS;
    const unsigned grid = (unsigned)(blocks < MOST_BLOCKS ? blocks : MOST_BLOCKS);
    if (bf16) scale_bf16<<<grid, THREADS, 0, stream>>>((__nv_bfloat16 *)data, count, factor);
    else scale_f32<<<grid, THREADS, 0, stream>>>((float *)data, count, factor);
    return cudaGetLastError();
}
