/* SPDX-License-Identifier: Apache-2.0 */
/* What the tests of routing and of rows share: the CPU device, poisoned memory, a random routing problem. */
#ifndef LF_LOOM_FIXTURE_H
#define LF_LOOM_FIXTURE_H

#include "base/base.h"
#include "lf_test.h"
#include "route_cases.h"

static lf_device *cpu;
static lf_stream *worker;
static lf__rng rng;

static inline void set_up(void)
{
    if (!cpu) CHECK_OK(lf_device_open(&cpu, "cpu"));
    if (!worker) CHECK_OK(lf_stream_open(cpu, 0, &worker));
    lf__rng_init(&rng, 7, 1, 2, 3);
    CHECK_OK(lf_loom_set_threads(0));
}

static inline float uniform(float low, float high) { return draw(&rng, low, high); }

static inline void *poisoned(size_t bytes, int32_t byte)
{
    void *p = lf__alloc_aligned(bytes + 1, 64);
    CHECK(p != NULL);
    memset(p, byte, bytes);
    return p;
}

/* ---- one routing problem --------------------------------------------------------------------------------------------- */

typedef struct problem {
    int64_t n, d, seed;
    int32_t e, k, layer, dtype;
    lf_route_schedule schedule;
    float *logits, *noise; /* noise: (n, e) by its formula, zero where none is drawn */
    int64_t *token;
    uint8_t *valid;
    lf_routing r;
    float *prob_sum;
} problem;

static inline void make_routing(problem *p, int32_t byte)
{
    const size_t n = (size_t)p->n, e = (size_t)p->e, slots = n * (size_t)p->k;
    p->r = (lf_routing){.size = sizeof p->r,
                        .expert = poisoned(slots * 4, byte),
                        .weight = poisoned(slots * 4, byte),
                        .prob = poisoned(n * e * 4, byte),
                        .count = poisoned(e * 4, byte),
                        .offset = poisoned((e + 1) * 4, byte),
                        .row = poisoned(slots * 4, byte),
                        .slot = poisoned(slots * 4, byte)};
    p->prob_sum = poisoned(e * 4, byte);
}

static inline void free_routing(lf_routing *r)
{
    lf__free(r->expert), lf__free(r->weight), lf__free(r->prob), lf__free(r->count);
    lf__free(r->offset), lf__free(r->row), lf__free(r->slot);
}

/* Counter (token low, token high, step, layer * 64 + e / 4), key = seed. */
static inline void draw_noise(const problem *p)
{
    const uint32_t key[2] = {(uint32_t)p->seed, (uint32_t)((uint64_t)p->seed >> 32)};
    for (int64_t i = 0; i < p->n * p->e; i++) {
        const uint64_t token = (uint64_t)p->token[i / p->e];
        const uint32_t e = (uint32_t)(i % p->e);
        const uint32_t counter[4] = {(uint32_t)token, (uint32_t)(token >> 32), (uint32_t)p->schedule.step,
                                     (uint32_t)p->layer * 64 + e / 4};
        uint32_t word[4];
        lf__philox(counter, key, word);
        const double u = (double)(word[e % 4] >> 8) / 16777216.0 + 1.0 / 33554432.0;
        p->noise[i] = (float)(-log(-log(u)));
    }
}

static inline void make_problem(problem *p, int64_t n, int32_t e, int32_t k, uint32_t how)
{
    *p = (problem){.n = n, .e = e, .k = k, .layer = (int32_t)lf__rng_below(&rng, 1000)};
    const shape s = {n, e, k, how};
    const size_t ne = (size_t)n * (size_t)e;
    p->seed = draw_bits(&rng);
    p->schedule = draw_schedule(&rng, &s);
    p->logits = poisoned(ne * 4, 0);
    p->noise = poisoned(ne * 4, 0);
    p->token = how & NO_NOISE ? NULL : poisoned((size_t)n * 8, 0);
    p->valid = how & ALL_VALID ? NULL : poisoned((size_t)n, 0);
    draw_logits(&rng, &s, p->logits);
    draw_tokens(&rng, &s, p->token, p->valid);
    if (p->token && p->schedule.noise_scale != 0) draw_noise(p);
    make_routing(p, 0xa5);
}

static inline void free_problem(problem *p)
{
    lf__free(p->logits), lf__free(p->noise), lf__free(p->token), lf__free(p->valid), lf__free(p->prob_sum);
    free_routing(&p->r);
}

static inline lf_route_args args_of(const problem *p)
{
    return (lf_route_args){.size = sizeof(lf_route_args),
                           .logits = p->logits,
                           .token = p->token,
                           .valid = p->valid,
                           .schedule = &p->schedule,
                           .n = p->n,
                           .seed = p->seed,
                           .e = p->e,
                           .k = p->k,
                           .layer = p->layer};
}

static inline void route(problem *p, lf_stream *stream, const lf_routing *r)
{
    const lf_route_args args = args_of(p);
    CHECK_OK(lf_loom_route(cpu, stream, &args, r, p->prob_sum));
    CHECK_OK(lf_stream_sync(stream));
}

static inline bool is_valid(const problem *p, int64_t t) { return !p->valid || p->valid[t]; }

#endif
