/* SPDX-License-Identifier: Apache-2.0 */
/* Samples that cannot be used: what each policy makes of them, and the budget. */
#include "kept_log.h"
#include "loader_fixture.h"

/* A copy of n scenes in which some are damaged: image cut, image no JPEG, text no JSON, in turn. */
static lf_dataset *damaged(const char *name, int64_t n, const int64_t *bad, int32_t n_bad)
{
    lf_dataset *from = scenes(n);
    new_set set = begin_set(name);
    for (int64_t i = 0; i < n; i++) {
        lf_sample s = {.size = sizeof s};
        int32_t how = -1;
        char key[64];
        CHECK_OK(lf_dataset_get(from, i, &s));
        for (int32_t k = 0; k < n_bad; k++)
            if (bad[k] == i) how = k % 3;
        MDB_val image = {(size_t)s.image_bytes, (void *)(uintptr_t)s.image},
                text = {(size_t)s.text_bytes, (void *)(uintptr_t)s.text};
        if (how == 0) image.mv_size /= 2;
        if (how == 1) image = (MDB_val){20, "this is no JPEG file"};
        if (how == 2) text = (MDB_val){3, "{{{"};
        snprintf(key, sizeof key, "%.*s_image", (int)s.id_bytes, s.id);
        put_value(&set, key, image);
        snprintf(key, sizeof key, "%.*s_text", (int)s.id_bytes, s.id);
        put_value(&set, key, text);
    }
    lf_dataset_close(from);
    return end_set(&set, name);
}

static const int64_t bad_ones[] = {3, 11, 19, 27, 35, 36};

TEST(bad_sample_under_error_ends_the_run_by_name)
{
    lf_dataset *set = damaged("bad_error", 40, bad_ones, 6);
    lf_loader_options o = options(4);
    snprintf(o.bad_samples, sizeof o.bad_samples, "error");
    o.shuffle = 0;
    lf_loader *loader = open_loader(set, &o);
    lf_batch b = {.size = sizeof b, .n = 123};
    CHECK_STATUS(lf_loader_next(loader, &b, NULL), LF_ERR_CORRUPT);
    CHECK_HAS(lf_error_text(), "0000000003");
    CHECK_HAS(lf_error_text(), "premature end");
    CHECK_EQ(b.n, 123);
    CHECK_STATUS(lf_loader_next(loader, &b, NULL), LF_ERR_CORRUPT); /* and only that from now on */
    CHECK_HAS(lf_error_text(), "0000000003");
    lf_loader_close(loader);
    lf_loader_state at = {.size = sizeof at, .samples_done = 4, .seed = 1, .n_samples = 40};
    loader = open_loader(set, &o);
    CHECK_OK(lf_loader_set_state(loader, &at));
    CHECK_OK(lf_loader_next(loader, &b, NULL)); /* samples 4 to 7 are good */
    CHECK_OK(lf_batch_release(loader, &b, NULL));
    CHECK_STATUS(lf_loader_next(loader, &b, NULL), LF_ERR_FORMAT);
    CHECK_HAS(lf_error_text(), "0000000011");
    CHECK_HAS(lf_error_text(), "not a JPEG");
    lf_loader_close(loader);
    lf_dataset_close(set);
}

TEST(skipped_samples_leave_the_batch_full_and_untrained)
{
    lf_dataset *set = damaged("bad_skip", 40, bad_ones, 6);
    lf_loader_options o = options(4);
    o.shuffle = 0;
    o.bad_budget = 0.2;
    start_log(LF_LOG_WARN);
    lf_loader *loader = open_loader(set, &o);
    for (int32_t k = 0; k < 20; k++) { /* two epochs: noted once */
        lf_batch b = {.size = sizeof b};
        CHECK_OK(lf_loader_next(loader, &b, NULL));
        for (int32_t i = 0; i < 4; i++) {
            int64_t sample = k % 10 * 4 + i;
            bool bad = false;
            for (int32_t j = 0; j < 6; j++) bad = bad || bad_ones[j] == sample;
            CHECK_EQ(b.weight[i] > 0, !bad);
            if (!bad) CHECK_EQ(b.index[i], sample);
            int32_t labels = 0;
            for (int32_t p = 0; p < b.seq; p++) labels += b.labels[(int64_t)i * b.seq + p] != -100;
            CHECK_EQ(labels > 0, !bad);
            if (bad) { /* a copy of a good row of the batch */
                int32_t twin = 0;
                while (b.weight[twin] == 0) twin++;
                CHECK_EQ(b.index[i], b.index[twin]);
                CHECK(memcmp(b.images + (size_t)i * 3 * S * S, b.images + (size_t)twin * 3 * S * S, 3 * S * S * sizeof(float)) ==
                      0);
                CHECK(memcmp(b.tokens + (size_t)i * b.seq, b.tokens + (size_t)twin * b.seq, (size_t)b.seq * 8) == 0);
            }
        }
        CHECK_OK(lf_batch_release(loader, &b, NULL));
    }
    lf_loader_stats st = {.size = sizeof st};
    CHECK_OK(lf_loader_get_stats(loader, &st));
    CHECK_EQ(st.bad_samples, 6);
    char text[4096], small[200];
    CHECK_OK(lf_loader_bad_samples(loader, text, sizeof text));
    int32_t lines = 0;
    for (const char *p = text; *p; p++) lines += *p == '\n';
    CHECK_EQ(lines, 6);
    CHECK(strstr(text, "0000000003: ") == text && strstr(text, "0000000019: text record"));
    CHECK_OK(lf_loader_bad_samples(loader, small, sizeof small));
    CHECK(strlen(small) < sizeof small && strcmp(small, text + strlen(text) - strlen(small)) == 0 && small[0] == '0');
    lf_loader_close(loader);
    end_log();
    CHECK_HAS(log_text, "bad sample 0000000011: not a JPEG");
    lf_dataset_close(set);
}

