/* SPDX-License-Identifier: Apache-2.0 */
/* CheckpointVault when an operation fails, when memory runs out, when the process is killed. */
#include <signal.h>
#include <sys/wait.h>

#include "crash/crash_io.h"
#include "crash/vault_fixture.h"
#include "vault/vault_int.h"

static lf_vault_options options(int keep_last, int rebase_every)
{
    lf_vault_options o = fixture_options(1);
    o.keep_last = keep_last;
    o.rebase_every = rebase_every;
    return o;
}

static lf_status save_and_wait(lf_vault *v, lf_map *map, int64_t step)
{
    fixture_fill(map, step);
    lf_blob blob = {"step", &step, sizeof step};
    lf_status rc = lf_vault_save(v, step, &blob, 1, NULL);
    return rc < 0 ? rc : lf_vault_wait(v);
}

/* ---- failing operations ------------------------------------------------------------------------------------------------- */

/* Save 10 and 20 undisturbed, then fail the n-th operation of the save of 30. Returns whether the fault was reached. */
static bool one_fault(lf_map *map, int64_t n, int kind, int count, bool base)
{
    crash_io *c = crash_new();
    lf_vault_options o = options(2, base ? 1 : 0);
    lf_vault *v;
    lf_checkpoint_info info = {.size = sizeof info};
    CHECK_OK(lf__vault_open_io(&v, "/v", map, &o, &c->io));
    CHECK_OK(save_and_wait(v, map, 10));
    CHECK_OK(save_and_wait(v, map, 20));
    crash_fail(c, n, kind, count);
    lf_status rc = save_and_wait(v, map, 30);
    int64_t calls = crash_fail(c, 0, 0, 0);
    bool reached = calls >= n;
    if (rc < 0) {
        CHECK(rc == LF_ERR_IO || rc == LF_ERR_NOSPACE);
        CHECK_HAS(lf_error_text(), "planted fault");
        CHECK_HAS(lf_error_text(), "checkpoint 30 was not saved");
    }
    CHECK(rc == LF_OK || crash_find(c, "/v/checkpoint_20") >= 0);
    if (count == 1) CHECK(crash_count(c, "/v", ".tmp") <= 1); /* at most what could not be removed because of the fault itself */
    CHECK_OK(lf_vault_wait(v));                               /* reported once */
    CHECK_OK(save_and_wait(v, map, 40));
    CHECK_OK(lf_vault_close(v));
    CHECK_OK(lf__vault_verify_io(&c->io, "/v"));
    CHECK_OK(lf__vault_open_io(&v, "/v", map, &o, &c->io));
    CHECK_EQ(crash_count(c, "/v", ".tmp"), 0);
    fixture_clear(map);
    CHECK_OK(lf_vault_restore(v, -1, &info));
    CHECK_EQ(info.step, 40);
    CHECK(fixture_is(map, 40));
    CHECK_OK(lf_vault_restore(v, 39, &info));
    CHECK(info.step == 30 || (rc < 0 && info.step == 20));
    CHECK(fixture_is(map, info.step));
    CHECK_OK(lf_vault_close(v));
    CHECK_EQ(c->n_open, 0);
    crash_free(c);
    return reached;
}

TEST(every_failing_operation_is_reported_and_loses_nothing)
{
    static const int kinds[] = {CRASH_EIO, CRASH_NOSPACE, CRASH_SHORT};
    lf_map *map = fixture_map();
    int64_t total = 0;
    for (int base = 0; base < 2; base++)
        for (size_t k = 0; k < LF_COUNT(kinds); k++)
            for (int64_t n = 1; one_fault(map, n, kinds[k], 1, base); n++) total++;
    printf("  %lld faults\n", (long long)total);
    CHECK(total > 150);
    lf_map_unref(map);
}

/* The disk stays full: everything from the n-th operation on fails until the save has given up. */
TEST(a_disk_that_stays_broken_leaves_the_last_checkpoint)
{
    lf_map *map = fixture_map();
    for (int base = 0; base < 2; base++)
        for (int64_t n = 1; one_fault(map, n, CRASH_NOSPACE, 1 << 20, base) && n < 400; n++) {}
    lf_map_unref(map);
}

/* ---- memory --------------------------------------------------------------------------------------------------------------- */

