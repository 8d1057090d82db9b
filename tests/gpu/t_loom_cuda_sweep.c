/* SPDX-License-Identifier: Apache-2.0 */
/* Sweeps on CUDA against the CPU's table, and a whole step as a captured graph. AdamW and add give the CPU's bits; a sum of
 * squares is added in another order in double precision, so 1e-12 of it is allowed. */
#include "cuda_graph.h"
#include "loom_cuda_fixture.h"
#include "mixed_map.h"

/* ---- maps on both devices -------------------------------------------------------------------------------------------- */

static const spec specs[] = {{3, LF_DTYPE_BF16, 0},
                             {70001, LF_DTYPE_BF16, 0},
                             {1, LF_DTYPE_F32, 0},
                             {50001, LF_DTYPE_F32, 0},
                             {1000, LF_DTYPE_BF16, 0},
                             {16384, LF_DTYPE_F32, 0},
                             {77, LF_DTYPE_F32, LF_PARAM_FROZEN},
                             {8192, LF_DTYPE_BF16, 0}};

static lf_map *make_map(lf_device *on, int32_t grad_f32, int32_t moments_bf16)
{
    return make_map_on(on, specs, LF_COUNT(specs), grad_f32, moments_bf16);
}

static char *slab_of(const lf_map *map)
{
    lf_range first = {0, 0, 0, 1};
    lf_class_info info = {.size = sizeof info};
    CHECK_OK(lf_map_get_class(map, 0, &info));
    return (char *)lf_map_address(map, &first, LF_ROLE_WEIGHT) - info.role_offset[LF_ROLE_WEIGHT];
}

/* Random values in every plane of every class; some gradients 0, so that roots and quotients of 0 occur. */
static void fill_map(const lf_map *map)
{
    for (int32_t c = 0; c < lf_map_n_classes(map); c++) {
        lf_class_info info = {.size = sizeof info};
        CHECK_OK(lf_map_get_class(map, c, &info));
        lf_range range = {c, 0, 0, info.count};
        for (int32_t role = 0; role < LF_N_ROLES; role++) {
            void *p = lf_map_address(map, &range, role);
            const float low = role == LF_ROLE_EXP_AVG_SQ ? 0 : -1;
            for (int64_t i = 0; p && i < info.count; i++)
                put(p, i, info.role_dtype[role], lf__rng_below(&rng, 8) ? uniform(low, 1) * (i % 5 ? 1e-3f : 1) : 0);
        }
    }
}

/* Two maps with the same values. */
static void make_maps_with(lf_map **on_cpu, lf_map **on_gpu, int32_t grad_f32, int32_t moments_bf16)
{
    *on_cpu = make_map(cpu, grad_f32, moments_bf16);
    *on_gpu = make_map(gpu, grad_f32, moments_bf16);
    CHECK_EQ(lf_map_bytes(*on_cpu), lf_map_bytes(*on_gpu));
    fill_map(*on_cpu);
    CHECK_OK(lf_copy(gpu, slab_of(*on_gpu), slab_of(*on_cpu), (size_t)lf_map_bytes(*on_cpu), NULL));
}

static void make_maps(lf_map **on_cpu, lf_map **on_gpu, int32_t grad_f32) { make_maps_with(on_cpu, on_gpu, grad_f32, 0); }

/* The classes with gradients cut into pieces of up to `most` elements, empty ones among them; 0: whole. */
static int32_t cut_ranges(const lf_map *map, int32_t most, lf_range *ranges, int32_t room)
{
    int32_t n = 0;
    for (int32_t c = 0; c < lf_map_n_classes(map); c++) {
        lf_class_info info = {.size = sizeof info};
        CHECK_OK(lf_map_get_class(map, c, &info));
        if (!info.role_dtype[LF_ROLE_GRAD]) continue;
        for (int64_t at = 0, count; at < info.count; at += count) {
            CHECK(n < room);
            count = most ? lf__rng_below(&rng, most) : info.count;
            if (count > info.count - at) count = info.count - at;
            ranges[n++] = (lf_range){c, 0, at, count};
        }
    }
    return n;
}

static const int32_t cuts[] = {0, 30000, 3000, 500, 200}; /* a few pieces, one long table, several */