TEST(substitutes_are_good_trained_on_and_always_the_same)
{
    static const int32_t ways[][2] = {{1, 1}, {3, 4}, {2, 7}};
    lf_dataset *set = damaged("bad_subst", 40, bad_ones, 6);
    trace *first = NULL;
    for (size_t k = 0; k < LF_COUNT(ways); k++) {
        lf_loader_options o = options(4);
        snprintf(o.bad_samples, sizeof o.bad_samples, "substitute");
        o.bad_budget = 0.2;
        o.augment = 1;
        o.threads = ways[k][0];
        o.depth = ways[k][1];
        trace *t = trace_of(set, &o, 20);
        int32_t count[2][40] = {{0}};
        for (int32_t i = 0; i < t->n; i++) {
            CHECK(t->row[i].weight == 1.0f);
            count[t->row[i].epoch][t->row[i].index]++;
            for (int32_t j = 0; j < 6; j++) CHECK(t->row[i].index != bad_ones[j]);
        }
        for (int32_t i = 0, more = 0; i < 40; i++) {
            more += count[0][i] > 1 ? count[0][i] - 1 : 0;
            if (i == 39) CHECK_EQ(more, 6);
        }
        if (!first) first = t;
        else check_same(first->row, t->row, t->n, "substitutes");
        if (t != first) free(t);
    }
    free(first);
    lf_dataset_close(set);
}

TEST(budget_ends_the_run_at_the_same_batch_always)
{
    static const int32_t ways[][2] = {{1, 1}, {4, 8}};
    lf_dataset *set = damaged("bad_budget", 40, bad_ones, 6);
    for (size_t k = 0; k < LF_COUNT(ways); k++) {
        lf_loader_options o = options(4);
        o.shuffle = 0;
        o.bad_budget = 0.05; /* two of forty; the third is sample 19, in batch 4 */
        o.threads = ways[k][0];
        o.depth = ways[k][1];
        lf_loader *loader = open_loader(set, &o);
        lf_batch b = {.size = sizeof b};
        for (int32_t i = 0; i < 4; i++) {
            CHECK_OK(lf_loader_next(loader, &b, NULL));
            CHECK_OK(lf_batch_release(loader, &b, NULL));
        }
        CHECK_STATUS(lf_loader_next(loader, &b, NULL), LF_ERR_BUDGET);
        CHECK_HAS(lf_error_text(), "3 of 40");
        lf_loader_close(loader);
    }
    lf_dataset_close(set);
}

TEST(a_set_of_bad_samples_alone_gives_untrained_batches)
{
    static const int64_t all[] = {0, 1, 2, 3, 4, 5, 6, 7};
    lf_dataset *set = damaged("all_bad", 8, all, 8);
    static const char *const policies[] = {"skip", "substitute"};
    for (int32_t k = 0; k < 2; k++) {
        lf_loader_options o = options(4);
        snprintf(o.bad_samples, sizeof o.bad_samples, "%s", policies[k]);
        o.bad_budget = 1;
        lf_loader *loader = open_loader(set, &o);
        lf_batch b = {.size = sizeof b};
        CHECK_OK(lf_loader_next(loader, &b, NULL));
        CHECK_EQ(b.label_tokens, 0);
        for (int32_t i = 0; i < 4; i++)
            CHECK(b.weight[i] == 0 && b.mask[(int64_t)i * b.seq] == 1 && b.mask[(int64_t)i * b.seq + 1] == 0);
        lf_loader_close(loader);
    }
    lf_dataset_close(set);
}

LF_TEST_MAIN
