/* SPDX-License-Identifier: Apache-2.0 */
/* The step clock of a device: what is made of its stamps, with times that the test gives; then a CPU stream, whose worker is truly
 * behind the host. Times that are measured are checked against what bounds them from below or above, always. */
#include "base/base.h"
#include "lf_test.h"
#include "scope/scope_int.h"

enum { C = LF_PART_COMPUTE, D = LF_PART_DATA, M = LF_PART_COMM, IO = LF_PART_IO, O = LF_PART_OPTIMIZER };
enum { NS_A_MS = 1000000 };

static double sum(const double *seconds)
{
    double total = 0;
    for (int32_t i = 0; i < LF_N_PARTS; i++) total += seconds[i];
    return total;
}

/* ---- figures --------------------------------------------------------------------------------------------------------- */

static lf__part_times figures(const lf__meter_page *page, int64_t until_ns, const lf__host_times *host)
{
    lf__part_times t;
    memset(&t, 0xff, sizeof t);
    lf__follow_figures(page, until_ns, host, &t);
    CHECK_NEAR(sum(t.exposed_s), t.wall_s, 1e-12);
    for (int32_t i = 0; i < LF_N_PARTS; i++) CHECK(t.exposed_s[i] >= 0 && t.busy_s[i] >= 0);
    return t;
}

/* A step of 100 ms and a gap of 10: data 5, compute 60, optimizer 15, so 30 idle. */
static lf__meter_page page_of_100(void)
{
    lf__meter_page page = {.begin_ns = 1000, .end_ns = 1000 + 100 * NS_A_MS, .seen = 1 << C | 1 << D | 1 << O};
    page.part_ns[D] = 5 * NS_A_MS;
    page.part_ns[C] = 60 * NS_A_MS;
    page.part_ns[O] = 15 * NS_A_MS;
    return page;
}

TEST(idle_time_goes_to_what_was_waited_for)
{
    lf__meter_page page = page_of_100();
    const int64_t until = page.end_ns + 10 * NS_A_MS;
    lf__host_times host = {.busy_s = {0}};
    lf__part_times t = figures(&page, until, &host); /* nobody waited: launches */
    CHECK_NEAR(t.wall_s, 0.110, 1e-12);
    CHECK_NEAR(t.gap_s, 0.010, 1e-12);
    CHECK_NEAR(t.exposed_s[C], 0.090, 1e-12);
    CHECK_NEAR(t.busy_s[C], 0.060, 1e-12);
    CHECK_NEAR(t.exposed_s[O], 0.015, 1e-12);
    CHECK_NEAR(t.busy_s[O], 0.015, 1e-12);
    CHECK_NEAR(t.exposed_s[D], 0.005, 1e-12);

    host.exposed_s[M] = 0.020, host.busy_s[M] = 0.050; /* less than was idle */
    t = figures(&page, until, &host);
    CHECK_NEAR(t.exposed_s[M], 0.020, 1e-12);
    CHECK_NEAR(t.busy_s[M], 0.050, 1e-12);
    CHECK_NEAR(t.exposed_s[C], 0.070, 1e-12);

    host.exposed_s[D] = 0.100; /* more than was idle: in proportion, the rest was hidden */
    t = figures(&page, until, &host);
    CHECK_NEAR(t.exposed_s[M], 0.005, 1e-12);
    CHECK_NEAR(t.exposed_s[D], 0.005 + 0.025, 1e-12);
    CHECK_NEAR(t.exposed_s[C], 0.060, 1e-12);
}

TEST(the_trainers_own_time_is_busy_but_not_the_device)
{
    lf__meter_page page = page_of_100();
    lf__host_times host = {.trainer_s = {[D] = 0.040, [O] = 9, [C] = 9}, .busy_s = {[D] = 0.001, [O] = 0.002}};
    lf__part_times t = figures(&page, page.end_ns, &host);
    CHECK_NEAR(t.gap_s, 0, 0);
    CHECK_NEAR(t.busy_s[D], 0.041, 1e-12); /* waited 40 ms, 35 of them hidden */
    CHECK_NEAR(t.exposed_s[D], 0.005, 1e-12);
    CHECK_NEAR(t.busy_s[O], 0.017, 1e-12); /* launching it took longer than running it: that is no work of the part */
    CHECK_NEAR(t.busy_s[C], 0.060, 1e-12);
    host.trainer_s[D] = 0.002; /* what it queued took longer */
    CHECK_NEAR(figures(&page, page.end_ns, &host).busy_s[D], 0.006, 1e-12);
}

