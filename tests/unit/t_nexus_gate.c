/* SPDX-License-Identifier: Apache-2.0 */
/* Runs held back while somebody says that the device is busy. */
#include "nexus_fixture.h"

enum { N_BLOCKS = 3 };

typedef struct gate {
    double answer[8]; /* the last one for good */
    int32_t n, asked;
} gate;

static double busy(void *user)
{
    gate *g = user;
    const int32_t i = g->asked++;
    return g->answer[i < g->n ? i : g->n - 1];
}

typedef struct setting {
    lf_map *map;
    lf_nexus *nexus;
} setting;

static setting open_gated(double pct, double wait_ms)
{
    setting s = {0};
    lf_nexus_options opts;
    lf_transport end;
    set_up();
    s.map = make_layers(N_BLOCKS, 4096);
    CHECK_OK(lf_loopback_open(1, &end));
    CHECK_OK(lf_options_init("nexus", &opts, sizeof opts));
    opts.chunk_bytes = 4096 * 4;
    opts.launch_busy_pct = pct;
    opts.launch_wait_ms = wait_ms;
    CHECK_OK(lf_nexus_open(&s.nexus, s.map, &end, &opts));
    return s;
}

static lf_nexus_stats step(const setting *s)
{
    lf_nexus_stats stats = {.size = sizeof stats};
    CHECK_OK(lf_nexus_begin(s->nexus));
    for (int32_t b = 0; b < N_BLOCKS; b++) CHECK_OK(lf_nexus_mark(s->nexus, b, NULL));
    CHECK_OK(lf_nexus_finish(s->nexus, NULL));
    CHECK_OK(lf_nexus_get_stats(s->nexus, &stats));
    return stats;
}

static void close_all(setting *s)
{
    lf_nexus_close(s->nexus);
    lf_map_unref(s->map);
}

TEST(gate_holds_until_there_is_room)
{
    setting s = open_gated(80, 60000); /* a minute: what ends the wait is the answer */
    gate g = {.answer = {100, 90, 81, 80}, .n = 4};
    CHECK_OK(lf_nexus_gate(s.nexus, busy, &g));
    const lf_nexus_stats stats = step(&s);
    CHECK_EQ(g.asked, 4 + N_BLOCKS - 1);
    CHECK(stats.held_s > 0 && stats.collectives == N_BLOCKS);
    CHECK_OK(lf_nexus_gate(s.nexus, NULL, NULL));
    step(&s);
    CHECK_EQ(g.asked, 4 + N_BLOCKS - 1);
    close_all(&s);
}

TEST(gate_holds_no_longer_than_it_may)
{
    setting s = open_gated(80, 2);
    gate g = {.answer = {100}, .n = 1};
    CHECK_OK(lf_nexus_gate(s.nexus, busy, &g));
    const lf_nexus_stats stats = step(&s);
    CHECK(stats.held_s >= N_BLOCKS * 0.002 && stats.steps == 1);
    CHECK(g.asked > N_BLOCKS);
    close_all(&s);
}

TEST(gate_does_not_hold_for_the_unknown)
{
    setting s = open_gated(80, 60000);
    gate g = {.answer = {-1}, .n = 1};
    CHECK_OK(lf_nexus_gate(s.nexus, busy, &g));
    step(&s);
    CHECK_EQ(g.asked, N_BLOCKS);
    close_all(&s);
    s = open_gated(0, 2);
    CHECK_STATUS(lf_nexus_gate(s.nexus, busy, &g), LF_ERR_STATE);
    CHECK_HAS(lf_error_text(), "launch_busy_pct is 0");
    CHECK(step(&s).held_s == 0);
    CHECK_EQ(g.asked, N_BLOCKS);
    close_all(&s);
}

LF_TEST_MAIN
