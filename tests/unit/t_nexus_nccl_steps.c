/* SPDX-License-Identifier: Apache-2.0 */
/* NCCL under NexusSync, over the fakes: steps, shares, chunk sizes, the sparse form, sums beside steps, captures and their replays. */
#include "nexus_nccl_fixture.h"

enum { MOST = 4 };

static lf_map *make_map_of(int32_t high_load)
{
    const model_shape m = {
        .grad_f32 = 1, .high_load = high_load, .n_layers = 3, .n_experts = 4, .norm = 600, .expert = 900, .expert_step = 300};
    return make_model(&m);
}

static lf_map *make_map(const rank *r) { return (void)r, make_map_of(4); }

/* Three experts are of those that may go in the sparse form. */
static lf_map *make_sparse_map(const rank *r) { return (void)r, make_map_of(1); }

/* A block's gradient, f32. */
static float *grad_at(const lf_map *map, const lf_block_info *b) { return lf_map_address(map, &b->range, LF_ROLE_GRAD); }

static float grad_of(int32_t from, int32_t step, int32_t block, int64_t i) { return eighths(from, step * 100 + block, i); }

/* In the order of backward, or with neighbours exchanged. */
static lf_status mark_backward(const rank *r, int32_t step)
{
    const int32_t n = lf_map_n_blocks(r->map);
    lf_status rc = LF_OK;
    for (int32_t k = n - 1; k >= 0 && rc == LF_OK; k--) {
        const int32_t block = r->t.rank % 2 && (k ^ 1) < n ? k ^ 1 : k;
        const lf_block_info b = block_at(r->map, block);
        float *g = grad_at(r->map, &b);
        for (int64_t i = 0; i < b.range.count; i++) g[i] = grad_of(r->t.rank, step, block, i);
        if (!is_late(r->t.rank, step, &b)) rc = lf_nexus_mark(r->nexus, block, r->stream);
    }
    return rc;
}

static lf_status one_step(const rank *r, int32_t step)
{
    lf_nexus *nexus = r->nexus;
    lf_status rc = lf_nexus_begin(nexus);
    if (rc == LF_OK) rc = mark_backward(r, step);
    if (rc == LF_OK && step % 2) rc = lf_nexus_flush(nexus, r->stream); /* taken run by run, or as one */
    for (int32_t first, n; rc == LF_OK && step % 2 && (rc = lf_nexus_take(nexus, r->stream, &first, &n)) == LF_OK;)
        ;
    if (rc == LF_END) rc = LF_OK;
    else if (rc == LF_OK) rc = lf_nexus_finish(nexus, r->stream);
    if (rc == LF_OK && r->opts.shard_optimizer) { /* every share to everyone: then all sums are there again */
        rc = lf_nexus_gather(nexus, LF_ROLE_GRAD, 0, lf_nexus_n_chunks(nexus), r->stream);
        if (rc == LF_OK) rc = lf_nexus_gathered(nexus, r->stream);
    }
    return rc == LF_OK ? lf_stream_sync(r->stream) : rc;
}

static void check_step(rank *r, int32_t step)
{
    for (int32_t block = 0; block < lf_map_n_blocks(r->map); block++) {
        const lf_block_info b = block_at(r->map, block);
        const float *g = grad_at(r->map, &b);
        for (int64_t i = 0; i < b.range.count; i++) {
            float want = 0;
            for (int32_t s = 0; s < r->t.world; s++)
                want += is_late(s, step, &b) ? 0 : grad_of(s, step, block, i) / (float)r->t.world;
            if (g[i] != want)
                WRONG("rank %d step %d block %d [%d]: %g, expected %g", r->t.rank, step, block, (int)i, (double)g[i],
                      (double)want);
        }
    }
}

/* A step, and what it left. */
static lf_status right_step(rank *r, int32_t step)
{
    const lf_status rc = one_step(r, step);
    if (rc == LF_OK) check_step(r, step);
    return rc;
}

/* The order of marks differs between ranks, and so does who is late: groups are the same all the same, or the fake complains. */
static void steps_of_nexus(rank *r)
{
    lf_nexus *nexus = r->nexus;
    lf_nexus_stats stats = {.size = sizeof stats};
    char text[400] = "";
    for (int32_t step = 0; step < 6 && r->status == LF_OK; step++) r->status = right_step(r, step);
    if (r->status == LF_OK) r->status = lf_nexus_settle(nexus);
    if (r->status == LF_OK) r->status = lf_nexus_describe(nexus, text, sizeof text);
    if (r->status == LF_OK) r->status = lf_nexus_get_stats(nexus, &stats);
    if (r->status == LF_OK && (stats.steps != 6 || stats.late_blocks == 0 || !(stats.busy_s > 0) || !(stats.exposed_s > 0)))
        WRONG("statistics: %d steps, busy %g s, exposed %g s", (int)stats.steps, stats.busy_s, stats.exposed_s);
    if (r->status == LF_OK && !strstr(text, "NCCL 2.28.9 (loaded already), rank")) WRONG("describes itself as %s", text);
    if (r->status == LF_OK &&
        !strstr(text, r->opts.register_buffers ? "2 gradient planes registered" : "register_buffers is false"))
        WRONG("describes itself as %s", text);
}

