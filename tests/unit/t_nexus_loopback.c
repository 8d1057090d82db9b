/* SPDX-License-Identifier: Apache-2.0 */
/* The loopback transport: exact sums, ends that disagree, are late, or go away. */
#include "nexus_ranks.h"

enum { MOST = 8 };

/* Closed when all are back: an end that goes away fails the others. */
static void run_world(int32_t world, void (*run)(rank *))
{
    lf_transport ends[MOST];
    prepare(world, NULL, run);
    for (int32_t i = 0; i < world; i++) {
        ends[i] = ranks[i].t;
        ranks[i].t.close = NULL;
    }
    run_ranks(world);
    for (int32_t i = 0; i < world; i++) ends[i].close(ends[i].user);
}

/* ---- sums ---- */

static const int32_t dtypes[] = {LF_DTYPE_F32, LF_DTYPE_BF16, LF_DTYPE_F64, LF_DTYPE_I64};
static const int64_t counts[] = {0, 1, 3, 1023, 1024, 1025, 5000};
enum { N_OPS = 4 * 7 * 5 };

static void post_all_then_wait(rank *r)
{
    void *data[N_OPS];
    int64_t ticket[N_OPS];
    for (int32_t op = 0; op < N_OPS; op++) {
        const int32_t dtype = dtypes[op % 4];
        const int64_t n = counts[op % 7];
        data[op] = lf__alloc((size_t)n * 8 + 8);
        for (int64_t i = 0; i < n; i++) put(data[op], i, dtype, eighths(r->t.rank, op, i));
        if (r->status == LF_OK) r->status = r->t.post(r->t.user, data[op], n, dtype, NULL, &ticket[op]);
    }
    for (int32_t op = 0; op < N_OPS && r->status == LF_OK; op++) r->status = r->t.wait(r->t.user, ticket[op], NULL, 30);
    for (int32_t op = 0; op < N_OPS; op++) {
        const int32_t dtype = dtypes[op % 4];
        for (int64_t i = 0; i < counts[op % 7]; i++) {
            float sum = 0;
            for (int32_t k = 0; k < r->t.world; k++)
                sum += dtype == LF_DTYPE_I64 ? (float)(int64_t)eighths(k, op, i) : eighths(k, op, i);
            double want = dtype == LF_DTYPE_BF16 ? (double)lf__f32_from_bf16(lf__bf16_from_f32(sum)) : (double)sum;
            if (get(data[op], i, dtype) != want)
                WRONG("operation %d element %d: %g, expected %g", op, (int)i, get(data[op], i, dtype), want);
        }
        lf__free(data[op]);
    }
}

TEST(loopback_sums_exactly)
{
    for (int32_t world = 1; world <= MOST; world++) {
        run_world(world, post_all_then_wait);
        all_are(world, LF_OK);
    }
}

/* Parts: the sum of this rank's only, and every rank's as it is. */
static void scatter_and_gather(rank *r)
{
    const int32_t world = r->t.world;
    for (int32_t k = 0; k < 4 && r->status == LF_OK; k++) {
        const int64_t part = 1500, n = part * world;
        void *data = lf__alloc((size_t)n * 8);
        int64_t ticket = 0;
        for (int64_t i = 0; i < n; i++) put(data, i, dtypes[k], eighths(r->t.rank, k, i));
        r->status = r->t.scatter(r->t.user, data, n, dtypes[k], NULL, &ticket);
        if (r->status == LF_OK) r->status = r->t.wait(r->t.user, ticket, NULL, 30);
        if (r->status == LF_OK) r->status = r->t.gather(r->t.user, data, n, dtypes[k], NULL, &ticket);
        if (r->status == LF_OK) r->status = r->t.wait(r->t.user, ticket, NULL, 30);
        for (int64_t i = 0; i < n && r->status == LF_OK; i++) {
            float sum = 0;
            for (int32_t s = 0; s < world; s++)
                sum += dtypes[k] == LF_DTYPE_I64 ? (float)(int64_t)eighths(s, k, i) : eighths(s, k, i);
            double want = dtypes[k] == LF_DTYPE_BF16 ? (double)lf__f32_from_bf16(lf__bf16_from_f32(sum)) : (double)sum;
            if (get(data, i, dtypes[k]) != want) WRONG("%s element %d: %g", lf_dtype_name(dtypes[k]), (int)i, want);
        }
        if (world > 1 && r->t.scatter(r->t.user, data, n + 1, dtypes[k], NULL, &ticket) != LF_ERR_INVALID) WRONG("uneven parts");
        lf__free(data);
    }
}

