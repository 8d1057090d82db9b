/* SPDX-License-Identifier: Apache-2.0 */
/* Noise, routing and row movement against float64, over odd shapes; poisoned outputs; any number of threads; streams. */
#include "base/base.h"
#include "lf_test.h"
#include "loongforge/loom.h"

static lf_device *cpu;
static lf_stream *worker;
static lf__rng rng;

static void set_up(void)
{
    if (!cpu) CHECK_OK(lf_device_open(&cpu, "cpu"));
    if (!worker) CHECK_OK(lf_stream_open(cpu, 0, &worker));
    lf__rng_init(&rng, 7, 1, 2, 3);
    CHECK_OK(lf_loom_set_threads(0));
}

static float uniform(float low, float high) { return low + (high - low) * (float)lf__rng_unit(&rng); }

static void *poisoned(size_t bytes, int32_t byte)
{
    void *p = lf__alloc_aligned(bytes + 1, 64);
    CHECK(p != NULL);
    memset(p, byte, bytes);
    return p;
}

/* ---- one routing problem --------------------------------------------------------------------------------------------- */

typedef struct problem {
    int64_t n, d;
    int32_t e, k;
    float temperature, *logits, *noise;
    uint8_t *valid;
    lf_routing r;
    int32_t dtype;
} problem;

static void make_routing(problem *p, int32_t byte)
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
}

static void free_routing(lf_routing *r)
{
    lf__free(r->expert), lf__free(r->weight), lf__free(r->prob), lf__free(r->count);
    lf__free(r->offset), lf__free(r->row), lf__free(r->slot);
}

enum { FAVOUR_ONE = 1, NO_NOISE = 2, ALL_VALID = 4, NONE_VALID = 8, TIES = 16 };

static void make_problem(problem *p, int64_t n, int32_t e, int32_t k, uint32_t how)
{
    *p = (problem){.n = n, .e = e, .k = k, .temperature = uniform(0.3f, 2)};
    const size_t ne = (size_t)n * (size_t)e;
    p->logits = poisoned(ne * 4, 0);
    p->noise = how & NO_NOISE ? NULL : poisoned(ne * 4, 0);
    p->valid = how & ALL_VALID ? NULL : poisoned((size_t)n, 0);
    for (size_t i = 0; i < ne; i++) {
        p->logits[i] = how & TIES ? (float)lf__rng_below(&rng, 2) : uniform(-3, 3);
        if (how & FAVOUR_ONE && i % (size_t)e == (size_t)e / 2) p->logits[i] += 50;
        if (p->noise) p->noise[i] = how & TIES ? 0 : uniform(-2, 4);
    }
    for (int64_t t = 0; p->valid && t < n; t++) p->valid[t] = how & NONE_VALID ? 0 : lf__rng_below(&rng, 4) > 0;
    make_routing(p, 0xa5);
}

static void free_problem(problem *p)
{
    lf__free(p->logits), lf__free(p->noise), lf__free(p->valid);
    free_routing(&p->r);
}

static void route(problem *p, lf_stream *stream, const lf_routing *r)
{
    CHECK_OK(lf_loom_route(cpu, stream, p->logits, p->noise, p->valid, p->n, p->e, p->k, p->temperature, r));
    CHECK_OK(lf_stream_sync(stream));
}

static bool is_valid(const problem *p, int64_t t) { return !p->valid || p->valid[t]; }

/* ---- routing against float64 ------------------------------------------------------------------------------------------ */

