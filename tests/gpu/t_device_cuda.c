/* SPDX-License-Identifier: Apache-2.0 */
/* The device table on CUDA: memory, slabs, streams in order, events across streams, errors in stream order. Host functions of
 * two streams may share a thread of the driver, so whatever must overlap a waiting one is a fill. */
#include <dlfcn.h>
#include <stdatomic.h>

#include "base/base.h"
#include "device/device_int.h"
#include "lf_test.h"

static lf_device *open_cuda(void)
{
    lf_device *device = NULL;
    if (lf_device_open(&device, "cuda") < 0) SKIP("%s", lf_error_text());
    return device;
}

static lf_device_info info_of(lf_device *device)
{
    lf_device_info info = {.size = sizeof info};
    CHECK_OK(lf_device_get_info(device, &info));
    return info;
}

static int32_t byte_at(lf_device *device, const void *p, size_t at)
{
    uint8_t byte = 0;
    CHECK_OK(lf_copy(device, &byte, (const char *)p + at, 1, NULL));
    return byte;
}

/* Every byte of device memory has this value. */
static void check_all(lf_device *device, const void *p, size_t bytes, int32_t value)
{
    uint8_t *copy = malloc(bytes);
    CHECK(copy != NULL);
    CHECK_OK(lf_copy(device, copy, p, bytes, NULL));
    size_t wrong = 0;
    for (size_t i = 0; i < bytes; i++) wrong += copy[i] != value;
    free(copy);
    CHECK_EQ(wrong, 0);
}

TEST(cuda_names_are_checked)
{
    lf_device_close(open_cuda());
    lf_device *device = (lf_device *)1;
    CHECK_STATUS(lf_device_open(&device, "cuda:999"), LF_ERR_INVALID);
    CHECK(!device);
    CHECK_HAS(lf_error_text(), "cuda:999");
    CHECK_STATUS(lf_device_open(&device, "cuda:x"), LF_ERR_INVALID);
}

TEST(cuda_info_is_filled)
{
    lf_device *device = open_cuda();
    lf_device_info info = info_of(device);
    CHECK_EQ(info.kind, 2);
    CHECK_EQ(info.index, 0);
    CHECK_HAS(info.name, "cuda:0: ");
    CHECK(info.n_units >= 1 && info.capability >= 80);
    CHECK(info.memory_free_bytes > 0 && info.memory_free_bytes <= info.memory_bytes);
    CHECK(info.page_bytes >= 4096 && lf__is_pow2(info.page_bytes));
    CHECK(info.priority_high < info.priority_low);
    lf_device_close(device);
}

TEST(cuda_memory_is_aligned_and_copies)
{
    lf_device *device = open_cuda();
    enum { N = 100000 };
    char *a, *b, *pinned, plain[N];
    CHECK_OK(lf_device_alloc(device, N, (void **)&a));
    CHECK_OK(lf_device_alloc(device, N, (void **)&b));
    CHECK_OK(lf_host_alloc(device, N, (void **)&pinned));
    CHECK_EQ((uintptr_t)a % 256, 0);
    for (int32_t i = 0; i < N; i++) pinned[i] = (char)(i * 7);
    CHECK_OK(lf_fill(device, b, 3, N, NULL));
    CHECK_OK(lf_copy(device, a, pinned, N, NULL));
    CHECK_OK(lf_copy(device, b + 1, a, N - 2, NULL));
    CHECK_OK(lf_copy(device, plain, b, N, NULL));
    CHECK_EQ(plain[0], 3);
    CHECK(memcmp(plain + 1, pinned, N - 2) == 0);
    CHECK_EQ(plain[N - 1], 3);
    CHECK_OK(lf_copy(device, a, b, 0, NULL));
    void *none;
    CHECK_OK(lf_device_alloc(device, 0, &none));
    lf_device_free(device, none);
    lf_device_free(device, NULL);
    lf_device_free(device, a);
    lf_device_free(device, b);
    lf_host_free(device, pinned);
    lf_device_close(device);
}

TEST(cuda_too_much_memory_is_an_error_once)
{
    lf_device *device = open_cuda();
    void *p = &p;
    CHECK_STATUS(lf_device_alloc(device, (size_t)1 << 50, &p), LF_ERR_NOMEM);
    CHECK(!p);
    CHECK_HAS(lf_error_text(), "1125899906842624 bytes");
    CHECK_HAS(lf_error_text(), "free");
    CHECK_OK(lf_device_alloc(device, 1000, &p)); /* the error does not stick */
    CHECK_OK(lf_fill(device, p, 1, 1000, NULL));
    lf_device_free(device, p);
    lf_device_close(device);
}

