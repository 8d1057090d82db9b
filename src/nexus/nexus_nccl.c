/* SPDX-License-Identifier: Apache-2.0 */
/* The NCCL transport's table: runs are posted on a stream of our own, behind the marking stream, and waited for by event. */
#include <string.h>

#include "nexus_nccl.h"

/* ---- runs ------------------------------------------------------------------------------------------------------------ */

static void free_run(nccl_run *run)
{
    if (!run) return;
    lf_event_close(run->began);
    lf_event_close(run->done);
    lf__free(run);
}

static lf_status new_run(nccl_link *link, nccl_run **out)
{
    nccl_run *run = lf__alloc(sizeof *run);
    if (!run) return LF_FAIL(LF_ERR_NOMEM, "a run of collectives");
    lf_status rc = lf_event_open(link->device, &run->began);
    if (rc == LF_OK) rc = lf_event_open(link->device, &run->done);
    if (rc < 0) free_run(run);
    else *out = run;
    return rc;
}

void lf__nccl_free_runs(nccl_link *link)
{
    for (int64_t i = 0; i < link->room; i++) free_run(link->ring[i]);
    for (int32_t i = 0; i < link->n_captured; i++) free_run(link->captured[i]);
    lf__free(link->ring);
    lf__free(link->captured);
}

lf_status lf__nccl_grow(nccl_link *link)
{
    const int64_t before = link->room, room = before ? before * 2 : ROOM_FIRST;
    nccl_run **ring = lf__alloc_array((size_t)room, sizeof *ring), **made = lf__alloc_array((size_t)room, sizeof *made);
    lf_status rc = ring && made ? LF_OK : LF_FAIL(LF_ERR_NOMEM, "%lld runs of collectives", (long long)room);
    for (int64_t i = before; i < room && rc == LF_OK; i++) rc = new_run(link, &made[i]);
    if (rc == LF_OK) {
        lf__lock(link->mutex);
        /* The old ones keep their tickets: they are those below `posted`. */
        for (int64_t t = link->posted - before; t < link->posted; t++)
            ring[t & (room - 1)] = before ? link->ring[t & (before - 1)] : NULL;
        int64_t spare = before;
        for (int64_t i = 0; i < room; i++)
            if (!ring[i]) ring[i] = made[spare++];
        nccl_run **old = link->ring;
        link->ring = ring;
        link->room = room;
        lf__unlock(link->mutex);
        ring = old;
    } else {
        for (int64_t i = before; made && i < room; i++) free_run(made[i]);
    }
    lf__free(ring);
    lf__free(made);
    return rc;
}

/* The next place of the ring, once the run that had it is done and waited for. Only a host that is a thousand runs ahead of the
 * device waits here. */
static lf_status take_run(nccl_link *link, nccl_run **run)
{
    for (;;) {
        lf_status rc = lf__nccl_raise(link);
        if (rc < 0) return rc;
        lf__lock(link->mutex);
        const int64_t used = link->posted - (link->done < link->waited ? link->done : link->waited);
        const bool full = used >= link->room, most = link->room >= ROOM_MOST;
        if (!full) *run = link->ring[link->posted & (link->room - 1)];
        lf__unlock(link->mutex);
        if (!full) return LF_OK;
        lf__nccl_retire(link);
        if (!most) rc = lf__nccl_grow(link);
        else lf__sleep_ns(200000);
        if (rc < 0) return rc;
    }
}

/* Captures start where the last one's runs lie: a graph keeps no hold on events. */
static lf_status take_captured(nccl_link *link, uint64_t capture, nccl_run **run, int64_t *ticket)
{
    lf_status rc = LF_OK;
    if (capture != link->capture) {
        for (int32_t i = 0; i < link->n_captured; i++) free_run(link->captured[i]);
        link->n_captured = 0;
        link->capture = capture;
    }
    if (link->n_captured == link->captured_room) {
        const int32_t room = link->captured_room ? 2 * link->captured_room : ROOM_FIRST;
        nccl_run **bigger = lf__realloc(link->captured, (size_t)room, sizeof *bigger);
        if (!bigger) return LF_FAIL(LF_ERR_NOMEM, "%d captured runs", room);
        link->captured = bigger;
        link->captured_room = room;
    }
    LF_TRY(new_run(link, run));
    *ticket = NCCL_CAPTURED | link->n_captured;
    link->captured[link->n_captured++] = *run;
out:
    return rc;
}

