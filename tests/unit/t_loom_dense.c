/* SPDX-License-Identifier: Apache-2.0 */
/* Norms and the loss against float64. Outputs are poisoned with NaN and guarded behind their end; every case runs with several
 * numbers of threads, on the calling thread or a stream, and gives the same bits. */
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
    lf__rng_init(&rng, 21, 1, 2, 3);
    CHECK_OK(lf_loom_set_threads(0));
}

static float uniform(float low, float high) { return low + (high - low) * (float)lf__rng_unit(&rng); }

static double get(const void *base, int64_t i, int32_t dtype)
{
    return dtype == LF_DTYPE_F32 ? (double)((const float *)base)[i] : (double)lf__f32_from_bf16(((const uint16_t *)base)[i]);
}

static void put(void *base, int64_t i, int32_t dtype, float v)
{
    if (dtype == LF_DTYPE_F32) ((float *)base)[i] = v;
    else ((uint16_t *)base)[i] = lf__bf16_from_f32(v);
}

/* ---- memory of a case ------------------------------------------------------------------------------------------------ */

enum { GUARD = 64, POISON = 0xff }; /* all ones: a NaN of either dtype */
static struct {
    uint8_t *at;
    size_t bytes;
} held[64];
static int32_t n_held;

static void *array(int64_t count, int32_t dtype)
{
    const size_t bytes = (size_t)count * lf_dtype_bytes(dtype);
    uint8_t *p = lf__alloc_aligned(bytes + GUARD, 64);
    CHECK(p && n_held < (int32_t)LF_COUNT(held));
    memset(p, POISON, bytes);
    memset(p + bytes, 0x5c, GUARD);
    held[n_held].at = p;
    held[n_held++].bytes = bytes;
    return p;
}

static void *random_array(int64_t count, int32_t dtype, float low, float high)
{
    void *p = array(count, dtype);
    for (int64_t i = 0; i < count; i++) put(p, i, dtype, uniform(low, high));
    return p;
}

static void *copy_of(const void *from, int64_t count, int32_t dtype)
{
    void *p = array(count, dtype);
    if (count) memcpy(p, from, (size_t)count * lf_dtype_bytes(dtype));
    return p;
}

static void release(void)
{
    while (n_held > 0) {
        n_held--;
        for (int32_t j = 0; j < GUARD; j++) CHECK_EQ(held[n_held].at[held[n_held].bytes + j], 0x5c);
        lf__free(held[n_held].at);
    }
}

static void check_same(const void *a, const void *b, int64_t count, int32_t dtype)
{
    if (count) CHECK(memcmp(a, b, (size_t)count * lf_dtype_bytes(dtype)) == 0);
}

/* A result that was rounded to dtype, and an f32 error of the arithmetic before it. */
static void check_value(double got, double want, double scale, int32_t dtype)
{
    CHECK_NEAR(got, want, fabs(want) * (dtype == LF_DTYPE_F32 ? 0 : 0x1.01p-8) + scale * 2e-6 + 1e-37);
}

/* ---- norms ----------------------------------------------------------------------------------------------------------- */

typedef struct norm {
    int64_t n, d;
    int32_t dtype;
    void *x, *y, *sum, *normed;
    float *weight, *rstd;
} norm;

static const float eps = 1e-3f;

static norm make_norm(int64_t n, int64_t d, int32_t dtype, bool with_y)
{
    norm c = {.n = n, .d = d, .dtype = dtype};
    c.x = random_array(n * d, dtype, -2, 3);
    if (with_y) c.y = random_array(n * d, dtype, -1, 1);
    c.weight = random_array(d, LF_DTYPE_F32, 0.5f, 2);
    c.sum = array(n * d, dtype), c.normed = array(n * d, dtype), c.rstd = array(n, LF_DTYPE_F32);
    return c;
}

/* What the norm is taken of: the rounded sum, or x. */
static const void *normed_of(const norm *c) { return c->y ? c->sum : c->x; }

static void check_norm(const norm *c)
{
    for (int64_t t = 0; t < c->n; t++) {
        double squares = 0;
        for (int64_t i = t * c->d; i < (t + 1) * c->d; i++) squares += pow(get(normed_of(c), i, c->dtype), 2);
        const double rstd = 1 / sqrt((c->d ? squares / (double)c->d : 0) + (double)eps);
        CHECK_NEAR(c->rstd[t], rstd, 2e-6 * rstd);
        for (int64_t i = 0; i < c->d; i++) {
            const double want = get(normed_of(c), t * c->d + i, c->dtype) * rstd * (double)c->weight[i];
            check_value(get(c->normed, t * c->d + i, c->dtype), want, fabs(want), c->dtype);
        }
    }
}

