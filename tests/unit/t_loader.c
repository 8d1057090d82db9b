/* SPDX-License-Identifier: Apache-2.0 */
/* The pipeline: order, resume, ranks, bad samples, slots, streams. */
#include <lmdb.h>
#include <stdatomic.h>

#include "lf_test.h"
#include "loader/loader_int.h"
#include "loader/pack_int.h"

enum { S = 16, MOST_BATCHES = 200 };

static char log_lines[65536];
static void keep_log(void *user, int32_t level, const char *line)
{
    (void)user, (void)level;
    size_t n = strlen(log_lines);
    snprintf(log_lines + n, sizeof log_lines - n, "%s\n", line);
}

/* ---- sets ---------------------------------------------------------------------------------------------------------------- */

/* n scenes, packed once for each n. */
static lf_dataset *scenes(int64_t n)
{
    char name[32];
    lf_pack_options o;
    lf_dataset *set;
    struct stat st;
    snprintf(name, sizeof name, "scenes%lld", (long long)n);
    CHECK_OK(lf_options_init("pack", &o, sizeof o));
    o.scenes = n;
    if (stat(lf_test_path(name), &st) != 0) CHECK_OK(lf_pack_scenes(lf_test_path(name), &o, NULL, NULL, NULL));
    CHECK_OK(lf_dataset_open(&set, lf_test_path(name)));
    return set;
}

/* A copy of n scenes in which some are damaged: image cut, image no JPEG, text no JSON, in turn. */
static lf_dataset *damaged(const char *name, int64_t n, const int64_t *bad, int32_t n_bad)
{
    lf_dataset *from = scenes(n), *set;
    MDB_env *env;
    MDB_txn *txn;
    MDB_dbi dbi;
    const char *path = lf_test_path(name);
    mkdir(path, 0777);
    CHECK(mdb_env_create(&env) == 0 && mdb_env_set_mapsize(env, 64 << 20) == 0 && mdb_env_open(env, path, MDB_NOLOCK, 0666) == 0);
    CHECK(mdb_txn_begin(env, NULL, 0, &txn) == 0 && mdb_dbi_open(txn, NULL, 0, &dbi) == 0);
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
        MDB_val k = {strlen(key), key};
        CHECK(mdb_put(txn, dbi, &k, &image, 0) == 0);
        snprintf(key, sizeof key, "%.*s_text", (int)s.id_bytes, s.id);
        k.mv_size = strlen(key);
        CHECK(mdb_put(txn, dbi, &k, &text, 0) == 0);
    }
    CHECK(mdb_txn_commit(txn) == 0);
    mdb_env_close(env);
    lf_dataset_close(from);
    CHECK_OK(lf_dataset_open(&set, lf_test_path(name)));
    return set;
}

/* Eight samples; the first one's image takes far longer to decode than the others'; images of the first n_bad end early. */
static lf_dataset *lopsided(const char *name, int32_t n_bad)
{
    enum { SIDE = 2500 };
    static uint8_t rgb[SIDE * SIDE * 3];
    lf_dataset *set;
    MDB_env *env;
    MDB_txn *txn;
    MDB_dbi dbi;
    const char *path = lf_test_path(name);
    mkdir(path, 0777);
    CHECK(mdb_env_create(&env) == 0 && mdb_env_set_mapsize(env, 64 << 20) == 0 && mdb_env_open(env, path, MDB_NOLOCK, 0666) == 0);
    CHECK(mdb_txn_begin(env, NULL, 0, &txn) == 0 && mdb_dbi_open(txn, NULL, 0, &dbi) == 0);
    for (int32_t i = 0; i < SIDE * SIDE * 3; i++) rgb[i] = (uint8_t)(i * 7 + i / 997 * 13);
    for (int32_t i = 0; i < 8; i++) {
        lf__buf jpeg = {.max = 64 << 20};
        char key[32];
        int32_t side = i == 0 ? SIDE : 16;
        CHECK_OK(lf__pack_encode(rgb, side, side, 80, false, &jpeg));
        snprintf(key, sizeof key, "%d_image", i);
        MDB_val k = {strlen(key), key}, v = {jpeg.used - (i < n_bad ? 40 : 0), jpeg.data};
        CHECK(mdb_put(txn, dbi, &k, &v, 0) == 0);
        lf__buf_free(&jpeg);
    }
    CHECK(mdb_txn_commit(txn) == 0);
    mdb_env_close(env);
    CHECK_OK(lf_dataset_open(&set, lf_test_path(name)));
    return set;
}

