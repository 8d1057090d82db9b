/* SPDX-License-Identifier: Apache-2.0 */
/* AdamW against PyTorch's numbers and a float64 reference; moments in bf16. */
#include "sweep_fixture.h"

/* ---- AdamW ----------------------------------------------------------------------------------------------------------- */

/* torch 2.11, torch.optim.AdamW(lr=3e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, foreach=False) on the same start and
 * gradients. A unit or two in the last place is left for its vector lerp, which fuses. */
TEST(loom_adamw_follows_pytorch)
{
    set_up();
    enum { N = 6 };
    static const struct {
        int32_t step;
        float p[N], m[N], v[N];
    } torch_says[] = {
        {1,
         {0x1.ffad7p-2f, -0x1.3fe9e2p+0f, 0x1.3a929ep-12f, 0x1.8006e2p+1f, -0x1.54c782p-10f, 0x1.8ffcap+6f},
         {0x1.2d7732p-17f, -0x1.b645a4p-13f, -0x1.4cccccep-8f, -0x1.4a6666p-4f, 0x1.bbp-1f, 0x1.6a8p+2f},
         {0x1.1c0136p-37f, 0x1.2c20f4p-28f, 0x1.5a1cacp-19f, 0x1.552354p-11f, 0x1.32a39ap-4f, 0x1.9aa502p+1f}},
        {2,
         {0x1.ffddd6p-2f, -0x1.3ff09ap+0f, 0x1.0daa84p-11f, 0x1.800da2p+1f, -0x1.a2e20cp-10f, 0x1.8ff94cp+6f},
         {-0x1.306a2ap-14f, 0x1.8cb298p-12f, -0x1.400002p-8f, -0x1.157ae2p-3f, 0x1.85d99ap+0f, 0x1.a4p+2f},
         {0x1.6a246ap-31f, 0x1.390eb8p-25f, 0x1.5b139ep-19f, 0x1.12151cp-10f, 0x1.0a92cp-3f, 0x1.b5b322p+1f}},
        {50,
         {0x1.fe1738p-2f, -0x1.3fa486p+0f, -0x1.cefad2p-13f, 0x1.7f87e6p+1f, -0x1.a9ee34p-9f, 0x1.8f65ccp+6f},
         {-0x1.ba3e52p-17f, 0x1.197a2cp-11f, -0x1.255aacp-13f, -0x1.c4edb6p-5f, -0x1.eb1584p-3f, 0x1.49f5ecp+2f},
         {0x1.0aea38p-26f, 0x1.98ea8ep-20f, 0x1.489a42p-13f, 0x1.f601b2p-7f, 0x1.a05e9ep+0f, 0x1.305e7ap+7f}},
    };
    lf_map *map = make_map(&(spec){N, LF_DTYPE_F32, 0}, 1, 1);
    lf_range range = whole_class(map, 0);
    float *p = plane(map, &range, LF_ROLE_WEIGHT), *g = plane(map, &range, LF_ROLE_GRAD);
    const float *m = plane(map, &range, LF_ROLE_EXP_AVG), *v = plane(map, &range, LF_ROLE_EXP_AVG_SQ);
    memcpy(p, (const float[N]){0.5f, -1.25f, 0, 3, -0.001f, 100}, N * sizeof *p);
    for (int32_t s = 1, at = 0; s <= 50; s++) {
        lf_adamw hyper;
        for (int32_t i = 0; i < N; i++) g[i] = (float)((s * (i + 3) * 7919 % 1009 - 504) / 512.0 * pow(10, i - 3));
        CHECK_OK(lf_adamw_init(&hyper, 3e-4, 0.9, 0.999, 1e-8, 0.1, s, 1));
        CHECK_OK(lf_loom_adamw(map, NULL, &range, 1, &hyper));
        if (torch_says[at].step != s) continue;
        for (int32_t i = 0; i < N; i++) {
            CHECK_NEAR(p[i], torch_says[at].p[i], 3e-7 * fabsf(torch_says[at].p[i]) + 1e-9 * s);
            CHECK_NEAR(m[i], torch_says[at].m[i], 3e-7 * fabsf(torch_says[at].m[i]) + 1e-6 * pow(10, i - 3));
            CHECK_NEAR(v[i], torch_says[at].v[i], 1e-6 * fabsf(torch_says[at].v[i]));
        }
        at++;
    }
    lf_map_unref(map);
}