TEST(cuda_adamw_matches_cpu)
{
    set_up();
    static lf_range ranges[4096];
    for (int32_t i = 0; i < 4 * (int32_t)LF_COUNT(cuts); i++) {
        lf_map *want, *map;
        make_maps_with(&want, &map, i % 2, i / 2 % 2);
        const int32_t n = cut_ranges(map, cuts[i / 4], ranges, LF_COUNT(ranges));
        lf_adamw *hyper = device(sizeof *hyper, 0);
        for (int32_t step = 1; step <= 3; step++) {
            lf_adamw h;
            CHECK_OK(lf_adamw_init(&h, 1e-3, 0.9, 0.99, step == 2 ? 0 : 1e-8, 0.1, step, 0.5));
            CHECK_OK(lf_copy(gpu, hyper, &h, sizeof h, NULL));
            CHECK_OK(lf_loom_adamw(want, NULL, ranges, n, &h));
            CHECK_OK(lf_loom_adamw(map, next_stream(), ranges, n, hyper));
            check_bytes("map after adamw", slab_of(map), slab_of(want), (size_t)lf_map_bytes(want));
        }
        release();
        lf_map_unref(want);
        lf_map_unref(map);
    }
}

TEST(cuda_sumsq_matches_cpu)
{
    set_up();
    static lf_range ranges[4096];
    for (int32_t i = 0; i < 2 * (int32_t)LF_COUNT(cuts); i++) {
        lf_map *want, *map;
        make_maps(&want, &map, i % 2);
        const int32_t n = cut_ranges(map, cuts[i / 2], ranges, LF_COUNT(ranges));
        double sum = -1, *out = device(2 * sizeof *out, 0xff);
        for (int32_t role = LF_ROLE_WEIGHT; role <= LF_ROLE_GRAD; role++) {
            CHECK_OK(lf_loom_sumsq(want, NULL, ranges, n, role, &sum));
            CHECK_OK(lf_loom_sumsq(map, next_stream(), ranges, n, role, out));
            CHECK_OK(lf_loom_sumsq(map, stream, ranges, n, role, out + 1));
            CHECK_OK(lf_stream_sync(stream));
            const double *got = down(out, 2 * sizeof *out);
            CHECK_NEAR(got[0], sum, 1e-12 * sum);
            CHECK(got[0] == got[1] && sum > 0);
        }
        CHECK_OK(lf_loom_sumsq(map, next_stream(), ranges, 0, LF_ROLE_GRAD, out));
        CHECK_OK(lf_stream_sync(stream));
        CHECK(*(double *)down(out, sizeof *out) == 0);
        release();
        lf_map_unref(want);
        lf_map_unref(map);
    }
}

static const lf__loom_kernels *kernels(void)
{
    const void *table = &lf__loom_cpu;
    if (!lf__device_is_cpu(gpu)) CHECK_OK(lf__device_kernels(gpu, "loom", &table));
    return table;
}

