/* SPDX-License-Identifier: Apache-2.0 */
/** @file loom_cuda.h  What the files of ExpertLoom's CUDA kernels share; see docs/internals/loom_cuda.md. */
#ifndef LF_LOOM_CUDA_H
#define LF_LOOM_CUDA_H

#ifdef __cplusplus
#include <cuda_runtime.h>
extern "C" {
#endif
#include "device/cuda/cuda_int.h"
#include "loom/loom_int.h"

extern const lf__loom_kernels lf__loom_cuda;

/** Make the call's device current for this thread; returns the one that was, for lf__loom_cuda_leave. */
int lf__loom_cuda_enter(const lf__loom_call *call);
/** The end of every call: puts the device back. `rc` is passed through unless it is LF_OK: then errors of the launch named
 *  `kernel` are looked for, and a call that is to be finished on return is waited for. */
lf_status lf__loom_cuda_leave(const lf__loom_call *call, int before, lf_status rc, const char *kernel);

enum { LF_LOOM_CUDA_SCRATCH = 1 << 19 }; /* bytes; no operation ever needs more */
/** LF_LOOM_CUDA_SCRATCH bytes of device memory that work queued on the call's stream may use until the next operation on that
 *  stream. Allocated when a stream, or a graph that is being captured, first asks; never freed.
 *  LF_ERR_NOMEM, LF_ERR_DEVICE. Threads: any. */
lf_status lf__loom_cuda_scratch(const lf__loom_call *call, void **out);

/* loom_cuda_router.cu */
lf_status lf__loom_cuda_router(const lf__loom_call *call, const lf__loom_args *args);
lf_status lf__loom_cuda_router_backward(const lf__loom_call *call, const lf__loom_args *args);
/* loom_cuda_route.cu */
lf_status lf__loom_cuda_route(const lf__loom_call *call, const lf__loom_args *args);
lf_status lf__loom_cuda_route_backward(const lf__loom_call *call, const lf__loom_args *args);
/* loom_cuda_sort.cu */
lf_status lf__loom_cuda_sort(const lf__loom_call *call, const lf__loom_args *args);
/* loom_cuda_dx.cu: backward of permute with a router, where it fits */
bool lf__loom_cuda_dx_fits(const lf__loom_rows_args *args);
void lf__loom_cuda_dx(const lf__loom_rows_args *args, cudaStream_t stream);
/* loom_cuda_rows.cu */
lf_status lf__loom_cuda_permute(const lf__loom_call *call, const lf__loom_args *args);
lf_status lf__loom_cuda_permute_backward(const lf__loom_call *call, const lf__loom_args *args);
lf_status lf__loom_cuda_combine(const lf__loom_call *call, const lf__loom_args *args);
lf_status lf__loom_cuda_combine_backward(const lf__loom_call *call, const lf__loom_args *args);
/* loom_cuda_sweep.cu */
lf_status lf__loom_cuda_adamw(const lf__loom_call *call, const lf__loom_args *args);
lf_status lf__loom_cuda_sumsq(const lf__loom_call *call, const lf__loom_args *args);
lf_status lf__loom_cuda_add(const lf__loom_call *call, const lf__loom_args *args);
lf_status lf__loom_cuda_clip(const lf__loom_call *call, const lf__loom_args *args);
/* loom_cuda_norm.cu */
lf_status lf__loom_cuda_add_norm(const lf__loom_call *call, const lf__loom_args *args);
lf_status lf__loom_cuda_combine_add_norm(const lf__loom_call *call, const lf__loom_args *args);
lf_status lf__loom_cuda_add_norm_backward(const lf__loom_call *call, const lf__loom_args *args);
/* loom_cuda_loss.cu */
lf_status lf__loom_cuda_cross_entropy(const lf__loom_call *call, const lf__loom_args *args);
/* loom_cuda_experts.c; without LF_LOOM_CUTLASS experts_open alone, which refuses */
lf_status lf__loom_cuda_experts_open(void *context, const lf__loom_layer *layer, void **plan);
void lf__loom_cuda_experts_close(void *context, void *plan);
lf_status lf__loom_cuda_experts_forward(const lf__loom_call *call, const lf__loom_args *args);
lf_status lf__loom_cuda_experts_backward(const lf__loom_call *call, const lf__loom_args *args);

#ifdef __cplusplus
}
#endif
#endif
