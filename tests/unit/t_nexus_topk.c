/* SPDX-License-Identifier: Apache-2.0 */
/* Top-k with error feedback on one array: which entries, how many, and that nothing is lost. */
#include "base/base.h"
#include "lf_test.h"
#include "topk_cases.h"

static lf_device *cpu;

static void set_up(void)
{
    if (!cpu) CHECK_OK(lf_device_open(&cpu, "cpu"));
}

/* Entries by magnitude, NaN first; of equal ones the one in front first. */
static const float *ranked;
static int by_rank(const void *a_, const void *b_)
{
    const int64_t a = *(const int64_t *)a_, b = *(const int64_t *)b_;
    const float x = fabsf(ranked[a]), y = fabsf(ranked[b]);
    if (isnan(x) != isnan(y)) return isnan(x) ? -1 : 1;
    if (!isnan(x) && x != y) return x > y ? -1 : 1;
    return a < b ? -1 : a > b;
}

static void check_selection(const array *a)
{
    int64_t *order = malloc((size_t)(a->t.count + 1) * sizeof *order);
    uint8_t *want = calloc((size_t)a->t.count + 64, 1);
    for (int64_t i = 0; i < a->t.count; i++) order[i] = i;
    ranked = a->t.residual;
    qsort(order, (size_t)a->t.count, sizeof *order, by_rank);
    for (int64_t j = 0; j < a->t.k; j++) want[order[j]] = 1;
    int64_t wrong = -1;
    for (int64_t i = 0; i < (a->t.count + 63) / 64 * 64; i++)
        if ((a->t.mask[i / 64] >> (i % 64) & 1) != want[i]) wrong = i;
    free(order);
    free(want);
    if (wrong >= 0)
        FAIL_("%lld entries, k %lld: entry %lld is wrong", (long long)a->t.count, (long long)a->t.k, (long long)wrong);
}

/* Sizes around words and tiles, every k that matters, values with many ties. */
TEST(topk_takes_exactly_the_largest)
{
    set_up();
    for (int32_t kind = 0; kind < TOPK_KINDS; kind++)
        for (size_t s = 0; s < LF_COUNT(topk_sizes); s++)
            for (int32_t share = 0; share < TOPK_SHARES; share++) {
                array a;
                open_array(&a, topk_sizes[s], topk_k(topk_sizes[s], share), LF_DTYPE_F32);
                fill_array(&a, kind, 1);
                CHECK_OK(lf_topk_fold(cpu, &a.t, NULL));
                CHECK_OK(lf_topk_select(cpu, &a.t, NULL));
                check_selection(&a);
                close_array(&a);
            }
}

static float value_at(const void *data, int64_t i, int32_t dtype)
{
    return dtype == LF_DTYPE_F32 ? ((const float *)data)[i] : lf__f32_from_bf16(((const uint16_t *)data)[i]);
}

/* sent + residual is gradient + old residual to the last bit, step after step. */
TEST(topk_loses_nothing)
{
    set_up();
    for (int32_t dtype = LF_DTYPE_F32; dtype <= LF_DTYPE_BF16; dtype++)
        for (size_t s = 0; s < LF_COUNT(topk_sizes); s++) {
            array a;
            const int64_t n = topk_sizes[s];
            open_array(&a, n, topk_k(n, 1), dtype);
            float *before = calloc((size_t)n + 1, sizeof *before);
            for (int32_t step = 0; step < 4; step++) {
                fill_array(&a, step % 2, 10 + step);
                for (int64_t i = 0; i < n; i++) before[i] = value_at(a.t.data, i, dtype) + a.t.residual[i];
                CHECK_OK(lf_topk_fold(cpu, &a.t, NULL));
                CHECK_OK(lf_topk_select(cpu, &a.t, NULL));
                CHECK_OK(lf_topk_pack(cpu, &a.t, NULL));
                CHECK_OK(lf_topk_scatter(cpu, &a.t, NULL));
                int64_t sent = 0;
                for (int64_t i = 0; i < n; i++) {
                    const float out = value_at(a.t.out, i, dtype);
                    CHECK(out + a.t.residual[i] == before[i]);
                    if (a.t.mask[i / 64] >> (i % 64) & 1) CHECK(out == value_at(a.t.values, sent++, dtype));
                    else CHECK(out == 0);
                }
                CHECK_EQ(sent, a.t.k);
            }
            free(before);
            close_array(&a);
        }
}

