/* SPDX-License-Identifier: Apache-2.0 */
/* NexusSync on CUDA: the table. */
#include "nexus_cuda.h"
#include "device/cuda/cuda_int.h"
#include "nexus/nexus_int.h"

extern const lf__nexus_kernels lf__nexus_cuda;

static lf_status scale(void *context, void *stream, int32_t now, void *data, int64_t count, int32_t dtype, float factor)
{
    const int mine = ((const cuda_context *)context)->index;
    int before = mine;
    cudaGetDevice(&before);
    if (before != mine) cudaSetDevice(mine);
    cudaError_t error = lf__nexus_cuda_scale(stream, data, count, dtype == LF_DTYPE_BF16, factor);
    if (error == cudaSuccess && now) error = cudaStreamSynchronize(stream);
    lf_status rc = error == cudaSuccess ? LF_OK : lf__cuda_fail(error, "nexus scale");
    if (before != mine) cudaSetDevice(before);
    return rc;
}

const lf__nexus_kernels lf__nexus_cuda = {sizeof(lf__nexus_kernels), "cuda", scale, NULL};