/* One element after `steps` steps on the same gradient, in doubles. */
static void reference(double *p, double *m, double *v, double g, int32_t steps)
{
    *m = *v = 0;
    for (int32_t s = 1; s <= steps; s++) {
        *p *= 1 - 1e-3 * 0.1;
        *m += (1 - 0.9) * (g - *m);
        *v = 0.99 * *v + (1 - 0.99) * g * g;
        *p -= 1e-3 / (1 - pow(0.9, s)) * *m / (sqrt(*v) / sqrt(1 - pow(0.99, s)) + 1e-8);
    }
}

static void sweep(lf_map *map, lf_stream *stream, const lf_range *ranges, int32_t n, int32_t steps)
{
    for (int32_t s = 1; s <= steps; s++) {
        lf_adamw hyper; /* read when the work runs, so it must live until the sync */
        CHECK_OK(lf_adamw_init(&hyper, 1e-3, 0.9, 0.99, 1e-8, 0.1, s, 0.5));
        CHECK_OK(lf_loom_adamw(map, stream, ranges, n, &hyper));
        CHECK_OK(lf_stream_sync(stream));
    }
}

static void check_block(const lf_map *map, const lf_map *before, int32_t b)
{
    lf_block_info block = {.size = sizeof block};
    CHECK_OK(lf_map_get_block(map, b, &block));
    const int32_t wd = role_dtype(map, block.range.klass, LF_ROLE_WEIGHT);
    const void *w = plane(map, &block.range, LF_ROLE_WEIGHT), *w0 = plane(before, &block.range, LF_ROLE_WEIGHT);
    if (block.flags & LF_PARAM_FROZEN) {
        CHECK(memcmp(w, w0, (size_t)block.range.count * lf_dtype_bytes(wd)) == 0);
        return;
    }
    const int32_t gd = role_dtype(map, block.range.klass, LF_ROLE_GRAD);
    const float *master = lf_map_address(map, &block.range, LF_ROLE_MASTER),
                *master0 = lf_map_address(before, &block.range, LF_ROLE_MASTER);
    const float *m = plane(map, &block.range, LF_ROLE_EXP_AVG), *v = plane(map, &block.range, LF_ROLE_EXP_AVG_SQ);
    const void *g = plane(map, &block.range, LF_ROLE_GRAD);
    CHECK((master != NULL) == (wd == LF_DTYPE_BF16));
    for (int64_t i = 0; i < block.range.count; i++) {
        double p = master ? (double)master0[i] : get(w0, i, wd), em, ev;
        reference(&p, &em, &ev, 0.5 * get(g, i, gd), 3);
        CHECK_NEAR(master ? (double)master[i] : get(w, i, wd), p, 1e-6);
        CHECK_NEAR(m[i], em, 1e-6);
        CHECK_NEAR(v[i], ev, 1e-6);
        if (master) CHECK_EQ(((const uint16_t *)w)[i], lf__bf16_from_f32(master[i]));
    }
}

static void check_padding(const lf_map *map, int32_t klass)
{
    lf_range range = whole_class(map, klass);
    uint8_t *used = lf__alloc((size_t)range.count);
    for (int32_t b = 0; b < lf_map_n_blocks(map); b++) {
        lf_block_info block = {.size = sizeof block};
        CHECK_OK(lf_map_get_block(map, b, &block));
        if (block.range.klass == klass) memset(used + block.range.offset, 1, (size_t)block.range.count);
    }
    for (int32_t role = 0; role < LF_N_ROLES; role++) {
        const void *p = lf_map_address(map, &range, role);
        for (int64_t i = 0; p && i < range.count; i++)
            if (!used[i]) CHECK(get(p, i, role_dtype(map, klass, role)) == 0);
    }
    lf__free(used);
}

TEST(loom_adamw_matches_float64)
{
    set_up();
    for (int32_t grad_f32 = 0; grad_f32 <= 1; grad_f32++) {
        lf_map *map = make_map(mixed, LF_COUNT(mixed), grad_f32), *before = make_map(mixed, LF_COUNT(mixed), grad_f32);
        lf_range ranges[8];
        int32_t n = trainable_ranges(map, ranges);
        CHECK_EQ(n, 2);
        fill_map(map);
        fill_map(before);
        sweep(map, grad_f32 ? worker : NULL, ranges, n, 3);
        for (int32_t b = 0; b < (int32_t)LF_COUNT(mixed); b++) check_block(map, before, b);
        for (int32_t c = 0; c < lf_map_n_classes(map); c++) check_padding(map, c);
        lf_map_unref(map);
        lf_map_unref(before);
    }
}