static const int64_t sizes[][2] = {{0, 5}, {1, 1}, {3, 0}, {2, 7}, {130, 64}, {65, 1024}, {5, 2500}, {700, 33}};

TEST(loom_add_norm_matches_float64)
{
    set_up();
    for (size_t s = 0; s < LF_COUNT(sizes) * 4; s++) {
        norm c = make_norm(sizes[s / 4][0], sizes[s / 4][1], s & 1 ? LF_DTYPE_BF16 : LF_DTYPE_F32, s & 2), first = c;
        for (int32_t threads = 0; threads < 4; threads++) {
            lf_stream *stream = threads % 2 ? worker : NULL;
            CHECK_OK(lf_loom_set_threads(threads));
            c.sum = array(c.n * c.d, c.dtype), c.normed = array(c.n * c.d, c.dtype), c.rstd = array(c.n, LF_DTYPE_F32);
            CHECK_OK(
                lf_loom_add_norm(cpu, stream, c.x, c.y, c.weight, eps, c.n, c.d, c.dtype, c.y ? c.sum : NULL, c.normed, c.rstd));
            CHECK_OK(lf_stream_sync(stream));
            for (int64_t i = 0; c.y && i < c.n * c.d; i++) {
                const double want = get(c.x, i, c.dtype) + get(c.y, i, c.dtype);
                check_value(get(c.sum, i, c.dtype), want, fabs(want), c.dtype);
            }
            check_norm(&c);
            if (threads == 0) first = c;
            check_same(c.normed, first.normed, c.n * c.d, c.dtype);
            check_same(c.rstd, first.rstd, c.n, LF_DTYPE_F32);
        }
        release();
    }
}

/* Routing of n tokens to k of e experts without the softmax: any slots, some tokens routed nowhere. */
static lf_routing make_routing(int64_t n, int32_t e, int32_t k)
{
    lf_routing r = {.size = sizeof r};
    float *logits = random_array(n * e, LF_DTYPE_F32, -1, 1);
    uint8_t *valid = array(n, LF_DTYPE_U8);
    for (int64_t t = 0; t < n; t++) valid[t] = lf__rng_below(&rng, 5) > 0;
    r.expert = array(n * k, LF_DTYPE_I32), r.weight = array(n * k, LF_DTYPE_F32), r.prob = array(n * e, LF_DTYPE_F32);
    r.count = array(e, LF_DTYPE_I32), r.offset = array(e + 1, LF_DTYPE_I32);
    r.row = array(n * k, LF_DTYPE_I32), r.slot = array(n * k, LF_DTYPE_I32);
    const lf_route_args args = {.size = sizeof args, .logits = logits, .valid = valid, .n = n, .e = e, .k = k};
    CHECK_OK(lf_loom_route(cpu, NULL, &args, &r, NULL));
    return r;
}

/* The sum is rounded once, so it is not that of lf_loom_combine's rounded rows. Rows behind offset[e] stay NaN. */
TEST(loom_combine_add_norm_matches_float64)
{
    set_up();
    for (size_t s = 0; s < LF_COUNT(sizes) * 4; s++) {
        const int32_t dtype = s & 1 ? LF_DTYPE_BF16 : LF_DTYPE_F32, k = s & 2 ? 2 : 3, e = 5;
        norm c = make_norm(sizes[s / 4][0], sizes[s / 4][1], dtype, 0);
        const lf_routing r = make_routing(c.n, e, k);
        void *ys = array(c.n * k * c.d, dtype);
        for (int64_t i = 0; i < r.offset[e] * c.d; i++) put(ys, i, dtype, uniform(-1, 1));
        lf_stream *stream = s % 3 ? worker : NULL;
        CHECK_OK(lf_loom_set_threads((int32_t)(s % 4)));
        CHECK_OK(
            lf_loom_combine_add_norm(cpu, stream, &r, ys, c.n, e, k, c.d, dtype, c.x, c.weight, eps, c.sum, c.normed, c.rstd));
        CHECK_OK(lf_stream_sync(stream));
        for (int64_t t = 0; t < c.n; t++)
            for (int64_t i = 0; i < c.d; i++) {
                double want = get(c.x, t * c.d + i, dtype);
                for (int32_t j = 0; j < k; j++)
                    if (r.slot[t * k + j] < r.offset[e])
                        want += (double)r.weight[t * k + j] * get(ys, r.slot[t * k + j] * c.d + i, dtype);
                check_value(get(c.sum, t * c.d + i, dtype), want, 1, dtype);
            }
        c.y = ys; /* the norm is of the sum */
        check_norm(&c);
        release();
    }
}

