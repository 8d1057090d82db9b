/* SPDX-License-Identifier: Apache-2.0 */
/** @file loom_cuda_route.cuh  What the kernels of routing hand over to one another. */
#ifndef LF_LOOM_CUDA_ROUTE_CUH
#define LF_LOOM_CUDA_ROUTE_CUH

#include "loom/loom_math.h"
#include "loom_cuda.h"

/** Tokens cut into chunks, one a block, and what the first kernel leaves in the scratch for the second. */
typedef struct lf__loom_chunks {
    int32_t tokens, n;         /* of a chunk; chunks */
    unsigned long long *units; /* (e, n) sums of probabilities over valid tokens; unset when no one asks for prob_sum */
    int32_t *counts;           /* (e + 2, n) slots by expert, slots routed nowhere, tokens that spoil the sums (unset likewise) */
} lf__loom_chunks;

/** Chunks of n tokens in multiples of `at_once`: enough to fill the device, few enough that every block can read all counts. */
lf_status lf__loom_cuda_chunks(const lf__loom_call *call, int64_t n, int32_t e, int32_t at_once, lf__loom_chunks *out);
/** expert: (n, k), counted in `chunks` -> count, offset, row, slot; and prob_sum where it is wanted. */
lf_status lf__loom_cuda_sort_chunks(const lf__loom_call *call, const lf__loom_route_args *a, const int32_t *expert,
                                    const lf__loom_chunks *chunks);

#endif
