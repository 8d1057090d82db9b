/* SPDX-License-Identifier: Apache-2.0 */
/* The chooser: forms by a link that is told, that is measured, that is not known; the model's break-even. */
#include "nexus/nexus_int.h"
#include "nexus_ranks.h"

enum { RANKS = 2, N_PARAMS = 5 };

/* Two groups of experts and a dense one; not planned. */
static lf_map *new_groups(void)
{
    static const int64_t sizes[N_PARAMS] = {40000, 90000, 80000, 30000, 20000};
    lf_map *map = new_map(1, 2);
    for (int32_t i = 0; i < N_PARAMS; i++) {
        char name[16];
        snprintf(name, sizeof name, "p%d", i);
        add_param(map, name, sizes[i], LF_DTYPE_F32, 0, i - 1, 0);
    }
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
    lf_map *map = new_groups();
    lf_nexus *nexus;
    CHECK_OK(lf_map_plan(map));
    CHECK_OK(lf_nexus_open(&nexus, map, NULL, o));
    CHECK(lf_nexus_n_chunks(nexus) >= 3);
    for (int32_t i = 0; i < lf_nexus_n_chunks(nexus); i++) {
        const lf_chunk_info c = chunk_at(nexus, i);
        CHECK_STR(c.form, form);
        CHECK_HAS(c.why, why);
        CHECK_EQ(c.sent_bytes < c.bytes, strcmp(form, "dense") != 0);
    }
    lf_nexus_close(nexus);
    lf_map_unref(map);
}

TEST(cost_model_is_as_written)
{
    const nexus_link link = {.latency_s = 1e-3, .bytes_s = 1e8, .topk_bytes_s = 5e8};
    const nexus_load load = {.n_chunks = 10, .bytes = 100000000, .sparse_bytes = 18000000};
    const nexus_cost c = lf__nexus_cost(&link, &load);
    CHECK_NEAR(c.dense_s, 0.01 + 1.0, 1e-9);
    CHECK_NEAR(c.sparse_s, 0.02 + 0.18 + 0.2, 1e-9);
    CHECK_EQ(c.form, NEXUS_SPARSE);
    CHECK_NEAR(c.sparse_below_bytes_s, 82e6 / (0.01 + 0.2), 1);
    const nexus_link there = {.latency_s = 1e-3, .bytes_s = c.sparse_below_bytes_s, .topk_bytes_s = 5e8};
    const nexus_cost even = lf__nexus_cost(&there, &load);
    CHECK_NEAR(even.dense_s, even.sparse_s, 1e-9);
    CHECK_EQ(even.form, NEXUS_DENSE);
    CHECK(isinf(c.bf16_s) && c.bf16_below_bytes_s == 0);
}

/* Half the bytes, and the work of rounding; sparse is held against it where it would be taken. */
TEST(cost_model_has_bf16)
{
    const nexus_link link = {.latency_s = 1e-3, .bytes_s = 1e8, .topk_bytes_s = 5e8, .cast_bytes_s = 4e9};
    nexus_load load = {.n_chunks = 10, .bytes = 100000000, .bf16_bytes = 50000000, .cast_bytes = 100000000};
    const nexus_cost c = lf__nexus_cost(&link, &load);
    CHECK_NEAR(c.bf16_s, 0.01 + 0.5 + 0.025, 1e-9);
    CHECK_EQ(c.form, NEXUS_BF16);
    CHECK(isinf(c.sparse_s) && c.sparse_below_bytes_s == 0);
    CHECK_NEAR(c.bf16_below_bytes_s, 2e9, 1);
    load.sparse_bytes = 18000000;
    CHECK_EQ(lf__nexus_cost(&link, &load).form, NEXUS_SPARSE); /* 0.4 s against 0.535 */
    CHECK_NEAR(lf__nexus_cost(&link, &load).sparse_below_bytes_s, 32e6 / (0.01 + 0.2 - 0.025), 1);
    load.sparse_bytes = 25000000; /* less than bf16, and not by enough */
    CHECK_EQ(lf__nexus_cost(&link, &load).form, NEXUS_BF16);
    const nexus_link fast = {.latency_s = 1e-3, .bytes_s = 3e9, .topk_bytes_s = 5e8, .cast_bytes_s = 4e9};
    CHECK_EQ(lf__nexus_cost(&fast, &load).form, NEXUS_DENSE);
    load.cast_bytes = 0; /* gradients that are bf16 already */
    load.bf16_bytes = load.bytes;
    CHECK_EQ(lf__nexus_cost(&link, &load).bf16_below_bytes_s, 0);
}