/* ---- loaders --------------------------------------------------------------------------------------------------------------- */

static lf_device *cpu(void)
{
    static lf_device *device; /* for all cases */
    if (!device) CHECK_OK(lf_device_open(&device, "cpu"));
    return device;
}

static lf_loader_options options(int32_t batch)
{
    lf_loader_options o;
    CHECK_OK(lf_options_init("loader", &o, sizeof o));
    o.batch_size = batch;
    o.image_size = S;
    o.threads = 2;
    return o;
}

/* What a batch holds, for comparing: one digest a row (place and padding left out), and who it is. */
typedef struct row_print {
    int64_t epoch, index;
    float weight;
    lf__hash128 digest;
} row_print;

static row_print print_row(const lf_batch *b, int32_t i)
{
    row_print p = {.epoch = b->epoch, .index = b->index[i], .weight = b->weight[i]};
    uint64_t parts[5];
    int32_t n = 0;
    while (n < b->seq && b->mask[(int64_t)i * b->seq + n]) n++;
    parts[0] = lf__hash(b->images + (size_t)i * 3 * S * S, 3 * S * S * sizeof(float), 0).lo;
    parts[1] = lf__hash(b->tokens + (size_t)i * b->seq, (size_t)n * 8, 0).lo;
    parts[2] = lf__hash(b->labels + (size_t)i * b->seq, (size_t)n * 8, 0).lo;
    parts[3] = (uint64_t)n;
    parts[4] = b->weight[i] > 0;
    p.digest = lf__hash(parts, sizeof parts, 0);
    return p;
}

typedef struct trace {
    row_print row[MOST_BATCHES * 8];
    int32_t n;
    lf_loader_state state[MOST_BATCHES + 1]; /* after so many batches */
    int32_t rows_after[MOST_BATCHES + 1];
} trace;

static void follow(lf_loader *loader, int32_t batches, trace *t)
{
    t->n = 0;
    t->state[0].size = sizeof t->state[0];
    CHECK_OK(lf_loader_get_state(loader, &t->state[0]));
    for (int32_t k = 0; k < batches; k++) {
        lf_batch b = {.size = sizeof b};
        CHECK_OK(lf_loader_next(loader, &b, NULL));
        for (int32_t i = 0; i < b.n; i++) t->row[t->n++] = print_row(&b, i);
        CHECK_OK(lf_batch_release(loader, &b, NULL));
        t->state[k + 1].size = sizeof t->state[0];
        CHECK_OK(lf_loader_get_state(loader, &t->state[k + 1]));
        t->rows_after[k + 1] = t->n;
    }
}

static lf_loader *open_loader(lf_dataset *set, const lf_loader_options *o)
{
    lf_loader *loader;
    CHECK_OK(lf_loader_open(&loader, set, cpu(), o));
    return loader;
}

static trace *trace_of(lf_dataset *set, const lf_loader_options *o, int32_t batches)
{
    trace *t = calloc(1, sizeof *t);
    lf_loader *loader = open_loader(set, o);
    follow(loader, batches, t);
    lf_loader_close(loader);
    return t;
}

static void check_same(const row_print *a, const row_print *b, int32_t n, const char *what)
{
    for (int32_t i = 0; i < n; i++) {
        if (a[i].index != b[i].index || a[i].epoch != b[i].epoch)
            FAIL_("%s: row %d is sample %lld, expected %lld", what, i, (long long)b[i].index, (long long)a[i].index);
        if (memcmp(&a[i].digest, &b[i].digest, sizeof a[i].digest) != 0)
            FAIL_("%s: row %d (sample %lld) has other contents", what, i, (long long)b[i].index);
    }
}

/* ---- contents ---------------------------------------------------------------------------------------------------------------- */

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

