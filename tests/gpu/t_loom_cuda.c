/* SPDX-License-Identifier: Apache-2.0 */
/* Noise, routing and rows on CUDA against the CPU's table: integers and everything that is computed in one fixed order bit for
 * bit, the rest to a stated tolerance; odd shapes, poisoned outputs, reruns, streams. */
#include "loom_cuda_fixture.h"

/* ---- one routing problem --------------------------------------------------------------------------------------------- */

typedef struct problem {
    int64_t n;
    int32_t e, k;
    float temperature, *logits, *noise;
    uint8_t *valid;
    lf_routing want;                     /* the CPU's, host memory */
    const float *gpu_logits, *gpu_noise; /* device copies */
    const uint8_t *gpu_valid;
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
};

static lf_routing new_routing(const problem *p, bool on_device, int32_t byte)
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

static void make_problem(problem *p, const struct shape *s)
{
    *p = (problem){.n = s->n, .e = s->e, .k = s->k, .temperature = uniform(0.3f, 2)};
    const size_t ne = (size_t)p->n * (size_t)p->e;
    p->logits = host(ne * 4);
    p->noise = s->how & NO_NOISE ? NULL : host(ne * 4);
    p->valid = s->how & ALL_VALID ? NULL : host((size_t)p->n);
    for (size_t i = 0; i < ne; i++) {
        const size_t x = i % (size_t)p->e, t = i / (size_t)p->e;
        p->logits[i] = s->how & TIES ? (float)lf__rng_below(&rng, 2) * (lf__rng_below(&rng, 2) ? 1 : -1.0f) : uniform(-3, 3);
        if (s->how & FAVOUR_ONE && x == (size_t)p->e / 2) p->logits[i] += 50;
        if (s->how & ONE_EACH && x == t % (size_t)p->e) p->logits[i] += 50;
        if (p->noise) p->noise[i] = s->how & TIES ? 0 : uniform(-2, 4);
    }
    for (int64_t t = 0; p->valid && t < p->n; t++)
        p->valid[t] = s->how & NONE_VALID ? 0 : s->how & ONE_EACH || lf__rng_below(&rng, 4) > 0;
    p->want = new_routing(p, false, 0);
    CHECK_OK(lf_loom_route(cpu, NULL, p->logits, p->noise, p->valid, p->n, p->e, p->k, p->temperature, &p->want));
    p->gpu_logits = up(p->logits, ne * 4);
    p->gpu_noise = up(p->noise, ne * 4);
    p->gpu_valid = up(p->valid, (size_t)p->n);
}

/* The CPU's routing on the device, so that what follows starts from the same bits. */
static lf_routing upload_routing(const problem *p)
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

static void route(const problem *p, lf_stream *on, const lf_routing *r)
{
    CHECK_OK(lf_loom_route(gpu, on, p->gpu_logits, p->gpu_noise, p->gpu_valid, p->n, p->e, p->k, p->temperature, r));
}

static void check_routing(const problem *p, const lf_routing *r)
{
    const size_t slots = (size_t)(p->n * p->k) * 4, e = (size_t)p->e * 4;
    check_bytes("expert", r->expert, p->want.expert, slots);
    check_bytes("count", r->count, p->want.count, e);
    check_bytes("offset", r->offset, p->want.offset, e + 4);
    check_bytes("row", r->row, p->want.row, slots);
    check_bytes("slot", r->slot, p->want.slot, slots);
    /* expf within 2 units in the last place on the device and 1 here, sums in another order: 1e-6 of values up to 1 */
    const float *prob = down(r->prob, (size_t)p->n * e), *weight = down(r->weight, slots);
    for (int64_t i = 0; i < p->n * p->e; i++) CHECK_NEAR(prob[i], p->want.prob[i], 1e-6);
    for (int64_t i = 0; i < p->n * p->k; i++) CHECK_NEAR(weight[i], p->want.weight[i], 1e-6);
}

TEST(cuda_route_matches_cpu)
{
    set_up();
    for (size_t i = 0; i < LF_COUNT(shapes); i++) {
        problem p;
        make_problem(&p, &shapes[i]);
        lf_routing r = new_routing(&p, true, 0xa5);
        route(&p, next_stream(), &r);
        check_routing(&p, &r);
        release();
    }
}