TEST(unmarked_compute_is_what_is_left_of_the_step)
{
    lf__meter_page page = page_of_100();
    page.part_ns[C] = 0;
    page.seen &= ~(1 << C);
    lf__host_times host = {.exposed_s = {[IO] = 0.030}};
    lf__part_times t = figures(&page, page.end_ns + 10 * NS_A_MS, &host);
    CHECK_NEAR(t.exposed_s[C], 0.060, 1e-12);
    CHECK_NEAR(t.busy_s[C], 0.050, 1e-12); /* not the gap */
    t = figures(&page, page.end_ns + 500 * NS_A_MS, &(lf__host_times){.exposed_s = {[IO] = 0.550}});
    CHECK_NEAR(t.exposed_s[C], 0.030, 1e-12);
    CHECK_NEAR(t.busy_s[C], 0, 1e-12);
}

/* ---- a stream that is behind ----------------------------------------------------------------------------------------- */

static lf_device *cpu;
static lf_stream *line;
static lf_clock *timed;

static void start(int32_t depth)
{
    CHECK_OK(lf_device_open(&cpu, "cpu"));
    CHECK_OK(lf_stream_open(cpu, 0, &line));
    CHECK_OK(lf_clock_open(&timed));
    CHECK_OK(lf_clock_follow(timed, cpu, line, depth));
    CHECK(lf_clock_device(timed) == cpu);
}

static void stop(void)
{
    lf_clock_close(timed);
    lf_stream_close(line);
    lf_device_close(cpu);
}

typedef struct gate {
    lf__mutex *mutex;
    bool open;
} gate;

static lf_status pass_gate(void *user)
{
    gate *g = user;
    lf__lock(g->mutex);
    while (!g->open) lf__wait(g->mutex);
    lf__unlock(g->mutex);
    return LF_OK;
}

static void open_gate(gate *g)
{
    lf__lock(g->mutex);
    g->open = true;
    lf__wake(g->mutex);
    lf__unlock(g->mutex);
}

static lf_status work_ms(void *user)
{
    lf__sleep_ns((int64_t)(intptr_t)user * NS_A_MS);
    return LF_OK;
}
static void queue_ms(int32_t ms) { CHECK_OK(lf_stream_run(line, work_ms, (void *)(intptr_t)ms)); }

static void mark(int32_t part, int32_t ms)
{
    CHECK_OK(lf_clock_mark_begin(timed, part, line));
    if (ms) queue_ms(ms);
    CHECK_OK(lf_clock_mark_end(timed, part, line));
}

static void quick_steps(int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        CHECK_OK(lf_clock_step_begin(timed));
        mark(C, 0);
        CHECK(lf_clock_step_end(timed, 1, NULL) >= 0);
    }
}

static lf_clock_summary all_steps(void)
{
    lf_clock_summary s = {.size = sizeof s};
    CHECK_OK(lf_clock_get(timed, &s));
    CHECK_NEAR(sum(s.exposed_s), s.wall_s, 1e-9);
    return s;
}

static void check_empty(const lf_clock_summary *s)
{
    CHECK_EQ(s->size, sizeof *s);
    CHECK_EQ(s->steps, 0);
    CHECK_EQ(s->step, -1);
    CHECK_NEAR(s->wall_s + sum(s->exposed_s) + sum(s->busy_s), 0, 0);
}

TEST(steps_queued_ahead_are_timed_by_the_stream)
{
    enum { STEPS = 10 };
    gate g = {lf__mutex_open(), false};
    lf_clock_summary s = {.size = sizeof s};
    start(0);
    CHECK_OK(lf_stream_run(line, pass_gate, &g));
    for (int32_t i = 0; i < STEPS; i++) { /* no wait: the stream has not done the first */
        CHECK_OK(lf_clock_step_begin(timed));
        CHECK_OK(lf_clock_mark_begin(timed, C, line));
        queue_ms(3);
        mark(O, 2);
        CHECK_OK(lf_clock_mark_end(timed, C, line));
        queue_ms(1);
        CHECK_STATUS(lf_clock_step_end(timed, 100, &s), LF_AGAIN);
        check_empty(&s);
    }
    int64_t from = lf__now_ns();
    open_gate(&g);
    s = all_steps();
    double took = (double)(lf__now_ns() - from) * 1e-9;
    CHECK_EQ(s.steps, STEPS);
    CHECK_EQ(s.tokens, STEPS * 100);
    CHECK_EQ(s.step, STEPS - 1);
    CHECK_EQ(s.lost, 0);
    CHECK(s.busy_s[C] >= 0.0299 && s.busy_s[O] >= 0.0199 && s.wall_s >= 0.0599);
    CHECK(s.wall_s <= took); /* not the time behind the gate */
    CHECK(s.exposed_s[C] >= s.busy_s[C] + 0.0099);
    CHECK_NEAR(s.exposed_s[O], s.busy_s[O], 1e-12);
    CHECK(s.step_p50_s >= 0.0059 * 0.96 && s.step_max_s <= s.wall_s);
    CHECK_NEAR(s.tokens_per_s, STEPS * 100 / s.wall_s, 1e-6 * s.tokens_per_s);
    lf__mutex_close(g.mutex);
    stop();
}

