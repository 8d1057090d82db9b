/* SPDX-License-Identifier: Apache-2.0 */
/* The sharded optimizer over the loopback: shares cover every chunk once, hold exact sums, and reach every rank bit for bit. */
#include "nexus_ranks.h"

enum { MOST = 4, N_LAYERS = 3, N_EXPERTS = 3 };

/* Chunks of every kind: divisible, with a rest, and too small to share. */
static lf_map *make_map(const rank *r)
{
    const model_shape m = {.grad_f32 = r->grad_f32,
                           .high_load = 1,
                           .n_layers = N_LAYERS,
                           .n_experts = N_EXPERTS,
                           .embed = 3001,
                           .norm = 33,
                           .qkv = 768,
                           .expert = 601,
                           .expert_step = 403};
    return make_model(&m);
}

static void prepare_shares(int32_t world, void (*run)(rank *))
{
    prepare(world, make_map, run);
    for (int32_t i = 0; i < world; i++) {
        ranks[i].opts.run_bytes = 16384;
        ranks[i].opts.shard_optimizer = 1;
    }
}

static float grad_of(int32_t from, int32_t step, int64_t i) { return fours(from, step, 0, i); }

static void write_grads(const rank *r, int32_t step)
{
    for (int32_t k = 0; k < lf_nexus_n_chunks(r->nexus); k++) {
        const lf_chunk_info c = chunk_at(r->nexus, k);
        void *g = lf_map_address(r->map, &c.range, LF_ROLE_GRAD);
        for (int64_t i = 0; i < c.range.count; i++) put(g, i, c.dtype, grad_of(r->t.rank, step, c.range.offset + i));
    }
}

static void check_part(rank *r, const lf_chunk_info *c, const lf_range *part, int32_t step)
{
    if (part->count == 0) return;
    const void *g = lf_map_address(r->map, part, LF_ROLE_GRAD);
    for (int64_t i = 0; i < part->count; i++) {
        float want = 0;
        for (int32_t s = 0; s < r->t.world; s++) want += grad_of(s, step, part->offset + i);
        if (strcmp(r->opts.reduce, "mean") == 0) want /= (float)r->t.world;
        if (get(g, i, c->dtype) != (double)want)
            WRONG("rank %d step %d element %d: %g, expected %g", r->t.rank, step, (int)(part->offset + i), get(g, i, c->dtype),
                  (double)want);
    }
}

/* Any bits, minus zero and NaN among them. */
static uint8_t byte_of(int32_t owner, int32_t role, int64_t i) { return (uint8_t)(owner * 89 + role * 7 + i * 57 + (i >> 5)); }

static void fill_bytes(const lf_map *map, const lf_range *part, int32_t role, int32_t owner, int64_t width)
{
    uint8_t *at = lf_map_address(map, part, role);
    for (int64_t i = 0; i < part->count * width; i++) at[i] = byte_of(owner, role, part->offset * width + i);
}

static void check_bytes(rank *r, const lf_chunk_info *c, int32_t role, int64_t width)
{
    const uint8_t *at = lf_map_address(r->map, &c->range, role);
    for (int64_t i = 0; i < c->range.count * width; i++) {
        const int64_t element = i / width;
        const int32_t owner =
            c->share.count == 0 || element >= c->share.count * r->t.world ? 99 : (int32_t)(element / c->share.count);
        if (at[i] != byte_of(owner, role, c->range.offset * width + i))
            WRONG("rank %d %s byte %d of a chunk is %d, not rank %d's", r->t.rank, lf_role_name(role), (int)i, at[i], owner);
    }
}