/* ---- ranks and resume ----------------------------------------------------------------------------------------------------------- */

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

/* ---- bad samples --------------------------------------------------------------------------------------------------------------- */

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
    log_lines[0] = 0;
    lf_log_set(keep_log, NULL, LF_LOG_WARN);
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
    lf_log_set(NULL, NULL, 0);
    CHECK_HAS(log_lines, "bad sample 0000000011: not a JPEG");
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

/* ---- slots and streams ------------------------------------------------------------------------------------------------------------ */

TEST(held_slots_are_never_reused)
{
    lf_dataset *set = scenes(40);
    lf_loader_options o = options(4);
    o.depth = 3;
    lf_loader *loader = open_loader(set, &o);
    lf_batch b[4];
    row_print before[3];
    for (int32_t i = 0; i < 4; i++) b[i] = (lf_batch){.size = sizeof b[i]};
    for (int32_t i = 0; i < 3; i++) {
        CHECK_OK(lf_loader_next(loader, &b[i], NULL));
        before[i] = print_row(&b[i], 0);
    }
    CHECK_STATUS(lf_loader_next(loader, &b[3], NULL), LF_ERR_STATE);
    CHECK_HAS(lf_error_text(), "all 3 batch slots");
    CHECK_OK(lf_batch_release(loader, &b[1], NULL)); /* the middle one: slots are not a queue */
    CHECK_STATUS(lf_batch_release(loader, &b[1], NULL), LF_ERR_STATE);
    CHECK_OK(lf_loader_next(loader, &b[3], NULL));
    CHECK_EQ(b[3].number, 3);
    CHECK_EQ(b[3].slot, b[1].slot);
    CHECK_STATUS(lf_batch_release(loader, &b[1], NULL), LF_ERR_STATE); /* the slot is another batch's now */
    for (int32_t i = 0; i < 3; i += 2) {
        row_print now = print_row(&b[i], 0);
        CHECK(memcmp(&now.digest, &before[i].digest, 16) == 0);
    }
    b[0].slot = 99;
    CHECK_STATUS(lf_batch_release(loader, &b[0], NULL), LF_ERR_INVALID);
    lf_loader_close(loader);
    lf_dataset_close(set);
}

typedef struct slow_reader {
    const float *images;
    lf__hash128 digest;
    _Atomic int32_t done;
} slow_reader;

static lf_status read_slowly(void *user)
{
    slow_reader *r = user;
    lf__sleep_ns(50000000);
    r->digest = lf__hash(r->images, 4 * 3 * S * S * sizeof(float), 0);
    atomic_store(&r->done, 1);
    return LF_OK;
}

/* Work queued before the release still reads the slot: it must not change until that work is done. */
TEST(released_slot_waits_for_work_on_the_stream)
{
    lf_dataset *set = scenes(40);
    lf_loader_options o = options(4);
    o.depth = 1;
    lf_stream *stream;
    CHECK_OK(lf_stream_open(cpu(), 0, &stream));
    lf_loader *loader = open_loader(set, &o);
    for (int32_t k = 0; k < 3; k++) {
        lf_batch b = {.size = sizeof b};
        CHECK_OK(lf_loader_next(loader, &b, stream));
        slow_reader r = {.images = b.images};
        lf__hash128 want = lf__hash(b.images, 4 * 3 * S * S * sizeof(float), 0);
        CHECK_OK(lf_stream_run(stream, read_slowly, &r));
        CHECK_OK(lf_batch_release(loader, &b, stream));
        lf_batch next = {.size = sizeof next};
        CHECK_OK(lf_loader_next(loader, &next, NULL));
        CHECK(atomic_load(&r.done));
        CHECK(memcmp(&want, &r.digest, sizeof want) == 0);
        CHECK_OK(lf_batch_release(loader, &next, NULL));
    }
    lf_loader_close(loader);
    lf_stream_close(stream);
    lf_dataset_close(set);
}

