/* SPDX-License-Identifier: Apache-2.0 */
/* Norms and the loss on CUDA against the CPU's table: sums bit for bit, what has been added up in another order to a stated
 * tolerance; every width of kernel, odd shapes and alignments, poisoned outputs, reruns. */
#include "loom_cuda_fixture.h"

/* An array on the device that starts `shift` elements behind 16 bytes. */
typedef struct place {
    int64_t shift;
    int32_t dtype;
} place;

static void *up_at(place p, const void *from, int64_t count)
{
    if (!from) return NULL;
    const size_t skip = (size_t)p.shift * width(p.dtype), bytes = (size_t)count * width(p.dtype);
    char *at = device(bytes + skip, 0);
    CHECK_OK(lf_copy(gpu, at + skip, from, bytes, NULL));
    return at + skip;
}

static void *out_at(place p, int64_t count, int32_t poison)
{
    const size_t skip = (size_t)p.shift * width(p.dtype);
    return (char *)device((size_t)count * width(p.dtype) + skip, poison) + skip;
}

static void *random_host(int64_t count, int32_t dtype, float low, float high)
{
    void *p = host((size_t)count * width(dtype));
    for (int64_t i = 0; i < count; i++) put(p, i, dtype, uniform(low, high));
    return p;
}

/* Within `relative` of the value and of `size`; bf16 may also round the other way. */
static void check_close(const char *what, const void *from_device, const void *want, int64_t count, int32_t dtype,
                        double relative, double size)
{
    CHECK_OK(lf_stream_sync(stream));
    const void *got = down(from_device, (size_t)count * width(dtype));
    for (int64_t i = 0; i < count; i++) {
        const double g = (double)get(got, i, dtype), w = (double)get(want, i, dtype);
        const double off = relative * (fabs(w) + size) + (dtype == LF_DTYPE_BF16 ? fabs(w) * 0x1p-7 : 0);
        if (isnan(w) ? !isnan(g) : isinf(w) ? g != w : !(fabs(g - w) <= off))
            FAIL_("%s: element %lld is %.9g, expected %.9g within %g", what, (long long)i, g, w, off);
    }
}

/* ---- norms ----------------------------------------------------------------------------------------------------------- */

static const struct {
    int64_t n, d;
} shapes[] = {{0, 8},      {1, 1},       {3, 0},     {5, 3},     {70, 64},   {33, 100},  {9, 1000},
              {300, 1024}, {2100, 1024}, {130, 512}, {17, 1032}, {12, 2048}, {40, 4096}, {3, 4104},
              {21, 8192},  {3, 16384},   {2, 16392}, {2, 20001}, {600, 24},  {700, 33}};

typedef struct norm {
    int64_t n, d;
    place at;
    const void *x, *y;
    float *weight, *rstd;
    void *sum, *normed;
} norm;

static const float eps = 1e-5f;

static norm make_norm(int64_t n, int64_t d, place at, bool with_y)
{
    norm c = {.n = n, .d = d, .at = at, .x = random_host(n * d, at.dtype, -2, 3)};
    if (with_y) c.y = random_host(n * d, at.dtype, -1, 1);
    c.weight = random_host(d, LF_DTYPE_F32, 0.5f, 2);
    c.sum = random_host(n * d, at.dtype, 0, 0), c.normed = random_host(n * d, at.dtype, 0, 0);
    c.rstd = random_host(n, LF_DTYPE_F32, 0, 0);
    return c;
}

/* A sum of d squares in another order. */
static double tolerance(int64_t d) { return 1e-6 + 3e-9 * (double)d; }

static void check_norm(const norm *c, const void *sum, const void *normed, const float *rstd)
{
    if (c->y) check_bytes("sum", sum, c->sum, (size_t)(c->n * c->d) * width(c->at.dtype));
    check_close("rstd", rstd, c->rstd, c->n, LF_DTYPE_F32, tolerance(c->d), 0);
    check_close("normed", normed, c->normed, c->n * c->d, c->at.dtype, tolerance(c->d), 0);
}

