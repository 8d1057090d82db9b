/* SPDX-License-Identifier: Apache-2.0 */
/* A step's collectives when some need the result of others: a sparse chunk's values can be packed only when its mask has come.
 *
 * Everything of the step, dense chunks too, then goes through one stream of our own, in an order that the schedule fixes: a unit's masks
 * and dense sums, behind them the values of the unit before, and so on. On a device that stream carries events and kernels and the
 * host waits for nothing; on the CPU it is a worker thread, which is then the transport's only caller, and waits in the marker's stead. */
#include <stdio.h>
#include <string.h>

#include "nexus_int.h"

enum { POST_DATA, POST_MASK, POST_VALUES };

/* One collective of the step. */
typedef struct chain_post {
    int64_t ticket, bytes, posted_ns;
    int32_t chunk, kind;
} chain_post;

/* Chunks [first, end) that are posted in one go: a run where the transport has runs, else one chunk. */
typedef struct chain_unit {
    lf_nexus *nexus;
    int32_t first, end, index;
    char label[112]; /* of their values, in errors */
} chain_unit;

/* A run as lf_nexus_take hands it out. */
typedef struct chain_run {
    lf_nexus *nexus;
    int32_t index;
    lf_event *landed;
} chain_run;

typedef struct nexus_chain {
    lf_stream *stream;
    lf_event *ready; /* of the marking stream, for ours */
    bool threaded;   /* the stream is a worker: the CPU */
    chain_unit *units;
    int32_t n_units, next; /* next: to be posted */
    chain_run *runs;
    chain_post *posts; /* of this step, in order; only the stream's side touches these three */
    int32_t n_posts, n_waited;
    int32_t *last_post; /* by chunk: after that one is waited for, the chunk is summed */
    lf__mutex *mutex;   /* guards the rest, and the handle's counts and times */
    lf__fault fault;
    bool stop;
} nexus_chain;

/* ---- opening --------------------------------------------------------------------------------------------------------- */

static lf_status list_units(lf_nexus *nexus, nexus_chain *chain)
{
    const nexus_schedule *plan = &nexus->plan;
    for (int32_t first = 0; first < plan->n_chunks;) {
        const nexus_run *run = &plan->runs[plan->chunks[first].run];
        chain_unit *u = &chain->units[chain->n_units];
        *u = (chain_unit){.nexus = nexus, .first = first, .end = nexus->transport.run ? run->end : first + 1};
        u->index = chain->n_units++;
        snprintf(u->label, sizeof u->label, "values of %.90s", run->label);
        first = u->end;
    }
    for (int32_t r = 0; r < plan->n_runs; r++) {
        chain->runs[r] = (chain_run){.nexus = nexus, .index = r};
        lf_status rc = lf_event_open(nexus->device, &chain->runs[r].landed);
        if (rc < 0) return rc;
    }
    return LF_OK;
}

lf_status lf__chain_open(lf_nexus *nexus)
{
    lf_status rc = LF_OK;
    if (!nexus->sparse.n_chunks) return LF_OK;
    const size_t n = (size_t)nexus->plan.n_chunks;
    nexus_chain *chain = nexus->chain = lf__alloc(sizeof *chain);
    if (!chain) return LF_FAIL(LF_ERR_NOMEM, "a chain of collectives");
    chain->threaded = lf__device_is_cpu(nexus->device);
    chain->mutex = lf__mutex_open();
    chain->units = lf__alloc_array(n, sizeof *chain->units);
    chain->runs = lf__alloc_array((size_t)nexus->plan.n_runs, sizeof *chain->runs);
    chain->posts = lf__alloc_array(2 * n, sizeof *chain->posts);
    chain->last_post = lf__alloc_array(n, sizeof *chain->last_post);
    if (!chain->mutex || !chain->units || !chain->runs || !chain->posts || !chain->last_post)
        LF_THROW(LF_ERR_NOMEM, "a chain of collectives");
    LF_TRY(list_units(nexus, chain));
    LF_TRY(lf_event_open(nexus->device, &chain->ready));
    LF_TRY(lf_stream_open(nexus->device, chain->threaded ? 0 : nexus->opts.priority, &chain->stream));
out:
    return rc;
}