TEST(loopback_scatters_and_gathers)
{
    for (int32_t world = 1; world <= MOST; world++) {
        run_world(world, scatter_and_gather);
        all_are(world, LF_OK);
    }
}

/* Rank order, rounded once: 1 + 2^-8 + 2^-8 in bf16 is 1 + 2^-7 only when summed in f32. */
static void bf16_once(rank *r)
{
    uint16_t x = lf__bf16_from_f32(r->t.rank == 0 ? 1 : 0x1p-8f);
    int64_t ticket;
    r->status = r->t.post(r->t.user, &x, 1, LF_DTYPE_BF16, NULL, &ticket);
    if (r->status == LF_OK) r->status = r->t.wait(r->t.user, ticket, NULL, 30);
    if (lf__f32_from_bf16(x) != 1 + 0x1p-7f) WRONG("sum is %g", (double)lf__f32_from_bf16(x));
}
TEST(loopback_rounds_bf16_once) { run_world(3, bf16_once); }

/* ---- data that a stream makes later ---- */

static lf_status make_data(void *user)
{
    lf__sleep_ns(20000000);
    *(float *)user = 5;
    return LF_OK;
}

static void post_behind_stream(rank *r)
{
    lf_stream *stream = NULL;
    float x = -100;
    int64_t ticket = 0;
    r->status = lf_stream_open(device, 0, &stream);
    if (r->status == LF_OK) r->status = lf_stream_run(stream, make_data, &x);
    if (r->status == LF_OK) r->status = r->t.post(r->t.user, &x, 1, LF_DTYPE_F32, stream, &ticket);
    if (r->status == LF_OK) r->status = r->t.wait(r->t.user, ticket, stream, 30);
    if (x != 10) WRONG("sum is %g", (double)x);
    lf_stream_close(stream);
}
TEST(loopback_waits_for_the_stream) { run_world(2, post_behind_stream); }

/* ---- trouble ---- */

static float shared_x[MOST][8];

static lf_status one_op(rank *r, int64_t n, double timeout_s)
{
    int64_t ticket;
    lf_status rc = r->t.post(r->t.user, shared_x[r->t.rank], n, LF_DTYPE_F32, NULL, &ticket);
    return rc < 0 ? rc : r->t.wait(r->t.user, ticket, NULL, timeout_s);
}

static void rank_2_is_late(rank *r)
{
    if (r->t.rank == 2) lf__sleep_ns(300000000);
    r->status = one_op(r, 1, r->t.rank == 0 ? 0.05 : 10);
}

TEST(loopback_timeout_names_the_late_rank)
{
    run_world(3, rank_2_is_late);
    CHECK_EQ(ranks[0].status, LF_ERR_TIMEOUT);
    CHECK_HAS(ranks[0].text, "rank 2 has not posted");
    for (int32_t i = 1; i < 3; i++) {
        CHECK_EQ(ranks[i].status, LF_ERR_PEER);
        CHECK_HAS(ranks[i].text, "rank 0 gave up");
    }
}

static void rank_1_disagrees(rank *r) { r->status = one_op(r, r->t.rank == 1 ? 3 : 2, 10); }

TEST(loopback_finds_different_operations)
{
    run_world(4, rank_1_disagrees);
    for (int32_t i = 0; i < 4; i++) {
        CHECK_EQ(ranks[i].status, LF_ERR_PEER);
        CHECK_HAS(ranks[i].text, "operation 0 is a sum of 3 f32 on rank 1 and a sum of 2 f32 on rank 0");
    }
}

static void rank_1_gathers(rank *r)
{
    int64_t ticket;
    const bool other = r->t.rank == 1;
    r->status = (other ? r->t.gather : r->t.scatter)(r->t.user, shared_x[r->t.rank], 8, LF_DTYPE_F32, NULL, &ticket);
    if (r->status == LF_OK) r->status = r->t.wait(r->t.user, ticket, NULL, 10);
}

