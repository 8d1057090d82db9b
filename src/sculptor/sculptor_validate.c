/* SPDX-License-Identifier: Apache-2.0 */
/* An independent check of a plan. Deliberately shares nothing with the planner: it sweeps over time with the set of live
 * ranges sorted by address. While no two of them overlap, a new one can only overlap its two neighbours. */
#include <stdlib.h>
#include <string.h>

#include "sculptor_int.h"

typedef struct edge {
    int64_t time, row;
    int32_t begins; /* ends come first: lifetimes are half open */
} edge;

static int compare_edges(const void *a, const void *b)
{
    const edge *x = a, *y = b;
    if (x->time != y->time) return x->time < y->time ? -1 : 1;
    if (x->begins != y->begins) return x->begins < y->begins ? -1 : 1;
    return x->row < y->row ? -1 : x->row > y->row;
}

static lf_status check_alone(const lf_trace *trace, int64_t i, int64_t capacity)
{
    const lf__row *r = &trace->rows[i];
    int64_t align = r->align > 0 ? r->align : trace->default_align;
    if (r->offset < 0) return LF_FAIL(LF_ERR_STATE, "row %lld '%s' has no offset; hint: plan first", (long long)i, r->name);
    if (r->offset % align != 0)
        return LF_FAIL(LF_ERR_CORRUPT, "row %lld '%s' lies at %lld, expected a multiple of %lld", (long long)i, r->name,
                       (long long)r->offset, (long long)align);
    if (capacity > 0 && r->bytes > 0 && (r->bytes > capacity || r->offset > capacity - r->bytes))
        return LF_FAIL(LF_ERR_CORRUPT, "row %lld '%s' lies at %lld with %lld bytes, expected to end by %lld", (long long)i,
                       r->name, (long long)r->offset, (long long)r->bytes, (long long)capacity);
    return LF_OK;
}

/* Position of the first live row that lies at or above an address. */
static int64_t lower_bound(const lf_trace *trace, const int64_t *live, int64_t n, int64_t address)
{
    int64_t from = 0;
    while (n > 0) {
        int64_t half = n / 2;
        if (trace->rows[live[from + half]].offset < address) {
            from += half + 1;
            n -= half + 1;
        } else {
            n = half;
        }
    }
    return from;
}

static lf_status fail_overlap(const lf_trace *trace, int64_t i, int64_t j)
{
    const lf__row *a = &trace->rows[i], *b = &trace->rows[j];
    return LF_FAIL(
        LF_ERR_CORRUPT,
        "rows %lld '%s' and %lld '%s' overlap: bytes [%lld, %lld) live [%lld, %lld), bytes [%lld, %lld) live [%lld, %lld)",
        (long long)i, a->name, (long long)j, b->name, (long long)a->offset, (long long)(a->offset + a->bytes),
        (long long)a->first, (long long)a->last, (long long)b->offset, (long long)(b->offset + b->bytes), (long long)b->first,
        (long long)b->last);
}

static lf_status sweep(const lf_trace *trace, const edge *edges, int64_t n_edges, int64_t *live)
{
    int64_t n_live = 0;
    for (int64_t e = 0; e < n_edges; e++) {
        int64_t i = edges[e].row;
        const lf__row *r = &trace->rows[i];
        int64_t at = lower_bound(trace, live, n_live, r->offset);
        if (!edges[e].begins) {
            memmove(&live[at], &live[at + 1], (size_t)(n_live - at - 1) * sizeof live[0]);
            n_live--;
            continue;
        }
        if (at < n_live && trace->rows[live[at]].offset < r->offset + r->bytes) return fail_overlap(trace, live[at], i);
        if (at > 0) {
            const lf__row *below = &trace->rows[live[at - 1]];
            if (below->offset + below->bytes > r->offset) return fail_overlap(trace, live[at - 1], i);
        }
        memmove(&live[at + 1], &live[at], (size_t)(n_live - at) * sizeof live[0]);
        live[at] = i;
        n_live++;
    }
    return LF_OK;
}

lf_status lf_trace_validate(const lf_trace *trace, int64_t capacity_bytes)
{
    LF_CHECK_ARG(trace, "trace is NULL");
    LF_CHECK_ARG(capacity_bytes >= 0, "capacity_bytes is %lld, expected 0 (unlimited) or more", (long long)capacity_bytes);
    lf_status rc = LF_OK;
    edge *edges = lf__alloc_array((size_t)trace->n * 2, sizeof *edges);
    int64_t *live = lf__alloc_array((size_t)trace->n, sizeof *live), n_edges = 0;
    if (!edges || !live) LF_THROW(LF_ERR_NOMEM, "check of %lld rows", (long long)trace->n);
    for (int64_t i = 0; i < trace->n; i++) {
        const lf__row *r = &trace->rows[i];
        LF_TRY(check_alone(trace, i, capacity_bytes));
        if (r->bytes == 0) continue;
        edges[n_edges++] = (edge){r->first, i, 1};
        edges[n_edges++] = (edge){r->last, i, 0};
    }
    if (n_edges) qsort(edges, (size_t)n_edges, sizeof *edges, compare_edges);
    LF_TRY(sweep(trace, edges, n_edges, live));
out:
    lf__free(edges);
    lf__free(live);
    return rc;
}