/* ---- slabs ----------------------------------------------------------------------------------------------------------- */

TEST(cuda_slab_grows_in_place_and_is_zero)
{
    lf_device *device = open_cuda();
    lf_slab *slab;
    const size_t page = (size_t)info_of(device).page_bytes;
    for (int32_t round = 0; round < 3; round++) {                /* the second time on memory that was written */
        CHECK_OK(lf_slab_open(device, (size_t)64 << 30, &slab)); /* addresses only */
        CHECK_EQ(lf_slab_committed(slab), 0);
        CHECK_OK(lf_slab_commit(slab, 10000));
        CHECK_EQ(lf_slab_committed(slab), page);
        char *base = lf_slab_base(slab);
        check_all(device, base, page, 0);
        CHECK_OK(lf_fill(device, base, 7, page, NULL));
        CHECK_OK(lf_slab_commit(slab, 3 * page + 1));
        CHECK_EQ(lf_slab_committed(slab), 4 * page);
        CHECK(lf_slab_base(slab) == base);
        check_all(device, base, page, 7);
        check_all(device, base + page, 3 * page, 0);
        CHECK_OK(lf_slab_commit(slab, page)); /* never shrinks */
        CHECK_EQ(lf_slab_committed(slab), 4 * page);
        CHECK_OK(lf_fill(device, base + page / 2, 9, 3 * page, NULL)); /* across what was committed apart */
        CHECK_OK(lf_copy(device, base, base + 3 * page, page / 2, NULL));
        check_all(device, base, 3 * page + page / 2, 9);
        CHECK_EQ(byte_at(device, base, 4 * page - 1), 0);
        CHECK_STATUS(lf_slab_commit(slab, (size_t)65 << 30), LF_ERR_INVALID);
        lf_slab_close(slab);
    }
    lf_device_close(device);
}

TEST(cuda_slab_commits_all_or_nothing)
{
    lf_device *device = open_cuda();
    lf_device_info info = info_of(device);
    const size_t page = (size_t)info.page_bytes, more = 2 * (size_t)info.memory_bytes;
    lf_slab *slab;
    CHECK_OK(lf_slab_open(device, more, &slab));
    lf_device_close(device); /* the slab holds its own reference */
    CHECK_OK(lf_slab_commit(slab, page));
    CHECK_OK(lf_fill(device, lf_slab_base(slab), 5, page, NULL));
    CHECK_STATUS(lf_slab_commit(slab, more), LF_ERR_NOMEM);
    CHECK_EQ(lf_slab_committed(slab), page);
    check_all(device, lf_slab_base(slab), page, 5);
    CHECK_OK(lf_slab_commit(slab, 2 * page));
    check_all(device, (char *)lf_slab_base(slab) + page, page, 0);
    lf_slab_close(slab);
}

/* ---- streams --------------------------------------------------------------------------------------------------------- */

TEST(cuda_streams_take_priorities_in_range)
{
    lf_device *device = open_cuda();
    lf_device_info info = info_of(device);
    for (int32_t p = info.priority_high; p <= info.priority_low; p++) {
        lf_stream *stream;
        CHECK_OK(lf_stream_open(device, p, &stream));
        CHECK(lf_stream_native(stream) != NULL);
        lf_stream_close(stream);
    }
    lf_stream *stream = (lf_stream *)1;
    CHECK_STATUS(lf_stream_open(device, info.priority_high - 1, &stream), LF_ERR_INVALID);
    CHECK(!stream);
    CHECK_STATUS(lf_stream_open(device, info.priority_low + 1, &stream), LF_ERR_INVALID);
    lf_stream_close(NULL);
    lf_device_close(device);
}