TEST(a_wait_is_exposed_only_as_far_as_the_stream_ran_dry)
{
    gate g = {lf__mutex_open(), false};
    lf_clock_summary s = {.size = sizeof s};
    start(4);
    CHECK_OK(lf_stream_run(line, pass_gate, &g)); /* work for longer than the wait */
    CHECK_OK(lf_clock_step_begin(timed));
    CHECK_OK(lf_clock_part_begin(timed, D));
    lf__sleep_ns(100 * NS_A_MS);
    CHECK_OK(lf_clock_part_end(timed, D));
    mark(C, 1);
    CHECK_STATUS(lf_clock_step_end(timed, 0, NULL), LF_AGAIN);
    int64_t from = lf__now_ns();
    open_gate(&g);
    s = all_steps();
    CHECK(s.busy_s[D] >= 0.0999);
    CHECK(s.exposed_s[D] <= (double)(lf__now_ns() - from) * 1e-9);
    CHECK_OK(lf_clock_pause(timed));

    const double hidden = s.exposed_s[D];
    CHECK_OK(lf_clock_step_begin(timed)); /* nothing is queued: the stream waits too */
    CHECK_OK(lf_clock_part_begin(timed, D));
    CHECK_OK(lf_stream_sync(line));
    lf__sleep_ns(20 * NS_A_MS);
    CHECK_OK(lf_clock_part_end(timed, D));
    mark(C, 1);
    CHECK_OK(lf_clock_step_end(timed, 0, NULL)); /* tells of the first */
    s = all_steps();
    CHECK(s.exposed_s[D] - hidden >= 0.0199);
    lf__mutex_close(g.mutex);
    stop();
}

TEST(a_full_ring_says_so_and_can_be_waited_for)
{
    for (int32_t depth = 2; depth <= 5; depth++) {
        gate g = {lf__mutex_open(), false};
        start(depth);
        CHECK_OK(lf_clock_wait(timed)); /* nothing to wait for */
        CHECK_OK(lf_stream_run(line, pass_gate, &g));
        quick_steps(depth);
        CHECK_STATUS(lf_clock_step_begin(timed), LF_AGAIN);
        CHECK_STATUS(lf_clock_step_begin(timed), LF_AGAIN);
        CHECK_STATUS(lf_clock_step_end(timed, 1, NULL), LF_ERR_STATE); /* nothing was begun */
        open_gate(&g);
        CHECK_OK(lf_clock_wait(timed));
        quick_steps(1);
        for (int32_t i = 0; i < 40; i++) { /* many times around */
            lf_status rc;
            while ((rc = lf_clock_step_begin(timed)) == LF_AGAIN) CHECK_OK(lf_clock_wait(timed));
            CHECK_OK(rc);
            mark(O, 0);
            CHECK(lf_clock_step_end(timed, 1, NULL) >= 0);
        }
        lf_clock_summary s = all_steps();
        CHECK_EQ(s.steps, depth + 41);
        CHECK_EQ(s.tokens, depth + 41);
        CHECK_EQ(s.lost, 0);
        lf__mutex_close(g.mutex);
        stop();
    }
}

