/* SPDX-License-Identifier: Apache-2.0 */
/* NexusSync on CUDA: the table. */
#include "nexus_cuda.h"
#include "device/cuda/cuda_int.h"
#include "nexus/nexus_int.h"

extern const lf__nexus_kernels lf__nexus_cuda;

/* The device becomes current for a launch; `before` is what was. */
static void enter(void *context, int *before)
{
    const int mine = ((const cuda_context *)context)->index;
    *before = mine;
    cudaGetDevice(before);
    if (*before != mine) cudaSetDevice(mine);
}

static lf_status leave(void *context, int before, cudaError_t error, void *stream, int32_t now, const char *what)
{
    if (error == cudaSuccess && now) error = cudaStreamSynchronize(stream);
    lf_status rc = error == cudaSuccess ? LF_OK : lf__cuda_fail(error, what);
    if (before != ((const cuda_context *)context)->index) cudaSetDevice(before);
    return rc;
}

static lf_status scale(void *context, void *stream, int32_t now, void *data, int64_t count, int32_t dtype, float factor)
{
    int before;
    enter(context, &before);
    return leave(context, before, lf__nexus_cuda_scale(stream, data, count, dtype == LF_DTYPE_BF16, factor), stream, now,
                 "nexus scale");
}

static lf_status topk(void *context, void *stream, int32_t now, const lf_topk *t, int32_t part)
{
    static const char *const names[] = {"nexus fold", "nexus select", "nexus pack", "nexus scatter", "nexus flush"};
    int before;
    enter(context, &before);
    return leave(context, before, lf__nexus_cuda_topk(stream, t, part), stream, now, names[part]);
}

static lf_status narrow(void *context, void *stream, int32_t now, const float *data, uint16_t *wire, int64_t count)
{
    int before;
    enter(context, &before);
    return leave(context, before, lf__nexus_cuda_narrow(stream, data, wire, count), stream, now, "nexus narrow");
}

static lf_status widen(void *context, void *stream, int32_t now, const uint16_t *wire, float *data, int64_t count, float factor)
{
    int before;
    enter(context, &before);
    return leave(context, before, lf__nexus_cuda_widen(stream, wire, data, count, factor), stream, now, "nexus widen");
}

const lf__nexus_kernels lf__nexus_cuda = {sizeof(lf__nexus_kernels), "cuda", scale, topk, narrow, widen};
