/* SPDX-License-Identifier: Apache-2.0 */
/* Rows and the router's products on CUDA against the CPU's table: what is computed in one fixed order bit for bit, the rest to a
 * stated tolerance against doubles; odd shapes, poisoned outputs, reruns. */
#include "loom_cuda_problem.h"

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
    CHECK_OK(lf_loom_permute_backward(cpu, NULL, &p->want, ys, p->n, p->e, p->k, d, dtype, NULL, NULL, want));
    CHECK_OK(lf_loom_permute_backward(gpu, next_stream(), r, gys, p->n, p->e, p->k, d, dtype, NULL, NULL, out));
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
            make_problem(&p, &(shape){300, 16, 2 + shift % 2, 0});
            lf_routing r = upload_routing(&p);
            check_moves(&p, &r, 1024, dtype, shift);
            release();
        }
}

/* ---- router ---------------------------------------------------------------------------------------------------------- */

/* Sums in f32 of products that are exact or nearly so: `size` is the sum of the products' sizes. */
static const double router_error = 1e-6;

static const struct {
    int64_t n, d;
    int32_t e;
} products[] = {{0, 8, 4},      {1, 1, 1},       {1, 1024, 16},   {5, 3, 256},     {127, 100, 7},
                {129, 8, 1},    {300, 2504, 16}, {40, 1025, 33},  {9, 0, 5},       {16, 64, 16},
                {17, 72, 17},   {4100, 136, 16}, {2000, 128, 64}, {300, 200, 100}, {1100, 96, 256},
                {515, 1024, 8}, {4096, 512, 16}, {700, 512, 65},  {33000, 128, 16}};

static float *random_floats(int64_t count) { return random_rows(count, count, 1, LF_DTYPE_F32); }

/* Device memory that holds `from`, `shift` elements behind 16 bytes. */
static void *up_shifted(const void *from, size_t bytes, size_t shift)
{
    char *p = device(bytes + shift, 0x7f);
    CHECK_OK(lf_copy(gpu, p + shift, from, bytes, NULL));
    return p + shift;
}

static void check_router(size_t which, int32_t dtype, size_t shift)
{
    const int64_t n = products[which].n, d = products[which].d, e = products[which].e;
    const size_t w = width(dtype), bytes = (size_t)(n * e) * 4;
    const void *x = random_rows(n, n, d, dtype);
    const float *weight = random_floats(e * d);
    const void *gx = up_shifted(x, (size_t)(n * d) * w, shift * w);
    const float *gweight = up_shifted(weight, (size_t)(e * d) * 4, shift * 4);
    float *logits = device(bytes, 0xff), *again = device(bytes, 0x11);
    CHECK_OK(lf_loom_router(gpu, next_stream(), gx, gweight, n, (int32_t)e, d, dtype, logits));
    CHECK_OK(lf_loom_router(gpu, NULL, gx, gweight, n, (int32_t)e, d, dtype, again));
    CHECK_OK(lf_stream_sync(stream));
    const float *got = down(logits, bytes);
    check_bytes("logits again", again, got, bytes);
    for (int64_t i = 0; i < n * e; i++) {
        double want = 0, size = 0;
        for (int64_t f = 0; f < d; f++) {
            const double term = (double)get(x, i / e * d + f, dtype) * (double)weight[i % e * d + f];
            want += term, size += fabs(term);
        }
        CHECK_NEAR(got[i], want, router_error * size);
    }
}

static void check_router_backward(size_t which, int32_t dtype, size_t shift)
{
    const int64_t n = products[which].n, d = products[which].d, e = products[which].e;
    const size_t w = width(dtype), bytes = (size_t)(e * d) * 4, room = (size_t)lf_loom_router_workspace(n, (int32_t)e, d);
    const void *x = random_rows(n, n, d, dtype);
    const float *dlogits = random_floats(n * e), *before = random_floats(e * d);
    const void *gx = up_shifted(x, (size_t)(n * d) * w, shift * w);
    const float *gdlogits = up_shifted(dlogits, (size_t)(n * e) * 4, shift * 4);
    float *dweight = device(bytes, 0xff), *again = device(bytes, 0x11), *sum = up(before, bytes);
    void *workspace = device(room, 0xff);
    CHECK_OK(lf_loom_router_backward(gpu, NULL, gdlogits, gx, n, (int32_t)e, d, dtype, dweight, 0, workspace));
    CHECK_OK(lf_fill(gpu, workspace, 0x11, room, NULL));
    CHECK_OK(lf_loom_router_backward(gpu, stream, gdlogits, gx, n, (int32_t)e, d, dtype, again, 0, workspace));
    CHECK_OK(lf_loom_router_backward(gpu, stream, gdlogits, gx, n, (int32_t)e, d, dtype, sum, 1, workspace));
    CHECK_OK(lf_stream_sync(stream));
    const float *got = down(dweight, bytes), *added = down(sum, bytes);
    check_bytes("dweight again", again, got, bytes);
    for (int64_t i = 0; i < e * d; i++) {
        double want = 0, size = 0;
        for (int64_t t = 0; t < n; t++) {
            const double term = (double)dlogits[t * e + i / d] * (double)get(x, t * d + i % d, dtype);
            want += term, size += fabs(term);
        }
        CHECK_NEAR(got[i], want, router_error * size);
        CHECK(added[i] == before[i] + got[i]);
    }
}

