/* SPDX-License-Identifier: Apache-2.0 */
/* The device table on the CPU: memory, slabs, streams in order, events across streams, errors in stream order. */
#include <stdatomic.h>

#include "base/base.h"
#include "lf_test.h"
#include "loongforge/device.h"

static lf_device *open_cpu(void)
{
    lf_device *device = NULL;
    CHECK_OK(lf_device_open(&device, "cpu"));
    return device;
}

TEST(device_names_are_checked)
{
    lf_device *device = (lf_device *)1;
    CHECK_STATUS(lf_device_open(&device, "tpu"), LF_ERR_INVALID);
    CHECK(!device);
    CHECK_HAS(lf_error_text(), "'tpu'");
    CHECK_STATUS(lf_device_open(&device, "cpu:3"), LF_ERR_INVALID);
    CHECK_STATUS(lf_device_open(&device, "cuda:x"), LF_ERR_INVALID);
    CHECK_STATUS(lf_device_open(&device, ""), LF_ERR_INVALID);
    lf_device_close(NULL);
}

TEST(device_info_is_filled)
{
    lf_device *device = open_cpu();
    lf_device_info info = {.size = sizeof info};
    CHECK_OK(lf_device_get_info(device, &info));
    CHECK_EQ(info.kind, 1);
    CHECK(info.n_units >= 1 && info.memory_bytes > 0 && info.page_bytes >= 4096);
    info.size = 3;
    CHECK_STATUS(lf_device_get_info(device, &info), LF_ERR_INVALID);
    lf_device_close(device);
}

TEST(memory_is_aligned_and_copies)
{
    lf_device *device = open_cpu();
    void *a, *b;
    CHECK_OK(lf_device_alloc(device, 1000, &a));
    CHECK_OK(lf_host_alloc(device, 1000, &b));
    CHECK_EQ((uintptr_t)a % 256, 0);
    CHECK_OK(lf_fill(device, a, 7, 1000, NULL));
    CHECK_OK(lf_copy(device, b, a, 1000, NULL));
    CHECK_EQ(((char *)b)[999], 7);
    lf_device_free(device, a);
    lf_host_free(device, b);
    lf_device_close(device);
}

TEST(slab_grows_in_place_and_is_zero)
{
    lf_device *device = open_cpu();
    lf_slab *slab;
    CHECK_OK(lf_slab_open(device, (size_t)1 << 40, &slab)); /* addresses only */
    CHECK_EQ(lf_slab_committed(slab), 0);
    CHECK_OK(lf_slab_commit(slab, 10000));
    char *base = lf_slab_base(slab);
    base[9999] = 1;
    CHECK_OK(lf_slab_commit(slab, 1 << 20));
    CHECK(lf_slab_base(slab) == base);
    CHECK_EQ(base[9999], 1);
    CHECK_EQ(base[(1 << 20) - 1], 0);
    CHECK_STATUS(lf_slab_commit(slab, (size_t)1 << 41), LF_ERR_INVALID);
    lf_device_close(device); /* the slab holds its own reference */
    lf_slab_close(slab);
}

typedef struct tally {
    _Atomic int32_t n;
    int32_t seen[1000];
} tally;

static lf_status append(void *user)
{
    tally *t = user;
    int32_t n = atomic_load(&t->n);
    t->seen[n] = n;
    atomic_store(&t->n, n + 1);
    return LF_OK;
}