/* Ids of all kinds, the same expert twice: the CPU's bits, and no other array is touched. */
TEST(cuda_sort_matches_cpu)
{
    set_up();
    for (size_t i = 0; i < LF_COUNT(shapes); i++) {
        problem p;
        make_problem(&p, &shapes[i]);
        const size_t slots = (size_t)(p.n * p.k), e = (size_t)p.e * 4;
        int32_t *given = host(slots * 4);
        for (size_t s = 0; s < slots; s++) {
            static const int32_t nowhere[] = {-1, INT32_MIN, INT32_MAX};
            const size_t which = lf__rng_below(&rng, 12);
            given[s] = which < 3 ? nowhere[which] : (int32_t)lf__rng_below(&rng, (uint32_t)p.e + 1);
            if (shapes[i].how & FAVOUR_ONE && which > 5) given[s] = p.e / 2;
        }
        CHECK_OK(lf_loom_sort(cpu, NULL, given, p.n, p.e, p.k, &p.want));
        lf_routing r = new_routing(&p, true, 0xa5);
        r.expert = NULL, r.weight = NULL, r.prob = NULL;
        CHECK_OK(lf_loom_sort(gpu, next_stream(), up(given, slots * 4), p.n, p.e, p.k, &r));
        check_bytes("count", r.count, p.want.count, e);
        check_bytes("offset", r.offset, p.want.offset, e + 4);
        check_bytes("row", r.row, p.want.row, slots * 4);
        check_bytes("slot", r.slot, p.want.slot, slots * 4);
        release();
    }
}

static void check_same_routing(const problem *p, const lf_routing *a, const lf_routing *b)
{
    const size_t slots = (size_t)(p->n * p->k) * 4, e = (size_t)p->e * 4, prob = (size_t)p->n * e;
    check_bytes("expert again", a->expert, down(b->expert, slots), slots);
    check_bytes("weight again", a->weight, down(b->weight, slots), slots);
    check_bytes("prob again", a->prob, down(b->prob, prob), prob);
    check_bytes("row again", a->row, down(b->row, slots), slots);
    check_bytes("slot again", a->slot, down(b->slot, slots), slots);
    check_bytes("count again", a->count, down(b->count, e), e);
    check_bytes("offset again", a->offset, down(b->offset, e + 4), e + 4);
}

/* Other poison, other streams, the one that PyTorch lends: the same bits, so every element is written. */
TEST(cuda_route_same_bits_again)
{
    set_up();
    lf_stream *lent = NULL;
    CHECK_OK(lf_stream_wrap(gpu, NULL, &lent));
    for (size_t i = 0; i < LF_COUNT(shapes); i++) {
        problem p;
        make_problem(&p, &shapes[i]);
        lf_routing first = new_routing(&p, true, 0x11), second = new_routing(&p, true, 0xee), third = new_routing(&p, true, 0x77);
        route(&p, NULL, &first);
        route(&p, stream, &second);
        CHECK_OK(lf_stream_sync(stream));
        route(&p, lent, &third);
        CHECK_OK(lf_stream_sync(lent));
        check_same_routing(&p, &first, &second);
        check_same_routing(&p, &first, &third);
        release();
    }
    lf_stream_close(lent);
}

/* Whatever a NaN does to the numbers, rows stay a permutation and experts in range and different. */
TEST(cuda_route_survives_nan)
{
    set_up();
    problem p;
    make_problem(&p, &(struct shape){500, 16, 4, ALL_VALID});
    for (int64_t i = 0; i < p.n * p.e; i += 1 + lf__rng_below(&rng, 20)) p.logits[i] = i % 3 ? (float)NAN : -INFINITY;
    for (int64_t i = 0; i < p.e; i++) p.logits[i] = (float)NAN;
    p.gpu_logits = up(p.logits, (size_t)(p.n * p.e) * 4);
    lf_routing r = new_routing(&p, true, 0xa5);
    route(&p, NULL, &r);
    const size_t slots = (size_t)(p.n * p.k);
    const int32_t *expert = down(r.expert, slots * 4), *row = down(r.row, slots * 4), *slot = down(r.slot, slots * 4);
    for (size_t s = 0; s < slots; s++) {
        CHECK(expert[s] >= 0 && expert[s] < p.e);
        for (size_t other = s / 4 * 4; other < s; other++) CHECK(expert[other] != expert[s]);
        CHECK(row[s] >= 0 && row[s] < (int32_t)slots);
        CHECK_EQ(slot[row[s]], s);
    }
    release();
}

/* Two streams at once: neither uses the other's scratch. */
TEST(cuda_route_on_two_streams_at_once)
{
    set_up();
    lf_stream *other = NULL;
    CHECK_OK(lf_stream_open(gpu, 0, &other));
    problem a, b;
    make_problem(&a, &(struct shape){9000, 16, 2, 0});
    make_problem(&b, &(struct shape){7000, 60, 3, 0});
    lf_routing ra = new_routing(&a, true, 0xa5), rb = new_routing(&b, true, 0xa5);
    for (int32_t i = 0; i < 50; i++) {
        route(&a, stream, &ra);
        route(&b, other, &rb);
    }
    CHECK_OK(lf_stream_sync(other));
    check_routing(&a, &ra);
    check_routing(&b, &rb);
    lf_stream_close(other);
    release();
}

