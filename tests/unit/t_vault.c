/* SPDX-License-Identifier: Apache-2.0 */
/* CheckpointVault in ordinary life: what is saved, what a diff holds, restore, merge, refusals. */
#include "vault_life.h"

/* ---- saving and restoring ------------------------------------------------------------------------------------------------ */

TEST(what_is_saved_comes_back)
{
    char dir[512];
    snprintf(dir, sizeof dir, "%s", lf_test_path("back"));
    lf_map *map = fixture_map();
    lf_vault_options o = fixture_options(2);
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
    lf_vault_options o = fixture_options(2);
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
    lf_vault_options o = fixture_options(2);
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
    lf_vault_options o = fixture_options(2);
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
    lf_vault_options o = fixture_options(2);
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
    lf_vault_options o = fixture_options(2);
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
    lf_vault_options o = fixture_options(2);
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
    lf_vault_options o = fixture_options(2);
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

/* ---- merge ----------------------------------------------------------------------------------------------------------------- */

TEST(a_merged_file_is_a_vault_equal_to_a_restore)
{
    char dir[512], other[512], target[600];
    snprintf(dir, sizeof dir, "%s", lf_test_path("merge"));
    snprintf(other, sizeof other, "%s", lf_test_path("merged"));
    snprintf(target, sizeof target, "%s/base_model.bin", other);
    lf_map *map = fixture_map();
    lf_vault_options o = fixture_options(2);
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
    lf_vault_options o = fixture_options(2);
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
    lf_vault_options o = fixture_options(2);
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
    lf_vault_options o = fixture_options(2);
    lf_vault *v;
    o.slice_bytes = 5000;
    CHECK_STATUS(lf_vault_open(&v, lf_test_path("bad"), map, &o), LF_ERR_INVALID);
    o = fixture_options(2);
    o.staging_bytes = 4096;
    CHECK_STATUS(lf_vault_open(&v, lf_test_path("bad"), map, &o), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "staging_bytes is 4096, one snapshot of this map takes");
    o = fixture_options(2);
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

LF_TEST_MAIN
