/* SPDX-License-Identifier: Apache-2.0 */
/* CheckpointVault's writer behind the caller's back: a table whose fsync waits or fails. */
#include "kept_log.h"
#include "vault_life.h"

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
    lf_vault_options o = fixture_options(2);
    lf_vault *v;
    lf_vault_stats stats = {.size = sizeof stats};
    start_log(LF_LOG_INFO);
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
    end_log();
    lf_map_unref(map);
}

TEST(an_error_comes_back_at_the_next_call_and_at_close)
{
    lf_map *map = fixture_map();
    lf_vault_options o = fixture_options(2);
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

LF_TEST_MAIN
