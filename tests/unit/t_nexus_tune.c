/* SPDX-License-Identifier: Apache-2.0 */
/* The chunk size: which one the tuner takes, from times that are made up; and schedules that change between steps, over the loopback. */
#include <math.h>

#include "base/base.h"
#include "lf_test.h"
#include "nexus/nexus_int.h"

enum { MOST = 4, N_LAYERS = 3, N_EXPERTS = 3, KIB = 1024 };

/* ---- the tuner, without clock and ranks -------------------------------------------------------------------------------- */

/* Seconds of a step, by the size's place and how many steps were made before it in all. */
typedef double (*time_fn)(int32_t size, int32_t step);

/* Steps until it is settled; -1: it never is. */
static int32_t play(nexus_tuner *t, time_fn time_of)
{
    double times[TUNE_TRIES];
    int32_t step = 0;
    for (; !t->settled && step < 1000; step++) {
        if (!lf__tuner_step(t)) continue;
        times[t->times - 1] = time_of(t->now, step);
        if (t->times == TUNE_TRIES) lf__tuner_take(t, lf__tuner_figure(times, TUNE_TRIES));
    }
    return t->settled ? step : -1;
}

enum { TRY = TUNE_SKIP + TUNE_TRIES };

static double third_is_best(int32_t size, int32_t step) { return (void)step, size == 2 ? 0.9 : size == 1 ? 0.95 : 1.0 + size; }
static double none_is_worth(int32_t size, int32_t step) { return (void)step, size == 0 ? 1.0 : 0.981; }
static double just_worth(int32_t size, int32_t step) { return (void)step, size == 0 ? 1.0 : 0.98; }
static double all_equal(int32_t size, int32_t step) { return (void)step, (void)size, 0.25; }

TEST(the_quickest_size_is_taken)
{
    nexus_tuner t;
    lf__tuner_init(&t, 16 * KIB, 4 * KIB, 256 * KIB);
    CHECK_EQ(t.n, 4);
    CHECK_EQ(play(&t, third_is_best), TUNE_START + 5 * TRY); /* four sizes, and the first once more */
    CHECK_EQ(t.now, 2);
    CHECK_EQ(t.bytes[t.now], 64 * KIB);
    CHECK_EQ(t.n_tried, 4);
    CHECK(!lf__tuner_step(&t)); /* it is over */
}

TEST(a_change_must_be_worth_it)
{
    nexus_tuner t;
    lf__tuner_init(&t, 16 * KIB, 4 * KIB, 256 * KIB);
    CHECK_EQ(play(&t, none_is_worth), TUNE_START + 4 * TRY);
    CHECK_EQ(t.now, 0);
    lf__tuner_init(&t, 16 * KIB, 4 * KIB, 256 * KIB);
    CHECK(play(&t, just_worth) > 0);
    CHECK_EQ(t.now, 1); /* of equal ones the first that was tried */
    lf__tuner_init(&t, 16 * KIB, 4 * KIB, 256 * KIB);
    CHECK(play(&t, all_equal) > 0);
    CHECK_EQ(t.now, 0);
}

/* A run that is slow at its start, whatever the size. */
static double warming_up(int32_t size, int32_t step) { return step < TUNE_START + TRY ? 3.0 : size == 0 ? 1.0 : 1.1; }

TEST(a_slow_start_is_not_the_first_sizes_fault)
{
    nexus_tuner t;
    lf__tuner_init(&t, 16 * KIB, 4 * KIB, 256 * KIB);
    CHECK_EQ(play(&t, warming_up), TUNE_START + 5 * TRY);
    CHECK_EQ(t.now, 0);
    CHECK_NEAR(t.seconds[0], 1.0, 0);
}

/* The first step of a size, and a few that something else delayed. */
static double with_hiccups(int32_t size, int32_t step)
{
    const int32_t of_try = (step - TUNE_START) % TRY;
    return (size == 1 ? 0.8 : 1.0) * (of_try == 0 || of_try % 3 == 1 ? 50.0 : 1.0);
}

