/* SPDX-License-Identifier: Apache-2.0 */
/** @file loom_int.h  The table of ExpertLoom's kernels; see docs/internals/loom.md.
 *
 *  loom.c checks arguments, turns a call into an args struct and hands it to the device's table. The CPU's table runs it on
 *  the calling thread (a stream's worker, when the work was queued); another device's launches it on `call->stream`. */
#ifndef LF_LOOM_INT_H
#define LF_LOOM_INT_H

#include "base/base.h"
#include "device/device_int.h"
#include "loom_layer.h"
#include "loongforge/loom.h"

enum {
    LF_LOOM_BLOCK = 16384,    /* elements of a sweep that are one unit of work and of summation */
    LF_LOOM_TILE = 1024,      /* elements that are converted at once; a few tiles fit the first cache */
    LF_LOOM_NORM_PARTS = 512, /* at most so many partial sums of a norm's dweight, (d) f32 each */
};

typedef struct lf__loom_route_args {
    const float *logits;
    const int64_t *token;
    const uint8_t *valid;
    const int32_t *given; /* sort only, which takes no logits */
    const lf_route_schedule *schedule;
    int64_t n, seed;
    int32_t e, k, layer;
    lf_routing routing;
    float *prob_sum;
    const float *dweight, *dprob_sum; /* from here on: backward only */
    float *dlogits;
} lf__loom_route_args;

/* router: a = weight, out = logits. Its backward: a = dlogits, out = dweight. */
typedef struct lf__loom_router_args {
    const void *x;
    const float *a;
    int64_t n, d;
    int32_t e, dtype, accumulate;
    int32_t chunk, n_chunks; /* backward: tokens of a chunk, the last one may have fewer; workspace: (n_chunks, e, d) */
    float *out, *workspace;
} lf__loom_router_args;

/* permute: a = x, out = xs. Its backward: a = dxs, out = dx, dlogits and router or neither. combine: a = ys, out = y. Its
 * backward: a = ys, b = dy, out = dys, dweight. */
typedef struct lf__loom_rows_args {
    lf_routing routing;
    const void *a, *b;
    int64_t n, d;
    int32_t e, k, dtype;
    void *out;
    float *dweight;
    const float *dlogits, *router; /* (n, e), (e, d) */
} lf__loom_rows_args;

/* One range of a class with the addresses of its planes; those a sweep does not use are NULL. */
typedef struct lf__loom_piece {
    void *weight, *grad, *master, *exp_avg, *exp_avg_sq;
    int64_t count;
    int64_t first_block;                             /* blocks in the pieces before it */
    int32_t weight_dtype, grad_dtype, moments_dtype; /* the last is the same for all pieces of a call */
    int32_t klass;
    int64_t first; /* element of the class that the piece begins with */
} lf__loom_piece;

/* sumsq reads `grad` of each piece, whatever role it is. */
typedef struct lf__loom_sweep_args {
    const lf__loom_piece *pieces; /* host memory, valid during the call */
    int32_t n_pieces;
    int64_t n_blocks;
    const lf_adamw *hyper; /* adamw */
    double *partial, *out; /* sumsq; partial: (n_blocks) host memory */
} lf__loom_sweep_args;

typedef struct lf__loom_add_args {
    void *dst;
    const void *src;
    int64_t count;
    const float *scale; /* NULL: 1 */
    int32_t dst_dtype, src_dtype, accumulate;
} lf__loom_add_args;

typedef struct lf__loom_clip_args {
    const double *sumsq;
    double max_norm; /* 0: no clipping */
    lf_adamw *hyper;
    int32_t n_hyper;
    float *norm;
} lf__loom_clip_args;

/* add_norm: a = y or NULL, out = sum. combine_add_norm: a = ys, routing. n, d and dtype are in `rows`. */
typedef struct lf__loom_norm_args {
    lf__loom_rows_args rows;
    const void *x;
    const float *weight;
    float eps;
    void *normed;
    float *rstd;
} lf__loom_norm_args;

typedef struct lf__loom_norm_backward_args {
    const void *sum, *dsum, *dnormed;
    const float *weight, *rstd;
    int64_t n, d;
    void *dx;
    float *dweight, *partial; /* partial: (LF_LOOM_NORM_PARTS or n, d) */
    int32_t dtype, accumulate;
} lf__loom_norm_backward_args;

typedef struct lf__loom_loss_args {
    void *logits;
    const int64_t *target;
    int64_t n, v, ld;
    float *row_loss;
    double *loss_sum;
    int32_t dtype, accumulate, backward;
} lf__loom_loss_args;

/* forward reads xs and writes gu, h, ys; backward reads xs, gu_in, dys and h_in (NULL: h is made again, over dh) and writes dgu, dh,
 * dxs and the layer's gradients. */
typedef struct lf__loom_experts_args {
    void *plan; /* what experts_open made */
    const int32_t *offset;
    const void *xs, *gu_in, *h_in, *dys;
    void *gu, *h, *ys, *dgu, *dh, *dxs;
    int32_t accumulate;
} lf__loom_experts_args;

typedef union lf__loom_args {
    lf__loom_route_args route;
    lf__loom_router_args router;
    lf__loom_rows_args rows;
    lf__loom_sweep_args sweep;
    lf__loom_add_args add;
    lf__loom_clip_args clip;
    lf__loom_norm_args norm;
    lf__loom_norm_backward_args norm_backward;
    lf__loom_loss_args loss;
    lf__loom_experts_args experts;
} lf__loom_args;

