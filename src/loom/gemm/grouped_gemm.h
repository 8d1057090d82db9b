/* SPDX-License-Identifier: Apache-2.0 */
/** @file grouped_gemm.h  The matrix products of a layer of SwiGLU experts of unequal sizes; see docs/internals/grouped_gemm.md.
 *
 *  Rows are sorted by expert: expert i has rows offset[i] to offset[i + 1]. Sizes differ in both directions (rows by routing,
 *  hidden size f_i by expert), row counts are read on the device, nothing is padded. All matrices are bf16 and row-major,
 *  products are summed in f32; gradients of weights are bf16 or f32.
 *
 *  Regions and what offset must be: loom.h. Every hidden size and d are multiples of 8: TMA moves 16 bytes. All addresses are
 *  16-byte aligned.
 *
 *  A call queues work on a CUDA stream and returns; it allocates nothing, never waits and can be captured. Every element of the
 *  rows and weights named is written; reruns give the same bits. Callers check arguments: this is between files of one library. */
#ifndef LF_GROUPED_GEMM_H
#define LF_GROUPED_GEMM_H

#include "loom/loom_layer.h"
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

typedef struct lf__gemm_plan lf__gemm_plan;

/** Make a plan for CUDA's current device: copies the experts to `table` (waits for that), prepares kernels. `layer` is in bf16.
 *  @param table device memory of n_experts rows of lf__loom_expert, 16-byte aligned, the plan's own as long as it lives.
 *  @param[out] out NULL on failure.  @return LF_ERR_UNSUPPORTED (no kernel for this device was compiled), LF_ERR_NOMEM,
 *  LF_ERR_DEVICE. */
lf_status lf__gemm_open(lf__gemm_plan **out, const lf__loom_layer *layer, void *table);
/** Free the plan; NULL is allowed. Queued work must be done. */
void lf__gemm_close(lf__gemm_plan *plan);
/** Device memory that a call works in, 256-byte aligned; what it holds does not matter. Calls in one stream may share it. */
size_t lf__gemm_scratch_bytes(const lf__gemm_plan *plan);

/** One operation. a, b, out: device addresses; b is for the DW ones, whose output is the plan's.
 *  @param offset (n_experts + 1) i32, device.  @param accumulate 1: add to the gradient (DW only; experts without rows are
 *  left alone, otherwise zeroed).  @param stream a cudaStream_t.
 *  @return LF_ERR_DEVICE.  Threads: any, the plan is only read. */
typedef struct lf__gemm_call {
    const int32_t *offset;
    const void *a, *b;
    void *out, *scratch;
    int32_t accumulate;
} lf__gemm_call;
lf_status lf__gemm_run(const lf__gemm_plan *plan, int32_t op, const lf__gemm_call *call, void *stream);

/** h = silu(gate) * up over the regions of gu; and backward: dgate, dup from dh, with h again (NULL: not wanted). dgu may be
 *  gu and h may be dh itself. f32 inside, rounded once.  @return LF_ERR_DEVICE. */
lf_status lf__gemm_swiglu(const lf__gemm_plan *plan, const int32_t *offset, const void *gu, void *h, void *stream);
lf_status lf__gemm_swiglu_back(const lf__gemm_plan *plan, const int32_t *offset, const void *gu, const void *dh, void *dgu,
                               void *h, void *stream);

/** Kernels that can do `op` on the plan's device, the plan's choice being one of them: a tuner measures and sets it.
 *  choose: LF_ERR_INVALID when there is no such kernel, LF_ERR_DEVICE; not during a capture or a call. name: NULL then. */
int32_t lf__gemm_n_choices(const lf__gemm_plan *plan, int32_t op);
const char *lf__gemm_choice_name(const lf__gemm_plan *plan, int32_t op, int32_t choice);
int32_t lf__gemm_choice(const lf__gemm_plan *plan, int32_t op); /* -1: no such op */
lf_status lf__gemm_choose(lf__gemm_plan *plan, int32_t op, int32_t choice);

#ifdef __cplusplus
}
#endif
#endif