/* A run behind everything queued on `stream` so far. */
static lf_status open_run(nccl_link *link, lf_stream *stream)
{
    uint64_t capture = 0;
    nccl_run *run = NULL;
    lf_status rc = LF_OK;
    LF_TRY(lf__nccl_raise(link));
    rc = lf__stream_capture(stream, &capture);
    link->broken_capture = rc < 0 || capture;
    if (rc < 0) return rc;
    LF_TRY(capture ? take_captured(link, capture, &run, &link->open_ticket) : take_run(link, &run));
    if (!capture) link->open_ticket = link->posted;
    if (stream) {
        LF_TRY(lf__event_mark(run->began, stream));
        LF_TRY(lf_stream_wait(link->stream, run->began));
    }
    run->timed = !capture;
    if (run->timed) LF_TRY(lf_event_record(run->began, link->stream));
    run->label = link->run_label ? link->run_label : "a collective by itself";
    run->bytes = 0;
    run->n_ops = 0;
    link->open = run;
    link->broken_capture = false;
out:
    return rc;
}

/* From here on the worker and the guard watch it. */
static void publish(nccl_link *link, nccl_run *run, bool awaited)
{
    lf__lock(link->mutex);
    run->posted_ns = lf__now_ns();
    link->posted++;
    if (!awaited && link->waited == link->posted - 1) link->waited++;
    lf__unlock(link->mutex);
}

/* ---- calls of NCCL --------------------------------------------------------------------------------------------------- */

static const char *const call_names[] = {"ncclAllReduce", "ncclReduceScatter", "ncclAllGather"};

static int type_of(int32_t dtype)
{
    switch (dtype) {
    case LF_DTYPE_F32: return NCCL_FLOAT32;
    case LF_DTYPE_BF16: return NCCL_BFLOAT16;
    case LF_DTYPE_F64: return NCCL_FLOAT64;
    case LF_DTYPE_I64: return NCCL_INT64;
    default: return -1;
    }
}

/* In place: a part of the data is this rank's, and the call's other buffer. */
static int call_nccl(nccl_link *link, const nccl_operation *o)
{
    const int type = type_of(o->dtype), op = link->mean && (type == NCCL_FLOAT32 || type == NCCL_BFLOAT16) ? NCCL_AVG : NCCL_SUM;
    const int64_t part = o->count / link->world;
    char *own = (char *)o->data + link->rank * part * (int64_t)lf_dtype_bytes(o->dtype);
    void *stream = lf_stream_native(link->stream);
    switch (o->kind) {
    case REDUCE_SCATTER: return link->nccl.reduce_scatter(o->data, own, (size_t)part, type, op, link->caller_comm, stream);
    case ALL_GATHER: return link->nccl.all_gather(own, o->data, (size_t)part, type, link->caller_comm, stream);
    default: return link->nccl.all_reduce(o->data, o->data, (size_t)o->count, type, op, link->caller_comm, stream);
    }
}

static lf_status launch(nccl_link *link, const nccl_operation *o, const char *name)
{
    if (link->in_run && !link->in_group) {
        const lf_status rc = lf__nccl_result(link, "ncclGroupStart", link->nccl.group_start());
        if (rc < 0) return rc;
        link->in_group = true;
    }
    int result = call_nccl(link, o);
    if (link->in_group && result == NCCL_IN_PROGRESS) result = NCCL_SUCCESS; /* the group's end tells */
    return lf__nccl_result(link, name, lf__nccl_await(link, result));
}

static lf_status launch_held(nccl_link *link)
{
    const nccl_operation held = link->held;
    link->held.count = 0;
    return held.count ? launch(link, &held, "ncclAllReduce of the run so far") : LF_OK;
}

/* Neighbours in memory become one call: NCCL cuts a large sum better than we do. Not parts: a joined one's would be others. */
static bool joins_held(const nccl_link *link, const nccl_operation *o)
{
    const nccl_operation *held = &link->held;
    return o->kind == ALL_REDUCE && held->kind == ALL_REDUCE && held->count && held->dtype == o->dtype &&
           (char *)held->data + held->count * (int64_t)lf_dtype_bytes(o->dtype) == o->data;
}

/* Within a run a sum is held until the next operation shows that it does not join. */
static lf_status put_operation(nccl_link *link, const nccl_operation *o)
{
    if (link->in_run && joins_held(link, o)) {
        link->held.count += o->count;
        return LF_OK;
    }
    const lf_status rc = launch_held(link);
    if (rc < 0) return rc;
    if (!link->in_run || o->kind != ALL_REDUCE) return launch(link, o, call_names[o->kind]);
    link->held = *o;
    return LF_OK;
}