static void check_add_norm(const norm *c)
{
    const int64_t nd = c->n * c->d;
    const place f32 = {c->at.shift, LF_DTYPE_F32};
    const void *x = up_at(c->at, c->x, nd), *y = up_at(c->at, c->y, nd);
    const float *weight = up_at(f32, c->weight, c->d);
    void *sum = out_at(c->at, nd, 0xff), *normed = out_at(c->at, nd, 0xff), *again = out_at(c->at, nd, 0x11);
    float *rstd = out_at(f32, c->n, 0xff);
    CHECK_OK(lf_loom_add_norm(cpu, NULL, c->x, c->y, c->weight, eps, c->n, c->d, c->at.dtype, c->sum, c->normed, c->rstd));
    CHECK_OK(lf_loom_add_norm(gpu, next_stream(), x, y, weight, eps, c->n, c->d, c->at.dtype, y ? sum : NULL, normed, rstd));
    check_norm(c, sum, normed, rstd);
    CHECK_OK(lf_loom_add_norm(gpu, next_stream(), x, y, weight, eps, c->n, c->d, c->at.dtype, y ? sum : NULL, again, rstd));
    CHECK_OK(lf_stream_sync(stream));
    check_bytes("normed again", again, down(normed, (size_t)nd * width(c->at.dtype)), (size_t)nd * width(c->at.dtype));
}

/* dx over dnormed or over dsum gives the bits that it gives elsewhere. */
static void check_backward(const norm *c, bool with_dsum, int32_t accumulate)
{
    const int64_t nd = c->n * c->d;
    const int32_t dtype = c->at.dtype;
    const size_t bytes = (size_t)nd * width(dtype);
    const place f32 = {0, LF_DTYPE_F32};
    const void *s = c->y ? c->sum : c->x, *dn = random_host(nd, dtype, -1, 1);
    const void *ds = with_dsum ? random_host(nd, dtype, -1, 1) : NULL;
    float *dweight = random_host(c->d, LF_DTYPE_F32, -1, 1), *old = up_at(f32, dweight, c->d);
    void *dx = random_host(nd, dtype, 0, 0), *workspace = host((size_t)lf_loom_add_norm_workspace(c->n, c->d) + 16);
    workspace = (void *)(((uintptr_t)workspace + 15) / 16 * 16);
    CHECK_OK(lf_loom_add_norm_backward(cpu, NULL, s, c->weight, c->rstd, ds, dn, c->n, c->d, dtype, dx, dweight, accumulate,
                                       workspace));
    const void *g_s = up_at(c->at, s, nd), *g_dn = up_at(c->at, dn, nd), *g_ds = up_at(c->at, ds, nd);
    const float *weight = up_at(f32, c->weight, c->d), *rstd = up_at(f32, c->rstd, c->n);
    void *first = NULL, *first_dweight = NULL;
    for (int32_t how = 0; how < 3; how++) {
        void *on_dn = up_at(c->at, dn, nd), *on_ds = up_at(c->at, ds, nd), *out = out_at(c->at, nd, 0xff);
        float *g_dweight = out_at(f32, c->d, 0xff);
        void *g_workspace = device((size_t)lf_loom_add_norm_workspace(c->n, c->d), 0xff);
        if (how == 1) out = on_dn;
        if (how == 2 && ds) out = on_ds;
        if (accumulate) CHECK_OK(lf_copy(gpu, g_dweight, old, (size_t)c->d * 4, NULL));
        CHECK_OK(lf_loom_add_norm_backward(gpu, next_stream(), g_s, weight, rstd, how == 2 ? on_ds : g_ds,
                                           how == 1 ? on_dn : g_dn, c->n, c->d, dtype, out, g_dweight, accumulate, g_workspace));
        CHECK_OK(lf_stream_sync(stream));
        if (!first) {
            first = down(out, bytes), first_dweight = down(g_dweight, (size_t)c->d * 4);
            check_close("dx", out, dx, nd, dtype, 4 * tolerance(c->d), 2);
            check_close("dweight", g_dweight, dweight, c->d, LF_DTYPE_F32, 1e-6, (double)c->n);
        }
        check_bytes("dx again", out, first, bytes);
        check_bytes("dweight again", g_dweight, first_dweight, (size_t)c->d * 4);
    }
}