/* A NaN or infinity goes out at once and leaves nothing behind; a value too large for bf16 becomes an infinity and goes too. */
TEST(topk_sends_what_is_not_finite)
{
    set_up();
    array a;
    open_array(&a, 1000, 3, LF_DTYPE_BF16);
    fill_array(&a, 0, 1);
    a.t.residual[700] = 3.4e38f;
    ((uint16_t *)a.t.data)[700] = 0;
    ((uint16_t *)a.t.data)[500] = 0xff80; /* -inf */
    ((uint16_t *)a.t.data)[900] = 0x7fc1; /* NaN */
    CHECK_OK(lf_topk_fold(cpu, &a.t, NULL));
    CHECK_OK(lf_topk_select(cpu, &a.t, NULL));
    CHECK_OK(lf_topk_pack(cpu, &a.t, NULL));
    const uint16_t *v = a.t.values;
    CHECK(v[0] == 0xff80 && v[1] == 0x7f80 && v[2] == 0x7fc0);
    CHECK(a.t.residual[500] == 0 && a.t.residual[700] == 0 && a.t.residual[900] == 0);
    close_array(&a);
}

TEST(topk_scales_and_forgets)
{
    set_up();
    for (int32_t dtype = LF_DTYPE_F32; dtype <= LF_DTYPE_BF16; dtype++) {
        array a;
        open_array(&a, 300, 300, dtype);
        for (int64_t i = 0; i < 300; i++) a.t.residual[i] = 5;
        fill_array(&a, 1, 4);
        a.t.keep = 0;
        a.t.factor = 0.25f;
        CHECK_OK(lf_topk_fold(cpu, &a.t, NULL));
        CHECK_OK(lf_topk_select(cpu, &a.t, NULL));
        CHECK_OK(lf_topk_pack(cpu, &a.t, NULL));
        CHECK_OK(lf_topk_scatter(cpu, &a.t, NULL));
        for (int64_t i = 0; i < 300; i++) CHECK(value_at(a.t.out, i, dtype) == value_at(a.t.data, i, dtype) * 0.25f);
        close_array(&a);
    }
}

/* The same bits, alone, on a stream, and while another loop has the threads. */
static array shared_array;
static void run_round(void *user, int64_t i)
{
    (void)user;
    if (i) return;
    if (lf_topk_fold(cpu, &shared_array.t, NULL) == LF_OK && lf_topk_select(cpu, &shared_array.t, NULL) == LF_OK)
        lf_topk_pack(cpu, &shared_array.t, NULL);
}

TEST(topk_is_the_same_in_every_run)
{
    set_up();
    lf_stream *stream;
    lf__hash128 first = {0};
    const int64_t n = 400000;
    CHECK_OK(lf_stream_open(cpu, 0, &stream));
    for (int32_t how = 0; how < 3; how++) {
        array *a = &shared_array;
        open_array(a, n, topk_k(n, 1), LF_DTYPE_BF16);
        fill_array(a, 0, 77);
        if (how == 2) {
            lf__parallel(0, 2, run_round, NULL);
        } else {
            CHECK_OK(lf_topk_fold(cpu, &a->t, how ? stream : NULL));
            CHECK_OK(lf_topk_select(cpu, &a->t, how ? stream : NULL));
            CHECK_OK(lf_topk_pack(cpu, &a->t, how ? stream : NULL));
            CHECK_OK(lf_stream_sync(stream));
        }
        const lf__hash128 h = hash_array(a);
        if (how == 0) first = h;
        CHECK(h.lo == first.lo && h.hi == first.hi);
        close_array(a);
    }
    lf_stream_close(stream);
}

TEST(topk_refuses_bad_arguments)
{
    set_up();
    array a;
    open_array(&a, 100, 10, LF_DTYPE_F32);
    fill_array(&a, 0, 1);
    CHECK_OK(lf_topk_fold(cpu, &a.t, NULL));
    a.t.k = 0;
    CHECK_STATUS(lf_topk_select(cpu, &a.t, NULL), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "k is 0, expected 1 to 100");
    a.t.k = 101;
    CHECK_STATUS(lf_topk_select(cpu, &a.t, NULL), LF_ERR_INVALID);
    a.t.k = 10;
    a.t.dtype = LF_DTYPE_F16;
    CHECK_STATUS(lf_topk_select(cpu, &a.t, NULL), LF_ERR_INVALID);
    a.t.dtype = LF_DTYPE_F32;
    a.t.size--;
    CHECK_STATUS(lf_topk_select(cpu, &a.t, NULL), LF_ERR_INVALID);
    a.t.size++;
    CHECK_STATUS(lf_topk_select(NULL, &a.t, NULL), LF_ERR_INVALID);
    CHECK_STATUS(lf_topk_select(cpu, NULL, NULL), LF_ERR_INVALID);
    memset(a.t.mask, 0, 16);
    CHECK_STATUS(lf_topk_pack(cpu, &a.t, NULL), LF_ERR_PEER);
    CHECK_HAS(lf_error_text(), "0 of 100 entries, expected 10");
    a.t.scratch = NULL;
    CHECK_STATUS(lf_topk_pack(cpu, &a.t, NULL), LF_ERR_INVALID);
    a.t.scratch = a.scratch;
    close_array(&a);
}

LF_TEST_MAIN