static lf_status close_group(nccl_link *link)
{
    const lf_status rc = launch_held(link);
    if (!link->in_group) return rc;
    link->in_group = false;
    const lf_status ended = lf__nccl_result(link, "ncclGroupEnd", lf__nccl_await(link, link->nccl.group_end()));
    return rc < 0 ? rc : ended;
}

static lf_status close_run(nccl_link *link)
{
    nccl_run *run = link->open;
    if (!run) return LF_OK;
    link->open = NULL;
    lf_status rc = close_group(link);
    lf__nccl_call_end(link);
    if (rc == LF_OK) rc = lf__event_mark(run->done, link->stream);
    if (rc == LF_OK && !(link->open_ticket & NCCL_CAPTURED)) publish(link, run, true);
    return rc;
}

static lf_status add_operation(nccl_link *link, const nccl_operation *o, lf_stream *stream)
{
    int32_t before = 0;
    lf_status rc = LF_OK;
    if (!link->open) {
        rc = open_run(link, stream);
        if (rc == LF_OK) rc = lf__nccl_call_begin(link, call_names[o->kind]);
        if (rc < 0) return rc;
    }
    if (o->count == 0) return LF_OK;
    rc = lf__device_enter(link->device, &before);
    if (rc < 0) return rc;
    rc = put_operation(link, o);
    lf__device_leave(link->device, before);
    link->open->n_ops++;
    link->open->bytes += o->count * (int64_t)lf_dtype_bytes(o->dtype);
    return rc;
}

/* With the device current for what NCCL does at a group's end. */
static lf_status end_run(nccl_link *link)
{
    int32_t before = 0;
    lf_status rc = lf__device_enter(link->device, &before), closed = close_run(link);
    if (rc == LF_OK) lf__device_leave(link->device, before);
    return rc < 0 ? rc : closed;
}

/* Ranks no longer do the same: nothing can go on. What failed first is what is told. A capture that broke before NCCL was called ran
 * nowhere, and leaves the link as it was. */
static lf_status fail_link(nccl_link *link, lf_status rc)
{
    link->in_run = false;
    link->held.count = 0;
    if (link->broken_capture) {
        link->broken_capture = false;
        link->run_label = NULL;
        return rc;
    }
    lf__nccl_fault(link, rc, "%s", lf_error_text());
    end_run(link);
    return lf__nccl_raise(link);
}

static lf_status post(nccl_link *link, const nccl_operation *o, lf_stream *stream, int64_t *ticket)
{
    LF_CHECK_ARG(ticket && o->count >= 0 && (o->data || o->count == 0), "nccl: ticket or data is NULL, or count is negative");
    LF_CHECK_ARG(type_of(o->dtype) >= 0, "nccl: dtype is %s, expected f32, bf16, f64 or i64", lf_dtype_name(o->dtype));
    LF_CHECK_ARG(o->kind == ALL_REDUCE || o->count % link->world == 0, "nccl: %lld elements, expected a multiple of %d",
                 (long long)o->count, link->world);
    lf_status rc = add_operation(link, o, stream);
    if (rc == LF_OK) *ticket = link->open_ticket;
    if (rc == LF_OK && !link->in_run) rc = end_run(link);
    return rc < 0 ? fail_link(link, rc) : rc;
}

lf_status lf__nccl_post(void *user, void *data, int64_t count, int32_t dtype, lf_stream *stream, int64_t *ticket)
{
    return post(user, &(nccl_operation){ALL_REDUCE, dtype, data, count}, stream, ticket);
}

lf_status lf__nccl_scatter(void *user, void *data, int64_t count, int32_t dtype, lf_stream *stream, int64_t *ticket)
{
    return post(user, &(nccl_operation){REDUCE_SCATTER, dtype, data, count}, stream, ticket);
}

lf_status lf__nccl_gather(void *user, void *data, int64_t count, int32_t dtype, lf_stream *stream, int64_t *ticket)
{
    return post(user, &(nccl_operation){ALL_GATHER, dtype, data, count}, stream, ticket);
}

lf_status lf__nccl_run(void *user, int32_t open, const char *label)
{
    nccl_link *link = user;
    if (open) {
        link->in_run = true;
        link->run_label = label;
        return lf__nccl_raise(link);
    }
    lf_status rc = end_run(link);
    link->in_run = false;
    link->run_label = NULL;
    return rc < 0 ? fail_link(link, rc) : rc;
}

