/* SPDX-License-Identifier: Apache-2.0 */
/* A transport inside one process. Every end keeps a ring of its operations; a worker thread sums operation k once it has
 * arrived at all ends, one after another, in rank order.
 *
 * An operation arrives when the stream it was posted on reaches it. The first thing that goes wrong (an end closed or gave up
 * with operations missing, two ends disagree) is kept and fails every operation that is not done yet. */
#include <stdio.h>
#include <string.h>

#include "nexus_int.h"

enum { MAX_WORLD = 64, TILE = 1024 };
enum { POSTED, ARRIVED, DONE, WITHDRAWN };
enum { SUM_ALL, SUM_OWN, COPY_OWN }; /* every end gets every sum; its part of the sums; every end's part */

typedef struct loop_op {
    struct loop_end *end;
    void *data;
    int64_t count;
    int32_t dtype, state, kind;
} loop_op;

typedef struct loop_end {
    struct loopback *loop;
    int32_t rank;
    bool closed;
    loop_op **ring; /* by ticket & (room - 1); the ops stay where they are when it grows */
    int64_t room, posted, waited;
} loop_end;

typedef struct loopback {
    lf__mutex *mutex;
    lf__thread *worker; /* none for one end */
    int32_t world, n_open;
    int64_t done; /* operations summed */
    bool busy, stop;
    lf__fault fault;
    loop_end ends[MAX_WORLD];
} loopback;

static loop_op *op_at(const loop_end *end, int64_t ticket) { return end->ring[ticket & (end->room - 1)]; }

/* ---- summing --------------------------------------------------------------------------------------------------------- */

/* (n) of the ends' data from element `at`, summed in rank order into ends [first, last). */
#define SUM(TYPE, ACC, LOAD, STORE)                                                               \
    do {                                                                                          \
        ACC sum[TILE];                                                                            \
        for (int64_t i = 0; i < n; i++) sum[i] = LOAD(((const TYPE *)ops[0]->data)[at + i]);      \
        for (int32_t r = 1; r < world; r++)                                                       \
            for (int64_t i = 0; i < n; i++) sum[i] += LOAD(((const TYPE *)ops[r]->data)[at + i]); \
        for (int32_t r = first; r < last; r++)                                                    \
            for (int64_t i = 0; i < n; i++) ((TYPE *)ops[r]->data)[at + i] = STORE(sum[i]);       \
    } while (0)
#define AS_IS(x) (x)

static void sum_tile(loop_op *const *ops, int32_t world, int32_t first, int32_t last, int64_t at, int64_t n)
{
    switch (ops[0]->dtype) {
    case LF_DTYPE_F32: SUM(float, float, AS_IS, AS_IS); break;
    case LF_DTYPE_BF16: SUM(uint16_t, float, lf__f32_from_bf16, lf__bf16_from_f32); break;
    case LF_DTYPE_F64: SUM(double, double, AS_IS, AS_IS); break;
    default: SUM(uint64_t, uint64_t, AS_IS, AS_IS); break; /* I64, wrapping */
    }
}

static void sum_range(loop_op *const *ops, int32_t world, int32_t first, int32_t last, int64_t from, int64_t to)
{
    for (int64_t at = from; at < to; at += TILE) sum_tile(ops, world, first, last, at, to - at < TILE ? to - at : TILE);
}

static void run_operation(loop_op *const *ops, int32_t world)
{
    const int64_t part = ops[0]->count / world;
    const size_t bytes = (size_t)part * lf_dtype_bytes(ops[0]->dtype);
    if (ops[0]->kind == SUM_ALL) sum_range(ops, world, 0, world, 0, ops[0]->count);
    for (int32_t r = 0; r < world && ops[0]->kind == SUM_OWN; r++) sum_range(ops, world, r, r + 1, r * part, (r + 1) * part);
    for (int32_t r = 0; r < world && ops[0]->kind == COPY_OWN; r++)
        for (int32_t to = 0; to < world; to++)
            if (to != r) memcpy((char *)ops[to]->data + (size_t)r * bytes, (char *)ops[r]->data + (size_t)r * bytes, bytes);
}