TEST(delays_of_single_steps_change_nothing)
{
    nexus_tuner t;
    lf__tuner_init(&t, 16 * KIB, 4 * KIB, 256 * KIB);
    CHECK(play(&t, with_hiccups) > 0);
    CHECK_EQ(t.now, 1);
    CHECK_NEAR(t.seconds[1], 0.8, 1e-12);
}

static double no_time(int32_t size, int32_t step) { return (void)size, step % 2 ? NAN : 0.0; }
static double first_has_none(int32_t size, int32_t step) { return size == 0 ? no_time(size, step) : 1.0; }
static double others_have_none(int32_t size, int32_t step) { return size == 0 ? 1.0 : no_time(size, step); }

TEST(times_that_are_none_decide_nothing)
{
    double mixed[] = {NAN, 0, 3, -1, 1, INFINITY, 2}, even[] = {4, 1, 3, 2}, none[] = {NAN, 0, -2};
    CHECK_NEAR(lf__tuner_figure(mixed, 7), 2, 0);
    CHECK_NEAR(lf__tuner_figure(even, 4), 2.5, 0);
    CHECK(isinf(lf__tuner_figure(none, 3)));
    CHECK(isinf(lf__tuner_figure(none, 0)));
    static const time_fn all[] = {no_time, first_has_none, others_have_none};
    for (size_t i = 0; i < LF_COUNT(all); i++) {
        nexus_tuner t;
        lf__tuner_init(&t, 16 * KIB, 4 * KIB, 256 * KIB);
        CHECK(play(&t, all[i]) > 0);
        CHECK_EQ(t.now, 0);
    }
}

static void check_sizes(int64_t first, int64_t least, int64_t most, const int64_t *want, int32_t n)
{
    nexus_tuner t;
    lf__tuner_init(&t, first, least, most);
    CHECK_EQ(t.n, n);
    for (int32_t i = 0; i < t.n && i < n; i++) {
        CHECK_EQ(t.bytes[i], want[i]);
        CHECK(t.bytes[i] >= least && t.bytes[i] <= most);
    }
}

TEST(sizes_stay_within_the_bounds)
{
    check_sizes(16, 4, 256, (const int64_t[]){16, 4, 64, 256}, 4);
    check_sizes(20, 4, 100, (const int64_t[]){20, 4, 16, 64, 100}, 5);
    check_sizes(4, 4, 4, (const int64_t[]){4}, 1);
    check_sizes(5, 5, 6, (const int64_t[]){5, 6}, 2);
    nexus_tuner t;
    lf__tuner_init(&t, 16 << 20, 4096, 1ll << 40); /* the widest that options allow */
    CHECK(t.n < TUNE_SIZES);
    CHECK_EQ(t.bytes[t.n - 1], 1ll << 40);
}

/* ---- ranks as threads -------------------------------------------------------------------------------------------------- */

static lf_device *cpu;

static void add(lf_map *map, const char *name, int64_t count, int32_t layer, int32_t expert)
{
    const lf_param p = {.size = sizeof p,
                        .name = name,
                        .shape = &count,
                        .ndim = 1,
                        .dtype = LF_DTYPE_BF16,
                        .layer = layer,
                        .expert = expert,
                        .tied_to = -1};
    CHECK_OK(lf_map_add(map, &p, NULL));
}

static lf_map *make_map(void)
{
    lf_map *map = NULL;
    lf_map_options o;
    char name[64];
    CHECK_OK(lf_options_init("map", &o, sizeof o));
    o.grad_f32 = 1;
    o.high_load_experts = 1;
    CHECK_OK(lf_map_open(&map, &o));
    add(map, "embed", 9001, -1, -1);
    for (int32_t l = 0; l < N_LAYERS; l++) {
        snprintf(name, sizeof name, "l%d.qkv", l);
        add(map, name, 3100, l, -1);
        for (int32_t e = 0; e < N_EXPERTS; e++) {
            snprintf(name, sizeof name, "l%d.e%d", l, e);
            add(map, name, 2001 + 803 * e, l, e);
        }
    }
    CHECK_OK(lf_map_plan(map));
    CHECK_OK(lf_map_allocate(map, cpu));
    return map;
}