TEST(each_step_is_told_once_and_late)
{
    lf_clock_summary s = {.size = sizeof s};
    start(8);
    CHECK_OK(lf_clock_step_begin(timed));
    CHECK_STATUS(lf_clock_step_end(timed, 10, &s), LF_AGAIN); /* its end is the next one's begin */
    for (int64_t i = 1; i < 6; i++) {
        CHECK_OK(lf_clock_step_begin(timed));
        CHECK_OK(lf_stream_sync(line));
        CHECK_OK(lf_clock_step_end(timed, 10 + i, &s));
        CHECK_EQ(s.steps, 1);
        CHECK_EQ(s.step, i - 1);
        CHECK_EQ(s.tokens, 10 + i - 1);
        CHECK_NEAR(s.step_max_s, s.wall_s, 0);
        CHECK_NEAR(sum(s.exposed_s), s.wall_s, 1e-12);
    }
    gate g = {lf__mutex_open(), false};
    CHECK_OK(lf_stream_run(line, pass_gate, &g));
    for (int32_t i = 0; i < 2; i++) { /* 6 does not begin: 5 is not complete */
        CHECK_OK(lf_clock_step_begin(timed));
        CHECK_STATUS(lf_clock_step_end(timed, 1, &s), LF_AGAIN);
        check_empty(&s);
    }
    open_gate(&g);
    CHECK_OK(lf_clock_step_begin(timed));
    CHECK_OK(lf_stream_sync(line));
    CHECK_OK(lf_clock_step_end(timed, 1, &s)); /* the newest of three; the sums have all */
    CHECK_EQ(s.step, 7);
    CHECK_EQ(all_steps().steps, 9);
    lf__mutex_close(g.mutex);
    stop();
}

TEST(the_time_to_the_next_begin_is_in_the_step_unless_there_is_a_pause)
{
    for (int32_t pause = 0; pause < 2; pause++) {
        start(0);
        quick_steps(1);
        lf_clock_summary before = all_steps();
        CHECK_EQ(before.steps, 1);
        CHECK_NEAR(before.gap_s, 0, 0);
        queue_ms(20);
        if (pause) CHECK_OK(lf_clock_pause(timed));
        quick_steps(1);
        lf_clock_summary s = all_steps();
        CHECK_EQ(s.steps, 2);
        if (pause) CHECK_NEAR(s.gap_s, 0, 0);
        else CHECK(s.gap_s >= 0.0199 && s.wall_s >= s.gap_s && s.exposed_s[C] >= s.gap_s && s.busy_s[C] <= s.wall_s - s.gap_s);
        lf_clock_summary again = all_steps(); /* looking changes nothing */
        CHECK(memcmp(&s, &again, sizeof s) == 0);
        stop();
    }
    start(0);
    CHECK_OK(lf_clock_pause(timed));
    CHECK_OK(lf_clock_step_begin(timed));
    CHECK_STATUS(lf_clock_pause(timed), LF_ERR_STATE);
    stop();
}

TEST(a_cancelled_step_is_dropped_and_ends_the_one_before)
{
    start(2);
    quick_steps(1);
    for (int32_t i = 0; i < 20; i++) { /* through the ring many times */
        lf_status rc;
        while ((rc = lf_clock_step_begin(timed)) == LF_AGAIN) CHECK_OK(lf_clock_wait(timed));
        CHECK_OK(rc);
        CHECK_OK(lf_clock_part_begin(timed, D));
        CHECK_OK(lf_clock_mark_begin(timed, C, line)); /* left open */
        CHECK_OK(lf_clock_add(timed, IO, 3, 3));
        lf_clock_step_cancel(timed);
    }
    CHECK_EQ(all_steps().steps, 1);
    lf_status rc;
    while ((rc = lf_clock_step_begin(timed)) == LF_AGAIN) CHECK_OK(lf_clock_wait(timed));
    CHECK_OK(rc);
    mark(C, 1);
    CHECK(lf_clock_step_end(timed, 1, NULL) >= 0);
    lf_clock_summary s = all_steps();
    CHECK_EQ(s.steps, 2);
    CHECK_EQ(s.step, 1);
    CHECK_EQ(s.lost, 0);
    CHECK_NEAR(s.busy_s[IO], 0, 0);
    stop();
}

TEST(what_is_added_counts_for_one_step)
{
    lf_clock_summary s = {.size = sizeof s};
    start(0);
    CHECK_OK(lf_clock_add(timed, IO, 4, 0)); /* before the first */
    for (int32_t i = 0; i < 4; i++) {
        CHECK_OK(lf_clock_step_begin(timed));
        CHECK_OK(lf_clock_add(timed, M, 8, 1000));
        CHECK_OK(lf_stream_sync(line));
        CHECK_STATUS(lf_clock_step_end(timed, 0, &s), i ? LF_OK : LF_AGAIN);
        if (i == 0) continue;
        CHECK_NEAR(s.busy_s[IO], i == 1 ? 4 : i == 3 ? 2 : 0, 0);
        CHECK_NEAR(s.busy_s[M], 8, 0);
        CHECK_NEAR(s.exposed_s[M], s.wall_s, 1e-9);          /* it claims all there was */
        if (i == 1) CHECK_OK(lf_clock_add(timed, IO, 2, 0)); /* between 1 and 2; 2 is told when 3 ends */
    }
    CHECK_NEAR(all_steps().busy_s[IO], 6, 0);
    stop();
}

