/* SPDX-License-Identifier: Apache-2.0 */
/* Steps of several ranks: sums in any order of marks, late blocks, and ranks that differ, leave or hang. */
#include "nexus_ranks.h"
#include "nexus_recorder.h"

enum { MOST = 4 };

static lf_map *make_map(const rank *r) { return make_small(r->grad_f32); }

/* Rank 1's is another one. */
static lf_map *make_other_map(const rank *r)
{
    model_shape m = small_model;
    m.grad_f32 = r->grad_f32;
    if (r->t.rank == 1) m.qkv += 8;
    return make_model(&m);
}

/* Flushed, then taken run by run; `whole` after that many runs, what is left in one go. */
static lf_status take_all(rank *r, int32_t whole)
{
    lf_nexus *nexus = r->nexus;
    lf_stream *stream = r->stream;
    int32_t first = 0, n = 0, next = 0;
    lf_status rc = lf_nexus_flush(nexus, stream);
    for (int32_t i = 0; rc == LF_OK && i < whole; i++) {
        rc = lf_nexus_take(nexus, stream, &first, &n);
        if (rc == LF_OK && (first != next || n < 1)) WRONG("run %d is chunks %d to %d, expected %d", i, first, first + n, next);
        next = first + n;
    }
    if (rc == LF_END) return next == 0 ? LF_OK : LF_ERR_INTERNAL; /* next is 0 once all are taken */
    return rc == LF_OK ? lf_nexus_finish(nexus, stream) : rc;
}

static lf_status reduce_once(rank *r, int32_t step)
{
    int32_t order[100], n = lf_map_n_blocks(r->map);
    lf_status rc = lf_nexus_begin(r->nexus);
    order_of_marks(r->t.rank, step, order, n);
    for (int32_t i = 0; i < n && rc == LF_OK; i++) {
        const lf_block_info b = block_at(r->map, order[i]);
        if (b.flags & LF_PARAM_FROZEN) continue;
        const bool late = is_late(r->t.rank, step, &b);
        write_fours(r->map, r->t.rank, step, order[i], late);
        if (!late) rc = lf_nexus_mark(r->nexus, order[i], r->stream);
    }
    if (rc < 0) return rc;
    return step == 0 ? lf_nexus_finish(r->nexus, r->stream) : take_all(r, step == 1 ? INT32_MAX : 3);
}

static void check_sums(rank *r, int32_t step, float divisor)
{
    for (int32_t k = 0; k < lf_map_n_blocks(r->map); k++) {
        const lf_block_info b = block_at(r->map, k);
        if (b.flags & LF_PARAM_FROZEN) continue;
        const void *g = lf_map_address(r->map, &b.range, LF_ROLE_GRAD);
        const int32_t dtype = dtype_of(r->map, b.range.klass, LF_ROLE_GRAD);
        for (int64_t i = 0; i < b.range.count; i++) {
            float sum = 0;
            for (int32_t s = 0; s < r->t.world; s++) sum += is_late(s, step, &b) ? 0 : fours(s, step, k, i);
            if (get(g, i, dtype) != (double)(sum / divisor))
                WRONG("rank %d step %d %s[%d]: %g, expected %g", r->t.rank, step, b.name, (int)i, get(g, i, dtype),
                      (double)(sum / divisor));
        }
    }
}

static void reduce_steps(rank *r)
{
    const bool divided = strcmp(r->opts.reduce, "mean") == 0 && !r->t.mean;
    for (int32_t step = 0; step < r->steps && r->status == LF_OK; step++) {
        r->status = reduce_once(r, step);
        if (r->status == LF_OK) r->status = lf_stream_sync(r->stream);
        if (r->status == LF_OK) check_sums(r, step, divided ? (float)r->t.world : 1);
    }
}

