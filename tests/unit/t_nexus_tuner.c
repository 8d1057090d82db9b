/* SPDX-License-Identifier: Apache-2.0 */
/* Which chunk size the tuner takes, from times that are made up: no clock, no ranks. */
#include "lf_test.h"
#include "nexus/nexus_int.h"

enum { KIB = 1024 };

/* Seconds of a step, by the size's place and how many steps were made before it in all. */
typedef double (*time_fn)(int32_t size, int32_t step);

/* Steps until it is settled; -1: it never is. */
static int32_t play(nexus_tuner *t, time_fn time_of)
{
    double times[TUNE_TRIES];
    int32_t step = 0;
    for (; !t->settled && step < 1000; step++) {
        if (!lf__tuner_step(t)) continue;
        times[t->times - 1] = time_of(t->now, step);
        if (t->times == TUNE_TRIES) lf__tuner_take(t, lf__tuner_figure(times, TUNE_TRIES));
    }
    return t->settled ? step : -1;
}

enum { TRY = TUNE_SKIP + TUNE_TRIES };

static double third_is_best(int32_t size, int32_t step) { return (void)step, size == 2 ? 0.9 : size == 1 ? 0.95 : 1.0 + size; }
static double none_is_worth(int32_t size, int32_t step) { return (void)step, size == 0 ? 1.0 : 0.981; }
static double just_worth(int32_t size, int32_t step) { return (void)step, size == 0 ? 1.0 : 0.98; }
static double all_equal(int32_t size, int32_t step) { return (void)step, (void)size, 0.25; }

TEST(the_quickest_size_is_taken)
{
    nexus_tuner t;
    lf__tuner_init(&t, 16 * KIB, 4 * KIB, 256 * KIB);
    CHECK_EQ(t.n, 4);
    CHECK_EQ(play(&t, third_is_best), TUNE_START + 5 * TRY); /* four sizes, and the first once more */
    CHECK_EQ(t.now, 2);
    CHECK_EQ(t.bytes[t.now], 64 * KIB);
    CHECK_EQ(t.n_tried, 4);
    CHECK(!lf__tuner_step(&t)); /* it is over */
}

TEST(a_change_must_be_worth_it)
{
    nexus_tuner t;
    lf__tuner_init(&t, 16 * KIB, 4 * KIB, 256 * KIB);
    CHECK_EQ(play(&t, none_is_worth), TUNE_START + 4 * TRY);
    CHECK_EQ(t.now, 0);
    lf__tuner_init(&t, 16 * KIB, 4 * KIB, 256 * KIB);
    CHECK(play(&t, just_worth) > 0);
    CHECK_EQ(t.now, 1); /* of equal ones the first that was tried */
    lf__tuner_init(&t, 16 * KIB, 4 * KIB, 256 * KIB);
    CHECK(play(&t, all_equal) > 0);
    CHECK_EQ(t.now, 0);
}

/* A run that is slow at its start, whatever the size. */
static double warming_up(int32_t size, int32_t step) { return step < TUNE_START + TRY ? 3.0 : size == 0 ? 1.0 : 1.1; }

TEST(a_slow_start_is_not_the_first_sizes_fault)
{
    nexus_tuner t;
    lf__tuner_init(&t, 16 * KIB, 4 * KIB, 256 * KIB);
    CHECK_EQ(play(&t, warming_up), TUNE_START + 5 * TRY);
    CHECK_EQ(t.now, 0);
    CHECK_NEAR(t.seconds[0], 1.0, 0);
}

/* The first step of a size, and a few that something else delayed. */
static double with_hiccups(int32_t size, int32_t step)
{
    const int32_t of_try = (step - TUNE_START) % TRY;
    return (size == 1 ? 0.8 : 1.0) * (of_try == 0 || of_try % 3 == 1 ? 50.0 : 1.0);
}

TEST(delays_of_single_steps_change_nothing)
{
    nexus_tuner t;
    lf__tuner_init(&t, 16 * KIB, 4 * KIB, 256 * KIB);
    CHECK(play(&t, with_hiccups) > 0);
    CHECK_EQ(t.now, 1);
    CHECK_NEAR(t.seconds[1], 0.8, 1e-12);
}

static double no_time(int32_t size, int32_t step) { return (void)size, step % 2 ? NAN : 0.0; }
static double first_has_none(int32_t size, int32_t step) { return size == 0 ? no_time(size, step) : 1.0; }
static double others_have_none(int32_t size, int32_t step) { return size == 0 ? 1.0 : no_time(size, step); }

TEST(times_that_are_none_decide_nothing)
{
    double mixed[] = {NAN, 0, 3, -1, 1, INFINITY, 2}, even[] = {4, 1, 3, 2}, none[] = {NAN, 0, -2};
    CHECK_NEAR(lf__tuner_figure(mixed, 7), 2, 0);
    CHECK_NEAR(lf__tuner_figure(even, 4), 2.5, 0);
    CHECK(isinf(lf__tuner_figure(none, 3)));
    CHECK(isinf(lf__tuner_figure(none, 0)));
    static const time_fn all[] = {no_time, first_has_none, others_have_none};
    for (size_t i = 0; i < LF_COUNT(all); i++) {
        nexus_tuner t;
        lf__tuner_init(&t, 16 * KIB, 4 * KIB, 256 * KIB);
        CHECK(play(&t, all[i]) > 0);
        CHECK_EQ(t.now, 0);
    }
}

static void check_sizes(int64_t first, int64_t least, int64_t most, const int64_t *want, int32_t n)
{
    nexus_tuner t;
    lf__tuner_init(&t, first, least, most);
    CHECK_EQ(t.n, n);
    for (int32_t i = 0; i < t.n && i < n; i++) {
        CHECK_EQ(t.bytes[i], want[i]);
        CHECK(t.bytes[i] >= least && t.bytes[i] <= most);
    }
}

TEST(sizes_stay_within_the_bounds)
{
    check_sizes(16, 4, 256, (const int64_t[]){16, 4, 64, 256}, 4);
    check_sizes(20, 4, 100, (const int64_t[]){20, 4, 16, 64, 100}, 5);
    check_sizes(4, 4, 4, (const int64_t[]){4}, 1);
    check_sizes(5, 5, 6, (const int64_t[]){5, 6}, 2);
    nexus_tuner t;
    lf__tuner_init(&t, 16 << 20, 4096, 1ll << 40); /* the widest that options allow */
    CHECK(t.n < TUNE_SIZES);
    CHECK_EQ(t.bytes[t.n - 1], 1ll << 40);
}

LF_TEST_MAIN
