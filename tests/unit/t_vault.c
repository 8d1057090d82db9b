/* SPDX-License-Identifier: Apache-2.0 */
/* CheckpointVault in ordinary life: what is saved, what a diff holds, restore, merge, retention, refusals. */
#include <dirent.h>
#include <sys/wait.h>

#include "crash/vault_fixture.h"
#include "vault/vault_int.h"

static char log_text[1 << 16];

static void keep_log(void *user, int32_t level, const char *line)
{
    (void)user, (void)level;
    size_t n = strlen(log_text);
    snprintf(log_text + n, sizeof log_text - n, "%s\n", line);
}

static void start_log(void)
{
    log_text[0] = 0;
    lf_log_set(keep_log, NULL, LF_LOG_INFO);
}

static lf_vault_options options(void)
{
    lf_vault_options o;
    CHECK_OK(lf_options_init("vault", &o, sizeof o));
    o.slice_bytes = 4096;
    o.threads = 2;
    o.rebase_ratio = 1e6;
    return o;
}

static lf_vault *open_vault(const char *dir, lf_map *map, const lf_vault_options *o)
{
    lf_vault *v;
    CHECK_OK(lf_vault_open(&v, dir, map, o));
    return v;
}

static void save(lf_vault *v, lf_map *map, int64_t step)
{
    fixture_fill(map, step);
    lf_blob blobs[] = {{"step", &step, sizeof step}, {"empty", NULL, 0}};
    CHECK_OK(lf_vault_save(v, step, blobs, 2, NULL));
    CHECK_OK(lf_vault_wait(v));
}

static int64_t restore(lf_vault *v, lf_map *map, int64_t step)
{
    lf_checkpoint_info info = {.size = sizeof info};
    fixture_clear(map);
    CHECK_OK(lf_vault_restore(v, step, &info));
    CHECK(fixture_is(map, info.step));
    return info.step;
}

static bool exists(const char *dir, const char *name)
{
    char path[1024];
    struct stat st;
    snprintf(path, sizeof path, "%s/%s", dir, name);
    return stat(path, &st) == 0;
}

/* A vault with a base at 10 and diffs at 20, 30, 40. */
static void make_vault(const char *dir, lf_map *map)
{
    lf_vault_options o = options();
    lf_vault *v = open_vault(dir, map, &o);
    for (int64_t step = 10; step <= 40; step += 10) save(v, map, step);
    CHECK_OK(lf_vault_close(v));
}

/* ---- saving and restoring ------------------------------------------------------------------------------------------------ */

TEST(what_is_saved_comes_back)
{
    char dir[512];
    snprintf(dir, sizeof dir, "%s", lf_test_path("back"));
    lf_map *map = fixture_map();
    lf_vault_options o = options();
    make_vault(dir, map);
    lf_vault *v = open_vault(dir, map, &o);
    CHECK_EQ(restore(v, map, -1), 40);
    CHECK_EQ(restore(v, map, 35), 30);
    CHECK_EQ(restore(v, map, 10), 10);
    const void *data;
    int64_t bytes, step;
    CHECK_OK(lf_vault_blob(v, "step", &data, &bytes));
    CHECK_EQ(bytes, 8);
    memcpy(&step, data, 8);
    CHECK_EQ(step, 10);
    CHECK_OK(lf_vault_blob(v, "empty", &data, &bytes));
    CHECK_EQ(bytes, 0);
    CHECK_STATUS(lf_vault_blob(v, "other", &data, &bytes), LF_ERR_NOTFOUND);
    CHECK_STATUS(lf_vault_restore(v, 9, NULL), LF_ERR_NOTFOUND);
    CHECK_OK(lf_vault_close(v));
    CHECK_OK(lf_vault_verify(dir));
    int32_t n = 8;
    lf_checkpoint_info infos[8];
    CHECK_OK(lf_vault_list(dir, infos, &n));
    CHECK_EQ(n, 4);
    for (int i = 0; i < 4; i++) {
        CHECK_EQ(infos[i].step, (i + 1) * 10);
        CHECK_EQ(infos[i].base_step, 10);
        CHECK(i == 0 ? infos[i].bytes == 0 : infos[i].bytes > 0 && infos[i].bytes < infos[i].raw_bytes);
    }
    n = 2;
    CHECK_STATUS(lf_vault_list(dir, infos, &n), LF_ERR_NOMEM);
    CHECK_EQ(n, 4);
    lf_map_unref(map);
}