TEST(cuda_wrapped_streams_are_not_destroyed)
{
    lf_device *device = open_cuda();
    lf_stream *own, *lent, *legacy;
    void *p;
    CHECK_OK(lf_device_alloc(device, 1000, &p));
    CHECK_OK(lf_stream_open(device, 0, &own));
    CHECK_OK(lf_stream_wrap(device, lf_stream_native(own), &lent));
    CHECK(lf_stream_native(lent) == lf_stream_native(own));
    CHECK_OK(lf_fill(device, p, 1, 1000, lent));
    lf_stream_close(lent);
    CHECK_OK(lf_fill(device, p, 2, 500, own));
    CHECK_OK(lf_stream_sync(own));
    CHECK_EQ(byte_at(device, p, 499), 2);
    CHECK_EQ(byte_at(device, p, 500), 1);
    CHECK_OK(lf_stream_wrap(device, NULL, &legacy)); /* PyTorch's default stream */
    CHECK(lf_stream_native(legacy) == NULL);
    CHECK_OK(lf_fill(device, p, 3, 1000, legacy));
    CHECK_OK(lf_stream_sync(legacy));
    CHECK_EQ(byte_at(device, p, 0), 3);
    lf_stream_close(legacy);
    lf_stream_close(own);
    lf_device_free(device, p);
    lf_device_close(device);
}

typedef struct tally {
    _Atomic int32_t n;
    int32_t seen[200];
} tally;

static lf_status append(void *user)
{
    tally *t = user;
    int32_t n = atomic_load(&t->n);
    t->seen[n] = n;
    atomic_store(&t->n, n + 1);
    return LF_OK;
}

TEST(cuda_host_functions_run_in_order)
{
    lf_device *device = open_cuda();
    lf_stream *stream;
    static tally t;
    memset(&t, 0, sizeof t);
    CHECK_OK(lf_stream_open(device, 0, &stream));
    for (int32_t i = 0; i < 200; i++) CHECK_OK(lf_stream_run(stream, append, &t));
    CHECK_OK(lf_stream_sync(stream));
    CHECK_EQ(t.n, 200);
    for (int32_t i = 0; i < 200; i++) CHECK_EQ(t.seen[i], i);
    CHECK_OK(lf_stream_run(NULL, append, &(tally){0})); /* now */
    lf_stream_close(stream);
    lf_device_close(device);
}

static lf_status fail(void *user)
{
    (void)user;
    return LF_FAIL(LF_ERR_IO, "planted failure");
}

TEST(cuda_host_errors_are_told_once)
{
    lf_device *device = open_cuda();
    lf_stream *stream;
    static tally t;
    memset(&t, 0, sizeof t);
    CHECK_OK(lf_stream_open(device, 0, &stream));
    CHECK_OK(lf_stream_run(stream, append, &t));
    CHECK_OK(lf_stream_run(stream, fail, NULL));
    CHECK_OK(lf_stream_run(stream, append, &t)); /* skipped */
    CHECK_STATUS(lf_stream_sync(stream), LF_ERR_IO);
    CHECK_HAS(lf_error_text(), "planted failure");
    CHECK_EQ(t.n, 1);
    CHECK_OK(lf_stream_sync(stream));
    CHECK_OK(lf_stream_run(stream, append, &t));
    CHECK_OK(lf_stream_sync(stream));
    CHECK_EQ(t.n, 2);
    CHECK_STATUS(lf_stream_run(NULL, fail, NULL), LF_ERR_IO);
    lf_stream_close(stream);
    lf_device_close(device);
}

/* ---- events ---------------------------------------------------------------------------------------------------------- */

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

TEST(cuda_streams_overlap_and_events_order_them)
{
    lf_device *device = open_cuda();
    lf_stream *first, *second;
    lf_event *event, *behind;
    gate g = {lf__mutex_open(), false};
    uint8_t *p; /* pinned: the host reads what the device has done */
    CHECK_OK(lf_host_alloc(device, 1000, (void **)&p));
    CHECK_OK(lf_stream_open(device, 0, &first));
    CHECK_OK(lf_stream_open(device, 0, &second));
    CHECK_OK(lf_event_open(device, &event));
    CHECK_OK(lf_event_open(device, &behind));
    CHECK_OK(lf_event_query(event)); /* never recorded: done */
    CHECK_OK(lf_event_sync(event));
    CHECK_OK(lf_stream_wait(second, event));

    CHECK_OK(lf_stream_run(first, pass_gate, &g));
    CHECK_OK(lf_event_record(event, first));
    CHECK_OK(lf_fill(device, p, 1, 1000, second)); /* not behind the gate */
    CHECK_OK(lf_stream_sync(second));
    CHECK_EQ(p[999], 1);
    CHECK_STATUS(lf_event_query(event), LF_AGAIN);

    CHECK_OK(lf_stream_wait(second, event));
    CHECK_OK(lf_fill(device, p, 2, 1000, second));
    CHECK_OK(lf_event_record(behind, second));
    lf__sleep_ns(2000000);
    CHECK_STATUS(lf_event_query(behind), LF_AGAIN); /* waits */
    CHECK_EQ(p[999], 1);
    open_gate(&g);
    CHECK_OK(lf_event_sync(behind));
    CHECK_EQ(p[999], 2);
    CHECK_OK(lf_event_query(event));
    lf_event_close(event);
    lf_event_close(behind);
    lf_stream_close(first);
    lf_stream_close(second);
    lf_host_free(device, p);
    lf__mutex_close(g.mutex);
    lf_device_close(device);
}

