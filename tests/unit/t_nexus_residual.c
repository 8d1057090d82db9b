/* SPDX-License-Identifier: Apache-2.0 */
/* What the sparse form keeps back: nothing is lost or counted twice; it is flushed, saved, loaded on other ranks and checked. */
#include "nexus_sparse_ranks.h"

/* Over all steps and ranks what came out and what is kept back is what went in: nothing is lost or counted twice. */
static double given(int32_t world, int32_t first_step, int32_t steps)
{
    lf_map *map = make_sparse_map(1, N_EXPERTS);
    double sum = 0;
    for (int32_t r = 0; r < world; r++)
        for (int32_t step = first_step; step < first_step + steps; step++)
            for (int32_t b = 0; b < lf_map_n_blocks(map); b++) {
                const lf_block_info info = block_at(map, b);
                if (is_late(r, step, &info)) continue;
                write_grad(map, r, step, b, true, false);
                const float *g = lf_map_address(map, &info.range, LF_ROLE_GRAD);
                for (int64_t i = 0; i < info.range.count; i++) sum += (double)g[i];
            }
    lf_map_unref(map);
    return sum;
}

static void whole_numbers(int32_t world, int32_t steps)
{
    prepare_training(world, steps);
    for (int32_t i = 0; i < world; i++) {
        trainings[i].whole = true;
        snprintf(ranks[i].opts.reduce, LF_TEXT_MAX, "sum");
    }
}

/* `total` has the sums once on every rank, and each rank's own residual. */
static double sum_of_residuals(int32_t world, double sums)
{
    double all = 0;
    for (int32_t i = 0; i < world; i++) all += trainings[i].total - sums;
    return all;
}

TEST(sparse_flush_gives_everything_back)
{
    const int32_t world = 3;
    whole_numbers(world, 8);
    for (int32_t i = 0; i < world; i++) trainings[i].flush_at = 7;
    run_ranks(world);
    all_are(world, LF_OK);
    const double want = given(world, 0, 8);
    CHECK_EQ(trainings[0].total, want); /* the residuals are empty */
    CHECK_EQ(sum_of_residuals(world, trainings[0].total), 0);
    whole_numbers(world, 8);
    run_ranks(world);
    all_are(world, LF_OK);
    CHECK(sum_of_residuals(world, trainings[0].total) != 0); /* so the test can see */
    whole_numbers(world, 8);
    for (int32_t i = 0; i < world; i++) ranks[i].opts.error_feedback = 0;
    run_ranks(world);
    all_are(world, LF_OK);
    CHECK(fabs(trainings[0].total - want) > 1);
}

static void name_file(char *path, const char *kind, int32_t i) { snprintf(path, 300, "%s/%s.rank%d", lf_test_dir, kind, i); }

/* Saved after 5 steps and gone on with: the same bits as without a break. */
TEST(sparse_resumes_bit_for_bit)
{
    const int32_t world = 4;
    static lf__hash128 straight[RANKS_MOST][STEPS_MOST];
    char hashes[RANKS_MOST][33];
    for (int32_t grad_f32 = 0; grad_f32 < 2; grad_f32++) {
        prepare_training(world, 10);
        for (int32_t i = 0; i < world; i++) ranks[i].grad_f32 = grad_f32;
        run_ranks(world);
        all_are(world, LF_OK);
        for (int32_t i = 0; i < world; i++) memcpy(straight[i], trainings[i].steps_hash, sizeof straight[i]);
        prepare_training(world, 5);
        for (int32_t i = 0; i < world; i++) {
            ranks[i].grad_f32 = grad_f32;
            name_file(trainings[i].save, "resume", i);
        }
        run_ranks(world);
        all_are(world, LF_OK);
        for (int32_t i = 0; i < world; i++) memcpy(hashes[i], trainings[i].hash, sizeof hashes[i]);
        for (int32_t with = 1; with >= 0; with--) {
            prepare_training(world, 5);
            for (int32_t i = 0; i < world; i++) {
                trainings[i].first_step = 5;
                ranks[i].grad_f32 = grad_f32;
                ranks[i].opts.chunk_bytes = with ? 4096 : 8192; /* other chunks: other bits, but it can be loaded */
                name_file(trainings[i].load[0], "resume", i);
                memcpy(trainings[i].load_hash, hashes[i], sizeof hashes[i]);
            }
            run_ranks(world);
            all_are(world, LF_OK);
            for (int32_t i = 0; i < world && with; i++)
                CHECK(memcmp(&straight[i][5], trainings[i].steps_hash, 5 * sizeof(lf__hash128)) == 0);
        }
    }
}

