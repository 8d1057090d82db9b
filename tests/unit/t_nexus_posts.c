/* SPDX-License-Identifier: Apache-2.0 */
/* What a step asks of its transport: which sums, in which order and runs, behind which streams, how often it looks; and nothing else. */
#include "nexus_recorder.h"

/* Chunks of a layer go out while later layers are still at work, in the table's order and nothing else. */
TEST(nexus_posts_as_soon_as_it_may)
{
    set_up();
    recorder rec;
    lf_nexus *nexus;
    lf_map *map = make_small(1);
    open_recorder(&rec, map, 4096, &nexus);
    for (int32_t step = 0; step < 2; step++) {
        rec.n_posts = rec.n_waits = 0;
        CHECK_OK(lf_nexus_begin(nexus));
        mark_layer(nexus, map, N_LAYERS - 1, NULL);
        CHECK_EQ(rec.n_posts, 0); /* the head comes before it */
        mark_layer(nexus, map, INT32_MAX, NULL);
        int32_t last = 0;
        for (int32_t layer = N_LAYERS - 2; layer >= 0; layer--) {
            CHECK(rec.n_posts > last);
            last = rec.n_posts;
            mark_layer(nexus, map, layer, NULL);
        }
        CHECK(rec.n_posts < lf_nexus_n_chunks(nexus));
        mark_layer(nexus, map, -1, NULL);
        CHECK_EQ(rec.n_posts, lf_nexus_n_chunks(nexus)); /* the last mark posts the last chunk: finish has only to wait */
        CHECK_EQ(rec.n_waits, 0);
        CHECK_OK(lf_nexus_finish(nexus, NULL));
        CHECK_EQ(rec.n_waits, rec.n_posts);
        for (int32_t i = 0; i < rec.n_posts; i++) {
            const lf_chunk_info c = chunk_at(nexus, i);
            CHECK(rec.data[i] == lf_map_address(map, &c.range, LF_ROLE_GRAD) && rec.count[i] == c.range.count);
        }
    }
    lf_nexus_close(nexus);
    CHECK_EQ(rec.closed, 1);
    lf_map_unref(map);
}

/* A step touches the gradients of trainable classes and not one other byte. */
TEST(nexus_touches_only_gradients)
{
    set_up();
    recorder rec;
    lf_nexus *nexus;
    lf_map *map = make_small(0);
    const lf_range first = {0, 0, 0, 1};
    uint8_t *slab = lf_map_address(map, &first, LF_ROLE_WEIGHT), *expected = lf__alloc((size_t)lf_map_bytes(map));
    memset(slab, 0x55, (size_t)lf_map_bytes(map));
    memset(expected, 0x55, (size_t)lf_map_bytes(map));
    for (int32_t b = 0; b < lf_map_n_blocks(map); b++) { /* all are late */
        lf_block_info info = block_at(map, b);
        uint8_t *g = lf_map_address(map, &info.range, LF_ROLE_GRAD);
        if (g)
            memset(expected + (g - slab), 0,
                   (size_t)info.range.count * lf_dtype_bytes(dtype_of(map, info.range.klass, LF_ROLE_GRAD)));
    }
    open_recorder(&rec, map, 4096, &nexus);
    CHECK_OK(lf_nexus_begin(nexus));
    CHECK_OK(lf_nexus_finish(nexus, NULL));
    CHECK(memcmp(slab, expected, (size_t)lf_map_bytes(map)) == 0);
    lf_nexus_close(nexus);
    lf__free(expected);
    lf_map_unref(map);
}

/* ---- a transport that launches runs ------------------------------------------------------------------------------------ */

