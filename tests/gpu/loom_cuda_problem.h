/* SPDX-License-Identifier: Apache-2.0 */
/* A random routing problem with the CPU's answer, for the tests of routing and of rows on CUDA. */
#ifndef LF_LOOM_CUDA_PROBLEM_H
#define LF_LOOM_CUDA_PROBLEM_H

#include "loom_cuda_fixture.h"
#include "route_cases.h"

typedef struct problem {
    lf_route_schedule schedule;
    lf_route_args args, gpu_args; /* over host memory, over device memory */
    int64_t n;
    int32_t e, k;
    lf_routing want; /* the CPU's, host memory */
    float *want_sum;
} problem;

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

/* `p` must stay where it is: its arguments point into it. */
static inline void make_problem(problem *p, const shape *s)
{
    *p = (problem){.n = s->n, .e = s->e, .k = s->k};
    p->schedule = draw_schedule(&rng, s);
    int64_t *token = s->how & NO_NOISE ? NULL : host((size_t)p->n * 8);
    uint8_t *valid = s->how & ALL_VALID ? NULL : host((size_t)p->n);
    float *logits = host((size_t)(p->n * p->e) * 4);
    draw_logits(&rng, s, logits);
    draw_tokens(&rng, s, token, valid);
    p->args = (lf_route_args){.size = sizeof p->args,
                              .token = token,
                              .valid = valid,
                              .schedule = &p->schedule,
                              .n = p->n,
                              .seed = draw_bits(&rng),
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