/* The next operation's part at every end; false when one has not arrived. */
static bool gather(loopback *loop, loop_op **ops)
{
    for (int32_t r = 0; r < loop->world; r++) {
        loop_end *end = &loop->ends[r];
        if (end->closed || end->posted <= loop->done || op_at(end, loop->done)->state != ARRIVED) return false;
        ops[r] = op_at(end, loop->done);
    }
    return true;
}

static const char *kind_name(int32_t kind) { return kind == SUM_ALL ? "a sum" : kind == SUM_OWN ? "a scatter" : "a gather"; }

static lf_status check_alike(const loopback *loop, loop_op *const *ops)
{
    for (int32_t r = 1; r < loop->world; r++)
        if (ops[r]->count != ops[0]->count || ops[r]->dtype != ops[0]->dtype || ops[r]->kind != ops[0]->kind)
            return LF_FAIL(LF_ERR_PEER,
                           "operation %lld is %s of %lld %s on rank %d and %s of %lld %s on rank 0, expected the same",
                           (long long)loop->done, kind_name(ops[r]->kind), (long long)ops[r]->count, lf_dtype_name(ops[r]->dtype),
                           r, kind_name(ops[0]->kind), (long long)ops[0]->count, lf_dtype_name(ops[0]->dtype));
    return LF_OK;
}

static void loop_work(void *user)
{
    loopback *loop = user;
    loop_op *ops[MAX_WORLD];
    lf__lock(loop->mutex);
    while (!loop->stop) {
        if (loop->fault.status < 0 || !gather(loop, ops)) {
            lf__wait(loop->mutex);
            continue;
        }
        lf_status rc = check_alike(loop, ops);
        if (rc < 0) {
            lf__fault_keep(&loop->fault, rc);
        } else {
            loop->busy = true;
            lf__unlock(loop->mutex);
            run_operation(ops, loop->world);
            lf__lock(loop->mutex);
            loop->busy = false;
            for (int32_t r = 0; r < loop->world; r++) ops[r]->state = DONE;
            loop->done++;
        }
        lf__wake(loop->mutex);
    }
    lf__unlock(loop->mutex);
}

/* ---- the table's functions ------------------------------------------------------------------------------------------- */

/* Stop the worker from touching this end's data: afterwards its owner may free it. The lock is held. */
static void withdraw(loop_end *end)
{
    loopback *loop = end->loop;
    while (loop->busy) lf__wait(loop->mutex);
    for (int64_t t = end->waited; t < end->posted; t++)
        if (op_at(end, t)->state != DONE) op_at(end, t)->state = WITHDRAWN;
    lf__wake(loop->mutex);
}

static lf_status arrive(void *user)
{
    loop_op *op = user;
    loopback *loop = op->end->loop;
    lf__lock(loop->mutex);
    if (op->state == POSTED) op->state = loop->world == 1 ? DONE : ARRIVED;
    lf__wake(loop->mutex);
    lf__unlock(loop->mutex);
    return LF_OK;
}

/* Twice the places, each with its op. */
static lf_status grow_ring(loop_end *end)
{
    const int64_t room = end->room ? end->room * 2 : 64;
    loop_op **ring = lf__alloc_array((size_t)room, sizeof(loop_op *));
    if (!ring) return LF_FAIL(LF_ERR_NOMEM, "loopback ring of %lld", (long long)room);
    for (int64_t t = end->waited; t < end->waited + room; t++) {
        loop_op **place = &ring[t & (room - 1)];
        if (t < end->waited + end->room) *place = op_at(end, t);
        else *place = lf__alloc(sizeof **place);
        if (*place) continue;
        for (int64_t u = end->waited + end->room; u < t; u++) lf__free(ring[u & (room - 1)]);
        lf__free(ring);
        return LF_FAIL(LF_ERR_NOMEM, "loopback ring of %lld", (long long)room);
    }
    lf__free(end->ring);
    end->ring = ring;
    end->room = room;
    return LF_OK;
}