TEST(every_failing_allocation_is_reported_and_loses_nothing)
{
    lf_map *map = fixture_map();
    lf_vault_options o = options(2, 1); /* base, diff, base */
    int64_t n = 1, failed = 0;
    for (bool done = false; !done; n++) {
        crash_io *c = crash_new();
        lf_vault *v = NULL;
        int64_t acknowledged = -1;
        lf__alloc_fail_at(n);
        lf_status rc = lf__vault_open_io(&v, "/v", map, &o, &c->io);
        if (rc == LF_OK) rc = lf_vault_restore(v, -1, NULL);
        if (rc == LF_ERR_NOTFOUND) rc = LF_OK;
        for (int64_t step = 10; rc == LF_OK && step <= 30; step += 10) {
            rc = save_and_wait(v, map, step);
            if (rc == LF_OK) acknowledged = step;
        }
        if (rc == LF_OK) rc = lf__vault_verify_io(&c->io, "/v");
        lf_status closed = lf_vault_close(v);
        v = NULL;
        if (rc == LF_OK) rc = closed;
        if (rc == LF_OK) rc = lf__vault_open_io(&v, "/v", map, &o, &c->io);
        if (rc == LF_OK) rc = lf_vault_restore(v, -1, NULL);
        closed = lf_vault_close(v);
        if (rc == LF_OK) rc = closed;
        int64_t made = lf__alloc_fail_at(0);
        done = made < n;
        if (rc < 0 && rc != LF_ERR_NOMEM) FAIL_("allocation %lld: %s: %s", (long long)n, lf_status_name(rc), lf_error_text());
        failed += rc < 0;
        CHECK_EQ(c->n_open, 0);
        if (acknowledged > 0) {
            lf_checkpoint_info info = {.size = sizeof info};
            fixture_clear(map);
            CHECK_OK(lf__vault_open_io(&v, "/v", map, &o, &c->io));
            CHECK_OK(lf_vault_restore(v, -1, &info));
            CHECK(info.step >= acknowledged);
            CHECK(fixture_is(map, info.step));
            CHECK_OK(lf_vault_close(v));
        }
        crash_free(c);
    }
    printf("  %lld allocations, %lld reported\n", (long long)n - 2, (long long)failed);
    CHECK(failed > 100);
    lf_map_unref(map);
}

/* ---- processes ---------------------------------------------------------------------------------------------------------- */

/* A process of its own: reports each promise on standard output. */
static void child_saves_forever(const char *dir)
{
    lf_map *map = fixture_map();
    lf_vault_options o = options(2, 3);
    lf_checkpoint_info info = {.size = sizeof info};
    lf_vault *v;
    if (lf_vault_open(&v, dir, map, &o) < 0) _exit(3);
    lf_status rc = lf_vault_restore(v, -1, &info);
    if (rc < 0 && rc != LF_ERR_NOTFOUND) _exit(4);
    if (rc == LF_OK && !fixture_is(map, info.step)) _exit(5);
    for (int64_t step = rc == LF_OK ? info.step + 10 : 10;; step += 10) {
        if (save_and_wait(v, map, step) < 0) _exit(6);
        if (write(STDOUT_FILENO, &step, sizeof step) != (ssize_t)sizeof step) _exit(7);
    }
}

/* kill -9 at uneven moments, over and over in one folder. */
TEST(killed_processes_leave_what_they_promised)
{
    char dir[512];
    snprintf(dir, sizeof dir, "%s", lf_test_path("killed"));
    lf_map *map = fixture_map();
    lf_vault_options o = options(2, 3);
    int64_t promised = -1;
    uint64_t seed = 99;
    for (int round = 0; round < 20; round++) {
        int fds[2];
        CHECK(pipe(fds) == 0);
        fflush(stdout);
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
            dup2(fds[1], STDOUT_FILENO);
            close(fds[0]);
            execl("/proc/self/exe", "t_vault_fault", "--child", dir, (char *)NULL);
            _exit(8);
        }
        close(fds[1]);
        int64_t step, want = 1 + crash_random(&seed) % 5;
        for (int64_t i = 0; i < want && read(fds[0], &step, sizeof step) == (ssize_t)sizeof step; i++) promised = step;
        lf__sleep_ns(crash_random(&seed) % 4000000); /* into the middle of the next save */
        CHECK(kill(pid, SIGKILL) == 0);
        while (read(fds[0], &step, sizeof step) == (ssize_t)sizeof step) promised = step;
        close(fds[0]);
        int how;
        CHECK(waitpid(pid, &how, 0) == pid);
        if (WIFEXITED(how)) FAIL_("round %d: the child left with %d", round, WEXITSTATUS(how));
        lf_checkpoint_info info = {.size = sizeof info};
        lf_vault *v;
        fixture_clear(map);
        CHECK_OK(lf_vault_open(&v, dir, map, &o));
        CHECK_OK(lf_vault_restore(v, -1, &info));
        CHECK(info.step >= promised);
        CHECK(fixture_is(map, info.step));
        CHECK_OK(lf_vault_close(v));
    }
    CHECK(promised >= 200);
    CHECK_OK(lf_vault_verify(dir));
    lf_map_unref(map);
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "--child") == 0) child_saves_forever(argv[2]);
    return lf_test_main(argc, argv);
}