TEST(gradients_are_not_saved_and_not_touched)
{
    char dir[512];
    snprintf(dir, sizeof dir, "%s", lf_test_path("grad"));
    lf_map *map = fixture_map();
    lf_vault_options o = options();
    int64_t saved = 0;
    for (int32_t k = 0; k < lf_map_n_classes(map); k++) {
        lf_class_info info = {.size = sizeof info};
        CHECK_OK(lf_map_get_class(map, k, &info));
        for (int r = 0; r < LF_N_ROLES; r++)
            if (info.role_dtype[r] && r != LF_ROLE_GRAD && !(r == LF_ROLE_WEIGHT && info.role_dtype[LF_ROLE_MASTER]))
                saved += info.count * (int64_t)lf_dtype_bytes(info.role_dtype[r]);
    }
    lf_vault *v = open_vault(dir, map, &o);
    save(v, map, 10);
    int32_t index;
    lf_block_info b = {.size = sizeof b};
    CHECK_OK(lf_map_find(map, "l0.e0", &index));
    CHECK_OK(lf_map_get_block(map, index, &b));
    memset(lf_map_address(map, &b.range, LF_ROLE_GRAD), 0x5a, 64);
    lf_checkpoint_info info = {.size = sizeof info};
    CHECK_OK(lf_vault_restore(v, -1, &info));
    CHECK_EQ(info.raw_bytes, saved);
    CHECK_EQ(((uint8_t *)lf_map_address(map, &b.range, LF_ROLE_GRAD))[63], 0x5a);
    CHECK_OK(lf_vault_close(v));
    lf_map_unref(map);
}

TEST(a_diff_holds_only_what_changed)
{
    char dir[512];
    snprintf(dir, sizeof dir, "%s", lf_test_path("diff"));
    lf_map *map = fixture_map();
    lf_vault_options o = options();
    lf_vault *v = open_vault(dir, map, &o);
    save(v, map, 30);
    save(v, map, 40); /* periods of 10 and 20 changed, 30 and frozen ones not */
    save(v, map, 41); /* nothing changed but the blob */
    lf_blob none = {0};
    CHECK_OK(lf_vault_save(v, 42, &none, 0, NULL));
    CHECK_OK(lf_vault_wait(v));
    lf_vault_stats stats = {.size = sizeof stats};
    CHECK_OK(lf_vault_get_stats(v, &stats));
    CHECK_EQ(stats.committed, 4);
    CHECK_OK(lf_vault_close(v));
    lf__vault_manifest *m;
    CHECK_OK(lf__vault_load_meta(lf__io_posix(), dir, 40, &m));
    int64_t changed = 0;
    for (int64_t i = 0; i < m->layout->n_slices; i++) {
        const lf__vault_plane *p = lf__vault_plane_of(m->layout, i, NULL, NULL);
        if (m->layout->classes[p->klass].frozen) CHECK_EQ(m->refs_of[i].file, 0);
        changed += m->refs_of[i].file != 0;
    }
    CHECK_EQ(m->n_changed, changed);
    CHECK(changed > 0 && changed < m->layout->n_slices);
    CHECK_EQ(m->n_files, 2);
    lf__vault_manifest_unref(m);
    int32_t n = 8;
    lf_checkpoint_info infos[8];
    CHECK_OK(lf_vault_list(dir, infos, &n));
    CHECK_EQ(infos[2].n_changed, 0);
    CHECK(infos[2].bytes > 0 && infos[2].bytes < 512); /* its blobs */
    CHECK_EQ(infos[3].bytes, 0);
    CHECK(!exists(dir, "checkpoint_42/diff_001.bin"));
    lf_plane_change rows[16];
    n = 16;
    CHECK_OK(lf_vault_diff(dir, 30, 40, rows, &n));
    int64_t rows_changed = 0;
    for (int32_t i = 0; i < n; i++) rows_changed += rows[i].n_changed;
    CHECK_EQ(rows_changed, changed);
    CHECK_STATUS(lf_vault_diff(dir, 30, 39, NULL, &n), LF_ERR_NOTFOUND);
    lf_map_unref(map);
}

