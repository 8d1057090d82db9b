/* SPDX-License-Identifier: Apache-2.0 */
/* The step clock. Times that tests check are given to the clock, not measured by it. */
#include "base/base.h"
#include "lf_test.h"
#include "loongforge/scope.h"

static lf_clock *open_clock(void)
{
    lf_clock *c;
    CHECK_OK(lf_clock_open(&c));
    return c;
}

static lf_clock_summary end_step(lf_clock *c, int64_t tokens)
{
    lf_clock_summary s = {.size = sizeof s};
    CHECK_OK(lf_clock_step_end(c, tokens, &s));
    return s;
}

static lf_clock_summary all_steps(lf_clock *c)
{
    lf_clock_summary s = {.size = sizeof s};
    CHECK_OK(lf_clock_get(c, &s));
    return s;
}

static double sum(const double *seconds)
{
    double total = 0;
    for (int32_t i = 0; i < LF_N_PARTS; i++) total += seconds[i];
    return total;
}

TEST(exposed_parts_add_up_to_the_step)
{
    lf_clock *c = open_clock();
    double wall = 0;
    for (int i = 0; i < 20; i++) {
        CHECK_OK(lf_clock_step_begin(c));
        CHECK_OK(lf_clock_part_begin(c, LF_PART_DATA));
        lf__sleep_ns(200000);
        CHECK_OK(lf_clock_part_end(c, LF_PART_DATA));
        CHECK_OK(lf_clock_part_begin(c, LF_PART_OPTIMIZER));
        CHECK_OK(lf_clock_part_end(c, LF_PART_OPTIMIZER));
        lf__sleep_ns(100000);
        CHECK_OK(lf_clock_add(c, LF_PART_COMM, 0.25, 0)); /* hidden: busy only */
        lf_clock_summary s = end_step(c, 1000);
        CHECK(s.wall_s >= 0.0003 && s.exposed_s[LF_PART_DATA] >= 0.0002 && s.exposed_s[LF_PART_COMPUTE] >= 0.0001);
        CHECK_NEAR(sum(s.exposed_s), s.wall_s, 1e-9);
        CHECK_NEAR(sum(s.busy_s), s.wall_s + 0.25, 1e-9);
        CHECK_EQ(s.steps, 1);
        CHECK_EQ(s.tokens, 1000);
        CHECK_NEAR(s.step_max_s, s.wall_s, 0);
        wall += s.wall_s;
    }
    lf_clock_summary s = all_steps(c);
    CHECK_EQ(s.steps, 20);
    CHECK_EQ(s.tokens, 20000);
    CHECK_NEAR(s.wall_s, wall, 1e-9);
    CHECK_NEAR(sum(s.exposed_s), s.wall_s, 1e-8);
    CHECK_NEAR(s.tokens_per_s, 20000 / s.wall_s, 1e-6 * s.tokens_per_s);
    CHECK_NEAR(s.overlap_efficiency, 5.0 / s.wall_s, 1e-6 * s.overlap_efficiency); /* communication was busy 20 x 0.25 s */
    CHECK(s.step_p50_s <= s.step_p95_s && s.step_p95_s <= s.step_p99_s && s.step_p99_s <= s.step_max_s * 1.04);
    CHECK(s.step_p50_s >= 0.0003 * 0.96);
    lf_clock_close(c);
}

TEST(the_bottleneck_is_the_part_waited_for)
{
    static const struct {
        int32_t part;
        double exposed;
        int32_t bottleneck;
    } rows[] = {
        {LF_PART_DATA, 5, LF_PART_DATA},           {LF_PART_COMM, 5, LF_PART_COMM},       {LF_PART_IO, 5, LF_PART_IO},
        {LF_PART_OPTIMIZER, 5, LF_PART_OPTIMIZER}, {LF_PART_COMPUTE, 5, LF_PART_COMPUTE}, {LF_PART_IO, 0, LF_PART_COMPUTE},
    };
    lf_clock *c = open_clock();
    for (size_t i = 0; i < LF_COUNT(rows); i++) {
        CHECK_OK(lf_clock_step_begin(c));
        CHECK_OK(lf_clock_add(c, rows[i].part, rows[i].exposed, rows[i].exposed));
        CHECK_EQ(end_step(c, 0).bottleneck, rows[i].bottleneck);
    }
    CHECK_OK(lf_clock_step_begin(c)); /* waiting for 0.1 s is nothing beside 5 s of compute */
    CHECK_OK(lf_clock_add(c, LF_PART_COMPUTE, 5, 5));
    CHECK_OK(lf_clock_add(c, LF_PART_DATA, 0.1, 0.1));
    CHECK_EQ(end_step(c, 0).bottleneck, LF_PART_COMPUTE);
    lf_clock_close(c);
    CHECK_STR(lf_part_name(LF_PART_COMM), "communication");
    CHECK_STR(lf_part_name(LF_N_PARTS), "?");
}

