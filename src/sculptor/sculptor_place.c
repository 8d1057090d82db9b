/* SPDX-License-Identifier: Apache-2.0 */
/* Placing blocks one after another in a given order, and the orders worth trying. */
#include <stdlib.h>
#include <string.h>

#include "sculptor_int.h"

/* Lowest place or smallest gap for a block among those placed. Gaps are found by walking up the placed blocks that are live
 * at the same time; `cursor` is the highest end seen. */
static int64_t find_place(const lf__placed *placed, int64_t base, const lf__block *b, int32_t fit)
{
    int64_t cursor = base, found = -1, found_gap = INT64_MAX;
    for (int32_t j = 0; j < placed->n; j++) {
        if (placed->first[j] >= b->last || b->first >= placed->last[j]) continue;
        int64_t gap = placed->offset[j] - cursor;
        if (gap >= b->bytes && gap < found_gap) {
            int64_t start = lf__round_up(cursor, b->align);
            if (placed->offset[j] - start >= b->bytes) {
                if (fit == LF_FIT_FIRST) return start;
                found = start;
                found_gap = gap;
            }
        }
        if (placed->end[j] > cursor) cursor = placed->end[j];
    }
    return found >= 0 ? found : lf__round_up(cursor, b->align);
}

static void insert_at(lf__placed *placed, const lf__block *b, int64_t offset)
{
    int32_t low = 0, high = placed->n;
    while (low < high) {
        int32_t middle = low + (high - low) / 2;
        if (placed->offset[middle] < offset) low = middle + 1;
        else high = middle;
    }
    size_t behind = (size_t)(placed->n - low);
    memmove(&placed->first[low + 1], &placed->first[low], behind * sizeof placed->first[0]);
    memmove(&placed->last[low + 1], &placed->last[low], behind * sizeof placed->last[0]);
    memmove(&placed->offset[low + 1], &placed->offset[low], behind * sizeof placed->offset[0]);
    memmove(&placed->end[low + 1], &placed->end[low], behind * sizeof placed->end[0]);
    placed->first[low] = b->first;
    placed->last[low] = b->last;
    placed->offset[low] = offset;
    placed->end[low] = offset + b->bytes;
    placed->n++;
}

int64_t lf__place_order(lf__problem *p, const int32_t *order, int32_t fit, int64_t limit, int32_t *stuck)
{
    int64_t peak = p->base;
    p->placed.n = 0;
    for (int32_t i = 0; i < p->n; i++) {
        const lf__block *b = &p->block[order[i]];
        int64_t at = find_place(&p->placed, p->base, b, fit);
        p->work += p->placed.n + 1;
        if (at + b->bytes > limit) {
            *stuck = i;
            return INT64_MAX;
        }
        p->offset[order[i]] = at;
        insert_at(&p->placed, b, at);
        if (at + b->bytes > peak) peak = at + b->bytes;
    }
    *stuck = p->n;
    if (peak < p->best_peak) {
        p->best_peak = peak;
        memcpy(p->best, p->offset, (size_t)p->n * sizeof p->best[0]);
    }
    return peak;
}