TEST(cuda_an_event_closed_while_queued_is_safe)
{
    lf_device *device = open_cuda();
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

static lf_status nap(void *user)
{
    (void)user;
    lf__sleep_ns(5000000);
    return LF_OK;
}

TEST(cuda_elapsed_time_needs_two_records)
{
    lf_device *device = open_cuda();
    lf_stream *stream;
    lf_event *a, *b;
    double seconds = -1;
    gate g = {lf__mutex_open(), false};
    CHECK_OK(lf_stream_open(device, 0, &stream));
    CHECK_OK(lf_event_open(device, &a));
    CHECK_OK(lf_event_open(device, &b));
    CHECK_OK(lf_event_record(a, stream));
    CHECK_STATUS(lf_event_elapsed(a, b, &seconds), LF_ERR_STATE);
    CHECK_HAS(lf_error_text(), "second event");
    CHECK_OK(lf_stream_run(stream, nap, NULL));
    CHECK_OK(lf_stream_run(stream, pass_gate, &g));
    CHECK_OK(lf_event_record(b, stream));
    CHECK_STATUS(lf_event_elapsed(a, b, &seconds), LF_AGAIN);
    open_gate(&g);
    CHECK_OK(lf_event_sync(b));
    CHECK_OK(lf_event_elapsed(a, b, &seconds));
    CHECK(seconds >= 0.004 && seconds < 60); /* what lies between them sleeps 5 ms */
    lf_event_close(a);
    lf_event_close(b);
    lf_stream_close(stream);
    lf__mutex_close(g.mutex);
    lf_device_close(device);
}

/* ---- threads --------------------------------------------------------------------------------------------------------- */

typedef struct worker {
    lf_device *device;
    lf_status rc;
    uint8_t got;
} worker;

/* A thread that has never used CUDA. */
static void work(void *user)
{
    worker *w = user;
    lf_stream *stream = NULL;
    void *p = NULL;
    lf_status rc;
    LF_TRY(lf_device_alloc(w->device, 4096, &p));
    LF_TRY(lf_stream_open(w->device, 0, &stream));
    LF_TRY(lf_fill(w->device, p, 42, 4096, stream));
    LF_TRY(lf_stream_sync(stream));
    LF_TRY(lf_copy(w->device, &w->got, (char *)p + 4095, 1, NULL));
out:
    lf_stream_close(stream);
    lf_device_free(w->device, p);
    w->rc = rc;
}

TEST(cuda_any_thread_may_call)
{
    worker w[4];
    lf_device *device = open_cuda();
    lf__thread *thread[4];
    for (int32_t i = 0; i < 4; i++) {
        w[i] = (worker){device, LF_ERR_STATE, 0};
        CHECK_OK(lf__thread_start(&thread[i], "worker", work, &w[i]));
    }
    for (int32_t i = 0; i < 4; i++) lf__thread_join(thread[i]);
    for (int32_t i = 0; i < 4; i++) {
        CHECK_OK(w[i].rc);
        CHECK_EQ(w[i].got, 42);
    }
    lf_device_close(device);
}

/* ---- captures --------------------------------------------------------------------------------------------------------- */

/* The driver's calls that capture: through the loader, so that nothing here links against CUDA. */
static struct {
    int (*begin)(void *, int), (*end)(void *, void **), (*instantiate)(void **, void *, unsigned long long),
        (*launch)(void *, void *);
} driver;

static void find_driver(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    CHECK(library != NULL);
    *(void **)&driver.begin = dlsym(library, "cuStreamBeginCapture_v2");
    *(void **)&driver.end = dlsym(library, "cuStreamEndCapture");
    *(void **)&driver.instantiate = dlsym(library, "cuGraphInstantiateWithFlags");
    *(void **)&driver.launch = dlsym(library, "cuGraphLaunch");
    CHECK(driver.begin && driver.end && driver.instantiate && driver.launch);
}

typedef struct watch {
    lf_device *device;
    lf_event *event;
    _Atomic bool stop;
    lf_status rc;
} watch;

static void watch_event(void *user)
{
    watch *w = user;
    lf__device_watch_only(w->device);
    while (!w->stop && w->rc >= 0) w->rc = lf_event_query(w->event);
}

/* Work of another stream joins a capture through a mark, and comes back by another; a thread that watches events, in the strictest
 * mode of capture, breaks nothing. */
TEST(cuda_marks_spread_a_capture)
{
    enum { BYTES = 1 << 20, GLOBAL = 0 };
    lf_device *device = open_cuda();
    lf_stream *a = NULL, *b = NULL;
    lf_event *fork = NULL, *join = NULL, *outside = NULL, *timed = NULL;
    lf__thread *thread;
    void *p = NULL, *graph = NULL, *exec = NULL;
    uint64_t id = 99;
    find_driver();
    CHECK_OK(lf_stream_open(device, 0, &a));
    CHECK_OK(lf_stream_open(device, 0, &b));
    CHECK_OK(lf_event_open(device, &fork));
    CHECK_OK(lf_event_open(device, &join));
    CHECK_OK(lf_event_open(device, &outside));
    CHECK_OK(lf_event_open(device, &timed));
    CHECK_OK(lf_device_alloc(device, BYTES, &p));
    CHECK_OK(lf_fill(device, p, 1, BYTES, NULL));
    CHECK_OK(lf_event_record(outside, b));
    watch w = {.device = device, .event = outside};
    CHECK_OK(lf__thread_start(&thread, "watch", watch_event, &w));
    CHECK_OK(lf__stream_capture(a, &id));
    CHECK_EQ(id, 0);
    CHECK_EQ(driver.begin(lf_stream_native(a), GLOBAL), 0);
    CHECK_OK(lf__stream_capture(a, &id));
    CHECK(id != 0);
    CHECK_OK(lf_fill(device, p, 2, BYTES, a));
    CHECK_OK(lf__event_mark(fork, a));
    CHECK_OK(lf_stream_wait(b, fork));
    uint64_t other = 0;
    CHECK_OK(lf__stream_capture(b, &other));
    CHECK_EQ(other, id);
    CHECK_OK(lf_fill(device, p, 3, BYTES / 2, b));
    CHECK_OK(lf__event_mark(join, b));
    CHECK_OK(lf_stream_wait(a, join));
    CHECK_OK(lf_fill(device, (char *)p + BYTES / 2, 4, BYTES / 4, a));
    CHECK_OK(lf_event_record(timed, a));
    CHECK_EQ(driver.end(lf_stream_native(a), &graph), 0);
    w.stop = true;
    lf__thread_join(thread);
    CHECK_OK(w.rc == LF_AGAIN ? LF_OK : w.rc);
    CHECK_OK(lf__stream_capture(b, &id));
    CHECK_EQ(id, 0);
    CHECK_EQ(byte_at(device, p, 0), 1); /* nothing ran */
    CHECK_EQ(driver.instantiate(&exec, graph, 0), 0);
    for (int32_t i = 0; i < 3; i++) {
        CHECK_OK(lf_fill(device, p, 9, BYTES, NULL));
        CHECK_EQ(driver.launch(exec, lf_stream_native(a)), 0);
        CHECK_OK(lf_stream_sync(a));
        check_all(device, p, BYTES / 2, 3);
        check_all(device, (char *)p + BYTES / 2, BYTES / 4, 4);
        check_all(device, (char *)p + BYTES / 4 * 3, BYTES / 4, 2);
        CHECK_OK(lf_event_query(timed)); /* recorded by the replay */
    }
    CHECK_OK(lf__event_mark(fork, a)); /* outside a capture it is an ordinary record again */
    CHECK_OK(lf_event_sync(fork));
    lf_device_free(device, p);
    lf_event_close(fork);
    lf_event_close(join);
    lf_event_close(outside);
    lf_event_close(timed);
    lf_stream_close(a);
    lf_stream_close(b);
    lf_device_close(device);
}

/* Another thread's current device comes back as it was. */
TEST(cuda_enter_and_leave)
{
    lf_device *device = open_cuda();
    int32_t before = -7, again = -7;
    CHECK_OK(lf__device_enter(device, &before));
    CHECK_OK(lf__device_enter(device, &again));
    CHECK_EQ(again, 0);
    lf__device_leave(device, again);
    lf__device_leave(device, before);
    lf_device_close(device);
}

LF_TEST_MAIN
