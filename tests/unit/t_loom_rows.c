/* SPDX-License-Identifier: Apache-2.0 */
/* Row movement and the router's products against float64, over odd shapes; poisoned outputs; any number of threads; streams. */
#include "loom_fixture.h"

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
    void *with = poisoned(bytes, 0xa5), *dlogits = random_rows(p->n, p->e, LF_DTYPE_F32);
    void *weight = random_rows(p->e, p->d, LF_DTYPE_F32);
    spoil_unrouted(p, rows);
    CHECK_OK(lf_loom_permute_backward(cpu, stream, &p->r, rows, p->n, p->e, p->k, p->d, p->dtype, NULL, NULL, dx));
    CHECK_OK(lf_loom_permute_backward(cpu, stream, &p->r, rows, p->n, p->e, p->k, p->d, p->dtype, dlogits, weight, with));
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
            for (int32_t j = 0; j < p->e; j++)
                sum += get(dlogits, t * p->e + j, LF_DTYPE_F32) * get(weight, j * p->d + i, LF_DTYPE_F32);
            CHECK_NEAR(get(with, t * p->d + i, p->dtype), sum, near_to(sum, p->dtype) + 1e-6 * p->e);
        }
    lf__free(rows), lf__free(dx), lf__free(y), lf__free(with), lf__free(dlogits), lf__free(weight);
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
    for (size_t i = 0; i < N_SMALL_SHAPES; i++) {
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
        const size_t rows = (size_t)(p.n * p.k * p.d) * lf_dtype_bytes(dtype), x = rows / (size_t)p.k;
        const size_t bytes[] = {rows, x, x, x, (size_t)(p.n * p.k) * 4};
        void *ys = random_rows(p.n * p.k, p.d, dtype), *dy = random_rows(p.n, p.d, dtype), *out[4][5];
        void *dlogits = random_rows(p.n, p.e, LF_DTYPE_F32), *weight = random_rows(p.e, p.d, LF_DTYPE_F32);
        for (int32_t threads = 0; threads < 4; threads++) {
            void **o = out[threads];
            CHECK_OK(lf_loom_set_threads(threads));
            for (int32_t i = 0; i < 5; i++) o[i] = poisoned(bytes[i], 0x11 * threads);
            CHECK_OK(lf_loom_combine_backward(cpu, NULL, &p.r, ys, dy, p.n, p.e, p.k, p.d, dtype, o[0], o[4]));
            CHECK_OK(lf_loom_combine(cpu, NULL, &p.r, ys, p.n, p.e, p.k, p.d, dtype, o[1]));
            CHECK_OK(lf_loom_permute_backward(cpu, NULL, &p.r, ys, p.n, p.e, p.k, p.d, dtype, NULL, NULL, o[2]));
            CHECK_OK(lf_loom_permute_backward(cpu, NULL, &p.r, ys, p.n, p.e, p.k, p.d, dtype, dlogits, weight, o[3]));
            for (int32_t i = 0; i < 5; i++) CHECK(memcmp(out[0][i], o[i], bytes[i]) == 0);
        }
        for (int32_t threads = 0; threads < 4; threads++)
            for (int32_t i = 0; i < 5; i++) lf__free(out[threads][i]);
        lf__free(ys), lf__free(dy), lf__free(dlogits), lf__free(weight);
        free_problem(&p);
    }
}

/* ---- router ---------------------------------------------------------------------------------------------------------- */

typedef struct product {
    int64_t n, d;
    int32_t e, dtype;
    void *x;
    float *weight, *dlogits, *dweight; /* (e, d), (n, e), (e, d): what is there before */
} product;

static const struct {
    int64_t n, d;
    int32_t e;
} products[] = {{0, 8, 4},   {1, 1, 1},       {1, 1024, 16},  {5, 3, 256},     {127, 100, 7},
                {129, 8, 1}, {300, 2500, 16}, {40, 1025, 33}, {4100, 130, 16}, {9, 0, 5}};

static product make_product(size_t i, int32_t dtype)
{
    product p = {.n = products[i].n, .d = products[i].d, .e = products[i].e, .dtype = dtype};
    p.x = random_rows(p.n, p.d, dtype);
    p.weight = random_rows(p.e, p.d, LF_DTYPE_F32);
    p.dlogits = random_rows(p.n, p.e, LF_DTYPE_F32);
    p.dweight = random_rows(p.e, p.d, LF_DTYPE_F32);
    return p;
}

static void free_product(product *p) { lf__free(p->x), lf__free(p->weight), lf__free(p->dlogits), lf__free(p->dweight); }

/* A sum in f32 of terms whose sizes add up to `size`. */
static void check_sum(float got, double want, double size) { CHECK_NEAR(got, want, 1e-6 * size); }

static void check_router(const product *p, lf_stream *stream)
{
    float *logits = poisoned((size_t)(p->n * p->e) * 4, 0xa5);
    CHECK_OK(lf_loom_router(cpu, stream, p->x, p->weight, p->n, p->e, p->d, p->dtype, logits));
    CHECK_OK(lf_stream_sync(stream));
    for (int64_t i = 0; i < p->n * p->e; i++) {
        double want = 0, size = 0;
        for (int64_t f = 0; f < p->d; f++) {
            const double term = get(p->x, i / p->e * p->d + f, p->dtype) * (double)p->weight[i % p->e * p->d + f];
            want += term, size += fabs(term);
        }
        check_sum(logits[i], want, size);
    }
    lf__free(logits);
}