typedef struct rank {
    lf_transport t;
    lf_nexus_options opts;
    lf_status (*run)(struct rank *rank, lf_map *map, lf_nexus *nexus, lf_stream *stream);
    bool on_stream;
    int32_t steps;
    lf_status status;
    char text[600], wrong[200];
    lf_tuning_info tuning;
    lf__thread *thread;
} rank;

static rank ranks[MOST];
#define WRONG(...) snprintf(r->wrong, sizeof r->wrong, __VA_ARGS__)

static void enter(void *user)
{
    rank *r = user;
    lf_map *map = make_map();
    lf_nexus *nexus = NULL;
    lf_stream *stream = NULL;
    if (r->on_stream) r->status = lf_stream_open(cpu, 0, &stream);
    if (r->status == LF_OK) r->status = lf_nexus_open(&nexus, map, &r->t, &r->opts);
    if (r->status == LF_OK) r->status = r->run(r, map, nexus, stream);
    if (r->status < 0) snprintf(r->text, sizeof r->text, "%s", lf_error_text());
    r->tuning.size = sizeof r->tuning;
    if (nexus && lf_nexus_get_tuning(nexus, &r->tuning) < 0) WRONG("%s", lf_error_text());
    lf_stream_close(stream);
    if (nexus) lf_nexus_close(nexus);
    else r->t.close(r->t.user);
    lf_map_unref(map);
}

static void prepare(int32_t world, lf_status (*run)(rank *, lf_map *, lf_nexus *, lf_stream *))
{
    lf_transport ends[MOST];
    if (!cpu) CHECK_OK(lf_device_open(&cpu, "cpu"));
    CHECK_OK(lf_loopback_open(world, ends));
    for (int32_t i = 0; i < world; i++) {
        ranks[i] = (rank){.t = ends[i], .run = run};
        CHECK_OK(lf_options_init("nexus", &ranks[i].opts, sizeof ranks[i].opts));
        ranks[i].opts.chunk_bytes = 8192;
        ranks[i].opts.run_bytes = 32768;
        ranks[i].opts.timeout_s = 20;
        snprintf(ranks[i].opts.reduce, LF_TEXT_MAX, "sum");
    }
}

static void run_ranks(int32_t world)
{
    for (int32_t i = 0; i < world; i++) CHECK_OK(lf__thread_start(&ranks[i].thread, "rank", enter, &ranks[i]));
    for (int32_t i = 0; i < world; i++) lf__thread_join(ranks[i].thread);
    for (int32_t i = 0; i < world; i++) CHECK_STR(ranks[i].wrong, "");
}

static void run_well(int32_t world)
{
    run_ranks(world);
    for (int32_t i = 0; i < world; i++) {
        if (ranks[i].status < 0) fprintf(stderr, "rank %d: %s\n", i, ranks[i].text);
        CHECK_EQ(ranks[i].status, LF_OK);
    }
}

/* Not exact in f32: another order of ranks would show. */
static float grad_of(int32_t rank_, int32_t step, int64_t i)
{
    return (float)((rank_ * 131 + step * 71 + i * 37) % 10007 - 5003) / (float)(7 + 3 * rank_);
}

/* Where gradients are: from the front of the only class to the end of its last block. */
static lf_range trained(const lf_map *map)
{
    lf_range all = {0};
    for (int32_t b = 0; b < lf_map_n_blocks(map); b++) {
        lf_block_info info = {.size = sizeof info};
        CHECK_OK(lf_map_get_block(map, b, &info));
        CHECK_EQ(info.range.klass, 0);
        if (info.range.offset + info.range.count > all.count) all.count = info.range.offset + info.range.count;
    }
    return all;
}

