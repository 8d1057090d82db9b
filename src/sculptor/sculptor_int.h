/* SPDX-License-Identifier: Apache-2.0 */
/** @file sculptor_int.h  The lifetime table and what the planner's files share. docs/internals/sculptor.md explains them. */
#ifndef LF_SCULPTOR_INT_H
#define LF_SCULPTOR_INT_H

#include "base/base.h"
#include "loongforge/sculptor.h"

/** Most bytes of all rows together, alignment included: sums of offsets stay far from overflow. */
#define LF_TRACE_MAX_BYTES ((int64_t)1 << 61)

typedef struct lf__row {
    char *name, *module; /* owned */
    int64_t first, last, bytes;
    int64_t align;  /* 0: the planner's default */
    int64_t offset; /* -1: not planned */
    int32_t role, stream;
} lf__row;

struct lf_trace {
    lf__row *rows;
    int64_t n, room;
    int64_t total_bytes;   /* of all rows, alignment included; guards LF_TRACE_MAX_BYTES */
    int64_t default_align; /* that the last plan used for rows with align 0; 1 before */
};

/** Drop the rows from `n` on. */
void lf__trace_cut(lf_trace *trace, int64_t n);
/** LF_TENSOR_* of a name, -1 when it is none. */
int32_t lf__tensor_role(const char *name);

/* ---- placing blocks -------------------------------------------------------------------------------------------------- */

/** One block to place. Times are ranks among the distinct times of the trace: only their order matters. */
typedef struct lf__block {
    int64_t bytes, align;
    int32_t first, last;
    int32_t row; /* in the trace */
} lf__block;

/** Blocks placed so far, by ascending offset. One array a field: the scan for conflicts reads times only. */
typedef struct lf__placed {
    int32_t *first, *last;
    int64_t *offset, *end;
    int32_t n;
} lf__placed;

typedef struct lf__problem {
    lf__block *block; /* (n) */
    int32_t n, n_times;
    int64_t base;  /* blocks that are always live end here; the others start here */
    int64_t bound; /* no plan can be smaller */
    lf__placed placed;
    int64_t *offset;      /* (n) of the order last tried */
    int64_t *best;        /* (n) of the smallest plan found */
    int64_t best_peak;    /* INT64_MAX before the first */
    int64_t work, budget; /* pairs compared; the search ends when work reaches budget */
    int64_t stop_ns;      /* or at this time */
} lf__problem;

enum { LF_FIT_FIRST = 0, LF_FIT_BEST = 1 };

/** Place blocks in this order, each at the lowest place (FIRST) or in the smallest gap (BEST) that holds it.
 *  @param order (n) indices of blocks.  @param limit stop at the first block that would end above it.
 *  @param[out] stuck position in the order of that block, n when all were placed.
 *  @return the peak, or INT64_MAX when a block was stuck. A smaller peak than best_peak is kept as the best plan. */
int64_t lf__place_order(lf__problem *p, const int32_t *order, int32_t fit, int64_t limit, int32_t *stuck);

/** One pass, largest block first. */
lf_status lf__plan_greedy(lf__problem *p);
/** The best of several orders, then a search from the best of them until bound, budget or time. */
lf_status lf__plan_search(lf__problem *p);

#endif