TEST(cuda_router_matches_float64)
{
    set_up();
    for (size_t i = 0; i < LF_COUNT(products); i++)
        for (int32_t dtype = LF_DTYPE_F32; dtype <= LF_DTYPE_BF16; dtype++) {
            if (i == LF_COUNT(products) - 1 && dtype == LF_DTYPE_F32) continue;
            check_router(i, dtype, i % 3 == 1);
            check_router_backward(i, dtype, i % 3 == 2);
            release();
        }
}

/* dx with the router's part: the sum over choices as the CPU has it, the product to the tolerance, one rounding. */
static void check_dx(const problem *p, const lf_routing *r, int64_t d, int32_t dtype, size_t shift)
{
    const int64_t rows = p->n * p->k, live = p->want.offset[p->e];
    const size_t w = width(dtype), small = (size_t)(p->n * d) * w;
    const void *dxs = random_rows(rows, live, d, dtype);
    const float *dlogits = random_floats(p->n * p->e), *weight = random_floats(p->e * d);
    const void *gdxs = up_shifted(dxs, (size_t)(rows * d) * w, shift * w);
    const float *gdlogits = up(dlogits, (size_t)(p->n * p->e) * 4), *gweight = up(weight, (size_t)(p->e * d) * 4);
    void *dx = device(small, 0xff), *again = device(small, 0x11);
    CHECK_OK(lf_loom_permute_backward(gpu, NULL, r, gdxs, p->n, p->e, p->k, d, dtype, gdlogits, gweight, dx));
    CHECK_OK(lf_loom_permute_backward(gpu, stream, r, gdxs, p->n, p->e, p->k, d, dtype, gdlogits, gweight, again));
    CHECK_OK(lf_stream_sync(stream));
    const void *got = down(dx, small);
    check_bytes("dx again", again, got, small);
    for (int64_t i = 0; i < p->n * d; i++) {
        const int64_t t = i / d, f = i % d;
        double want = 0, size = 0;
        for (int32_t c = 0; c < p->k; c++) {
            const int64_t s = p->want.slot[t * p->k + c];
            if (s >= live) continue;
            want += (double)get(dxs, s * d + f, dtype);
            size += fabs((double)get(dxs, s * d + f, dtype));
        }
        for (int32_t j = 0; j < p->e; j++) {
            const double term = (double)dlogits[t * p->e + j] * (double)weight[j * d + f];
            want += term, size += fabs(term);
        }
        CHECK_NEAR(get(got, i, dtype), want, router_error * size + (dtype == LF_DTYPE_F32 ? 0 : fabs(want) * 0x1p-8));
    }
}

TEST(cuda_permute_backward_with_router)
{
    set_up();
    static const int64_t widths[] = {1, 8, 13, 64, 100, 264, 1024};
    for (size_t i = 0; i < LF_COUNT(shapes); i++)
        for (size_t j = 0; j < LF_COUNT(widths); j++) {
            if (shapes[i].n * shapes[i].k * widths[j] > 1 << 20 || shapes[i].n * shapes[i].e * widths[j] > 1 << 23) continue;
            problem p;
            make_problem(&p, &shapes[i]);
            lf_routing r = upload_routing(&p);
            check_dx(&p, &r, widths[j], (i + j) % 2 ? LF_DTYPE_F32 : LF_DTYPE_BF16, 0);
            if (j == 3) check_dx(&p, &r, widths[j], (i + j) % 2 ? LF_DTYPE_BF16 : LF_DTYPE_F32, 1);
            release();
        }
}

LF_TEST_MAIN