/* Ranges cut anywhere, any threads: the same bits as whole classes. */
static void same_bits_for_any_cut(int32_t moments_bf16)
{
    lf_map *map[4];
    for (int32_t threads = 0; threads < 4; threads++) {
        lf_range whole[8], cut[64];
        int32_t n_cut = 0;
        map[threads] = make_map_with(mixed, LF_COUNT(mixed), 1, moments_bf16);
        int32_t n = trainable_ranges(map[threads], whole);
        fill_map(map[threads]);
        CHECK_OK(lf_loom_set_threads(threads));
        for (int32_t r = 0; r < n; r++)
            for (int64_t at = 0, count; at < whole[r].count; at += count) {
                count = threads == 0 ? whole[r].count : 1 + lf__rng_below(&rng, 30000);
                if (count > whole[r].count - at) count = whole[r].count - at;
                cut[n_cut++] = (lf_range){whole[r].klass, 0, at, count};
                if (threads == 2) cut[n_cut++] = (lf_range){whole[r].klass, 0, at, 0}; /* empty ones are allowed */
            }
        CHECK(n_cut < 64);
        sweep(map[threads], NULL, cut, n_cut, 2);
        CHECK(lf_map_bytes(map[0]) == lf_map_bytes(map[threads]));
        lf_range first = {0, 0, 0, 1};
        CHECK(memcmp(plane(map[0], &first, LF_ROLE_WEIGHT), plane(map[threads], &first, LF_ROLE_WEIGHT),
                     (size_t)lf_map_bytes(map[0])) == 0);
    }
    for (int32_t threads = 0; threads < 4; threads++) lf_map_unref(map[threads]);
}
TEST(loom_adamw_same_bits_for_any_cut)
{
    set_up();
    same_bits_for_any_cut(0);
    same_bits_for_any_cut(1);
}

/* ---- moments in bf16 -------------------------------------------------------------------------------------------------- */

/* How far a stored moment lies from what was to be stored, in units of bf16's last place: within (-1, 1), or it is no neighbour. */
static double moved(uint16_t stored, float exact)
{
    uint32_t bits;
    memcpy(&bits, &exact, sizeof bits);
    const uint16_t below = (uint16_t)(bits >> 16); /* towards 0 */
    if (lf__f32_from_bf16(below) == exact) {
        CHECK_EQ(stored, below);
        return 0;
    }
    CHECK(stored == below || stored == (uint16_t)(below + 1));
    const double low = (double)lf__f32_from_bf16(below), unit = (double)lf__f32_from_bf16((uint16_t)(below + 1)) - low;
    return ((double)lf__f32_from_bf16(stored) - (double)exact) / unit;
}

/* The update is that of moments in f32; what is stored are neighbours, on average what was to be stored. */
TEST(loom_adamw_rounds_moments_to_a_neighbour)
{
    set_up();
    enum { N = 60000 };
    const spec one = {N, LF_DTYPE_F32, 0};
    lf_map *exact = make_map(&one, 1, 1), *map = make_map_with(&one, 1, 1, 1);
    const lf_range range = {0, 0, 0, N};
    float *m = plane(exact, &range, LF_ROLE_EXP_AVG), *v = plane(exact, &range, LF_ROLE_EXP_AVG_SQ);
    uint16_t *bm = plane(map, &range, LF_ROLE_EXP_AVG), *bv = plane(map, &range, LF_ROLE_EXP_AVG_SQ);
    CHECK_EQ(role_dtype(map, 0, LF_ROLE_EXP_AVG), LF_DTYPE_BF16);
    fill_map(exact);
    fill_map(map);
    for (int32_t i = 0; i < N; i++) {
        bm[i] = lf__bf16_from_f32(uniform(-1, 1));
        bv[i] = lf__bf16_from_f32(uniform(0, 1));
        m[i] = lf__f32_from_bf16(bm[i]);
        v[i] = lf__f32_from_bf16(bv[i]);
    }
    lf_adamw hyper;
    CHECK_OK(lf_adamw_init(&hyper, 1e-3, 0.9, 0.999, 1e-8, 0.1, 7, 0.5));
    CHECK_OK(lf_loom_adamw(exact, NULL, &range, 1, &hyper));
    CHECK_OK(lf_loom_adamw(map, NULL, &range, 1, &hyper));
    CHECK(memcmp(plane(exact, &range, LF_ROLE_WEIGHT), plane(map, &range, LF_ROLE_WEIGHT), N * sizeof(float)) == 0);
    double sum[3] = {0};
    for (int32_t i = 0; i < N; i++) {
        const double a = moved(bm[i], m[i]), b = moved(bv[i], v[i]);
        sum[0] += a;
        sum[1] += b;
        sum[2] += a * b;
    }
    for (int32_t i = 0; i < 3; i++) CHECK_NEAR(sum[i] / N, 0, 5 * 0.41 / sqrt(N)); /* a draw's deviation: at most sqrt(1/6) */
    lf_map_unref(exact);
    lf_map_unref(map);
}

