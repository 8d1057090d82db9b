/* SPDX-License-Identifier: Apache-2.0 */
/* The step clock on CUDA: the table. */
#include "scope_cuda.h"
#include "device/cuda/cuda_int.h"

extern const lf__scope_kernels lf__scope_cuda;

static lf_status stamp(void *context, void *stream, const lf__stamp *s)
{
    const int mine = ((const cuda_context *)context)->index;
    int before = mine;
    cudaGetDevice(&before);
    if (before != mine) cudaSetDevice(mine);
    cudaError_t error = lf__scope_cuda_stamp(stream, s);
    lf_status rc = error == cudaSuccess ? LF_OK : lf__cuda_fail(error, "scope_stamp");
    if (before != mine) cudaSetDevice(before);
    return rc;
}

const lf__scope_kernels lf__scope_cuda = {sizeof(lf__scope_kernels), "cuda", stamp};