void lf__chain_stop(lf_nexus *nexus)
{
    nexus_chain *chain = nexus->chain;
    if (!chain || !chain->threaded || !chain->stream) return;
    lf__lock(chain->mutex);
    chain->stop = true;
    lf__unlock(chain->mutex);
    lf_stream_close(chain->stream);
    chain->stream = NULL;
}

void lf__chain_close(lf_nexus *nexus)
{
    nexus_chain *chain = nexus->chain;
    if (!chain) return;
    lf_stream_close(chain->stream);
    lf_event_close(chain->ready);
    for (int32_t r = 0; chain->runs && r < nexus->plan.n_runs; r++) lf_event_close(chain->runs[r].landed);
    lf__mutex_close(chain->mutex);
    lf__free(chain->units);
    lf__free(chain->runs);
    lf__free(chain->posts);
    lf__free(chain->last_post);
    lf__free(chain);
    nexus->chain = NULL;
}

/* ---- on the stream's side: the worker, or the caller on a device ------------------------------------------------------ */

/* What kernels and the transport go by: on the worker it is now. */
static lf_stream *where(const nexus_chain *chain) { return chain->threaded ? NULL : chain->stream; }

/* The first failure is kept, with the chunk's name; the rest of the step is left out. */
static lf_status fail_at(lf_nexus *nexus, int32_t chunk, lf_status rc)
{
    if (rc >= 0) return rc;
    if (chunk >= 0) rc = lf__nexus_fail_prefix(nexus, chunk, rc);
    lf__lock(nexus->chain->mutex);
    lf__fault_keep(&nexus->chain->fault, rc);
    lf__unlock(nexus->chain->mutex);
    return rc;
}

static lf_status stopped(nexus_chain *chain)
{
    lf__lock(chain->mutex);
    const bool stop = chain->stop;
    lf__unlock(chain->mutex);
    return stop ? LF_FAIL(LF_ERR_STATE, "the handle is being closed") : LF_OK;
}

static lf_status post(lf_nexus *nexus, int32_t i, int32_t kind)
{
    nexus_chain *chain = nexus->chain;
    nexus_chunk *c = &nexus->plan.chunks[i];
    chain_post *p = &chain->posts[chain->n_posts];
    void *data = kind == POST_DATA ? lf__wire_data(c, &c->range) : kind == POST_MASK ? (void *)c->topk.mask : c->topk.values;
    const int64_t count = kind == POST_DATA ? c->range.count : kind == POST_MASK ? (c->range.count + 63) / 64 : c->topk.k;
    const int32_t dtype = kind == POST_DATA ? lf__wire_dtype(c) : kind == POST_MASK ? LF_DTYPE_I64 : c->dtype;
    *p = (chain_post){.chunk = i, .kind = kind, .bytes = count * (int64_t)lf_dtype_bytes(dtype), .posted_ns = lf__now_ns()};
    lf_status rc = lf__nexus_post(nexus, data, count, dtype, where(chain), &p->ticket);
    if (rc < 0) return fail_at(nexus, i, rc);
    chain->last_post[i] = chain->n_posts++;
    return LF_OK;
}

/* Wait, in order, for all posts up to and with this one. What a sum is for is done as soon as it is there. */
static lf_status wait_up_to(lf_nexus *nexus, int32_t last)
{
    nexus_chain *chain = nexus->chain;
    while (chain->n_waited <= last) {
        const chain_post *p = &chain->posts[chain->n_waited++];
        nexus_chunk *c = &nexus->plan.chunks[p->chunk];
        lf_status rc = lf__nexus_wait(nexus, p->ticket, where(chain));
        if (rc == LF_OK) {
            lf__lock(chain->mutex);
            lf__nexus_add_time(nexus, p->bytes, lf__now_ns() - p->posted_ns);
            lf__unlock(chain->mutex);
            if (p->kind == POST_DATA) rc = lf__nexus_divide(nexus, c, where(chain));
            else if (p->kind == POST_VALUES) rc = lf__sparse_scatter(nexus, c, where(chain));
        }
        if (rc < 0) return fail_at(nexus, p->chunk, rc);
    }
    return LF_OK;
}

