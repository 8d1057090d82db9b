/* SPDX-License-Identifier: Apache-2.0 */
/* A random routing problem with the CPU's answer, for the tests of routing and of rows on CUDA. */
#ifndef LF_LOOM_CUDA_PROBLEM_H
#define LF_LOOM_CUDA_PROBLEM_H

#include "loom_cuda_fixture.h"

typedef struct problem {
    lf_route_schedule schedule;
    lf_route_args args, gpu_args; /* over host memory, over device memory */
    int64_t n;
    int32_t e, k;
    lf_routing want; /* the CPU's, host memory */
    float *want_sum;
} problem;

enum { FAVOUR_ONE = 1, NO_NOISE = 2, ALL_VALID = 4, NONE_VALID = 8, TIES = 16, ONE_EACH = 32 };

static const struct shape {
    int64_t n;
    int32_t e, k;
    uint32_t how;
} shapes[] = {
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
    {8193, 16, 2, FAVOUR_ONE},
    {1000, 100, 4, TIES},
    {3000, 256, 8, ALL_VALID},
    {33000, 16, 2, ALL_VALID},
    {20001, 3, 2, 0},
    {5000, 33, 4, 0},
    {300, 12, 3, TIES | NO_NOISE}, /* -0 and 0 are a tie */
    {70000, 5, 1, 0},
    {4097, 256, 1, FAVOUR_ONE},
};

static inline lf_routing new_routing(const problem *p, bool on_device, int32_t byte)
{
    const size_t e = (size_t)p->e, slots = (size_t)(p->n * p->k) * 4, prob = (size_t)p->n * e * 4;
#define NEW(bytes) (on_device ? device(bytes, byte) : host(bytes))
    return (lf_routing){.size = sizeof(lf_routing),
                        .expert = NEW(slots),
                        .weight = NEW(slots),
                        .prob = NEW(prob),
                        .count = NEW(e * 4),
                        .offset = NEW(e * 4 + 4),
                        .row = NEW(slots),
                        .slot = NEW(slots)};
#undef NEW
}

/* logits: (n, e) host memory. The CPU's answer, and what the device needs for its own. */
static inline void solve(problem *p, float *logits)
{
    p->args.logits = logits;
    p->want = new_routing(p, false, 0);
    p->want_sum = host((size_t)p->e * 4);
    CHECK_OK(lf_loom_route(cpu, NULL, &p->args, &p->want, p->want_sum));
    p->gpu_args = p->args;
    p->gpu_args.logits = up(logits, (size_t)(p->n * p->e) * 4);
    p->gpu_args.token = up(p->args.token, (size_t)p->n * 8);
    p->gpu_args.valid = up(p->args.valid, (size_t)p->n);
    p->gpu_args.schedule = up(p->args.schedule, sizeof p->schedule);
}

static inline float some_logit(const struct shape *s, int64_t i)
{
    float logit = s->how & TIES ? (float)lf__rng_below(&rng, 2) * (lf__rng_below(&rng, 2) ? 1 : -1.0f) : uniform(-3, 3);
    if (s->how & FAVOUR_ONE && i % s->e == s->e / 2) logit += 50;
    if (s->how & ONE_EACH && i % s->e == i / s->e % s->e) logit += 50;
    return logit;
}

/* `p` must stay where it is: its arguments point into it. */
static inline void make_problem(problem *p, const struct shape *s)
{
    *p = (problem){.n = s->n, .e = s->e, .k = s->k};
    p->schedule = (lf_route_schedule){(int32_t)lf__rng_u32(&rng), s->how & TIES ? 0 : uniform(0.2f, 1.5f), uniform(0.3f, 2)};
    int64_t *token = s->how & NO_NOISE ? NULL : host((size_t)p->n * 8);
    uint8_t *valid = s->how & ALL_VALID ? NULL : host((size_t)p->n);
    float *logits = host((size_t)(p->n * p->e) * 4);
    for (int64_t i = 0; i < p->n * p->e; i++) logits[i] = some_logit(s, i);
    for (int64_t t = 0; token && t < p->n; t++) token[t] = (int64_t)((uint64_t)lf__rng_u32(&rng) << 32 | lf__rng_u32(&rng));
    for (int64_t t = 0; valid && t < p->n; t++)
        valid[t] = s->how & NONE_VALID ? 0 : s->how & ONE_EACH || lf__rng_below(&rng, 4) > 0;
    p->args = (lf_route_args){.size = sizeof p->args,
                              .token = token,
                              .valid = valid,
                              .schedule = &p->schedule,
                              .n = p->n,
                              .seed = (int64_t)((uint64_t)lf__rng_u32(&rng) << 32 | lf__rng_u32(&rng)),
                              .e = p->e,
                              .k = p->k,
                              .layer = (int32_t)lf__rng_below(&rng, 1000)};
    solve(p, logits);
}

/* The CPU's routing on the device, so that what follows starts from the same bits. */
static inline lf_routing upload_routing(const problem *p)
{
    const size_t slots = (size_t)(p->n * p->k) * 4, e = (size_t)p->e * 4;
    return (lf_routing){.size = sizeof(lf_routing),
                        .expert = up(p->want.expert, slots),
                        .weight = up(p->want.weight, slots),
                        .prob = up(p->want.prob, (size_t)p->n * e),
                        .count = up(p->want.count, e),
                        .offset = up(p->want.offset, e + 4),
                        .row = up(p->want.row, slots),
                        .slot = up(p->want.slot, slots)};
}

#endif