TEST(cuda_route_backward_matches_cpu)
{
    set_up();
    for (size_t i = 0; i < LF_COUNT(shapes); i++) {
        problem p;
        make_problem(&p, &shapes[i]);
        lf_routing r = upload_routing(&p);
        const size_t slots = (size_t)(p.n * p.k), bytes = (size_t)p.n * (size_t)p.e * 4;
        float *dweight = host(slots * 4), *want = host(bytes), *dlogits = device(bytes, 0xa5);
        for (size_t s = 0; s < slots; s++) dweight[s] = uniform(-1, 1);
        CHECK_OK(lf_loom_route_backward(cpu, NULL, &p.want, dweight, p.n, p.e, p.k, p.temperature, want));
        const float *gpu_dweight = up(dweight, slots * 4);
        CHECK_OK(lf_loom_route_backward(gpu, next_stream(), &r, gpu_dweight, p.n, p.e, p.k, p.temperature, dlogits));
        check_bytes("dlogits", dlogits, want, bytes);
        release();
    }
}

/* The logarithm of either library is within a unit of 2^-53, so only a value next to a tie may round the other way. */
TEST(cuda_gumbel_matches_cpu)
{
    set_up();
    static const int32_t experts[] = {1, 3, 4, 16, 17, 256};
    for (size_t i = 0; i < LF_COUNT(experts); i++) {
        const int32_t e = experts[i];
        const int64_t n = i == 0 ? 0 : 700, count = n * e;
        int64_t *token = host((size_t)n * 8);
        for (int64_t t = 0; t < n; t++) token[t] = (int64_t)((uint64_t)lf__rng_u32(&rng) << 32 | lf__rng_u32(&rng));
        float *want = host((size_t)count * 4), *noise = device((size_t)count * 4, 0xff);
        const int64_t *gpu_token = up(token, (size_t)n * 8);
        CHECK_OK(lf_loom_gumbel(cpu, NULL, token, n, e, -5 - e, 1000 + e, 3 * e, want));
        CHECK_OK(lf_loom_gumbel(gpu, next_stream(), gpu_token, n, e, -5 - e, 1000 + e, 3 * e, noise));
        CHECK_OK(lf_stream_sync(stream));
        const float *got = down(noise, (size_t)count * 4);
        int64_t other = 0;
        for (int64_t j = 0; j < count; j++) {
            CHECK_NEAR(got[j], want[j], 1.2e-7 * fabs((double)want[j]));
            other += got[j] != want[j];
        }
        CHECK(other <= count / 10000);
        release();
    }
}

/* ---- rows ------------------------------------------------------------------------------------------------------------ */

/* Random rows; those from `live` on are NaN, and must not be read. */
static void *random_rows(int64_t rows, int64_t live, int64_t d, int32_t dtype)
{
    void *base = host((size_t)(rows * d) * width(dtype));
    for (int64_t i = 0; i < rows * d; i++) {
        const float v = i < live * d ? uniform(-2, 2) : (float)NAN;
        put(base, i, dtype, v);
    }
    return base;
}

/* `shift`: elements that the device's arrays start behind 16 bytes. */
static void check_moves(const problem *p, const lf_routing *r, int64_t d, int32_t dtype, int64_t shift)
{
    const int64_t rows = p->n * p->k, live = p->want.offset[p->e];
    const size_t w = width(dtype), small = (size_t)(p->n * d) * w, large = (size_t)(rows * d) * w, skip = (size_t)shift * w;
    const void *x = random_rows(p->n, p->n, d, dtype), *ys = random_rows(rows, live, d, dtype);
    void *want = host(large);
    char *gx = device(small + skip, 0), *gys = device(large + skip, 0), *out = device(large + skip, 0xa5);
    CHECK_OK(lf_copy(gpu, gx += skip, x, small, NULL));
    CHECK_OK(lf_copy(gpu, gys += skip, ys, large, NULL));
    out += skip;
    CHECK_OK(lf_loom_permute(cpu, NULL, &p->want, x, p->n, p->e, p->k, d, dtype, want));
    CHECK_OK(lf_loom_permute(gpu, next_stream(), r, gx, p->n, p->e, p->k, d, dtype, out));
    check_bytes("xs", out, want, large);
    lf_routing few = {.size = sizeof few, .row = r->row, .offset = r->offset};
    CHECK_OK(lf_fill(gpu, out, 0x5a, large, NULL));
    CHECK_OK(lf_loom_permute(gpu, next_stream(), &few, gx, p->n, p->e, p->k, d, dtype, out));
    check_bytes("xs by row", out, want, large);
    CHECK_OK(lf_fill(gpu, out, 0xa5, large, NULL));
    CHECK_OK(lf_loom_permute_backward(cpu, NULL, &p->want, ys, p->n, p->e, p->k, d, dtype, want));
    CHECK_OK(lf_loom_permute_backward(gpu, next_stream(), r, gys, p->n, p->e, p->k, d, dtype, out));
    check_bytes("dx", out, want, small);
    CHECK_OK(lf_fill(gpu, out, 0xa5, large, NULL));
    CHECK_OK(lf_loom_combine(cpu, NULL, &p->want, ys, p->n, p->e, p->k, d, dtype, want));
    CHECK_OK(lf_loom_combine(gpu, next_stream(), r, gys, p->n, p->e, p->k, d, dtype, out));
    check_bytes("y", out, want, small);
}