static void check_sums(rank *r, const lf_map *map, const lf_range *part, int32_t step)
{
    const float *g = part->count ? lf_map_address(map, part, LF_ROLE_GRAD) : NULL;
    for (int64_t i = 0; i < part->count; i++) {
        float want = 0;
        for (int32_t s = 0; s < r->t.world; s++) want += grad_of(s, step, part->offset + i);
        if (g[i] != want)
            WRONG("rank %d step %d element %d: %.9g, expected %.9g", r->t.rank, step, (int)(part->offset + i), (double)g[i],
                  (double)want);
    }
}

static lf_status one_step(rank *r, lf_map *map, lf_nexus *nexus, int32_t step, lf_stream *stream)
{
    const lf_range all = trained(map);
    float *g = lf_map_address(map, &all, LF_ROLE_GRAD);
    lf_status rc = lf_nexus_begin(nexus);
    for (int64_t i = 0; i < all.count; i++) g[i] = grad_of(r->t.rank, step, i);
    for (int32_t b = lf_map_n_blocks(map) - 1; b >= 0 && rc == LF_OK; b--) rc = lf_nexus_mark(nexus, b, stream);
    if (rc == LF_OK) rc = lf_nexus_finish(nexus, stream);
    if (rc == LF_OK) rc = lf_stream_sync(stream);
    for (int32_t k = 0; k < lf_nexus_n_chunks(nexus) && rc == LF_OK; k++) { /* its own share, and the rest */
        lf_chunk_info c = {.size = sizeof c};
        rc = lf_nexus_get_chunk(nexus, k, &c);
        check_sums(r, map, &c.share, step);
        check_sums(r, map, &c.rest, step);
    }
    return rc;
}

/* Sums at each element are checked by the chunks, so these must hold all. */
static int64_t largest_chunk(rank *r, const lf_map *map, const lf_nexus *nexus)
{
    int64_t largest = 0, to = 0;
    for (int32_t k = 0; k < lf_nexus_n_chunks(nexus); k++) {
        lf_chunk_info c = {.size = sizeof c};
        CHECK_OK(lf_nexus_get_chunk(nexus, k, &c));
        CHECK_STR(c.form, "dense");
        if (c.range.offset + c.range.count > to) to = c.range.offset + c.range.count;
        if (c.bytes > largest) largest = c.bytes;
    }
    if (to < trained(map).count) WRONG("chunks end at element %lld", (long long)to);
    return largest;
}

static const int64_t sizes[] = {8192, 32768, 4096, 1ll << 40, 8192};

static lf_status change_sizes(rank *r, lf_map *map, lf_nexus *nexus, lf_stream *stream)
{
    int32_t chunks[LF_COUNT(sizes)];
    lf_status rc = LF_OK;
    for (int32_t i = 0; i < (int32_t)LF_COUNT(sizes) && rc == LF_OK; i++) {
        if (i > 0) rc = lf_nexus_retune(nexus, sizes[i], stream);
        if (rc < 0) return rc;
        chunks[i] = lf_nexus_n_chunks(nexus);
        const int64_t largest = largest_chunk(r, map, nexus);
        if (largest > sizes[i]) WRONG("a chunk of %lld bytes, chunk_bytes is %lld", (long long)largest, (long long)sizes[i]);
        for (int32_t s = 0; s < 2 && rc == LF_OK; s++) rc = one_step(r, map, nexus, 2 * i + s, stream);
    }
    if (chunks[1] >= chunks[0] || chunks[2] <= chunks[0] || chunks[3] >= chunks[1] || chunks[4] != chunks[0])
        WRONG("chunks: %d, %d, %d, %d, %d", chunks[0], chunks[1], chunks[2], chunks[3], chunks[4]);
    lf_nexus_stats stats = {.size = sizeof stats};
    int64_t bytes = 0;
    for (int32_t k = 0; k < chunks[0]; k++) {
        lf_chunk_info c = {.size = sizeof c};
        CHECK_OK(lf_nexus_get_chunk(nexus, k, &c));
        bytes += c.bytes * 2 * (int64_t)LF_COUNT(sizes);
    }
    if (rc == LF_OK) rc = lf_nexus_get_stats(nexus, &stats);
    if (stats.steps != 2 * (int64_t)LF_COUNT(sizes) || stats.bytes != bytes)
        WRONG("%lld steps, %lld bytes", (long long)stats.steps, (long long)stats.bytes);
    return rc;
}

