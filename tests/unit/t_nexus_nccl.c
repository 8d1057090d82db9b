/* SPDX-License-Identifier: Apache-2.0 */
/* The NCCL transport over a fake NCCL on a fake CUDA device: sums, order, runs, options, libraries, and what it refuses. */
#include "nexus_nccl_fixture.h"

enum { MOST = 4, ROOM = 10000 };

static const int32_t dtypes[] = {LF_DTYPE_F32, LF_DTYPE_BF16, LF_DTYPE_I64}; /* f64: t_nexus_nccl_steps.c */
static const int64_t counts[] = {0, 1, 3, 4095, 4096, 9999};
enum { N_OPS = 18 };

static void fill(const rank *r, void **data)
{
    for (int32_t op = 0; op < N_OPS; op++) {
        data[op] = lf__alloc(ROOM * 8);
        for (int64_t i = 0; i < counts[op % 6]; i++) put(data[op], i, dtypes[op % 3], eighths(r->t.rank, op, i));
    }
}

static void check(rank *r, void **data, float divisor)
{
    for (int32_t op = 0; op < N_OPS; op++) {
        const int32_t dtype = dtypes[op % 3];
        for (int64_t i = 0; i < counts[op % 6]; i++) {
            float want = 0;
            for (int32_t k = 0; k < r->t.world; k++)
                want += dtype == LF_DTYPE_I64 ? (float)(int64_t)eighths(k, op, i) : eighths(k, op, i) / divisor;
            if (dtype == LF_DTYPE_BF16) want = lf__f32_from_bf16(lf__bf16_from_f32(want));
            if (get(data[op], i, dtype) != (double)want)
                WRONG("operation %d element %d: %g, expected %g", op, (int)i, get(data[op], i, dtype), (double)want);
        }
        lf__free(data[op]);
    }
}

/* A third of the operations alone, the others in runs of five and seven. */
static void post_all_then_wait(rank *r)
{
    void *data[N_OPS];
    int64_t ticket[N_OPS];
    fill(r, data);
    for (int32_t op = 0; op < N_OPS && r->status == LF_OK; op++) {
        if (op == 6 || op == 11) r->status = r->t.run(r->t.user, 1, "a test's run");
        if (r->status == LF_OK)
            r->status = r->t.post(r->t.user, data[op], counts[op % 6], dtypes[op % 3], r->stream, &ticket[op]);
        if (r->status == LF_OK && (op == 10 || op == 17)) r->status = r->t.run(r->t.user, 0, "a test's run");
    }
    for (int32_t op = 0; op < N_OPS && r->status == LF_OK; op++) r->status = r->t.wait(r->t.user, ticket[op], r->stream, 30);
    if (r->status == LF_OK) r->status = lf_stream_sync(r->stream);
    if (r->status == LF_OK && ticket[6] != ticket[10]) WRONG("a run has several tickets");
    if (r->status == LF_OK && r->t.query(r->t.user, ticket[17]) != LF_OK) WRONG("the last run is not known to be done");
    check(r, data, r->t.mean ? (float)r->t.world : 1);
}

TEST(nccl_sums)
{
    for (int32_t how = 0; how < 3; how++)
        for (int32_t world = 1; world <= MOST; world++) {
            prepare_nccl(world, NULL, post_all_then_wait);
            for (int32_t i = 0; i < world; i++) {
                ranks[i].opts.nccl_blocking = how != 1;
                if (how == 2 && world != 3) snprintf(ranks[i].opts.reduce, LF_TEXT_MAX, "mean"); /* thirds are not exact */
            }
            run_ranks(world);
            all_are(world, LF_OK);
            CHECK_EQ(fake.count("blocking"), how != 1);
            for (int32_t i = 0; i < world; i++) CHECK_EQ(ranks[i].t.mean, how == 2 && world != 3 && world > 1);
        }
    CHECK_EQ(fake.count("aborts"), 0);
}

