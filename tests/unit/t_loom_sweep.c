/* SPDX-License-Identifier: Apache-2.0 */
/* AdamW against PyTorch's numbers and a float64 reference; sums of squares; adding gradients. */
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
    lf__rng_init(&rng, 11, 1, 2, 3);
    CHECK_OK(lf_loom_set_threads(0));
}

static float uniform(float low, float high) { return low + (high - low) * (float)lf__rng_unit(&rng); }

typedef struct spec {
    int64_t count;
    int32_t dtype;
    uint32_t flags;
} spec;

static lf_map *make_map(const spec *specs, int32_t n, int32_t grad_f32)
{
    lf_map *map = NULL;
    lf_map_options opts;
    CHECK_OK(lf_options_init("map", &opts, sizeof opts));
    opts.grad_f32 = grad_f32;
    CHECK_OK(lf_map_open(&map, &opts));
    for (int32_t i = 0; i < n; i++) {
        char name[16];
        snprintf(name, sizeof name, "p%d", i);
        lf_param p = {.size = sizeof p,
                      .name = name,
                      .shape = &specs[i].count,
                      .ndim = 1,
                      .dtype = specs[i].dtype,
                      .layer = i,
                      .expert = -1,
                      .tied_to = -1,
                      .flags = specs[i].flags};
        CHECK_OK(lf_map_add(map, &p, NULL));
    }
    CHECK_OK(lf_map_plan(map));
    CHECK_OK(lf_map_allocate(map, cpu));
    return map;
}

static lf_range whole_class(const lf_map *map, int32_t klass)
{
    lf_class_info info = {.size = sizeof info};
    CHECK_OK(lf_map_get_class(map, klass, &info));
    return (lf_range){klass, 0, 0, info.count};
}

static void *plane(const lf_map *map, const lf_range *range, int32_t role)
{
    void *p = lf_map_address(map, range, role);
    CHECK(p != NULL);
    return p;
}

static int32_t role_dtype(const lf_map *map, int32_t klass, int32_t role)
{
    lf_class_info info = {.size = sizeof info};
    CHECK_OK(lf_map_get_class(map, klass, &info));
    return info.role_dtype[role];
}

static double get(const void *base, int64_t i, int32_t dtype)
{
    return dtype == LF_DTYPE_F32 ? (double)((const float *)base)[i] : (double)lf__f32_from_bf16(((const uint16_t *)base)[i]);
}

static void put(void *base, int64_t i, int32_t dtype, float v)
{
    if (dtype == LF_DTYPE_F32) ((float *)base)[i] = v;
    else ((uint16_t *)base)[i] = lf__bf16_from_f32(v);
}

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

static const spec mixed[] = {{3, LF_DTYPE_BF16, 0},
                             {70000, LF_DTYPE_BF16, 0},
                             {1, LF_DTYPE_F32, 0},
                             {50001, LF_DTYPE_F32, 0},
                             {1000, LF_DTYPE_BF16, 0},
                             {16384, LF_DTYPE_F32, 0},
                             {77, LF_DTYPE_F32, LF_PARAM_FROZEN}};

/* Values for every block (not the padding) from a fixed seed. */
static void fill_map(const lf_map *map)
{
    lf__rng_init(&rng, 5, 5, 5, 5);
    for (int32_t b = 0; b < lf_map_n_blocks(map); b++) {
        lf_block_info block = {.size = sizeof block};
        CHECK_OK(lf_map_get_block(map, b, &block));
        void *w = plane(map, &block.range, LF_ROLE_WEIGHT), *g = lf_map_address(map, &block.range, LF_ROLE_GRAD);
        float *master = lf_map_address(map, &block.range, LF_ROLE_MASTER);
        for (int64_t i = 0; i < block.range.count; i++) {
            float v = uniform(-2, 2);
            put(w, i, role_dtype(map, block.range.klass, LF_ROLE_WEIGHT), v);
            if (master) master[i] = v;
            if (g) put(g, i, role_dtype(map, block.range.klass, LF_ROLE_GRAD), uniform(-1, 1));
        }
    }
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

static int32_t trainable_ranges(const lf_map *map, lf_range *ranges)
{
    int32_t n = 0;
    for (int32_t c = 0; c < lf_map_n_classes(map); c++)
        if (role_dtype(map, c, LF_ROLE_GRAD)) ranges[n++] = whole_class(map, c);
    return n;
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
TEST(loom_adamw_same_bits_for_any_cut)
{
    set_up();
    lf_map *map[4];
    for (int32_t threads = 0; threads < 4; threads++) {
        lf_range whole[8], cut[64];
        int32_t n_cut = 0;
        map[threads] = make_map(mixed, LF_COUNT(mixed), 1);
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