TEST(a_lost_step_is_told_once_and_counted)
{
    lf_clock_summary s = {.size = sizeof s};
    start(0);
    quick_steps(1);
    CHECK_OK(lf_clock_step_begin(timed));
    CHECK_OK(lf_clock_mark_end(timed, O, line));
    CHECK(lf_clock_step_end(timed, 1000, NULL) >= 0);
    CHECK_OK(lf_clock_step_begin(timed));
    CHECK_OK(lf_stream_sync(line));
    CHECK_STATUS(lf_clock_step_end(timed, 1, &s), LF_ERR_STATE);
    CHECK_HAS(lf_error_text(), "step 1 has no figures: marks");
    CHECK_OK(lf_clock_step_begin(timed)); /* that step was ended all the same */
    CHECK_OK(lf_stream_sync(line));
    CHECK_OK(lf_clock_step_end(timed, 1, &s));
    CHECK_EQ(s.step, 2);
    s = all_steps();
    CHECK_EQ(s.steps, 3);
    CHECK_EQ(s.lost, 1);
    CHECK_EQ(s.tokens, 3);
    stop();
}

static lf_status fail(void *user)
{
    (void)user;
    return LF_FAIL(LF_ERR_IO, "planted failure");
}

TEST(a_stream_that_failed_loses_steps_and_goes_on)
{
    gate g = {lf__mutex_open(), false}; /* nothing is found out before the sync */
    start(0);
    quick_steps(2);
    CHECK_OK(lf_clock_step_begin(timed)); /* 2: begun before the failure, not ended */
    CHECK_OK(lf_stream_run(line, pass_gate, &g));
    CHECK_OK(lf_stream_run(line, fail, NULL));
    CHECK(lf_clock_step_end(timed, 1, NULL) >= 0);
    quick_steps(2); /* 3 and 4: nothing of them */
    CHECK_OK(lf_clock_step_begin(timed));
    open_gate(&g);
    CHECK_STATUS(lf_stream_sync(line), LF_ERR_IO);
    lf_status rc = lf_clock_step_end(timed, 1, NULL); /* 5: only its end, which must not fill another's page */
    CHECK_STATUS(rc, LF_ERR_STATE);
    CHECK_HAS(lf_error_text(), "step 2 has no figures: the stream dropped");
    CHECK_OK(lf_clock_step_begin(timed));
    CHECK_OK(lf_stream_sync(line));
    CHECK_STATUS(lf_clock_step_end(timed, 1, NULL), LF_ERR_STATE);
    CHECK_HAS(lf_error_text(), "step 5 has no figures");
    quick_steps(2);
    lf_clock_summary s = all_steps();
    CHECK_EQ(s.steps, 5);
    CHECK_EQ(s.lost, 4);
    lf__mutex_close(g.mutex);
    stop();
}

TEST(without_a_device_marks_are_the_trainers_time)
{
    lf_device *device;
    CHECK_OK(lf_device_open(&device, "cpu"));
    for (int32_t with = 0; with < 2; with++) {
        lf_clock *c;
        lf_clock_summary s = {.size = sizeof s};
        CHECK_OK(lf_clock_open(&c));
        CHECK_OK(lf_clock_follow(c, with ? device : NULL, NULL, 0));
        CHECK(!lf_clock_device(c));
        CHECK_STATUS(lf_clock_mark_begin(c, O, NULL), LF_ERR_STATE);
        CHECK_OK(lf_clock_step_begin(c));
        CHECK_OK(lf_clock_mark_begin(c, C, NULL));
        CHECK_OK(lf_clock_mark_begin(c, O, NULL));
        lf__sleep_ns(2 * NS_A_MS);
        CHECK_OK(lf_clock_mark_end(c, O, NULL));
        CHECK_OK(lf_clock_mark_end(c, C, NULL));
        CHECK_OK(lf_clock_step_end(c, 5, &s)); /* at once */
        CHECK_EQ(s.step, 0);
        CHECK(s.exposed_s[O] >= 0.0019);
        CHECK_NEAR(s.exposed_s[O], s.busy_s[O], 0);
        CHECK_NEAR(sum(s.exposed_s), s.wall_s, 1e-12);
        CHECK_NEAR(s.gap_s, 0, 0);
        CHECK_OK(lf_clock_wait(c));
        CHECK_OK(lf_clock_pause(c));
        lf_clock_close(c);
    }
    lf_device_close(device);
}