/* Also the order of choice: by the scaled logit as a float, ties to the lower expert. */
static void check_token(const problem *p, int64_t t)
{
    double prob[LF_MAX_EXPERTS], sum = 0, chosen = 0;
    float z[LF_MAX_EXPERTS];
    bool taken[LF_MAX_EXPERTS] = {false};
    for (int32_t j = 0; j < p->e; j++) {
        z[j] = (p->logits[t * p->e + j] + (p->noise ? p->noise[t * p->e + j] : 0)) / p->temperature;
        sum += prob[j] = exp((double)z[j]);
    }
    for (int32_t j = 0; j < p->e; j++) CHECK_NEAR(p->r.prob[t * p->e + j], prob[j] / sum, 1e-6);
    const int32_t *expert = p->r.expert + t * p->k;
    const float *weight = p->r.weight + t * p->k;
    for (int32_t c = 0; c < p->k; c++) {
        if (!is_valid(p, t)) {
            CHECK_EQ(expert[c], -1);
            CHECK(weight[c] == 0);
            continue;
        }
        int32_t best = -1;
        for (int32_t j = p->e - 1; j >= 0; j--)
            if (!taken[j] && (best < 0 || z[j] >= z[best])) best = j;
        CHECK_EQ(expert[c], best);
        taken[best] = true;
        chosen += prob[best];
    }
    for (int32_t c = 0; is_valid(p, t) && c < p->k; c++) CHECK_NEAR(weight[c], prob[expert[c]] / chosen, 2e-6);
}

static void check_rows(const problem *p)
{
    const int64_t slots = p->n * p->k;
    int32_t at = 0;
    for (int32_t j = 0; j < p->e; j++) {
        int32_t count = 0;
        CHECK_EQ(p->r.offset[j], at);
        for (int64_t s = 0; s < slots; s++) {
            if (p->r.expert[s] != j) continue;
            CHECK_EQ(p->r.row[at + count], s); /* stable: slots of an expert in order */
            CHECK_EQ(p->r.slot[s], at + count);
            count++;
        }
        CHECK_EQ(p->r.count[j], count);
        at += count;
    }
    CHECK_EQ(p->r.offset[p->e], at);
    for (int64_t s = 0; s < slots; s++) {
        if (p->r.expert[s] >= 0) continue;
        CHECK_EQ(p->r.row[at], s);
        CHECK_EQ(p->r.slot[s], at);
        at++;
    }
    CHECK_EQ(at, slots);
}

static const struct shape {
    int64_t n;
    int32_t e, k;
    uint32_t how;
} shapes[] = {
    {0, 4, 2, 0},
    {1, 1, 1, 0},
    {1, 16, 2, ALL_VALID},
    {5, 2, 2, NO_NOISE},
    {7, 3, 1, FAVOUR_ONE},
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
};

TEST(loom_route_matches_float64)
{
    set_up();
    for (size_t i = 0; i < LF_COUNT(shapes); i++) {
        problem p;
        make_problem(&p, shapes[i].n, shapes[i].e, shapes[i].k, shapes[i].how);
        route(&p, i % 2 ? worker : NULL, &p.r);
        for (int64_t t = 0; t < p.n; t++) check_token(&p, t);
        check_rows(&p);
        free_problem(&p);
    }
}

static void check_same(const lf_routing *a, const lf_routing *b, const problem *p)
{
    const size_t slots = (size_t)(p->n * p->k) * 4, ne = (size_t)p->n * (size_t)p->e * 4, e = (size_t)p->e * 4;
    CHECK(memcmp(a->expert, b->expert, slots) == 0 && memcmp(a->weight, b->weight, slots) == 0);
    CHECK(memcmp(a->row, b->row, slots) == 0 && memcmp(a->slot, b->slot, slots) == 0);
    CHECK(memcmp(a->prob, b->prob, ne) == 0);
    CHECK(memcmp(a->count, b->count, e) == 0 && memcmp(a->offset, b->offset, e + 4) == 0);
}

/* Other poison, other numbers of threads, a stream: the same bits. So every element is written and none depends on threads. */
TEST(loom_route_same_bits_for_any_threads)
{
    set_up();
    for (size_t i = 0; i < LF_COUNT(shapes); i++) {
        problem p;
        make_problem(&p, shapes[i].n, shapes[i].e, shapes[i].k, shapes[i].how);
        lf_routing first = p.r;
        route(&p, NULL, &first);
        for (int32_t threads = 1; threads <= 3; threads++) {
            make_routing(&p, 0x10 * threads);
            CHECK_OK(lf_loom_set_threads(threads));
            route(&p, threads == 2 ? worker : NULL, &p.r);
            check_same(&first, &p.r, &p);
            free_routing(&p.r);
        }
        p.r = first;
        free_problem(&p);
    }
}

