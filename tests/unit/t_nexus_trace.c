/* SPDX-License-Identifier: Apache-2.0 */
/* The last collectives, as a report of a failure shows them. */
#include "nexus_fixture.h"

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
    lf_nexus *nexus;
    lf_nexus_options opts;
    lf_transport t = {.size = sizeof t, .name = "deaf", .world = 1, .post = post, .wait = wait_for};
    double sums[5] = {0};
    set_up();
    lf_map *map = make_layers(3, 4096);
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
    lf_device_close(device);
}

LF_TEST_MAIN
