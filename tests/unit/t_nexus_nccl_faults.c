/* SPDX-License-Identifier: Apache-2.0 */
/* Faults of NCCL, planted in the fake: peers that stay away, calls that fail or hang; each is an error in time and closing comes back. */
#include "nexus_nccl_fixture.h"

/* Until the error comes, at most ten seconds. */
static void await_error(rank *r)
{
    for (int32_t i = 0; i < 10000 && r->status == LF_OK; i++) {
        lf__sleep_ns(1000000);
        r->status = r->t.check(r->t.user);
    }
}

static float shared_x[2][4];

static void post_and_await_error(rank *r)
{
    int64_t ticket;
    r->status = r->t.run(r->t.user, 1, "experts of layer 3 (chunks 4 to 5 of 9)");
    for (int32_t i = 0; i < 2 && r->status == LF_OK; i++)
        r->status = r->t.post(r->t.user, shared_x[r->t.rank], 2, LF_DTYPE_F32, r->stream, &ticket);
    if (r->status == LF_OK) r->status = r->t.run(r->t.user, 0, "experts of layer 3 (chunks 4 to 5 of 9)");
    if (r->status == LF_OK) r->status = r->t.wait(r->t.user, ticket, r->stream, 10);
    if (r->status == LF_OK) await_error(r);
    if (lf_stream_sync(r->stream) < 0) WRONG("the stream was not let go"); /* the abort ends what was on the device */
    const lf_status later = r->t.post(r->t.user, shared_x[r->t.rank], 2, LF_DTYPE_F32, r->stream, &ticket);
    if (later != r->status) WRONG("a later call answers %s", lf_status_name(later)); /* for good */
}

static void rank_1_stays_away(rank *r)
{
    if (r->t.rank == 1) lf__sleep_ns(1200000000);
    else post_and_await_error(r);
}

TEST(nccl_peer_that_does_not_come_is_an_error_in_time)
{
    prepare_nccl(2, NULL, rank_1_stays_away);
    ranks[0].opts.timeout_s = 0.5;
    const int64_t began = lf__now_ns();
    const long aborts = fake.count("aborts");
    run_ranks(2);
    CHECK_EQ(ranks[0].status, LF_ERR_TIMEOUT);
    CHECK_HAS(ranks[0].text, "rank 0 of 2: experts of layer 3 (chunks 4 to 5 of 9) is not done after");
    CHECK_HAS(ranks[0].text, "2 operations, 16 bytes, run 1 of 1 posted");
    CHECK_EQ(fake.count("aborts"), aborts + 1);
    CHECK(lf__now_ns() - began < 20000000000); /* it ended; how fast depends on the machine */
}

static void rank_1_does_something_else(rank *r)
{
    int64_t ticket;
    r->status = r->t.post(r->t.user, shared_x[r->t.rank], r->t.rank == 1 ? 3 : 2, LF_DTYPE_F32, r->stream, &ticket);
    if (r->status == LF_OK) r->status = r->t.wait(r->t.user, ticket, r->stream, 10);
    if (r->status == LF_OK) await_error(r);
}

TEST(nccl_async_errors_are_told_by_the_next_call)
{
    prepare_nccl(2, NULL, rank_1_does_something_else);
    run_ranks(2);
    all_are(2, LF_ERR_INTERNAL);
    CHECK_HAS(ranks[0].text, "rank 0 of 2: the communicator: invalid usage (5); fake: planted");
    prepare_nccl(2, NULL, post_and_await_error);
    plant("async_error", 6);
    run_ranks(2);
    all_are(2, LF_ERR_PEER);
    CHECK_HAS(ranks[1].text, "rank 1 of 2: the communicator: remote process exited (6)");
}

TEST(nccl_a_refused_call_ends_it)
{
    prepare_nccl(2, NULL, post_and_await_error);
    for (int32_t i = 0; i < 2; i++) ranks[i].opts.timeout_s = 0.5;
    plant("rank", 1);
    plant("refuse", 2);
    run_ranks(2);
    CHECK_EQ(ranks[1].status, LF_ERR_INTERNAL);
    CHECK_HAS(ranks[1].text, "rank 1 of 2: ncclAllReduce of the run so far: invalid usage (5)");
    CHECK_EQ(ranks[0].status, LF_ERR_TIMEOUT); /* its peer never launched */
}