/* Other choices than route makes: the same expert twice, ids out of range. Only the arrays named in the header are written. */
TEST(loom_sort_sorts_given_choices)
{
    set_up();
    for (size_t i = 0; i < LF_COUNT(shapes); i++) {
        problem p;
        make_problem(&p, shapes[i].n, shapes[i].e, shapes[i].k, shapes[i].how);
        const size_t slots = (size_t)(p.n * p.k);
        int32_t *given = poisoned(slots * 4, 0);
        for (size_t s = 0; s < slots; s++) {
            p.r.expert[s] = (int32_t)lf__rng_below(&rng, (uint32_t)p.e + 1) - 1; /* what check_rows expects */
            static const int32_t nowhere[] = {-1, INT32_MIN, INT32_MAX};
            const size_t which = lf__rng_below(&rng, 4);
            given[s] = p.r.expert[s] >= 0 ? p.r.expert[s] : which < 3 ? nowhere[which] : p.e;
        }
        lf_routing r = p.r;
        r.expert = NULL, r.weight = NULL, r.prob = NULL;
        CHECK_OK(lf_loom_sort(cpu, i % 2 ? worker : NULL, given, p.n, p.e, p.k, &r));
        CHECK_OK(lf_stream_sync(worker));
        check_rows(&p);
        lf__free(given);
        free_problem(&p);
    }
}

/* Through the full softmax, in doubles: another way than the kernel's. */
TEST(loom_route_backward_matches_float64)
{
    set_up();
    for (size_t i = 0; i < LF_COUNT(shapes); i++) {
        problem p;
        make_problem(&p, shapes[i].n, shapes[i].e, shapes[i].k, shapes[i].how);
        route(&p, NULL, &p.r);
        float *dweight = poisoned((size_t)(p.n * p.k) * 4, 0), *dlogits = poisoned((size_t)p.n * (size_t)p.e * 4, 0xa5);
        for (int64_t s = 0; s < p.n * p.k; s++) dweight[s] = uniform(-1, 1);
        CHECK_OK(lf_loom_route_backward(cpu, i % 2 ? NULL : worker, &p.r, dweight, p.n, p.e, p.k, p.temperature, dlogits));
        CHECK_OK(lf_stream_sync(worker));
        for (int64_t t = 0; t < p.n; t++) {
            double sum = 0, chosen = 0, inner = 0, outer = 0, prob[LF_MAX_EXPERTS], dprob[LF_MAX_EXPERTS] = {0};
            const int32_t *expert = p.r.expert + t * p.k;
            for (int32_t j = 0; j < p.e; j++) {
                double l = p.logits[t * p.e + j] + (p.noise ? (double)p.noise[t * p.e + j] : 0);
                sum += prob[j] = exp(l / (double)p.temperature);
            }
            for (int32_t j = 0; j < p.e; j++) prob[j] /= sum;
            for (int32_t c = 0; is_valid(&p, t) && c < p.k; c++) {
                chosen += prob[expert[c]];
                inner += (double)dweight[t * p.k + c] * prob[expert[c]];
            }
            for (int32_t c = 0; is_valid(&p, t) && c < p.k; c++)
                dprob[expert[c]] = (double)dweight[t * p.k + c] / chosen - inner / (chosen * chosen);
            for (int32_t j = 0; j < p.e; j++) outer += prob[j] * dprob[j];
            for (int32_t j = 0; j < p.e; j++)
                CHECK_NEAR(dlogits[t * p.e + j], prob[j] * (dprob[j] - outer) / (double)p.temperature, 1e-5);
        }
        lf__free(dweight), lf__free(dlogits);
        free_problem(&p);
    }
}

/* A NaN logit must not lead out of bounds. */
TEST(loom_route_survives_nan)
{
    set_up();
    problem p;
    make_problem(&p, 9, 6, 3, ALL_VALID | NO_NOISE);
    for (int64_t i = 0; i < p.n * p.e; i += 2) p.logits[i] = (float)NAN;
    route(&p, NULL, &p.r);
    for (int64_t t = 0; t < p.n; t++) {
        const int32_t *expert = p.r.expert + t * p.k;
        for (int32_t c = 0; c < p.k; c++) CHECK(expert[c] >= 0 && expert[c] < p.e);
        CHECK(expert[0] != expert[1] && expert[1] != expert[2] && expert[0] != expert[2]);
    }
    check_rows(&p);
    free_problem(&p);
}