TEST(time_between_steps_counts_for_the_next)
{
    lf_clock *c = open_clock();
    CHECK_OK(lf_clock_add(c, LF_PART_IO, 3, 1));
    CHECK_EQ(all_steps(c).steps, 0);
    CHECK_NEAR(all_steps(c).busy_s[LF_PART_IO], 0, 0);
    CHECK_OK(lf_clock_step_begin(c));
    CHECK_OK(lf_clock_add(c, LF_PART_IO, 2, 0));
    CHECK_NEAR(end_step(c, 0).busy_s[LF_PART_IO], 5, 0);
    CHECK_OK(lf_clock_step_begin(c));
    CHECK_OK(lf_clock_add(c, LF_PART_DATA, 7, 7));
    lf_clock_step_cancel(c); /* dropped */
    lf_clock_step_cancel(c);
    lf_clock_step_cancel(NULL);
    CHECK_OK(lf_clock_step_begin(c));
    lf_clock_summary s = end_step(c, 0);
    CHECK_NEAR(s.busy_s[LF_PART_IO] + s.busy_s[LF_PART_DATA], 0, 0);
    CHECK_EQ(all_steps(c).steps, 2);
    lf_clock_close(c);
}

TEST(wrong_order_is_an_error_and_changes_nothing)
{
    lf_clock *c = open_clock();
    lf_clock_summary s = {.size = sizeof s};
    CHECK_STATUS(lf_clock_step_end(c, 1, NULL), LF_ERR_STATE);
    CHECK_STATUS(lf_clock_part_begin(c, LF_PART_DATA), LF_ERR_STATE);
    CHECK_STATUS(lf_clock_part_end(c, LF_PART_DATA), LF_ERR_STATE);
    CHECK_OK(lf_clock_step_begin(c));
    CHECK_STATUS(lf_clock_step_begin(c), LF_ERR_STATE);
    CHECK_OK(lf_clock_part_begin(c, LF_PART_DATA));
    CHECK_STATUS(lf_clock_part_begin(c, LF_PART_IO), LF_ERR_STATE);
    CHECK_HAS(lf_error_text(), "io begins inside part data");
    CHECK_STATUS(lf_clock_part_end(c, LF_PART_IO), LF_ERR_STATE);
    CHECK_HAS(lf_error_text(), "open is data");
    CHECK_STATUS(lf_clock_step_end(c, 1, NULL), LF_ERR_STATE);
    CHECK_HAS(lf_error_text(), "part data is open");
    CHECK_OK(lf_clock_part_end(c, LF_PART_DATA));
    CHECK_STATUS(lf_clock_step_end(c, -1, NULL), LF_ERR_INVALID);
    s.size = 1;
    CHECK_STATUS(lf_clock_step_end(c, 1, &s), LF_ERR_INVALID);
    CHECK_STATUS(lf_clock_get(c, &s), LF_ERR_INVALID);
    CHECK_OK(lf_clock_step_end(c, 1, NULL));
    CHECK_EQ(all_steps(c).steps, 1);
    CHECK_STATUS(lf_clock_add(c, LF_N_PARTS, 1, 1), LF_ERR_INVALID);
    CHECK_STATUS(lf_clock_add(c, -1, 1, 1), LF_ERR_INVALID);
    CHECK_STATUS(lf_clock_add(c, LF_PART_IO, -1, 0), LF_ERR_INVALID);
    CHECK_STATUS(lf_clock_add(c, LF_PART_IO, 0, NAN), LF_ERR_INVALID);
    CHECK_STATUS(lf_clock_add(c, LF_PART_IO, INFINITY, 0), LF_ERR_INVALID);
    CHECK_STATUS(lf_clock_add(NULL, LF_PART_IO, 1, 0), LF_ERR_INVALID);
    lf_clock_close(c);
    lf_clock_close(NULL);
    for (int64_t n = 1; n <= 2; n++) {
        (void)lf__alloc_fail_at(n);
        CHECK_STATUS(lf_clock_open(&c), LF_ERR_NOMEM);
        CHECK(!c);
    }
    (void)lf__alloc_fail_at(0);
}

enum { ADDS = 2000, THREADS = 4 };

static void add_many(void *user)
{
    for (int i = 0; i < ADDS; i++) {
        (void)lf_clock_add(user, i % 2 ? LF_PART_IO : LF_PART_COMM, 0.5, 0);
        lf_clock_summary s = {.size = sizeof s};
        if (i % 100 == 0) (void)lf_clock_get(user, &s);
    }
}

/* Nothing is lost or counted twice while steps begin and end (run under TSan too). */
TEST(threads_add_while_steps_go_on)
{
    lf_clock *c = open_clock();
    lf__thread *thread[THREADS];
    for (int i = 0; i < THREADS; i++) CHECK_OK(lf__thread_start(&thread[i], "adder", add_many, c));
    for (int i = 0; i < 500; i++) {
        CHECK_OK(lf_clock_step_begin(c));
        CHECK_OK(lf_clock_part_begin(c, LF_PART_DATA));
        CHECK_OK(lf_clock_part_end(c, LF_PART_DATA));
        CHECK_OK(lf_clock_step_end(c, 1, NULL));
    }
    for (int i = 0; i < THREADS; i++) lf__thread_join(thread[i]);
    CHECK_OK(lf_clock_step_begin(c));
    CHECK_OK(lf_clock_step_end(c, 1, NULL));
    lf_clock_summary s = all_steps(c);
    CHECK_EQ(s.steps, 501);
    CHECK_NEAR(s.busy_s[LF_PART_IO], 0.5 * ADDS / 2 * THREADS, 0); /* halves add up exactly */
    CHECK_NEAR(s.busy_s[LF_PART_COMM], 0.5 * ADDS / 2 * THREADS, 0);
    lf_clock_close(c);
}

LF_TEST_MAIN