static lf_status add_operation(loop_end *end, int32_t kind, void *data, int64_t count, int32_t dtype, lf_stream *stream,
                               int64_t *ticket)
{
    loopback *loop = end->loop;
    lf_status rc = LF_OK;
    loop_op *op = NULL;
    LF_CHECK_ARG(ticket && count >= 0 && (data || count == 0), "loopback: ticket or data is NULL, or count is negative");
    LF_CHECK_ARG(dtype == LF_DTYPE_F32 || dtype == LF_DTYPE_BF16 || dtype == LF_DTYPE_F64 || dtype == LF_DTYPE_I64,
                 "loopback: dtype is %s, expected f32, bf16, f64 or i64", lf_dtype_name(dtype));
    LF_CHECK_ARG(kind == SUM_ALL || count % loop->world == 0, "loopback: %lld elements, expected a multiple of %d",
                 (long long)count, loop->world);
    lf__lock(loop->mutex);
    LF_TRY(lf__fault_raise(&loop->fault));
    if (end->posted - end->waited == end->room) LF_TRY(grow_ring(end));
    *ticket = end->posted;
    op = op_at(end, end->posted++);
    *op = (loop_op){end, data, count, dtype, POSTED, kind};
out:
    lf__unlock(loop->mutex);
    return op ? lf_stream_run(stream, arrive, op) : rc;
}

static lf_status loop_post(void *user, void *data, int64_t count, int32_t dtype, lf_stream *stream, int64_t *ticket)
{
    return add_operation(user, SUM_ALL, data, count, dtype, stream, ticket);
}

static lf_status loop_scatter(void *user, void *data, int64_t count, int32_t dtype, lf_stream *stream, int64_t *ticket)
{
    return add_operation(user, SUM_OWN, data, count, dtype, stream, ticket);
}

static lf_status loop_gather(void *user, void *data, int64_t count, int32_t dtype, lf_stream *stream, int64_t *ticket)
{
    return add_operation(user, COPY_OWN, data, count, dtype, stream, ticket);
}

/* The lock is held: done, failed, or not yet. */
static lf_status look(loop_end *end, int64_t ticket)
{
    if (op_at(end, ticket)->state == DONE) return LF_OK;
    return end->loop->fault.status < 0 ? lf__fault_raise(&end->loop->fault) : LF_AGAIN;
}

static lf_status give_up(loop_end *end, int64_t ticket, double timeout_s)
{
    loopback *loop = end->loop;
    char late[128] = "";
    size_t used = 0;
    for (int32_t r = 0; r < loop->world && used < sizeof late - 8; r++) {
        const loop_end *other = &loop->ends[r];
        if (other->posted > ticket && op_at(other, ticket)->state != POSTED) continue;
        used += (size_t)snprintf(late + used, sizeof late - used, "%s%d", used ? ", " : "", r);
    }
    lf_status rc = LF_FAIL(LF_ERR_PEER, "rank %d gave up after %g s, waiting for rank %s in operation %lld", end->rank, timeout_s,
                           late, (long long)ticket);
    lf__fault_keep(&loop->fault, rc);
    return LF_FAIL(LF_ERR_TIMEOUT, "not done after %g s: rank %s has not posted operation %lld", timeout_s, late,
                   (long long)ticket);
}