/* ---- rows ------------------------------------------------------------------------------------------------------------ */

static double get(const void *base, int64_t i, int32_t dtype)
{
    return dtype == LF_DTYPE_F32 ? (double)((const float *)base)[i] : (double)lf__f32_from_bf16(((const uint16_t *)base)[i]);
}

static void *random_rows(int64_t n, int64_t d, int32_t dtype)
{
    void *x = poisoned((size_t)(n * d) * lf_dtype_bytes(dtype), 0);
    for (int64_t i = 0; i < n * d; i++) {
        float v = uniform(-1, 1);
        if (dtype == LF_DTYPE_F32) ((float *)x)[i] = v;
        else ((uint16_t *)x)[i] = lf__bf16_from_f32(v);
    }
    return x;
}

/* Rows behind the last expert hold NaN: the kernels must not read them. */
static void spoil_unrouted(const problem *p, void *rows)
{
    const int64_t bytes = p->d * (int64_t)lf_dtype_bytes(p->dtype);
    for (int64_t r = p->r.offset[p->e]; r < p->n * p->k; r++) memset((char *)rows + r * bytes, 0xff, (size_t)bytes);
}

/* Half a unit in the last place of what is stored, plus the sums' own error. */
static double near_to(double want, int32_t dtype) { return (dtype == LF_DTYPE_F32 ? 3e-6 : 0x1p-8) * (fabs(want) + 0.1); }

static void check_permute(const problem *p, lf_stream *stream)
{
    const size_t bytes = (size_t)(p->n * p->k * p->d) * lf_dtype_bytes(p->dtype);
    void *x = random_rows(p->n, p->d, p->dtype), *xs = poisoned(bytes, 0xa5);
    CHECK_OK(lf_loom_permute(cpu, stream, &p->r, x, p->n, p->e, p->k, p->d, p->dtype, xs));
    CHECK_OK(lf_stream_sync(stream));
    for (int64_t r = 0; r < p->n * p->k; r++)
        for (int64_t i = 0; i < p->d; i++) {
            double want = r < p->r.offset[p->e] ? get(x, p->r.row[r] / p->k * p->d + i, p->dtype) : 0;
            CHECK(get(xs, r * p->d + i, p->dtype) == want);
        }
    lf__free(x), lf__free(xs);
}

static void check_gathers(const problem *p, lf_stream *stream)
{
    const size_t bytes = (size_t)(p->n * p->d) * lf_dtype_bytes(p->dtype);
    void *rows = random_rows(p->n * p->k, p->d, p->dtype), *dx = poisoned(bytes, 0xa5), *y = poisoned(bytes, 0xa5);
    spoil_unrouted(p, rows);
    CHECK_OK(lf_loom_permute_backward(cpu, stream, &p->r, rows, p->n, p->e, p->k, p->d, p->dtype, dx));
    CHECK_OK(lf_loom_combine(cpu, stream, &p->r, rows, p->n, p->e, p->k, p->d, p->dtype, y));
    CHECK_OK(lf_stream_sync(stream));
    for (int64_t t = 0; t < p->n; t++)
        for (int64_t i = 0; i < p->d; i++) {
            double sum = 0, weighted = 0;
            for (int32_t c = 0; is_valid(p, t) && c < p->k; c++) {
                double v = get(rows, p->r.slot[t * p->k + c] * p->d + i, p->dtype);
                sum += v;
                weighted += (double)p->r.weight[t * p->k + c] * v;
            }
            CHECK_NEAR(get(dx, t * p->d + i, p->dtype), sum, near_to(sum, p->dtype));
            CHECK_NEAR(get(y, t * p->d + i, p->dtype), weighted, near_to(weighted, p->dtype));
        }
    lf__free(rows), lf__free(dx), lf__free(y);
}