TEST(cuda_norms_match_cpu)
{
    set_up();
    for (size_t i = 0; i < LF_COUNT(shapes) * 4; i++) {
        norm c = make_norm(shapes[i / 4].n, shapes[i / 4].d, (place){0, i & 1 ? LF_DTYPE_F32 : LF_DTYPE_BF16}, i & 2);
        check_add_norm(&c);
        check_backward(&c, i & 2, (int32_t)(i & 1));
        release();
    }
}

TEST(cuda_norms_take_any_alignment)
{
    set_up();
    for (int32_t i = 0; i < 8; i++) {
        norm c = make_norm(40, 1024, (place){i / 2, i % 2 ? LF_DTYPE_F32 : LF_DTYPE_BF16}, i % 4 < 2);
        check_add_norm(&c);
        check_backward(&c, i % 4 > 0, i % 2);
        release();
    }
}

static lf_routing up_routing(const lf_routing *r, int64_t slots, int32_t e)
{
    return (lf_routing){.size = sizeof *r,
                        .weight = up(r->weight, (size_t)slots * 4),
                        .offset = up(r->offset, (size_t)e * 4 + 4),
                        .slot = up(r->slot, (size_t)slots * 4)};
}

TEST(cuda_combine_add_norm_matches_cpu)
{
    set_up();
    for (size_t i = 0; i < LF_COUNT(shapes) * 4; i++) {
        const int32_t e = 9, k = (const int32_t[]){2, 1, 3, 8}[(i + i / 4) % 4], dtype = i & 1 ? LF_DTYPE_F32 : LF_DTYPE_BF16;
        norm c = make_norm(shapes[i / 4].n, shapes[i / 4].d, (place){i % 4 == 3, dtype}, 0);
        const int64_t slots = c.n * k, nd = c.n * c.d;
        float *logits = random_host(c.n * e, LF_DTYPE_F32, -1, 1);
        uint8_t *valid = host((size_t)c.n);
        for (int64_t t = 0; t < c.n; t++) valid[t] = lf__rng_below(&rng, 6) > 0;
        lf_routing r = {.size = sizeof r, .expert = host((size_t)slots * 4), .weight = host((size_t)slots * 4)};
        r.prob = host((size_t)(c.n * e) * 4), r.count = host((size_t)e * 4), r.offset = host((size_t)e * 4 + 4);
        r.row = host((size_t)slots * 4), r.slot = host((size_t)slots * 4);
        const lf_route_args args = {.size = sizeof args, .logits = logits, .valid = valid, .n = c.n, .e = e, .k = k};
        CHECK_OK(lf_loom_route(cpu, NULL, &args, &r, NULL));
        void *ys = random_host(slots * c.d, dtype, -1, 1); /* rows of no expert are NaN, and must not be read */
        for (int64_t j = r.offset[e] * c.d; j < slots * c.d; j++) put(ys, j, dtype, (float)NAN);
        const lf_routing on_gpu = up_routing(&r, slots, e);
        void *sum = out_at(c.at, nd, 0xff), *normed = out_at(c.at, nd, 0xff);
        float *rstd = out_at((place){0, LF_DTYPE_F32}, c.n, 0xff), *weight = up(c.weight, (size_t)c.d * 4);
        CHECK_OK(lf_loom_combine_add_norm(cpu, NULL, &r, ys, c.n, e, k, c.d, dtype, c.x, c.weight, eps, c.sum, c.normed, c.rstd));
        CHECK_OK(lf_loom_combine_add_norm(gpu, next_stream(), &on_gpu, up_at(c.at, ys, slots * c.d), c.n, e, k, c.d, dtype,
                                          up_at(c.at, c.x, nd), weight, eps, sum, normed, rstd));
        c.y = ys; /* there is a sum */
        check_norm(&c, sum, normed, rstd);
        release();
    }
}

/* ---- loss ------------------------------------------------------------------------------------------------------------ */

typedef struct loss {
    int64_t n, v, ld;
    place at;
    void *logits;
    int64_t *target;
} loss;