/* Planes that no map would lay out: each begins on another element, so that no access of 16 bytes fits. */
static void sweeps_take_any_alignment(int32_t moments)
{
    enum { N = 40000, PLANES = 5 };
    lf__loom_piece here = {.count = N - 4, /* what lies behind the last start, in elements of 2 bytes */
                           .weight_dtype = LF_DTYPE_BF16,
                           .grad_dtype = LF_DTYPE_BF16,
                           .moments_dtype = moments,
                           .klass = 1,
                           .first = 0x1fffff000},
                   there = here;
    char *base[PLANES], *copy[PLANES];
    for (int32_t i = 0; i < PLANES; i++) {
        const int32_t dtype = i < 2 ? LF_DTYPE_BF16 : i == 2 ? LF_DTYPE_F32 : moments;
        base[i] = host(N * width(dtype));
        for (int64_t j = 0; j < N; j++) put(base[i], j, dtype, uniform(i == 4 ? 0 : -1, 1));
        copy[i] = up(base[i], N * width(dtype));
    }
#define PLACE(piece, at)                                                                                                \
    (piece).weight = (at)[0] + 2, (piece).grad = (at)[1], (piece).master = (at)[2] + 12, (piece).exp_avg = (at)[3] + 4, \
    (piece).exp_avg_sq = (at)[4] + 8
    PLACE(here, base);
    PLACE(there, copy);
    lf_adamw h;
    CHECK_OK(lf_adamw_init(&h, 1e-3, 0.9, 0.99, 1e-8, 0.1, 3, 0.5));
    lf__loom_call call = {gpu->context, NULL, 1};
    static double partial[8];
    lf__loom_args want = {.sweep = {&here, 1, 3, &h, partial, NULL}},
                  args = {.sweep = {&there, 1, 3, up(&h, sizeof h), partial, NULL}};
    CHECK_OK(lf__loom_cpu_adamw(&call, &want));
    CHECK_OK(kernels()->adamw(&call, &args));
    for (int32_t i = 0; i < PLANES; i++)
        check_bytes("a plane", copy[i], base[i], N * (i < 2 ? 2u : i == 2 ? 4u : (unsigned)width(moments)));
    for (int32_t shift = 0; shift < 4; shift++) {
        double sum, *out = device(sizeof *out, 0xff);
        here.grad_dtype = there.grad_dtype = LF_DTYPE_F32;
        here.grad = base[2] + 2 * shift; /* halves of elements: never on 16 bytes */
        there.grad = copy[2] + 2 * shift;
        if (shift % 2) here.grad_dtype = there.grad_dtype = LF_DTYPE_BF16;
        want.sweep.out = &sum;
        args.sweep.out = out;
        CHECK_OK(lf__loom_cpu_sumsq(&call, &want));
        CHECK_OK(kernels()->sumsq(&call, &args));
        const double got = *(double *)down(out, sizeof *out);
        if (isfinite(sum)) CHECK_NEAR(got, sum, 1e-12 * sum);
        else CHECK(isnan(sum) ? isnan(got) : got == sum);
    }
    release();
}
TEST(cuda_sweeps_take_any_alignment)
{
    set_up();
    sweeps_take_any_alignment(LF_DTYPE_F32);
    sweeps_take_any_alignment(LF_DTYPE_BF16);
}

/* ---- clipping -------------------------------------------------------------------------------------------------------- */

TEST(cuda_clip_matches_cpu)
{
    set_up();
    static const double sums[] = {0, 9216, 1e-30, 3.3e20, (double)INFINITY, (double)NAN, 1e300},
                        limits[] = {1, 0.3, 1e9, 0, (double)INFINITY};
    for (size_t i = 0; i < LF_COUNT(sums) * LF_COUNT(limits); i++) {
        const double sum = sums[i / LF_COUNT(limits)], limit = limits[i % LF_COUNT(limits)];
        const int32_t n = i % 3 ? 1 : 71;
        lf_adamw *hyper = host((size_t)n * sizeof *hyper);
        for (int32_t j = 0; j < n; j++) CHECK_OK(lf_adamw_init(&hyper[j], 1e-3, 0.9, 0.99, 1e-8, 0.1, j + 1, 0.37 * (j + 1)));
        lf_adamw *on_gpu = up(hyper, (size_t)n * sizeof *hyper);
        float norm, *gpu_norm = device(sizeof norm, 0xa5);
        CHECK_OK(lf_loom_clip(cpu, NULL, &sum, limit, hyper, n, &norm));
        CHECK_OK(lf_loom_clip(gpu, next_stream(), up(&sum, sizeof sum), limit, on_gpu, n, gpu_norm));
        CHECK_OK(lf_stream_sync(stream));
        const float got = *(float *)down(gpu_norm, sizeof norm);
        CHECK(isnan(norm) ? isnan(got) : got == norm);
        const lf_adamw *after = down(on_gpu, (size_t)n * sizeof *hyper);
        for (int32_t j = 0; j < n; j++) {
            CHECK(isfinite(norm) ? after[j].grad_scale == hyper[j].grad_scale : isnan(after[j].grad_scale));
            CHECK(memcmp(&after[j], &hyper[j], offsetof(lf_adamw, grad_scale)) == 0);
        }
        release();
    }
}

TEST(cuda_adamw_skips_a_step_of_nan)
{
    set_up();
    static lf_range ranges[4096];
    for (int32_t i = 0; i < 2; i++) {
        lf_map *want, *map;
        make_maps(&want, &map, i);
        const int32_t n = cut_ranges(map, 3000, ranges, LF_COUNT(ranges));
        lf_adamw h;
        CHECK_OK(lf_adamw_init(&h, 1e-3, 0.9, 0.99, 1e-8, 0.1, 1, 1));
        h.grad_scale = (float)NAN;
        CHECK_OK(lf_loom_adamw(map, next_stream(), ranges, n, up(&h, sizeof h)));
        check_bytes("map after nothing", slab_of(map), slab_of(want), (size_t)lf_map_bytes(want));
        release();
        lf_map_unref(want);
        lf_map_unref(map);
    }
}

