/* SPDX-License-Identifier: Apache-2.0 */
/* The chunk size changes between steps, by hand and by tuning, over the loopback: sums and state stay what they are. */
#include "nexus/nexus_int.h"
#include "nexus_ranks.h"

enum { MOST = 4, TRY = TUNE_SKIP + TUNE_TRIES };

static lf_map *make_map(const rank *r)
{
    const model_shape m = {.grad_f32 = r->grad_f32,
                           .high_load = 1,
                           .n_layers = 3,
                           .n_experts = 3,
                           .embed = 9001,
                           .qkv = 3100,
                           .expert = 2001,
                           .expert_step = 803};
    return make_model(&m);
}

static void prepare_sums(int32_t world, void (*run)(rank *))
{
    prepare(world, make_map, run);
    for (int32_t i = 0; i < world; i++) {
        ranks[i].opts.chunk_bytes = 8192;
        ranks[i].opts.run_bytes = 32768;
        snprintf(ranks[i].opts.reduce, LF_TEXT_MAX, "sum");
    }
}

static void run_well(int32_t world)
{
    run_ranks(world);
    all_are(world, LF_OK);
}

/* Not exact in f32: another order of ranks would show. */
static float grad_of(int32_t from, int32_t step, int64_t i)
{
    return (float)((from * 131 + step * 71 + i * 37) % 10007 - 5003) / (float)(7 + 3 * from);
}

/* Where gradients are: from the front of the only class to the end of its last block. */
static lf_range trained(const lf_map *map)
{
    lf_range all = {0};
    for (int32_t b = 0; b < lf_map_n_blocks(map); b++) {
        const lf_block_info info = block_at(map, b);
        MUST(info.range.klass == 0 ? LF_OK : LF_ERR_INTERNAL);
        if (info.range.offset + info.range.count > all.count) all.count = info.range.offset + info.range.count;
    }
    return all;
}

static void check_sums(rank *r, const lf_range *part, int32_t step)
{
    const float *g = part->count ? lf_map_address(r->map, part, LF_ROLE_GRAD) : NULL;
    for (int64_t i = 0; i < part->count; i++) {
        float want = 0;
        for (int32_t s = 0; s < r->t.world; s++) want += grad_of(s, step, part->offset + i);
        if (g[i] != want)
            WRONG("rank %d step %d element %d: %.9g, expected %.9g", r->t.rank, step, (int)(part->offset + i), (double)g[i],
                  (double)want);
    }
}

static lf_status one_step(rank *r, int32_t step)
{
    const lf_range all = trained(r->map);
    float *g = lf_map_address(r->map, &all, LF_ROLE_GRAD);
    lf_status rc = lf_nexus_begin(r->nexus);
    for (int64_t i = 0; i < all.count; i++) g[i] = grad_of(r->t.rank, step, i);
    for (int32_t b = lf_map_n_blocks(r->map) - 1; b >= 0 && rc == LF_OK; b--) rc = lf_nexus_mark(r->nexus, b, r->stream);
    if (rc == LF_OK) rc = lf_nexus_finish(r->nexus, r->stream);
    if (rc == LF_OK) rc = lf_stream_sync(r->stream);
    for (int32_t k = 0; k < lf_nexus_n_chunks(r->nexus) && rc == LF_OK; k++) { /* its own share, and the rest */
        const lf_chunk_info c = chunk_at(r->nexus, k);
        check_sums(r, &c.share, step);
        check_sums(r, &c.rest, step);
    }
    return rc;
}

/* Sums at each element are checked by the chunks, so these must hold all. */
static int64_t largest_chunk(rank *r)
{
    int64_t largest = 0, to = 0;
    for (int32_t k = 0; k < lf_nexus_n_chunks(r->nexus); k++) {
        const lf_chunk_info c = chunk_at(r->nexus, k);
        if (strcmp(c.form, "dense") != 0) WRONG("chunk %d is %s", k, c.form);
        if (c.range.offset + c.range.count > to) to = c.range.offset + c.range.count;
        if (c.bytes > largest) largest = c.bytes;
    }
    if (to < trained(r->map).count) WRONG("chunks end at element %lld", (long long)to);
    return largest;
}

static const int64_t sizes[] = {8192, 32768, 4096, 1ll << 40, 8192};