/* Rounded to nearest, exp_avg_sq would never move: a step of 1/1000 of it is less than half a unit. */
TEST(loom_adamw_bf16_moments_follow_the_gradient)
{
    set_up();
    enum { N = 512, STEPS = 3000 };
    const spec one = {N, LF_DTYPE_F32, 0};
    lf_map *map = make_map_with(&one, 1, 1, 1);
    const lf_range range = {0, 0, 0, N};
    float *g = plane(map, &range, LF_ROLE_GRAD);
    const uint16_t *m = plane(map, &range, LF_ROLE_EXP_AVG);
    uint16_t *v = plane(map, &range, LF_ROLE_EXP_AVG_SQ);
    for (int32_t i = 0; i < N; i++) {
        g[i] = 3;
        v[i] = lf__bf16_from_f32(2);
    }
    for (int32_t s = 1; s <= STEPS; s++) {
        lf_adamw hyper;
        CHECK_OK(lf_adamw_init(&hyper, 1e-3, 0.9, 0.999, 1e-8, 0, s, 1));
        CHECK_OK(lf_loom_adamw(map, NULL, &range, 1, &hyper));
    }
    double mean[2] = {0};
    for (int32_t i = 0; i < N; i++) {
        mean[0] += (double)lf__f32_from_bf16(m[i]) / N;
        mean[1] += (double)lf__f32_from_bf16(v[i]) / N;
    }
    CHECK_NEAR(mean[0], 3, 0.01);
    CHECK_NEAR(mean[1], 9 - 7 * pow(0.999, STEPS), 0.05);
    lf_map_unref(map);
}

/* Another step draws anew; the same one does not. What is not finite stays as it is. */
TEST(loom_adamw_draws_by_step)
{
    set_up();
    enum { N = 5000 };
    const spec one = {N, LF_DTYPE_F32, 0};
    lf_map *map[3];
    const lf_range range = {0, 0, 0, N};
    for (int32_t k = 0; k < 3; k++) {
        lf_adamw hyper;
        map[k] = make_map_with(&one, 1, 1, 1);
        fill_map(map[k]);
        float *g = plane(map[k], &range, LF_ROLE_GRAD);
        g[0] = INFINITY;
        g[1] = (float)NAN;
        CHECK_OK(lf_adamw_init(&hyper, 1e-3, 0.9, 0.999, 1e-8, 0.1, 5, 1));
        CHECK_EQ(hyper.step, 5);
        hyper.step += k == 2;
        CHECK_OK(lf_loom_adamw(map[k], NULL, &range, 1, &hyper));
        const uint16_t *m = plane(map[k], &range, LF_ROLE_EXP_AVG);
        CHECK(lf__f32_from_bf16(m[0]) == INFINITY && isnan(lf__f32_from_bf16(m[1])));
    }
    for (int32_t role = LF_ROLE_EXP_AVG; role <= LF_ROLE_EXP_AVG_SQ; role++) {
        const uint16_t *a = plane(map[0], &range, role), *b = plane(map[1], &range, role), *c = plane(map[2], &range, role);
        int32_t other = 0;
        for (int32_t i = 0; i < N; i++) other += a[i] != c[i];
        CHECK(memcmp(a, b, N * sizeof *a) == 0);
        CHECK(other > N / 4 && other < N / 2); /* a third: twice the chance of one draw, and not the other */
    }
    for (int32_t k = 0; k < 3; k++) lf_map_unref(map[k]);
}

/* ---- edges ----------------------------------------------------------------------------------------------------------- */