/* Versions before 2.14 have one way to open, and no limits. */
TEST(nccl_opens_old_versions)
{
    prepare_nccl(2, NULL, post_all_then_wait);
    plant("version", 21003);
    run_ranks(2);
    all_are(2, LF_OK);
    prepare_nccl(1, NULL, post_all_then_wait);
    plant("version", 21600);
    ranks[0].opts.max_ctas = 4;
    run_ranks(1);
    CHECK_EQ(ranks[0].status, LF_ERR_UNSUPPORTED);
    CHECK_HAS(ranks[0].text, "max_ctas is 4, which NCCL 2.16.0 cannot limit");
}

TEST(nccl_takes_its_options)
{
    prepare_nccl(2, NULL, post_all_then_wait);
    for (int32_t i = 0; i < 2; i++) {
        ranks[i].opts.max_ctas = 6;
        ranks[i].opts.priority = -3;
    }
    run_ranks(2);
    all_are(2, LF_OK);
    CHECK_EQ(fake.count("max_ctas"), 6);
    CHECK_EQ(fake.last_priority(), -3);
    prepare_nccl(1, NULL, post_all_then_wait);
    ranks[0].opts.priority = 3;
    run_ranks(1);
    CHECK_EQ(ranks[0].status, LF_ERR_INVALID);
    CHECK_HAS(ranks[0].text, "stream priority 3");
}

/* ---- order between streams ---- */

static lf_status make_data(void *user)
{
    lf__sleep_ns(30000000);
    *(float *)user = 5;
    return LF_OK;
}

/* The sum comes behind the data and in front of what follows; the host waits for neither. */
static void in_stream_order(rank *r)
{
    float x = -100, after = 0;
    int64_t ticket = 0;
    r->status = lf_stream_run(r->stream, make_data, &x);
    if (r->status == LF_OK) r->status = r->t.post(r->t.user, &x, 1, LF_DTYPE_F32, r->stream, &ticket);
    if (r->status == LF_OK) r->status = r->t.wait(r->t.user, ticket, r->stream, 30);
    if (r->t.query(r->t.user, ticket) != LF_AGAIN) WRONG("posting or waiting kept the host");
    if (r->status == LF_OK) r->status = lf_copy(device, &after, &x, sizeof x, r->stream);
    if (r->status == LF_OK) r->status = lf_stream_sync(r->stream);
    if (after != 10) WRONG("behind the sum is %g", (double)after);
}
TEST(nccl_orders_streams)
{
    prepare_nccl(2, NULL, in_stream_order);
    run_ranks(2);
    all_are(2, LF_OK);
}

/* A host far ahead of the device: more runs than the ring has at first; waits come in order and late. */
static void far_ahead(rank *r)
{
    enum { RUNS = 700 };
    static float x[MOST][RUNS];
    int64_t ticket[RUNS];
    lf_nexus_stats stats = {.size = sizeof stats};
    for (int32_t i = 0; i < RUNS; i++) x[r->t.rank][i] = (float)(r->t.rank + i);
    for (int32_t i = 0; i < RUNS && r->status == LF_OK; i++)
        r->status = r->t.post(r->t.user, &x[r->t.rank][i], 1, LF_DTYPE_F32, NULL, &ticket[i]);
    for (int32_t i = 0; i < RUNS && r->status == LF_OK; i++) r->status = r->t.wait(r->t.user, ticket[i], r->stream, 30);
    if (r->status == LF_OK) r->status = r->t.settle(r->t.user, 30);
    for (int32_t i = 0; i < RUNS; i++)
        if (x[r->t.rank][i] != (float)(2 * i + 1)) WRONG("sum %d is %g", i, (double)x[r->t.rank][i]);
    if (r->status == LF_OK) r->status = r->t.stats(r->t.user, &stats);
    if (stats.collectives != RUNS || stats.bytes != 4 * RUNS || !(stats.busy_s > 0 && stats.p99_s >= stats.p50_s))
        WRONG("statistics: %d collectives, %d bytes, %g s", (int)stats.collectives, (int)stats.bytes, stats.busy_s);
}
TEST(nccl_lets_the_host_run_ahead)
{
    prepare_nccl(2, NULL, far_ahead);
    run_ranks(2);
    all_are(2, LF_OK);
}