TEST(sums_are_the_same_bits_with_every_size)
{
    for (int32_t world = 1; world <= MOST; world++)
        for (int32_t how = 0; how < 4; how++) { /* with a stream, with ranks that compare everything */
            prepare(world, change_sizes);
            for (int32_t i = 0; i < world; i++) {
                ranks[i].on_stream = how % 2;
                ranks[i].opts.debug = how / 2;
            }
            run_well(world);
            for (int32_t i = 0; i < world; i++) CHECK_EQ(ranks[i].tuning.chunk_bytes, 8192);
        }
}

/* What an optimizer leaves after step `step`: a rank writes its own share and the rest. */
static float state_of(int32_t role, int32_t step, int64_t i) { return (float)(role * 100003 + step * 1007 + i); }

static lf_status write_state(lf_map *map, const lf_nexus *nexus, int32_t step)
{
    for (int32_t k = 0; k < lf_nexus_n_chunks(nexus); k++) {
        lf_chunk_info c = {.size = sizeof c};
        lf_status rc = lf_nexus_get_chunk(nexus, k, &c);
        if (rc < 0) return rc;
        const lf_range *parts[] = {&c.share, &c.rest};
        for (int32_t p = 0; p < 2; p++)
            for (int32_t role = LF_ROLE_MASTER; role <= LF_ROLE_EXP_AVG_SQ && parts[p]->count; role++)
                for (int64_t i = 0; i < parts[p]->count; i++)
                    ((float *)lf_map_address(map, parts[p], role))[i] = state_of(role, step, parts[p]->offset + i);
    }
    return LF_OK;
}

/* Every rank has what any of them wrote. */
static void check_state(rank *r, const lf_map *map, int32_t step)
{
    for (int32_t b = 0; b < lf_map_n_blocks(map); b++)
        for (int32_t role = LF_ROLE_MASTER; role <= LF_ROLE_EXP_AVG_SQ; role++) {
            lf_block_info info = {.size = sizeof info};
            CHECK_OK(lf_map_get_block(map, b, &info));
            const float *have = lf_map_address(map, &info.range, role);
            for (int64_t i = 0; i < info.range.count; i++)
                if (have[i] != state_of(role, step, info.range.offset + i))
                    WRONG("rank %d %s of %s[%d] is %g", r->t.rank, lf_role_name(role), info.name, (int)i, (double)have[i]);
        }
}

static lf_status change_shares(rank *r, lf_map *map, lf_nexus *nexus, lf_stream *stream)
{
    lf_status rc = LF_OK;
    for (int32_t i = 0; i < (int32_t)LF_COUNT(sizes) && rc == LF_OK; i++) {
        rc = one_step(r, map, nexus, i, stream);
        if (rc == LF_OK) rc = write_state(map, nexus, i);
        if (rc == LF_OK) rc = lf_nexus_retune(nexus, sizes[(i + 1) % (int32_t)LF_COUNT(sizes)], stream);
        if (rc == LF_OK) check_state(r, map, i);
    }
    return rc;
}

TEST(shares_change_hands_with_their_state)
{
    for (int32_t world = 2; world <= MOST; world++)
        for (int32_t how = 0; how < 4; how++) {
            prepare(world, change_shares);
            for (int32_t i = 0; i < world; i++) {
                ranks[i].opts.shard_optimizer = 1;
                ranks[i].on_stream = how % 2;
                ranks[i].opts.debug = how / 2;
            }
            run_well(world);
        }
}

/* ---- refused ----------------------------------------------------------------------------------------------------------- */