/* What the caller does to the map after lf_vault_save returned is not in the checkpoint. */
TEST(a_snapshot_is_of_its_moment)
{
    char dir[512];
    snprintf(dir, sizeof dir, "%s", lf_test_path("moment"));
    lf_map *map = fixture_map();
    lf_vault_options o = options();
    lf_vault *v = open_vault(dir, map, &o);
    for (int64_t step = 10; step <= 100; step += 10) {
        fixture_fill(map, step);
        CHECK_OK(lf_vault_save(v, step, NULL, 0, NULL));
        fixture_clear(map);
        CHECK_OK(lf_vault_wait(v));
        CHECK_EQ(restore(v, map, -1), step);
    }
    CHECK_OK(lf_vault_close(v));
    lf_map_unref(map);
}

static lf_status late_fill(void *user)
{
    lf__sleep_ns(20000000);
    fixture_fill(user, 70);
    return LF_OK;
}

TEST(work_queued_on_the_stream_is_waited_for)
{
    char dir[512];
    snprintf(dir, sizeof dir, "%s", lf_test_path("stream"));
    lf_map *map = fixture_map();
    lf_vault_options o = options();
    lf_vault *v = open_vault(dir, map, &o);
    lf_stream *stream;
    CHECK_OK(lf_stream_open(lf_map_device(map), 0, &stream));
    fixture_fill(map, 10);
    CHECK_OK(lf_stream_run(stream, late_fill, map));
    CHECK_OK(lf_vault_save(v, 70, NULL, 0, stream));
    CHECK_OK(lf_vault_wait(v));
    CHECK_EQ(restore(v, map, -1), 70);
    lf_stream_close(stream);
    CHECK_OK(lf_vault_close(v));
    lf_map_unref(map);
}

/* Frozen weights are hashed where they lie; an edit of them is seen all the same. */
TEST(an_edit_of_frozen_weights_is_seen)
{
    char dir[512];
    snprintf(dir, sizeof dir, "%s", lf_test_path("frozen"));
    lf_map *map = fixture_map();
    lf_vault_options o = options();
    lf_vault *v = open_vault(dir, map, &o);
    save(v, map, 10);
    save(v, map, 20);
    int32_t index;
    lf_block_info b = {.size = sizeof b};
    CHECK_OK(lf_map_find(map, "embed", &index));
    CHECK_OK(lf_map_get_block(map, index, &b));
    uint16_t *w = lf_map_address(map, &b.range, LF_ROLE_WEIGHT);
    fixture_fill(map, 30);
    w[2100] ^= 1;
    uint16_t edited = w[2100];
    CHECK_OK(lf_vault_save(v, 30, NULL, 0, NULL));
    CHECK_OK(lf_vault_wait(v));
    fixture_clear(map);
    CHECK_OK(lf_vault_restore(v, -1, NULL));
    CHECK_EQ(w[2100], edited);
    w[2100] ^= 1;
    CHECK(fixture_is(map, 30));
    CHECK_OK(lf_vault_close(v));
    lf_map_unref(map);
}

/* Tensors that stay where the caller has them, one piece a parameter. */
TEST(attached_maps_work)
{
    char dir[512];
    snprintf(dir, sizeof dir, "%s", lf_test_path("attached"));
    lf_map *map = fixture_map_scaled(1, NULL, NULL), *plain = fixture_map();
    lf_vault_options o = options();
    lf_vault *v;
    fixture_clear(plain);
    CHECK_OK(lf_vault_open(&v, dir, map, &o));
    CHECK_STATUS(lf_vault_save(v, 10, NULL, 0, NULL), LF_ERR_STATE); /* nothing attached */
    static uint8_t arena[1 << 20];
    size_t at = 0;
    for (int i = 0; i < FIXTURE_PARAMS; i++) {
        lf_block_info b = {.size = sizeof b};
        lf_class_info k = {.size = sizeof k};
        CHECK_OK(lf_map_get_block(map, i, &b));
        CHECK_OK(lf_map_get_class(map, b.range.klass, &k));
        for (int r = 0; r < LF_N_ROLES; r++) {
            if (!k.role_dtype[r]) continue;
            CHECK_OK(lf_map_attach(map, i, r, arena + at));
            at += (size_t)lf__round_up(b.range.count * (int64_t)lf_dtype_bytes(k.role_dtype[r]), 16) + 16;
        }
    }
    CHECK(at <= sizeof arena);
    save(v, map, 10);
    save(v, map, 20);
    CHECK_EQ(restore(v, map, -1), 20);
    CHECK_OK(lf_vault_close(v));
    v = open_vault(dir, plain, &o); /* the same layout, allocated */
    CHECK_EQ(restore(v, plain, -1), 20);
    CHECK_OK(lf_vault_close(v));
    lf_map_unref(map);
    lf_map_unref(plain);
}