/* ---- waiting --------------------------------------------------------------------------------------------------------- */

/* On the host, asking now and then: a wait inside the driver could not be given up. */
static lf_status wait_until_done(nccl_link *link, int64_t upto, double timeout_s, const char *what)
{
    const int64_t began = lf__now_ns(), deadline = began + (int64_t)(timeout_s * 1e9);
    for (int64_t pause = 10000;; pause = pause < 500000 ? pause * 2 : pause) {
        lf__nccl_retire(link);
        lf_status rc = lf__nccl_raise(link);
        if (rc < 0) return rc;
        lf__lock(link->mutex);
        const bool done = link->done >= upto;
        lf__unlock(link->mutex);
        if (done) return LF_OK;
        if (lf__now_ns() > deadline) {
            lf__nccl_fault(link, LF_ERR_TIMEOUT, "%s is not done after %g s; hint: has another rank died?", what, timeout_s);
            return lf__nccl_raise(link);
        }
        lf__sleep_ns(pause);
    }
}

lf_status lf__nccl_wait(void *user, int64_t ticket, lf_stream *stream, double timeout_s)
{
    nccl_link *link = user;
    lf_status rc = lf__nccl_raise(link);
    if (rc < 0) return rc;
    if (ticket & NCCL_CAPTURED) {
        const int64_t number = ticket & ~NCCL_CAPTURED;
        LF_CHECK_ARG(number >= 0 && number < link->n_captured && stream, "nccl: wait for captured run %lld without its stream",
                     (long long)number);
        return lf_stream_wait(stream, link->captured[number]->done);
    }
    lf__lock(link->mutex);
    const int64_t posted = link->posted, waited = link->waited;
    nccl_run *run = link->ring[ticket & (link->room - 1)];
    lf__unlock(link->mutex);
    LF_CHECK_ARG(ticket >= 0 && ticket < posted && ticket >= waited - 1, "nccl: wait for run %lld, expected %lld to %lld",
                 (long long)ticket, (long long)waited - 1, (long long)posted - 1);
    rc = stream ? lf_stream_wait(stream, run->done) : wait_until_done(link, ticket + 1, timeout_s, run->label);
    if (rc < 0) return rc;
    lf__lock(link->mutex);
    if (ticket + 1 > link->waited) link->waited = ticket + 1;
    lf__unlock(link->mutex);
    return LF_OK;
}

lf_status lf__nccl_query(void *user, int64_t ticket)
{
    nccl_link *link = user;
    lf_status rc = lf__nccl_raise(link);
    if (rc < 0 || ticket & NCCL_CAPTURED) return rc < 0 ? rc : LF_AGAIN;
    lf__nccl_retire(link);
    lf__lock(link->mutex);
    const int64_t posted = link->posted, done = link->done;
    lf__unlock(link->mutex);
    LF_CHECK_ARG(ticket >= 0 && ticket < posted, "nccl: no run %lld, %lld were posted", (long long)ticket, (long long)posted);
    return ticket < done ? LF_OK : LF_AGAIN;
}

lf_status lf__nccl_check(void *user) { return lf__nccl_raise(user); }

lf_status lf__nccl_settle(void *user, double timeout_s)
{
    nccl_link *link = user;
    lf__lock(link->mutex);
    const int64_t posted = link->posted;
    lf__unlock(link->mutex);
    return wait_until_done(link, posted, timeout_s, "what was posted");
}

lf_status lf__nccl_replayed(void *user, lf_stream *stream, const char *label)
{
    nccl_link *link = user;
    nccl_run *run = NULL;
    lf_status rc = take_run(link, &run);
    if (rc == LF_OK) rc = lf__event_mark(run->done, stream);
    if (rc < 0) return rc;
    run->label = label;
    run->timed = false;
    run->bytes = 0;
    run->n_ops = 0;
    publish(link, run, false);
    return LF_OK;
}

lf_status lf__nccl_stats(void *user, lf_nexus_stats *stats)
{
    nccl_link *link = user;
    lf__nccl_retire(link);
    lf__lock(link->mutex);
    stats->collectives = link->n_ops;
    stats->bytes = link->n_bytes;
    stats->p50_s = lf__hist_percentile(&link->hist, 50);
    stats->p95_s = lf__hist_percentile(&link->hist, 95);
    stats->p99_s = lf__hist_percentile(&link->hist, 99);
    stats->busy_s = link->hist.sum_s;
    lf__unlock(link->mutex);
    return LF_OK;
}