static lf_status in_the_middle(rank *r, lf_map *map, lf_nexus *nexus, lf_stream *stream)
{
    lf_status rc = lf_nexus_begin(nexus);
    int32_t changed = 9;
    if (lf_nexus_retune(nexus, 32768, stream) != LF_ERR_STATE) WRONG("retuned in the middle of a step");
    if (rc == LF_OK) rc = lf_nexus_finish(nexus, stream);
    if (lf_nexus_retune(nexus, 4095, stream) != LF_ERR_INVALID) WRONG("chunk_bytes 4095");
    if (lf_nexus_retune(nexus, (1ll << 40) + 1, stream) != LF_ERR_INVALID) WRONG("chunk_bytes above 2^40");
    if (lf_nexus_tune_begin(nexus, stream) != LF_OK || lf_nexus_tune_end(nexus, stream, 1, &changed) != LF_OK || changed)
        WRONG("tuning that is off does something");
    return rc == LF_OK ? one_step(r, map, nexus, 1, stream) : rc; /* nothing of that has hurt */
}

TEST(a_step_keeps_its_schedule)
{
    prepare(2, in_the_middle);
    run_well(2);
    CHECK_STR(ranks[0].tuning.why, "chunk_tune is off");
    CHECK(ranks[0].tuning.settled);
}

static lf_status other_sizes(rank *r, lf_map *map, lf_nexus *nexus, lf_stream *stream)
{
    const lf_status rc = lf_nexus_retune(nexus, r->t.rank ? 32768 : 16384, stream);
    if (lf_nexus_begin(nexus) != rc) WRONG("the handle goes on");
    return (void)map, rc;
}

TEST(ranks_that_differ_are_told)
{
    prepare(2, other_sizes);
    run_ranks(2);
    for (int32_t i = 0; i < 2; i++) {
        CHECK_EQ(ranks[i].status, LF_ERR_PEER);
        CHECK_HAS(ranks[i].text, "changing chunk_bytes to");
        CHECK_HAS(ranks[i].text, "use different [nexus] options");
    }
}

static lf_status sparse_stays(rank *r, lf_map *map, lf_nexus *nexus, lf_stream *stream)
{
    const int32_t before = lf_nexus_n_chunks(nexus);
    lf_status rc = lf_nexus_retune(nexus, 32768, stream);
    if (rc != LF_ERR_UNSUPPORTED) WRONG("sparse chunks were cut anew");
    snprintf(r->text, sizeof r->text, "%s", lf_error_text());
    if (lf_nexus_n_chunks(nexus) != before) WRONG("the schedule has changed");
    return (void)map, lf_nexus_check(nexus);
}

TEST(sparse_chunks_are_not_tuned)
{
    prepare(2, sparse_stays);
    for (int32_t i = 0; i < 2; i++) {
        snprintf(ranks[i].opts.comm_strategy, LF_TEXT_MAX, "sparse");
        ranks[i].opts.chunk_tune = 1;
        ranks[i].opts.chunk_least = 4096;
    }
    run_ranks(2);
    for (int32_t i = 0; i < 2; i++) {
        CHECK_EQ(ranks[i].status, LF_OK);
        CHECK_HAS(ranks[i].text, "the chunk size cannot change: chunks in the sparse form");
        CHECK_HAS(ranks[i].tuning.why, "chunks in the sparse form");
        CHECK(ranks[i].tuning.settled && ranks[i].tuning.n_sizes == 0);
    }
}

static const char *residual_of(const rank *r, char path[300])
{
    snprintf(path, 300, "%s/residual.rank%d", lf_test_dir, r->t.rank);
    return path;
}

static lf_status step_unchecked(lf_map *map, lf_nexus *nexus, lf_stream *stream)
{
    lf_status rc = lf_nexus_begin(nexus);
    for (int32_t b = 0; b < lf_map_n_blocks(map) && rc == LF_OK; b++) rc = lf_nexus_mark(nexus, b, stream);
    return rc == LF_OK ? lf_nexus_finish(nexus, stream) : rc;
}