/* Only sums wait for neighbours: what is refused of the others is told by its own post. */
static void scatter_in_a_run(rank *r)
{
    int64_t ticket;
    r->status = r->t.run(r->t.user, 1, "shares");
    for (int32_t i = 0; i < 2 && r->status == LF_OK; i++) {
        r->status = r->t.scatter(r->t.user, shared_x[r->t.rank], 2, LF_DTYPE_F32, r->stream, &ticket);
        if (r->status < 0 && i == 0) WRONG("the first one failed");
    }
    if (r->t.rank == 1 && r->status == LF_OK) WRONG("the second one came through");
    if (r->status == LF_OK) r->status = r->t.run(r->t.user, 0, NULL);
    if (r->status == LF_OK) await_error(r);
}

TEST(nccl_a_refused_part_is_told_by_its_own_post)
{
    prepare_nccl(2, NULL, scatter_in_a_run);
    for (int32_t i = 0; i < 2; i++) ranks[i].opts.timeout_s = 0.5;
    plant("rank", 1);
    plant("refuse", 2);
    run_ranks(2);
    CHECK_EQ(ranks[1].status, LF_ERR_INTERNAL);
    CHECK_HAS(ranks[1].text, "rank 1 of 2: ncclReduceScatter: invalid usage (5)");
    CHECK_EQ(ranks[0].status, LF_ERR_TIMEOUT);
}

/* The host is inside NCCL: nobody can be told before the abort lets it out. */
TEST(nccl_a_call_that_hangs_is_aborted)
{
    for (int32_t blocking = 0; blocking < 2; blocking++) {
        prepare_nccl(2, NULL, post_and_await_error);
        for (int32_t i = 0; i < 2; i++) {
            ranks[i].opts.timeout_s = 0.5;
            ranks[i].opts.nccl_blocking = blocking;
        }
        plant("rank", 1);
        plant("call_hangs", 1);
        run_ranks(2);
        all_are(2, LF_ERR_TIMEOUT);
        CHECK_HAS(ranks[1].text, "the call ncclAllReduce has not returned for");
    }
}

TEST(nccl_init_that_never_ends_is_an_error_in_time)
{
    for (int32_t how = 0; how < 2; how++) { /* not ready for ever; a call that never returns */
        prepare_nccl(2, NULL, post_and_await_error);
        for (int32_t i = 0; i < 2; i++) {
            ranks[i].opts.timeout_s = 0.5;
            ranks[i].opts.nccl_blocking = 0;
        }
        plant("init", 1 + how);
        run_ranks(2);
        all_are(2, LF_ERR_TIMEOUT);
        CHECK_HAS(ranks[1].text, "rank 1 of 2: not all ranks met within 0.5 s");
        plant("init", 0);
    }
}

/* Closing has an end whatever NCCL does. */
static void post_and_leave(rank *r)
{
    int64_t ticket;
    r->status = r->t.post(r->t.user, shared_x[r->t.rank], 2, LF_DTYPE_F32, r->stream, &ticket);
    if (r->status == LF_OK) r->status = r->t.wait(r->t.user, ticket, NULL, 10);
}
TEST(nccl_close_comes_back)
{
    for (int32_t how = 0; how < 2; how++) {
        prepare_nccl(2, NULL, how ? rank_1_stays_away : post_and_leave);
        for (int32_t i = 0; i < 2; i++) ranks[i].opts.timeout_s = 0.5;
        plant(how ? "abort_hangs" : "finalize", 1);
        if (how) ranks[0].run = post_and_leave;
        run_ranks(2);
        CHECK_EQ(ranks[0].status, how ? LF_ERR_TIMEOUT : LF_OK);
        plant(how ? "abort_hangs" : "finalize", 0);
    }
}

LF_TEST_MAIN