TEST(other_slices_restore_and_start_a_new_base)
{
    char dir[512];
    snprintf(dir, sizeof dir, "%s", lf_test_path("slices"));
    lf_map *map = fixture_map();
    lf_vault_options o = options();
    make_vault(dir, map);
    o.slice_bytes = 8192;
    o.compress = 0;
    o.threads = 1;
    lf_vault *v = open_vault(dir, map, &o);
    CHECK_EQ(restore(v, map, -1), 40);
    save(v, map, 50);
    CHECK(exists(dir, "base_50.bin"));
    save(v, map, 60);
    CHECK(exists(dir, "checkpoint_60/diff_001.bin"));
    CHECK_EQ(restore(v, map, -1), 60);
    CHECK_OK(lf_vault_close(v));
    CHECK_OK(lf_vault_verify(dir));
    lf_map_unref(map);
}

TEST(a_new_base_comes_by_count_and_by_size)
{
    char dir[512];
    snprintf(dir, sizeof dir, "%s", lf_test_path("rebase"));
    lf_map *map = fixture_map();
    lf_vault_options o = options();
    o.rebase_every = 2;
    o.verify = 1;
    lf_vault *v = open_vault(dir, map, &o);
    for (int64_t step = 10; step <= 70; step += 10) save(v, map, step);
    CHECK(exists(dir, "base_model.bin") && exists(dir, "base_40.bin") && exists(dir, "base_70.bin"));
    CHECK(!exists(dir, "base_20.bin") && !exists(dir, "base_50.bin"));
    lf_vault_stats stats = {.size = sizeof stats};
    CHECK_OK(lf_vault_get_stats(v, &stats));
    CHECK_EQ(stats.rebases, 2);
    CHECK_OK(lf_vault_close(v));
    o.rebase_every = 0;
    o.rebase_ratio = 0.05;
    v = open_vault(dir, map, &o);
    CHECK_EQ(restore(v, map, -1), 70);
    save(v, map, 75); /* nothing changed: a diff */
    CHECK(!exists(dir, "base_75.bin"));
    save(v, map, 80);
    CHECK(exists(dir, "base_80.bin"));
    for (int64_t step = 10; step <= 80; step += 10) CHECK_EQ(restore(v, map, step), step);
    CHECK_OK(lf_vault_close(v));
    CHECK_OK(lf_vault_verify(dir));
    lf_map_unref(map);
}

/* ---- merge ----------------------------------------------------------------------------------------------------------------- */

TEST(a_merged_file_is_a_vault_equal_to_a_restore)
{
    char dir[512], other[512], target[600];
    snprintf(dir, sizeof dir, "%s", lf_test_path("merge"));
    snprintf(other, sizeof other, "%s", lf_test_path("merged"));
    snprintf(target, sizeof target, "%s/base_model.bin", other);
    lf_map *map = fixture_map();
    lf_vault_options o = options();
    make_vault(dir, map);
    CHECK(mkdir(other, 0777) == 0);
    CHECK_OK(lf_vault_merge(dir, 30, target));
    CHECK(!exists(other, "base_model.bin.tmp"));
    CHECK_STATUS(lf_vault_merge(dir, 30, target), LF_ERR_EXISTS);
    CHECK_OK(lf_vault_verify(other));
    lf_vault *v = open_vault(other, map, &o);
    CHECK_EQ(restore(v, map, -1), 30);
    const void *data;
    int64_t bytes, step;
    CHECK_OK(lf_vault_blob(v, "step", &data, &bytes));
    memcpy(&step, data, 8);
    CHECK_EQ(step, 30);
    CHECK_STATUS(lf_vault_save(v, 30, NULL, 0, NULL), LF_ERR_EXISTS);
    save(v, map, 40); /* a diff on the merged base */
    CHECK(exists(other, "checkpoint_40/diff_001.bin"));
    CHECK_EQ(restore(v, map, -1), 40);
    CHECK_OK(lf_vault_close(v));
    CHECK_OK(lf_vault_verify(other));
    CHECK_STATUS(lf_vault_merge(dir, 5, lf_test_path("none.bin")), LF_ERR_NOTFOUND);
    CHECK_STATUS(lf_vault_merge(dir, -1, lf_test_path("no_folder/x.bin")), LF_ERR_NOTFOUND);
    lf_map_unref(map);
}