/* Four ranks' residuals on two and on eight, and into dense chunks: all of it arrives. */
TEST(sparse_residuals_go_to_other_worlds_and_forms)
{
    static const int32_t worlds[] = {2, 8};
    whole_numbers(4, 5);
    for (int32_t i = 0; i < 4; i++) name_file(trainings[i].save, "other", i);
    run_ranks(4);
    all_are(4, LF_OK);
    const double put_in = given(4, 0, 5);
    double totals = 0; /* 4 times what came out, and all residuals; what came out and all residuals is what was put in */
    for (int32_t i = 0; i < 4; i++) totals += trainings[i].total;
    const double kept = put_in - (totals - put_in) / 3;
    CHECK(kept != 0);
    for (size_t w = 0; w < LF_COUNT(worlds); w++)
        for (int32_t dense = 0; dense < 2; dense++) {
            const int32_t world = worlds[w];
            whole_numbers(world, 2);
            for (int32_t i = 0; i < world; i++) {
                trainings[i].first_step = 5;
                for (int32_t k = 0; k < 2 && i + k * world < 4; k++) name_file(trainings[i].load[k], "other", i + k * world);
                if (dense) CHECK_OK(lf_options_set("nexus", &ranks[i].opts, "comm_strategy", "dense"));
                else trainings[i].flush_at = 6;
            }
            run_ranks(world);
            all_are(world, LF_OK);
            const double out = trainings[0].total, fresh = given(world, 5, 2);
            CHECK_EQ(out - fresh, kept);
        }
}

static void damage(const char *path, int64_t at)
{
    FILE *f = fopen(path, "r+b");
    fseek(f, (long)at, SEEK_SET);
    const int was = fgetc(f);
    fseek(f, (long)at, SEEK_SET);
    fputc(was ^ 1, f);
    fclose(f);
}

TEST(sparse_residual_files_are_checked)
{
    set_up();
    char path[300], hash[33], again[33];
    lf_map *map = make_sparse_map(1, N_EXPERTS), *other = make_sparse_map(1, 2);
    lf_nexus_options opts;
    lf_nexus *nexus, *wrong;
    lf_transport end;
    name_file(path, "deep/er/file", 0);
    CHECK_OK(lf_options_init("nexus", &opts, sizeof opts));
    CHECK_OK(lf_loopback_open(1, &end));
    CHECK_OK(lf_nexus_open(&nexus, map, &end, &opts));
    CHECK_STATUS(lf_nexus_residual_save(nexus, path, hash), LF_END); /* dense */
    CHECK_STATUS(lf_nexus_residual_load(nexus, path, NULL), LF_ERR_NOTFOUND);
    lf_nexus_close(nexus);
    CHECK_OK(lf_options_set("nexus", &opts, "comm_strategy", "sparse"));
    CHECK_OK(lf_loopback_open(1, &end));
    CHECK_OK(lf_nexus_open(&nexus, map, &end, &opts));
    CHECK_OK(lf_nexus_residual_save(nexus, path, hash));
    CHECK_OK(lf_nexus_residual_load(nexus, path, hash));
    hash[0] = hash[0] == 'a' ? 'b' : 'a';
    CHECK_STATUS(lf_nexus_residual_load(nexus, path, hash), LF_ERR_CORRUPT);
    CHECK_HAS(lf_error_text(), "another save");
    CHECK_OK(lf_loopback_open(1, &end));
    CHECK_OK(lf_nexus_open(&wrong, other, &end, &opts));
    CHECK_STATUS(lf_nexus_residual_load(wrong, path, NULL), LF_ERR_STATE);
    CHECK_HAS(lf_error_text(), "another map");
    lf_nexus_close(wrong);
    static const int64_t places[] = {3, 24, 36, 45, 60, 3000};
    for (size_t i = 0; i < LF_COUNT(places); i++) {
        damage(path, places[i]);
        const lf_status rc = lf_nexus_residual_load(nexus, path, NULL);
        if (rc != LF_ERR_CORRUPT && rc != LF_ERR_FORMAT) FAIL_("byte %d: %s", (int)places[i], lf_status_name(rc));
        CHECK_HAS(lf_error_text(), path);
        damage(path, places[i]);
    }
    CHECK(truncate(path, 5000) == 0);
    CHECK_STATUS(lf_nexus_residual_load(nexus, path, NULL), LF_ERR_CORRUPT);
    CHECK_OK(lf_nexus_begin(nexus));
    CHECK_STATUS(lf_nexus_residual_save(nexus, path, again), LF_ERR_STATE);
    CHECK_STATUS(lf_nexus_residual_flush(nexus), LF_ERR_STATE);
    CHECK_STATUS(lf_nexus_seek(nexus, 1), LF_ERR_STATE);
    CHECK_OK(lf_nexus_finish(nexus, NULL));
    lf_nexus_close(nexus);
    lf_map_unref(map);
    lf_map_unref(other);
}

LF_TEST_MAIN