static lf_status leave_a_residual(rank *r, lf_map *map, lf_nexus *nexus, lf_stream *stream)
{
    char path[300], hash[33];
    const lf_range all = trained(map);
    float *g = lf_map_address(map, &all, LF_ROLE_GRAD);
    for (int64_t i = 0; i < all.count; i++) g[i] = grad_of(r->t.rank, 0, i);
    lf_status rc = step_unchecked(map, nexus, stream);
    return rc == LF_OK ? lf_nexus_residual_save(nexus, residual_of(r, path), hash) : rc;
}

static lf_status take_a_residual(rank *r, lf_map *map, lf_nexus *nexus, lf_stream *stream)
{
    char path[300];
    lf_status rc = lf_nexus_residual_load(nexus, residual_of(r, path), NULL);
    if (rc == LF_OK && lf_nexus_retune(nexus, 32768, stream) != LF_ERR_STATE) WRONG("cut anew over a residual");
    if (rc == LF_OK) rc = step_unchecked(map, nexus, stream);
    if (rc == LF_OK) rc = lf_nexus_retune(nexus, 32768, stream);
    return rc == LF_OK ? one_step(r, map, nexus, 1, stream) : rc;
}

TEST(a_residual_of_dense_chunks_goes_first)
{
    prepare(2, leave_a_residual);
    for (int32_t i = 0; i < 2; i++) snprintf(ranks[i].opts.comm_strategy, LF_TEXT_MAX, "sparse");
    run_well(2);
    prepare(2, take_a_residual);
    for (int32_t i = 0; i < 2; i++) snprintf(ranks[i].opts.comm_strategy, LF_TEXT_MAX, "dense");
    run_well(2);
}

TEST(a_schedule_alone_stays_as_it_is)
{
    if (!cpu) CHECK_OK(lf_device_open(&cpu, "cpu"));
    lf_map *map = make_map();
    lf_nexus *nexus;
    lf_tuning_info info = {.size = sizeof info};
    CHECK_OK(lf_nexus_open(&nexus, map, NULL, NULL));
    CHECK_STATUS(lf_nexus_retune(nexus, 32768, NULL), LF_ERR_STATE);
    CHECK_OK(lf_nexus_tune_begin(nexus, NULL));
    CHECK_OK(lf_nexus_get_tuning(nexus, &info));
    CHECK(info.settled && info.n_sizes == 0);
    CHECK_STR(info.why, "no transport");
    info.size--;
    CHECK_STATUS(lf_nexus_get_tuning(nexus, &info), LF_ERR_INVALID);
    lf_nexus_close(nexus);
    lf_map_unref(map);
}

/* ---- tuning ------------------------------------------------------------------------------------------------------------ */

static void tune(int32_t world, int64_t least, int64_t most)
{
    for (int32_t i = 0; i < world; i++) {
        ranks[i].opts.chunk_tune = 1;
        ranks[i].opts.chunk_least = least;
        ranks[i].opts.chunk_most = most;
    }
}

/* Every third step does not count. */
static lf_status tuned_steps(rank *r, lf_map *map, lf_nexus *nexus, lf_stream *stream)
{
    lf_tuning_info info = {.size = sizeof info};
    int32_t changed = 0, counted = 0;
    lf_status rc = lf_nexus_tune_end(nexus, stream, 1, &changed);
    if (rc != LF_ERR_STATE) WRONG("the end of a step that did not begin");
    for (rc = LF_OK; rc == LF_OK && !info.settled && r->steps < 500; r->steps++) {
        const int32_t before = lf_nexus_n_chunks(nexus);
        const bool counts = r->steps % 3 != 2;
        rc = lf_nexus_tune_begin(nexus, stream);
        if (rc == LF_OK) rc = one_step(r, map, nexus, r->steps, stream);
        if (rc == LF_OK) rc = lf_nexus_tune_end(nexus, stream, counts, &changed);
        if (rc == LF_OK) rc = lf_nexus_get_tuning(nexus, &info);
        if (changed != (lf_nexus_n_chunks(nexus) != before)) WRONG("step %d: changed is %d", r->steps, changed);
        counted += counts;
        const bool end = counted >= TUNE_START + TRY && (counted - TUNE_START) % TRY == 0;
        if (rc == LF_OK && changed && (!end || !counts)) WRONG("a change after %d steps that count", counted);
    }
    if (rc == LF_OK && counted != TUNE_START + 4 * TRY && counted != TUNE_START + 5 * TRY)
        WRONG("settled after %d steps", counted);
    return rc == LF_OK ? one_step(r, map, nexus, r->steps, stream) : rc;
}

