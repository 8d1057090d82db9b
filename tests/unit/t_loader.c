/* SPDX-License-Identifier: Apache-2.0 */
/* What batches hold and in which order they come. */
#include "loader/pack_int.h"
#include "loader_fixture.h"

/* Eight samples; the first one's image takes far longer to decode than the others'; images of the first n_bad end early. */
static lf_dataset *lopsided(const char *name, int32_t n_bad)
{
    enum { SIDE = 2500 };
    static uint8_t rgb[SIDE * SIDE * 3];
    new_set set = begin_set(name);
    for (int32_t i = 0; i < SIDE * SIDE * 3; i++) rgb[i] = (uint8_t)(i * 7 + i / 997 * 13);
    for (int32_t i = 0; i < 8; i++) {
        lf__buf jpeg = {.max = 64 << 20};
        char key[32];
        int32_t side = i == 0 ? SIDE : 16;
        CHECK_OK(lf__pack_encode(rgb, side, side, 80, false, &jpeg));
        snprintf(key, sizeof key, "%d_image", i);
        put_value(&set, key, (MDB_val){jpeg.used - (i < n_bad ? 40 : 0), jpeg.data});
        lf__buf_free(&jpeg);
    }
    return end_set(&set, name);
}

TEST(batch_holds_what_its_samples_say)
{
    lf_dataset *set = scenes(40);
    lf_loader_options o = options(5);
    lf_loader *loader = open_loader(set, &o);
    lf__vocabulary v = *lf__dataset_vocabulary(set);
    CHECK_EQ(lf_loader_batches_per_epoch(loader), 8);
    int64_t label_tokens = 0, tokens = 0, padding = 0;
    for (int32_t k = 0; k < 8; k++) {
        lf_batch b = {.size = sizeof b};
        CHECK_OK(lf_loader_next(loader, &b, NULL));
        CHECK(b.n == 5 && b.image_size == S && b.epoch == 0 && b.number == k && b.last_of_epoch == (k == 7));
        CHECK(b.seq % 16 == 0 && b.seq <= 192);
        int32_t longest = 0;
        int64_t labels = 0;
        for (int32_t i = 0; i < b.n; i++) {
            lf_sample s = {.size = sizeof s};
            int32_t id[512];
            uint8_t trained[512], rgb[S * S * 3];
            lf__tokens t = {.id = id, .trained = trained, .room = 512};
            CHECK_OK(lf_dataset_get(set, b.index[i], &s));
            CHECK_OK(lf__record_tokens(s.text, (size_t)s.text_bytes, &v, &t));
            longest = t.n > longest ? t.n : longest;
            for (int32_t p = 0; p < b.seq; p++) {
                int64_t at = (int64_t)i * b.seq + p;
                CHECK_EQ(b.mask[at], p < t.n);
                CHECK_EQ(b.tokens[at], p < t.n ? id[p] : v.pad);
                CHECK_EQ(b.labels[at], p < t.n && trained[p] ? id[p] : -100);
                labels += b.labels[at] != -100;
            }
            CHECK(b.weight[i] == 1.0f);
            tokens += t.n;
            padding += b.seq - t.n;
            CHECK_OK(lf_decode_image(s.image, (size_t)s.image_bytes, S, 1 << 20, rgb));
            for (int32_t c = 0; c < 3; c++)
                for (int32_t p = 0; p < S * S; p++)
                    CHECK_NEAR(b.images[((int64_t)i * 3 + c) * S * S + p], (rgb[p * 3 + c] / 255.0 - 0.5) / 0.25,
                               0.51 / 255 / 0.25);
        }
        CHECK(b.seq - longest < 16);
        CHECK_EQ(b.label_tokens, labels);
        label_tokens += labels;
        CHECK_OK(lf_batch_release(loader, &b, NULL));
    }
    lf_loader_stats st = {.size = sizeof st};
    CHECK_OK(lf_loader_get_stats(loader, &st));
    CHECK_EQ(st.batches, 8);
    CHECK_EQ(st.samples, 40);
    CHECK(st.label_tokens >= label_tokens && st.tokens >= tokens &&
          st.padding_tokens >= padding); /* batches in flight count too */
    CHECK(st.latency_p50_s > 0 && st.latency_p99_s >= st.latency_p50_s && st.decode_s > 0 && st.read_s > 0 && st.assemble_s > 0);
    lf_loader_close(loader);
    lf_dataset_close(set);
}

TEST(each_epoch_is_a_permutation_of_its_own)
{
    lf_dataset *set = scenes(40);
    static int64_t order[3][40];
    for (int32_t shuffle = 0; shuffle < 2; shuffle++) {
        lf_loader_options o = options(8);
        o.shuffle = shuffle;
        trace *t = trace_of(set, &o, 15);
        for (int32_t e = 0; e < 3; e++) {
            bool seen[40] = {false};
            for (int32_t i = 0; i < 40; i++) {
                const row_print *r = &t->row[e * 40 + i];
                CHECK_EQ(r->epoch, e);
                CHECK(!seen[r->index]);
                seen[r->index] = true;
                order[e][i] = r->index;
                if (!shuffle) CHECK_EQ(r->index, i);
            }
        }
        free(t);
    }
    CHECK(memcmp(order[0], order[1], sizeof order[0]) != 0 && memcmp(order[1], order[2], sizeof order[0]) != 0);
    lf_dataset_close(set);
}

