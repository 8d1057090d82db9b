/* SPDX-License-Identifier: Apache-2.0 */
/** @file loom_layer.h  A layer of experts as kernels see it. By itself, because those that include it take minutes to compile. */
#ifndef LF_LOOM_LAYER_H
#define LF_LOOM_LAYER_H

#include <stdint.h>

/* One expert of a layer. The device's copy is the same struct. Gradients are NULL, both, when they are not wanted. */
typedef struct lf__loom_expert {
    const void *w_gu, *w_down; /* (2 f, d), (d, f) */
    void *dw_gu, *dw_down;
    int64_t hidden; /* f */
} lf__loom_expert;

/* What a plan of a layer's products is made from; lives as long as the plan. */
typedef struct lf__loom_layer {
    int32_t n_experts, d;
    int64_t max_rows;
    int32_t dtype, grad_dtype;
    const lf__loom_expert *expert; /* (n_experts) */
} lf__loom_layer;

#endif
