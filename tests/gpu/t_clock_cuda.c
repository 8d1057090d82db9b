/* SPDX-License-Identifier: Apache-2.0 */
/* The step clock on CUDA: captured graphs with marks, replayed ahead of the device, against work of known length and against
 * events. */
#include <cuda_runtime_api.h>

#include "base/base.h"
#include "lf_test.h"
#include "loongforge/device.h"
#include "loongforge/scope.h"

extern cudaError_t clock_cuda_spin(cudaStream_t stream, const int64_t *ns);

enum { C = LF_PART_COMPUTE, D = LF_PART_DATA, O = LF_PART_OPTIMIZER };
enum { NS_A_US = 1000, LENGTHS = 32, GRAPHS = 2 };
static const double launch_s = 30e-6; /* for each kernel and stamp between two times; much more than it takes */

static lf_device *gpu;
static lf_stream *line, *side;
static lf_clock *timed;
static int64_t *length_ns; /* (LENGTHS) pinned */
static cudaGraphExec_t graph[GRAPHS];

#define CHECK_CUDA(call)                                                       \
    do {                                                                       \
        cudaError_t e_ = (call);                                               \
        if (e_ != cudaSuccess) FAIL_("%s: %s", #call, cudaGetErrorString(e_)); \
    } while (0)

static void start(int32_t depth)
{
    if (lf_device_open(&gpu, "cuda") < 0) SKIP("%s", lf_error_text());
    CHECK_OK(lf_stream_open(gpu, 0, &line));
    CHECK_OK(lf_stream_open(gpu, 0, &side));
    CHECK_OK(lf_host_alloc(gpu, LENGTHS * sizeof *length_ns, (void **)&length_ns));
    CHECK_OK(lf_clock_open(&timed));
    CHECK_OK(lf_clock_follow(timed, gpu, line, depth));
    CHECK(lf_clock_device(timed) == gpu);
}

static void stop(void)
{
    lf_clock_close(timed);
    for (int32_t i = 0; i < GRAPHS; i++) {
        if (graph[i]) CHECK_CUDA(cudaGraphExecDestroy(graph[i]));
        graph[i] = NULL;
    }
    lf_host_free(gpu, length_ns);
    lf_stream_close(line);
    lf_stream_close(side);
    lf_device_close(gpu);
}

static void spin(lf_stream *stream, int32_t which) { CHECK_CUDA(clock_cuda_spin(lf_stream_native(stream), &length_ns[which])); }

/* compute for [0] around an optimizer for [1], and then for [2] that nobody marked. */
static void queue_step(lf_stream *stream)
{
    CHECK_OK(lf_clock_mark_begin(timed, C, stream));
    spin(stream, 0);
    CHECK_OK(lf_clock_mark_begin(timed, O, stream));
    spin(stream, 1);
    CHECK_OK(lf_clock_mark_end(timed, O, stream));
    CHECK_OK(lf_clock_mark_end(timed, C, stream));
    spin(stream, 2);
}

static void set_lengths(int64_t a_us, int64_t b_us, int64_t c_us)
{
    length_ns[0] = a_us * NS_A_US, length_ns[1] = b_us * NS_A_US, length_ns[2] = c_us * NS_A_US;
}

/* Capture on a stream that is not the one replayed on, as PyTorch does. */
static void begin_capture(void) { CHECK_CUDA(cudaStreamBeginCapture(lf_stream_native(side), cudaStreamCaptureModeThreadLocal)); }

static void end_capture(int32_t which)
{
    cudaGraph_t made = NULL;
    CHECK_CUDA(cudaStreamEndCapture(lf_stream_native(side), &made));
    CHECK_CUDA(cudaGraphInstantiate(&graph[which], made, 0));
    CHECK_CUDA(cudaGraphDestroy(made));
}

static void replay(int32_t which) { CHECK_CUDA(cudaGraphLaunch(graph[which], lf_stream_native(line))); }

static double sum(const double *seconds)
{
    double total = 0;
    for (int32_t i = 0; i < LF_N_PARTS; i++) total += seconds[i];
    return total;
}

static lf_clock_summary all_steps(void)
{
    lf_clock_summary s = {.size = sizeof s};
    CHECK_OK(lf_clock_get(timed, &s));
    CHECK_NEAR(sum(s.exposed_s), s.wall_s, 1e-9);
    CHECK_EQ(s.lost, 0);
    return s;
}

#define CHECK_LENGTH(what, seconds, slack) CHECK_BETWEEN(what, seconds, (seconds) + (slack))
#define CHECK_BETWEEN(what, low, high)                                                                     \
    do {                                                                                                   \
        double w_ = (what), l_ = (low), h_ = (high);                                                       \
        if (!(w_ >= l_ - 2e-6 && w_ <= h_)) FAIL_("%s is %.9f, expected %.9f to %.9f", #what, w_, l_, h_); \
    } while (0)

TEST(replays_ahead_of_the_device_are_timed_one_by_one)
{
    enum { STEPS = 20 };
    lf_event *from, *to;
    lf_clock_summary s = {.size = sizeof s};
    double seconds = 0;
    start(STEPS);
    CHECK_OK(lf_event_open(gpu, &from));
    CHECK_OK(lf_event_open(gpu, &to));
    set_lengths(3000, 2000, 500);
    begin_capture();
    queue_step(side);
    end_capture(0);
    CHECK_OK(lf_event_record(from, line));
    for (int32_t i = 0; i < STEPS; i++) {
        CHECK_OK(lf_clock_step_begin(timed));
        replay(0);
        lf_status rc = lf_clock_step_end(timed, 100, &s);
        CHECK(rc == LF_OK || rc == LF_AGAIN);
    }
    CHECK_OK(lf_event_record(to, line));
    CHECK_STATUS(lf_event_query(to), LF_AGAIN); /* all is queued, 110 ms of it, and nothing was waited for */
    s = all_steps();
    CHECK_OK(lf_event_elapsed(from, to, &seconds));
    CHECK_EQ(s.steps, STEPS);
    CHECK_EQ(s.tokens, STEPS * 100);
    CHECK_LENGTH(s.busy_s[C], STEPS * 3e-3, STEPS * 3 * launch_s);
    CHECK_LENGTH(s.busy_s[O], STEPS * 2e-3, STEPS * 2 * launch_s);
    CHECK_LENGTH(s.wall_s, STEPS * 5.5e-3, STEPS * 10 * launch_s);
    CHECK_LENGTH(s.exposed_s[C] - s.busy_s[C], STEPS * 0.5e-3, STEPS * 5 * launch_s); /* nobody was waited for */
    CHECK_LENGTH(s.step_p50_s * 1.032, 5.5e-3, 10 * launch_s + 0.2e-3);
    CHECK_NEAR(s.wall_s, seconds, STEPS * launch_s);
    CHECK(s.gap_s < STEPS * launch_s);
    printf("%d replays: wall %.3f ms (events: %.3f), compute %.3f, optimizer %.3f, idle %.3f, gaps %.3f\n", STEPS, 1e3 * s.wall_s,
           1e3 * seconds, 1e3 * s.busy_s[C], 1e3 * s.busy_s[O], 1e3 * (s.exposed_s[C] - s.busy_s[C]), 1e3 * s.gap_s);
    lf_event_close(from);
    lf_event_close(to);
    stop();
}

TEST(each_step_has_the_times_of_its_own_replay)
{
    enum { STEPS = 20 };
    lf_clock_summary s = {.size = sizeof s};
    int64_t told = 0, us[STEPS];
    double wall_s = 0;
    start(0);
    for (int32_t i = 0; i < GRAPHS; i++) { /* two buckets */
        begin_capture();
        queue_step(side);
        if (i == 1) spin(side, 3);
        end_capture(i);
    }
    length_ns[3] = 700 * NS_A_US;
    for (int32_t i = 0; i < STEPS; i++) { /* the last replay is done when the next begins, so lengths can change between them */
        CHECK_OK(lf_clock_step_begin(timed));
        CHECK_OK(lf_stream_sync(line));
        us[i] = 200 + 100 * (i * 7 % 11);
        set_lengths(us[i], 2 * us[i], 100);
        replay(i % 2);
        CHECK_STATUS(lf_clock_step_end(timed, i, &s), i ? LF_OK : LF_AGAIN);
        if (i == 0) continue;
        CHECK_EQ(s.step, i - 1);
        CHECK_EQ(s.tokens, i - 1);
        CHECK_LENGTH(s.busy_s[C], 1e-6 * (double)us[s.step], 3 * launch_s);
        CHECK_LENGTH(s.busy_s[O], 2e-6 * (double)us[s.step], 2 * launch_s);
        CHECK(s.wall_s >= 3e-6 * (double)us[s.step] + (s.step % 2 ? 800e-6 : 100e-6));
        CHECK_NEAR(sum(s.exposed_s), s.wall_s, 1e-9);
        wall_s += s.wall_s;
        told++;
    }
    CHECK_EQ(told, STEPS - 1);
    s = all_steps();
    CHECK_EQ(s.steps, STEPS);
    CHECK(s.wall_s >= wall_s + 3e-6 * (double)us[STEPS - 1]);
    stop();
}

TEST(external_records_in_a_graph_agree)
{
    lf_event *from, *to;
    lf_clock_summary s = {.size = sizeof s};
    double seconds = 0, worst = 0;
    start(0);
    CHECK_OK(lf_event_open(gpu, &from));
    CHECK_OK(lf_event_open(gpu, &to));
    begin_capture();
    CHECK_OK(lf_clock_mark_begin(timed, O, side));
    CHECK_OK(lf_event_record(from, side));
    spin(side, 0);
    CHECK_OK(lf_event_record(to, side));
    CHECK_OK(lf_clock_mark_end(timed, O, side));
    end_capture(0);
    for (int32_t i = 0; i < 20; i++) {
        length_ns[0] = (1 + i * 3 % 7) * 1000 * NS_A_US;
        CHECK_OK(lf_clock_step_begin(timed));
        replay(0);
        CHECK(lf_clock_step_end(timed, 0, NULL) >= 0);
        CHECK_OK(lf_stream_sync(line));
        CHECK_OK(lf_clock_step_begin(timed)); /* so that the last one is complete */
        CHECK_OK(lf_stream_sync(line));
        s.size = sizeof s;
        CHECK_OK(lf_clock_step_end(timed, 0, &s));
        CHECK_EQ(s.step, 2 * i);
        CHECK_OK(lf_event_elapsed(from, to, &seconds)); /* of this replay */
        CHECK_LENGTH(seconds, 1e-9 * (double)length_ns[0], 2 * launch_s);
        CHECK_NEAR(s.busy_s[O], seconds, 2 * launch_s);
        if (fabs(s.busy_s[O] - seconds) > worst) worst = fabs(s.busy_s[O] - seconds);
    }
    printf("stamps around event records around work: %.2f us apart at most\n", 1e6 * worst);
    lf_event_close(from);
    lf_event_close(to);
    stop();
}

TEST(a_wait_for_data_is_exposed_when_the_device_runs_dry)
{
    lf_clock_summary s = {.size = sizeof s};
    start(0);
    set_lengths(20000, 100, 0);
    begin_capture();
    queue_step(side);
    end_capture(0);
    for (int32_t i = 0; i < 4; i++) { /* 20 ms are queued while the host waits 5: hidden */
        CHECK_OK(lf_clock_step_begin(timed));
        if (i > 0) {
            CHECK_OK(lf_clock_part_begin(timed, D));
            lf__sleep_ns(5000 * NS_A_US);
            CHECK_OK(lf_clock_part_end(timed, D));
        }
        replay(0);
        CHECK(lf_clock_step_end(timed, 0, NULL) >= 0);
    }
    s = all_steps();
    CHECK(s.busy_s[D] >= 3 * 4.999e-3);
    CHECK_BETWEEN(s.exposed_s[D], 0, 3 * 2 * launch_s);
    CHECK_LENGTH(s.busy_s[C], 4 * 20e-3, 4 * 3 * launch_s);
    CHECK_OK(lf_clock_pause(timed));

    const double hidden = s.exposed_s[D], before = s.wall_s;
    for (int32_t i = 0; i < 3; i++) { /* nothing is queued */
        CHECK_OK(lf_clock_step_begin(timed));
        CHECK_OK(lf_clock_part_begin(timed, D));
        CHECK_OK(lf_stream_sync(line));
        lf__sleep_ns(5000 * NS_A_US);
        CHECK_OK(lf_clock_part_end(timed, D));
        replay(0);
        CHECK(lf_clock_step_end(timed, 0, NULL) >= 0);
    }
    s = all_steps();
    CHECK(s.exposed_s[D] - hidden >= 3 * 4.9e-3);
    CHECK(s.wall_s - before >= 3 * 25e-3);
    CHECK_NEAR(s.exposed_s[D] + s.busy_s[C] + s.busy_s[O], s.wall_s, 7 * 10 * launch_s);
    stop();
}

TEST(eager_steps_on_the_same_calls)
{
    enum { STEPS = 50 };
    start(4);
    set_lengths(300, 200, 0);
    for (int32_t i = 0; i < STEPS; i++) {
        lf_status rc;
        while ((rc = lf_clock_step_begin(timed)) == LF_AGAIN) CHECK_OK(lf_clock_wait(timed));
        CHECK_OK(rc);
        queue_step(line);
        CHECK(lf_clock_step_end(timed, 1, NULL) >= 0);
    }
    lf_clock_summary s = all_steps();
    CHECK_EQ(s.steps, STEPS);
    CHECK_LENGTH(s.busy_s[C], STEPS * 300e-6, STEPS * 3 * launch_s);
    CHECK_LENGTH(s.busy_s[O], STEPS * 200e-6, STEPS * 2 * launch_s);
    stop();
}

TEST(captures_and_steps_know_each_other)
{
    lf_clock *early;
    start(0);
    set_lengths(100, 100, 0);
    CHECK_OK(lf_clock_open(&early));
    CHECK_OK(lf_clock_follow(early, gpu, side, 0));
    begin_capture();
    CHECK_STATUS(lf_clock_step_begin(early), LF_ERR_STATE);
    CHECK_HAS(lf_error_text(), "captured");
    queue_step(side); /* the capture is whole */
    end_capture(0);
    lf_clock_close(early);
    CHECK_OK(lf_clock_step_begin(timed));
    begin_capture(); /* inside a step that also replays */
    queue_step(side);
    end_capture(1);
    replay(1);
    replay(0);
    CHECK_STATUS(lf_clock_step_end(timed, 1, NULL), LF_AGAIN);
    lf_clock_summary s = all_steps();
    CHECK_EQ(s.steps, 1);
    CHECK_LENGTH(s.busy_s[C], 200e-6, 6 * launch_s);
    CHECK_LENGTH(s.busy_s[O], 200e-6, 4 * launch_s);
    lf_clock_close(timed); /* its stamps in graphs go on and count for nothing */
    timed = NULL;
    replay(0);
    replay(1);
    CHECK_OK(lf_stream_sync(line));
    stop();
}

TEST(a_stamp_costs_little)
{
    enum { PAIRS = 500 };
    lf_event *at[3];
    double captured_s, eager_s;
    start(0);
    for (int32_t i = 0; i < 3; i++) CHECK_OK(lf_event_open(gpu, &at[i]));
    begin_capture();
    for (int32_t i = 0; i < PAIRS; i++) {
        CHECK_OK(lf_clock_mark_begin(timed, O, side));
        CHECK_OK(lf_clock_mark_end(timed, O, side));
    }
    end_capture(0);
    length_ns[0] = 50000 * (int64_t)NS_A_US;
    CHECK_OK(lf_clock_step_begin(timed));
    replay(0);
    spin(line, 0);
    CHECK_OK(lf_event_record(at[0], line));
    replay(0);
    CHECK_OK(lf_event_record(at[1], line));
    for (int32_t i = 0; i < PAIRS; i++) {
        CHECK_OK(lf_clock_mark_begin(timed, O, line));
        CHECK_OK(lf_clock_mark_end(timed, O, line));
    }
    CHECK_OK(lf_event_record(at[2], line));
    CHECK_STATUS(lf_clock_step_end(timed, 0, NULL), LF_AGAIN);
    CHECK_OK(lf_stream_sync(line));
    CHECK_OK(lf_event_elapsed(at[0], at[1], &captured_s));
    CHECK_OK(lf_event_elapsed(at[1], at[2], &eager_s));
    printf("a stamp takes %.2f us in a graph, %.2f us queued one by one\n", 1e6 * captured_s / (2 * PAIRS),
           1e6 * eager_s / (2 * PAIRS));
    CHECK(captured_s < 2 * PAIRS * launch_s && eager_s < 2 * PAIRS * launch_s);
    for (int32_t i = 0; i < 3; i++) lf_event_close(at[i]);
    stop();
}

LF_TEST_MAIN
