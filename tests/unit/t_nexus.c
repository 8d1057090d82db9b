/* SPDX-License-Identifier: Apache-2.0 */
/* Steps: sums over ranks in any order of marks, late blocks, streams, and everything that can go wrong. */
#include "nexus_fixture.h"

enum { N_LAYERS = 4, N_EXPERTS = 5, MOST = 4 };

/* A small mixture of experts; `extra` makes another map. */
static lf_map *make_map(int32_t grad_f32, int32_t extra)
{
    const model_shape m = {.grad_f32 = grad_f32,
                           .high_load = 2,
                           .n_layers = N_LAYERS,
                           .n_experts = N_EXPERTS,
                           .embed = 3000,
                           .norm = 32,
                           .qkv = 700 + extra,
                           .frozen = 100,
                           .expert = 500,
                           .expert_step = 333,
                           .head = 2500};
    return make_model(&m);
}

/* Multiples of 4 up to 60: sums of four, and their quarters, are exact in bf16 too. */
static float grad_of(int32_t rank, int32_t step, int32_t block, int64_t i)
{
    return (float)(4 * ((rank * 13 + step * 7 + block * 5 + i * 3) % 31 - 15));
}

static void write_grad(const lf_map *map, int32_t rank, int32_t step, int32_t block, bool garbage)
{
    lf_block_info b = block_at(map, block);
    void *g = lf_map_address(map, &b.range, LF_ROLE_GRAD);
    for (int64_t i = 0; i < b.range.count; i++)
        put(g, i, dtype_of(map, b.range.klass, LF_ROLE_GRAD), garbage ? 777 : grad_of(rank, step, block, i));
}

/* ---- ranks as threads -------------------------------------------------------------------------------------------------- */

typedef struct rank {
    lf_transport t;
    lf_nexus_options opts;
    void (*run)(struct rank *rank);
    int32_t grad_f32, extra, steps;
    lf_status status;
    char text[600], wrong[200];
    lf_nexus_stats stats;
    lf__thread *thread;
} rank;

static rank ranks[MOST];

static void enter(void *user)
{
    rank *r = user;
    r->run(r);
    if (r->status < 0) snprintf(r->text, sizeof r->text, "%s", lf_error_text());
}

static void prepare(int32_t world, void (*run)(rank *))
{
    lf_transport ends[MOST];
    set_up();
    CHECK_OK(lf_loopback_open(world, ends));
    for (int32_t i = 0; i < world; i++) {
        ranks[i] = (rank){.t = ends[i], .run = run, .grad_f32 = 1, .steps = 1};
        CHECK_OK(lf_options_init("nexus", &ranks[i].opts, sizeof ranks[i].opts));
        ranks[i].opts.chunk_bytes = 4096;
        ranks[i].opts.timeout_s = 20;
    }
}

static void run_ranks(int32_t world)
{
    for (int32_t i = 0; i < world; i++) CHECK_OK(lf__thread_start(&ranks[i].thread, "rank", enter, &ranks[i]));
    for (int32_t i = 0; i < world; i++) lf__thread_join(ranks[i].thread);
    for (int32_t i = 0; i < world; i++) CHECK_STR(ranks[i].wrong, "");
}

/* Order of marks: backward's, but shuffled a little, another way on each rank. */
static void order_of_marks(int32_t seed, int32_t step, int32_t *order, int32_t n)
{
    lf__rng rng;
    lf__rng_init(&rng, 3, (uint32_t)seed, (uint32_t)step, 0);
    for (int32_t i = 0; i < n; i++) order[i] = n - 1 - i;
    for (int32_t i = 0; i + 1 < n; i++) {
        int32_t j = i + lf__rng_below(&rng, n - i < 6 ? n - i : 6), was = order[i];
        order[i] = order[j];
        order[j] = was;
    }
}