TEST(nccl_under_nexus)
{
    for (int32_t how = 0; how < 6; how++) {
        const int32_t world = how == 3 || how == 5 ? 4 : 2;
        prepare_nccl(world, make_map, steps_of_nexus);
        for (int32_t i = 0; i < MOST; i++) {
            ranks[i].opts.shard_optimizer = how >= 4;
            ranks[i].opts.chunk_bytes = 4096;
            ranks[i].opts.run_bytes = how == 1 ? 4096 : 1 << 20;
            ranks[i].opts.register_buffers = how != 2;
            snprintf(ranks[i].opts.reduce, LF_TEXT_MAX, "mean");
        }
        run_ranks(world);
        all_are(world, LF_OK);
        CHECK_EQ(fake.count("registered"), 0); /* all given back */
    }
    CHECK(fake.count("groups") > 0);
}

/* Times come from the device's events; sizes change until one stays, then once more by hand. */
static void tuned_steps(rank *r)
{
    lf_nexus *nexus = r->nexus;
    lf_tuning_info info = {.size = sizeof info};
    int32_t changes = 0, changed, step = 0;
    for (; step < 200 && r->status == LF_OK && !info.settled; step++, changes += changed) {
        changed = 0;
        r->status = lf_nexus_tune_begin(nexus, r->stream);
        if (r->status == LF_OK) r->status = right_step(r, step);
        if (r->status == LF_OK) r->status = lf_nexus_tune_end(nexus, r->stream, 1, &changed);
        if (r->status == LF_OK) r->status = lf_nexus_get_tuning(nexus, &info);
    }
    if (r->status == LF_OK && (!info.settled || info.n_sizes < 2 || !(info.first_s > 0) || !(info.chunk_s > 0)))
        WRONG("after %d steps: settled %d, %d sizes, %g and %g s", step, info.settled, info.n_sizes, info.first_s, info.chunk_s);
    if (changes < info.n_sizes - 1) WRONG("%d sizes, %d changes", info.n_sizes, changes);
    if (r->status == LF_OK) r->status = lf_nexus_retune(nexus, 8192, r->stream);
    if (r->status == LF_OK) r->status = right_step(r, 300);
}

TEST(nccl_changes_the_chunk_size)
{
    for (int32_t how = 0; how < 3; how++) { /* plain, four ranks, in shares */
        const int32_t world = how == 1 ? 4 : 2;
        prepare_nccl(world, make_map, tuned_steps);
        for (int32_t i = 0; i < world; i++) {
            ranks[i].opts.shard_optimizer = how == 2;
            ranks[i].opts.chunk_bytes = ranks[i].opts.chunk_least = 4096;
            ranks[i].opts.chunk_tune = 1;
            snprintf(ranks[i].opts.reduce, LF_TEXT_MAX, "mean");
        }
        run_ranks(world);
        all_are(world, LF_OK);
    }
}

/* One rank cannot register: none does, and it says why. */
static void one_cannot_register(rank *r)
{
    lf_nexus *nexus = r->nexus;
    char text[400] = "";
    r->status = lf_nexus_describe(nexus, text, sizeof text);
    if (r->status == LF_OK &&
        !strstr(text, r->t.rank ? "1 of 2 ranks could (here: unhandled system error)" : "1 of 2 ranks could (here: no error)"))
        WRONG("describes itself as %s", text);
    if (r->status == LF_OK) r->status = one_step(r, 0);
}
TEST(nccl_registers_all_or_none)
{
    prepare_nccl(2, make_map, one_cannot_register);
    plant("rank", 1);
    plant("registered", 2);
    run_ranks(2);
    all_are(2, LF_OK);
    CHECK_EQ(fake.count("registered"), 0);
}

/* ---- the sparse form ---- */

