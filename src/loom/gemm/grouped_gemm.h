/* SPDX-License-Identifier: Apache-2.0 */
/** @file grouped_gemm.h  The matrix products of a layer of SwiGLU experts of unequal sizes; see docs/internals/grouped_gemm.md.
 *
 *  Rows are sorted by expert: expert i has rows offset[i] to offset[i + 1]. Sizes differ in both directions (rows by routing,
 *  hidden size f_i by expert), row counts are read on the device, nothing is padded. All matrices are bf16 and row-major,
 *  products are summed in f32; gradients of weights are bf16 or f32.
 *
 *  Regions: a matrix whose width depends on the expert (gu, dgu: 2 f_i; h, dh: f_i) is stored densely, expert after expert.
 *  With base_i = the sum of rows_j f_j over j < i, expert i's region starts at element base_i of h and dh and at element
 *  2 base_i of gu and dgu. The sum over all experts is at most max_rows max(f); lf__gemm_region counts it from host counts.
 *
 *  A call queues work on a CUDA stream and returns; it allocates nothing, never waits and can be captured. Rows behind
 *  offset[n_experts] are neither read nor written. Every element of the rows and weights named is written; reruns give the
 *  same bits. Not checked, because it lives on the device: offset must start at 0, not decrease and end at most at max_rows. */
#ifndef LF_GROUPED_GEMM_H
#define LF_GROUPED_GEMM_H

#include "loongforge/device.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    LF_GEMM_GU = 0,      /* gu (rows, 2 f) = a (rows, d) w_gu^T */
    LF_GEMM_Y = 1,       /* y (rows, d) = a = h (rows, f) w_down^T */
    LF_GEMM_DH = 2,      /* dh (rows, f) = a = dy (rows, d) w_down */
    LF_GEMM_DX = 3,      /* dx (rows, d) = a = dgu (rows, 2 f) w_gu */
    LF_GEMM_DW_GU = 4,   /* dw_gu (2 f, d) = or += a^T b, a = dgu (rows, 2 f), b = x (rows, d) */
    LF_GEMM_DW_DOWN = 5, /* dw_down (d, f) = or += a^T b, a = dy (rows, d), b = h (rows, f) */
    LF_GEMM_N_OPS = 6,
};

/* A layer. Copied; the arrays are host memory of n_experts. */
typedef struct lf__gemm_layer {
    int32_t n_experts; /* 1 to LF_MAX_EXPERTS */
    int32_t d;         /* a multiple of 8, like every hidden size: TMA moves 16 bytes */
    int64_t max_rows;
    const int32_t *hidden;
    const void *const *w_gu;   /* (2 f, d) bf16 each, gate's rows first; device addresses, 16-byte aligned */
    const void *const *w_down; /* (d, f) bf16 */
    void *const *dw_gu;        /* as w_gu, of grad_dtype; NULL: no gradients of weights in this plan */
    void *const *dw_down;
    int32_t grad_dtype; /* LF_DTYPE_F32 or LF_DTYPE_BF16 */
    int32_t device;     /* CUDA's index */
} lf__gemm_layer;

typedef struct lf__gemm_plan lf__gemm_plan;

/** Device memory that a plan needs: `table` is the plan's own as long as it lives; `scratch` may be shared by all plans whose
 *  calls run on one stream after another. Both 256-byte aligned.  @return LF_ERR_INVALID; LF_ERR_UNSUPPORTED (no kernel for
 *  this device was compiled); LF_ERR_DEVICE. */
lf_status lf__gemm_sizes(const lf__gemm_layer *layer, size_t *table_bytes, size_t *scratch_bytes);

/** Make a plan: checks the layer, copies the experts' table to the device (waits for that), prepares kernels. The memory stays
 *  the caller's.  @param[out] out NULL on failure.  @return as lf__gemm_sizes; LF_ERR_NOMEM. */
lf_status lf__gemm_open(lf__gemm_plan **out, const lf__gemm_layer *layer, void *table, void *scratch);
/** Free the plan; NULL is allowed. Queued work must be done. */
void lf__gemm_close(lf__gemm_plan *plan);

/** One operation. a, b, out: device addresses, 16-byte aligned; b NULL but for the DW ones, whose output is the plan's.
 *  @param offset (n_experts + 1) i32, device.  @param accumulate 1: add to the gradient (DW only; experts without rows are
 *  left alone, otherwise zeroed).  @param stream a cudaStream_t.
 *  @return LF_ERR_INVALID; LF_ERR_STATE (DW without gradients in the plan); LF_ERR_DEVICE. */
typedef struct lf__gemm_call {
    const int32_t *offset;
    const void *a, *b;
    void *out;
    int32_t accumulate;
} lf__gemm_call;
lf_status lf__gemm_run(lf__gemm_plan *plan, int32_t op, const lf__gemm_call *call, void *stream);

/** h = silu(gate) * up over the regions of gu; and backward: dgate, dup from dh, with h again (NULL: not wanted). dgu may be
 *  gu and h may be dh itself. f32 inside, rounded once.  @return LF_ERR_INVALID, LF_ERR_DEVICE. */
lf_status lf__gemm_swiglu(lf__gemm_plan *plan, const int32_t *offset, const void *gu, void *h, void *stream);
lf_status lf__gemm_swiglu_back(lf__gemm_plan *plan, const int32_t *offset, const void *gu, const void *dh, void *dgu, void *h,
                               void *stream);

/** Elements of h's regions for row counts on the host; gu has twice as many. */
int64_t lf__gemm_region(const lf__gemm_layer *layer, const int32_t *count);

/** Kernels that can do `op` on the plan's device, the plan's choice being one of them: a tuner measures and sets it.
 *  choose: LF_ERR_INVALID when there is no such kernel. name: NULL then. */
int32_t lf__gemm_n_choices(const lf__gemm_plan *plan, int32_t op);
const char *lf__gemm_choice_name(const lf__gemm_plan *plan, int32_t op, int32_t choice);
int32_t lf__gemm_choice(const lf__gemm_plan *plan, int32_t op); /* -1: no such op */
lf_status lf__gemm_choose(lf__gemm_plan *plan, int32_t op, int32_t choice);

#ifdef __cplusplus
}
#endif
#endif