/* ---- add ------------------------------------------------------------------------------------------------------------- */

TEST(cuda_add_matches_cpu)
{
    set_up();
    static const int64_t counts[] = {0, 1, 7, 8, 9, 15, 8191, 8192, 8200, 50001};
    for (size_t i = 0; i < LF_COUNT(counts) * 64; i++) {
        const int64_t n = counts[i / 64];
        const float factor = -0.3f, *scale = i & 32 ? &factor : NULL;
        const int32_t dst_dtype = i & 1 ? LF_DTYPE_F32 : LF_DTYPE_BF16, src_dtype = i & 2 ? LF_DTYPE_F32 : LF_DTYPE_BF16;
        const int32_t accumulate = i & 4 ? 1 : 0;
        const int64_t at_dst = i & 8 ? 3 : 0, at_src = i & 16 ? 3 : 0; /* both: a head, then groups */
        const size_t wd = width(dst_dtype), ws = width(src_dtype);
        char *dst = host((size_t)(n + at_dst) * wd), *src = host((size_t)(n + at_src) * ws);
        for (int64_t j = 0; j < n + at_dst; j++) put(dst, j, dst_dtype, uniform(-1, 1));
        for (int64_t j = 0; j < n + at_src; j++) put(src, j, src_dtype, uniform(-1, 1));
        char *to = up(dst, (size_t)(n + at_dst) * wd), *from = up(src, (size_t)(n + at_src) * ws);
        void *want = dst + (size_t)at_dst * wd;
        CHECK_OK(lf_loom_add(cpu, NULL, want, dst_dtype, src + (size_t)at_src * ws, src_dtype, n, scale, accumulate));
        CHECK_OK(lf_loom_add(gpu, next_stream(), to + (size_t)at_dst * wd, dst_dtype, from + (size_t)at_src * ws, src_dtype, n,
                             up(scale, sizeof *scale), accumulate));
        check_bytes("dst", to, dst, (size_t)(n + at_dst) * wd);
        release();
    }
}

/* ---- graphs ---------------------------------------------------------------------------------------------------------- */

/* A step in small: router, routing with noise of a step in device memory, rows out and back, a norm, a loss,
 * their backwards, clipping, AdamW. */
typedef struct step {
    int64_t n, d;
    int32_t e, k;
    int64_t *token;
    lf_route_schedule *schedule;
    float *router, *logits, *prob_sum, *dweight, *dlogits, *drouter;
    void *workspace;
    lf_routing r;
    uint16_t *x, *xs, *y, *dxs, *dx, *sum, *normed;
    float *norm_weight, *rstd, *norm_dweight, *scores, *row_loss, *clip_norm;
    void *norm_workspace;
    double *loss;
    lf_map *map;
    lf_range ranges[8];
    int32_t n_ranges;
    lf_adamw *hyper;
    double *norm;
} step;

static void make_step(step *s)
{
    *s = (step){.n = 3000, .d = 256, .e = 16, .k = 2};
    const size_t n = (size_t)s->n, ne = n * 16 * 4, slots = n * 2 * 4, row = (size_t)s->d * 2;
    s->token = device(n * 8, 0);
    s->logits = device(ne, 1), s->dlogits = device(ne, 1), s->dweight = device(slots, 1);
    s->router = device(16 * (size_t)s->d * 4, 0), s->drouter = device(16 * (size_t)s->d * 4, 1);
    s->schedule = device(sizeof *s->schedule, 0), s->prob_sum = device(16 * 4, 1);
    s->workspace = device((size_t)lf_loom_router_workspace(s->n, s->e, s->d), 1);
    s->x = device(n * row, 0), s->y = device(n * row, 1), s->dx = device(n * row, 1);
    s->xs = device(2 * n * row, 1), s->dxs = device(2 * n * row, 1);
    s->sum = device(n * row, 1), s->normed = device(n * row, 1), s->rstd = device(n * 4, 1);
    s->norm_weight = device((size_t)s->d * 4, 0x3f), s->norm_dweight = device((size_t)s->d * 4, 1);
    s->norm_workspace = device((size_t)lf_loom_add_norm_workspace(s->n, s->d), 1);
    s->scores = device(ne, 1), s->row_loss = device(n * 4, 1), s->loss = device(8, 1), s->clip_norm = device(4, 1);
    s->r = (lf_routing){.size = sizeof s->r,
                        .expert = device(slots, 1),
                        .weight = device(slots, 1),
                        .prob = device(ne, 1),
                        .count = device(16 * 4, 1),
                        .offset = device(17 * 4, 1),
                        .row = device(slots, 1),
                        .slot = device(slots, 1)};
    lf_map *source;
    lf__rng_init(&rng, 3, 3, 3, 3);
    make_maps(&source, &s->map, 1);
    lf_map_unref(source);
    s->n_ranges = cut_ranges(s->map, 0, s->ranges, 8);
    s->hyper = device(sizeof *s->hyper, 0);
    s->norm = device(sizeof *s->norm, 1);
}

