/* SPDX-License-Identifier: Apache-2.0 */
/** @file sculptor.h  MemSculptor: lifetimes of a step's tensors and a plan of offsets for them.
 *
 *  Time is counted in operator ordinals of one step. A lifetime is half open: [first, last). Two tensors may share bytes when
 *  their lifetimes do not meet. The bound of any plan is the largest sum of live bytes. */
#ifndef LOONGFORGE_SCULPTOR_H
#define LOONGFORGE_SCULPTOR_H

#include "loongforge/device.h"
#include "loongforge/options.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct lf_trace lf_trace;

enum {
    LF_TENSOR_WEIGHT = 0, LF_TENSOR_ACTIVATION = 1, LF_TENSOR_GRADIENT = 2, LF_TENSOR_OPTIMIZER = 3,
    LF_TENSOR_WORKSPACE = 4, LF_TENSOR_INPUT = 5
};
/** "weight", "activation", "gradient", "optimizer", "workspace", "input"; "?" otherwise. Static. */
LF_API const char *lf_tensor_role_name(int32_t role);

/** One row of the lifetime table. */
typedef struct lf_lifetime {
    size_t size;
    const char *name;   /* tensor or operator; copied, owned by the trace when read back */
    const char *module; /* module path, "" when unknown; as above */
    int32_t role;       /* LF_TENSOR_* */
    int32_t stream;
    int64_t first, last; /* ordinals; last > first */
    int64_t bytes;
    int64_t align_bytes; /* 0: the planner's default */
    int64_t offset;      /* of the plan, -1 before */
} lf_lifetime;

/** Options, section "sculptor". */
typedef struct lf_plan_options {
    size_t size;
    int64_t align_bytes;    /* default alignment of a block */
    int64_t capacity_bytes; /* fail when the peak exceeds it; 0: unlimited */
    double time_limit_s;    /* of the search after the greedy plan */
    int32_t short_ops, long_ops; /* borders of the dynamic classes: below short_ops, up to long_ops, longer */
    char strategy[LF_TEXT_MAX];  /* moefusion | greedy */
} lf_plan_options;

typedef struct lf_plan_summary {
    size_t size;
    int64_t n, bound_bytes, peak_bytes; /* bound: largest sum of live bytes; peak: what the plan needs */
    int64_t live_sum_bytes;             /* of all tensors, as if none shared */
    double waste;                       /* 1 - bound / peak */
    int32_t optimal;                    /* 1: peak equals the bound */
    double seconds;
} lf_plan_summary;

LF_API lf_status lf_trace_open(lf_trace **out);
LF_API void lf_trace_close(lf_trace *trace);
/** Add a row. @return LF_ERR_INVALID (last not after first, negative bytes, unknown role). */
LF_API lf_status lf_trace_add(lf_trace *trace, const lf_lifetime *row);
LF_API int64_t lf_trace_n(const lf_trace *trace);
LF_API lf_status lf_trace_get(const lf_trace *trace, int64_t i, lf_lifetime *row);

/** Place every row: greedy by size with best fit over several orders, then local search until the bound or the time limit.
 *  @return LF_OK; LF_ERR_POOL (capacity: says peak, capacity and the largest tensors live there); LF_ERR_INVALID. */
LF_API lf_status lf_trace_plan(lf_trace *trace, const lf_plan_options *opts, lf_plan_summary *summary);
/** Check a plan independently of the planner. @return LF_ERR_CORRUPT naming the two rows that overlap, or the misaligned one. */
LF_API lf_status lf_trace_validate(const lf_trace *trace, int64_t capacity_bytes);

/** Lifetime tables as CSV. Reading takes MiniMalloc's columns `id,lower,upper,size` (others optional) and our own. */
LF_API lf_status lf_trace_read_csv(lf_trace *trace, const char *path);
LF_API lf_status lf_trace_write_csv(const lf_trace *trace, const char *path);

#ifdef __cplusplus
}
#endif
#endif
