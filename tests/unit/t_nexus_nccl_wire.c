/* SPDX-License-Identifier: Apache-2.0 */
/* f32 gradients that travel as bf16 over NCCL, over the fakes: every bit, one operation a run, shares, captures, chunk sizes. */
#include "nexus_nccl_fixture.h"
#include "nexus_wire.h"

enum { MOST = 4 };

static lf_map *make_map(const rank *r)
{
    const model_shape m = {.grad_f32 = r->grad_f32,
                           .high_load = 4,
                           .n_layers = 3,
                           .n_experts = 4,
                           .norm = 600,
                           .qkv = 700,
                           .expert = 900,
                           .expert_step = 300};
    return make_model(&m);
}

static lf_map *make_sparse_map(const rank *r)
{
    const model_shape m = {
        .grad_f32 = r->grad_f32, .high_load = 1, .n_layers = 3, .n_experts = 4, .norm = 600, .expert = 900, .expert_step = 300};
    return make_model(&m);
}

static void prepare_wire(int32_t world, lf_map *(*make)(const rank *), void (*run)(rank *))
{
    prepare_nccl(world, make, run);
    for (int32_t i = 0; i < world; i++) {
        snprintf(ranks[i].opts.wire_dtype, LF_TEXT_MAX, "bf16");
        ranks[i].opts.chunk_bytes = 4096;
        ranks[i].steps = 6;
    }
}

static void mean(int32_t world)
{
    for (int32_t i = 0; i < world; i++) snprintf(ranks[i].opts.reduce, LF_TEXT_MAX, "mean");
}

static void steps_and_words(rank *r)
{
    char text[400] = "";
    wire_steps(r);
    if (r->status == LF_OK) r->status = lf_nexus_settle(r->nexus);
    if (r->status == LF_OK) r->status = lf_nexus_describe(r->nexus, text, sizeof text);
    if (r->status == LF_OK && !strstr(text, "3 gradient planes registered"))
        WRONG("describes itself as %s", text); /* the wire too */
}

/* NCCL divides on the way up to four ranks, and widening by then does not. */
TEST(nccl_sums_in_bf16)
{
    for (int32_t how = 0; how < 5; how++) {
        const int32_t world = how == 3 ? 4 : how == 4 ? 1 : 2;
        prepare_wire(world, make_map, steps_and_words);
        for (int32_t i = 0; i < world; i++) {
            ranks[i].opts.run_bytes = how == 1 ? 4096 : 1 << 20;
            ranks[i].opts.debug = how == 2;
        }
        if (how != 1) mean(world);
        run_ranks(world);
        all_are(world, LF_OK);
        for (int32_t i = 0; i < world; i++) CHECK_EQ(ranks[i].t.mean, how != 1 && world > 1);
    }
    CHECK_EQ(fake.count("registered"), 0); /* all given back */
}

static long calls_of[MOST]; /* that all ranks made in a rank's steps */
static int32_t runs_of[MOST];

static void count_calls(rank *r)
{
    runs_of[r->t.rank] = chunk_at(r->nexus, lf_nexus_n_chunks(r->nexus) - 1).run + 1;
    if (lf_nexus_n_chunks(r->nexus) < 2 * runs_of[r->t.rank]) WRONG("runs of a chunk show nothing");
    const long before = fake.count("calls");
    wire_steps(r);
    calls_of[r->t.rank] = fake.count("calls") - before;
}

/* Chunks of a run are neighbours on the wire, whatever lies between them in the map. */
TEST(nccl_joins_a_run_in_bf16)
{
    prepare_wire(1, make_map, count_calls);
    run_ranks(1);
    all_are(1, LF_OK);
    CHECK_EQ(calls_of[0], ranks[0].steps * runs_of[0]);
}