static void set_inputs(const step *s, int32_t number)
{
    lf__rng_init(&rng, (uint64_t)number, 1, 1, 1);
    int64_t *token = host((size_t)s->n * 8);
    const size_t router_bytes = (size_t)(s->e * s->d) * 4;
    float *router = host(router_bytes);
    const lf_route_schedule schedule = {number, number % 3 ? uniform(0.2f, 2) : 0, uniform(0.5f, 2)};
    uint16_t *x = host((size_t)(s->n * s->d) * 2);
    lf_adamw h;
    for (int64_t i = 0; i < s->n; i++) token[i] = lf__rng_below(&rng, 16);
    for (int64_t i = 0; i < s->e * s->d; i++) router[i] = uniform(-0.3f, 0.3f);
    for (int64_t i = 0; i < s->n * s->d; i++) x[i] = lf__bf16_from_f32(uniform(-2, 2));
    CHECK_OK(lf_adamw_init(&h, 1e-3, 0.9, 0.99, 1e-8, 0.1, number + 1, 0.5));
    CHECK_OK(lf_copy(gpu, s->token, token, (size_t)s->n * 8, NULL));
    CHECK_OK(lf_copy(gpu, s->router, router, router_bytes, NULL));
    CHECK_OK(lf_copy(gpu, s->schedule, &schedule, sizeof schedule, NULL));
    CHECK_OK(lf_copy(gpu, s->x, x, (size_t)(s->n * s->d) * 2, NULL));
    CHECK_OK(lf_copy(gpu, s->hyper, &h, sizeof h, NULL));
}

static lf_status queue_step(const step *s, lf_stream *on)
{
    const int32_t dtype = LF_DTYPE_BF16;
    lf_status rc;
    const lf_route_args args = {.size = sizeof args,
                                .logits = s->logits,
                                .token = s->token,
                                .schedule = s->schedule,
                                .n = s->n,
                                .seed = 5,
                                .e = s->e,
                                .k = s->k,
                                .layer = 3};
    LF_TRY(lf_loom_router(gpu, on, s->x, s->router, s->n, s->e, s->d, dtype, s->logits));
    LF_TRY(lf_loom_route(gpu, on, &args, &s->r, s->prob_sum));
    LF_TRY(lf_loom_sort(gpu, on, s->r.expert, s->n, s->e, s->k, &s->r)); /* the same again */
    LF_TRY(lf_loom_permute(gpu, on, &s->r, s->x, s->n, s->e, s->k, s->d, dtype, s->xs));
    LF_TRY(lf_loom_combine(gpu, on, &s->r, s->xs, s->n, s->e, s->k, s->d, dtype, s->y));
    LF_TRY(lf_loom_add_norm(gpu, on, s->x, s->y, s->norm_weight, 1e-6f, s->n, s->d, dtype, s->sum, s->normed, s->rstd));
    LF_TRY(lf_loom_add_norm_backward(gpu, on, s->sum, s->norm_weight, s->rstd, s->y, s->normed, s->n, s->d, dtype, s->normed,
                                     s->norm_dweight, 0, s->norm_workspace));
    LF_TRY(lf_copy(gpu, s->scores, s->logits, (size_t)(s->n * s->e) * 4, on));
    LF_TRY(lf_loom_cross_entropy(gpu, on, s->scores, s->token, s->n, s->e, s->e, LF_DTYPE_F32, s->row_loss, s->loss, 0, 1));
    LF_TRY(lf_loom_combine_backward(gpu, on, &s->r, s->xs, s->normed, s->n, s->e, s->k, s->d, dtype, s->dxs, s->dweight));
    LF_TRY(lf_loom_route_backward(gpu, on, &s->r, NULL, s->dweight, s->prob_sum, s->n, s->e, s->k, s->schedule, s->dlogits));
    LF_TRY(lf_loom_permute_backward(gpu, on, &s->r, s->dxs, s->n, s->e, s->k, s->d, dtype, s->dlogits, s->router, s->dx));
    LF_TRY(lf_loom_router_backward(gpu, on, s->dlogits, s->x, s->n, s->e, s->d, dtype, s->drouter, 0, s->workspace));
    LF_TRY(lf_loom_sumsq(s->map, on, s->ranges, s->n_ranges, LF_ROLE_GRAD, s->norm));
    LF_TRY(lf_loom_clip(gpu, on, s->norm, 0.5, s->hyper, 1, s->clip_norm));
    LF_TRY(lf_loom_adamw(s->map, on, s->ranges, s->n_ranges, s->hyper));
out:
    return rc;
}