/* ---- refusals ---------------------------------------------------------------------------------------------------------------- */

TEST(another_model_is_refused_by_the_parameter_that_differs)
{
    char dir[512];
    snprintf(dir, sizeof dir, "%s", lf_test_path("model"));
    lf_map *map = fixture_map(), *renamed = fixture_map_scaled(1, "l0.e1", "l0.other"),
           *larger = fixture_map_scaled(2, NULL, NULL);
    lf_vault_options o = options();
    lf_vault *v;
    make_vault(dir, map);
    CHECK_STATUS(lf_vault_open(&v, dir, renamed, &o), LF_ERR_FORMAT);
    CHECK(v == NULL);
    CHECK_HAS(lf_error_text(), "l0.e1");
    CHECK_STATUS(lf_vault_open(&v, dir, larger, &o), LF_ERR_FORMAT);
    CHECK_HAS(lf_error_text(), "embed");
    CHECK_HAS(lf_error_text(), "(80, 60)");
    lf_map *fewer;
    lf_map_options mo;
    CHECK_OK(lf_options_init("map", &mo, sizeof mo));
    mo.high_load_experts = 1;
    CHECK_OK(lf_map_open(&fewer, &mo));
    for (int i = 0; i < FIXTURE_PARAMS; i++) {
        const struct fixture_param *f = &fixture_params[i];
        lf_param p = {.size = sizeof p,
                      .name = f->name,
                      .shape = f->shape,
                      .ndim = 2,
                      .dtype = f->dtype,
                      .layer = f->layer,
                      .expert = f->expert,
                      .tied_to = -1,
                      .flags = f->flags};
        CHECK_OK(lf_map_add(fewer, &p, NULL));
    }
    CHECK_OK(lf_map_plan(fewer));
    CHECK_STATUS(lf_vault_open(&v, dir, fewer, &o), LF_ERR_FORMAT);
    CHECK_HAS(lf_error_text(), "high_load_experts");
    lf_map_unref(fewer);
    lf_map_unref(larger);
    lf_map_unref(renamed);
    lf_map_unref(map);
}

TEST(a_vault_is_one_process_s)
{
    char dir[512], pid[32];
    snprintf(dir, sizeof dir, "%s", lf_test_path("lock"));
    lf_map *map = fixture_map();
    lf_vault_options o = options();
    lf_vault *v = open_vault(dir, map, &o), *second;
    CHECK_STATUS(lf_vault_open(&second, dir, map, &o), LF_ERR_STATE);
    snprintf(pid, sizeof pid, "process %ld", (long)getpid());
    CHECK_HAS(lf_error_text(), pid);
    CHECK_STATUS(lf_vault_gc(dir, 1, 0, -1, NULL), LF_ERR_STATE);
    CHECK_OK(lf_vault_close(v));
    v = open_vault(dir, map, &o);
    CHECK_OK(lf_vault_close(v));
    lf_map_unref(map);
}

TEST(options_and_arguments_are_checked)
{
    lf_map *map = fixture_map();
    lf_vault_options o = options();
    lf_vault *v;
    o.slice_bytes = 5000;
    CHECK_STATUS(lf_vault_open(&v, lf_test_path("bad"), map, &o), LF_ERR_INVALID);
    o = options();
    o.staging_bytes = 4096;
    CHECK_STATUS(lf_vault_open(&v, lf_test_path("bad"), map, &o), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "staging_bytes is 4096, one snapshot of this map takes");
    o = options();
    CHECK_STATUS(lf_vault_open(&v, lf_test_path("no/such/folder"), map, &o), LF_ERR_NOTFOUND);
    CHECK_STATUS(lf_vault_list(lf_test_path("none"), NULL, &(int32_t){0}), LF_ERR_NOTFOUND);
    CHECK_STATUS(lf_vault_verify(lf_test_path("none")), LF_ERR_NOTFOUND);
    v = open_vault(lf_test_path("args"), map, &o);
    CHECK_STATUS(lf_vault_restore(v, -1, NULL), LF_ERR_NOTFOUND);
    lf_blob twice[] = {{"a", "x", 1}, {"a", "y", 1}}, nameless = {NULL, "x", 1};
    CHECK_STATUS(lf_vault_save(v, 10, twice, 2, NULL), LF_ERR_INVALID);
    CHECK_STATUS(lf_vault_save(v, 10, &nameless, 1, NULL), LF_ERR_INVALID);
    CHECK_STATUS(lf_vault_save(v, -1, NULL, 0, NULL), LF_ERR_INVALID);
    CHECK_EQ(lf_vault_due(v, 50), 1);
    CHECK_EQ(lf_vault_due(v, 51), 0);
    CHECK_EQ(lf_vault_due(v, 0), 0);
    CHECK_OK(lf_vault_close(v));
    CHECK_OK(lf_vault_close(NULL));
    lf_map_unref(map);
}