static lf_status spread(rank *r, int32_t role)
{
    const lf_map *map = r->map;
    lf_nexus *nexus = r->nexus;
    const int32_t n = lf_nexus_n_chunks(nexus);
    for (int32_t k = 0; k < n; k++) {
        const lf_chunk_info c = chunk_at(nexus, k);
        const int64_t width = (int64_t)lf_dtype_bytes(dtype_of(map, c.range.klass, role));
        if (width == 0) continue;
        if (c.share.count) fill_bytes(map, &c.share, role, r->t.rank, width);
        if (c.rest.count) fill_bytes(map, &c.rest, role, 99, width);
    }
    lf_status rc = lf_nexus_gather(nexus, role, 0, n / 2, r->stream);
    if (rc == LF_OK) rc = lf_nexus_gather(nexus, role, n / 2, n - n / 2, r->stream);
    if (rc == LF_OK && lf_nexus_begin(nexus) != LF_ERR_STATE) WRONG("a step began over gathers");
    if (rc == LF_OK) rc = lf_nexus_gathered(nexus, r->stream);
    if (rc == LF_OK) rc = lf_stream_sync(r->stream);
    for (int32_t k = 0; k < n && rc == LF_OK; k++) {
        const lf_chunk_info c = chunk_at(nexus, k);
        const int64_t width = (int64_t)lf_dtype_bytes(dtype_of(map, c.range.klass, role));
        if (width) check_bytes(r, &c, role, width);
    }
    return rc;
}

static lf_status one_step(rank *r, int32_t step)
{
    lf_nexus *nexus = r->nexus;
    lf_stream *stream = r->stream;
    int32_t first, n;
    lf_status rc = lf_nexus_begin(nexus);
    write_grads(r, step);
    if (rc == LF_OK && lf_nexus_gather(nexus, LF_ROLE_WEIGHT, 0, 1, stream) != LF_ERR_STATE) WRONG("a gather before the flush");
    for (int32_t b = lf_map_n_blocks(r->map) - 1; b >= 0 && rc == LF_OK; b--) rc = lf_nexus_mark(nexus, b, stream);
    if (step == 0 && rc == LF_OK) rc = lf_nexus_finish(nexus, stream);
    if (step == 0) return rc;
    if (rc == LF_OK) rc = lf_nexus_flush(nexus, stream);
    while (rc == LF_OK && (rc = lf_nexus_take(nexus, stream, &first, &n)) == LF_OK) {
        rc = lf_nexus_gather(nexus, LF_ROLE_EXP_AVG, first, n, stream); /* beside the runs that are still under way */
        if (rc == LF_OK && first + n < lf_nexus_n_chunks(nexus) && lf_nexus_gathered(nexus, stream) != LF_ERR_STATE)
            WRONG("gathers were waited for before sums that were posted earlier");
    }
    return rc == LF_END ? lf_nexus_gathered(nexus, stream) : rc;
}

static void check_kinds(rank *r)
{
    int64_t shared = 0, rest = 0;
    for (int32_t k = 0; k < lf_nexus_n_chunks(r->nexus); k++) {
        const lf_chunk_info c = chunk_at(r->nexus, k);
        if (c.share.count * r->t.world + c.rest.count != c.range.count) WRONG("chunk %d is not covered", k);
        if (c.rest.offset + c.rest.count != c.range.offset + c.range.count) WRONG("chunk %d does not end with its rest", k);
        if (c.share.offset != c.range.offset + r->t.rank * c.share.count) WRONG("chunk %d: a share at the wrong place", k);
        shared += c.share.count;
        rest += c.rest.count;
    }
    if (shared == 0 || (rest == 0) != (r->t.world == 1)) WRONG("not all kinds of chunks");
}

static void shares_of_steps(rank *r)
{
    check_kinds(r);
    for (int32_t step = 0; step < 3 && r->status == LF_OK; step++) {
        r->status = one_step(r, step);
        if (r->status == LF_OK) r->status = lf_stream_sync(r->stream);
        for (int32_t k = 0; k < lf_nexus_n_chunks(r->nexus) && r->status == LF_OK; k++) {
            const lf_chunk_info c = chunk_at(r->nexus, k);
            check_part(r, &c, &c.share, step);
            check_part(r, &c, &c.rest, step);
        }
        for (int32_t role = 0; role < LF_N_ROLES && r->status == LF_OK && r->t.world > 1; role++) r->status = spread(r, role);
    }
}