typedef struct gradients {
    norm c;
    void *dsum, *dnormed, *dx;
    float *dweight, *old;
    int32_t accumulate;
} gradients;

static void check_backward(const gradients *b)
{
    const norm *c = &b->c;
    double *dweight = calloc((size_t)c->d + 1, sizeof *dweight);
    CHECK(dweight != NULL);
    for (int64_t t = 0; t < c->n; t++) {
        const double rstd = c->rstd[t];
        double dot = 0;
        for (int64_t i = 0, at = t * c->d; i < c->d; i++, at++) {
            const double xhat = get(normed_of(c), at, c->dtype) * rstd, dn = get(b->dnormed, at, c->dtype);
            dot += dn * (double)c->weight[i] * xhat;
            dweight[i] += dn * xhat;
        }
        for (int64_t i = 0, at = t * c->d; i < c->d; i++, at++) {
            const double xhat = get(normed_of(c), at, c->dtype) * rstd, dn = get(b->dnormed, at, c->dtype);
            double want = rstd * (dn * (double)c->weight[i] - xhat * dot / (double)c->d);
            if (b->dsum) want += get(b->dsum, at, c->dtype);
            check_value(get(b->dx, at, c->dtype), want, 4 * rstd, c->dtype);
        }
    }
    for (int64_t i = 0; i < c->d; i++)
        CHECK_NEAR(b->dweight[i], dweight[i] + (b->accumulate ? (double)b->old[i] : 0), 2e-6 * (double)(c->n + 1));
    free(dweight);
}

TEST(loom_add_norm_backward_matches_float64)
{
    set_up();
    for (size_t s = 0; s < LF_COUNT(sizes) * 8; s++) {
        norm c = make_norm(sizes[s / 8][0], sizes[s / 8][1], s & 1 ? LF_DTYPE_BF16 : LF_DTYPE_F32, s & 2);
        CHECK_OK(lf_loom_add_norm(cpu, NULL, c.x, c.y, c.weight, eps, c.n, c.d, c.dtype, c.sum, c.normed, c.rstd));
        const int64_t nd = c.n * c.d;
        gradients b = {.c = c, .accumulate = s & 4 ? 1 : 0}, first = b;
        b.dnormed = random_array(nd, c.dtype, -1, 1);
        if (s & 4) b.dsum = random_array(nd, c.dtype, -1, 1);
        b.old = random_array(c.d, LF_DTYPE_F32, -1, 1);
        for (int32_t how = 0; how < 4; how++) { /* how 2: dx is dnormed; 3: dx is dsum */
            lf_stream *stream = how % 2 ? worker : NULL;
            const void *dnormed = b.dnormed, *dsum = b.dsum;
            void *workspace = array(lf_loom_add_norm_workspace(c.n, c.d) / 4, LF_DTYPE_F32);
            b.dx = how < 2 ? array(nd, c.dtype) : copy_of(how == 2 ? b.dnormed : b.dsum ? b.dsum : b.dnormed, nd, c.dtype);
            if (how == 2) dnormed = b.dx;
            else if (how == 3 && dsum) dsum = b.dx;
            b.dweight = b.accumulate ? copy_of(b.old, c.d, LF_DTYPE_F32) : array(c.d, LF_DTYPE_F32);
            CHECK_OK(lf_loom_set_threads(how));
            CHECK_OK(lf_loom_add_norm_backward(cpu, stream, normed_of(&c), c.weight, c.rstd, dsum, dnormed, c.n, c.d, c.dtype,
                                               b.dx, b.dweight, b.accumulate, workspace));
            CHECK_OK(lf_stream_sync(stream));
            if (how == 0) check_backward(&b), first = b;
            check_same(b.dx, first.dx, nd, c.dtype);
            check_same(b.dweight, first.dweight, c.d, LF_DTYPE_F32);
        }
        release();
    }
}

