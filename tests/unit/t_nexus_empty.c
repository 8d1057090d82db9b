/* SPDX-License-Identifier: Apache-2.0 */
/* Experts without a token on any rank: their chunks do not move, and every sum is what it is without that. */
#include "nexus_ranks.h"
#include "nexus_recorder.h"

enum { MOST = 4 };

static lf_map *make_map(const rank *r) { return make_small(r->grad_f32); }

/* Expert 1 has no token anywhere, expert 2 only on rank 0, and which of layer 2's have some depends on the step. */
static int64_t tokens_of(int32_t from, int32_t step, const lf_block_info *b)
{
    if (b->expert < 0) return 0; /* not read */
    if (b->expert == 1 || (b->layer == 2 && (b->expert + step) % 2)) return 0;
    return b->expert == 2 && from != 0 ? 0 : 5 + from;
}

/* What comes of it, and how many bytes nobody had. */
static int64_t check_sums(rank *r, int32_t step)
{
    const lf_map *map = r->map;
    int64_t empty_bytes = 0;
    for (int32_t b = 0; b < lf_map_n_blocks(map); b++) {
        const lf_block_info info = block_at(map, b);
        if (info.flags & LF_PARAM_FROZEN) continue;
        const int32_t dtype = dtype_of(map, info.range.klass, LF_ROLE_GRAD);
        const void *g = lf_map_address(map, &info.range, LF_ROLE_GRAD);
        bool anyone = info.expert < 0;
        for (int32_t s = 0; s < r->t.world; s++) anyone = anyone || tokens_of(s, step, &info) > 0;
        if (!anyone) empty_bytes += info.range.count * (int64_t)lf_dtype_bytes(dtype);
        for (int64_t i = 0; i < info.range.count; i++) {
            float sum = 0;
            for (int32_t s = 0; s < r->t.world; s++)
                sum += info.expert < 0 || tokens_of(s, step, &info) ? fours(s, step, b, i) : 0;
            if (get(g, i, dtype) != (double)sum) WRONG("%s[%d] of step %d", info.name, (int)i, step);
        }
    }
    return empty_bytes;
}

static void skip_steps(rank *r)
{
    const lf_map *map = r->map;
    lf_nexus *nexus = r->nexus;
    int64_t tokens[100], empty_bytes = 0;
    lf_nexus_stats stats = {.size = sizeof stats};
    const int32_t n = lf_map_n_blocks(map);
    for (int32_t step = 0; step < r->steps && r->status == LF_OK; step++) {
        for (int32_t b = 0; b < n; b++) {
            const lf_block_info info = block_at(map, b);
            tokens[b] = tokens_of(r->t.rank, step, &info);
            if (info.flags & LF_PARAM_FROZEN) continue;
            write_fours(map, r->t.rank, step, b, info.expert >= 0 && tokens[b] == 0);
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
        if (r->status == LF_OK) r->status = lf_nexus_gather(nexus, LF_ROLE_GRAD, 0, lf_nexus_n_chunks(nexus), NULL);
        if (r->status == LF_OK) r->status = lf_nexus_gathered(nexus, NULL); /* of shares: then all sums are there */
        if (r->status == LF_OK) empty_bytes += check_sums(r, step);
    }
    if (r->status == LF_OK) r->status = lf_nexus_get_stats(nexus, &stats);
    if (r->status < 0) return;
    if (r->opts.skip_empty && (stats.skipped_bytes == 0 || stats.skipped_bytes > empty_bytes + 256 * n * r->steps))
        WRONG("%lld bytes skipped, %lld empty", (long long)stats.skipped_bytes, (long long)empty_bytes);
    const int64_t chunks = (int64_t)r->steps * lf_nexus_n_chunks(nexus); /* in shares a chunk may be several */
    if (r->opts.shard_optimizer ? stats.collectives + stats.skipped < chunks : stats.collectives + stats.skipped != chunks)
        WRONG("%lld collectives and %lld skipped", (long long)stats.collectives, (long long)stats.skipped);
}

/* The same sums, whether what is empty everywhere moves or not; with shares too. */
TEST(nexus_skips_what_nobody_has)
{
    for (int32_t world = 1; world <= MOST; world++)
        for (int32_t how = 0; how < 3; how++) {
            prepare(world, make_map, skip_steps);
            for (int32_t i = 0; i < world; i++) {
                snprintf(ranks[i].opts.reduce, LF_TEXT_MAX, "sum");
                ranks[i].opts.skip_empty = how > 0;
                ranks[i].steps = 3;
                ranks[i].opts.shard_optimizer = how > 1;
                ranks[i].grad_f32 = how > 0;
            }
            run_ranks(world);
            all_are(world, LF_OK);
            for (int32_t i = 0; i < world; i++) {
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
    lf_map *map = make_small(1);
    int64_t tokens[100] = {0};
    lf_nexus_options opts;
    open_recorder(&rec, map, 4096, &nexus);
    CHECK_OK(lf_nexus_begin(nexus));
    CHECK_STATUS(lf_nexus_present(nexus, tokens), LF_ERR_STATE);
    CHECK_HAS(lf_error_text(), "without skip_empty");
    lf_nexus_close(nexus);
    const lf_transport t = recorder_end(&rec);
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

LF_TEST_MAIN