/* A run that goes back does not write between the checkpoints of another course. */
TEST(newer_checkpoints_are_given_up_before_an_older_one_goes_on)
{
    char dir[512];
    snprintf(dir, sizeof dir, "%s", lf_test_path("back_and_on"));
    lf_map *map = fixture_map();
    lf_vault_options o = options();
    make_vault(dir, map);
    lf_vault *v = open_vault(dir, map, &o);
    CHECK_EQ(restore(v, map, 20), 20);
    CHECK_STATUS(lf_vault_save(v, 25, NULL, 0, NULL), LF_ERR_EXISTS);
    CHECK_HAS(lf_error_text(), "--after");
    CHECK_OK(lf_vault_close(v));
    int32_t removed;
    CHECK_OK(lf_vault_gc(dir, 0, 0, 20, &removed));
    CHECK_EQ(removed, 2);
    v = open_vault(dir, map, &o);
    CHECK_EQ(restore(v, map, -1), 20);
    save(v, map, 25);
    CHECK_STATUS(lf_vault_save(v, 25, NULL, 0, NULL), LF_ERR_EXISTS);
    CHECK_STATUS(lf_vault_save(v, 24, NULL, 0, NULL), LF_ERR_EXISTS);
    CHECK_EQ(restore(v, map, -1), 25);
    CHECK_OK(lf_vault_close(v));
    lf_map_unref(map);
}

/* ---- a table whose fsync waits or fails --------------------------------------------------------------------------------------- */

static lf__io_ops slow_ops;
static lf__io slow_io = {&slow_ops};
static lf__mutex *gate;
static bool gate_open, sync_fails;

static lf_status gated_sync(lf__file *file)
{
    lf__lock(gate);
    while (!gate_open) lf__wait(gate);
    bool fails = sync_fails;
    lf__unlock(gate);
    return fails ? LF_FAIL(LF_ERR_IO, "fsync: planted fault") : lf__io_posix()->ops->sync(file);
}

static void set_gate(bool open, bool fails)
{
    if (!gate) {
        gate = lf__mutex_open();
        slow_ops = *lf__io_posix()->ops;
        slow_ops.sync = gated_sync;
    }
    lf__lock(gate);
    gate_open = open;
    sync_fails = fails;
    lf__wake(gate);
    lf__unlock(gate);
}

TEST(a_slow_disk_stretches_the_interval_and_says_so)
{
    lf_map *map = fixture_map();
    lf_vault_options o = options();
    lf_vault *v;
    lf_vault_stats stats = {.size = sizeof stats};
    start_log();
    set_gate(false, false);
    CHECK_OK(lf__vault_open_io(&v, lf_test_path("slow"), map, &o, &slow_io));
    fixture_fill(map, 50);
    CHECK_OK(lf_vault_save(v, 50, NULL, 0, NULL));
    CHECK_STATUS(lf_vault_save(v, 100, NULL, 0, NULL), LF_AGAIN);
    CHECK_STATUS(lf_vault_save(v, 150, NULL, 0, NULL), LF_AGAIN);
    CHECK_OK(lf_vault_get_stats(v, &stats));
    CHECK_EQ(stats.skipped_busy, 2);
    CHECK_EQ(stats.saves, 1);
    CHECK_HAS(log_text,
              "step 150 not saved, step 50 is still being written: the interval stretches from 50 to at least 150 steps");
    set_gate(true, false);
    CHECK_OK(lf_vault_wait(v));
    save(v, map, 200);
    CHECK_EQ(restore(v, map, -1), 200);
    CHECK_OK(lf_vault_get_stats(v, &stats));
    CHECK_EQ(stats.committed, 2);
    CHECK(stats.stall_max_s >= stats.stall_last_s && stats.stall_sum_s >= stats.stall_max_s && stats.write_s > 0);
    CHECK_OK(lf_vault_close(v));
    lf_log_set(NULL, NULL, 0);
    lf_map_unref(map);
}

