/* SPDX-License-Identifier: Apache-2.0 */
/* CheckpointVault over many saves: when a new base comes, what is kept, what is given up. */
#include <dirent.h>

#include "vault_life.h"

TEST(a_new_base_comes_by_count_and_by_size)
{
    char dir[512];
    snprintf(dir, sizeof dir, "%s", lf_test_path("rebase"));
    lf_map *map = fixture_map();
    lf_vault_options o = fixture_options(2);
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

/* A run that goes back does not write between the checkpoints of another course. */
TEST(newer_checkpoints_are_given_up_before_an_older_one_goes_on)
{
    char dir[512];
    snprintf(dir, sizeof dir, "%s", lf_test_path("back_and_on"));
    lf_map *map = fixture_map();
    lf_vault_options o = fixture_options(2);
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

TEST(retention_keeps_what_is_needed_and_what_is_not_ours)
{
    char dir[512], path[600];
    snprintf(dir, sizeof dir, "%s", lf_test_path("retention"));
    lf_map *map = fixture_map();
    lf_vault_options o = fixture_options(2);
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
    lf_vault_options o = fixture_options(2);
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

LF_TEST_MAIN