/* What is left after each step, and what would have been without it; the last step takes along what was kept back. */
static void sparse_steps(rank *r)
{
    lf_nexus *nexus = r->nexus;
    double have = 0, want = 0, after_five = 0;
    char text[400] = "";
    for (int32_t step = 0; step < 6 && r->status == LF_OK; step++) {
        if (step == 5) r->status = lf_nexus_residual_flush(nexus);
        if (r->status == LF_OK) r->status = one_step(r, step);
        for (int32_t block = 0; block < lf_map_n_blocks(r->map) && r->status == LF_OK; block++) {
            const lf_block_info b = block_at(r->map, block);
            const float *g = grad_at(r->map, &b);
            for (int64_t i = 0; i < b.range.count; i++) {
                have += (double)g[i];
                for (int32_t s = 0; s < r->t.world; s++)
                    want += is_late(s, step, &b) ? 0 : (double)grad_of(s, step, block, i) / r->t.world;
            }
        }
        if (step == 4) after_five = have - want;
    }
    if (r->status == LF_OK && have != want) WRONG("after a flush %g, expected %g", have, want);
    if (r->status == LF_OK && after_five == 0) WRONG("nothing was kept back");
    if (r->status == LF_OK) r->status = lf_nexus_settle(nexus);
    if (r->status == LF_OK) r->status = lf_nexus_describe(nexus, text, sizeof text);
    if (r->status == LF_OK && !strstr(text, "3 gradient planes registered")) WRONG("describes itself as %s", text);
    fake.capture(7);
    if (r->status == LF_OK) r->status = lf_nexus_begin(nexus);
    lf_status rc = LF_OK;
    for (int32_t k = lf_map_n_blocks(r->map) - 1; k >= 0 && r->status == LF_OK && rc == LF_OK; k--)
        rc = lf_nexus_mark(nexus, k, r->stream);
    if (r->status == LF_OK && rc != LF_ERR_UNSUPPORTED) WRONG("a sparse step was captured: %s", lf_status_name(rc));
    if (r->status == LF_OK) r->status = lf_nexus_cancel(nexus);
}

TEST(nccl_sums_sparse_chunks)
{
    for (int32_t how = 0; how < 4; how++) {
        const int32_t world = how < 2 ? 2 : 4;
        prepare_nccl(world, make_sparse_map, sparse_steps);
        for (int32_t i = 0; i < world; i++) {
            snprintf(ranks[i].opts.comm_strategy, LF_TEXT_MAX, "sparse");
            ranks[i].opts.chunk_bytes = 4096;
            ranks[i].opts.run_bytes = how & 1 ? 4096 : 1 << 20;
            snprintf(ranks[i].opts.reduce, LF_TEXT_MAX, "mean");
        }
        run_ranks(world);
        all_are(world, LF_OK);
        fake.capture(0);
    }
}

/* ---- capture ---- */

static void captured_step(rank *r)
{
    lf_nexus *nexus = r->nexus;
    lf_nexus_stats before = {.size = sizeof before}, after = before;
    r->status = one_step(r, 0);
    if (r->status == LF_OK) r->status = lf_nexus_settle(nexus);
    lf_nexus_get_stats(nexus, &before);
    if (lf_nexus_replayed(nexus, r->stream) != LF_ERR_STATE) WRONG("a replay before anything was captured");
    fake.capture(7); /* both ranks do, or the other's runs are captured too: no harm */
    for (int32_t again = 0; again < 2 && r->status == LF_OK; again++) {
        fake.capture(7 + (uint64_t)again);
        r->status = right_step(r, 1 + again);
    }
    lf__sleep_ns(60000000); /* the worker has looked a few times; a captured event would have failed it */
    if (r->status == LF_OK) r->status = lf_nexus_check(nexus);
    lf_nexus_get_stats(nexus, &after);
    if (after.steps != before.steps || after.collectives != before.collectives) WRONG("capturing counts as a step");
    fake.capture(0);
    const double exposed_s = after.exposed_s;
    for (int32_t i = 0; i < 100 && r->status == LF_OK; i++) r->status = lf_nexus_replayed(nexus, r->stream);
    if (r->status == LF_OK) r->status = lf_nexus_settle(nexus);
    lf_nexus_get_stats(nexus, &after);
    if (after.exposed_s != exposed_s) WRONG("waits of replays are told by a step clock");
    if (after.steps != before.steps + 100 || after.collectives != before.collectives * 101) WRONG("replays are not counted");
    if (r->status == LF_OK) r->status = right_step(r, 5); /* eager again */
    if (r->status == LF_OK) r->status = lf_nexus_retune(nexus, 16384, r->stream);
    if (r->status == LF_OK && lf_nexus_replayed(nexus, r->stream) != LF_ERR_STATE)
        WRONG("a replay of the schedule before this one");
    fake.capture(11);
    if (r->status == LF_OK) r->status = one_step(r, 6);
    fake.capture(0);
    if (r->status == LF_OK) r->status = lf_nexus_replayed(nexus, r->stream);
    if (r->status == LF_OK) r->status = lf_nexus_settle(nexus);
}
TEST(nccl_captures)
{
    prepare_nccl(1, make_map, captured_step);
    ranks[0].opts.chunk_bytes = 4096;
    run_ranks(1);
    all_are(1, LF_OK);
}