/* The way to another device, with the CPU's table under another kind: staged in host memory, copied on a stream. */
TEST(batches_for_another_device_are_copied_there)
{
    static lf__device_ops ops;
    ops = lf__device_cpu;
    ops.kind = 2;
    static lf_device other;
    other = (lf_device){.ops = &ops, .context = cpu()->context};
    atomic_init(&other.refs, 1000);
    lf_dataset *set = scenes(40);
    lf_loader_options o = options(4);
    trace *want = trace_of(set, &o, 20), *got = calloc(1, sizeof *got);
    lf_loader *loader;
    lf_stream *stream;
    CHECK_OK(lf_loader_open(&loader, set, &other, &o));
    CHECK_OK(lf_stream_open(&other, 0, &stream));
    for (int32_t k = 0; k < 20; k++) {
        lf_batch b = {.size = sizeof b};
        CHECK_OK(lf_loader_next(loader, &b, k % 2 ? stream : NULL));
        if (k % 2) CHECK_OK(lf_stream_sync(stream));
        for (int32_t i = 0; i < 4; i++) got->row[got->n++] = print_row(&b, i);
        CHECK_OK(lf_batch_release(loader, &b, k % 2 ? stream : NULL));
    }
    check_same(want->row, got->row, got->n, "other device");
    lf_loader_close(loader);
    lf_stream_close(stream);
    CHECK_EQ(atomic_load(&other.refs), 1000);
    free(want), free(got);
    lf_dataset_close(set);
}

TEST(closing_early_and_often_is_clean)
{
    lf_dataset *set = scenes(40);
    for (int32_t k = 0; k < 60; k++) {
        lf_loader_options o = options(4);
        o.depth = 1 + k % 5;
        lf_loader *loader = open_loader(set, &o);
        lf_batch b = {.size = sizeof b};
        for (int32_t i = 0; i < k % 4 && i < o.depth; i++) CHECK_OK(lf_loader_next(loader, &b, NULL));
        lf_loader_close(loader);
    }
    lf_loader_options o = options(4);
    lf_loader *loader = open_loader(set, &o);
    lf_dataset_close(set); /* the loader keeps it open */
    lf_batch b = {.size = sizeof b};
    CHECK_OK(lf_loader_next(loader, &b, NULL));
    lf_loader_close(loader);
    lf_loader_close(NULL);
}

TEST(open_survives_every_failing_allocation)
{
    lf_dataset *set = scenes(8);
    lf_loader_options o = options(2);
    lf_loader *loader;
    cpu();
    lf__alloc_fail_at(0);
    CHECK_OK(lf_loader_open(&loader, set, cpu(), &o));
    int64_t n = lf__alloc_fail_at(0);
    lf_loader_close(loader);
    CHECK(n > 40);
    for (int64_t i = 1; i <= n; i++) {
        lf__alloc_fail_at(i);
        lf_status rc = lf_loader_open(&loader, set, cpu(), &o);
        lf__alloc_fail_at(0);
        if (rc != LF_ERR_NOMEM || loader)
            FAIL_("allocation %lld of %lld failed: %s %s", (long long)i, (long long)n, lf_status_name(rc), lf_error_text());
        CHECK(strlen(lf_error_text()) > 0);
    }
    lf_dataset_close(set);
}

/* A lack of memory while it runs is an error of the run under every policy, not a bad sample. */
TEST(no_memory_in_a_stage_is_delivered)
{
    lf_dataset *set = scenes(8);
    int32_t met = 0;
    for (int64_t at = 1; at <= 6; at++) {
        lf_loader_options o = options(2);
        o.threads = 1;
        lf_loader *loader = open_loader(set, &o);
        lf_batch b = {.size = sizeof b};
        lf__alloc_fail_at(at); /* decoders grow their scratch memory on the first images */
        lf_status rc = LF_OK;
        for (int32_t i = 0; i < 4 && rc == LF_OK; i++) {
            rc = lf_loader_next(loader, &b, NULL);
            if (rc == LF_OK) CHECK_OK(lf_batch_release(loader, &b, NULL));
        }
        lf__alloc_fail_at(0);
        if (rc < 0) {
            CHECK_EQ(rc, LF_ERR_NOMEM);
            met++;
        }
        lf_loader_close(loader);
    }
    CHECK(met >= 2);
    lf_dataset_close(set);
}

LF_TEST_MAIN