/* The masks of a unit have been posted; once they are there, its values go out. */
static lf_status post_values(const chain_unit *u)
{
    lf_nexus *nexus = u->nexus;
    nexus_chunk *chunks = nexus->plan.chunks;
    int32_t last = -1;
    for (int32_t i = u->first; i < u->end; i++)
        if (lf__sparse_now(nexus, &chunks[i])) last = nexus->chain->last_post[i];
    if (last < 0) return LF_OK;
    lf_status rc = wait_up_to(nexus, last);
    if (rc == LF_OK) rc = fail_at(nexus, -1, lf__debug_compare(nexus, NEXUS_VALUES, u->first, u->end, 0, 0, where(nexus->chain)));
    for (int32_t i = u->first; i < u->end && rc == LF_OK; i++)
        if (lf__sparse_now(nexus, &chunks[i])) rc = fail_at(nexus, i, lf__sparse_pack(nexus, &chunks[i], where(nexus->chain)));
    if (rc == LF_OK) rc = fail_at(nexus, -1, lf__nexus_call_run(nexus, 1, u->label));
    for (int32_t i = u->first; i < u->end && rc == LF_OK; i++)
        if (lf__sparse_now(nexus, &chunks[i])) rc = post(nexus, i, POST_VALUES);
    return rc == LF_OK ? fail_at(nexus, -1, lf__nexus_call_run(nexus, 0, u->label)) : rc;
}

/* A unit's chunks are complete: dense sums and masks go out, and behind them the values of the unit before. */
static lf_status launch_unit(void *user)
{
    const chain_unit *u = user;
    lf_nexus *nexus = u->nexus;
    nexus_chain *chain = nexus->chain;
    const nexus_run *run = &nexus->plan.runs[nexus->plan.chunks[u->first].run];
    lf_status rc = stopped(chain);
    if (rc == LF_OK) rc = fail_at(nexus, -1, lf__debug_compare(nexus, NEXUS_SUMS, u->first, u->end, 0, 0, where(chain)));
    for (int32_t i = u->first; i < u->end && rc == LF_OK; i++) rc = fail_at(nexus, i, lf__sparse_prepare(nexus, i, where(chain)));
    for (int32_t i = u->first; i < u->end && rc == LF_OK; i++)
        rc = fail_at(nexus, i, lf__wire_narrow(nexus, &nexus->plan.chunks[i], where(chain)));
    if (rc == LF_OK) rc = fail_at(nexus, -1, lf__nexus_call_run(nexus, 1, run->label));
    for (int32_t i = u->first; i < u->end && rc == LF_OK; i++)
        rc = post(nexus, i, lf__sparse_now(nexus, &nexus->plan.chunks[i]) ? POST_MASK : POST_DATA);
    if (rc == LF_OK) rc = fail_at(nexus, -1, lf__nexus_call_run(nexus, 0, run->label));
    if (rc == LF_OK && u->index > 0) rc = post_values(u - 1);
    if (rc == LF_OK && u->index + 1 == chain->n_units) rc = post_values(u);
    return rc;
}

static lf_status land_run(void *user)
{
    const chain_run *r = user;
    const nexus_run *run = &r->nexus->plan.runs[r->index];
    lf_status rc = stopped(r->nexus->chain);
    for (int32_t i = run->first; i < run->end && rc == LF_OK; i++) rc = wait_up_to(r->nexus, r->nexus->chain->last_post[i]);
    return rc;
}

/* ---- on the caller's side -------------------------------------------------------------------------------------------- */

static lf_status queue(nexus_chain *chain, lf_host_fn fn, void *user)
{
    return chain->threaded ? lf_stream_run(chain->stream, fn, user) : fn(user);
}

