/* SPDX-License-Identifier: Apache-2.0 */
/* Top-k's CUDA kernels: after each part the same bits as on the CPU. LOONGFORGE_TEST_DEVICE=cpu compares the CPU with itself. */
#include "base/base.h"
#include "lf_test.h"
#include "nexus/nexus_int.h"
#include "topk_cases.h"

static lf_device *cpu, *gpu;
static const lf__nexus_kernels *kernels;
static lf_stream *stream;

static void set_up(void)
{
    const char *name = getenv("LOONGFORGE_TEST_DEVICE");
    if (gpu) return;
    CHECK_OK(lf_device_open(&cpu, "cpu"));
    if (lf_device_open(&gpu, name ? name : "cuda") < 0) SKIP("%s", lf_error_text());
    CHECK_OK(lf__nexus_find_kernels(gpu, &kernels));
    CHECK_OK(lf_stream_open(gpu, 0, &stream));
}

/* The same array on the device, scratch and mask full of rubbish. */
static lf_topk open_copy(const array *a)
{
    lf_topk t = a->t;
    const size_t n = (size_t)t.count + 64, width = lf_dtype_bytes(t.dtype);
    const size_t bytes[] = {n * width,      n * width, n * sizeof(float),
                            n / 64 * 8 + 8, n * width, (size_t)lf_topk_scratch_bytes(t.count)};
    const void *from[] = {t.data, t.out, t.residual, t.mask, t.values, t.scratch};
    void *to[6];
    for (int32_t i = 0; i < 6; i++) {
        CHECK_OK(lf_device_alloc(gpu, bytes[i], &to[i]));
        if (i != 3 && i != 5) CHECK_OK(lf_copy(gpu, to[i], from[i], bytes[i], NULL));
        else CHECK_OK(lf_fill(gpu, to[i], 0xab, bytes[i], NULL));
    }
    t.data = to[0];
    t.out = to[1];
    t.residual = to[2];
    t.mask = to[3];
    t.values = to[4];
    t.scratch = to[5];
    return t;
}

static void close_copy(const lf_topk *t)
{
    void *all[] = {(void *)t->data, t->out, t->residual, t->mask, t->values, t->scratch};
    for (int32_t i = 0; i < 6; i++) lf_device_free(gpu, all[i]);
}

static void compare(const void *want, const void *there, size_t bytes, const char *what, const array *a, int32_t part)
{
    void *got = malloc(bytes + 1);
    CHECK_OK(lf_copy(gpu, got, there, bytes, NULL));
    const bool same = memcmp(want, got, bytes) == 0;
    free(got);
    if (!same)
        FAIL_("%lld %s, k %lld: %s differs after part %d", (long long)a->t.count, lf_dtype_name(a->t.dtype), (long long)a->t.k,
              what, part);
}

static void run_part(const array *a, const lf_topk *t, int32_t part, bool on_stream)
{
    const size_t n = (size_t)a->t.count, width = lf_dtype_bytes(a->t.dtype);
    CHECK_OK(lf__nexus_cpu_topk(NULL, NULL, 1, &a->t, part));
    CHECK_OK(lf__nexus_topk(gpu, kernels, t, part, on_stream ? stream : NULL));
    CHECK_OK(lf_stream_sync(on_stream ? stream : NULL));
    compare(a->t.residual, t->residual, n * sizeof(float), "the residual", a, part);
    if (part == LF__TOPK_SELECT) compare(a->t.mask, t->mask, (n + 63) / 64 * 8, "the mask", a, part);
    if (part == LF__TOPK_PACK) compare(a->t.values, t->values, (size_t)a->t.k * width, "a value", a, part);
    if (part == LF__TOPK_SCATTER || part == LF__TOPK_FLUSH) compare(a->t.out, t->out, n * width, "the result", a, part);
}

static void run_rounds(int64_t count, int64_t k, int32_t dtype, int32_t kind)
{
    array a;
    open_array(&a, count, k, dtype);
    lf_topk t = open_copy(&a);
    for (int32_t round = 0; round < 2; round++) {
        fill_array(&a, kind, 7 + (uint32_t)round);
        CHECK_OK(lf_copy(gpu, (void *)t.data, a.t.data, (size_t)count * lf_dtype_bytes(dtype), NULL));
        a.t.factor = t.factor = round ? 0.3f : 1;
        for (int32_t part = LF__TOPK_FOLD; part <= LF__TOPK_SCATTER; part++) run_part(&a, &t, part, round);
    }
    run_part(&a, &t, LF__TOPK_FLUSH, true);
    a.t.keep = t.keep = 0;
    run_part(&a, &t, LF__TOPK_FOLD, true);
    close_copy(&t);
    close_array(&a);
}

TEST(topk_on_cuda_is_the_cpus)
{
    set_up();
    for (int32_t dtype = LF_DTYPE_F32; dtype <= LF_DTYPE_BF16; dtype++)
        for (int32_t kind = 0; kind < TOPK_KINDS; kind++)
            for (size_t s = 0; s < LF_COUNT(topk_sizes); s++)
                for (int32_t share = 0; share < TOPK_SHARES; share++)
                    run_rounds(topk_sizes[s], topk_k(topk_sizes[s], share), dtype, kind);
}

/* More tiles than one block adds up at once. */
TEST(topk_on_cuda_takes_large_chunks)
{
    set_up();
    for (int32_t dtype = LF_DTYPE_F32; dtype <= LF_DTYPE_BF16; dtype++) run_rounds(20000003, topk_k(20000003, 1), dtype, 0);
}

LF_TEST_MAIN