/* Whatever order marks come in, and whoever is late: the same posts in the same runs, which are those of the table. */
TEST(nexus_runs_do_not_depend_on_marks)
{
    set_up();
    recorder rec;
    lf_nexus *nexus;
    lf_map *map = make_small(1);
    open_full_recorder(&rec, map, 16384, &nexus);
    const int32_t n_chunks = lf_nexus_n_chunks(nexus), n = lf_map_n_blocks(map);
    for (int32_t step = 0; step < 5; step++) {
        int32_t order[100];
        rec.n_posts = rec.n_waits = rec.n_runs = 0;
        order_of_marks(step, step, order, n);
        CHECK_OK(lf_nexus_begin(nexus));
        for (int32_t i = 0; i < n; i++) {
            lf_block_info b = block_at(map, order[i]);
            if (b.flags & LF_PARAM_FROZEN || (step > 0 && is_late(0, step, &b))) continue;
            CHECK_OK(lf_nexus_mark(nexus, order[i], NULL));
        }
        CHECK_OK(lf_nexus_finish(nexus, NULL));
        CHECK_EQ(rec.n_posts, n_chunks);
        int32_t runs = 0, longest = 0;
        for (int32_t i = 0; i < n_chunks; i++) {
            const lf_chunk_info c = chunk_at(nexus, i);
            CHECK(rec.data[i] == lf_map_address(map, &c.range, LF_ROLE_GRAD) && rec.count[i] == c.range.count);
            if (c.run == runs) CHECK_EQ(rec.run_first[runs++], i);
            longest = runs > 1 && rec.run_first[runs - 1] - rec.run_first[runs - 2] > longest
                          ? rec.run_first[runs - 1] - rec.run_first[runs - 2]
                          : longest;
        }
        CHECK_EQ(rec.n_runs, runs);
        CHECK(longest > 1 && runs < n_chunks);
    }
    lf_nexus_stats stats = {.size = sizeof stats};
    CHECK_OK(lf_nexus_get_stats(nexus, &stats));
    CHECK_EQ(stats.collectives, 5 * n_chunks);
    CHECK(stats.p50_s == 1 && stats.p99_s == 3 && stats.busy_s == 4); /* the transport's own clock */
    lf_nexus_close(nexus);
    lf_map_unref(map);
}

static void mark_some(lf_nexus *nexus, const lf_map *map)
{
    CHECK_OK(lf_nexus_begin(nexus));
    mark_layer(nexus, map, INT32_MAX, NULL);
    mark_layer(nexus, map, N_LAYERS - 1, NULL);
}

/* A flushed step hands out the table's runs in order, and waits for one run at a time, with and without a transport that knows of
 * runs. */
TEST(nexus_hands_out_runs)
{
    set_up();
    recorder rec;
    lf_nexus *nexus;
    lf_map *map = make_small(1);
    for (int32_t full = 0; full < 2; full++) {
        int32_t first = -1, n = -1, next = 0, runs = 0;
        double x = 1;
        if (full) open_full_recorder(&rec, map, 16384, &nexus);
        else open_recorder(&rec, map, 4096, &nexus);
        const int32_t n_chunks = lf_nexus_n_chunks(nexus);
        CHECK_STATUS(lf_nexus_flush(nexus, NULL), LF_ERR_STATE);
        CHECK_STATUS(lf_nexus_take(nexus, NULL, &first, &n), LF_ERR_STATE);
        mark_some(nexus, map);
        CHECK_STATUS(lf_nexus_take(nexus, NULL, &first, &n), LF_ERR_STATE);
        CHECK_HAS(lf_error_text(), "lf_nexus_flush");
        CHECK_OK(lf_nexus_flush(nexus, NULL));
        CHECK_EQ(rec.n_posts, n_chunks);
        CHECK_EQ(rec.n_waits, 0);
        CHECK_STATUS(lf_nexus_flush(nexus, NULL), LF_ERR_STATE);
        CHECK_HAS(lf_error_text(), "flushed already");
        CHECK_STATUS(lf_nexus_mark(nexus, 0, NULL), LF_ERR_STATE);
        CHECK_HAS(lf_error_text(), "embed is marked after lf_nexus_flush");
        while (lf_nexus_take(nexus, NULL, &first, &n) == LF_OK) {
            CHECK_EQ(first, next);
            next = first + n;
            CHECK_EQ(rec.n_waits, next);
            for (int32_t i = first; i < next; i++) CHECK_EQ(chunk_at(nexus, i).run, runs);
            runs++;
            if (next == n_chunks) break;
            CHECK_STATUS(lf_nexus_begin(nexus), LF_ERR_STATE);
            CHECK_STATUS(lf_nexus_reduce(nexus, &x, 1, LF_DTYPE_F64, NULL), LF_ERR_STATE);
        }
        CHECK(next == n_chunks && runs > N_LAYERS);
        for (int32_t i = 0; i < 2; i++) CHECK_STATUS(lf_nexus_take(nexus, NULL, &first, &n), LF_END);
        CHECK(first == 0 && n == 0);
        CHECK_STATUS(lf_nexus_finish(nexus, NULL), LF_ERR_STATE);
        lf_nexus_stats stats = {.size = sizeof stats};
        CHECK_OK(lf_nexus_get_stats(nexus, &stats));
        CHECK(stats.steps == 1 && stats.collectives == n_chunks && stats.exposed_s > 0);
        rec.n_posts = rec.n_waits = rec.n_runs = 0;
        mark_some(nexus, map);
        CHECK_OK(lf_nexus_flush(nexus, NULL));
        CHECK_OK(lf_nexus_take(nexus, NULL, &first, &n));
        rec.fail_wait = n;
        CHECK_STATUS(lf_nexus_take(nexus, NULL, &first, &n), LF_ERR_TIMEOUT);
        CHECK_HAS(lf_error_text(), "chunk ");
        CHECK_STATUS(lf_nexus_take(nexus, NULL, &first, &n), LF_ERR_TIMEOUT); /* for good */
        lf_nexus_close(nexus);
    }
    lf_map_unref(map);
}

