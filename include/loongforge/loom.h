/* SPDX-License-Identifier: Apache-2.0 */
/** @file loom.h  ExpertLoom: routing, row permutation, and the optimizer sweep.
 *
 *  All pointers are device memory of `device`; work is queued on `stream` (NULL: done on return). Shapes use n tokens,
 *  e experts, k choices a token, d features. Every output element is written; reruns give the same bits for any number of
 *  threads. */
#ifndef LOONGFORGE_LOOM_H
#define LOONGFORGE_LOOM_H

#include "loongforge/map.h"

#ifdef __cplusplus
extern "C" {
#endif

#define LF_MAX_EXPERTS 256
#define LF_MAX_TOP_K 8

/** Gumbel noise keyed by global token: Philox4x32-10 (Salmon et al., SC'11), counter (token_lo, token_hi, step,
 *  layer * 64 + expert / 4), key = seed, word expert % 4; u = (word >> 8) * 2^-24 + 2^-25; -log(-log(u)).
 *  token: (n) i64; noise: (n, e) f32.  @return LF_ERR_INVALID (e above LF_MAX_EXPERTS, negative n). */
LF_API lf_status lf_loom_gumbel(lf_device *device, lf_stream *stream, const int64_t *token, int64_t n, int32_t e,
                                int64_t seed, int32_t step, int32_t layer, float *noise);

/** Where every token goes. All device memory, sized by the caller. */
typedef struct lf_routing {
    size_t size;
    int32_t *expert;  /* (n, k) chosen experts, best first */
    float *weight;    /* (n, k) renormalised gate weights */
    float *prob;      /* (n, e) softmax((logits + noise) / temperature) */
    int32_t *count;   /* (e) rows an expert gets */
    int32_t *offset;  /* (e + 1) running sum of count */
    int32_t *row;     /* (n k) sorted row -> token * k + choice, stable by token */
    int32_t *slot;    /* (n k) token * k + choice -> sorted row: the inverse of row */
} lf_routing;

/** Route: softmax, top-k (ties to the lower expert), renormalise, sort by expert.
 *  logits, noise: (n, e) f32, noise may be NULL; valid: (n) u8 or NULL, tokens with 0 are routed nowhere: expert -1, weight
 *  0, and their slots come after offset[e].  @return LF_ERR_INVALID (e, k, or temperature not above 0). */
LF_API lf_status lf_loom_route(lf_device *device, lf_stream *stream, const float *logits, const float *noise,
                               const uint8_t *valid, int64_t n, int32_t e, int32_t k, float temperature,
                               const lf_routing *out);
/** Gradient of the gate weights to the logits: dweight (n, k) f32 -> dlogits (n, e) f32. */
LF_API lf_status lf_loom_route_backward(lf_device *device, lf_stream *stream, const lf_routing *routing,
                                        const float *dweight, int64_t n, int32_t e, int32_t k, float temperature,
                                        float *dlogits);

/** xs[r] = x[row[r] / k].  x: (n, d), xs: (n k, d) of dtype; rows behind offset[e] are zero. */
LF_API lf_status lf_loom_permute(lf_device *device, lf_stream *stream, const lf_routing *routing, const void *x,
                                 int64_t n, int32_t e, int32_t k, int64_t d, int32_t dtype, void *xs);
/** Backward of permute: dx[t] = sum over choices c of dxs[slot[t k + c]], in order of c. */
LF_API lf_status lf_loom_permute_backward(lf_device *device, lf_stream *stream, const lf_routing *routing, const void *dxs,
                                          int64_t n, int32_t e, int32_t k, int64_t d, int32_t dtype, void *dx);
/** y[t] = sum over c of weight[t, c] * ys[slot[t k + c]], summed in f32 in order of c.  ys: (n k, d), y: (n, d). */
LF_API lf_status lf_loom_combine(lf_device *device, lf_stream *stream, const lf_routing *routing, const void *ys,
                                 int64_t n, int32_t e, int32_t k, int64_t d, int32_t dtype, void *y);
/** Backward of combine: dys[slot] = weight * dy[t]; dweight[t, c] = <ys[slot], dy[t]> in f32. */
LF_API lf_status lf_loom_combine_backward(lf_device *device, lf_stream *stream, const lf_routing *routing, const void *ys,
                                          const void *dy, int64_t n, int32_t e, int32_t k, int64_t d, int32_t dtype,
                                          void *dys, float *dweight);

/** AdamW (Loshchilov & Hutter, 2019) with PyTorch's order of operations. Read from device memory when the work runs, so a
 *  captured graph obeys new values. */
typedef struct lf_adamw {
    float lr, beta1, beta2, eps, weight_decay;
    float bias1, bias2;  /* 1 - beta^step */
    float grad_scale;    /* multiplied into the gradient: clipping and averaging */
} lf_adamw;

/** Sweep ranges of an allocated map: reads grad; updates exp_avg, exp_avg_sq, master (or the weight itself when it is f32)
 *  and writes the weight rounded to its dtype.
 *  @param hyper device memory.  @return LF_ERR_STATE (map not allocated); LF_ERR_INVALID (range outside its class, or of a
 *  frozen class). */
LF_API lf_status lf_loom_adamw(lf_map *map, lf_stream *stream, const lf_range *ranges, int32_t n_ranges,
                               const lf_adamw *hyper);
/** Sum of squares of a role over ranges, in fixed order and double precision.  @param out one double, device memory. */
LF_API lf_status lf_loom_sumsq(lf_map *map, lf_stream *stream, const lf_range *ranges, int32_t n_ranges, int32_t role,
                               double *out);
/** dst (count) of dst_dtype = or += src (count) of src_dtype, converted to nearest even: a gradient into the map. */
LF_API lf_status lf_loom_add(lf_device *device, lf_stream *stream, void *dst, int32_t dst_dtype, const void *src,
                             int32_t src_dtype, int64_t count, int32_t accumulate);

#ifdef __cplusplus
}
#endif
#endif