static lf_status loop_wait(void *user, int64_t ticket, lf_stream *stream, double timeout_s)
{
    (void)stream; /* done on the host is done for every stream */
    loop_end *end = user;
    loopback *loop = end->loop;
    const int64_t deadline = lf__now_ns() + (int64_t)(timeout_s * 1e9);
    lf_status rc;
    lf__lock(loop->mutex);
    if (ticket != end->waited || ticket >= end->posted) {
        rc = LF_FAIL(LF_ERR_INVALID, "loopback: wait for operation %lld, expected %lld of %lld posted", (long long)ticket,
                     (long long)end->waited, (long long)end->posted);
        lf__unlock(loop->mutex);
        return rc;
    }
    while ((rc = look(end, ticket)) == LF_AGAIN) {
        int64_t left = deadline - lf__now_ns();
        if (left <= 0 && !loop->busy) rc = give_up(end, ticket, timeout_s);
        if (rc < 0) break;
        lf__wait_ns(loop->mutex, left > 1000000 ? left : 1000000);
    }
    if (rc < 0) withdraw(end);
    else end->waited++;
    lf__unlock(loop->mutex);
    return rc;
}

static lf_status loop_query(void *user, int64_t ticket)
{
    loop_end *end = user;
    lf__lock(end->loop->mutex);
    bool known = ticket >= end->waited && ticket < end->posted;
    lf_status rc = known ? look(end, ticket) : LF_FAIL(LF_ERR_INVALID, "loopback: no open operation %lld", (long long)ticket);
    lf__unlock(end->loop->mutex);
    return rc;
}

static void free_loopback(loopback *loop)
{
    if (!loop) return;
    if (loop->worker) {
        lf__lock(loop->mutex);
        loop->stop = true;
        lf__wake(loop->mutex);
        lf__unlock(loop->mutex);
        lf__thread_join(loop->worker);
    }
    for (int32_t r = 0; r < loop->world; r++) {
        for (int64_t i = 0; i < loop->ends[r].room; i++) lf__free(loop->ends[r].ring[i]);
        lf__free(loop->ends[r].ring);
    }
    lf__mutex_close(loop->mutex);
    lf__free(loop);
}

/* Whoever waits for this end would wait for ever: say so instead. What is done stays done. */
static void loop_close(void *user)
{
    loop_end *end = user;
    loopback *loop = end->loop;
    lf__lock(loop->mutex);
    withdraw(end);
    end->closed = true;
    const bool last = --loop->n_open == 0;
    if (loop->fault.status == LF_OK) { /* written here: the caller's own error text, if it has one, stays */
        loop->fault.status = LF_ERR_PEER;
        snprintf(loop->fault.text, sizeof loop->fault.text, "rank %d closed its end of the loopback after %lld operations",
                 end->rank, (long long)loop->done);
    }
    lf__wake(loop->mutex);
    lf__unlock(loop->mutex);
    if (last) free_loopback(loop);
}

lf_status lf_loopback_open(int32_t world, lf_transport *ends)
{
    LF_CHECK_ARG(ends, "ends is NULL");
    LF_CHECK_ARG(world >= 1 && world <= MAX_WORLD, "world is %d, expected 1 to %d", world, MAX_WORLD);
    lf_status rc = LF_OK;
    loopback *loop = lf__alloc(sizeof *loop);
    if (!loop) return LF_FAIL(LF_ERR_NOMEM, "loopback");
    loop->world = loop->n_open = world;
    loop->mutex = lf__mutex_open();
    if (!loop->mutex) LF_THROW(LF_ERR_NOMEM, "loopback");
    for (int32_t r = 0; r < world; r++) {
        loop->ends[r] = (loop_end){.loop = loop, .rank = r};
        LF_TRY(grow_ring(&loop->ends[r]));
    }
    if (world > 1) LF_TRY(lf__thread_start(&loop->worker, "lf-loopback", loop_work, loop));
    for (int32_t r = 0; r < world; r++)
        ends[r] = (lf_transport){.size = sizeof *ends,
                                 .name = "loopback",
                                 .user = &loop->ends[r],
                                 .rank = r,
                                 .world = world,
                                 .post = loop_post,
                                 .wait = loop_wait,
                                 .close = loop_close,
                                 .query = loop_query,
                                 .scatter = loop_scatter,
                                 .gather = loop_gather};
    return LF_OK;
out:
    free_loopback(loop);
    return rc;
}
