/* SPDX-License-Identifier: Apache-2.0 */
/** @file grouped_gemm_int.h  Between the plan (grouped_gemm.c) and the kernels (.cu); see docs/internals/grouped_gemm.md.
 *
 *  Every GEMM is D (m, n) = A (m, k) B (k, n) [+ D], D row-major, f32 accumulation, one per expert and all in one launch.
 *  Functions of the .cu files return CUDA errors; grouped_gemm.c turns them into a status with text. */
#ifndef LF_GROUPED_GEMM_INT_H
#define LF_GROUPED_GEMM_INT_H

#include <cuda_runtime_api.h>
#include <stdint.h>

#include "loom/loom_layer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Which of A's and B's dimensions is contiguous. Named as BLAS does for column-major: N means k of A or n of B is. */
enum {
    LF_GEMM_TN = 0, /* A: k contiguous, B: k contiguous. Forward: weights as PyTorch stores them. */
    LF_GEMM_NN = 1, /* A: k contiguous, B: n contiguous. Gradients of activations. */
    LF_GEMM_NT = 2, /* A: m contiguous, B: n contiguous. Gradients of weights. */
};

/* Who takes which tile; zeroed by lf__gemm_set_up. A ring's entry: step << 32 | ticket. */
enum { LF_GEMM_RING = 16, LF_GEMM_MAX_CLUSTERS = 256 };
typedef struct lf__gemm_queue {
    uint32_t next, pad[3];
    uint64_t ring[LF_GEMM_MAX_CLUSTERS][LF_GEMM_RING];
} lf__gemm_queue;

/* What one launch reads from the device: arrays of n_groups, filled by lf__gemm_set_up. Leading dimensions count elements. */
typedef struct lf__gemm_groups {
    int32_t *shape; /* (n_groups, 3): m, n, k; m is 0 where nothing is to be done */
    const void **a, **b;
    void **d;
    int64_t *lda, *ldb, *ldd;
    lf__gemm_queue *queue;
} lf__gemm_groups;

typedef struct lf__gemm_launch {
    lf__gemm_groups groups;
    int32_t n_groups, accumulate;
    int32_t device, n_units, n_resident; /* n_resident: clusters or blocks that run at once, from `prepare` */
    void *workspace;                     /* (kernel->workspace(n_units)) bytes, 128-byte aligned */
    cudaStream_t stream;
} lf__gemm_launch;

/* One compiled kernel. */
typedef struct lf__gemm_kernel {
    const char *name; /* tile, cluster and schedule */
    int32_t layout, out_dtype;
    int32_t capability;                          /* runs on this compute capability: 90 alone, or 80 and up */
    uint32_t prefer;                             /* bit 1 << op: the first choice for it where it was measured (see docs) */
    size_t (*workspace)(int32_t n_units);        /* may be 0 */
    cudaError_t (*prepare)(int32_t *n_resident); /* once, not in a capture */
    cudaError_t (*launch)(const lf__gemm_launch *launch);
} lf__gemm_kernel;

/* Kernels that were compiled, best first; the end is NULL. */
extern const lf__gemm_kernel *const lf__gemm_kernels[];

/* Operation `op` of grouped_gemm.h in terms of D = A B; one block writes the groups, others zero the weight gradients of
 * experts without rows (not when they accumulate). experts: (n_experts) device; offset: (n_experts + 1) device. */
typedef struct lf__gemm_setup {
    const lf__loom_expert *experts;
    const int32_t *offset;
    const void *a, *b;
    void *out;
    lf__gemm_groups groups;
    int32_t op, n_experts, d, out_bytes, accumulate;
} lf__gemm_setup;
cudaError_t lf__gemm_set_up(const lf__gemm_setup *setup, cudaStream_t stream);

/* experts and offset as above; gu: regions of (rows, 2 f), the others regions of (rows, f); see grouped_gemm.h. */
typedef struct lf__gemm_swiglu_args {
    const lf__loom_expert *experts;
    const int32_t *offset;
    int32_t n_experts, n_units;
    const void *gu, *dh;
    void *h, *dgu; /* backward: h may be NULL */
} lf__gemm_swiglu_args;
cudaError_t lf__gemm_swiglu_forward(const lf__gemm_swiglu_args *args, cudaStream_t stream);
cudaError_t lf__gemm_swiglu_backward(const lf__gemm_swiglu_args *args, cudaStream_t stream);

#ifdef __cplusplus
}
#endif
#endif