static void check_combine_backward(const problem *p, lf_stream *stream)
{
    const size_t bytes = (size_t)(p->n * p->k * p->d) * lf_dtype_bytes(p->dtype), slots = (size_t)(p->n * p->k);
    void *ys = random_rows(p->n * p->k, p->d, p->dtype), *dy = random_rows(p->n, p->d, p->dtype);
    void *dys = poisoned(bytes, 0xa5);
    float *dweight = poisoned(slots * 4, 0xa5);
    spoil_unrouted(p, ys);
    CHECK_OK(lf_loom_combine_backward(cpu, stream, &p->r, ys, dy, p->n, p->e, p->k, p->d, p->dtype, dys, dweight));
    CHECK_OK(lf_stream_sync(stream));
    for (int64_t s = 0; s < p->n * p->k; s++) {
        const int64_t t = s / p->k, r = p->r.slot[s];
        double dot = 0, size = 0;
        for (int64_t i = 0; i < p->d; i++) {
            double want = is_valid(p, t) ? (double)p->r.weight[s] * get(dy, t * p->d + i, p->dtype) : 0;
            CHECK_NEAR(get(dys, r * p->d + i, p->dtype), want, is_valid(p, t) ? near_to(want, p->dtype) : 0);
            if (!is_valid(p, t)) continue;
            dot += get(ys, r * p->d + i, p->dtype) * get(dy, t * p->d + i, p->dtype);
            size += fabs(get(ys, r * p->d + i, p->dtype) * get(dy, t * p->d + i, p->dtype));
        }
        CHECK_NEAR(dweight[s], dot, 1e-6 * size);
    }
    lf__free(ys), lf__free(dy), lf__free(dys), lf__free(dweight);
}

TEST(loom_rows_match_float64)
{
    set_up();
    const int64_t widths[] = {1, 3, 16, 64, 100, 1024, 1025, 2500, 0};
    for (size_t i = 0; i < LF_COUNT(shapes); i++) {
        problem p;
        make_problem(&p, shapes[i].n < 300 ? shapes[i].n : 300, shapes[i].e, shapes[i].k, shapes[i].how);
        route(&p, NULL, &p.r);
        for (size_t w = 0; w < 3; w++) {
            p.d = widths[(i * 3 + w) % LF_COUNT(widths)];
            p.dtype = (i + w) % 2 ? LF_DTYPE_BF16 : LF_DTYPE_F32;
            lf_stream *stream = w == 1 ? worker : NULL;
            check_permute(&p, stream);
            check_gathers(&p, stream);
            check_combine_backward(&p, stream);
        }
        free_problem(&p);
    }
}

TEST(loom_rows_same_bits_for_any_threads)
{
    set_up();
    for (int32_t dtype = LF_DTYPE_F32; dtype <= LF_DTYPE_BF16; dtype++) {
        problem p;
        make_problem(&p, 400, 16, 3, 0);
        route(&p, NULL, &p.r);
        p.d = 700;
        p.dtype = dtype;
        const size_t rows = (size_t)(p.n * p.k * p.d) * lf_dtype_bytes(dtype), x = rows / (size_t)p.k;
        void *ys = random_rows(p.n * p.k, p.d, dtype), *dy = random_rows(p.n, p.d, dtype), *out[4][3];
        float *dweight[4];
        for (int32_t threads = 0; threads < 4; threads++) {
            CHECK_OK(lf_loom_set_threads(threads));
            for (int32_t i = 0; i < 3; i++) out[threads][i] = poisoned(i ? x : rows, 0x11 * threads);
            dweight[threads] = poisoned((size_t)(p.n * p.k) * 4, 0x11 * threads);
            CHECK_OK(
                lf_loom_combine_backward(cpu, NULL, &p.r, ys, dy, p.n, p.e, p.k, p.d, dtype, out[threads][0], dweight[threads]));
            CHECK_OK(lf_loom_combine(cpu, NULL, &p.r, ys, p.n, p.e, p.k, p.d, dtype, out[threads][1]));
            CHECK_OK(lf_loom_permute_backward(cpu, NULL, &p.r, ys, p.n, p.e, p.k, p.d, dtype, out[threads][2]));
            for (int32_t i = 0; i < 3; i++) CHECK(memcmp(out[0][i], out[threads][i], i ? x : rows) == 0);
            CHECK(memcmp(dweight[0], dweight[threads], (size_t)(p.n * p.k) * 4) == 0);
        }
        for (int32_t threads = 0; threads < 4; threads++) {
            for (int32_t i = 0; i < 3; i++) lf__free(out[threads][i]);
            lf__free(dweight[threads]);
        }
        lf__free(ys), lf__free(dy);
        free_problem(&p);
    }
}