TEST(nexus_asks_the_transport_between_steps)
{
    set_up();
    recorder rec;
    lf_nexus *nexus;
    char text[200];
    lf_map *map = make_small(1);
    open_full_recorder(&rec, map, 16384, &nexus);
    int64_t bytes = 0;
    for (int32_t k = 0; k < rec.n_memory; k++) bytes += rec.memory_bytes[k];
    for (int32_t i = 0; i < lf_nexus_n_chunks(nexus); i++) { /* every chunk lies in memory that the transport was told of */
        const lf_chunk_info c = chunk_at(nexus, i);
        const char *at = lf_map_address(map, &c.range, LF_ROLE_GRAD);
        int32_t inside = 0;
        for (int32_t k = 0; k < rec.n_memory; k++)
            inside += at >= (const char *)rec.memory[k] && at + c.bytes <= (const char *)rec.memory[k] + rec.memory_bytes[k];
        CHECK_EQ(inside, 1);
        bytes -= c.bytes;
    }
    CHECK(rec.n_memory > 0 && bytes >= 0);
    CHECK_OK(lf_nexus_describe(nexus, text, sizeof text));
    CHECK_STR(text, "transport recorder, rank 0 of 1");
    CHECK_OK(lf_nexus_settle(nexus));
    CHECK_EQ(rec.settled, 1);
    CHECK_OK(lf_nexus_check(nexus));
    CHECK_STATUS(lf_nexus_replayed(nexus, NULL), LF_ERR_STATE);
    rec.sick = true;
    CHECK_STATUS(lf_nexus_check(nexus), LF_ERR_PEER);
    CHECK_HAS(lf_error_text(), "a peer died meanwhile");
    rec.sick = false;
    CHECK_STATUS(lf_nexus_begin(nexus), LF_ERR_PEER); /* for good */
    CHECK_STATUS(lf_nexus_settle(nexus), LF_ERR_PEER);
    lf_nexus_close(nexus);
    open_full_recorder(&rec, map, 16384, &nexus);
    rec.fail_run = 2;
    CHECK_OK(lf_nexus_begin(nexus));
    CHECK_STATUS(lf_nexus_finish(nexus, NULL), LF_ERR_PEER);
    CHECK_HAS(lf_error_text(), "of layer 3 (chunks ");
    CHECK_HAS(lf_error_text(), "the launch broke");
    lf_nexus_close(nexus);
    lf_map_unref(map);
}

TEST(nexus_takes_times_when_they_end)
{
    set_up();
    recorder rec;
    lf_nexus *nexus;
    lf_map *map = make_small(1);
    lf_nexus_stats stats = {.size = sizeof stats};
    open_recorder(&rec, map, 4096, &nexus);
    CHECK_OK(lf_nexus_begin(nexus));
    mark_layer(nexus, map, INT32_MAX, NULL);
    CHECK_OK(lf_nexus_get_stats(nexus, &stats));
    CHECK_EQ(stats.collectives, 0); /* posted, not done */
    const int32_t posted = rec.n_posts;
    CHECK(posted > 0);
    rec.done = true;
    CHECK_OK(lf_nexus_mark(nexus, 1, NULL));
    CHECK_OK(lf_nexus_get_stats(nexus, &stats));
    CHECK_EQ(stats.collectives, posted); /* found by the next mark */
    rec.done = false;
    CHECK_OK(lf_nexus_finish(nexus, NULL));
    CHECK_OK(lf_nexus_get_stats(nexus, &stats));
    CHECK_EQ(stats.collectives, lf_nexus_n_chunks(nexus));
    CHECK(stats.p99_s >= stats.p50_s && stats.p50_s > 0);
    CHECK(stats.busy_s > 0 && stats.bus_bytes_s == 0); /* alone nothing is on a bus */
    CHECK(stats.exposed_share == stats.exposed_s / stats.busy_s);
    stats.size = 3;
    CHECK_STATUS(lf_nexus_get_stats(nexus, &stats), LF_ERR_INVALID);
    lf_nexus_close(nexus);
    lf_map_unref(map);
}