static void change_sizes(rank *r)
{
    int32_t chunks[LF_COUNT(sizes)];
    lf_nexus_stats stats = {.size = sizeof stats};
    int64_t bytes = 0;
    for (int32_t i = 0; i < (int32_t)LF_COUNT(sizes) && r->status == LF_OK; i++) {
        if (i > 0) r->status = lf_nexus_retune(r->nexus, sizes[i], r->stream);
        if (r->status < 0) return;
        chunks[i] = lf_nexus_n_chunks(r->nexus);
        const int64_t largest = largest_chunk(r);
        if (largest > sizes[i]) WRONG("a chunk of %lld bytes, chunk_bytes is %lld", (long long)largest, (long long)sizes[i]);
        for (int32_t s = 0; s < 2 && r->status == LF_OK; s++) r->status = one_step(r, 2 * i + s);
    }
    if (r->status < 0) return;
    if (chunks[1] >= chunks[0] || chunks[2] <= chunks[0] || chunks[3] >= chunks[1] || chunks[4] != chunks[0])
        WRONG("chunks: %d, %d, %d, %d, %d", chunks[0], chunks[1], chunks[2], chunks[3], chunks[4]);
    for (int32_t k = 0; k < chunks[0]; k++) bytes += chunk_at(r->nexus, k).bytes * 2 * (int64_t)LF_COUNT(sizes);
    r->status = lf_nexus_get_stats(r->nexus, &stats);
    if (stats.steps != 2 * (int64_t)LF_COUNT(sizes) || stats.bytes != bytes)
        WRONG("%lld steps, %lld bytes", (long long)stats.steps, (long long)stats.bytes);
}