TEST(loopback_finds_different_kinds)
{
    run_world(2, rank_1_gathers);
    for (int32_t i = 0; i < 2; i++) {
        CHECK_EQ(ranks[i].status, LF_ERR_PEER);
        CHECK_HAS(ranks[i].text, "a gather of 8 f32 on rank 1 and a scatter of 8 f32 on rank 0");
    }
}

TEST(loopback_closed_end_fails_the_others)
{
    lf_transport ends[2];
    float x[2] = {1, 2};
    int64_t ticket[2];
    CHECK_OK(lf_loopback_open(2, ends));
    for (int32_t i = 0; i < 2; i++) CHECK_OK(ends[i].post(ends[i].user, &x[i], 1, LF_DTYPE_F32, NULL, &ticket[i]));
    CHECK_OK(ends[1].wait(ends[1].user, ticket[1], NULL, 10));
    ends[1].close(ends[1].user);
    CHECK_OK(ends[0].wait(ends[0].user, ticket[0], NULL, 10)); /* done before the end went away */
    CHECK(x[0] == 3 && x[1] == 3);
    CHECK_STATUS(ends[0].post(ends[0].user, &x[0], 1, LF_DTYPE_F32, NULL, &ticket[0]), LF_ERR_PEER);
    CHECK_HAS(lf_error_text(), "rank 1 closed");
    ends[0].close(ends[0].user);
}

static lf_status leave_soon(void *user)
{
    lf_transport *end = user;
    lf__sleep_ns(30000000);
    end->close(end->user);
    return LF_OK;
}
static void leave(void *user) { leave_soon(user); }

TEST(loopback_closed_end_wakes_a_waiter)
{
    lf_transport ends[2];
    float x = 1;
    int64_t ticket;
    lf__thread *other;
    CHECK_OK(lf_loopback_open(2, ends));
    CHECK_OK(ends[0].post(ends[0].user, &x, 1, LF_DTYPE_F32, NULL, &ticket));
    CHECK_STATUS(ends[0].query(ends[0].user, ticket), LF_AGAIN);
    CHECK_OK(lf__thread_start(&other, "leaver", leave, &ends[1]));
    CHECK_STATUS(ends[0].wait(ends[0].user, ticket, NULL, 60), LF_ERR_PEER);
    lf__thread_join(other);
    ends[0].close(ends[0].user);
}

/* After an error the data is the caller's again: the other end's late arrival must not write to it. */
TEST(loopback_does_not_touch_withdrawn_data)
{
    lf_transport ends[2];
    float *gone = lf__alloc(sizeof *gone), y = 2;
    int64_t ticket[2];
    CHECK_OK(lf_loopback_open(2, ends));
    CHECK_OK(ends[0].post(ends[0].user, gone, 1, LF_DTYPE_F32, NULL, &ticket[0]));
    CHECK_STATUS(ends[0].wait(ends[0].user, ticket[0], NULL, 0.01), LF_ERR_TIMEOUT);
    lf__free(gone);
    CHECK_STATUS(ends[1].post(ends[1].user, &y, 1, LF_DTYPE_F32, NULL, &ticket[1]), LF_ERR_PEER);
    for (int32_t i = 0; i < 2; i++) ends[i].close(ends[i].user);
}

TEST(loopback_refuses)
{
    lf_transport ends[1];
    float x;
    int64_t ticket;
    CHECK_STATUS(lf_loopback_open(0, ends), LF_ERR_INVALID);
    CHECK_STATUS(lf_loopback_open(65, ends), LF_ERR_INVALID);
    CHECK_OK(lf_loopback_open(1, ends));
    CHECK_STATUS(ends[0].post(ends[0].user, &x, 1, LF_DTYPE_U8, NULL, &ticket), LF_ERR_INVALID);
    CHECK_STATUS(ends[0].post(ends[0].user, NULL, 1, LF_DTYPE_F32, NULL, &ticket), LF_ERR_INVALID);
    CHECK_STATUS(ends[0].wait(ends[0].user, 0, NULL, 1), LF_ERR_INVALID);
    CHECK_STATUS(ends[0].query(ends[0].user, 0), LF_ERR_INVALID);
    ends[0].close(ends[0].user);
    for (int64_t at = 1; at < 5; at++) {
        lf_transport pair[2];
        lf__alloc_fail_at(at);
        CHECK_STATUS(lf_loopback_open(2, pair), LF_ERR_NOMEM);
        lf__alloc_fail_at(0);
    }
}

LF_TEST_MAIN