/* Neighbours of a run are one call; a gap, another dtype, another collective and the end of a run part them. */
static void joined(rank *r)
{
    enum { N = 4096 };
    static _Alignas(8) float x[MOST][2 * N];
    float *data = x[r->t.rank];
    int64_t ticket[2], whole[N / 32];
    for (int32_t i = 0; i < 2 * N; i++) data[i] = (float)(i % 7 + r->t.rank);
    for (int32_t i = 0; i < N / 32; i++) whole[i] = i + r->t.rank;
    for (int32_t run = 0; run < 2 && r->status == LF_OK; run++) {
        float *from = data + run * N;
        memcpy(from + 7 * N / 16, whole, sizeof whole);
        r->status = r->t.run(r->t.user, 1, "neighbours");
        for (int32_t at = 0; at < N && r->status == LF_OK; at += N / 8) /* 3 and 4 neighbours around a gap */
            if (at != 3 * N / 8) r->status = r->t.post(r->t.user, from + at, N / 8, LF_DTYPE_F32, r->stream, &ticket[run]);
        if (r->status == LF_OK)
            r->status = r->t.scatter(r->t.user, from + 3 * N / 8, N / 16, LF_DTYPE_F32, r->stream, &ticket[run]);
        if (r->status == LF_OK)
            r->status = r->t.post(r->t.user, from + 7 * N / 16, N / 32, LF_DTYPE_I64, r->stream, &ticket[run]);
        if (r->status == LF_OK) r->status = r->t.run(r->t.user, 0, NULL);
    }
    for (int32_t run = 0; run < 2 && r->status == LF_OK; run++) r->status = r->t.wait(r->t.user, ticket[run], r->stream, 30);
    if (r->status == LF_OK) r->status = lf_stream_sync(r->stream);
    for (int32_t i = 0; i < 2 * N; i++)
        if (i % N / (N / 8) != 3 && data[i] != (float)(2 * (i % 7) + 1)) WRONG("sum %d is %g", i, (double)data[i]);
    for (int32_t run = 0; run < 2; run++) {
        memcpy(whole, data + run * N + 7 * N / 16, sizeof whole);
        for (int32_t i = 0; i < N / 32; i++)
            if (whole[i] != 2 * i + 1) WRONG("whole sum %d is %lld", i, (long long)whole[i]);
    }
}
TEST(nccl_joins_neighbours)
{
    prepare_nccl(2, NULL, joined);
    const long calls = fake.count("calls");
    run_ranks(2);
    all_are(2, LF_OK);
    CHECK_EQ(fake.count("calls") - calls, 2 * 2 * 4); /* ranks, runs, calls */
}

/* ---- libraries ---- */

TEST(nccl_finds_a_library_or_says_why)
{
    set_up_fakes();
    lf_nexus_options o;
    int32_t version = 0;
    char text[32];
    nccl_options(&o);
    CHECK_OK(lf_nccl_version(&o, &version, text, sizeof text));
    CHECK_EQ(version, 22809);
    CHECK_STR(text, "2.28.9");
    plant("version", 2804);
    CHECK_STATUS(lf_nccl_version(&o, &version, NULL, 0), LF_ERR_UNSUPPORTED);
    CHECK_HAS(lf_error_text(), "libnccl.so.2 is NCCL 2.8.4, expected 2.10.0 or newer");
    CHECK_STATUS(lf_nccl_id(&o, nccl_id), LF_ERR_UNSUPPORTED);
    plant("version", 22809);
    snprintf(o.nccl_library, LF_TEXT_MAX, "libnccl_part.so");
    CHECK_STATUS(lf_nccl_version(&o, &version, NULL, 0), LF_ERR_UNSUPPORTED);
    CHECK_HAS(lf_error_text(), "libnccl_part.so has no function ncclCommAbort");
    snprintf(o.nccl_library, LF_TEXT_MAX, "/nowhere/libnccl.so.2");
    CHECK_STATUS(lf_nccl_version(&o, &version, NULL, 0), LF_ERR_UNSUPPORTED);
    CHECK_HAS(lf_error_text(), "no NCCL: /nowhere/libnccl.so.2: cannot open");
    snprintf(o.nccl_library, LF_TEXT_MAX, "libloongforge_cuda.so");
    CHECK_STATUS(lf_nccl_version(&o, &version, NULL, 0), LF_ERR_UNSUPPORTED);
    CHECK_HAS(lf_error_text(), "has no function ncclGetVersion");
}