lf_status lf__chain_check(lf_nexus *nexus)
{
    nexus_chain *chain = nexus->chain;
    if (!chain) return LF_OK;
    lf__lock(chain->mutex);
    lf_status rc = lf__fault_raise(&chain->fault);
    lf__unlock(chain->mutex);
    return rc;
}

lf_status lf__chain_rest(lf_nexus *nexus)
{
    nexus_chain *chain = nexus->chain;
    if (!chain || !chain->threaded) return LF_OK;
    return lf_stream_sync(chain->stream);
}

lf_status lf__chain_drain(lf_nexus *nexus)
{
    if (!nexus->chain) return LF_OK;
    lf_status rc = nexus->chain->threaded ? LF_OK : lf__nexus_call_settle(nexus); /* has a deadline, unlike the next */
    return rc == LF_OK ? lf_stream_sync(nexus->chain->stream) : rc;
}

bool lf__chain_has_transport(const lf_nexus *nexus) { return nexus->chain && nexus->chain->threaded && nexus->running; }

lf_status lf__chain_begin(lf_nexus *nexus)
{
    nexus_chain *chain = nexus->chain;
    if (!chain) return LF_OK;
    lf_status rc = lf__chain_rest(nexus); /* a step taken in order of a stream may still be under way */
    chain->next = chain->n_posts = chain->n_waited = 0;
    return rc;
}

lf_status lf__chain_post(lf_nexus *nexus, int32_t first, int32_t end, lf_stream *stream)
{
    nexus_chain *chain = nexus->chain;
    uint64_t capture = 0;
    lf_status rc = LF_OK;
    LF_TRY(lf__stream_capture(stream, &capture));
    if (capture)
        LF_THROW(LF_ERR_UNSUPPORTED,
                 "sparse reductions cannot be captured: whose turn it is differs from step to step; hint: run "
                 "eagerly, or comm_strategy dense");
    nexus->ran = true;
    if (stream) {
        LF_TRY(lf__event_mark(chain->ready, stream));
        LF_TRY(lf_stream_wait(chain->stream, chain->ready));
    }
    while (first < end) {
        chain_unit *u = &chain->units[chain->next++];
        LF_TRY(queue(chain, launch_unit, u));
        first = u->end;
    }
out:
    return rc;
}

lf_status lf__chain_flush(lf_nexus *nexus)
{
    nexus_chain *chain = nexus->chain;
    lf_status rc = LF_OK;
    for (int32_t r = 0; chain && r < nexus->plan.n_runs; r++) {
        LF_TRY(queue(chain, land_run, &chain->runs[r]));
        LF_TRY(lf__event_mark(chain->runs[r].landed, chain->stream));
    }
out:
    return rc;
}

/* On the host of a device, asking now and then: a wait inside the driver could not be given up. */
static lf_status await_on_host(lf_nexus *nexus, lf_event *landed)
{
    const int64_t deadline = lf__now_ns() + (int64_t)(nexus->opts.timeout_s * 1e9);
    lf_status rc;
    while ((rc = lf_event_query(landed)) == LF_AGAIN) {
        rc = lf__nexus_call_check(nexus);
        if (rc < 0) return rc;
        if (lf__now_ns() > deadline)
            return LF_FAIL(LF_ERR_TIMEOUT, "not there after %g s; hint: has another rank died?", nexus->opts.timeout_s);
        lf__sleep_ns(50000);
    }
    return rc;
}

lf_status lf__chain_take(lf_nexus *nexus, int32_t run, lf_stream *stream)
{
    nexus_chain *chain = nexus->chain;
    lf_event *landed = chain->runs[run].landed;
    lf_status rc = stream            ? lf_stream_wait(stream, landed)
                   : chain->threaded ? lf_event_sync(landed) /* its worker's waits have deadlines */
                                     : await_on_host(nexus, landed);
    return rc == LF_OK ? lf__chain_check(nexus) : rc;
}

void lf__chain_lock(lf_nexus *nexus)
{
    if (nexus->chain) lf__lock(nexus->chain->mutex);
}

void lf__chain_unlock(lf_nexus *nexus)
{
    if (nexus->chain) lf__unlock(nexus->chain->mutex);
}
