/* SPDX-License-Identifier: Apache-2.0 */
/* The chooser: forms by a link that is told, that is measured, that is not known; the model's break-even. */
#include "base/base.h"
#include "lf_test.h"
#include "nexus/nexus_int.h"

enum { RANKS = 2, N_PARAMS = 5 };

static lf_device *cpu;

/* Two groups of experts and a dense one. */
static lf_map *make_map(bool allocate)
{
    static const int64_t sizes[N_PARAMS] = {40000, 90000, 80000, 30000, 20000};
    lf_map *map = NULL;
    lf_map_options o;
    CHECK_OK(lf_options_init("map", &o, sizeof o));
    o.high_load_experts = 2;
    CHECK_OK(lf_map_open(&map, &o));
    for (int32_t i = 0; i < N_PARAMS; i++) {
        char name[16];
        snprintf(name, sizeof name, "p%d", i);
        const lf_param p = {
            .size = sizeof p, .name = name, .shape = &sizes[i], .ndim = 1, .dtype = LF_DTYPE_F32, .expert = i - 1, .tied_to = -1};
        CHECK_OK(lf_map_add(map, &p, NULL));
    }
    CHECK_OK(lf_map_plan(map));
    if (!cpu) CHECK_OK(lf_device_open(&cpu, "cpu"));
    if (allocate) CHECK_OK(lf_map_allocate(map, cpu));
    return map;
}

static lf_nexus_options told(double latency_us, double mb_s)
{
    lf_nexus_options o;
    CHECK_OK(lf_options_init("nexus", &o, sizeof o));
    o.link_latency_us = latency_us;
    o.link_mb_s = mb_s;
    return o;
}

/* The forms of all chunks must be `form`, or that of the group named `only`. */
static void plan(const lf_nexus_options *o, const char *form, const char *why)
{
    lf_map *map = make_map(false);
    lf_nexus *nexus;
    CHECK_OK(lf_nexus_open(&nexus, map, NULL, o));
    CHECK(lf_nexus_n_chunks(nexus) >= 3);
    for (int32_t i = 0; i < lf_nexus_n_chunks(nexus); i++) {
        lf_chunk_info c = {.size = sizeof c};
        CHECK_OK(lf_nexus_get_chunk(nexus, i, &c));
        CHECK_STR(c.form, form);
        CHECK_HAS(c.why, why);
        CHECK_EQ(c.sent_bytes < c.bytes, strcmp(form, "sparse") == 0);
    }
    lf_nexus_close(nexus);
    lf_map_unref(map);
}

TEST(cost_model_is_as_written)
{
    const nexus_link link = {.latency_s = 1e-3, .bytes_s = 1e8, .topk_bytes_s = 5e8};
    const nexus_cost c = lf__nexus_cost(&link, 10, 100000000, 18000000);
    CHECK_NEAR(c.dense_s, 0.01 + 1.0, 1e-9);
    CHECK_NEAR(c.sparse_s, 0.02 + 0.18 + 0.2, 1e-9);
    CHECK(c.pays);
    CHECK_NEAR(c.break_even_bytes_s, 82e6 / (0.01 + 0.2), 1);
    const nexus_link there = {.latency_s = 1e-3, .bytes_s = c.break_even_bytes_s, .topk_bytes_s = 5e8};
    const nexus_cost even = lf__nexus_cost(&there, 10, 100000000, 18000000);
    CHECK_NEAR(even.dense_s, even.sparse_s, 1e-9);
    CHECK(!even.pays);
}

TEST(cost_never_pays_when_more_is_sent)
{
    const nexus_link link = {.latency_s = 0, .bytes_s = 1, .topk_bytes_s = 1e12};
    const nexus_cost c = lf__nexus_cost(&link, 1, 1000, 1000);
    CHECK(!c.pays && c.break_even_bytes_s == 0);
}

TEST(cost_slow_link_is_sparse)
{
    const lf_nexus_options o = told(100, 80);
    plan(&o, "sparse", "told link 80 MB/s, 100 us: sparse");
}

TEST(cost_fast_link_is_dense)
{
    const lf_nexus_options o = told(10, 10000);
    plan(&o, "dense", "sparse wins below");
}

/* Each group is small: twice the latency eats what fewer bytes save. */
TEST(cost_latency_is_dense)
{
    const lf_nexus_options o = told(50000, 80);
    plan(&o, "dense", "told link 80 MB/s, 5e+04 us");
}

TEST(cost_slow_topk_is_dense)
{
    lf_nexus_options o = told(100, 80);
    o.topk_mb_s = 20;
    plan(&o, "dense", "told link");
}

TEST(cost_unknown_link_is_dense)
{
    const lf_nexus_options o = told(0, 0);
    plan(&o, "dense", "no slow link was measured or told");
}