/* Flushed, then taken run by run; `whole` after that many runs, what is left in one go. */
static lf_status take_all(rank *r, lf_nexus *nexus, int32_t whole, lf_stream *stream)
{
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

static lf_status reduce_once(rank *r, lf_nexus *nexus, const lf_map *map, int32_t step, lf_stream *stream)
{
    int32_t order[100], n = lf_map_n_blocks(map);
    lf_status rc = lf_nexus_begin(nexus);
    order_of_marks(r->t.rank, step, order, n);
    for (int32_t i = 0; i < n && rc == LF_OK; i++) {
        lf_block_info b = block_at(map, order[i]);
        if (b.flags & LF_PARAM_FROZEN) continue;
        const bool late = is_late(r->t.rank, step, &b);
        write_grad(map, r->t.rank, step, order[i], late);
        if (!late) rc = lf_nexus_mark(nexus, order[i], stream);
    }
    if (rc < 0) return rc;
    return step == 0 ? lf_nexus_finish(nexus, stream) : take_all(r, nexus, step == 1 ? INT32_MAX : 3, stream);
}

static void check_sums(rank *r, const lf_map *map, int32_t step, float divisor)
{
    for (int32_t k = 0; k < lf_map_n_blocks(map); k++) {
        lf_block_info b = block_at(map, k);
        if (b.flags & LF_PARAM_FROZEN) continue;
        const void *g = lf_map_address(map, &b.range, LF_ROLE_GRAD);
        for (int64_t i = 0; i < b.range.count; i++) {
            float sum = 0;
            for (int32_t s = 0; s < r->t.world; s++) sum += is_late(s, step, &b) ? 0 : grad_of(s, step, k, i);
            if (get(g, i, dtype_of(map, b.range.klass, LF_ROLE_GRAD)) != sum / divisor)
                WRONG("rank %d step %d %s[%d]: %g, expected %g", r->t.rank, step, b.name, (int)i,
                      (double)get(g, i, dtype_of(map, b.range.klass, LF_ROLE_GRAD)), (double)(sum / divisor));
        }
    }
}

static void reduce_steps(rank *r)
{
    lf_map *map = make_map(r->grad_f32, r->extra);
    lf_nexus *nexus = NULL;
    lf_stream *stream = NULL;
    r->status = lf_nexus_open(&nexus, map, &r->t, &r->opts);
    if (r->extra == 0 && r->status == LF_OK && r->opts.priority == 1) r->status = lf_stream_open(cpu, 0, &stream);
    for (int32_t step = 0; step < r->steps && r->status == LF_OK; step++) {
        r->status = reduce_once(r, nexus, map, step, stream);
        if (r->status == LF_OK) r->status = lf_stream_sync(stream);
        if (r->status == LF_OK)
            check_sums(r, map, step, strcmp(r->opts.reduce, "mean") == 0 && !r->t.mean ? (float)r->t.world : 1);
    }
    r->stats = (lf_nexus_stats){.size = sizeof r->stats};
    if (nexus && lf_nexus_get_stats(nexus, &r->stats) < 0) WRONG("%s", lf_error_text());
    lf_stream_close(stream);
    if (nexus) lf_nexus_close(nexus);
    else r->t.close(r->t.user);
    lf_map_unref(map);
}

/* Ranks mark in different orders and miss different experts; every rank ends with the same exact sums. */
TEST(nexus_sums_over_ranks)
{
    for (int32_t world = 1; world <= MOST; world++)
        for (int32_t how = 0; how < 4; how++) {
            prepare(world, reduce_steps);
            for (int32_t i = 0; i < world; i++) {
                ranks[i].steps = 3;
                ranks[i].grad_f32 = how & 1;
                ranks[i].opts.priority = how >> 1; /* the test's own use: 1 works on a stream */
                if (how == 1 || world == 3) snprintf(ranks[i].opts.reduce, LF_TEXT_MAX, "sum"); /* a third is not exact */
            }
            run_ranks(world);
            for (int32_t i = 0; i < world; i++) {
                if (ranks[i].status < 0) FAIL_("rank %d: %s", i, ranks[i].text);
                CHECK_EQ(ranks[i].stats.steps, 3);
                CHECK(ranks[i].stats.collectives > 3 * N_LAYERS && ranks[i].stats.collectives == ranks[0].stats.collectives);
                CHECK_EQ(ranks[i].stats.bytes, ranks[0].stats.bytes);
                CHECK(ranks[i].stats.late_blocks > 0 && ranks[i].stats.p95_s >= ranks[i].stats.p50_s);
            }
        }
}

/* ---- a transport that writes down what happens ------------------------------------------------------------------------- */

typedef struct recorder {
    int32_t n_posts, n_waits, fail_post, fail_wait, closed;
    bool done;
    const void *data[400];
    int64_t count[400];
    float seen[400]; /* the first element when it was posted */
    int32_t run_open, n_runs, fail_run, run_first[400], settled, n_memory;
    bool sick;
    const void *memory[8];
    int64_t memory_bytes[8];
} recorder;

static lf_status record_post(void *user, void *data, int64_t count, int32_t dtype, lf_stream *stream, int64_t *ticket)
{
    recorder *rec = user;
    lf_status rc = lf_stream_sync(stream);
    if (rc < 0) return rc;
    if (dtype != LF_DTYPE_I64) {
        if (rec->n_posts == rec->fail_post) return lf_transport_fail(LF_ERR_PEER, "the wire broke");
        rec->data[rec->n_posts] = data;
        rec->count[rec->n_posts] = count;
        rec->seen[rec->n_posts] = get(data, 0, dtype);
        *ticket = 1000 + rec->n_posts++;
    }
    return LF_OK;
}

static lf_status record_wait(void *user, int64_t ticket, lf_stream *stream, double timeout_s)
{
    recorder *rec = user;
    (void)stream, (void)timeout_s;
    if (ticket < 1000) return LF_OK; /* agreeing on the map: world 1 */
    if (ticket != 1000 + rec->n_waits) return lf_transport_fail(LF_ERR_INTERNAL, "waits out of order");
    if (rec->n_waits++ == rec->fail_wait) return LF_ERR_TIMEOUT; /* without a text */
    return LF_OK;
}

static lf_status record_query(void *user, int64_t ticket)
{
    const recorder *rec = user;
    return ticket < 1000 ? LF_ERR_INTERNAL : rec->done ? LF_OK : LF_AGAIN;
}

/* Runs are written down too: posts between open and close, and what they are called. */
static lf_status record_run(void *user, int32_t open, const char *label)
{
    recorder *rec = user;
    if (open == rec->run_open) return lf_transport_fail(LF_ERR_INTERNAL, "runs are not closed or not opened");
    rec->run_open = open;
    if (open) rec->run_first[rec->n_runs] = rec->n_posts;
    else rec->n_runs++;
    if (!strstr(label, "(chunks ")) return lf_transport_fail(LF_ERR_INTERNAL, "a run without a name");
    return rec->n_runs == rec->fail_run ? lf_transport_fail(LF_ERR_PEER, "the launch broke") : LF_OK;
}

static lf_status record_check(void *user)
{
    return ((const recorder *)user)->sick ? lf_transport_fail(LF_ERR_PEER, "a peer died meanwhile") : LF_OK;
}

static lf_status record_settle(void *user, double timeout_s)
{
    recorder *rec = user;
    rec->settled++;
    return timeout_s > 0 ? LF_OK : LF_ERR_INTERNAL;
}

static lf_status record_stats(void *user, lf_nexus_stats *stats)
{
    (void)user;
    stats->p50_s = 1;
    stats->p95_s = 2;
    stats->p99_s = 3;
    stats->busy_s = 4;
    return LF_OK;
}

static lf_status record_memory(void *user, void *base, int64_t bytes)
{
    recorder *rec = user;
    rec->memory[rec->n_memory] = base;
    rec->memory_bytes[rec->n_memory++] = bytes;
    return LF_OK;
}

static void record_close(void *user) { ((recorder *)user)->closed++; }

static void open_recorder(recorder *rec, lf_map *map, int64_t chunk_bytes, lf_nexus **nexus)
{
    *rec = (recorder){.fail_post = -1, .fail_wait = -1};
    lf_transport t = {.size = sizeof t,
                      .name = "recorder",
                      .user = rec,
                      .rank = 0,
                      .world = 1,
                      .post = record_post,
                      .wait = record_wait,
                      .close = record_close,
                      .query = record_query};
    lf_nexus_options opts;
    CHECK_OK(lf_options_init("nexus", &opts, sizeof opts));
    opts.chunk_bytes = chunk_bytes;
    CHECK_OK(lf_nexus_open(nexus, map, &t, &opts));
}

/* With everything that a transport may have. */
static void open_full_recorder(recorder *rec, lf_map *map, int64_t run_bytes, int32_t mean, lf_nexus **nexus)
{
    *rec = (recorder){.fail_post = -1, .fail_wait = -1, .fail_run = -1};
    lf_transport t = {.size = sizeof t,
                      .name = "recorder",
                      .user = rec,
                      .rank = 0,
                      .world = 1,
                      .post = record_post,
                      .wait = record_wait,
                      .close = record_close,
                      .query = record_query,
                      .run = record_run,
                      .check = record_check,
                      .memory = record_memory,
                      .settle = record_settle,
                      .stats = record_stats,
                      .mean = mean};
    lf_nexus_options opts;
    CHECK_OK(lf_options_init("nexus", &opts, sizeof opts));
    opts.chunk_bytes = 4096;
    opts.run_bytes = run_bytes;
    CHECK_OK(lf_nexus_open(nexus, map, &t, &opts));
}

static int32_t mark_layer(lf_nexus *nexus, const lf_map *map, int32_t layer, lf_stream *stream)
{
    int32_t n = 0;
    for (int32_t b = 0; b < lf_map_n_blocks(map); b++) {
        lf_block_info info = block_at(map, b);
        if (info.layer != layer || info.flags & LF_PARAM_FROZEN) continue;
        CHECK_OK(lf_nexus_mark(nexus, b, stream));
        n++;
    }
    return n;
}

/* Chunks of a layer go out while later layers are still at work, in the table's order and nothing else. */
TEST(nexus_posts_as_soon_as_it_may)
{
    set_up();
    recorder rec;
    lf_nexus *nexus;
    lf_map *map = make_map(1, 0);
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
            lf_chunk_info c = {.size = sizeof c};
            CHECK_OK(lf_nexus_get_chunk(nexus, i, &c));
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
    lf_map *map = make_map(0, 0);
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
    lf_map *map = make_map(1, 0);
    open_full_recorder(&rec, map, 16384, 0, &nexus);
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
            lf_chunk_info c = {.size = sizeof c};
            CHECK_OK(lf_nexus_get_chunk(nexus, i, &c));
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
    lf_map *map = make_map(1, 0);
    for (int32_t full = 0; full < 2; full++) {
        int32_t first = -1, n = -1, next = 0, runs = 0;
        double x = 1;
        if (full) open_full_recorder(&rec, map, 16384, 0, &nexus);
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
            lf_chunk_info c = {.size = sizeof c};
            CHECK_EQ(first, next);
            next = first + n;
            CHECK_EQ(rec.n_waits, next);
            for (int32_t i = first; i < next; i++) {
                CHECK_OK(lf_nexus_get_chunk(nexus, i, &c));
                CHECK_EQ(c.run, runs);
            }
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
    lf_map *map = make_map(1, 0);
    open_full_recorder(&rec, map, 16384, 0, &nexus);
    int64_t bytes = 0;
    for (int32_t k = 0; k < rec.n_memory; k++) bytes += rec.memory_bytes[k];
    for (int32_t i = 0; i < lf_nexus_n_chunks(nexus); i++) { /* every chunk lies in memory that the transport was told of */
        lf_chunk_info c = {.size = sizeof c};
        CHECK_OK(lf_nexus_get_chunk(nexus, i, &c));
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
    open_full_recorder(&rec, map, 16384, 0, &nexus);
    rec.fail_run = 2;
    CHECK_OK(lf_nexus_begin(nexus));
    CHECK_STATUS(lf_nexus_finish(nexus, NULL), LF_ERR_PEER);
    CHECK_HAS(lf_error_text(), "of layer 3 (chunks ");
    CHECK_HAS(lf_error_text(), "the launch broke");
    lf_nexus_close(nexus);
    lf_map_unref(map);
}

/* Who divides: a transport that can, or finish; never both. */
TEST(nexus_divides_once)
{
    set_up();
    recorder rec;
    lf_nexus *nexus;
    lf_map *map = make_map(1, 0);
    lf_nexus_options opts;
    lf_transport t = {.size = sizeof t, .name = "recorder", .user = &rec, .world = 1, .post = record_post, .wait = record_wait};
    t.mean = 1;
    CHECK_OK(lf_options_init("nexus", &opts, sizeof opts));
    snprintf(opts.reduce, sizeof opts.reduce, "sum");
    CHECK_STATUS(lf_nexus_open(&nexus, map, &t, &opts), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "divides by the world, but reduce is sum");
    prepare(2, reduce_steps);
    for (int32_t i = 0; i < 2; i++) ranks[i].t.mean = 1; /* the loopback does not, so the plain sum must come out */
    run_ranks(2);
    for (int32_t i = 0; i < 2; i++) CHECK_EQ(ranks[i].status, LF_OK);
    lf_map_unref(map);
}

TEST(nexus_takes_times_when_they_end)
{
    set_up();
    recorder rec;
    lf_nexus *nexus;
    lf_map *map = make_map(1, 0);
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

/* ---- experts without a token ------------------------------------------------------------------------------------------- */

/* Expert 1 has no token anywhere, expert 2 only on rank 0, and which of layer 2's have some depends on the step. */
static int64_t tokens_of(int32_t rank_, int32_t step, const lf_block_info *b)
{
    if (b->expert < 0) return 0; /* not read */
    if (b->expert == 1 || (b->layer == 2 && (b->expert + step) % 2)) return 0;
    return b->expert == 2 && rank_ != 0 ? 0 : 5 + rank_;
}

static void skip_steps(rank *r)
{
    lf_map *map = make_map(r->grad_f32, 0);
    lf_nexus *nexus = NULL;
    int64_t tokens[100], empty_bytes = 0;
    const int32_t n = lf_map_n_blocks(map);
    r->status = lf_nexus_open(&nexus, map, &r->t, &r->opts);
    for (int32_t step = 0; step < r->steps && r->status == LF_OK; step++) {
        for (int32_t b = 0; b < n; b++) {
            const lf_block_info info = block_at(map, b);
            tokens[b] = tokens_of(r->t.rank, step, &info);
            if (info.flags & LF_PARAM_FROZEN) continue;
            write_grad(map, r->t.rank, step, b, info.expert >= 0 && tokens[b] == 0);
        }
        r->status = lf_nexus_begin(nexus);
        if (r->status == LF_OK && r->opts.skip_empty) r->status = lf_nexus_present(nexus, tokens);
        if (r->status == LF_OK && r->opts.skip_empty && lf_nexus_present(nexus, tokens) != LF_ERR_STATE) WRONG("told twice");
        for (int32_t b = n - 1; b >= 0 && r->status == LF_OK; b--) {
            const lf_block_info info = block_at(map, b);
            if (info.flags & LF_PARAM_FROZEN || (info.expert >= 0 && tokens[b] == 0)) continue; /* late */
            r->status = lf_nexus_mark(nexus, b, NULL);
        }
        if (r->status == LF_OK) r->status = lf_nexus_finish(nexus, NULL);
        for (int32_t b = 0; b < n && r->status == LF_OK; b++) {
            const lf_block_info info = block_at(map, b);
            if (info.flags & LF_PARAM_FROZEN) continue;
            const void *g = lf_map_address(map, &info.range, LF_ROLE_GRAD);
            bool anyone = info.expert < 0;
            for (int32_t s = 0; s < r->t.world; s++) anyone = anyone || tokens_of(s, step, &info) > 0;
            if (!anyone) empty_bytes += info.range.count * (int64_t)lf_dtype_bytes(dtype_of(map, info.range.klass, LF_ROLE_GRAD));
            for (int64_t i = 0; i < info.range.count; i++) {
                float sum = 0;
                for (int32_t s = 0; s < r->t.world; s++)
                    sum += info.expert < 0 || tokens_of(s, step, &info) ? grad_of(s, step, b, i) : 0;
                if (get(g, i, dtype_of(map, info.range.klass, LF_ROLE_GRAD)) != sum)
                    WRONG("%s[%d] of step %d", info.name, (int)i, step);
            }
        }
    }
    r->stats = (lf_nexus_stats){.size = sizeof r->stats};
    lf_nexus_get_stats(nexus, &r->stats);
    if (r->status == LF_OK && r->opts.skip_empty &&
        (r->stats.skipped_bytes == 0 || r->stats.skipped_bytes > empty_bytes + 256 * n * r->steps))
        WRONG("%lld bytes skipped, %lld empty", (long long)r->stats.skipped_bytes, (long long)empty_bytes);
    if (r->status == LF_OK && r->stats.collectives + r->stats.skipped != (int64_t)r->steps * lf_nexus_n_chunks(nexus))
        WRONG("%lld collectives and %lld skipped", (long long)r->stats.collectives, (long long)r->stats.skipped);
    if (nexus) lf_nexus_close(nexus);
    else r->t.close(r->t.user);
    lf_map_unref(map);
}

/* The same sums, whether what is empty everywhere moves or not; with shares too. */
TEST(nexus_skips_what_nobody_has)
{
    for (int32_t world = 1; world <= MOST; world++)
        for (int32_t how = 0; how < 3; how++) {
            prepare(world, skip_steps);
            for (int32_t i = 0; i < world; i++) {
                snprintf(ranks[i].opts.reduce, LF_TEXT_MAX, "sum");
                ranks[i].opts.skip_empty = how > 0;
                ranks[i].steps = 3;
                ranks[i].grad_f32 = how;
            }
            run_ranks(world);
            for (int32_t i = 0; i < world; i++) {
                if (ranks[i].status < 0) FAIL_("rank %d: %s", i, ranks[i].text);
                CHECK_EQ(ranks[i].stats.skipped, ranks[0].stats.skipped);
                CHECK((ranks[i].stats.skipped > 3) == (how > 0));
            }
        }
}

TEST(nexus_is_told_tokens_in_time)
{
    set_up();
    recorder rec;
    lf_nexus *nexus;
    lf_map *map = make_map(1, 0);
    int64_t tokens[100] = {0};
    lf_nexus_options opts;
    lf_transport t = {.size = sizeof t, .name = "recorder", .user = &rec, .world = 1, .post = record_post, .wait = record_wait};
    open_recorder(&rec, map, 4096, &nexus);
    CHECK_OK(lf_nexus_begin(nexus));
    CHECK_STATUS(lf_nexus_present(nexus, tokens), LF_ERR_STATE);
    CHECK_HAS(lf_error_text(), "without skip_empty");
    lf_nexus_close(nexus);
    rec = (recorder){.fail_post = -1, .fail_wait = -1};
    CHECK_OK(lf_options_init("nexus", &opts, sizeof opts));
    opts.skip_empty = 1;
    CHECK_OK(lf_nexus_open(&nexus, map, &t, &opts));
    CHECK_STATUS(lf_nexus_present(nexus, tokens), LF_ERR_STATE);
    CHECK_OK(lf_nexus_begin(nexus));
    tokens[3] = -1;
    CHECK_STATUS(lf_nexus_present(nexus, tokens), LF_ERR_INVALID);
    tokens[3] = 0;
    mark_layer(nexus, map, -1, NULL);
    CHECK_STATUS(lf_nexus_present(nexus, tokens), LF_ERR_STATE);
    CHECK_HAS(lf_error_text(), "before the first mark");
    CHECK_OK(lf_nexus_finish(nexus, NULL)); /* not told: everything moves */
    CHECK_EQ(rec.n_posts, lf_nexus_n_chunks(nexus));
    rec.n_posts = rec.n_waits = 0;
    CHECK_OK(lf_nexus_begin(nexus));
    CHECK_OK(lf_nexus_present(nexus, tokens)); /* no expert has a token: dense chunks alone move, and wait for nobody's mark */
    CHECK_OK(lf_nexus_finish(nexus, NULL));
    CHECK(rec.n_posts > 0 && rec.n_posts < lf_nexus_n_chunks(nexus));
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
        *c = (lf_chunk_info){.size = sizeof *c};
        CHECK_OK(lf_nexus_get_chunk(nexus, i, c));
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
    lf_map *map = make_map(1, 0);
    open_recorder(&rec, map, 16384, &nexus);
    const int32_t chunk = find_shared_chunk(nexus, map, &c, &first);
    CHECK_OK(lf_stream_open(cpu, 0, &slow));
    CHECK_OK(lf_stream_open(cpu, 0, &fast));
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

/* ---- misuse ------------------------------------------------------------------------------------------------------------ */

TEST(nexus_refuses_misuse)
{
    set_up();
    recorder rec;
    lf_nexus *nexus;
    lf_map *map = make_map(1, 0);
    open_recorder(&rec, map, 4096, &nexus);
    CHECK_STATUS(lf_nexus_mark(nexus, 2, NULL), LF_ERR_STATE);
    CHECK_HAS(lf_error_text(), "l0.qkv is marked before a step was begun");
    CHECK_STATUS(lf_nexus_finish(nexus, NULL), LF_ERR_STATE);
    CHECK_OK(lf_nexus_begin(nexus));
    CHECK_STATUS(lf_nexus_begin(nexus), LF_ERR_STATE);
    CHECK_OK(lf_nexus_mark(nexus, 2, NULL));
    CHECK_STATUS(lf_nexus_mark(nexus, 2, NULL), LF_ERR_STATE);
    CHECK_HAS(lf_error_text(), "l0.qkv is marked twice");
    CHECK_STATUS(lf_nexus_mark(nexus, 3, NULL), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "l0.frozen is frozen");
    CHECK_STATUS(lf_nexus_mark(nexus, -1, NULL), LF_ERR_INVALID);
    CHECK_STATUS(lf_nexus_mark(nexus, 10000, NULL), LF_ERR_INVALID);
    CHECK_OK(lf_nexus_finish(nexus, NULL)); /* misuse does not end a step */
    CHECK_OK(lf_nexus_begin(nexus));
    lf_nexus_close(nexus); /* in the middle of a step */
    lf_map_unref(map);
}

TEST(nexus_refuses_to_open)
{
    set_up();
    recorder rec = {.fail_post = -1, .fail_wait = -1};
    lf_nexus *nexus;
    lf_map *map = make_map(1, 0), *bare = NULL, *half = NULL;
    lf_transport good = {.size = sizeof good,
                         .name = "recorder",
                         .user = &rec,
                         .rank = 0,
                         .world = 1,
                         .post = record_post,
                         .wait = record_wait,
                         .close = record_close},
                 t = good;
    t.post = NULL;
    CHECK_STATUS(lf_nexus_open(&nexus, map, &t, NULL), LF_ERR_INVALID);
    t = good, t.rank = 1;
    CHECK_STATUS(lf_nexus_open(&nexus, map, &t, NULL), LF_ERR_INVALID);
    t = good, t.size = 20;
    CHECK_STATUS(lf_nexus_open(&nexus, map, &t, NULL), LF_ERR_INVALID);
    t = good, t.world = 2; /* the recorder sums nothing: one rank answered */
    CHECK_STATUS(lf_nexus_open(&nexus, map, &t, NULL), LF_ERR_PEER);
    CHECK_HAS(lf_error_text(), "summed over 1 ranks, expected 2");
    CHECK_OK(lf_map_open(&bare, NULL));
    add_param(bare, "a", 10, LF_DTYPE_F32, 0, -1, 0);
    CHECK_OK(lf_map_plan(bare));
    CHECK_STATUS(lf_nexus_open(&nexus, bare, &good, NULL), LF_ERR_STATE);
    CHECK_HAS(lf_error_text(), "not allocated");
    lf_map_options opts;
    CHECK_OK(lf_options_init("map", &opts, sizeof opts));
    opts.grad_f32 = 0;
    CHECK_OK(lf_map_open(&half, &opts));
    add_param(half, "a", 10, LF_DTYPE_F16, 0, -1, 0);
    CHECK_OK(lf_map_plan(half));
    CHECK_OK(lf_map_allocate(half, cpu));
    CHECK_STATUS(lf_nexus_open(&nexus, half, &good, NULL), LF_ERR_UNSUPPORTED);
    CHECK_HAS(lf_error_text(), "f16");
    CHECK(nexus == NULL);
    CHECK_EQ(rec.closed, 0);                   /* a transport that was not taken stays the caller's */
    good.size = offsetof(lf_transport, query); /* a caller built before `query` */
    CHECK_OK(lf_nexus_open(&nexus, map, &good, NULL));
    lf_nexus_close(nexus);
    lf_map_unref(map);
    lf_map_unref(bare);
    lf_map_unref(half);
}

/* ---- failures ---------------------------------------------------------------------------------------------------------- */

TEST(nexus_names_the_chunk_that_fails)
{
    set_up();
    recorder rec;
    lf_nexus *nexus;
    lf_map *map = make_map(1, 0);
    open_recorder(&rec, map, 4096, &nexus);
    rec.fail_post = 1;
    CHECK_OK(lf_nexus_begin(nexus));
    lf_status rc = LF_OK;
    for (int32_t b = lf_map_n_blocks(map) - 1; b >= 0 && rc == LF_OK; b--)
        if (!(block_at(map, b).flags & LF_PARAM_FROZEN)) rc = lf_nexus_mark(nexus, b, NULL);
    CHECK_EQ(rc, LF_ERR_PEER);
    CHECK_HAS(lf_error_text(), "chunk 1 of ");
    CHECK_HAS(lf_error_text(), "(group dense, ");
    CHECK_HAS(lf_error_text(), "the wire broke");
    lf_error_clear();
    CHECK_STATUS(lf_nexus_finish(nexus, NULL), LF_ERR_PEER); /* never silent */
    CHECK_HAS(lf_error_text(), "the wire broke");
    CHECK_STATUS(lf_nexus_begin(nexus), LF_ERR_PEER);
    CHECK_EQ(rec.n_posts, 1);
    lf_nexus_close(nexus);
    open_recorder(&rec, map, 4096, &nexus);
    rec.fail_wait = 2;
    CHECK_OK(lf_nexus_begin(nexus));
    CHECK_STATUS(lf_nexus_finish(nexus, NULL), LF_ERR_TIMEOUT);
    CHECK_HAS(lf_error_text(), "chunk 2 of ");
    CHECK_HAS(lf_error_text(), "deadline passed"); /* words for a transport that gave none */
    lf_nexus_close(nexus);
    lf_map_unref(map);
}

TEST(nexus_finds_different_maps)
{
    prepare(3, reduce_steps);
    ranks[1].extra = 8;
    run_ranks(3);
    for (int32_t i = 0; i < 3; i++) {
        CHECK_EQ(ranks[i].status, LF_ERR_PEER);
        CHECK_HAS(ranks[i].text, "planned different maps");
    }
}

TEST(nexus_finds_different_options)
{
    prepare(2, reduce_steps);
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
    lf_map *map = make_map(1, 0);
    lf_nexus *nexus = NULL;
    r->status = lf_nexus_open(&nexus, map, &r->t, &r->opts);
    if (r->status == LF_OK && r->t.rank == 1) {
        r->status = lf_nexus_begin(nexus);
        for (int32_t b = lf_map_n_blocks(map) - 1; b > 20 && r->status == LF_OK; b--)
            if (!(block_at(map, b).flags & LF_PARAM_FROZEN)) r->status = lf_nexus_mark(nexus, b, NULL);
        if (how_it_stops) lf__sleep_ns(1500000000);
    } else if (r->status == LF_OK) {
        r->status = reduce_once(r, nexus, map, 0, NULL);
    }
    lf_nexus_close(nexus);
    lf_map_unref(map);
}

TEST(nexus_survives_a_peer_that_leaves)
{
    how_it_stops = 0;
    prepare(3, one_stops);
    run_ranks(3);
    for (int32_t i = 0; i < 3; i += 2) {
        CHECK_EQ(ranks[i].status, LF_ERR_PEER);
        CHECK_HAS(ranks[i].text, "chunk ");
    }
}

TEST(nexus_survives_a_peer_that_hangs)
{
    how_it_stops = 1;
    prepare(3, one_stops);
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

TEST(nexus_allocates_nothing_in_steady_state)
{
    set_up();
    recorder rec;
    lf_nexus *nexus;
    lf_map *map = make_map(1, 0);
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

TEST(nexus_open_without_memory)
{
    set_up();
    lf_map *map = make_map(1, 0);
    for (int64_t at = 1;; at++) {
        lf_transport end;
        lf_nexus *nexus = NULL;
        CHECK_OK(lf_loopback_open(1, &end));
        lf__alloc_fail_at(at);
        lf_status rc = lf_nexus_open(&nexus, map, &end, NULL);
        lf__alloc_fail_at(0);
        if (rc == LF_OK) {
            lf_nexus_close(nexus);
            break;
        }
        CHECK_EQ(rc, LF_ERR_NOMEM);
        CHECK(nexus == NULL && at < 200);
        end.close(end.user);
    }
    lf_map_unref(map);
}

TEST(nexus_closes_the_device) { lf_device_close(cpu); }

LF_TEST_MAIN