TEST(ranks_settle_on_one_size_in_one_step)
{
    for (int32_t world = 2; world <= MOST; world += 2)
        for (int32_t how = 0; how < 3; how++) { /* plain, on a stream, in shares */
            prepare(world, tuned_steps);
            tune(world, 4096, 1 << 20);
            for (int32_t i = 0; i < world; i++) {
                ranks[i].on_stream = how == 1;
                ranks[i].opts.shard_optimizer = how == 2;
            }
            run_well(world);
            for (int32_t i = 0; i < world; i++) {
                const lf_tuning_info *t = &ranks[i].tuning;
                CHECK(t->settled);
                CHECK_EQ(t->n_sizes, 4); /* 8, 4, 16 and 64 KiB: that is one piece */
                CHECK_EQ(t->n_tried, 4);
                CHECK_EQ(t->first_bytes, 8192);
                CHECK_EQ(t->chunk_bytes, ranks[0].tuning.chunk_bytes);
                CHECK(t->chunk_bytes >= 4096 && t->chunk_bytes <= 65536);
                CHECK(t->chunk_s > 0 && t->chunk_s <= t->first_s);
                CHECK_NEAR(t->chunk_s, ranks[0].tuning.chunk_s, 0);
                CHECK_EQ(ranks[i].steps, ranks[0].steps);
                CHECK_STR(t->why, "");
            }
        }
}

static lf_status given_by_hand(rank *r, lf_map *map, lf_nexus *nexus, lf_stream *stream)
{
    lf_status rc = lf_nexus_tune_begin(nexus, stream);
    if (rc == LF_OK) rc = lf_nexus_retune(nexus, 16384, stream);
    return rc == LF_OK ? one_step(r, map, nexus, 0, stream) : rc;
}

TEST(a_size_given_by_hand_ends_tuning)
{
    prepare(2, given_by_hand);
    tune(2, 4096, 1 << 20);
    run_well(2);
    CHECK(ranks[0].tuning.settled);
    CHECK_EQ(ranks[0].tuning.chunk_bytes, 16384);
    CHECK_HAS(ranks[0].tuning.why, "given a size");
}

static lf_status one(rank *r, lf_map *map, lf_nexus *nexus, lf_stream *stream) { return one_step(r, map, nexus, 0, stream); }

TEST(nothing_to_try_is_said)
{
    prepare(1, one);
    tune(1, 4096, 1 << 20);
    run_well(1);
    CHECK_STR(ranks[0].tuning.why, "one rank sends nothing");
    prepare(2, one);
    tune(2, 1 << 20, 4 << 20);
    for (int32_t i = 0; i < 2; i++) ranks[i].opts.chunk_bytes = 1 << 20;
    run_well(2);
    CHECK_HAS(ranks[0].tuning.why, "cut the same chunks");
    CHECK(ranks[0].tuning.settled);
}

TEST(bounds_must_hold_the_first_size)
{
    prepare(2, one);
    tune(2, 16384, 1 << 20);
    run_ranks(2);
    CHECK_EQ(ranks[0].status, LF_ERR_INVALID);
    CHECK_HAS(ranks[0].text, "chunk_bytes is 8192, expected chunk_least 16384 to chunk_most 1048576");
    prepare(2, one);
    tune(2, 4096, 1 << 20);
    ranks[1].opts.chunk_most = 1 << 21;
    run_ranks(2);
    CHECK_EQ(ranks[0].status, LF_ERR_PEER);
    CHECK_HAS(ranks[0].text, "chunk_tune 1 (4096 to 1048576)");
}

TEST(the_device_is_given_back)
{
    lf_device_close(cpu);
    cpu = NULL;
}

LF_TEST_MAIN