TEST(loom_norms_refuse)
{
    set_up();
    float x[8] = {0}, w[8] = {0}, rstd[1];
    lf_routing none = {.size = sizeof none};
    CHECK_STATUS(lf_loom_add_norm(cpu, NULL, x, NULL, w, -1, 1, 8, LF_DTYPE_F32, NULL, x, rstd), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "eps");
    CHECK_STATUS(lf_loom_add_norm(cpu, NULL, x, NULL, w, NAN, 1, 8, LF_DTYPE_F32, NULL, x, rstd), LF_ERR_INVALID);
    CHECK_STATUS(lf_loom_add_norm(cpu, NULL, x, x, w, 0, 1, 8, LF_DTYPE_F32, NULL, x, rstd), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "sum");
    CHECK_STATUS(lf_loom_add_norm(cpu, NULL, x, NULL, w, 0, 1, 8, LF_DTYPE_F16, NULL, x, rstd), LF_ERR_INVALID);
    CHECK_STATUS(lf_loom_add_norm(cpu, NULL, x, NULL, w, 0, -1, 8, LF_DTYPE_F32, NULL, x, rstd), LF_ERR_INVALID);
    CHECK_STATUS(lf_loom_add_norm(cpu, NULL, x, NULL, w, 0, 1LL << 31, 8, LF_DTYPE_F32, NULL, x, rstd), LF_ERR_INVALID);
    CHECK_STATUS(lf_loom_add_norm(cpu, NULL, x, NULL, NULL, 0, 1, 8, LF_DTYPE_F32, NULL, x, rstd), LF_ERR_INVALID);
    CHECK_STATUS(lf_loom_add_norm(NULL, NULL, x, NULL, w, 0, 1, 8, LF_DTYPE_F32, NULL, x, rstd), LF_ERR_INVALID);
    CHECK_STATUS(lf_loom_combine_add_norm(cpu, NULL, &none, x, 1, 2, 2, 4, LF_DTYPE_F32, x, w, 0, x, x, rstd), LF_ERR_INVALID);
    CHECK_STATUS(lf_loom_combine_add_norm(cpu, NULL, NULL, x, 1, 2, 2, 4, LF_DTYPE_F32, x, w, 0, x, x, rstd), LF_ERR_INVALID);
    CHECK_STATUS(lf_loom_add_norm_backward(cpu, NULL, x, w, rstd, NULL, x, 1, 8, LF_DTYPE_F32, x, w, 0, NULL), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "workspace");
    CHECK_STATUS(lf_loom_add_norm_backward(cpu, NULL, x, w, rstd, NULL, x, 1, 8, LF_DTYPE_F32, x, NULL, 0, x), LF_ERR_INVALID);
    CHECK_EQ(lf_loom_add_norm_workspace(-1, 8), 0);
    CHECK_EQ(lf_loom_add_norm_workspace(3, 8), 96);
    CHECK_EQ(lf_loom_add_norm_workspace(1 << 20, 1024), 512 * 1024 * 4);
}

/* ---- loss ------------------------------------------------------------------------------------------------------------ */

typedef struct loss {
    int64_t n, v, ld;
    int32_t dtype;
    void *logits;
    int64_t *target;
} loss;

/* Logits of which some are far below the others, rows with one large value, targets of which some are ignored. */
static loss make_loss(int64_t n, int64_t v, int64_t ld, int32_t dtype)
{
    loss c = {n, v, ld, dtype, random_array(n * ld, dtype, -4, 4), array(n, LF_DTYPE_I64)};
    for (int64_t t = 0; t < n; t++) {
        const int64_t j = lf__rng_below(&rng, (uint32_t)v);
        c.target[t] = lf__rng_below(&rng, 4) ? (int64_t)lf__rng_below(&rng, (uint32_t)v) : -100;
        if (t % 3 == 0) put(c.logits, t * ld + j, dtype, t % 2 ? 300 : -3e38f);
        if (t % 5 == 0 && v > 1) put(c.logits, t * ld + (j + 1) % v, dtype, -INFINITY);
    }
    return c;
}

static void check_row(const loss *c, int64_t t, const void *after, double row_loss, bool backward)
{
    double top = -INFINITY, sum = 0;
    const int64_t target = c->target[t];
    for (int64_t i = t * c->ld; i < t * c->ld + c->v; i++) top = fmax(top, get(c->logits, i, c->dtype));
    for (int64_t i = t * c->ld; i < t * c->ld + c->v; i++) sum += exp(get(c->logits, i, c->dtype) - top);
    const double want = target < 0 ? 0 : log(sum) - (get(c->logits, t * c->ld + target, c->dtype) - top);
    if (isinf(want)) CHECK(isinf(row_loss) && row_loss > 0);
    else CHECK_NEAR(row_loss, want, 2e-6 * (1 + fabs(want)));
    if (!backward) return;
    for (int64_t i = 0; i < c->v; i++) {
        const double p = exp(get(c->logits, t * c->ld + i, c->dtype) - top) / sum;
        const double g = target < 0 ? 0 : p - (i == target);
        check_value(get(after, t * c->ld + i, c->dtype), g, p + (i == target), c->dtype);
    }
}