TEST(arguments_are_checked)
{
    lf_clock *c;
    start(2);
    CHECK_STATUS(lf_clock_follow(timed, cpu, line, 2), LF_ERR_STATE);
    CHECK_STATUS(lf_clock_mark_begin(timed, O, NULL), LF_ERR_INVALID);
    CHECK_STATUS(lf_clock_mark_begin(timed, LF_N_PARTS, line), LF_ERR_INVALID);
    CHECK_STATUS(lf_clock_mark_end(timed, -1, line), LF_ERR_INVALID);
    CHECK_STATUS(lf_clock_mark_end(NULL, O, line), LF_ERR_INVALID);
    CHECK_STATUS(lf_clock_wait(NULL), LF_ERR_INVALID);
    CHECK_STATUS(lf_clock_pause(NULL), LF_ERR_INVALID);
    CHECK(!lf_clock_device(NULL));
    CHECK_OK(lf_clock_open(&c));
    CHECK_STATUS(lf_clock_follow(NULL, cpu, line, 0), LF_ERR_INVALID);
    CHECK_STATUS(lf_clock_follow(c, cpu, line, 1), LF_ERR_INVALID);
    CHECK_STATUS(lf_clock_follow(c, cpu, line, -3), LF_ERR_INVALID);
    CHECK_STATUS(lf_clock_follow(c, cpu, line, LF_CLOCK_DEPTH_MOST + 1), LF_ERR_INVALID);
    int64_t n = 1;
    for (lf_status rc = LF_ERR_NOMEM; rc != LF_OK; n++) { /* each allocation fails once, and nothing is left behind */
        (void)lf__alloc_fail_at(n);
        rc = lf_clock_follow(c, cpu, line, 4);
        (void)lf__alloc_fail_at(0);
        CHECK(rc == LF_OK || rc == LF_ERR_NOMEM);
        CHECK((lf_clock_device(c) != NULL) == (rc == LF_OK));
    }
    CHECK(n > 10);
    lf_clock_close(c);
    CHECK_OK(lf_clock_open(&c));
    CHECK_OK(lf_clock_step_begin(c));
    CHECK_STATUS(lf_clock_follow(c, cpu, line, 0), LF_ERR_STATE);
    lf_clock_close(c);
    stop();
}

TEST(closing_waits_for_what_is_queued)
{
    gate g = {lf__mutex_open(), false};
    start(4);
    CHECK_OK(lf_stream_run(line, pass_gate, &g));
    quick_steps(2);
    CHECK_OK(lf_clock_step_begin(timed));
    mark(O, 5);
    open_gate(&g);
    stop();
    lf__mutex_close(g.mutex);
}

static _Atomic int32_t going;

static void look_and_add(void *user)
{
    while (going) {
        lf_clock_summary s = {.size = sizeof s};
        (void)lf_clock_add(user, IO, 0.5, 0);
        (void)lf_clock_get(user, &s);
    }
}

/* Others look and add while steps go on (run under TSan too). */
TEST(threads_look_while_steps_are_in_flight)
{
    enum { STEPS = 2000, LOOKERS = 2 };
    lf__thread *thread[LOOKERS];
    start(3);
    going = 1;
    for (int32_t i = 0; i < LOOKERS; i++) CHECK_OK(lf__thread_start(&thread[i], "looker", look_and_add, timed));
    for (int32_t i = 0; i < STEPS; i++) {
        lf_status rc;
        while ((rc = lf_clock_step_begin(timed)) == LF_AGAIN) CHECK_OK(lf_clock_wait(timed));
        CHECK_OK(rc);
        CHECK_OK(lf_clock_part_begin(timed, D));
        CHECK_OK(lf_clock_part_end(timed, D));
        mark(O, 0);
        if (i % 7 == 3) lf_clock_step_cancel(timed);
        else CHECK(lf_clock_step_end(timed, 1, NULL) >= 0);
    }
    going = 0;
    for (int32_t i = 0; i < LOOKERS; i++) lf__thread_join(thread[i]);
    lf_clock_summary s = all_steps();
    CHECK_EQ(s.steps, STEPS - (STEPS - 3 + 6) / 7);
    CHECK_EQ(s.lost, 0);
    stop();
}

LF_TEST_MAIN