/* ---- streams ----------------------------------------------------------------------------------------------------------- */

static lf_status slow_write(void *user)
{
    lf__sleep_ns(20000000);
    *(float *)user = 42;
    return LF_OK;
}

/* First chunk that starts with one block and holds another; its number, and the block it starts with. */
static int32_t find_shared_chunk(const lf_nexus *nexus, const lf_map *map, lf_chunk_info *c, int32_t *first)
{
    for (int32_t i = 0; i < lf_nexus_n_chunks(nexus); i++) {
        int32_t starts = -1, more = 0;
        *c = chunk_at(nexus, i);
        for (int32_t b = 0; b < lf_map_n_blocks(map); b++) {
            lf_block_info info = block_at(map, b);
            if (info.range.klass != c->range.klass) continue;
            if (info.range.offset == c->range.offset) starts = b;
            else more += info.range.offset > c->range.offset && info.range.offset < c->range.offset + c->range.count;
        }
        *first = starts;
        if (starts >= 0 && more > 0) return i;
    }
    FAIL_("no chunk of two blocks");
}

/* A block's gradient is made on a slow stream; the chunk is completed by other marks: on another stream (how 0), on none
 * (how 1), by finish (how 2). It must not go out before the slow stream is there. */
TEST(nexus_posts_behind_every_stream)
{
    set_up();
    recorder rec;
    lf_nexus *nexus;
    lf_stream *slow = NULL, *fast = NULL;
    lf_chunk_info c;
    int32_t first;
    lf_map *map = make_small(1);
    open_recorder(&rec, map, 16384, &nexus);
    const int32_t chunk = find_shared_chunk(nexus, map, &c, &first);
    CHECK_OK(lf_stream_open(device, 0, &slow));
    CHECK_OK(lf_stream_open(device, 0, &fast));
    for (int32_t how = 0; how < 3; how++) {
        float *x = lf_map_address(map, &c.range, LF_ROLE_GRAD);
        rec.n_posts = rec.n_waits = 0;
        *x = 0;
        CHECK_OK(lf_nexus_begin(nexus));
        CHECK_OK(lf_stream_run(slow, slow_write, x));
        CHECK_OK(lf_nexus_mark(nexus, first, slow));
        for (int32_t b = 0; b < lf_map_n_blocks(map) && how < 2; b++)
            if (b != first && !(block_at(map, b).flags & LF_PARAM_FROZEN))
                CHECK_OK(lf_nexus_mark(nexus, b, how == 0 ? fast : NULL));
        CHECK_OK(lf_nexus_finish(nexus, how == 2 ? fast : NULL));
        CHECK(rec.seen[chunk] == 42);
    }
    lf_stream_close(slow);
    lf_stream_close(fast);
    lf_nexus_close(nexus);
    lf_map_unref(map);
}

TEST(nexus_allocates_nothing_in_steady_state)
{
    set_up();
    recorder rec;
    lf_nexus *nexus;
    lf_map *map = make_small(1);
    open_recorder(&rec, map, 4096, &nexus);
    lf__alloc_fail_at(0);
    for (int32_t step = 0; step < 5; step++) {
        rec.n_posts = rec.n_waits = 0;
        CHECK_OK(lf_nexus_begin(nexus));
        mark_layer(nexus, map, INT32_MAX, NULL);
        mark_layer(nexus, map, 1, NULL);
        CHECK_OK(lf_nexus_finish(nexus, NULL));
    }
    CHECK_EQ(lf__alloc_fail_at(0), 0);
    lf_nexus_close(nexus);
    lf_map_unref(map);
}

LF_TEST_MAIN