TEST(an_error_comes_back_at_the_next_call_and_at_close)
{
    lf_map *map = fixture_map();
    lf_vault_options o = options();
    lf_vault *v;
    set_gate(true, false);
    CHECK_OK(lf__vault_open_io(&v, lf_test_path("late"), map, &o, &slow_io));
    save(v, map, 10);
    set_gate(true, true);
    fixture_fill(map, 20);
    CHECK_OK(lf_vault_save(v, 20, NULL, 0, NULL));
    lf__vault_idle(v);
    CHECK_STATUS(lf_vault_save(v, 30, NULL, 0, NULL), LF_ERR_IO);
    CHECK_HAS(lf_error_text(), "checkpoint 20 was not saved");
    CHECK_OK(lf_vault_save(v, 30, NULL, 0, NULL)); /* told once; this one fails behind our back */
    CHECK_STATUS(lf_vault_close(v), LF_ERR_IO);
    CHECK_HAS(lf_error_text(), "checkpoint 30 was not saved");
    set_gate(true, false);
    CHECK_OK(lf__vault_open_io(&v, lf_test_path("late"), map, &o, &slow_io));
    CHECK_EQ(restore(v, map, -1), 10);
    CHECK_OK(lf_vault_close(v));
    lf_map_unref(map);
}

/* ---- retention ------------------------------------------------------------------------------------------------------------------ */

TEST(retention_keeps_what_is_needed_and_what_is_not_ours)
{
    char dir[512], path[600];
    snprintf(dir, sizeof dir, "%s", lf_test_path("retention"));
    lf_map *map = fixture_map();
    lf_vault_options o = options();
    o.keep_last = 2;
    o.keep_every = 60;
    o.rebase_every = 3;
    lf_vault *v = open_vault(dir, map, &o);
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/%s", dir, i ? "checkpoint_5" : "checkpoint_7.tmp");
        CHECK(mkdir(path, 0777) == 0);
        snprintf(path, sizeof path, "%s/%s/notes.txt", dir, i ? "checkpoint_5" : "checkpoint_7.tmp");
        FILE *f = fopen(path, "w");
        CHECK(f && fputs("mine\n", f) > 0 && fclose(f) == 0);
    }
    for (int64_t step = 10; step <= 160; step += 10) {
        save(v, map, step);
        CHECK_EQ(restore(v, map, -1), step);
    }
    CHECK_OK(lf_vault_close(v));
    CHECK(exists(dir, "base_model.bin"));
    CHECK(exists(dir, "checkpoint_60") && exists(dir, "checkpoint_120") && exists(dir, "checkpoint_150") &&
          exists(dir, "checkpoint_160"));
    CHECK(!exists(dir, "checkpoint_20") && !exists(dir, "checkpoint_30") && !exists(dir, "checkpoint_80"));
    CHECK(exists(dir, "checkpoint_5/notes.txt") && exists(dir, "checkpoint_7.tmp/notes.txt"));
    v = open_vault(dir, map, &o);
    CHECK_EQ(restore(v, map, -1), 160);
    CHECK_EQ(restore(v, map, 149), 140 - 10 * !exists(dir, "checkpoint_140"));
    CHECK_EQ(restore(v, map, 60), 60);
    CHECK_OK(lf_vault_close(v));
    CHECK(exists(dir, "checkpoint_7.tmp/notes.txt"));
    int32_t removed;
    CHECK_OK(lf_vault_gc(dir, 1, 0, -1, &removed));
    CHECK(removed > 0);
    CHECK(!exists(dir, "checkpoint_60") && exists(dir, "checkpoint_160"));
    v = open_vault(dir, map, &o);
    CHECK_EQ(restore(v, map, -1), 160);
    CHECK_OK(lf_vault_close(v));
    lf_map_unref(map);
}

static int count_entries(const char *path)
{
    int n = 0;
    DIR *d = opendir(path);
    while (d && readdir(d)) n++;
    if (d) closedir(d);
    return n;
}

