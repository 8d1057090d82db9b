/* SPDX-License-Identifier: Apache-2.0 */
/** @file loom.h  ExpertLoom: router, routing, row permutation, the experts' products, norms, the loss, and the optimizer sweep.
 *
 *  All pointers are device memory of `device`; work is queued on `stream` (NULL: done on return). Shapes use n tokens,
 *  e experts, k choices a token, d features. Every output element is written; reruns give the same bits for any number of
 *  threads.
 *
 *  Common to all calls. Arguments are checked when the call is made: LF_ERR_INVALID names the value (a NULL pointer, a
 *  negative size, n k above INT32_MAX, a dtype other than F32 and BF16 where rows or gradients are meant). Memory stays the
 *  caller's and must be valid until the stream has done the work. Outputs do not overlap inputs. LF_ERR_UNSUPPORTED: the
 *  device has no kernels for this. LF_ERR_NOMEM: no room to queue the work. Threads: any. */
#ifndef LOONGFORGE_LOOM_H
#define LOONGFORGE_LOOM_H

#include "loongforge/map.h"

#ifdef __cplusplus
extern "C" {
#endif

#define LF_MAX_EXPERTS 256
#define LF_MAX_TOP_K 8

/** How many threads a kernel on the CPU may use: 0, the default, is one a core. Process-wide; results do not depend on it.
 *  @return LF_ERR_INVALID (negative). */
LF_API lf_status lf_loom_set_threads(int32_t threads);

/** Router product: logits[t, j] = <x[t], weight[j]>, summed in f32.
 *  x: (n, d) of dtype F32 or BF16; weight: (e, d) f32; logits: (n, e) f32. On another device than the CPU sums have another order:
 *  both are within 1e-6 of sum |x w|, d up to 4096. Infinities and NaN give logits that are not finite.
 *  @return LF_ERR_INVALID (e above LF_MAX_EXPERTS, negative n or d, or a NULL pointer). */
LF_API lf_status lf_loom_router(lf_device *device, lf_stream *stream, const void *x, const float *weight, int64_t n, int32_t e,
                                int64_t d, int32_t dtype, float *logits);
/** Gradient of the router's weight: dweight[j] = or += sum over t of dlogits[t, j] x[t], in f32, tokens cut into chunks that
 *  depend on the sizes alone. The gradient of x is lf_loom_permute_backward's.
 *  dlogits: (n, e) f32; x: (n, d) of dtype; dweight: (e, d) f32.
 *  @param accumulate 0: dweight is written, otherwise added to.
 *  @param workspace lf_loom_router_workspace bytes of device memory on 16, free again when the work is done.
 *  @return LF_ERR_INVALID. */
LF_API lf_status lf_loom_router_backward(lf_device *device, lf_stream *stream, const float *dlogits, const void *x, int64_t n,
                                         int32_t e, int64_t d, int32_t dtype, float *dweight, int32_t accumulate,
                                         void *workspace);
/** Bytes that lf_loom_router_backward needs beside its arrays.  @return LF_ERR_INVALID (negative). */
LF_API int64_t lf_loom_router_workspace(int64_t n, int32_t e, int64_t d);

/** What changes from step to step. In device memory, read when the work runs: a captured graph obeys new values. */
typedef struct lf_route_schedule {
    int32_t step;      /* of the noise */
    float noise_scale; /* 0: no noise is drawn */
    float temperature; /* above 0 */
} lf_route_schedule;

/** Input of lf_loom_route. */
typedef struct lf_route_args {
    size_t size;
    const float *logits;               /* (n, e) f32 */
    const int64_t *token;              /* (n) global number of each token; NULL: no noise */
    const uint8_t *valid;              /* (n) tokens with 0 are routed nowhere; NULL: all are valid */
    const lf_route_schedule *schedule; /* one, device memory; NULL: no noise, temperature 1 */
    int64_t n, seed;
    int32_t e, k, layer;
} lf_route_args;

/** Where every token goes. All device memory, sized by the caller. Arrays that a call does not touch may be NULL: route writes
 *  all (prob where given), sort count, offset, row and slot; route's backward reads expert and weight (and prob for dprob_sum),
 *  permute row and offset (and slot where given), the others slot, offset and weight (permute_backward no weight). */
typedef struct lf_routing {
    size_t size;
    int32_t *expert; /* (n, k) chosen experts, best first */
    float *weight;   /* (n, k) renormalised gate weights */
    float *prob;     /* (n, e) softmax(logits / temperature), without noise */
    int32_t *count;  /* (e) rows an expert gets */
    int32_t *offset; /* (e + 1) running sum of count */
    int32_t *row;    /* (n k) sorted row -> token * k + choice, stable by token */
    int32_t *slot;   /* (n k) token * k + choice -> sorted row: the inverse of row */
} lf_routing;

/** Route: noise, top-k, renormalised softmax of the chosen, sort by expert; and the statistics of the balance loss.
 *  z = (logits + noise_scale * noise) / temperature, each operation rounded to f32. The k largest z are chosen, ties to the lower
 *  expert, a NaN only when nothing else is left; weights are the softmax of the chosen z. Every device gives the same bits.
 *
 *  Noise is gumbel noise keyed by global token: Philox4x32-10 (Salmon et al., SC'11), counter (token_lo, token_hi, step,
 *  layer * 64 + expert / 4), key = seed, word expert % 4; u = (word >> 8) * 2^-24 + 2^-25; -log(-log(u)) in double precision,
 *  then rounded.
 *
 *  Tokens that are not valid have expert -1 and weight 0, and their slots come after offset[e]. A token whose z hold a NaN, or
 *  whose largest z is infinite, has weights of NaN; so do its probabilities when that is true of its logits.
 *  @param[out] prob_sum (e) f32 or NULL: sum of prob over valid tokens, in units of 2^-32 so that no order shows; needs no
 *  routing.prob. NaN when a valid token's are.
 *  @return LF_ERR_INVALID (e, k above e or LF_MAX_TOP_K, a negative layer). The schedule is not checked: it is read later. */
LF_API lf_status lf_loom_route(lf_device *device, lf_stream *stream, const lf_route_args *args, const lf_routing *out,
                               float *prob_sum);
/** Sort choices that were made elsewhere: fills count, offset, row and slot of `out` as lf_loom_route does and touches no other
 *  array of it.  expert: (n, k) i32; what lies outside 0 to e - 1 (-1, say) is routed nowhere. A token may name an expert twice.
 *  @return LF_ERR_INVALID (e, k above e or LF_MAX_TOP_K). */
LF_API lf_status lf_loom_sort(lf_device *device, lf_stream *stream, const int32_t *expert, int64_t n, int32_t e, int32_t k,
                              const lf_routing *out);
/** Gradients of the gate weights and of prob_sum to the logits; the noise is constant. dweight: (n, k) f32; dprob_sum: (e) f32 or
 *  NULL (none, prob is then not read); valid, schedule: as route had them; dlogits: (n, e) f32, zero for tokens that are not
 *  valid. The weights' part is zero for experts not chosen. */
LF_API lf_status lf_loom_route_backward(lf_device *device, lf_stream *stream, const lf_routing *routing, const uint8_t *valid,
                                        const float *dweight, const float *dprob_sum, int64_t n, int32_t e, int32_t k,
                                        const lf_route_schedule *schedule, float *dlogits);

/** xs[r] = x[row[r] / k].  x: (n, d), xs: (n k, d) of dtype; rows behind offset[e] are zero. */
LF_API lf_status lf_loom_permute(lf_device *device, lf_stream *stream, const lf_routing *routing, const void *x, int64_t n,
                                 int32_t e, int32_t k, int64_t d, int32_t dtype, void *xs);
/** Backward of permute, and of the router beside it: dx[t] = sum over choices c of dxs[slot[t k + c]], in order of c, plus (with
 *  dlogits) the sum over experts j of dlogits[t, j] weight[j]; both sums f32, added and rounded once. dlogits: (n, e) f32 and
 *  weight: (e, d) f32, or both NULL. Rows of dxs behind offset[e] are not read: a token routed nowhere gets only the second sum. */
LF_API lf_status lf_loom_permute_backward(lf_device *device, lf_stream *stream, const lf_routing *routing, const void *dxs,
                                          int64_t n, int32_t e, int32_t k, int64_t d, int32_t dtype, const float *dlogits,
                                          const float *weight, void *dx);
/** y[t] = sum over c of weight[t, c] * ys[slot[t k + c]], summed in f32 in order of c.  ys: (n k, d), y: (n, d).
 *  Rows of ys behind offset[e] are not read: y of a token routed nowhere is zero. */
LF_API lf_status lf_loom_combine(lf_device *device, lf_stream *stream, const lf_routing *routing, const void *ys, int64_t n,
                                 int32_t e, int32_t k, int64_t d, int32_t dtype, void *y);
/** Backward of combine: dys[slot] = weight * dy[t]; dweight[t, c] = <ys[slot], dy[t]> in f32. Rows of dys
 *  behind offset[e] and dweight of tokens routed nowhere are zero. */
LF_API lf_status lf_loom_combine_backward(lf_device *device, lf_stream *stream, const lf_routing *routing, const void *ys,
                                          const void *dy, int64_t n, int32_t e, int32_t k, int64_t d, int32_t dtype, void *dys,
                                          float *dweight);

/* ---- norms ----------------------------------------------------------------------------------------------------------- */

/** Residual and RMSNorm (Zhang & Sennrich, NeurIPS 2019) in one pass: s = x + y rounded to dtype, then of that rounded s
 *  rstd = 1 / sqrt(mean(s^2) + eps) and normed = s * rstd * weight, in f32, rounded once.
 *  x, y, sum, normed: (n, d) of dtype; weight: (d) f32; rstd: (n) f32.
 *  @param y NULL: s = x, and `sum` is not written.  @param[out] sum s, for the backward and the next residual.
 *  @return LF_ERR_INVALID (also: eps negative or not finite; n above INT32_MAX). */
LF_API lf_status lf_loom_add_norm(lf_device *device, lf_stream *stream, const void *x, const void *y, const float *weight,
                                  float eps, int64_t n, int64_t d, int32_t dtype, void *sum, void *normed, float *rstd);
/** The same with the experts' combine in front: s[t] = x[t] + sum over c of weight[t, c] * ys[slot[t k + c]], the sum as in
 *  lf_loom_combine (which need not be called), rounded once. Its backward: lf_loom_add_norm_backward, then
 *  lf_loom_combine_backward with dy = dx.
 *  ys: (n k, d); x, sum, normed: (n, d) of dtype; norm_weight: (d) f32; rstd: (n) f32. */
LF_API lf_status lf_loom_combine_add_norm(lf_device *device, lf_stream *stream, const lf_routing *routing, const void *ys,
                                          int64_t n, int32_t e, int32_t k, int64_t d, int32_t dtype, const void *x,
                                          const float *norm_weight, float eps, void *sum, void *normed, float *rstd);
/** Bytes of workspace that lf_loom_add_norm_backward needs on any device: at most 2 KiB a feature. 0 where n or d is not above
 *  0. */
LF_API int64_t lf_loom_add_norm_workspace(int64_t n, int64_t d);
/** Backward of both: dx = dsum + the gradient through the norm, the gradient of x and of y (or of the combined rows) alike;
 *  dweight = or += the sum over rows of dnormed * sum * rstd.
 *  sum, dsum, dnormed, dx: (n, d) of dtype; weight, dweight: (d) f32; rstd: (n) f32, of the forward.
 *  @param sum s of the forward: x where y was NULL.  @param dsum the gradient that reaches s otherwise; NULL: none.
 *  @param dx may be dsum or dnormed itself.  @param workspace device memory, 16-byte aligned; its contents do not matter and
 *  belong to this call until the stream has done the work.  dweight's order of summation depends on n, d and the device. */
LF_API lf_status lf_loom_add_norm_backward(lf_device *device, lf_stream *stream, const void *sum, const float *weight,
                                           const float *rstd, const void *dsum, const void *dnormed, int64_t n, int64_t d,
                                           int32_t dtype, void *dx, float *dweight, int32_t accumulate, void *workspace);

/* ---- loss ------------------------------------------------------------------------------------------------------------ */

/** Cross-entropy: row_loss[i] = log(sum over j of exp(logits[i, j])) - logits[i, target[i]], shifted by the row's maximum, f32;
 *  loss_sum = or += the sum of row_loss in double precision and a fixed order. With `backward` the logits become the gradient
 *  of that sum, softmax - onehot(target), rounded to dtype: a factor (1 / rows, a scaled loss) is applied later.
 *  logits: (n, v) of dtype, rows ld elements apart (the elements between are not touched); target: (n) i64; row_loss: (n) f32;
 *  loss_sum: one f64 in device memory.
 *  A negative target is ignored: loss 0, gradient 0. A target of v or more cannot be refused, since it is read when the work
 *  runs: its loss and its gradient are NaN, nothing outside the row is touched.
 *  @param accumulate 1: add to loss_sum; 0: write it, 0 for no rows.
 *  @return LF_ERR_INVALID (also: v below 1, ld below v, n above INT32_MAX). */
LF_API lf_status lf_loom_cross_entropy(lf_device *device, lf_stream *stream, void *logits, const int64_t *target, int64_t n,
                                       int64_t v, int64_t ld, int32_t dtype, float *row_loss, double *loss_sum,
                                       int32_t accumulate, int32_t backward);

/* ---- experts --------------------------------------------------------------------------------------------------------- */

/** The matrix products of one layer of SwiGLU experts of unequal sizes: a plan, made once, that both directions use.
 *
 *  Rows are sorted by expert as route and permute leave them: expert i has rows offset[i] to offset[i + 1]. Nothing is padded,
 *  counts are read where the work runs, so a captured graph obeys whatever offset holds when it is replayed. Sums are made in
 *  f32 and rounded once.
 *
 *  Regions: a matrix whose width depends on its expert (gu, dgu: 2 f_i; h, dh: f_i) lies densely, expert after expert. With
 *  base_i = the sum of rows_j f_j over j < i, expert i's region starts at element base_i of h and dh and at element 2 base_i of
 *  gu and dgu. In a row of gu, gate's f_i come before up's. max_rows * max(f) elements always suffice for h and dh, twice as many
 *  for gu and dgu.
 *
 *  Rows behind offset[n_experts] (tokens routed nowhere) are neither read nor written, in xs, ys, dys and dxs: combine and
 *  permute_backward do not read them either. So may the regions behind the last expert's hold anything. */
typedef struct lf_experts lf_experts;

/** What a plan is made of. Filled by lf_experts_options_init, then by the caller. Arrays are host memory of n_experts and are
 *  copied; what their addresses point at is memory of the device, which stays the caller's and must outlive the plan. */
typedef struct lf_experts_options {
    size_t size;
    int32_t n_experts;         /* 1 to LF_MAX_EXPERTS */
    int32_t d;                 /* width of a token; on CUDA a multiple of 8, like every hidden size */
    int64_t max_rows;          /* rows that xs, ys and the regions have room for */
    const int32_t *hidden;     /* f of each expert */
    const void *const *w_gu;   /* (2 f, d) of dtype: gate's rows, then up's (torch.nn.Linear.weight of both, side by side) */
    const void *const *w_down; /* (d, f) of dtype */
    void *const *dw_gu;        /* (2 f, d) of grad_dtype, where gradients go; NULL, both: weights that are not trained */
    void *const *dw_down;      /* (d, f) of grad_dtype */
    int32_t dtype;             /* of weights and rows: BF16 (the default) or F32; on CUDA BF16 */
    int32_t grad_dtype;        /* BF16 (the default) or F32 */
} lf_experts_options;

/** Defaults, no experts.  @return LF_ERR_INVALID (NULL). */
LF_API lf_status lf_experts_options_init(lf_experts_options *options);

/** Make a plan. It holds a reference of the device and, on CUDA, a small table in device memory; the scratch of a call belongs to
 *  its stream. Waits for the device; not inside a capture.
 *  @param[out] out NULL on failure.
 *  @return LF_ERR_INVALID names the value: n_experts, d, max_rows, a hidden size, a dtype, a NULL or (on CUDA) not 16-byte
 *  aligned address, dw_gu without dw_down; LF_ERR_UNSUPPORTED: F32 on CUDA, a library built without CUTLASS, no kernel for this
 *  GPU; LF_ERR_NOMEM; LF_ERR_DEVICE. */
LF_API lf_status lf_experts_open(lf_experts **out, lf_device *device, const lf_experts_options *options);
/** Free the plan; NULL is allowed. Queued work of it must be done, and graphs that captured it must not be replayed. */
LF_API void lf_experts_close(lf_experts *experts);
/** The device it was opened on, borrowed; NULL for NULL. */
LF_API lf_device *lf_experts_device(const lf_experts *experts);

/** gu = xs w_gu^T; h = silu(gate) * up; ys = h w_down^T.  offset: (n_experts + 1) i32, as lf_routing; xs, ys: (max_rows, d).
 *  gu and h are regions: the backward needs gu, and takes h where it is kept. Addresses may be NULL when max_rows is 0, and are
 *  16-byte aligned on CUDA.
 *  @return LF_ERR_INVALID; LF_ERR_NOMEM; LF_ERR_DEVICE. offset must start at 0, not decrease, and end at most at max_rows: the CPU
 *  looks when the work runs (LF_ERR_INVALID, on a stream at its next sync), CUDA does not.  Threads: any, a plan is only read;
 *  backwards of one plan write the same gradients, so they need an order. */
LF_API lf_status lf_experts_forward(lf_experts *experts, lf_stream *stream, const int32_t *offset, const void *xs, void *gu,
                                    void *h, void *ys);
/** From dys (max_rows, d), xs and the forward's gu and h: dh = dys w_down; dgu from gu and dh; dxs = dgu w_gu;
 *  dw_gu = or += dgu^T xs; dw_down = or += dys^T h. dxs is written before the gradients of weights. dgu may be gu itself.
 *  @param h what the forward left there, only read: dh stays dh. NULL: not kept; it is made again from gu, over dh, for one more
 *  write of h. Either way gives the same bits.
 *  @param accumulate 1: add to the weights' gradients; 0: write them, zeros for an expert without rows.
 *  @return as forward; LF_ERR_INVALID too where dh is h. */
LF_API lf_status lf_experts_backward(lf_experts *experts, lf_stream *stream, const int32_t *offset, const void *xs,
                                     const void *gu, const void *h, const void *dys, void *dgu, void *dh, void *dxs,
                                     int32_t accumulate);

/* ---- optimizer sweep ------------------------------------------------------------------------------------------------- */

/** AdamW (Loshchilov & Hutter, 2019) with PyTorch's order of operations. Read from device memory when the work runs, so a
 *  captured graph obeys new values. Filled by lf_adamw_init: the derived fields are rounded once from double precision, which
 *  1 - 0.999f is not (it is off by 1.3e-5). */
typedef struct lf_adamw {
    float decay;      /* 1 - lr * weight_decay: factor of the weight */
    float beta1_rest; /* 1 - beta1: share of the gradient in exp_avg */
    float beta2;
    float beta2_rest; /* 1 - beta2: share of the squared gradient in exp_avg_sq */
    float eps;
    float step_size;  /* lr / (1 - beta1^step) */
    float bias2_sqrt; /* sqrt(1 - beta2^step) */
    uint32_t step;    /* its low 32 bits: what stochastic rounding draws by */
    float grad_scale; /* multiplied into the gradient: clipping and averaging. NaN: skip this step */
} lf_adamw;

/** Values of one step.  @param[out] hyper host memory; the caller brings it to the device.  @param step counts from 1.
 *  @return LF_ERR_INVALID (lr, eps or weight_decay negative, a beta outside [0, 1), step below 1, or a value not finite). */
LF_API lf_status lf_adamw_init(lf_adamw *hyper, double lr, double beta1, double beta2, double eps, double weight_decay,
                               int64_t step, double grad_scale);

/** Sweep ranges of an allocated map: reads grad; updates exp_avg, exp_avg_sq, master (or the weight itself when it is f32)
 *  and writes the weight rounded to its dtype. Moments in bf16 ([map] moments_bf16) are updated in f32, used as they are and then
 *  stored rounded to one of their two neighbours, up with the probability of what is cut off (Gupta et al., ICML 2015): at
 *  beta2 = 0.999 rounding to nearest would never move exp_avg_sq. What is drawn depends on the step, the class and the
 *  element's place in it alone, so ranges may be cut in any way, and every rank and device has the same bits. Where the
 *  denominator is 0 (eps 0 and no gradient yet) the weight only decays, so padding stays zero. Ranges must not overlap.
 *  A grad_scale of NaN, which lf_loom_clip leaves after a norm that is not finite, skips the step: nothing is written.
 *  @param hyper device memory.  @return LF_ERR_STATE (map not allocated, or made without optimizer state); LF_ERR_INVALID
 *  (range outside its class, or of a frozen class); LF_ERR_UNSUPPORTED (f16 weights or gradients). */
LF_API lf_status lf_loom_adamw(lf_map *map, lf_stream *stream, const lf_range *ranges, int32_t n_ranges, const lf_adamw *hyper);
/** Sum of squares of a role over ranges, in fixed order and double precision: the order depends on the ranges alone.
 *  @param out one double, device memory; 0 for no ranges.  @return as lf_loom_adamw; LF_ERR_INVALID also for a role that the
 *  class does not have. */
LF_API lf_status lf_loom_sumsq(lf_map *map, lf_stream *stream, const lf_range *ranges, int32_t n_ranges, int32_t role,
                               double *out);
/** Clip by global norm (Pascanu et al., ICML 2013), without the host: norm = |hyper[0].grad_scale| sqrt(*sumsq), and every
 *  hyper's grad_scale is multiplied by min(1, max_norm / (norm + 1e-6)), in double precision, rounded once. A norm that is not
 *  finite (as f32) makes every grad_scale NaN, so that lf_loom_adamw skips the step: a captured step cannot damage weights before
 *  the host has seen the norm. grad_scale is replaced: once for values that lf_adamw_init has just filled.
 *  @param sumsq one f64, device memory: lf_loom_sumsq of the gradients.  @param max_norm 0, negative or infinite: no clipping,
 *  only the norm (and NaN).  @param hyper array of n_hyper, device memory.  @param[out] norm one f32, device memory.
 *  @return LF_ERR_INVALID (also: max_norm NaN, n_hyper below 1). */
LF_API lf_status lf_loom_clip(lf_device *device, lf_stream *stream, const double *sumsq, double max_norm, lf_adamw *hyper,
                              int32_t n_hyper, float *norm);
/** dst (count) of dst_dtype = or += scale[0] * src (count) of src_dtype, converted to nearest even: a gradient into the map.
 *  Product and sum are made in f32. dtypes: F32, BF16.
 *  @param scale one f32, device memory, read when the work runs; NULL: 1. */
LF_API lf_status lf_loom_add(lf_device *device, lf_stream *stream, void *dst, int32_t dst_dtype, const void *src,
                             int32_t src_dtype, int64_t count, const float *scale, int32_t accumulate);

#ifdef __cplusplus
}
#endif
#endif