/* ---- noise ----------------------------------------------------------------------------------------------------------- */

TEST(loom_philox_known_answers)
{
    static const struct {
        uint32_t counter[4], key[2], out[4];
    } known[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < LF_COUNT(known); i++) {
        uint32_t out[4];
        lf__philox(known[i].counter, known[i].key, out);
        for (int32_t j = 0; j < 4; j++) CHECK_EQ(out[j], known[i].out[j]);
    }
}

/* Counter (token low, token high, step, layer * 64 + e / 4), key = seed. */
TEST(loom_gumbel_follows_its_formula)
{
    set_up();
    const int64_t token[] = {0, -1, 5, (int64_t)1 << 40, -7};
    float noise[5 * 10];
    CHECK_OK(lf_loom_gumbel(cpu, NULL, token, 5, 10, (int64_t)0xfedcba9876543210, -3, 11, noise));
    for (int32_t t = 0; t < 5; t++)
        for (int32_t e = 0; e < 10; e++) {
            const uint32_t counter[4] = {(uint32_t)token[t], (uint32_t)((uint64_t)token[t] >> 32), (uint32_t)-3,
                                         11 * 64 + (uint32_t)e / 4};
            const uint32_t key[2] = {0x76543210, 0xfedcba98};
            uint32_t word[4];
            lf__philox(counter, key, word);
            double u = (double)(word[e % 4] >> 8) / 16777216.0 + 1.0 / 33554432.0;
            CHECK(noise[t * 10 + e] == (float)(-log(-log(u))));
        }
    /* token 0, seed 0, step 0, layer 0: the first known answer */
    CHECK_OK(lf_loom_gumbel(cpu, NULL, token, 1, 1, 0, 0, 0, noise));
    CHECK_NEAR(noise[0], -log(-log((0x6627e8 + 0.5) / 16777216.0)), 1e-6);
}

TEST(loom_gumbel_does_not_depend_on_the_batch)
{
    set_up();
    enum { N = 3000, E = 16 };
    int64_t *token = poisoned(N * 8, 0);
    float *whole = poisoned(N * E * 4, 0xa5), *part = poisoned(N * E * 4, 0x11);
    double sum = 0;
    for (int32_t i = 0; i < N; i++) token[i] = 1000 + i;
    CHECK_OK(lf_loom_gumbel(cpu, NULL, token, N, E, 42, 7, 3, whole));
    CHECK_OK(lf_loom_set_threads(2));
    CHECK_OK(lf_loom_gumbel(cpu, worker, token, 1000, E, 42, 7, 3, part));
    CHECK_OK(lf_loom_gumbel(cpu, worker, token + 1000, N - 1000, E, 42, 7, 3, part + 1000 * E));
    CHECK_OK(lf_stream_sync(worker));
    CHECK(memcmp(whole, part, N * E * 4) == 0);
    for (int32_t i = 0; i < N * E; i++) sum += (double)whole[i];
    CHECK_NEAR(sum / (N * E), 0.5772, 4 * 1.2825 / sqrt(N * E)); /* mean of the Gumbel distribution, 4 standard errors */
    CHECK_OK(lf_loom_gumbel(cpu, NULL, token, N, E, 42, 8, 3, part));
    CHECK(memcmp(whole, part, N * E * 4) != 0);
    lf__free(token), lf__free(whole), lf__free(part);
}

/* ---- errors, steady state -------------------------------------------------------------------------------------------- */