TEST(cost_shards_are_dense)
{
    lf_nexus_options o = told(100, 80);
    o.shard_optimizer = 1;
    plan(&o, "dense", "shard_optimizer sums densely");
}

TEST(cost_strategy_wins)
{
    lf_nexus_options o = told(100, 80);
    snprintf(o.comm_strategy, sizeof o.comm_strategy, "dense");
    plan(&o, "dense", "comm_strategy is dense");
}

/* ---- measured: a loopback behind which every sum takes its time */

typedef struct slow {
    lf_transport inner;
    int64_t bytes[64];
    int32_t n;
} slow;

static lf_status slow_post(void *user, void *data, int64_t count, int32_t dtype, lf_stream *stream, int64_t *ticket)
{
    slow *s = user;
    s->bytes[s->n++ % 64] = count * (int64_t)lf_dtype_bytes(dtype);
    return s->inner.post(s->inner.user, data, count, dtype, stream, ticket);
}

static lf_status slow_wait(void *user, int64_t ticket, lf_stream *stream, double timeout_s)
{
    const slow *s = user;
    lf__sleep_ns(s->bytes[(s->n - 1) % 64] * 1000); /* 1 MB/s */
    return s->inner.wait(s->inner.user, ticket, stream, timeout_s);
}

static void slow_close(void *user)
{
    const slow *s = user;
    s->inner.close(s->inner.user);
}

typedef struct rank {
    slow s;
    lf_map *map;
    lf_nexus *nexus;
    lf_nexus_options opts;
    lf_status status;
    char text[400];
    lf__thread *thread;
} rank;

static rank ranks[RANKS];

static void open_rank(void *user)
{
    rank *r = user;
    const lf_transport t = {.size = sizeof t,
                            .name = "slow",
                            .user = &r->s,
                            .rank = r->s.inner.rank,
                            .world = RANKS,
                            .post = slow_post,
                            .wait = slow_wait,
                            .close = slow_close};
    r->status = lf_nexus_open(&r->nexus, r->map, &t, &r->opts);
    if (r->status < 0) snprintf(r->text, sizeof r->text, "%s", lf_error_text());
}

static void open_all(const lf_nexus_options *first, const lf_nexus_options *second)
{
    lf_transport ends[RANKS];
    CHECK_OK(lf_loopback_open(RANKS, ends));
    for (int32_t i = 0; i < RANKS; i++)
        ranks[i] = (rank){.s = {.inner = ends[i]}, .map = make_map(true), .opts = i ? *second : *first};
    for (int32_t i = 0; i < RANKS; i++) CHECK_OK(lf__thread_start(&ranks[i].thread, "rank", open_rank, &ranks[i]));
    for (int32_t i = 0; i < RANKS; i++) lf__thread_join(ranks[i].thread);
}

static void close_all(void)
{
    for (int32_t i = 0; i < RANKS; i++) {
        if (ranks[i].nexus) lf_nexus_close(ranks[i].nexus);
        else slow_close(&ranks[i].s);
        lf_map_unref(ranks[i].map);
    }
}

TEST(cost_probe_finds_a_slow_link)
{
    lf_nexus_options o = told(0, 0);
    o.probe = 1;
    open_all(&o, &o);
    for (int32_t i = 0; i < RANKS; i++) {
        if (ranks[i].status < 0) FAIL_("rank %d: %s", i, ranks[i].text);
        for (int32_t k = 0; k < lf_nexus_n_chunks(ranks[i].nexus); k++) {
            lf_chunk_info a = {.size = sizeof a}, b = a;
            CHECK_OK(lf_nexus_get_chunk(ranks[0].nexus, k, &a));
            CHECK_OK(lf_nexus_get_chunk(ranks[i].nexus, k, &b));
            CHECK_STR(b.form, "sparse");
            CHECK_HAS(b.why, "measured link");
            CHECK_STR(a.why, b.why); /* the same numbers on all ranks */
        }
    }
    close_all();
}

TEST(cost_without_probe_measures_nothing)
{
    const lf_nexus_options o = told(0, 0);
    open_all(&o, &o);
    for (int32_t i = 0; i < RANKS; i++) {
        CHECK_EQ(ranks[i].status, LF_OK);
        CHECK_EQ(ranks[i].s.n, 1); /* the comparison of maps */
    }
    close_all();
}

TEST(cost_ranks_that_were_told_differently)
{
    const lf_nexus_options slow_link = told(100, 80), fast_link = told(10, 10000);
    open_all(&slow_link, &fast_link);
    for (int32_t i = 0; i < RANKS; i++) {
        CHECK_EQ(ranks[i].status, LF_ERR_PEER);
        CHECK_HAS(ranks[i].text, "different [nexus] options");
    }
    close_all();
}

LF_TEST_MAIN