TEST(nccl_refuses)
{
    set_up_fakes();
    lf_transport t;
    lf_device *cpu;
    lf_nexus_options o;
    nccl_options(&o);
    CHECK_OK(lf_nccl_id(&o, nccl_id));
    CHECK_OK(lf_device_open(&cpu, "cpu"));
    CHECK_STATUS(lf_nccl_open(&o, cpu, 0, 1, nccl_id, &t), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "the device is cpu");
    lf_device_close(cpu);
    CHECK_STATUS(lf_nccl_open(&o, device, 2, 2, nccl_id, &t), LF_ERR_INVALID);
    CHECK_OK(lf_nccl_open(&o, device, 0, 1, nccl_id, &t));
    float x = 1;
    int64_t ticket = 0;
    CHECK_STATUS(t.post(t.user, &x, 1, LF_DTYPE_F16, NULL, &ticket), LF_ERR_INVALID);
    CHECK_STATUS(t.post(t.user, NULL, 1, LF_DTYPE_F32, NULL, &ticket), LF_ERR_INVALID);
    CHECK_STATUS(t.wait(t.user, 0, NULL, 1), LF_ERR_INVALID);
    CHECK_STATUS(t.query(t.user, 0), LF_ERR_INVALID);
    CHECK_OK(t.post(t.user, &x, 1, LF_DTYPE_F32, NULL, &ticket)); /* misuse ends nothing */
    CHECK_OK(t.wait(t.user, ticket, NULL, 10));
    t.close(t.user);
    for (int64_t at = 1; at < 300; at++) {
        CHECK_OK(lf_nccl_id(&o, nccl_id));
        lf__alloc_fail_at(at);
        const lf_status rc = lf_nccl_open(&o, device, 0, 1, nccl_id, &t);
        lf__alloc_fail_at(0);
        if (rc == LF_OK) {
            t.close(t.user);
            CHECK(at > 5);
            break;
        }
        CHECK_EQ(rc, LF_ERR_NOMEM);
    }
}

/* ---- meeting by file ---- */

static void write_later(void *path)
{
    uint8_t mine[LF_NCCL_ID_BYTES];
    lf__sleep_ns(50000000);
    if (lf_nccl_id_by_file(NULL, path, 0, mine) < 0) fprintf(stderr, "%s\n", lf_error_text());
}

TEST(nccl_ids_go_through_a_file)
{
    set_up_fakes();
    uint8_t other[LF_NCCL_ID_BYTES] = {0};
    lf_nexus_options o;
    lf__thread *writer;
    char path[512];
    nccl_options(&o);
    snprintf(path, sizeof path, "%s", lf_test_path("meet"));
    CHECK_OK(lf__thread_start(&writer, "writer", write_later, path));
    CHECK_OK(lf_nccl_id_by_file(&o, path, 1, other));
    lf__thread_join(writer);
    CHECK(other[0] != 0);
    o.timeout_s = 0.05;
    CHECK_STATUS(lf_nccl_id_by_file(&o, lf_test_path("nobody"), 3, other), LF_ERR_TIMEOUT);
    CHECK_HAS(lf_error_text(), "rank 3:");
    FILE *file = fopen(lf_test_path("else"), "w");
    fputs("something else", file);
    fclose(file);
    CHECK_STATUS(lf_nccl_id_by_file(&o, lf_test_path("else"), 1, other), LF_ERR_FORMAT);
    CHECK_STATUS(lf_nccl_id_by_file(&o, "/nowhere/at/all", 0, other), LF_ERR_NOTFOUND);
}

LF_TEST_MAIN