TEST(cost_never_pays_when_more_is_sent)
{
    const nexus_link link = {.latency_s = 0, .bytes_s = 1, .topk_bytes_s = 1e12};
    const nexus_load load = {.n_chunks = 1, .bytes = 1000, .sparse_bytes = 1000};
    const nexus_cost c = lf__nexus_cost(&link, &load);
    CHECK(c.form == NEXUS_DENSE && c.sparse_below_bytes_s == 0);
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

static lf_nexus_options in_bf16(lf_nexus_options o)
{
    snprintf(o.wire_dtype, sizeof o.wire_dtype, "bf16");
    return o;
}

TEST(cost_bf16_is_chosen_by_the_link)
{
    lf_nexus_options o = in_bf16(told(100, 80));
    plan(&o, "sparse", "bf16 wins below 2000 MB/s, sparse wins below");
    o.topk_mb_s = 60; /* top-k eats what it saves */
    plan(&o, "bf16", "told link 80 MB/s, 100 us: sparse");
    o.cast_mb_s = 60;
    plan(&o, "dense", "told link 80 MB/s");
    o = in_bf16(told(10, 10000));
    plan(&o, "dense", "told link 1e+04 MB/s");
}

TEST(cost_bf16_as_asked_for_without_a_link)
{
    lf_nexus_options o = in_bf16(told(0, 0));
    plan(&o, "bf16", "wire_dtype is bf16");
    o.shard_optimizer = 1;
    plan(&o, "bf16", "wire_dtype is bf16");
    snprintf(o.comm_strategy, sizeof o.comm_strategy, "dense");
    plan(&o, "bf16", "wire_dtype is bf16");
}

TEST(cost_bf16_in_shares_goes_by_the_link)
{
    lf_nexus_options o = in_bf16(told(10, 10000));
    o.shard_optimizer = 1;
    plan(&o, "dense", "MB/s, shard_optimizer sums densely");
    o.link_mb_s = 80;
    plan(&o, "bf16", "MB/s, shard_optimizer sums densely");
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

enum { CHUNKS_MOST = 64 };
static slow slows[RANKS];
static struct {
    int32_t n_chunks;
    char form[CHUNKS_MOST][16], why[CHUNKS_MOST][240];
} seen[RANKS];

static lf_map *make_map(const rank *r) { return (void)r, plan_and_allocate(new_groups()); }

static void look(rank *r)
{
    const int32_t n = seen[r->t.rank].n_chunks = lf_nexus_n_chunks(r->nexus);
    if (n < 1 || n > CHUNKS_MOST) WRONG("%d chunks", n);
    for (int32_t k = 0; k < n && k < CHUNKS_MOST; k++) {
        const lf_chunk_info c = chunk_at(r->nexus, k);
        snprintf(seen[r->t.rank].form[k], sizeof seen->form[k], "%s", c.form);
        snprintf(seen[r->t.rank].why[k], sizeof seen->why[k], "%s", c.why);
    }
}

static void open_all(const lf_nexus_options *first, const lf_nexus_options *second)
{
    prepare(RANKS, make_map, look);
    for (int32_t i = 0; i < RANKS; i++) {
        slows[i] = (slow){.inner = ranks[i].t};
        ranks[i].opts = i ? *second : *first;
        ranks[i].t = (lf_transport){.size = sizeof ranks[i].t,
                                    .name = "slow",
                                    .user = &slows[i],
                                    .rank = i,
                                    .world = RANKS,
                                    .post = slow_post,
                                    .wait = slow_wait,
                                    .close = slow_close};
    }
    run_ranks(RANKS);
}

TEST(cost_probe_finds_a_slow_link)
{
    lf_nexus_options o = told(0, 0);
    o.probe = 1;
    open_all(&o, &o);
    all_are(RANKS, LF_OK);
    for (int32_t i = 0; i < RANKS; i++) {
        CHECK_EQ(seen[i].n_chunks, seen[0].n_chunks);
        for (int32_t k = 0; k < seen[i].n_chunks; k++) {
            CHECK_STR(seen[i].form[k], "sparse");
            CHECK_HAS(seen[i].why[k], "measured link");
            CHECK_STR(seen[0].why[k], seen[i].why[k]); /* the same numbers on all ranks */
        }
    }
}

/* Top-k is told to be slow, the casts are measured. */
TEST(cost_probe_finds_bf16)
{
    lf_nexus_options o = in_bf16(told(0, 0));
    o.probe = 1;
    o.topk_mb_s = 1;
    open_all(&o, &o);
    all_are(RANKS, LF_OK);
    for (int32_t i = 0; i < RANKS; i++)
        for (int32_t k = 0; k < seen[i].n_chunks; k++) {
            CHECK_STR(seen[i].form[k], "bf16");
            CHECK_HAS(seen[i].why[k], "measured link");
            CHECK_HAS(seen[i].why[k], "bf16 wins below");
            CHECK_STR(seen[0].why[k], seen[i].why[k]);
        }
}

TEST(cost_without_probe_measures_nothing)
{
    const lf_nexus_options o = told(0, 0);
    open_all(&o, &o);
    all_are(RANKS, LF_OK);
    for (int32_t i = 0; i < RANKS; i++) CHECK_EQ(slows[i].n, 1); /* the comparison of maps */
}

TEST(cost_ranks_that_were_told_differently)
{
    const lf_nexus_options slow_link = told(100, 80), fast_link = told(10, 10000);
    open_all(&slow_link, &fast_link);
    all_are(RANKS, LF_ERR_PEER);
    for (int32_t i = 0; i < RANKS; i++) CHECK_HAS(ranks[i].text, "different [nexus] options");
}

LF_TEST_MAIN