static void check_router_backward(const product *p, lf_stream *stream)
{
    const int64_t room = lf_loom_router_workspace(p->n, p->e, p->d), size = p->e * p->d;
    CHECK(room >= 0 && (room > 0 || p->n * p->d == 0));
    char *workspace = poisoned((size_t)room + 64, 0xa5);
    float *dweight = poisoned((size_t)size * 4, 0xa5), *sum = poisoned((size_t)size * 4, 0);
    memcpy(sum, p->dweight, (size_t)size * 4);
    CHECK_OK(lf_loom_router_backward(cpu, stream, p->dlogits, p->x, p->n, p->e, p->d, p->dtype, dweight, 0, workspace));
    CHECK_OK(lf_loom_router_backward(cpu, stream, p->dlogits, p->x, p->n, p->e, p->d, p->dtype, sum, 1, workspace));
    CHECK_OK(lf_stream_sync(stream));
    for (int64_t i = 0; i < size; i++) {
        double want = 0, sizes = 0;
        for (int64_t t = 0; t < p->n; t++) {
            const double term = (double)p->dlogits[t * p->e + i / p->d] * get(p->x, t * p->d + i % p->d, p->dtype);
            want += term, sizes += fabs(term);
        }
        check_sum(dweight[i], want, sizes);
        CHECK(sum[i] == p->dweight[i] + dweight[i]);
    }
    for (int32_t i = 0; i < 64; i++) CHECK_EQ((uint8_t)workspace[room + i], 0xa5);
    lf__free(workspace), lf__free(dweight), lf__free(sum);
}

TEST(loom_router_matches_float64)
{
    set_up();
    for (size_t i = 0; i < LF_COUNT(products); i++)
        for (int32_t dtype = LF_DTYPE_F32; dtype <= LF_DTYPE_BF16; dtype++) {
            product p = make_product(i, dtype);
            check_router(&p, i % 2 ? worker : NULL);
            check_router_backward(&p, i % 2 ? NULL : worker);
            free_product(&p);
        }
}

TEST(loom_router_same_bits_for_any_threads)
{
    set_up();
    for (size_t i = 0; i < LF_COUNT(products); i++) {
        product p = make_product(i, i % 2 ? LF_DTYPE_F32 : LF_DTYPE_BF16);
        const size_t logits_bytes = (size_t)(p.n * p.e) * 4, dweight_bytes = (size_t)(p.e * p.d) * 4;
        void *workspace = poisoned((size_t)lf_loom_router_workspace(p.n, p.e, p.d), 0xa5), *logits[4], *dweight[4];
        for (int32_t threads = 0; threads < 4; threads++) {
            CHECK_OK(lf_loom_set_threads(threads));
            logits[threads] = poisoned(logits_bytes, 0x11 * threads);
            dweight[threads] = poisoned(dweight_bytes, 0x11 * threads);
            CHECK_OK(lf_loom_router(cpu, NULL, p.x, p.weight, p.n, p.e, p.d, p.dtype, logits[threads]));
            CHECK_OK(lf_loom_router_backward(cpu, NULL, p.dlogits, p.x, p.n, p.e, p.d, p.dtype, dweight[threads], 0, workspace));
            CHECK(memcmp(logits[0], logits[threads], logits_bytes) == 0);
            CHECK(memcmp(dweight[0], dweight[threads], dweight_bytes) == 0);
        }
        for (int32_t threads = 0; threads < 4; threads++) lf__free(logits[threads]), lf__free(dweight[threads]);
        lf__free(workspace);
        free_product(&p);
    }
}

TEST(loom_router_refuses_what_it_cannot_do)
{
    set_up();
    float a[64] = {0}, b[64], c[64];
    CHECK_STATUS(lf_loom_router(cpu, NULL, a, b, 2, 0, 4, LF_DTYPE_F32, c), LF_ERR_INVALID);
    CHECK_STATUS(lf_loom_router(cpu, NULL, a, b, 2, 257, 4, LF_DTYPE_F32, c), LF_ERR_INVALID);
    CHECK_STATUS(lf_loom_router(cpu, NULL, a, b, -2, 4, 4, LF_DTYPE_F32, c), LF_ERR_INVALID);
    CHECK_STATUS(lf_loom_router(cpu, NULL, a, b, 2, 4, -4, LF_DTYPE_F32, c), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "d is -4");
    CHECK_STATUS(lf_loom_router(cpu, NULL, a, b, 2, 4, 4, LF_DTYPE_F16, c), LF_ERR_INVALID);
    CHECK_STATUS(lf_loom_router(cpu, NULL, a, NULL, 2, 4, 4, LF_DTYPE_F32, c), LF_ERR_INVALID);
    CHECK_STATUS(lf_loom_router(NULL, NULL, a, b, 2, 4, 4, LF_DTYPE_F32, c), LF_ERR_INVALID);
    CHECK_STATUS(lf_loom_router_backward(cpu, NULL, a, b, 2, 4, 4, LF_DTYPE_F32, c, 0, NULL), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "workspace");
    CHECK_STATUS(lf_loom_router_backward(cpu, NULL, a, b, 2, 4, 4, LF_DTYPE_F32, c, 0, (char *)a + 4), LF_ERR_INVALID);
    CHECK_STATUS(lf_loom_router_backward(cpu, NULL, a, b, 2, 4, 4, LF_DTYPE_I32, c, 0, a), LF_ERR_INVALID);
    CHECK(lf_loom_router_workspace(2, 0, 4) == LF_ERR_INVALID && lf_loom_router_workspace(2, 4, INT64_MAX) == LF_ERR_INVALID);
    CHECK(lf_loom_router_workspace(0, 4, 4) == 0 && lf_loom_router_workspace(2, 4, 0) == 0);
}

TEST(loom_rows_close)
{
    lf_stream_close(worker);
    lf_device_close(cpu);
}

LF_TEST_MAIN