static void shares(rank *r)
{
    wire_steps(r);
    if (r->status == LF_OK) r->status = lf_nexus_gather(r->nexus, LF_ROLE_GRAD, 0, lf_nexus_n_chunks(r->nexus), r->stream);
    if (r->status == LF_OK) r->status = lf_nexus_gathered(r->nexus, r->stream);
    if (r->status == LF_OK) r->status = lf_stream_sync(r->stream);
    for (int32_t k = 0; k < lf_nexus_n_chunks(r->nexus) && r->status == LF_OK; k++) {
        lf_chunk_info c = chunk_at(r->nexus, k);
        c.share = c.range;
        for (int32_t b = 0; b < lf_map_n_blocks(r->map); b++) wire_check_block(r, &c, r->steps - 1, b);
    }
}

TEST(nccl_scatters_in_bf16)
{
    for (int32_t world = 2; world <= MOST; world += 2) {
        prepare_wire(world, make_map, shares);
        for (int32_t i = 0; i < world; i++) ranks[i].opts.shard_optimizer = 1;
        mean(world);
        run_ranks(world);
        all_are(world, LF_OK);
    }
}

static void beside_sparse(rank *r)
{
    int32_t n_sparse = 0, n_bf16 = 0;
    for (int32_t k = 0; k < lf_nexus_n_chunks(r->nexus); k++) {
        n_sparse += strcmp(chunk_at(r->nexus, k).form, "sparse") == 0;
        n_bf16 += strcmp(chunk_at(r->nexus, k).form, "bf16") == 0;
    }
    if (n_sparse == 0 || n_bf16 == 0) WRONG("%d sparse chunks, %d in bf16", n_sparse, n_bf16);
    wire_steps(r);
}

TEST(nccl_sums_bf16_beside_sparse)
{
    for (int32_t how = 0; how < 2; how++) {
        prepare_wire(2, make_sparse_map, beside_sparse);
        for (int32_t i = 0; i < 2; i++) {
            snprintf(ranks[i].opts.comm_strategy, LF_TEXT_MAX, "sparse");
            ranks[i].opts.run_bytes = how ? 4096 : 1 << 20;
        }
        mean(2);
        run_ranks(2);
        all_are(2, LF_OK);
    }
}

static void change_sizes(rank *r)
{
    static const int64_t sizes[] = {16384, 4096, 1 << 20};
    wire_steps(r);
    for (int32_t i = 0; i < (int32_t)LF_COUNT(sizes) && r->status == LF_OK; i++) {
        r->status = lf_nexus_retune(r->nexus, sizes[i], r->stream);
        if (r->status == LF_OK) r->status = wire_step(r, 10 + i);
        if (r->status == LF_OK) wire_check(r, 10 + i);
    }
}

TEST(nccl_changes_the_chunk_size_in_bf16)
{
    prepare_wire(2, make_map, change_sizes);
    mean(2);
    run_ranks(2);
    all_are(2, LF_OK);
}

/* The fake runs what is captured: kernels and sums of each capture are its own, and nothing of the handle changes by a replay. */
static void captured(rank *r)
{
    lf_nexus_stats before = {.size = sizeof before}, after = before;
    wire_steps(r);
    if (r->status == LF_OK) r->status = lf_nexus_settle(r->nexus);
    MUST(lf_nexus_get_stats(r->nexus, &before));
    for (int32_t again = 0; again < 2 && r->status == LF_OK; again++) {
        fake.capture(7 + (uint64_t)again);
        r->status = wire_step(r, 20 + again);
        if (r->status == LF_OK) wire_check(r, 20 + again);
    }
    fake.capture(0);
    for (int32_t i = 0; i < 10 && r->status == LF_OK; i++) r->status = lf_nexus_replayed(r->nexus, r->stream);
    if (r->status == LF_OK) r->status = lf_nexus_settle(r->nexus);
    MUST(lf_nexus_get_stats(r->nexus, &after));
    if (after.steps != before.steps + 10 || after.bytes != before.bytes + 10 * wire_sent(r->nexus))
        WRONG("%lld steps, %lld bytes", (long long)after.steps, (long long)after.bytes);
    if (r->status == LF_OK) r->status = wire_step(r, 30);
    if (r->status == LF_OK) wire_check(r, 30);
}

TEST(nccl_captures_bf16)
{
    prepare_wire(1, make_map, captured);
    run_ranks(1);
    all_are(1, LF_OK);
}

LF_TEST_MAIN
