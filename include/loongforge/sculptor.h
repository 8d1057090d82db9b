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
    LF_TENSOR_WEIGHT = 0,
    LF_TENSOR_ACTIVATION = 1,
    LF_TENSOR_GRADIENT = 2,
    LF_TENSOR_OPTIMIZER = 3,
    LF_TENSOR_WORKSPACE = 4,
    LF_TENSOR_INPUT = 5
};
/** "weight", "activation", "gradient", "optimizer", "workspace", "input"; "?" otherwise. Static. */
LF_API const char *lf_tensor_role_name(int32_t role);

/** One row of the lifetime table. */
typedef struct lf_lifetime {
    size_t size;         /* set by the caller to sizeof */
    const char *name;    /* tensor or operator; copied, owned by the trace when read back; NULL means "" */
    const char *module;  /* module path, "" when unknown; as above */
    int32_t role;        /* LF_TENSOR_* */
    int32_t stream;      /* that the tensor is used on; told, not planned by */
    int64_t first, last; /* ordinals; last > first */
    int64_t bytes;       /* 0 is allowed: such a row shares no bytes with any */
    int64_t align_bytes; /* 0: the planner's default */
    int64_t offset;      /* of the plan, -1 before */
} lf_lifetime;

/** Options, section "sculptor". */
typedef struct lf_plan_options {
    size_t size;
    int64_t align_bytes;         /* default alignment of a block */
    int64_t capacity_bytes;      /* fail when the peak exceeds it; 0: unlimited */
    double time_limit_s;         /* of the search after the greedy plan */
    int32_t short_ops, long_ops; /* borders of the dynamic classes: below short_ops, up to long_ops, longer */
    char strategy[LF_TEXT_MAX];  /* moefusion | greedy */
} lf_plan_options;

/** Classes of tensors by role and lifetime: weights; activations, gradients, inputs and workspaces by how many operators they
 *  live; optimizer state. They are figures about one planned range, not walls inside it. */
enum {
    LF_CLASS_STATIC = 0,
    LF_CLASS_SHORT = 1,
    LF_CLASS_MEDIUM = 2,
    LF_CLASS_LONG = 3,
    LF_CLASS_TRANSIENT = 4,
    LF_N_CLASSES = 5
};
/** "static", "short", "medium", "long", "transient"; "?" otherwise. Static. */
LF_API const char *lf_class_name(int32_t klass);

typedef struct lf_plan_summary {
    size_t size;                   /* set by the caller to sizeof */
    int64_t n;                     /* rows */
    int64_t bound_bytes;           /* largest sum of live bytes: no plan can be smaller */
    int64_t peak_bytes;            /* what the plan needs, every block rounded up to the alignment that all have in common */
    int64_t live_sum_bytes;        /* of all tensors, as if none shared */
    double waste;                  /* 1 - bound / peak: placement and alignment together; 0 for an empty table */
    int32_t optimal;               /* 1: no plan is smaller, the peak equals the bound of the rounded sizes */
    double seconds;                /* that planning took */
    int64_t class_n[LF_N_CLASSES]; /* rows of each class */
    int64_t class_peak_bytes[LF_N_CLASSES]; /* largest live sum of the class alone: what a pool with walls would need */
} lf_plan_summary;

/** Start an empty table.  @param[out] out NULL on error; release with lf_trace_close.  @return LF_OK; LF_ERR_NOMEM.
 *  Threads: one at a time on a trace; reading one from several threads is safe while none writes. */
LF_API lf_status lf_trace_open(lf_trace **out);
LF_API void lf_trace_close(lf_trace *trace);

/** Add a row.  @return LF_OK; LF_ERR_NOMEM; LF_ERR_INVALID (size not set, last not after first, negative bytes or alignment,
 *  unknown role, or more than 2^61 bytes in all: the text names tensor and value). The trace is unchanged on error. */
LF_API lf_status lf_trace_add(lf_trace *trace, const lf_lifetime *row);
LF_API int64_t lf_trace_n(const lf_trace *trace);
/** The i-th row in order of addition; its texts are valid until the trace is closed.  @return LF_OK; LF_ERR_INVALID. */
LF_API lf_status lf_trace_get(const lf_trace *trace, int64_t i, lf_lifetime *row);

/** Place every row: tensors that live through the whole trace at the bottom, the others greedily in several orders, then a
 *  search over orders until the bound, the budget or the time limit. The budget counts work at a fixed rate for
 *  time_limit_s, so a plan is a function of trace and options on any machine; only when a machine needs more than four
 *  times the limit and a second is the search cut short, and a warning logged.
 *  @param opts NULL: defaults.  @param summary may be NULL; also filled on LF_ERR_POOL.
 *  @return LF_OK; LF_ERR_POOL (capacity: says peak, capacity, bound, the largest tensors live at the fullest moment and what
 *  helps); LF_ERR_INVALID (an option); LF_ERR_NOMEM. On error the rows keep the offsets that they had. */
LF_API lf_status lf_trace_plan(lf_trace *trace, const lf_plan_options *opts, lf_plan_summary *summary);

/** Check the rows' offsets with code that the planner does not share.  @param capacity_bytes 0: unlimited.
 *  @return LF_OK; LF_ERR_CORRUPT naming the two rows that overlap, or the one that is misaligned or ends above capacity;
 *  LF_ERR_STATE (a row has no offset: plan first); LF_ERR_NOMEM. Alignment of rows that name none is that of the last plan. */
LF_API lf_status lf_trace_validate(const lf_trace *trace, int64_t capacity_bytes);

/** Append a lifetime table from CSV; the first line names the columns, in any order. MiniMalloc's `id,lower,upper,size` are
 *  needed (its older `begin` or `start` with an `end` that is inclusive are taken too); `alignment`, `offset`, `name`,
 *  `module`, `role`, `stream` are optional; others are passed over, `gaps` among them: such a tensor counts as always live.
 *  @return LF_OK; LF_ERR_NOTFOUND, LF_ERR_IO; LF_ERR_FORMAT (path, line, column, value, what was expected); LF_ERR_NOMEM.
 *  The trace is unchanged on error. */
LF_API lf_status lf_trace_read_csv(lf_trace *trace, const char *path);
/** Write all columns; what lf_trace_read_csv reads back is equal. The file is replaced as a whole or not at all.
 *  @return LF_OK; LF_ERR_IO, LF_ERR_NOSPACE, LF_ERR_NOTFOUND; LF_ERR_NOMEM. */
LF_API lf_status lf_trace_write_csv(const lf_trace *trace, const char *path);

#ifdef __cplusplus
}
#endif
#endif
