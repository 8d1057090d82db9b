/* SPDX-License-Identifier: Apache-2.0 */
/* The parallel for: every index once, loops inside loops, two callers at once, after fork. */
#include <stdatomic.h>
#include <sys/wait.h>

#include "base/base.h"
#include "lf_test.h"

enum { MANY = 5000 };
static _Atomic int32_t hits[MANY];

static void hit(void *user, int64_t i) { atomic_fetch_add(&hits[i], *(int32_t *)user); }

static void check_once(int32_t threads, int64_t n)
{
    int32_t one = 1;
    for (int64_t i = 0; i < MANY; i++) atomic_store(&hits[i], 0);
    lf__parallel(threads, n, hit, &one);
    for (int64_t i = 0; i < MANY; i++) CHECK_EQ(atomic_load(&hits[i]), i < n);
}

TEST(pool_runs_every_index_once)
{
    const int64_t sizes[] = {0, 1, 2, 3, 63, 64, 65, 1000, MANY};
    for (int32_t threads = 0; threads <= 5; threads++)
        for (size_t i = 0; i < LF_COUNT(sizes); i++) check_once(threads, sizes[i]);
    check_once(1000, MANY);
}

/* ---- who runs ---- */

static _Atomic int32_t inside, most_inside;

static void linger(void *user, int64_t i)
{
    (void)user, (void)i;
    int32_t now = atomic_fetch_add(&inside, 1) + 1, most = atomic_load(&most_inside);
    while (now > most && !atomic_compare_exchange_weak(&most_inside, &most, now)) {}
    lf__sleep_ns(2000000);
    atomic_fetch_sub(&inside, 1);
}

TEST(pool_shares_work_and_keeps_to_the_limit)
{
    atomic_store(&most_inside, 0);
    for (int32_t again = 0; again < 50 && atomic_load(&most_inside) < 3; again++) lf__parallel(3, 6, linger, NULL);
    CHECK_EQ(atomic_load(&most_inside), 3);
    atomic_store(&most_inside, 0);
    lf__parallel(2, 6, linger, NULL); /* three threads are there by now */
    CHECK(atomic_load(&most_inside) <= 2);
}

static int32_t count_threads(void)
{
    char line[256];
    int32_t n = 0;
    FILE *status = fopen("/proc/self/status", "r");
    while (status && fgets(line, sizeof line, status)) sscanf(line, "Threads: %d", &n);
    if (status) fclose(status);
    return n;
}

TEST(pool_keeps_its_threads)
{
    int32_t one = 1;
    lf__parallel(3, 100, hit, &one);
    int32_t before = count_threads();
    if (before == 0) SKIP("no /proc/self/status");
    int64_t allocated = lf__alloc_fail_at(0);
    for (int32_t i = 0; i < 200; i++) lf__parallel(3, 100, hit, &one);
    allocated = lf__alloc_fail_at(0);
    CHECK_EQ(count_threads(), before);
    CHECK_EQ(allocated, 0);
}

/* ---- nested, concurrent, forked ---- */

static _Atomic int64_t total;

static void add_one(void *user, int64_t i)
{
    (void)user, (void)i;
    atomic_fetch_add(&total, 1);
}
static void add_inside(void *user, int64_t i)
{
    (void)i;
    lf__parallel(3, 50, add_one, user);
}

TEST(pool_loop_inside_a_loop)
{
    atomic_store(&total, 0);
    lf__parallel(3, 40, add_inside, NULL);
    CHECK_EQ(atomic_load(&total), 2000);
}

static void many_loops(void *user)
{
    for (int32_t i = 0; i < 300; i++) lf__parallel(3, 20, add_one, user);
}

TEST(pool_two_callers_at_once)
{
    lf__thread *other[2];
    atomic_store(&total, 0);
    for (int32_t i = 0; i < 2; i++) CHECK_OK(lf__thread_start(&other[i], "caller", many_loops, NULL));
    many_loops(NULL);
    for (int32_t i = 0; i < 2; i++) lf__thread_join(other[i]);
    CHECK_EQ(atomic_load(&total), 3 * 300 * 20);
}

TEST(pool_works_after_fork)
{
#ifdef __SANITIZE_THREAD__
    SKIP("the thread sanitizer ends a forked child that starts threads");
#endif
    int32_t one = 1;
    lf__parallel(3, 100, hit, &one); /* threads exist in the parent */
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        alarm(20);
        atomic_store(&total, 0);
        atomic_store(&most_inside, 0);
        lf__parallel(3, 1000, add_one, NULL);
        for (int32_t again = 0; again < 50 && atomic_load(&most_inside) < 3; again++) lf__parallel(3, 6, linger, NULL);
        _exit(atomic_load(&total) != 1000 ? 3 : atomic_load(&most_inside) != 3 ? 4 : 0);
    }
    int state = 0;
    CHECK(waitpid(child, &state, 0) == child);
    CHECK_EQ(WIFEXITED(state) ? WEXITSTATUS(state) : 100 + WTERMSIG(state), 0);
    check_once(3, 1000); /* and still in the parent */
}

/* A thread that cannot be started leaves its work to the others. */
TEST(pool_without_new_threads)
{
    lf__alloc_fail_at(1);
    check_once(60, MANY);
    lf__alloc_fail_at(0);
}

LF_TEST_MAIN
