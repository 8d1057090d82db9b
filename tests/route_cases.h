/* SPDX-License-Identifier: Apache-2.0 */
/** @file route_cases.h  Random routing problems: shapes and values, for the CPU's test and for devices compared with it. */
#ifndef LF_ROUTE_CASES_H
#define LF_ROUTE_CASES_H

#include "base/base.h"
#include "loongforge/loom.h"

enum { FAVOUR_ONE = 1, NO_NOISE = 2, ALL_VALID = 4, NONE_VALID = 8, TIES = 16, ONE_EACH = 32 };

typedef struct shape {
    int64_t n;
    int32_t e, k;
    uint32_t how;
} shape;

/* Small ones first: the CPU is tested under sanitizers too. */
enum { N_SMALL_SHAPES = 19 };
static const shape shapes[] = {
    {0, 4, 2, 0},
    {0, 16, 4, NO_NOISE},
    {1, 1, 1, 0},
    {1, 16, 2, ALL_VALID},
    {5, 2, 2, NO_NOISE},
    {7, 3, 1, FAVOUR_ONE},
    {16, 16, 1, ONE_EACH},
    {64, 16, 1, FAVOUR_ONE | ALL_VALID},
    {257, 16, 2, 0},
    {300, 17, 3, NO_NOISE},
    {129, 256, 4, 0},
    {33, 8, 8, 0},
    {50, 16, 2, NONE_VALID},
    {200, 9, 4, TIES},
    {1, 5, 4, NONE_VALID},
    {2000, 16, 2, 0},
    {90, 64, 4, FAVOUR_ONE},
    {515, 3, 3, 0},
    {300, 12, 3, TIES | NO_NOISE}, /* -0 and 0 are a tie */
    {8193, 16, 2, FAVOUR_ONE},
    {1000, 100, 4, TIES},
    {3000, 256, 8, ALL_VALID},
    {33000, 16, 2, ALL_VALID},
    {20001, 3, 2, 0},
    {5000, 33, 4, 0},
    {70000, 5, 1, 0},
    {4097, 256, 1, FAVOUR_ONE},
};

static inline float draw(lf__rng *r, float low, float high) { return low + (high - low) * (float)lf__rng_unit(r); }
static inline int64_t draw_bits(lf__rng *r) { return (int64_t)((uint64_t)lf__rng_u32(r) << 32 | lf__rng_u32(r)); }

static inline lf_route_schedule draw_schedule(lf__rng *r, const shape *s)
{
    return (lf_route_schedule){(int32_t)lf__rng_u32(r), s->how & TIES ? 0 : draw(r, 0.2f, 1.5f), draw(r, 0.3f, 2)};
}

/* logits: (n, e) */
static inline void draw_logits(lf__rng *r, const shape *s, float *logits)
{
    for (int64_t i = 0; i < s->n * s->e; i++) {
        if (s->how & TIES) logits[i] = (float)lf__rng_below(r, 2) * (lf__rng_below(r, 2) ? 1 : -1.0f);
        else logits[i] = draw(r, -3, 3);
        if (s->how & FAVOUR_ONE && i % s->e == s->e / 2) logits[i] += 50;
        if (s->how & ONE_EACH && i % s->e == i / s->e % s->e) logits[i] += 50;
    }
}

/* token: (n), valid: (n); NULL where the case has none. */
static inline void draw_tokens(lf__rng *r, const shape *s, int64_t *token, uint8_t *valid)
{
    for (int64_t t = 0; token && t < s->n; t++) token[t] = draw_bits(r);
    for (int64_t t = 0; valid && t < s->n; t++) valid[t] = s->how & NONE_VALID ? 0 : s->how & ONE_EACH || lf__rng_below(r, 4) > 0;
}

#endif
