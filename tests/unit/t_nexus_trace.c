/* SPDX-License-Identifier: Apache-2.0 */
/* The last collectives, as a report of a failure shows them. */
#include "base/base.h"
#include "lf_test.h"
#include "loongforge/nexus.h"

static int64_t fail_wait_of = -1, posted;

static lf_status post(void *user, void *data, int64_t count, int32_t dtype, lf_stream *stream, int64_t *ticket)
{
    (void)user, (void)data, (void)count, (void)dtype, (void)stream;
    *ticket = 100 + posted++;
    return LF_OK;
}

static lf_status wait_for(void *user, int64_t ticket, lf_stream *stream, double timeout_s)
{
    (void)user, (void)stream, (void)timeout_s;
    return ticket == fail_wait_of ? lf_transport_fail(LF_ERR_TIMEOUT, "nobody came") : LF_OK;
}

static lf_map *make_map(lf_device *cpu)
{
    static const int64_t count = 4096;
    char name[16];
    lf_map *map = NULL;
    CHECK_OK(lf_map_open(&map, NULL));
    for (int32_t l = 0; l < 3; l++) {
        snprintf(name, sizeof name, "l%d", l);
        lf_param p = {
            .size = sizeof p, .name = name, .shape = &count, .ndim = 1, .dtype = LF_DTYPE_F32, .layer = l, .expert = -1};
        p.tied_to = -1;
        CHECK_OK(lf_map_add(map, &p, NULL));
    }
    CHECK_OK(lf_map_plan(map));
    CHECK_OK(lf_map_allocate(map, cpu));
    return map;
}

static lf_status one_step(lf_nexus *nexus)
{
    CHECK_OK(lf_nexus_begin(nexus));
    for (int32_t b = 0; b < 3; b++) CHECK_OK(lf_nexus_mark(nexus, b, NULL));
    return lf_nexus_finish(nexus, NULL);
}

static lf_collective_info recent(const lf_nexus *nexus, int32_t back)
{
    lf_collective_info c = {.size = sizeof c};
    CHECK_OK(lf_nexus_get_recent(nexus, back, &c));
    return c;
}

TEST(trace_remembers_the_last_collectives)
{
    lf_device *cpu;
    lf_nexus *nexus;
    lf_nexus_options opts;
    lf_transport t = {.size = sizeof t, .name = "deaf", .world = 1, .post = post, .wait = wait_for};
    double sums[5] = {0};
    CHECK_OK(lf_device_open(&cpu, "cpu"));
    lf_map *map = make_map(cpu);
    CHECK_OK(lf_options_init("nexus", &opts, sizeof opts));
    opts.chunk_bytes = 4096 * 4;
    CHECK_OK(lf_nexus_open(&nexus, map, &t, &opts)); /* one sum: do the ranks agree */
    CHECK_EQ(lf_nexus_n_chunks(nexus), 3);
    CHECK_EQ(recent(nexus, 0).seq, 0);
    CHECK_EQ(recent(nexus, 0).chunk, -1);
    CHECK_EQ(recent(nexus, 0).state, LF_COLLECTIVE_DONE);
    CHECK_OK(one_step(nexus));
    CHECK_OK(lf_nexus_reduce(nexus, sums, 5, LF_DTYPE_F64, NULL));
    CHECK_EQ(recent(nexus, 0).seq, 4);
    CHECK_EQ(recent(nexus, 0).bytes, 40);
    CHECK_EQ(recent(nexus, 0).dtype, LF_DTYPE_F64);
    for (int32_t c = 0; c < 3; c++) {
        const lf_collective_info info = recent(nexus, 3 - c);
        CHECK_EQ(info.chunk, c);
        CHECK_EQ(info.count, 4096);
        CHECK_EQ(info.bytes, 4096 * 4);
        CHECK_EQ(info.state, LF_COLLECTIVE_DONE);
        CHECK(info.seconds >= 0);
    }
    lf_collective_info info = {.size = sizeof info};
    CHECK_STATUS(lf_nexus_get_recent(nexus, 5, &info), LF_END);
    CHECK_STATUS(lf_nexus_get_recent(nexus, -1, &info), LF_ERR_INVALID);
    info.size = 8;
    CHECK_STATUS(lf_nexus_get_recent(nexus, 0, &info), LF_ERR_INVALID);

    for (int32_t i = 0; i < 20; i++) CHECK_OK(one_step(nexus)); /* the ring comes round */
    CHECK_EQ(recent(nexus, LF_NEXUS_RECENT - 1).seq, 5 + 60 - LF_NEXUS_RECENT);
    info.size = sizeof info;
    CHECK_STATUS(lf_nexus_get_recent(nexus, LF_NEXUS_RECENT, &info), LF_END);

    fail_wait_of = 100 + posted + 1; /* the second of the next step */
    CHECK_STATUS(one_step(nexus), LF_ERR_TIMEOUT);
    CHECK_HAS(lf_error_text(), "nobody came");
    CHECK_EQ(recent(nexus, 2).state, LF_COLLECTIVE_DONE);
    CHECK_EQ(recent(nexus, 1).state, LF_COLLECTIVE_FAILED);
    CHECK_EQ(recent(nexus, 1).chunk, 1);
    CHECK_EQ(recent(nexus, 0).state, LF_COLLECTIVE_POSTED);
    lf_nexus_close(nexus);
    lf_map_unref(map);
    lf_device_close(cpu);
}

LF_TEST_MAIN