/* A capture that breaks in the middle of a step ran nowhere: the step is forgotten and the handle goes on. */
static void broken_capture(rank *r)
{
    lf_nexus *nexus = r->nexus;
    r->status = one_step(r, 0);
    for (int32_t how = 0; how < 3 && r->status == LF_OK; how++) {
        fake.capture(9);
        r->status = lf_nexus_begin(nexus);
        for (int32_t k = lf_map_n_blocks(r->map) - 1; k >= 3 && r->status == LF_OK; k--)
            r->status = lf_nexus_mark(nexus, k, r->stream);
        fake.capture(how ? UINT64_MAX : 0); /* the caller's own code fails, or ours finds the capture broken */
        int32_t first, n;
        if (how == 1 && lf_nexus_finish(nexus, r->stream) != LF_ERR_STATE) WRONG("finishing a broken capture");
        if (how == 2) { /* flushed as part of the graph, taken when there is none any more */
            fake.capture(9);
            r->status = lf_nexus_flush(nexus, r->stream);
            fake.capture(0);
            if (lf_nexus_take(nexus, r->stream, &first, &n) != LF_ERR_STATE) WRONG("taking outside the capture");
            if (lf_nexus_finish(nexus, r->stream) != LF_ERR_STATE) WRONG("finishing outside the capture");
        }
        if (r->status == LF_OK) r->status = lf_nexus_cancel(nexus);
        fake.capture(0);
        if (r->status == LF_OK)
            r->status = lf_stream_sync(r->stream); /* the fake ran what was captured: it may still be clearing */
        if (r->status == LF_OK) r->status = right_step(r, 1);
    }
    if (r->status == LF_OK) r->status = lf_nexus_cancel(nexus); /* nothing to forget */
    if (r->status == LF_OK) r->status = lf_nexus_begin(nexus);
    for (int32_t k = lf_map_n_blocks(r->map) - 1; k >= 3 && r->status == LF_OK; k--)
        r->status = lf_nexus_mark(nexus, k, r->stream);
    if (lf_nexus_cancel(nexus) != LF_ERR_STATE) WRONG("a step that ran was cancelled");
    double x = 1;
    if (lf_nexus_reduce(nexus, &x, 1, LF_DTYPE_F64, r->stream) != LF_ERR_STATE) WRONG("a sum in the middle of a step");
    if (r->status == LF_OK) r->status = lf_nexus_finish(nexus, r->stream);
}
TEST(nccl_forgets_a_broken_capture)
{
    prepare_nccl(1, make_map, broken_capture);
    ranks[0].opts.chunk_bytes = 4096;
    run_ranks(1);
    all_are(1, LF_OK);
}

static void sums_beside_steps(rank *r)
{
    lf_nexus *nexus = r->nexus;
    double x[3] = {1, 0.5 + r->t.rank, -r->t.rank};
    int64_t n = INT64_C(1) << 40;
    float f = 1;
    r->status = lf_nexus_reduce(nexus, x, 3, LF_DTYPE_F64, r->stream);
    if (r->status == LF_OK) r->status = lf_nexus_reduce(nexus, &n, 1, LF_DTYPE_I64, NULL);
    if (r->status == LF_OK && n != INT64_C(1) << 41) WRONG("not done on return, or wrong");
    if (r->status == LF_OK) r->status = lf_stream_sync(r->stream);
    if (r->status == LF_OK && (x[0] != 2 || x[1] != 2 || x[2] != -1)) WRONG("sums %g %g %g", x[0], x[1], x[2]);
    if (lf_nexus_reduce(nexus, &f, 1, LF_DTYPE_F32, NULL) != LF_ERR_INVALID) WRONG("f32 might be divided");
}
TEST(nccl_sums_beside_steps)
{
    prepare_nccl(2, make_map, sums_beside_steps);
    for (int32_t i = 0; i < 2; i++) snprintf(ranks[i].opts.reduce, LF_TEXT_MAX, "mean"); /* divides gradients, not these */
    run_ranks(2);
    all_are(2, LF_OK);
}

static lf_status sleep_500_ms(void *user)
{
    (void)user;
    lf__sleep_ns(500000000);
    return LF_OK;
}

/* A replay that hangs is found like any collective. */
static void replay_hangs(rank *r)
{
    r->status = lf_stream_run(r->stream, sleep_500_ms, NULL);
    if (r->status == LF_OK) r->status = r->t.replayed(r->t.user, r->stream, "a captured step");
    for (int32_t i = 0; i < 400 && r->status == LF_OK; i++) {
        lf__sleep_ns(1000000);
        r->status = r->t.check(r->t.user);
    }
}
TEST(nccl_watches_replays)
{
    prepare_nccl(1, NULL, replay_hangs);
    ranks[0].opts.timeout_s = 0.1;
    run_ranks(1);
    all_are(1, LF_ERR_TIMEOUT);
    CHECK_HAS(ranks[0].text, "rank 0 of 1: a captured step is not done after 0.1 s");
}

LF_TEST_MAIN