/* A dot product is summed in another order than the CPU's: the error of d/32 + 5 additions in f32 against doubles. */
static void check_dweight(const problem *p, const float *dweight, const void *ys, const void *dy, int64_t d, int32_t dtype)
{
    for (int64_t s = 0; s < p->n * p->k; s++) {
        double dot = 0, size = 0;
        const int64_t row = p->want.slot[s], t = s / p->k;
        const bool live = row < p->want.offset[p->e];
        for (int64_t j = 0; live && j < d; j++) {
            const double term = (double)get(ys, row * d + j, dtype) * (double)get(dy, t * d + j, dtype);
            dot += term;
            size += fabs(term);
        }
        CHECK_NEAR(dweight[s], dot, size * 6e-8 * (double)(d / 32 + 6));
        if (!live) CHECK(dweight[s] == 0);
    }
}

static void check_combine_backward(const problem *p, const lf_routing *r, int64_t d, int32_t dtype)
{
    const int64_t rows = p->n * p->k;
    const size_t w = width(dtype), small = (size_t)(p->n * d) * w, large = (size_t)(rows * d) * w;
    const void *dy = random_rows(p->n, p->n, d, dtype), *ys = random_rows(rows, p->want.offset[p->e], d, dtype);
    void *want = host(large), *want_dweight = host((size_t)rows * 4);
    const void *gdy = up(dy, small), *gys = up(ys, large);
    char *dys = device(large, 0xa5), *again = device(large, 0x5a);
    float *dweight = device((size_t)rows * 4, 0xff), *dweight_again = device((size_t)rows * 4, 0x11);
    CHECK_OK(lf_loom_combine_backward(cpu, NULL, &p->want, ys, dy, p->n, p->e, p->k, d, dtype, want, want_dweight));
    CHECK_OK(lf_loom_combine_backward(gpu, next_stream(), r, gys, gdy, p->n, p->e, p->k, d, dtype, dys, dweight));
    check_bytes("dys", dys, want, large);
    const float *got = down(dweight, (size_t)rows * 4);
    check_dweight(p, got, ys, dy, d, dtype);
    CHECK_OK(lf_loom_combine_backward(gpu, stream, r, gys, gdy, p->n, p->e, p->k, d, dtype, again, dweight_again));
    check_bytes("dys again", again, want, large);
    check_bytes("dweight again", dweight_again, got, (size_t)rows * 4);
}

TEST(cuda_rows_match_cpu)
{
    set_up();
    static const int64_t widths[] = {0, 1, 3, 8, 13, 64, 100, 1000, 1024};
    for (size_t i = 0; i < LF_COUNT(shapes); i++)
        for (size_t j = 0; j < LF_COUNT(widths); j++) {
            if (shapes[i].n * shapes[i].k * widths[j] > 1 << 21) continue;
            problem p;
            make_problem(&p, &shapes[i]);
            lf_routing r = upload_routing(&p);
            const int32_t dtype = (i + j) % 2 ? LF_DTYPE_F32 : LF_DTYPE_BF16;
            check_moves(&p, &r, widths[j], dtype, 0);
            check_combine_backward(&p, &r, widths[j], dtype);
            release();
        }
}

/* Rows of full packs that do not start on 16 bytes, and both dtypes at the shape that matters. */
TEST(cuda_rows_of_any_alignment)
{
    set_up();
    for (int32_t shift = 0; shift < 4; shift++)
        for (int32_t dtype = LF_DTYPE_F32; dtype <= LF_DTYPE_BF16; dtype++) {
            problem p;
            make_problem(&p, &(struct shape){300, 16, 2 + shift % 2, 0});
            lf_routing r = upload_routing(&p);
            check_moves(&p, &r, 1024, dtype, shift);
            release();
        }
}

LF_TEST_MAIN