/* Where to run. The CPU's kernels ignore it. */
typedef struct lf__loom_call {
    void *context; /* the device table's */
    void *stream;  /* native; meaningless when `now` */
    int32_t now;   /* 1: finished on return */
} lf__loom_call;

typedef lf_status (*lf__loom_fn)(const lf__loom_call *call, const lf__loom_args *args);

#define LF_LOOM_LAYOUT (uint32_t)(sizeof(lf__loom_args) * 4096 + sizeof(lf__loom_piece) * 64 + sizeof(lf_adamw))
typedef struct lf__loom_kernels {
    uint32_t size;   /* sizeof(lf__loom_kernels) */
    uint32_t layout; /* LF_LOOM_LAYOUT: of what the functions are given */
    const char *name;
    lf__loom_fn router, router_backward, route, sort, route_backward;
    lf__loom_fn permute, permute_backward, combine, combine_backward;
    lf__loom_fn adamw, sumsq, add, clip;
    lf__loom_fn add_norm, combine_add_norm, add_norm_backward, cross_entropy;
    lf_status (*experts_open)(void *context, const lf__loom_layer *layer, void **plan);
    void (*experts_close)(void *context, void *plan); /* NULL is allowed */
    lf__loom_fn experts_forward, experts_backward;
} lf__loom_kernels;

extern const lf__loom_kernels lf__loom_cpu;

/* loom_cpu_route.c */
lf_status lf__loom_cpu_route(const lf__loom_call *call, const lf__loom_args *args);
lf_status lf__loom_cpu_sort(const lf__loom_call *call, const lf__loom_args *args);
lf_status lf__loom_cpu_route_backward(const lf__loom_call *call, const lf__loom_args *args);
/* loom_cpu_router.c */
lf_status lf__loom_cpu_router(const lf__loom_call *call, const lf__loom_args *args);
lf_status lf__loom_cpu_router_backward(const lf__loom_call *call, const lf__loom_args *args);
/* loom_cpu_rows.c */
lf_status lf__loom_cpu_permute(const lf__loom_call *call, const lf__loom_args *args);
lf_status lf__loom_cpu_permute_backward(const lf__loom_call *call, const lf__loom_args *args);
lf_status lf__loom_cpu_combine(const lf__loom_call *call, const lf__loom_args *args);
lf_status lf__loom_cpu_combine_backward(const lf__loom_call *call, const lf__loom_args *args);
/* loom_cpu_sweep.c */
lf_status lf__loom_cpu_adamw(const lf__loom_call *call, const lf__loom_args *args);
lf_status lf__loom_cpu_sumsq(const lf__loom_call *call, const lf__loom_args *args);
lf_status lf__loom_cpu_add(const lf__loom_call *call, const lf__loom_args *args);
lf_status lf__loom_cpu_clip(const lf__loom_call *call, const lf__loom_args *args);
/* loom_cpu_dense.c */
lf_status lf__loom_cpu_add_norm(const lf__loom_call *call, const lf__loom_args *args);
lf_status lf__loom_cpu_combine_add_norm(const lf__loom_call *call, const lf__loom_args *args);
lf_status lf__loom_cpu_add_norm_backward(const lf__loom_call *call, const lf__loom_args *args);
lf_status lf__loom_cpu_cross_entropy(const lf__loom_call *call, const lf__loom_args *args);

/* loom_cpu_experts.c */
lf_status lf__loom_cpu_experts_open(void *context, const lf__loom_layer *layer, void **plan);
void lf__loom_cpu_experts_close(void *context, void *plan);
lf_status lf__loom_cpu_experts_forward(const lf__loom_call *call, const lf__loom_args *args);
lf_status lf__loom_cpu_experts_backward(const lf__loom_call *call, const lf__loom_args *args);

/** The table of a device: LF_ERR_INVALID (NULL), LF_ERR_UNSUPPORTED. */
lf_status lf__loom_table(lf_device *device, const lf__loom_kernels **table);
/** Run or queue checked work that has no arrays of its own; `which` is the function's place in the table, `name` its name there.
 *  LF_ERR_UNSUPPORTED when the device lacks it. */
lf_status lf__loom_submit(lf_device *device, lf_stream *stream, size_t which, const char *name, const lf__loom_args *args);
#define LF_LOOM_SUBMIT(device, stream, name, ...) \
    lf__loom_submit(device, stream, offsetof(lf__loom_kernels, name), #name, &(lf__loom_args){__VA_ARGS__})
/** Arguments of an operation on routed rows: shape, dtype, and of the routing offset and the arrays in `touched`. */
enum { LF_LOOM_EXPERT = 1, LF_LOOM_WEIGHT = 2, LF_LOOM_PROB = 4, LF_LOOM_ROW = 8, LF_LOOM_SLOT = 16 };
lf_status lf__loom_check_rows(const lf__loom_rows_args *args, uint32_t touched);
/** LF_ERR_INVALID for what is neither F32 nor BF16. */
lf_status lf__loom_check_dtype(const char *what, int32_t dtype);

/** fn(user, from, to) over [0, n) in pieces worth a thread's while; `cost` is the work of one item in element operations.
 *  Small work stays on the calling thread. */
typedef void (*lf__loom_span_fn)(const void *user, int64_t from, int64_t to);
void lf__loom_spans(int64_t n, int64_t cost, lf__loom_span_fn fn, const void *user);
/** The threads that lf_loom_set_threads allows. */
int32_t lf__loom_threads(void);

#endif
