/* SPDX-License-Identifier: Apache-2.0 */
/* Sums of squares, clipping, adding gradients. */
#include "sweep_fixture.h"

/* ---- sums of squares ------------------------------------------------------------------------------------------------- */

TEST(loom_sumsq_matches_float64)
{
    set_up();
    lf_map *map = make_map(mixed, LF_COUNT(mixed), 0);
    fill_map(map);
    lf_range ranges[8];
    int32_t n = trainable_ranges(map, ranges);
    for (int32_t role = LF_ROLE_WEIGHT; role <= LF_ROLE_GRAD; role++) {
        double want = 0, got[4];
        for (int32_t r = 0; r < n; r++) {
            const void *x = plane(map, &ranges[r], role);
            for (int64_t i = 0; i < ranges[r].count; i++) {
                double v = get(x, i, role_dtype(map, ranges[r].klass, role));
                want += v * v;
            }
        }
        CHECK(want > 1000);
        for (int32_t threads = 0; threads < 4; threads++) {
            got[threads] = NAN;
            CHECK_OK(lf_loom_set_threads(threads));
            CHECK_OK(lf_loom_sumsq(map, threads == 1 ? worker : NULL, ranges, n, role, &got[threads]));
            CHECK_OK(lf_stream_sync(worker));
            CHECK(got[threads] == got[0]);
        }
        CHECK_NEAR(got[0], want, 1e-12 * want);
    }
    double nothing = NAN;
    CHECK_OK(lf_loom_sumsq(map, NULL, NULL, 0, LF_ROLE_GRAD, &nothing));
    CHECK(nothing == 0);
    CHECK_STATUS(lf_loom_sumsq(map, NULL, ranges, n, 9, &nothing), LF_ERR_INVALID);
    CHECK_STATUS(lf_loom_sumsq(map, NULL, ranges, n, LF_ROLE_GRAD, NULL), LF_ERR_INVALID);
    int32_t f32_class = role_dtype(map, 0, LF_ROLE_MASTER) ? 1 : 0;
    CHECK_STATUS(lf_loom_sumsq(map, NULL, &(lf_range){f32_class, 0, 0, 1}, 1, LF_ROLE_MASTER, &nothing), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "no role master");
    lf_map_unref(map);
}

TEST(loom_sweeps_without_memory)
{
    set_up();
    lf_map *map = make_map(mixed, LF_COUNT(mixed), 1);
    lf_range ranges[8];
    int32_t n = trainable_ranges(map, ranges), failed = 0;
    double out;
    fill_map(map);
    /* fresh jobs are needed when the spare ones have no room: many ranges */
    lf_range many[500];
    for (int32_t i = 0; i < 500; i++) many[i] = (lf_range){ranges[0].klass, 0, i, 1};
    for (int64_t at = 1; at < 4; at++) {
        lf__alloc_fail_at(at);
        lf_status rc = lf_loom_sumsq(map, NULL, many, 500, LF_ROLE_GRAD, &out);
        lf__alloc_fail_at(0);
        CHECK(rc == LF_OK || rc == LF_ERR_NOMEM);
        failed += rc == LF_ERR_NOMEM;
    }
    CHECK(failed > 0);
    CHECK_OK(lf_loom_sumsq(map, NULL, ranges, n, LF_ROLE_GRAD, &out));
    lf__alloc_fail_at(0);
    for (int32_t i = 0; i < 20; i++) CHECK_OK(lf_loom_sumsq(map, NULL, ranges, n, LF_ROLE_GRAD, &out));
    CHECK_EQ(lf__alloc_fail_at(0), 0);
    lf_map_unref(map);
}

/* ---- clipping -------------------------------------------------------------------------------------------------------- */

TEST(loom_clip_scales_to_the_norm)
{
    set_up();
    static const double limits[] = {1, 12, 24.5, 0, -1, (double)INFINITY};
    for (size_t i = 0; i < LF_COUNT(limits); i++) {
        lf_adamw hyper[40], before[40];
        for (int32_t j = 0; j < 40; j++) {
            CHECK_OK(lf_adamw_init(&hyper[j], 1e-3, 0.9, 0.99, 1e-8, 0.1, j + 1, j ? 0.1 * j : -0.25));
            before[j] = hyper[j];
        }
        double sumsq = 96 * 96; /* times 1/4: a norm of 24 */
        float norm = (float)NAN;
        lf_stream *stream = i % 2 ? worker : NULL;
        CHECK_OK(lf_loom_clip(cpu, stream, &sumsq, limits[i], hyper, 40, &norm));
        CHECK_OK(lf_stream_sync(stream));
        CHECK(norm == 24);
        const double factor = i < 2 ? limits[i] / (24 + 1e-6) : 1;
        for (int32_t j = 0; j < 40; j++) {
            CHECK(hyper[j].grad_scale == (float)((double)before[j].grad_scale * factor));
            before[j].grad_scale = hyper[j].grad_scale;
        }
        CHECK(memcmp(hyper, before, sizeof hyper) == 0); /* nothing else changed */
    }
    lf_adamw hyper = {0};
    double sumsq = 1;
    float norm;
    CHECK_STATUS(lf_loom_clip(cpu, NULL, &sumsq, (double)NAN, &hyper, 1, &norm), LF_ERR_INVALID);
    CHECK_STATUS(lf_loom_clip(cpu, NULL, &sumsq, 1, &hyper, 0, &norm), LF_ERR_INVALID);
    CHECK_STATUS(lf_loom_clip(cpu, NULL, NULL, 1, &hyper, 1, &norm), LF_ERR_INVALID);
    CHECK_STATUS(lf_loom_clip(cpu, NULL, &sumsq, 1, &hyper, 1, NULL), LF_ERR_INVALID);
}