TEST(loom_refuses_what_it_cannot_do)
{
    set_up();
    problem p;
    make_problem(&p, 4, 8, 2, ALL_VALID | NO_NOISE);
    const float *l = p.logits;
    CHECK_STATUS(lf_loom_route(cpu, NULL, l, NULL, NULL, 4, 8, 0, 1, &p.r), LF_ERR_INVALID);
    CHECK_STATUS(lf_loom_route(cpu, NULL, l, NULL, NULL, 4, 8, 9, 1, &p.r), LF_ERR_INVALID);
    CHECK_STATUS(lf_loom_route(cpu, NULL, l, NULL, NULL, 4, 2, 3, 1, &p.r), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "k is 3 choices of 2 experts");
    CHECK_STATUS(lf_loom_route(cpu, NULL, l, NULL, NULL, 4, 257, 2, 1, &p.r), LF_ERR_INVALID);
    CHECK_STATUS(lf_loom_route(cpu, NULL, l, NULL, NULL, -1, 8, 2, 1, &p.r), LF_ERR_INVALID);
    CHECK_STATUS(lf_loom_route(cpu, NULL, l, NULL, NULL, INT32_MAX, 8, 2, 1, &p.r), LF_ERR_INVALID);
    CHECK_STATUS(lf_loom_route(cpu, NULL, l, NULL, NULL, 4, 8, 2, 0, &p.r), LF_ERR_INVALID);
    CHECK_STATUS(lf_loom_route(cpu, NULL, l, NULL, NULL, 4, 8, 2, (float)NAN, &p.r), LF_ERR_INVALID);
    CHECK_STATUS(lf_loom_route(cpu, NULL, NULL, NULL, NULL, 4, 8, 2, 1, &p.r), LF_ERR_INVALID);
    CHECK_STATUS(lf_loom_route(NULL, NULL, l, NULL, NULL, 4, 8, 2, 1, &p.r), LF_ERR_INVALID);
    CHECK_STATUS(lf_loom_sort(cpu, NULL, p.r.expert, 4, 8, 9, &p.r), LF_ERR_INVALID);
    CHECK_STATUS(lf_loom_sort(cpu, NULL, NULL, 4, 8, 2, &p.r), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "expert is NULL");
    CHECK_STATUS(lf_loom_permute(cpu, NULL, &p.r, l, 4, 8, 2, 8, LF_DTYPE_F16, p.logits), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "f16");
    CHECK_STATUS(lf_loom_permute(cpu, NULL, NULL, l, 4, 8, 2, 8, LF_DTYPE_F32, p.logits), LF_ERR_INVALID);
    int32_t *row = p.r.row;
    p.r.row = NULL;
    CHECK_STATUS(lf_loom_route(cpu, NULL, l, NULL, NULL, 4, 8, 2, 1, &p.r), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "row");
    p.r.row = row;
    p.r.size = 8;
    CHECK_STATUS(lf_loom_route(cpu, NULL, l, NULL, NULL, 4, 8, 2, 1, &p.r), LF_ERR_INVALID);
    CHECK_STATUS(lf_loom_gumbel(cpu, NULL, NULL, 1, 4, 0, 0, 0, p.logits), LF_ERR_INVALID);
    CHECK_STATUS(lf_loom_gumbel(cpu, NULL, (const int64_t *)row, 1, 4, 0, 0, -1, p.logits), LF_ERR_INVALID);
    CHECK_STATUS(lf_loom_set_threads(-1), LF_ERR_INVALID);
    free_problem(&p);
}

static lf_status hold(void *user)
{
    lf__lock(user);
    lf__unlock(user);
    return LF_OK;
}

/* 50 jobs queued behind one that waits, so all of them exist at once. */
static void queue_fifty(const problem *p, lf__mutex *gate)
{
    lf__lock(gate);
    CHECK_OK(lf_stream_run(worker, hold, gate));
    for (int32_t i = 0; i < 50; i++)
        CHECK_OK(lf_loom_route(cpu, worker, p->logits, p->noise, p->valid, p->n, p->e, p->k, p->temperature, &p->r));
    lf__unlock(gate);
    CHECK_OK(lf_stream_sync(worker));
}

TEST(loom_allocates_nothing_in_steady_state)
{
    set_up();
    problem p;
    lf__mutex *gate = lf__mutex_open();
    make_problem(&p, 40, 8, 2, 0);
    queue_fifty(&p, gate);
    lf__alloc_fail_at(0);
    queue_fifty(&p, gate);
    CHECK_EQ(lf__alloc_fail_at(0), 0);
    lf__mutex_close(gate);
    free_problem(&p);
}

TEST(loom_closes)
{
    lf_stream_close(worker);
    lf_device_close(cpu);
}

LF_TEST_MAIN