TEST(loom_cross_entropy_matches_float64)
{
    set_up();
    static const int64_t shapes[][3] = {{0, 3, 3}, {1, 1, 1}, {9, 7, 9}, {70, 1000, 1000}, {13, 1024, 1030}, {6, 5000, 5003}};
    for (size_t s = 0; s < LF_COUNT(shapes) * 4; s++) {
        const int32_t dtype = s & 1 ? LF_DTYPE_BF16 : LF_DTYPE_F32, backward = s & 2 ? 1 : 0;
        const loss c = make_loss(shapes[s / 4][0], shapes[s / 4][1], shapes[s / 4][2], dtype);
        void *first = NULL;
        for (int32_t threads = 0; threads < 4; threads++) {
            lf_stream *stream = threads % 2 ? worker : NULL;
            void *logits = copy_of(c.logits, c.n * c.ld, dtype);
            float *row_loss = array(c.n, LF_DTYPE_F32);
            double *sum = array(1, LF_DTYPE_F64), want = threads == 3 ? 5 : 0;
            if (threads == 3) *sum = 5;
            CHECK_OK(lf_loom_set_threads(threads));
            CHECK_OK(lf_loom_cross_entropy(cpu, stream, logits, c.target, c.n, c.v, c.ld, dtype, row_loss, sum, threads == 3,
                                           backward));
            CHECK_OK(lf_stream_sync(stream));
            for (int64_t t = 0; t < c.n; t++) {
                check_row(&c, t, logits, row_loss[t], backward);
                for (int64_t i = t * c.ld + c.v; i < (t + 1) * c.ld; i++)
                    CHECK(get(logits, i, dtype) == get(c.logits, i, dtype)); /* between the rows */
                want += (double)row_loss[t];
            }
            CHECK(isinf(want) ? isinf(*sum) : fabs(*sum - want) <= 1e-12 * fabs(want));
            if (!backward) check_same(logits, c.logits, c.n * c.ld, dtype);
            if (!first) first = logits;
            check_same(logits, first, c.n * c.ld, dtype);
        }
        release();
    }
}

/* An impossible target spoils its own row and the sum, nothing else; so does a logit that is not a number. */
TEST(loom_cross_entropy_passes_nonsense_on)
{
    set_up();
    enum { N = 4, V = 10 };
    for (int32_t dtype = LF_DTYPE_F32; dtype <= LF_DTYPE_BF16; dtype += LF_DTYPE_BF16 - LF_DTYPE_F32) {
        void *logits = random_array(N * V, dtype, -1, 1);
        int64_t target[N] = {3, V, INT64_MAX, 0};
        float row_loss[N];
        double sum;
        put(logits, 3 * V + 5, dtype, NAN);
        CHECK_OK(lf_loom_cross_entropy(cpu, NULL, logits, target, N, V, V, dtype, row_loss, &sum, 0, 1));
        CHECK(row_loss[0] > 0 && isnan(row_loss[1]) && isnan(row_loss[2]) && isnan(row_loss[3]) && isnan(sum));
        for (int64_t i = 0; i < N * V; i++) CHECK(isnan(get(logits, i, dtype)) == (i >= V));
        release();
    }
    float x[4] = {0}, row_loss[1];
    int64_t target = 0;
    double sum;
    CHECK_STATUS(lf_loom_cross_entropy(cpu, NULL, x, &target, 1, 0, 4, LF_DTYPE_F32, row_loss, &sum, 0, 0), LF_ERR_INVALID);
    CHECK_STATUS(lf_loom_cross_entropy(cpu, NULL, x, &target, 1, 4, 3, LF_DTYPE_F32, row_loss, &sum, 0, 0), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "ld is 3");
    CHECK_STATUS(lf_loom_cross_entropy(cpu, NULL, x, &target, 1, 4, 4, LF_DTYPE_F64, row_loss, &sum, 0, 0), LF_ERR_INVALID);
    CHECK_STATUS(lf_loom_cross_entropy(cpu, NULL, x, NULL, 1, 4, 4, LF_DTYPE_F32, row_loss, &sum, 0, 0), LF_ERR_INVALID);
    CHECK_STATUS(lf_loom_cross_entropy(cpu, NULL, x, &target, 1, 4, 4, LF_DTYPE_F32, row_loss, NULL, 0, 0), LF_ERR_INVALID);
}

TEST(loom_closes)
{
    lf_stream_close(worker);
    lf_device_close(cpu);
}

LF_TEST_MAIN
