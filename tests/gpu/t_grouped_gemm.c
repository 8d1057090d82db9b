/* SPDX-License-Identifier: Apache-2.0 */
/* The grouped GEMMs that are not the first choice on this GPU (Ampere's on Hopper, say), against float64 on the host. What the
 * public calls run is in t_experts_cuda. */
#include <cuda_runtime_api.h>

#include "../lf_test.h"
#include "base/base.h"
#include "device/cuda/cuda_int.h"
#include "loom/gemm/grouped_gemm.h"

enum { N_EXPERTS = 6, D = 136, MAX_ROWS = 700, GUARD = 512, POISON = 0xFF };
static const int32_t hidden[N_EXPERTS] = {8, 264, 72, 520, 200, 136};
static const int32_t mixed[N_EXPERTS] = {0, 1, 131, 300, 57, 0};
static const int32_t skewed[N_EXPERTS] = {1, 0, 0, 0, 643, 1};

/* The test stands in for the shared object that the kernels live in. */
lf_status lf__cuda_fail(cudaError_t error, const char *what)
{
    cudaGetLastError();
    return LF_FAIL(LF_ERR_DEVICE, "%s: %s", what, cudaGetErrorString(error));
}
#define CHECK_CUDA(call)                                                       \
    do {                                                                       \
        cudaError_t e_ = (call);                                               \
        if (e_ != cudaSuccess) FAIL_("%s: %s", #call, cudaGetErrorString(e_)); \
    } while (0)

static float from_bf16(uint16_t b)
{
    uint32_t u = (uint32_t)b << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static uint16_t to_bf16(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

/* A matrix, or several one after another, on both sides. The device's copy has GUARD poisoned bytes behind it. */
typedef struct matrix {
    double *host;
    void *device;
    int64_t n;
    int32_t dtype;
} matrix;

static size_t width(int32_t dtype) { return dtype == LF_DTYPE_F32 ? 4 : 2; }

static uint64_t seed = 1;
static double draw(void)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (double)(int64_t)(seed >> 11) * 0x1p-52 - 1.0;
}

static void poison(matrix *m) { CHECK_CUDA(cudaMemset(m->device, POISON, (size_t)m->n * width(m->dtype) + GUARD)); }

static matrix make(int64_t n, int32_t dtype)
{
    matrix m = {calloc((size_t)n + 1, sizeof(double)), NULL, n, dtype};
    CHECK(m.host);
    CHECK_CUDA(cudaMalloc(&m.device, (size_t)n * width(dtype) + GUARD));
    poison(&m);
    return m;
}

/* Values that are exact in dtype, in host and device. */
static void upload(matrix *m)
{
    char *raw = malloc((size_t)m->n * 4 + 4);
    CHECK(raw);
    for (int64_t i = 0; i < m->n; i++) {
        float f = (float)m->host[i];
        uint16_t b = to_bf16(f);
        if (m->dtype == LF_DTYPE_BF16) f = from_bf16(b);
        m->host[i] = f;
        memcpy(raw + i * (int64_t)width(m->dtype), m->dtype == LF_DTYPE_BF16 ? (void *)&b : (void *)&f, width(m->dtype));
    }
    CHECK_CUDA(cudaMemcpy(m->device, raw, (size_t)m->n * width(m->dtype), cudaMemcpyHostToDevice));
    free(raw);
}

static matrix random_matrix(int64_t n, int32_t dtype)
{
    matrix m = make(n, dtype);
    for (int64_t i = 0; i < n; i++) m.host[i] = draw();
    upload(&m);
    return m;
}

static void drop(matrix *m)
{
    free(m->host);
    cudaFree(m->device);
}

/* A layer with its data. Regions are sized for any counts. */
typedef struct fixture {
    lf__gemm_plan *plan;
    void *table, *scratch;
    lf__loom_expert expert[N_EXPERTS];
    matrix wgu, wdown, dwgu, dwdown; /* experts one after another */
    matrix x, dy, h, gu;             /* gu is dgu as well */
    int32_t offset[N_EXPERTS + 1];
    int32_t *device_offset;
} fixture;

static void set_counts(fixture *t, const int32_t *count)
{
    t->offset[0] = 0;
    for (int32_t i = 0; i < N_EXPERTS; i++) t->offset[i + 1] = t->offset[i] + count[i];
    CHECK_CUDA(cudaMemcpy(t->device_offset, t->offset, sizeof t->offset, cudaMemcpyHostToDevice));
}

static fixture set_up(int32_t grad_dtype, const int32_t *count)
{
    fixture t = {0};
    int32_t n_devices = 0, sum = 0, most = 520;
    if (cudaGetDeviceCount(&n_devices) != cudaSuccess || !n_devices) SKIP("no CUDA device");
    for (int32_t i = 0; i < N_EXPERTS; i++) sum += hidden[i];
    t.wgu = random_matrix(2 * (int64_t)sum * D, LF_DTYPE_BF16);
    t.wdown = random_matrix((int64_t)sum * D, LF_DTYPE_BF16);
    t.dwgu = random_matrix(t.wgu.n, grad_dtype);
    t.dwdown = random_matrix(t.wdown.n, grad_dtype);
    t.x = random_matrix(MAX_ROWS * D, LF_DTYPE_BF16);
    t.dy = random_matrix(MAX_ROWS * D, LF_DTYPE_BF16);
    t.h = random_matrix((int64_t)MAX_ROWS * most, LF_DTYPE_BF16);
    t.gu = random_matrix(2 * t.h.n, LF_DTYPE_BF16);
    CHECK_CUDA(cudaMalloc((void **)&t.device_offset, sizeof t.offset));
    set_counts(&t, count);
    int64_t at = 0;
    for (int32_t i = 0; i < N_EXPERTS; at += (int64_t)hidden[i++] * D)
        t.expert[i] = (lf__loom_expert){.w_gu = (char *)t.wgu.device + 4 * at,
                                        .w_down = (char *)t.wdown.device + 2 * at,
                                        .dw_gu = (char *)t.dwgu.device + 2 * at * (int64_t)width(grad_dtype),
                                        .dw_down = (char *)t.dwdown.device + at * (int64_t)width(grad_dtype),
                                        .hidden = hidden[i]};
    return t;
}

static void open_plan(fixture *t, int32_t grad_dtype)
{
    const lf__loom_layer layer = {N_EXPERTS, D, MAX_ROWS, LF_DTYPE_BF16, grad_dtype, t->expert};
    CHECK_CUDA(cudaMalloc(&t->table, sizeof t->expert));
    CHECK_OK(lf__gemm_open(&t->plan, &layer, t->table));
    const size_t scratch = lf__gemm_scratch_bytes(t->plan);
    CHECK_CUDA(cudaMalloc(&t->scratch, scratch));
    CHECK_CUDA(cudaMemset(t->scratch, POISON, scratch));
}

static void tear_down(fixture *t)
{
    matrix *all[] = {&t->wgu, &t->wdown, &t->dwgu, &t->dwdown, &t->x, &t->dy, &t->h, &t->gu};
    CHECK_CUDA(cudaDeviceSynchronize());
    lf__gemm_close(t->plan);
    for (size_t i = 0; i < LF_COUNT(all); i++) drop(all[i]);
    cudaFree(t->table);
    cudaFree(t->scratch);
    cudaFree(t->device_offset);
}

/* c (m, n) += a b with the strides of an element's neighbours. */
static void multiply(double *c, int64_t m, int64_t n, int64_t k, const double *a, int64_t am, int64_t ak, const double *b,
                     int64_t bk, int64_t bn)
{
    for (int64_t i = 0; i < m; i++)
        for (int64_t l = 0; l < k; l++) {
            double left = a[i * am + l * ak];
            for (int64_t j = 0; j < n; j++) c[i * n + j] += left * b[l * bk + j * bn];
        }
}

/* What op adds to out (host). Returns the elements of out. */
static int64_t reference(const fixture *t, int32_t op, double *out)
{
    int64_t base = 0, at = 0, n = 0;
    for (int32_t i = 0; i < N_EXPERTS; i++) {
        int64_t f = hidden[i], r = t->offset[i + 1] - t->offset[i], row = (int64_t)t->offset[i] * D;
        const double *x = t->x.host + row, *dy = t->dy.host + row, *h = t->h.host + base, *gu = t->gu.host + 2 * base;
        const double *wgu = t->wgu.host + 2 * at, *wdown = t->wdown.host + at;
        switch (op) {
        case LF_GEMM_GU: multiply(out + 2 * base, r, 2 * f, D, x, D, 1, wgu, 1, D), n += r * 2 * f; break;
        case LF_GEMM_Y: multiply(out + row, r, D, f, h, f, 1, wdown, 1, f), n += r * D; break;
        case LF_GEMM_DH: multiply(out + base, r, f, D, dy, D, 1, wdown, f, 1), n += r * f; break;
        case LF_GEMM_DX: multiply(out + row, r, D, 2 * f, gu, 2 * f, 1, wgu, D, 1), n += r * D; break;
        case LF_GEMM_DW_GU: multiply(out + 2 * at, 2 * f, D, r, gu, 1, 2 * f, x, D, 1), n += 2 * f * D; break;
        default: multiply(out + at, D, f, r, dy, 1, D, h, f, 1), n += D * f;
        }
        base += r * f;
        at += f * D;
    }
    return n;
}

/* The first n elements are near `want`, all behind them are still poisoned. */
static void check_output(const matrix *m, int64_t n, const double *want, const char *what)
{
    size_t bytes = (size_t)m->n * width(m->dtype) + GUARD;
    unsigned char *raw = malloc(bytes);
    CHECK(raw);
    CHECK_CUDA(cudaMemcpy(raw, m->device, bytes, cudaMemcpyDeviceToHost));
    double error = 0, norm = 0, tolerance = m->dtype == LF_DTYPE_F32 ? 1e-5 : 3e-3;
    for (int64_t i = 0; i < n; i++) {
        float got;
        uint16_t b;
        memcpy(&got, raw + i * 4 * (m->dtype == LF_DTYPE_F32), 4);
        memcpy(&b, raw + i * 2, 2);
        if (m->dtype == LF_DTYPE_BF16) got = from_bf16(b);
        double off = got - want[i];
        if (!(fabs(off) <= fabs(want[i]) * 0x1p-8 + 1e-3))
            FAIL_("%s: element %lld is %g, expected %g", what, (long long)i, got, want[i]);
        error += off * off;
        norm += want[i] * want[i];
    }
    if (!(sqrt(error) <= tolerance * sqrt(norm))) FAIL_("%s: relative error %g", what, sqrt(error / norm));
    for (size_t i = (size_t)n * width(m->dtype); i < bytes; i++)
        if (raw[i] != POISON) FAIL_("%s: byte %zu behind element %lld was written", what, i, (long long)n);
    free(raw);
}

static lf__gemm_call call_of(const fixture *t, int32_t op, void *out)
{
    const void *a[] = {t->x.device, t->h.device, t->dy.device, t->gu.device, t->gu.device, t->dy.device};
    const void *b[] = {NULL, NULL, NULL, NULL, t->x.device, t->h.device};
    return (lf__gemm_call){t->device_offset, a[op], b[op], op < LF_GEMM_DW_GU ? out : NULL, t->scratch, 0};
}

static matrix *target(fixture *t, int32_t op, matrix *out)
{
    return op == LF_GEMM_DW_GU ? &t->dwgu : op == LF_GEMM_DW_DOWN ? &t->dwdown : out;
}

/* Every operation by every other kernel, twice: right, complete, within bounds, and the same bits again. */
static void check_all(int32_t grad_dtype, const int32_t *count)
{
    fixture t = set_up(grad_dtype, count);
    open_plan(&t, grad_dtype);
    matrix rows = make(2 * t.h.n, LF_DTYPE_BF16);
    double *want = malloc((size_t)t.gu.n * sizeof *want + sizeof *want);
    unsigned char *first = malloc((size_t)t.gu.n * 4), *again = malloc((size_t)t.gu.n * 4);
    CHECK(want && first && again);
    int32_t n_others = 0;
    for (int32_t op = 0; op < LF_GEMM_N_OPS; op++) {
        matrix *out = target(&t, op, &rows);
        lf__gemm_call call = call_of(&t, op, rows.device);
        memset(want, 0, (size_t)t.gu.n * sizeof *want);
        int64_t n = reference(&t, op, want);
        size_t bytes = (size_t)n * width(out->dtype);
        const int32_t chosen = lf__gemm_choice(t.plan, op);
        CHECK(chosen >= 0 && lf__gemm_choice_name(t.plan, op, chosen));
        for (int32_t c = 0; c < lf__gemm_n_choices(t.plan, op); c++) {
            if (c == chosen) continue;
            n_others++;
            CHECK_OK(lf__gemm_choose(t.plan, op, c));
            poison(out);
            CHECK_OK(lf__gemm_run(t.plan, op, &call, NULL));
            check_output(out, n, want, lf__gemm_choice_name(t.plan, op, c));
            CHECK_CUDA(cudaMemcpy(first, out->device, bytes, cudaMemcpyDeviceToHost));
            CHECK_OK(lf__gemm_run(t.plan, op, &call, NULL));
            CHECK_CUDA(cudaMemcpy(again, out->device, bytes, cudaMemcpyDeviceToHost));
            CHECK(memcmp(first, again, bytes) == 0);
        }
    }
    free(want), free(first), free(again);
    drop(&rows);
    tear_down(&t);
    if (!n_others) SKIP("one kernel for each operation on this GPU");
}

TEST(mixed_counts_with_bf16_gradients) { check_all(LF_DTYPE_BF16, mixed); }
TEST(mixed_counts_with_f32_gradients) { check_all(LF_DTYPE_F32, mixed); }
TEST(one_expert_has_nearly_all_rows_with_f32_gradients) { check_all(LF_DTYPE_F32, skewed); }

static void check_accumulate(int32_t grad_dtype)
{
    fixture t = set_up(grad_dtype, mixed);
    open_plan(&t, grad_dtype);
    for (int32_t op = LF_GEMM_DW_GU; op <= LF_GEMM_DW_DOWN; op++)
        for (int32_t c = 0, chosen = lf__gemm_choice(t.plan, op); c < lf__gemm_n_choices(t.plan, op); c++) {
            if (c == chosen) continue;
            matrix *out = target(&t, op, NULL);
            lf__gemm_call call = call_of(&t, op, NULL);
            double *want = malloc((size_t)out->n * sizeof *want);
            CHECK(want);
            upload(out); /* what was there; the guard is still poisoned */
            memcpy(want, out->host, (size_t)out->n * sizeof *want);
            reference(&t, op, want);
            call.accumulate = 1;
            CHECK_OK(lf__gemm_choose(t.plan, op, c));
            CHECK_OK(lf__gemm_run(t.plan, op, &call, NULL));
            check_output(out, out->n, want, lf__gemm_choice_name(t.plan, op, c));
            free(want);
        }
    tear_down(&t);
}
TEST(gradients_accumulate_in_bf16) { check_accumulate(LF_DTYPE_BF16); }
TEST(gradients_accumulate_in_f32) { check_accumulate(LF_DTYPE_F32); }

TEST(only_kernels_that_exist_can_be_chosen)
{
    fixture t = set_up(LF_DTYPE_F32, mixed);
    open_plan(&t, LF_DTYPE_F32);
    const int32_t n = lf__gemm_n_choices(t.plan, LF_GEMM_GU);
    CHECK_STATUS(lf__gemm_choose(t.plan, LF_GEMM_GU, n), LF_ERR_INVALID);
    CHECK_STATUS(lf__gemm_choose(t.plan, LF_GEMM_GU, -1), LF_ERR_INVALID);
    CHECK(lf__gemm_choice_name(t.plan, LF_GEMM_GU, n) == NULL && lf__gemm_choice(t.plan, LF_GEMM_N_OPS) == -1);
    tear_down(&t);
}

LF_TEST_MAIN
