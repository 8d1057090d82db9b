/* SPDX-License-Identifier: Apache-2.0 */
/** @file loader_fixture.h  What the tests of the loader share: sets, loaders, what a row of a batch holds, a run of batches. */
#ifndef LF_LOADER_FIXTURE_H
#define LF_LOADER_FIXTURE_H

#include <lmdb.h>

#include "lf_test.h"
#include "loader/loader_int.h"

enum { S = 16, MOST_BATCHES = 200 };

/* ---- sets ---------------------------------------------------------------------------------------------------------------- */

/* n scenes, packed once for each n. */
static inline lf_dataset *scenes(int64_t n)
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

/* A set written record by record. */
typedef struct new_set {
    MDB_env *env;
    MDB_txn *txn;
    MDB_dbi dbi;
} new_set;

static inline new_set begin_set(const char *name)
{
    new_set s;
    const char *path = lf_test_path(name);
    mkdir(path, 0777);
    CHECK(mdb_env_create(&s.env) == 0 && mdb_env_set_mapsize(s.env, 64 << 20) == 0);
    CHECK(mdb_env_open(s.env, path, MDB_NOLOCK, 0666) == 0);
    CHECK(mdb_txn_begin(s.env, NULL, 0, &s.txn) == 0 && mdb_dbi_open(s.txn, NULL, 0, &s.dbi) == 0);
    return s;
}

static inline void put_value(new_set *s, char *key, MDB_val value)
{
    MDB_val k = {strlen(key), key};
    CHECK(mdb_put(s->txn, s->dbi, &k, &value, 0) == 0);
}

static inline lf_dataset *end_set(new_set *s, const char *name)
{
    lf_dataset *set;
    CHECK(mdb_txn_commit(s->txn) == 0);
    mdb_env_close(s->env);
    CHECK_OK(lf_dataset_open(&set, lf_test_path(name)));
    return set;
}

/* ---- loaders --------------------------------------------------------------------------------------------------------------- */

static inline lf_device *cpu(void)
{
    static lf_device *device; /* for all cases */
    if (!device) CHECK_OK(lf_device_open(&device, "cpu"));
    return device;
}

static inline lf_loader_options options(int32_t batch)
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

static inline row_print print_row(const lf_batch *b, int32_t i)
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

static inline void follow(lf_loader *loader, int32_t batches, trace *t)
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

static inline lf_loader *open_loader(lf_dataset *set, const lf_loader_options *o)
{
    lf_loader *loader;
    CHECK_OK(lf_loader_open(&loader, set, cpu(), o));
    return loader;
}

static inline trace *trace_of(lf_dataset *set, const lf_loader_options *o, int32_t batches)
{
    trace *t = calloc(1, sizeof *t);
    lf_loader *loader = open_loader(set, o);
    follow(loader, batches, t);
    lf_loader_close(loader);
    return t;
}

static inline void check_same(const row_print *a, const row_print *b, int32_t n, const char *what)
{
    for (int32_t i = 0; i < n; i++) {
        if (a[i].index != b[i].index || a[i].epoch != b[i].epoch)
            FAIL_("%s: row %d is sample %lld, expected %lld", what, i, (long long)b[i].index, (long long)a[i].index);
        if (memcmp(&a[i].digest, &b[i].digest, sizeof a[i].digest) != 0)
            FAIL_("%s: row %d (sample %lld) has other contents", what, i, (long long)b[i].index);
    }
}

#endif