static loss make_loss(int64_t n, int64_t v, int64_t ld, place at)
{
    loss c = {n, v, ld, at, random_host(n * ld, at.dtype, -6, 6), host((size_t)n * 8)};
    for (int64_t t = 0; t < n; t++) {
        const int64_t j = lf__rng_below(&rng, (uint32_t)v);
        c.target[t] = t % 4 == 3 ? -1 - t : lf__rng_below(&rng, 3) ? (int64_t)lf__rng_below(&rng, (uint32_t)v) : v - 1;
        if (t % 3 == 0) put(c.logits, t * ld + j, at.dtype, t % 2 ? 300 : -3e38f);
        if (t % 5 == 0 && v > 8) put(c.logits, t * ld + j / 2, at.dtype, -INFINITY);
        if (t == 6) c.target[t] = v + (int64_t)lf__rng_below(&rng, 2) * INT32_MAX;
        if (t == 8) put(c.logits, t * ld + j, at.dtype, (float)NAN);
    }
    return c;
}

static void check_loss(const loss *c, int32_t accumulate, int32_t backward)
{
    const int64_t count = c->n * c->ld;
    const size_t bytes = (size_t)count * width(c->at.dtype);
    void *want = host(bytes);
    float *row_loss = host((size_t)c->n * 4);
    double sum = 3, *g_sum = up(&sum, 8);
    if (bytes) memcpy(want, c->logits, bytes);
    CHECK_OK(
        lf_loom_cross_entropy(cpu, NULL, want, c->target, c->n, c->v, c->ld, c->at.dtype, row_loss, &sum, accumulate, backward));
    const int64_t *target = up(c->target, (size_t)c->n * 8);
    void *logits = up_at(c->at, c->logits, count), *again = up_at(c->at, c->logits, count);
    float *g_row_loss = device((size_t)c->n * 4, 0xff);
    CHECK_OK(lf_loom_cross_entropy(gpu, next_stream(), logits, target, c->n, c->v, c->ld, c->at.dtype, g_row_loss, g_sum,
                                   accumulate, backward));
    check_close("row_loss", g_row_loss, row_loss, c->n, LF_DTYPE_F32, 3e-6, 1);
    const float *got = down(g_row_loss, (size_t)c->n * 4);
    double rows = accumulate ? 3 : 0;
    for (int64_t t = 0; t < c->n; t++) rows += (double)got[t];
    const double got_sum = *(double *)down(g_sum, 8);
    CHECK(isnan(rows) ? isnan(got_sum) : isinf(rows) ? got_sum == rows : fabs(got_sum - rows) <= 1e-12 * fabs(rows));
    if (!backward) check_bytes("logits", logits, c->logits, bytes);
    else check_close("gradient", logits, want, count, c->at.dtype, 2e-5, 1e-30);
    CHECK_OK(lf_loom_cross_entropy(gpu, stream, again, target, c->n, c->v, c->ld, c->at.dtype, g_row_loss, g_sum, 0, backward));
    check_bytes("gradient again", again, down(logits, bytes), bytes);
    check_bytes("row_loss again", g_row_loss, got, (size_t)c->n * 4);
}

/* Rows that fit into shared memory, rows that do not, rows of no whole pack, rows with a tail, rows that start anywhere. */
TEST(cuda_cross_entropy_matches_cpu)
{
    set_up();
    static const struct {
        int64_t n, v, ld, shift;
    } cases[] = {{0, 5, 5, 0},         {1, 1, 1, 0},           {9, 7, 16, 0},        {40, 1000, 1000, 0},
                 {11, 4099, 4104, 0},  {9, 50304, 50304, 0},   {9, 50257, 50304, 0}, {7, 50257, 50257, 0},
                 {7, 50304, 50304, 1}, {7, 130001, 130008, 0}, {900, 513, 520, 0}};
    for (size_t i = 0; i < LF_COUNT(cases) * 4; i++) {
        const place at = {cases[i / 4].shift, i & 1 ? LF_DTYPE_F32 : LF_DTYPE_BF16};
        const loss c = make_loss(cases[i / 4].n, cases[i / 4].v, cases[i / 4].ld, at);
        check_loss(&c, (int32_t)(i / 4 + i) % 2, i & 2 ? 1 : 0);
        release();
    }
}

LF_TEST_MAIN
