/* SPDX-License-Identifier: Apache-2.0 */
/* The same samples over any number of ranks, and from any state on. */
#include "loader_fixture.h"

TEST(ranks_together_see_what_one_rank_sees)
{
    lf_dataset *set = scenes(40);
    static const int32_t worlds[] = {2, 4, 8};
    lf_loader_options o = options(8);
    o.augment = 1;
    trace *one = trace_of(set, &o, 15);
    for (size_t k = 0; k < LF_COUNT(worlds); k++) {
        int32_t w = worlds[k], per = 8 / w;
        for (int32_t r = 0; r < w; r++) {
            o.batch_size = per;
            o.world = w;
            o.rank = r;
            trace *t = trace_of(set, &o, 15);
            for (int32_t b = 0; b < 15; b++) check_same(one->row + b * 8 + r * per, t->row + b * per, per, "ranks");
            free(t);
        }
    }
    free(one);
    lf_dataset_close(set);
}

/* From every batch of two epochs and more, at other depths, thread counts, world sizes and batch sizes. */
TEST(resume_gives_the_same_remainder)
{
    static const struct {
        int32_t batch, world, depth, threads;
    } ways[] = {{4, 1, 4, 2}, {4, 1, 1, 1}, {4, 1, 7, 3}, {2, 2, 2, 1}, {1, 4, 3, 2}, {2, 1, 4, 2}, {8, 1, 2, 2}};
    enum { BATCHES = 25 };
    lf_dataset *set = scenes(40);
    lf_loader_options o = options(4);
    o.augment = 1;
    trace *whole = trace_of(set, &o, BATCHES);
    for (int32_t from = 0; from < BATCHES; from++)
        for (size_t k = 0; k < LF_COUNT(ways); k++) {
            int32_t global = ways[k].batch * ways[k].world, left = (BATCHES - from) * 4, batches = left / global;
            if (from % 10 % 2 && global == 8) continue; /* an epoch that a batch of 8 cannot finish exactly */
            for (int32_t r = 0; r < ways[k].world; r++) {
                lf_loader_options p = o;
                p.batch_size = ways[k].batch;
                p.world = ways[k].world;
                p.rank = r;
                p.depth = ways[k].depth;
                p.threads = ways[k].threads;
                lf_loader *loader = open_loader(set, &p);
                trace *t = calloc(1, sizeof *t);
                CHECK_OK(lf_loader_set_state(loader, &whole->state[from]));
                follow(loader, batches, t);
                lf_loader_close(loader);
                for (int32_t b = 0; b < batches; b++)
                    check_same(whole->row + from * 4 + b * global + r * p.batch_size, t->row + b * p.batch_size, p.batch_size,
                               "resume");
                free(t);
            }
        }
    free(whole);
    lf_dataset_close(set);
}

/* Saved with batch 4, resumed with batch 3 on 2 ranks: the rest of the epoch comes once, the next epoch is whole. */
TEST(resume_at_another_world_size_loses_and_repeats_nothing)
{
    lf_dataset *set = scenes(40);
    lf_loader_options o = options(4);
    o.drop_last = 0;
    trace *whole = trace_of(set, &o, 10);
    for (int32_t from = 0; from < 10; from++) {
        int32_t seen[2][40] = {{0}};
        for (int32_t i = 0; i < from * 4; i++) seen[0][whole->row[i].index]++;
        for (int32_t r = 0; r < 2; r++) {
            lf_loader_options p = o;
            p.batch_size = 3;
            p.world = 2;
            p.rank = r;
            lf_loader *loader = open_loader(set, &p);
            trace *t = calloc(1, sizeof *t);
            CHECK_OK(lf_loader_set_state(loader, &whole->state[from]));
            follow(loader, (40 - from * 4 + 5) / 6 + 7, t);
            lf_loader_close(loader);
            for (int32_t i = 0; i < t->n; i++)
                if (t->row[i].weight > 0) seen[t->row[i].epoch][t->row[i].index]++;
            free(t);
        }
        for (int32_t i = 0; i < 40; i++) {
            CHECK_EQ(seen[0][i], 1);
            CHECK_EQ(seen[1][i], 1);
        }
    }
    free(whole);
    lf_dataset_close(set);
}

TEST(last_batch_is_left_out_or_filled_up)
{
    lf_dataset *set = scenes(10);
    lf_loader_options o = options(4);
    lf_loader *loader = open_loader(set, &o);
    CHECK_EQ(lf_loader_batches_per_epoch(loader), 2);
    lf_loader_close(loader);
    trace *t = trace_of(set, &o, 4);
    CHECK_EQ(t->row[8].epoch, 1);
    CHECK_EQ(t->state[2].epoch, 1); /* an epoch's end is the next one's start */
    CHECK_EQ(t->state[2].samples_done, 0);
    free(t);
    o.drop_last = 0;
    loader = open_loader(set, &o);
    CHECK_EQ(lf_loader_batches_per_epoch(loader), 3);
    lf_batch b = {.size = sizeof b};
    int64_t first[2] = {0};
    for (int32_t k = 0; k < 3; k++) {
        CHECK_OK(lf_loader_next(loader, &b, NULL));
        CHECK_EQ(b.last_of_epoch, k == 2);
        if (k == 0) memcpy(first, b.index, sizeof first);
        if (k < 2) CHECK_OK(lf_batch_release(loader, &b, NULL));
    }
    for (int32_t i = 0; i < 4; i++) CHECK(b.weight[i] == (i < 2 ? 1.0f : 0.0f));
    CHECK(b.index[2] == first[0] && b.index[3] == first[1]);
    for (int32_t p = 0; p < b.seq; p++) CHECK_EQ(b.labels[2 * b.seq + p], -100);
    CHECK(b.mask[2 * b.seq] == 1);
    lf_loader_close(loader);
    o.batch_size = 16; /* more than the set has */
    t = trace_of(set, &o, 2);
    CHECK(t->row[9].weight > 0 && t->row[10].weight == 0 && t->row[16].epoch == 1);
    free(t);
    o.drop_last = 1;
    CHECK_STATUS(lf_loader_open(&loader, set, cpu(), &o), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "10 samples");
    CHECK(loader == NULL);
    lf_dataset_close(set);
}

TEST(states_that_do_not_fit_are_refused)
{
    lf_dataset *set = scenes(10);
    lf_loader_options o = options(2);
    lf_loader *loader = open_loader(set, &o);
    lf_loader_state good = {.size = sizeof good}, s;
    CHECK_OK(lf_loader_get_state(loader, &good));
    s = good, s.seed = 77;
    CHECK_STATUS(lf_loader_set_state(loader, &s), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "77");
    s = good, s.n_samples = 11;
    CHECK_STATUS(lf_loader_set_state(loader, &s), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "11");
    s = good, s.samples_done = 11;
    CHECK_STATUS(lf_loader_set_state(loader, &s), LF_ERR_INVALID);
    s = good, s.epoch = -1;
    CHECK_STATUS(lf_loader_set_state(loader, &s), LF_ERR_INVALID);
    CHECK_OK(lf_loader_set_state(loader, &good));
    lf_batch b = {.size = sizeof b};
    CHECK_OK(lf_loader_next(loader, &b, NULL));
    CHECK_STATUS(lf_loader_set_state(loader, &good), LF_ERR_STATE);
    lf_loader_close(loader);
    o.rank = 1;
    CHECK_STATUS(lf_loader_open(&loader, set, cpu(), &o), LF_ERR_INVALID);
    lf_dataset_close(set);
}

LF_TEST_MAIN