static void check_same_step(const step *a, const step *b)
{
    const size_t row = (size_t)(a->n * a->d) * 2, slots = (size_t)(a->n * a->k) * 4;
    check_bytes("row", a->r.row, down(b->r.row, slots), slots);
    check_bytes("y", a->y, down(b->y, row), row);
    check_bytes("dx", a->dx, down(b->dx, row), row);
    check_bytes("dlogits", a->dlogits, down(b->dlogits, (size_t)a->n * 64), (size_t)a->n * 64);
    check_bytes("prob_sum", a->prob_sum, down(b->prob_sum, 64), 64);
    check_bytes("drouter", a->drouter, down(b->drouter, (size_t)a->d * 64), (size_t)a->d * 64);
    check_bytes("norm", a->norm, down(b->norm, 8), 8);
    check_bytes("normed", a->normed, down(b->normed, row), row);
    check_bytes("norm_dweight", a->norm_dweight, down(b->norm_dweight, (size_t)a->d * 4), (size_t)a->d * 4);
    check_bytes("scores", a->scores, down(b->scores, (size_t)a->n * 64), (size_t)a->n * 64);
    check_bytes("loss", a->loss, down(b->loss, 8), 8);
    check_bytes("clip_norm", a->clip_norm, down(b->clip_norm, 4), 4);
    check_bytes("map", slab_of(a->map), down(slab_of(b->map), (size_t)lf_map_bytes(b->map)), (size_t)lf_map_bytes(a->map));
}

/* A graph of `s` captured on `stream`. */
static void *capture(const step *s)
{
    begin_capture(stream);
    return end_capture(stream, queue_step(s, stream));
}

/* Captured once and replayed on new inputs and new values of AdamW, while the stream that was captured does other work. */
TEST(cuda_step_replays_as_a_graph)
{
    set_up();
    find_driver();
    lf_stream *other;
    CHECK_OK(lf_stream_open(gpu, 0, &other));
    step eager, replayed, noise;
    make_step(&eager);
    make_step(&replayed);
    make_step(&noise);
    set_inputs(&noise, 99);
    CHECK_OK(queue_step(&noise, stream)); /* kernels are loaded when first used */
    CHECK_OK(lf_stream_sync(stream));
    void *exec = capture(&replayed);
    for (int32_t i = 0; i < 20; i++) {
        set_inputs(&eager, i);
        set_inputs(&replayed, i);
        CHECK_EQ(driver.launch(exec, lf_stream_native(other)), 0);
        CHECK_OK(queue_step(&noise, stream));
        CHECK_OK(lf_stream_sync(other));
        CHECK_OK(lf_stream_sync(stream));
        CHECK_OK(queue_step(&eager, NULL));
        check_same_step(&replayed, &eager);
    }
    CHECK_EQ(driver.free_exec(exec), 0);
    for (int32_t i = 0; i < 100; i++) CHECK_EQ(driver.free_exec(capture(&replayed)), 0); /* scratch goes round */
    lf_stream_close(other);
    release();
    lf_map_unref(eager.map);
    lf_map_unref(replayed.map);
    lf_map_unref(noise.map);
}

LF_TEST_MAIN