/* Ranks mark in different orders and miss different experts; every rank ends with the same exact sums. */
TEST(nexus_sums_over_ranks)
{
    for (int32_t world = 1; world <= MOST; world++)
        for (int32_t how = 0; how < 4; how++) {
            prepare(world, make_map, reduce_steps);
            for (int32_t i = 0; i < world; i++) {
                ranks[i].steps = 3;
                ranks[i].grad_f32 = how & 1;
                ranks[i].on_stream = how >> 1;
                if (how == 1 || world == 3) snprintf(ranks[i].opts.reduce, LF_TEXT_MAX, "sum"); /* a third is not exact */
            }
            run_ranks(world);
            all_are(world, LF_OK);
            for (int32_t i = 0; i < world; i++) {
                CHECK_EQ(ranks[i].stats.steps, 3);
                CHECK(ranks[i].stats.collectives > 3 * N_LAYERS && ranks[i].stats.collectives == ranks[0].stats.collectives);
                CHECK_EQ(ranks[i].stats.bytes, ranks[0].stats.bytes);
                CHECK(ranks[i].stats.late_blocks > 0 && ranks[i].stats.p95_s >= ranks[i].stats.p50_s);
            }
        }
}

/* Who divides: a transport that can, or finish; never both. */
TEST(nexus_divides_once)
{
    set_up();
    recorder rec;
    lf_nexus *nexus;
    lf_map *map = make_small(1);
    lf_nexus_options opts;
    lf_transport t = recorder_end(&rec);
    t.mean = 1;
    CHECK_OK(lf_options_init("nexus", &opts, sizeof opts));
    snprintf(opts.reduce, sizeof opts.reduce, "sum");
    CHECK_STATUS(lf_nexus_open(&nexus, map, &t, &opts), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "divides by the world, but reduce is sum");
    prepare(2, make_map, reduce_steps);
    for (int32_t i = 0; i < 2; i++) ranks[i].t.mean = 1; /* the loopback does not, so the plain sum must come out */
    run_ranks(2);
    all_are(2, LF_OK);
    lf_map_unref(map);
}

/* ---- ranks that go wrong ----------------------------------------------------------------------------------------------- */

TEST(nexus_finds_different_maps)
{
    prepare(3, make_other_map, reduce_steps);
    run_ranks(3);
    for (int32_t i = 0; i < 3; i++) {
        CHECK_EQ(ranks[i].status, LF_ERR_PEER);
        CHECK_HAS(ranks[i].text, "planned different maps");
    }
}

TEST(nexus_finds_different_options)
{
    prepare(2, make_map, reduce_steps);
    ranks[1].opts.chunk_bytes = 8192;
    run_ranks(2);
    CHECK_EQ(ranks[0].status, LF_ERR_PEER);
    CHECK_HAS(ranks[0].text, "different [nexus] options");
    CHECK_HAS(ranks[1].text, "chunk_bytes 8192");
}

/* Rank 1 stops in the middle of a step: by leaving (how 0) or by never coming back (how 1). */
static _Atomic int32_t how_it_stops;
static void one_stops(rank *r)
{
    if (r->t.rank != 1) {
        r->status = reduce_once(r, 0);
        return;
    }
    r->status = lf_nexus_begin(r->nexus);
    for (int32_t b = lf_map_n_blocks(r->map) - 1; b > 20 && r->status == LF_OK; b--)
        if (!(block_at(r->map, b).flags & LF_PARAM_FROZEN)) r->status = lf_nexus_mark(r->nexus, b, NULL);
    if (how_it_stops) lf__sleep_ns(1500000000);
}

TEST(nexus_survives_a_peer_that_leaves)
{
    how_it_stops = 0;
    prepare(3, make_map, one_stops);
    run_ranks(3);
    for (int32_t i = 0; i < 3; i += 2) {
        CHECK_EQ(ranks[i].status, LF_ERR_PEER);
        CHECK_HAS(ranks[i].text, "chunk ");
    }
}

TEST(nexus_survives_a_peer_that_hangs)
{
    how_it_stops = 1;
    prepare(3, make_map, one_stops);
    for (int32_t i = 0; i < 3; i++) ranks[i].opts.timeout_s = 0.3;
    int64_t before = lf__now_ns();
    run_ranks(3);
    CHECK(lf__now_ns() - before < 60000000000);
    for (int32_t i = 0; i < 3; i += 2) {
        CHECK(ranks[i].status == LF_ERR_TIMEOUT || ranks[i].status == LF_ERR_PEER);
        CHECK_HAS(ranks[i].text, "rank 1");
    }
    CHECK(ranks[0].status == LF_ERR_TIMEOUT || ranks[2].status == LF_ERR_TIMEOUT);
}

TEST(nexus_closes_the_device) { lf_device_close(device); }

LF_TEST_MAIN