TEST(two_hundred_saves_leave_nothing_behind)
{
    char dir[512];
    snprintf(dir, sizeof dir, "%s", lf_test_path("many"));
    lf_map *map = fixture_map();
    lf_vault_options o = options();
    o.keep_last = 2;
    o.rebase_every = 4;
    lf_vault *v = open_vault(dir, map, &o);
    int fds = 0, names = 0;
    for (int64_t i = 1; i <= 200; i++) {
        save(v, map, i * 10);
        if (i == 20) fds = count_entries("/proc/self/fd");
        if (i > 20) CHECK_EQ(count_entries("/proc/self/fd"), fds);
        int now = count_entries(dir);
        if (now > names) names = now;
    }
    CHECK(names <= 2 + 2 + 2 + 6 + 3); /* ".", "..", lock, base_model, two kept, the chain they need, and bases */
    CHECK_EQ(restore(v, map, -1), 2000);
    CHECK_OK(lf_vault_close(v));
    CHECK_OK(lf_vault_verify(dir));
    lf_map_unref(map);
}

/* ---- the command ----------------------------------------------------------------------------------------------------------------- */

/* Output of `loongforge vault ARGUMENTS`, errors included; *code is its exit status. */
static const char *run_command(const char *arguments, int *code)
{
    static char text[1 << 14];
    char command[2048];
    snprintf(command, sizeof command, "'%s' vault %s 2>&1", getenv("LOONGFORGE_BIN"), arguments);
    FILE *f = popen(command, "r");
    CHECK(f);
    size_t n = fread(text, 1, sizeof text - 1, f);
    text[n] = 0;
    int how = pclose(f);
    CHECK(WIFEXITED(how));
    *code = WEXITSTATUS(how);
    return text;
}

TEST(the_command_shows_checks_merges_and_deletes)
{
    if (!getenv("LOONGFORGE_BIN")) SKIP("LOONGFORGE_BIN is not set");
    char dir[512], other[512], arguments[2048];
    int code;
    snprintf(dir, sizeof dir, "%s", lf_test_path("command"));
    snprintf(other, sizeof other, "%s", lf_test_path("command_merged"));
    lf_map *map = fixture_map();
    make_vault(dir, map);
    static const struct {
        const char *form, *says;
        int code;
    } rows[] = {
        {"ls %s", "checkpoint_40", 0},
        {"verify %s", "4 checkpoints, every record good", 0},
        {"diff %s 10 40", "steps 10 and 40: slices with", 0},
        {"diff %s 10 41", "no checkpoint of step 41", 1},
        {"diff %s 10 x", "TO is 'x', expected a whole number", 2},
        {"restore-check %s", "step 40 restores", 0},
        {"restore-check %s --step 25", "step 20 restores", 0},
        {"merge %s %s --step=30", "base_model.bin written", 0},
        {"merge %s %s --step=30", "is there already", 1},
        {"gc %s", "gc deletes nothing without", 2},
        {"gc %s --after 30", "1 checkpoint deleted", 0},
        {"gc %s --keep-last 1", "0 checkpoints deleted", 0}, /* 30 needs both */
        {"ls %s", "checkpoint_30", 0},
        {"ls %s extra", "takes 1 argument, got 2", 2},
        {"nonsense %s", "expected ls, verify", 2},
        {"ls %s/none", "No such file", 1},
    };
    CHECK(mkdir(other, 0777) == 0);
    for (size_t i = 0; i < LF_COUNT(rows); i++) {
        char target[600];
        snprintf(target, sizeof target, "%s/base_model.bin", other);
        snprintf(arguments, sizeof arguments, rows[i].form, dir, target);
        const char *text = run_command(arguments, &code);
        if (code != rows[i].code || !strstr(text, rows[i].says)) FAIL_("vault %s: exit status %d: %s", arguments, code, text);
    }
    snprintf(arguments, sizeof arguments, "ls %s", other);
    CHECK_HAS(run_command(arguments, &code), "base_model.bin");
    char path[600];
    snprintf(path, sizeof path, "%s/checkpoint_30/diff_001.bin", dir);
    FILE *f = fopen(path, "r+b");
    CHECK(f && fseek(f, 500, SEEK_SET) == 0 && fputc('x', f) == 'x' && fclose(f) == 0);
    snprintf(arguments, sizeof arguments, "verify %s", dir);
    const char *text = run_command(arguments, &code);
    CHECK_EQ(code, 1);
    CHECK_HAS(text, "checkpoint_30/diff_001.bin, record at ");
    lf_map_unref(map);
}

LF_TEST_MAIN