TEST(sums_are_the_same_bits_with_every_size)
{
    for (int32_t world = 1; world <= MOST; world++)
        for (int32_t how = 0; how < 4; how++) { /* with a stream, with ranks that compare everything */
            prepare_sums(world, change_sizes);
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

static void write_state(const rank *r, int32_t step)
{
    for (int32_t k = 0; k < lf_nexus_n_chunks(r->nexus); k++) {
        const lf_chunk_info c = chunk_at(r->nexus, k);
        const lf_range *parts[] = {&c.share, &c.rest};
        for (int32_t p = 0; p < 2; p++)
            for (int32_t role = LF_ROLE_MASTER; role <= LF_ROLE_EXP_AVG_SQ && parts[p]->count; role++)
                for (int64_t i = 0; i < parts[p]->count; i++)
                    ((float *)lf_map_address(r->map, parts[p], role))[i] = state_of(role, step, parts[p]->offset + i);
    }
}

/* Every rank has what any of them wrote. */
static void check_state(rank *r, int32_t step)
{
    for (int32_t b = 0; b < lf_map_n_blocks(r->map); b++)
        for (int32_t role = LF_ROLE_MASTER; role <= LF_ROLE_EXP_AVG_SQ; role++) {
            const lf_block_info info = block_at(r->map, b);
            const float *have = lf_map_address(r->map, &info.range, role);
            for (int64_t i = 0; i < info.range.count; i++)
                if (have[i] != state_of(role, step, info.range.offset + i))
                    WRONG("rank %d %s of %s[%d] is %g", r->t.rank, lf_role_name(role), info.name, (int)i, (double)have[i]);
        }
}

static void change_shares(rank *r)
{
    for (int32_t i = 0; i < (int32_t)LF_COUNT(sizes) && r->status == LF_OK; i++) {
        r->status = one_step(r, i);
        if (r->status < 0) return;
        write_state(r, i);
        r->status = lf_nexus_retune(r->nexus, sizes[(i + 1) % (int32_t)LF_COUNT(sizes)], r->stream);
        if (r->status == LF_OK) check_state(r, i);
    }
}

TEST(shares_change_hands_with_their_state)
{
    for (int32_t world = 2; world <= MOST; world++)
        for (int32_t how = 0; how < 4; how++) {
            prepare_sums(world, change_shares);
            for (int32_t i = 0; i < world; i++) {
                ranks[i].opts.shard_optimizer = 1;
                ranks[i].on_stream = how % 2;
                ranks[i].opts.debug = how / 2;
            }
            run_well(world);
        }
}

/* ---- refused ----------------------------------------------------------------------------------------------------------- */

static void in_the_middle(rank *r)
{
    int32_t changed = 9;
    r->status = lf_nexus_begin(r->nexus);
    if (lf_nexus_retune(r->nexus, 32768, r->stream) != LF_ERR_STATE) WRONG("retuned in the middle of a step");
    if (r->status == LF_OK) r->status = lf_nexus_finish(r->nexus, r->stream);
    if (lf_nexus_retune(r->nexus, 4095, r->stream) != LF_ERR_INVALID) WRONG("chunk_bytes 4095");
    if (lf_nexus_retune(r->nexus, (1ll << 40) + 1, r->stream) != LF_ERR_INVALID) WRONG("chunk_bytes above 2^40");
    if (lf_nexus_tune_begin(r->nexus, r->stream) != LF_OK || lf_nexus_tune_end(r->nexus, r->stream, 1, &changed) != LF_OK ||
        changed)
        WRONG("tuning that is off does something");
    if (r->status == LF_OK) r->status = one_step(r, 1); /* nothing of that has hurt */
}

TEST(a_step_keeps_its_schedule)
{
    prepare_sums(2, in_the_middle);
    run_well(2);
    CHECK_STR(ranks[0].tuning.why, "chunk_tune is off");
    CHECK(ranks[0].tuning.settled);
}

static void other_sizes(rank *r)
{
    r->status = lf_nexus_retune(r->nexus, r->t.rank ? 32768 : 16384, r->stream);
    if (lf_nexus_begin(r->nexus) != r->status) WRONG("the handle goes on");
}

TEST(ranks_that_differ_are_told)
{
    prepare_sums(2, other_sizes);
    run_ranks(2);
    for (int32_t i = 0; i < 2; i++) {
        CHECK_EQ(ranks[i].status, LF_ERR_PEER);
        CHECK_HAS(ranks[i].text, "changing chunk_bytes to");
        CHECK_HAS(ranks[i].text, "use different [nexus] options");
    }
}

static void sparse_stays(rank *r)
{
    const int32_t before = lf_nexus_n_chunks(r->nexus);
    if (lf_nexus_retune(r->nexus, 32768, r->stream) != LF_ERR_UNSUPPORTED) WRONG("sparse chunks were cut anew");
    snprintf(r->text, sizeof r->text, "%s", lf_error_text());
    if (lf_nexus_n_chunks(r->nexus) != before) WRONG("the schedule has changed");
    r->status = lf_nexus_check(r->nexus);
}

TEST(sparse_chunks_are_not_tuned)
{
    prepare_sums(2, sparse_stays);
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

static lf_status step_unchecked(const rank *r)
{
    lf_status rc = lf_nexus_begin(r->nexus);
    for (int32_t b = 0; b < lf_map_n_blocks(r->map) && rc == LF_OK; b++) rc = lf_nexus_mark(r->nexus, b, r->stream);
    return rc == LF_OK ? lf_nexus_finish(r->nexus, r->stream) : rc;
}

static void leave_a_residual(rank *r)
{
    char path[300], hash[33];
    const lf_range all = trained(r->map);
    float *g = lf_map_address(r->map, &all, LF_ROLE_GRAD);
    for (int64_t i = 0; i < all.count; i++) g[i] = grad_of(r->t.rank, 0, i);
    r->status = step_unchecked(r);
    if (r->status == LF_OK) r->status = lf_nexus_residual_save(r->nexus, residual_of(r, path), hash);
}

static void take_a_residual(rank *r)
{
    char path[300];
    r->status = lf_nexus_residual_load(r->nexus, residual_of(r, path), NULL);
    if (r->status == LF_OK && lf_nexus_retune(r->nexus, 32768, r->stream) != LF_ERR_STATE) WRONG("cut anew over a residual");
    if (r->status == LF_OK) r->status = step_unchecked(r);
    if (r->status == LF_OK) r->status = lf_nexus_retune(r->nexus, 32768, r->stream);
    if (r->status == LF_OK) r->status = one_step(r, 1);
}

TEST(a_residual_of_dense_chunks_goes_first)
{
    prepare_sums(2, leave_a_residual);
    for (int32_t i = 0; i < 2; i++) snprintf(ranks[i].opts.comm_strategy, LF_TEXT_MAX, "sparse");
    run_well(2);
    prepare_sums(2, take_a_residual);
    for (int32_t i = 0; i < 2; i++) snprintf(ranks[i].opts.comm_strategy, LF_TEXT_MAX, "dense");
    run_well(2);
}

TEST(a_schedule_alone_stays_as_it_is)
{
    set_up();
    lf_map *map = make_map(&(rank){.grad_f32 = 1});
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
static void tuned_steps(rank *r)
{
    lf_tuning_info info = {.size = sizeof info};
    int32_t changed = 0, counted = 0;
    if (lf_nexus_tune_end(r->nexus, r->stream, 1, &changed) != LF_ERR_STATE) WRONG("the end of a step that did not begin");
    for (r->steps = 0; r->status == LF_OK && !info.settled && r->steps < 500; r->steps++) {
        const int32_t before = lf_nexus_n_chunks(r->nexus);
        const bool counts = r->steps % 3 != 2;
        r->status = lf_nexus_tune_begin(r->nexus, r->stream);
        if (r->status == LF_OK) r->status = one_step(r, r->steps);
        if (r->status == LF_OK) r->status = lf_nexus_tune_end(r->nexus, r->stream, counts, &changed);
        if (r->status == LF_OK) r->status = lf_nexus_get_tuning(r->nexus, &info);
        if (changed != (lf_nexus_n_chunks(r->nexus) != before)) WRONG("step %d: changed is %d", r->steps, changed);
        counted += counts;
        const bool end = counted >= TUNE_START + TRY && (counted - TUNE_START) % TRY == 0;
        if (r->status == LF_OK && changed && (!end || !counts)) WRONG("a change after %d steps that count", counted);
    }
    if (r->status == LF_OK && counted != TUNE_START + 4 * TRY && counted != TUNE_START + 5 * TRY)
        WRONG("settled after %d steps", counted);
    if (r->status == LF_OK) r->status = one_step(r, r->steps);
}

TEST(ranks_settle_on_one_size_in_one_step)
{
    for (int32_t world = 2; world <= MOST; world += 2)
        for (int32_t how = 0; how < 3; how++) { /* plain, on a stream, in shares */
            prepare_sums(world, tuned_steps);
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

static void given_by_hand(rank *r)
{
    r->status = lf_nexus_tune_begin(r->nexus, r->stream);
    if (r->status == LF_OK) r->status = lf_nexus_retune(r->nexus, 16384, r->stream);
    if (r->status == LF_OK) r->status = one_step(r, 0);
}

TEST(a_size_given_by_hand_ends_tuning)
{
    prepare_sums(2, given_by_hand);
    tune(2, 4096, 1 << 20);
    run_well(2);
    CHECK(ranks[0].tuning.settled);
    CHECK_EQ(ranks[0].tuning.chunk_bytes, 16384);
    CHECK_HAS(ranks[0].tuning.why, "given a size");
}

static void one(rank *r) { r->status = one_step(r, 0); }

TEST(nothing_to_try_is_said)
{
    prepare_sums(1, one);
    tune(1, 4096, 1 << 20);
    run_well(1);
    CHECK_STR(ranks[0].tuning.why, "one rank sends nothing");
    prepare_sums(2, one);
    tune(2, 1 << 20, 4 << 20);
    for (int32_t i = 0; i < 2; i++) ranks[i].opts.chunk_bytes = 1 << 20;
    run_well(2);
    CHECK_HAS(ranks[0].tuning.why, "cut the same chunks");
    CHECK(ranks[0].tuning.settled);
}

TEST(bounds_must_hold_the_first_size)
{
    prepare_sums(2, one);
    tune(2, 16384, 1 << 20);
    run_ranks(2);
    CHECK_EQ(ranks[0].status, LF_ERR_INVALID);
    CHECK_HAS(ranks[0].text, "chunk_bytes is 8192, expected chunk_least 16384 to chunk_most 1048576");
    prepare_sums(2, one);
    tune(2, 4096, 1 << 20);
    ranks[1].opts.chunk_most = 1 << 21;
    run_ranks(2);
    CHECK_EQ(ranks[0].status, LF_ERR_PEER);
    CHECK_HAS(ranks[0].text, "chunk_tune 1 (4096 to 1048576)");
}

TEST(the_device_is_given_back)
{
    lf_device_close(device);
    device = NULL;
}

LF_TEST_MAIN