/* A sum that is not finite, or a norm too large for f32, whether or not there is a limit: the step changes no bit of the map. */
TEST(loom_clip_stops_a_bad_step)
{
    set_up();
    static const double sums[] = {(double)INFINITY, (double)NAN, 1e300};
    for (size_t i = 0; i < LF_COUNT(sums) * 2; i++) {
        lf_map *map = make_map(mixed, LF_COUNT(mixed), (int32_t)i % 2),
               *before = make_map(mixed, LF_COUNT(mixed), (int32_t)i % 2);
        lf_range ranges[8], first = {0, 0, 0, 1};
        int32_t n = trainable_ranges(map, ranges);
        fill_map(map);
        fill_map(before);
        lf_adamw hyper[2];
        float norm = 0;
        for (int32_t j = 0; j < 2; j++) CHECK_OK(lf_adamw_init(&hyper[j], 1e-3, 0.9, 0.99, 1e-8, 0.1, 1, 1));
        CHECK_OK(lf_loom_clip(cpu, NULL, &sums[i / 2], i % 2 ? 1 : 0, hyper, 2, &norm));
        CHECK(!isfinite(norm) && isnan(hyper[0].grad_scale) && isnan(hyper[1].grad_scale));
        CHECK_OK(lf_loom_adamw(map, NULL, ranges, n, &hyper[1]));
        CHECK(memcmp(plane(map, &first, LF_ROLE_WEIGHT), plane(before, &first, LF_ROLE_WEIGHT), (size_t)lf_map_bytes(map)) == 0);
        CHECK_OK(lf_adamw_init(&hyper[1], 1e-3, 0.9, 0.99, 1e-8, 0.1, 1, 1)); /* the next one goes on */
        CHECK_OK(lf_loom_adamw(map, NULL, ranges, n, &hyper[1]));
        CHECK(memcmp(plane(map, &first, LF_ROLE_WEIGHT), plane(before, &first, LF_ROLE_WEIGHT), (size_t)lf_map_bytes(map)) != 0);
        lf_map_unref(map);
        lf_map_unref(before);
    }
}

/* ---- add ------------------------------------------------------------------------------------------------------------- */

static void check_add(int64_t count, int32_t dst_dtype, int32_t src_dtype, int32_t accumulate, const float *scale,
                      lf_stream *stream)
{
    const size_t db = (size_t)count * lf_dtype_bytes(dst_dtype), sb = (size_t)count * lf_dtype_bytes(src_dtype);
    void *dst = lf__alloc_aligned(db + 8, 64), *old = lf__alloc_aligned(db + 8, 64), *src = lf__alloc_aligned(sb + 8, 64);
    memset(dst, 0xa5, db + 8);
    for (int64_t i = 0; i < count; i++) {
        put(src, i, src_dtype, uniform(-1, 1));
        if (accumulate) put(dst, i, dst_dtype, uniform(-1, 1));
    }
    memcpy(old, dst, db + 8);
    CHECK_OK(lf_loom_add(cpu, stream, dst, dst_dtype, src, src_dtype, count, scale, accumulate));
    CHECK_OK(lf_stream_sync(stream));
    for (int64_t i = 0; i < count; i++) {
        float sum = (scale ? *scale : 1) * (float)get(src, i, src_dtype);
        if (accumulate) sum = (float)get(old, i, dst_dtype) + sum;
        put(old, i, dst_dtype, sum);
    }
    CHECK(memcmp(dst, old, db + 8) == 0); /* nothing behind the end either */
    lf__free(dst), lf__free(old), lf__free(src);
}

TEST(loom_add_is_exact)
{
    set_up();
    const int64_t counts[] = {0, 1, 7, 1023, 1024, 1025, 70000, 200003};
    const float scale = -0.3f;
    for (size_t i = 0; i < LF_COUNT(counts); i++)
        for (int32_t how = 0; how < 16; how++) {
            CHECK_OK(lf_loom_set_threads((int32_t)(i + how) % 4));
            check_add(counts[i], how & 1 ? LF_DTYPE_BF16 : LF_DTYPE_F32, how & 2 ? LF_DTYPE_BF16 : LF_DTYPE_F32, how >> 2 & 1,
                      how & 8 ? &scale : NULL, how % 3 ? NULL : worker);
        }
    float x = 1;
    CHECK_STATUS(lf_loom_add(cpu, NULL, &x, LF_DTYPE_F32, &x, LF_DTYPE_F64, 1, NULL, 0), LF_ERR_INVALID);
    CHECK_STATUS(lf_loom_add(cpu, NULL, NULL, LF_DTYPE_F32, &x, LF_DTYPE_F32, 1, NULL, 0), LF_ERR_INVALID);
}

/* Ties go to the even neighbour; NaN stays NaN, what is too large becomes infinite. */
TEST(loom_add_rounds_to_nearest_even)
{
    set_up();
    const float src[] = {1 + 0x1p-8f, 1 + 0x3p-8f, 1 + 0x1.1p-8f, -1 - 0x1p-8f, 0x1.fffffep127f, (float)NAN, -0.0f};
    const uint16_t want[] = {0x3f80, 0x3f82, 0x3f81, 0xbf80, 0x7f80, 0, 0x8000};
    uint16_t dst[7];
    CHECK_OK(lf_loom_add(cpu, NULL, dst, LF_DTYPE_BF16, src, LF_DTYPE_F32, 7, NULL, 0));
    for (int32_t i = 0; i < 7; i++)
        if (i != 5) CHECK_EQ(dst[i], want[i]);
    CHECK(isnan(lf__f32_from_bf16(dst[5])));
}

TEST(loom_closes)
{
    lf_stream_close(worker);
    lf_device_close(cpu);
}

LF_TEST_MAIN