TEST(loom_adamw_without_eps_keeps_padding_zero)
{
    set_up();
    lf_map *map = make_map(&(spec){10, LF_DTYPE_F32, 0}, 1, 1);
    lf_range range = whole_class(map, 0);
    float *p = plane(map, &range, LF_ROLE_WEIGHT), *g = plane(map, &range, LF_ROLE_GRAD);
    lf_adamw hyper;
    p[0] = p[1] = 1;
    g[0] = 2;
    CHECK_OK(lf_adamw_init(&hyper, 0.125, 0.9, 0.99, 0, 0.5, 1, 1));
    CHECK_OK(lf_loom_adamw(map, NULL, &range, 1, &hyper));
    CHECK_NEAR(p[0], 1 - 0.125 * 0.5 - 0.125, 1e-6);
    CHECK_NEAR(p[1], 1 - 0.125 * 0.5, 1e-7); /* no gradient: decays only */
    check_padding(map, 0);
    g[3] = (float)NAN; /* a NaN is passed on, not hidden */
    CHECK_OK(lf_loom_adamw(map, NULL, &range, 1, &hyper));
    CHECK(isnan(p[3]) && !isnan(p[2]));
    lf_map_unref(map);
}

TEST(loom_adamw_refuses)
{
    set_up();
    lf_map *map = make_map(mixed, LF_COUNT(mixed), 1), *bare = NULL;
    lf_adamw hyper;
    CHECK_OK(lf_adamw_init(&hyper, 1e-3, 0.9, 0.99, 1e-8, 0.1, 1, 1));
    lf_range range = whole_class(map, 0);
    range.count++;
    CHECK_STATUS(lf_loom_adamw(map, NULL, &range, 1, &hyper), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "expected inside");
    CHECK_STATUS(lf_loom_adamw(map, NULL, &(lf_range){99, 0, 0, 1}, 1, &hyper), LF_ERR_INVALID);
    CHECK_STATUS(lf_loom_adamw(map, NULL, &(lf_range){0, 0, -1, 1}, 1, &hyper), LF_ERR_INVALID);
    CHECK_STATUS(lf_loom_adamw(map, NULL, &range, 1, NULL), LF_ERR_INVALID);
    for (int32_t c = 0; c < lf_map_n_classes(map); c++) {
        if (role_dtype(map, c, LF_ROLE_GRAD)) continue;
        CHECK_STATUS(lf_loom_adamw(map, NULL, &(lf_range){c, 0, 0, 1}, 1, &hyper), LF_ERR_INVALID);
        CHECK_HAS(lf_error_text(), "frozen");
    }
    CHECK_OK(lf_map_open(&bare, NULL));
    CHECK_STATUS(lf_loom_adamw(bare, NULL, &range, 1, &hyper), LF_ERR_STATE);
    lf_map_unref(bare);
    lf_map_unref(map);
    map = make_map(&(spec){10, LF_DTYPE_F16, 0}, 1, 1);
    CHECK_STATUS(lf_loom_adamw(map, NULL, &(lf_range){0, 0, 0, 1}, 1, &hyper), LF_ERR_UNSUPPORTED);
    CHECK_HAS(lf_error_text(), "f16");
    lf_map_unref(map);
    lf_map_options opts;
    CHECK_OK(lf_options_init("map", &opts, sizeof opts));
    opts.optimizer_state = 0;
    CHECK_OK(lf_map_open(&map, &opts));
    lf_param p = {.size = sizeof p, .name = "a", .dtype = LF_DTYPE_F32, .expert = -1, .tied_to = -1};
    CHECK_OK(lf_map_add(map, &p, NULL));
    CHECK_OK(lf_map_plan(map));
    CHECK_OK(lf_map_allocate(map, cpu));
    CHECK_STATUS(lf_loom_adamw(map, NULL, &(lf_range){0, 0, 0, 1}, 1, &hyper), LF_ERR_STATE);
    CHECK_HAS(lf_error_text(), "no moments");
    lf_map_unref(map);
    CHECK_STATUS(lf_adamw_init(&hyper, -1, 0.9, 0.99, 1e-8, 0.1, 1, 1), LF_ERR_INVALID);
    CHECK_STATUS(lf_adamw_init(&hyper, 1, 1, 0.99, 1e-8, 0.1, 1, 1), LF_ERR_INVALID);
    CHECK_STATUS(lf_adamw_init(&hyper, 1, 0.9, 0.99, 1e-8, 0.1, 0, 1), LF_ERR_INVALID);
    CHECK_STATUS(lf_adamw_init(&hyper, 1, 0.9, 0.99, 1e-8, 0.1, 1, (double)INFINITY), LF_ERR_INVALID);
}

TEST(loom_closes)
{
    lf_stream_close(worker);
    lf_device_close(cpu);
}

LF_TEST_MAIN