/* Transports with both entries, one, and none; eager and on a stream; sums and means. */
TEST(shard_shares_are_exact_and_reach_everyone)
{
    for (int32_t world = 1; world <= MOST; world++)
        for (int32_t how = 0; how < 4; how++) {
            prepare_shares(world, shares_of_steps);
            for (int32_t i = 0; i < world; i++) {
                if (how & 1) ranks[i].t.scatter = NULL;
                if (how & 2) ranks[i].t.gather = NULL;
                ranks[i].grad_f32 = how != 2;
                ranks[i].on_stream = how >= 2;
                if (how == 1 || world == 3) snprintf(ranks[i].opts.reduce, LF_TEXT_MAX, "sum"); /* a third is not exact */
            }
            run_ranks(world);
            all_are(world, LF_OK);
        }
}

static void do_nothing(rank *r) { (void)r; }

TEST(shard_is_agreed_on)
{
    prepare_shares(2, do_nothing);
    ranks[1].opts.shard_optimizer = 0;
    run_ranks(2);
    all_are(2, LF_ERR_PEER);
    CHECK_HAS(ranks[0].text, "different [nexus] options");
    CHECK_HAS(ranks[0].text, "shard_optimizer 1");
    prepare_shares(2, do_nothing);
    for (int32_t i = 0; i < 2; i++) snprintf(ranks[i].opts.comm_strategy, LF_TEXT_MAX, "sparse");
    run_ranks(2);
    all_are(2, LF_ERR_INVALID);
    CHECK_HAS(ranks[0].text, "shard_optimizer with chunks in the sparse form");
}

/* A peer that leaves in the middle of a gather ends the handle with an error that says what was being done. */
static void rank_1_leaves(rank *r)
{
    const int32_t n = lf_nexus_n_chunks(r->nexus);
    if (r->t.rank == 1) return;
    r->status = lf_nexus_gather(r->nexus, LF_ROLE_WEIGHT, 0, n, NULL);
    if (r->status == LF_OK && lf_nexus_gather(r->nexus, LF_ROLE_WEIGHT, 0, n, NULL) == LF_OK)
        WRONG("twice as many gathers as chunks");
    if (r->status == LF_OK) r->status = lf_nexus_gathered(r->nexus, NULL);
    if (r->status < 0 && lf_nexus_begin(r->nexus) != r->status) WRONG("the handle goes on");
}

TEST(shard_names_what_failed)
{
    prepare_shares(2, rank_1_leaves);
    run_ranks(2);
    CHECK_EQ(ranks[0].status, LF_ERR_PEER);
}

TEST(shard_alone_needs_no_gathers)
{
    set_up();
    lf_map *map = make_map(&(rank){.grad_f32 = 1});
    lf_nexus *nexus = NULL;
    lf_nexus_options opts;
    CHECK_OK(lf_options_init("nexus", &opts, sizeof opts));
    opts.shard_optimizer = 1;
    CHECK_OK(lf_nexus_open(&nexus, map, NULL, &opts));
    const lf_chunk_info c = chunk_at(nexus, 0);
    CHECK(c.share.count == c.range.count && c.share.offset == c.range.offset && c.rest.count == 0);
    CHECK_STATUS(lf_nexus_gather(nexus, LF_ROLE_WEIGHT, 0, 1, NULL), LF_ERR_STATE);
    lf_nexus_close(nexus);
    lf_transport end;
    CHECK_OK(lf_loopback_open(1, &end));
    CHECK_OK(lf_nexus_open(&nexus, map, &end, &opts));
    CHECK_OK(lf_nexus_gather(nexus, LF_ROLE_WEIGHT, 0, lf_nexus_n_chunks(nexus), NULL));
    CHECK_STATUS(lf_nexus_gather(nexus, LF_N_ROLES, 0, 1, NULL), LF_ERR_INVALID);
    CHECK_STATUS(lf_nexus_gather(nexus, LF_ROLE_WEIGHT, 1, lf_nexus_n_chunks(nexus), NULL), LF_ERR_INVALID);
    CHECK_OK(lf_nexus_gathered(nexus, NULL));
    lf_nexus_close(nexus);
    lf_map_unref(map);
    lf_device_close(device);
}

LF_TEST_MAIN