TEST(threads_and_depth_change_nothing)
{
    static const int32_t ways[][2] = {{1, 1}, {1, 4}, {2, 2}, {4, 8}, {7, 3}};
    lf_dataset *set = scenes(40);
    trace *first = NULL;
    for (size_t k = 0; k < LF_COUNT(ways); k++) {
        lf_loader_options o = options(4);
        o.augment = 1;
        o.threads = ways[k][0];
        o.depth = ways[k][1];
        trace *t = trace_of(set, &o, 25);
        if (!first) first = t;
        else check_same(first->row, t->row, t->n, "threads and depth");
        if (t != first) free(t);
    }
    free(first);
    lf_dataset_close(set);
}

TEST(batches_come_in_order_whichever_is_decoded_first)
{
    lf_dataset *set = lopsided("lopsided", 0);
    lf_loader_options o = options(1);
    o.shuffle = 0;
    o.threads = 3;
    trace *t = trace_of(set, &o, 16);
    for (int32_t i = 0; i < 16; i++) CHECK_EQ(t->row[i].index, i % 8);
    free(t);
    lf_dataset_close(set);
    set = lopsided("lopsided_bad", 3); /* the first of three bad ones is decoded last and still counted first */
    o.bad_budget = 2.0 / 8;
    lf_loader *loader = open_loader(set, &o);
    lf_batch b = {.size = sizeof b};
    for (int32_t i = 0; i < 2; i++) {
        CHECK_OK(lf_loader_next(loader, &b, NULL));
        CHECK(b.weight[0] == 0);
        CHECK_OK(lf_batch_release(loader, &b, NULL));
    }
    CHECK_STATUS(lf_loader_next(loader, &b, NULL), LF_ERR_BUDGET);
    lf_loader_close(loader);
    lf_dataset_close(set);
}

TEST(augmentation_stays_inside_and_mirrors_half)
{
    enum { N = 4000 };
    lf__order order = {.n_samples = N, .seed = 3, .batch = 1, .world = 1};
    int32_t mirrored = 0;
    double area = 0;
    for (int64_t i = 0; i < N; i++) {
        lf__decode_want w = {0};
        lf__order_augment(&order, 1, i, &w);
        CHECK(w.left >= 0 && w.top >= 0 && w.right <= 1 && w.bottom <= 1 && w.right - w.left > 0.6 && w.bottom - w.top > 0.6);
        area += (w.right - w.left) * (w.bottom - w.top);
        mirrored += w.mirror;
    }
    CHECK_NEAR(area / N, 0.74, 0.03); /* 0.75, less what does not fit in */
    CHECK_NEAR(mirrored, N / 2, 0.05 * N);
    for (int64_t i = 0; i < 50; i++)
        for (int32_t a = 0; a < 6; a++) {
            lf__order small = {.n_samples = 7, .seed = i};
            CHECK(lf__order_substitute(&small, 0, i % 7, a) != i % 7);
        }
}

TEST(augmentation_varies_by_epoch_and_seed_only)
{
    lf_dataset *set = scenes(8);
    lf_loader_options o = options(8);
    o.augment = 1;
    trace *a = trace_of(set, &o, 3), *b = trace_of(set, &o, 3);
    check_same(a->row, b->row, a->n, "same seed");
    o.seed = 2;
    trace *c = trace_of(set, &o, 3);
    int32_t same = 0;
    for (int32_t i = 0; i < a->n; i++)
        for (int32_t k = 0; k < a->n; k++) {
            same += i < k && memcmp(&a->row[i].digest, &a->row[k].digest, 16) == 0;
            same += memcmp(&a->row[i].digest, &c->row[k].digest, 16) == 0;
        }
    CHECK_EQ(same, 0); /* no sample is cut twice the same way, in any epoch or with another seed */
    free(a), free(b), free(c);
    lf_dataset_close(set);
}

TEST(blank_images_are_grey_and_all_else_stays)
{
    lf_dataset *set = scenes(8);
    lf_loader_options o = options(8);
    o.blank_images = 1;
    lf_loader *loader = open_loader(set, &o);
    lf_batch b = {.size = sizeof b};
    CHECK_OK(lf_loader_next(loader, &b, NULL));
    for (int32_t i = 0; i < 8 * 3 * S * S; i++) CHECK(b.images[i] == 0.0f);
    CHECK(b.label_tokens > 0);
    lf_loader_close(loader);
    lf_dataset_close(set);
}

TEST(long_texts_are_cut_and_counted)
{
    lf_dataset *set = scenes(8);
    lf_loader_options o = options(8);
    o.seq_len = 24;
    o.depth = 1;
    lf_loader *loader = open_loader(set, &o);
    lf_batch b = {.size = sizeof b};
    CHECK_OK(lf_loader_next(loader, &b, NULL));
    CHECK_EQ(b.seq, 24);
    lf_loader_stats st = {.size = sizeof st};
    CHECK_OK(lf_loader_get_stats(loader, &st));
    CHECK_EQ(st.cut_texts, 8);
    CHECK_OK(lf_batch_release(loader, &b, NULL));
    lf_loader_close(loader);
    o.pad_multiple = 0;
    o.seq_len = 150;
    loader = open_loader(set, &o);
    CHECK_OK(lf_loader_next(loader, &b, NULL));
    CHECK_EQ(b.seq, 150);
    lf_loader_close(loader);
    lf_dataset_close(set);
}

LF_TEST_MAIN