TEST(a_stream_runs_in_order_past_its_first_ring)
{
    lf_device *device = open_cpu();
    lf_stream *stream;
    static tally t;
    memset(&t, 0, sizeof t);
    CHECK_OK(lf_stream_open(device, 0, &stream));
    for (int32_t i = 0; i < 1000; i++) CHECK_OK(lf_stream_run(stream, append, &t));
    CHECK_OK(lf_stream_sync(stream));
    CHECK_EQ(t.n, 1000);
    for (int32_t i = 0; i < 1000; i++) CHECK_EQ(t.seen[i], i);
    lf_stream_close(stream);
    lf_device_close(device);
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

TEST(streams_overlap_and_events_order_them)
{
    lf_device *device = open_cpu();
    lf_stream *first, *second;
    lf_event *event;
    gate g = {lf__mutex_open(), false};
    static tally t;
    memset(&t, 0, sizeof t);
    CHECK_OK(lf_stream_open(device, 0, &first));
    CHECK_OK(lf_stream_open(device, 0, &second));
    CHECK_OK(lf_event_open(device, &event));
    CHECK_OK(lf_event_query(event)); /* never recorded: done */

    CHECK_OK(lf_stream_run(first, pass_gate, &g));
    CHECK_OK(lf_event_record(event, first));
    CHECK_OK(lf_stream_run(second, append, &t)); /* not behind the gate */
    CHECK_OK(lf_stream_sync(second));
    CHECK_EQ(t.n, 1);
    CHECK_STATUS(lf_event_query(event), LF_AGAIN);

    CHECK_OK(lf_stream_wait(second, event));
    CHECK_OK(lf_stream_run(second, append, &t));
    lf__sleep_ns(2000000);
    CHECK_EQ(t.n, 1); /* waits */
    open_gate(&g);
    CHECK_OK(lf_stream_sync(second));
    CHECK_EQ(t.n, 2);
    CHECK_OK(lf_event_query(event));
    CHECK_OK(lf_event_sync(event));
    lf_event_close(event);
    lf_stream_close(first);
    lf_stream_close(second);
    lf__mutex_close(g.mutex);
    lf_device_close(device);
}

TEST(an_event_closed_while_queued_is_safe)
{
    lf_device *device = open_cpu();
    lf_stream *stream;
    lf_event *event;
    gate g = {lf__mutex_open(), false};
    CHECK_OK(lf_stream_open(device, 0, &stream));
    CHECK_OK(lf_event_open(device, &event));
    CHECK_OK(lf_stream_run(stream, pass_gate, &g));
    CHECK_OK(lf_event_record(event, stream));
    lf_event_close(event);
    open_gate(&g);
    CHECK_OK(lf_stream_sync(stream));
    lf_stream_close(stream);
    lf__mutex_close(g.mutex);
    lf_device_close(device);
}

TEST(elapsed_time_needs_two_records)
{
    lf_device *device = open_cpu();
    lf_event *a, *b;
    double seconds = -1;
    CHECK_OK(lf_event_open(device, &a));
    CHECK_OK(lf_event_open(device, &b));
    CHECK_OK(lf_event_record(a, NULL));
    CHECK_STATUS(lf_event_elapsed(a, b, &seconds), LF_ERR_STATE);
    CHECK_OK(lf_event_record(b, NULL));
    CHECK_OK(lf_event_elapsed(a, b, &seconds));
    CHECK(seconds >= 0);
    lf_event_close(a);
    lf_event_close(b);
    lf_device_close(device);
}

static lf_status fail(void *user)
{
    (void)user;
    return LF_FAIL(LF_ERR_IO, "planted failure");
}

TEST(an_error_skips_later_work_and_is_told_once)
{
    lf_device *device = open_cpu();
    lf_stream *stream;
    lf_event *event;
    static tally t;
    memset(&t, 0, sizeof t);
    CHECK_OK(lf_stream_open(device, 0, &stream));
    CHECK_OK(lf_event_open(device, &event));
    CHECK_OK(lf_stream_run(stream, fail, NULL));
    CHECK_OK(lf_stream_run(stream, append, &t));
    CHECK_OK(lf_event_record(event, stream));
    CHECK_OK(lf_event_sync(event)); /* fires all the same */
    CHECK_STATUS(lf_stream_sync(stream), LF_ERR_IO);
    CHECK_HAS(lf_error_text(), "planted failure");
    CHECK_EQ(t.n, 0);
    CHECK_OK(lf_stream_run(stream, append, &t));
    CHECK_OK(lf_stream_sync(stream));
    CHECK_EQ(t.n, 1);
    lf_event_close(event);
    lf_stream_close(stream);
    lf_device_close(device);
}

TEST(opening_survives_every_failed_allocation)
{
    for (int64_t n = 1;; n++) {
        lf_device *device = NULL;
        lf_stream *stream = NULL;
        lf_event *event = NULL;
        lf_slab *slab = NULL;
        lf__alloc_fail_at(n);
        lf_status rc = lf_device_open(&device, "cpu");
        if (rc == LF_OK) rc = lf_stream_open(device, 0, &stream);
        if (rc == LF_OK) rc = lf_event_open(device, &event);
        if (rc == LF_OK) rc = lf_slab_open(device, 4096, &slab);
        lf__alloc_fail_at(0);
        lf_slab_close(slab);
        lf_event_close(event);
        lf_stream_close(stream);
        lf_device_close(device);
        if (rc == LF_OK) break;
        CHECK_EQ(rc, LF_ERR_NOMEM);
        CHECK(n < 100);
    }
}

LF_TEST_MAIN
