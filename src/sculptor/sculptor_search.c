/* SPDX-License-Identifier: Apache-2.0 */
/* Orders to place blocks in, and a search over orders.
 *
 * The search asks for a plan one byte smaller than the best: it places blocks in some order and stops at the first that does
 * not fit below that limit. Such a block came too late, so it moves forward in the order and the next try starts. When that
 * no longer helps, the order is shaken and it starts again from the best one. Everything is a function of the trace and the
 * options: random numbers have a fixed seed and the budget counts work, not time. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "sculptor_int.h"

/* Tries that may get no further before the order is shaken. */
enum { PATIENCE = 1024 };

enum { BY_BYTES, BY_AREA, BY_DURATION, BY_START, N_ORDERS };

typedef struct sort_key {
    double key, second; /* descending */
    int32_t index;      /* ascending */
} sort_key;

static int compare_keys(const void *a, const void *b)
{
    const sort_key *x = a, *y = b;
    if (x->key != y->key) return x->key > y->key ? -1 : 1;
    if (x->second != y->second) return x->second > y->second ? -1 : 1;
    return x->index < y->index ? -1 : x->index > y->index;
}

static void make_order(const lf__problem *p, int32_t kind, sort_key *keys, int32_t *order)
{
    for (int32_t i = 0; i < p->n; i++) {
        const lf__block *b = &p->block[i];
        double bytes = (double)b->bytes, duration = b->last - b->first;
        keys[i].index = i;
        keys[i].key = kind == BY_BYTES ? bytes : kind == BY_AREA ? bytes * duration : kind == BY_DURATION ? duration : -b->first;
        keys[i].second = kind == BY_BYTES ? duration : bytes;
    }
    qsort(keys, (size_t)p->n, sizeof keys[0], compare_keys);
    for (int32_t i = 0; i < p->n; i++) order[i] = keys[i].index;
}

static bool finished(const lf__problem *p)
{
    return p->best_peak <= p->bound || p->work >= p->budget || lf__now_ns() >= p->stop_ns;
}

lf_status lf__plan_greedy(lf__problem *p)
{
    int32_t stuck;
    sort_key *keys = lf__alloc_array((size_t)p->n, sizeof *keys);
    int32_t *order = lf__alloc_array((size_t)p->n, sizeof *order);
    lf_status rc = keys && order ? LF_OK : LF_FAIL(LF_ERR_NOMEM, "plan of %d tensors", p->n);
    if (rc == LF_OK) {
        make_order(p, BY_BYTES, keys, order);
        lf__place_order(p, order, LF_FIT_BEST, INT64_MAX, &stuck);
    }
    lf__free(keys);
    lf__free(order);
    return rc;
}

/* Every order with both fits; the best one is left in `order`. */
static int32_t try_orders(lf__problem *p, sort_key *keys, int32_t *order, int32_t *best_order)
{
    int32_t best_fit = LF_FIT_BEST, stuck;
    for (int32_t kind = 0; kind < N_ORDERS; kind++)
        for (int32_t fit = LF_FIT_BEST; fit >= LF_FIT_FIRST; fit--) {
            if ((kind || fit != LF_FIT_BEST) && finished(p)) return best_fit;
            make_order(p, kind, keys, order);
            int64_t before = p->best_peak;
            lf__place_order(p, order, fit, before - 1, &stuck);
            if (p->best_peak == before) continue;
            memcpy(best_order, order, (size_t)p->n * sizeof order[0]);
            best_fit = fit;
        }
    return best_fit;
}

/* The block at `from` goes to `to` (to < from), those between move back by one. */
static void move_forward(int32_t *order, int32_t from, int32_t to)
{
    int32_t block = order[from];
    memmove(&order[to + 1], &order[to], (size_t)(from - to) * sizeof order[0]);
    order[to] = block;
}

static void shake(int32_t *order, int32_t n, lf__rng *rng, int32_t moves)
{
    for (int32_t i = 0; i < moves; i++) {
        int32_t a = lf__rng_below(rng, n), b = lf__rng_below(rng, n);
        move_forward(order, a > b ? a : b, a > b ? b : a);
    }
}

/* Somewhere ahead of `stuck`, the nearer the likelier: small moves keep what was already good. */
static int32_t place_ahead(lf__rng *rng, int32_t stuck)
{
    int32_t nearest = 0;
    for (int32_t i = 0; i < 4; i++) {
        int32_t at = lf__rng_below(rng, stuck);
        if (at > nearest) nearest = at;
    }
    return nearest;
}

static void search_orders(lf__problem *p, int32_t fit, int32_t *order, int32_t *best_order)
{
    lf__rng rng;
    lf__rng_init(&rng, 0x6c6f6f6e67, 0, 0, 0);
    int32_t stuck, furthest = 0, without_gain = 0, round = 0;
    memcpy(order, best_order, (size_t)p->n * sizeof order[0]);
    while (!finished(p)) {
        lf__place_order(p, order, fit, p->best_peak - 1, &stuck);
        if (stuck == p->n) { /* a smaller plan */
            memcpy(best_order, order, (size_t)p->n * sizeof order[0]);
            furthest = without_gain = 0;
            continue;
        }
        if (stuck > furthest) {
            furthest = stuck;
            without_gain = 0;
        }
        if (++without_gain > PATIENCE || stuck == 0) {
            memcpy(order, best_order, (size_t)p->n * sizeof order[0]);
            shake(order, p->n, &rng, 1 + round++ % 8);
            fit = lf__rng_below(&rng, 2);
            furthest = without_gain = 0;
            continue;
        }
        move_forward(order, stuck, place_ahead(&rng, stuck));
    }
}

lf_status lf__plan_search(lf__problem *p)
{
    lf_status rc = LF_OK;
    sort_key *keys = lf__alloc_array((size_t)p->n, sizeof *keys);
    int32_t *order = lf__alloc_array((size_t)p->n, sizeof *order), *best_order = lf__alloc_array((size_t)p->n, sizeof *order);
    if (!keys || !order || !best_order) LF_THROW(LF_ERR_NOMEM, "plan of %d tensors", p->n);
    int32_t fit = try_orders(p, keys, order, best_order);
    if (p->n > 1) search_orders(p, fit, order, best_order);
out:
    lf__free(keys);
    lf__free(order);
    lf__free(best_order);
    return rc;
}
