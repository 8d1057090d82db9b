/* SPDX-License-Identifier: Apache-2.0 */
/* CPU streams: one worker thread each, fed through a ring of jobs; events by generation.
 *
 * An event's record raises its generation when it is queued and marks that generation done when it is reached, so a wait
 * captures the record it was queued behind, and a later record does not disturb it. Jobs hold a reference to their event:
 * closing an event that is still queued is safe. */
#include <stdatomic.h>
#include <string.h>

#include "cpu_int.h"

typedef struct cpu_event {
    lf__mutex *mutex;
    uint64_t recorded, done; /* generations */
    int64_t time_ns;         /* when the newest done generation was reached */
    _Atomic int32_t refs;
} cpu_event;

enum { JOB_COPY, JOB_FILL, JOB_RUN, JOB_RECORD, JOB_WAIT };

typedef struct job {
    int32_t kind, byte;
    void *dst;
    const void *src;
    size_t bytes;
    lf_host_fn fn;
    void *user;
    cpu_event *event;
    uint64_t generation;
} job;

typedef struct cpu_stream {
    lf__mutex *mutex;
    lf__thread *thread;
    job *ring;
    size_t room;           /* a power of two */
    uint64_t queued, done; /* jobs ever */
    bool stop;
    lf__fault fault; /* the first error since the last sync */
} cpu_stream;

/* ---- events --------------------------------------------------------------------------------------------------------- */

static void event_unref(cpu_event *event)
{
    if (atomic_fetch_sub(&event->refs, 1) != 1) return;
    lf__mutex_close(event->mutex);
    lf__free(event);
}

static void event_mark(cpu_event *event, uint64_t generation)
{
    lf__lock(event->mutex);
    if (generation > event->done) {
        event->done = generation;
        event->time_ns = lf__now_ns();
        lf__wake(event->mutex);
    }
    lf__unlock(event->mutex);
}

static void event_await(cpu_event *event, uint64_t generation)
{
    lf__lock(event->mutex);
    while (event->done < generation) lf__wait(event->mutex);
    lf__unlock(event->mutex);
}

static uint64_t event_generation(cpu_event *event)
{
    lf__lock(event->mutex);
    uint64_t generation = event->recorded;
    lf__unlock(event->mutex);
    return generation;
}

lf_status lf__cpu_event_open(void *context, void **out)
{
    (void)context;
    cpu_event *event = lf__alloc(sizeof *event);
    if (event) event->mutex = lf__mutex_open();
    if (!event || !event->mutex) {
        lf__free(event);
        return LF_FAIL(LF_ERR_NOMEM, "event");
    }
    atomic_init(&event->refs, 1);
    *out = event;
    return LF_OK;
}

void lf__cpu_event_close(void *context, void *event)
{
    (void)context;
    event_unref(event);
}

lf_status lf__cpu_event_query(void *context, void *event_)
{
    (void)context;
    cpu_event *event = event_;
    lf__lock(event->mutex);
    bool done = event->done >= event->recorded;
    lf__unlock(event->mutex);
    return done ? LF_OK : LF_AGAIN;
}

lf_status lf__cpu_event_sync(void *context, void *event)
{
    (void)context;
    event_await(event, event_generation(event));
    return LF_OK;
}

lf_status lf__cpu_event_elapsed(void *context, void *from_, void *to_, double *seconds)
{
    (void)context;
    cpu_event *events[2] = {from_, to_};
    int64_t at[2];
    for (int32_t i = 0; i < 2; i++) {
        lf__lock(events[i]->mutex);
        bool never = events[i]->recorded == 0, pending = events[i]->done < events[i]->recorded;
        at[i] = events[i]->time_ns;
        lf__unlock(events[i]->mutex);
        if (never) return LF_FAIL(LF_ERR_STATE, "elapsed: the %s event was never recorded", i ? "second" : "first");
        if (pending) return LF_AGAIN;
    }
    *seconds = (double)(at[1] - at[0]) * 1e-9;
    return LF_OK;
}

/* ---- the worker ----------------------------------------------------------------------------------------------------- */

/* Records and waits happen also after an error: other streams count on them. */
static lf_status run_job(const job *j, bool skip)
{
    switch (j->kind) {
    case JOB_COPY:
        if (!skip) memmove(j->dst, j->src, j->bytes);
        return LF_OK;
    case JOB_FILL:
        if (!skip) memset(j->dst, j->byte, j->bytes);
        return LF_OK;
    case JOB_RUN: return skip ? LF_OK : j->fn(j->user);
    case JOB_RECORD: event_mark(j->event, j->generation); break;
    default: event_await(j->event, j->generation); break;
    }
    event_unref(j->event);
    return LF_OK;
}

static void stream_work(void *user)
{
    cpu_stream *s = user;
    lf__lock(s->mutex);
    for (;;) {
        while (s->done == s->queued && !s->stop) lf__wait(s->mutex);
        if (s->done == s->queued) break;
        job j = s->ring[s->done & (s->room - 1)];
        bool skip = s->fault.status < 0;
        lf__unlock(s->mutex);
        lf_status rc = run_job(&j, skip);
        lf__lock(s->mutex);
        lf__fault_keep(&s->fault, rc);
        s->done++;
        lf__wake(s->mutex);
    }
    lf__unlock(s->mutex);
}

/* The ring doubles when full: after warm-up a stream allocates nothing. */
static lf_status grow_ring(cpu_stream *s)
{
    job *bigger = lf__alloc_array(s->room * 2, sizeof *bigger);
    if (!bigger) return LF_FAIL(LF_ERR_NOMEM, "stream queue of %zu jobs", s->room * 2);
    for (uint64_t i = s->done; i < s->queued; i++) bigger[i & (s->room * 2 - 1)] = s->ring[i & (s->room - 1)];
    lf__free(s->ring);
    s->ring = bigger;
    s->room *= 2;
    return LF_OK;
}

static lf_status push(cpu_stream *s, const job *j)
{
    lf_status rc = LF_OK;
    if (j->event) atomic_fetch_add(&j->event->refs, 1);
    if (!s) return run_job(j, false);
    lf__lock(s->mutex);
    if (s->queued - s->done == s->room) rc = grow_ring(s);
    if (rc == LF_OK) {
        s->ring[s->queued++ & (s->room - 1)] = *j;
        lf__wake(s->mutex);
    }
    lf__unlock(s->mutex);
    if (rc < 0 && j->event) event_unref(j->event);
    return rc;
}

/* ---- the table's entries --------------------------------------------------------------------------------------------- */

lf_status lf__cpu_stream_open(void *context, int32_t priority, void **out)
{
    (void)context;
    LF_CHECK_ARG(priority == 0, "priority %d, expected 0 on the CPU", priority);
    lf_status rc = LF_OK;
    cpu_stream *s = lf__alloc(sizeof *s);
    if (!s) return LF_FAIL(LF_ERR_NOMEM, "stream");
    s->room = 64;
    s->mutex = lf__mutex_open();
    s->ring = lf__alloc_array(s->room, sizeof *s->ring);
    if (!s->mutex || !s->ring) LF_THROW(LF_ERR_NOMEM, "stream");
    LF_TRY(lf__thread_start(&s->thread, "lf-stream", stream_work, s));
    *out = s;
    s = NULL;
out:
    lf__cpu_stream_close(context, s);
    return rc;
}

lf_status lf__cpu_stream_wrap(void *context, void *native, void **out)
{
    (void)context;
    LF_CHECK_ARG(!native, "native stream %p, expected NULL on the CPU", native);
    *out = NULL; /* the calling thread */
    return LF_OK;
}

void lf__cpu_stream_close(void *context, void *stream)
{
    (void)context;
    cpu_stream *s = stream;
    if (!s) return;
    if (s->thread) {
        lf__lock(s->mutex);
        s->stop = true;
        lf__wake(s->mutex);
        lf__unlock(s->mutex);
        lf__thread_join(s->thread);
    }
    lf__mutex_close(s->mutex);
    lf__free(s->ring);
    lf__free(s);
}

void *lf__cpu_stream_native(void *context, void *stream)
{
    (void)context, (void)stream;
    return NULL;
}

lf_status lf__cpu_stream_sync(void *context, void *stream)
{
    (void)context;
    cpu_stream *s = stream;
    if (!s) return LF_OK;
    lf__lock(s->mutex);
    uint64_t upto = s->queued;
    while (s->done < upto) lf__wait(s->mutex);
    lf__fault fault = s->fault;
    s->fault = (lf__fault){0}; /* reported once; the stream goes on */
    lf__unlock(s->mutex);
    return lf__fault_raise(&fault);
}

lf_status lf__cpu_copy(void *context, void *dst, const void *src, size_t bytes, void *stream)
{
    (void)context;
    return push(stream, &(job){.kind = JOB_COPY, .dst = dst, .src = src, .bytes = bytes});
}

lf_status lf__cpu_fill(void *context, void *dst, int32_t byte, size_t bytes, void *stream)
{
    (void)context;
    return push(stream, &(job){.kind = JOB_FILL, .dst = dst, .byte = byte, .bytes = bytes});
}

lf_status lf__cpu_stream_run(void *context, void *stream, lf_host_fn fn, void *user)
{
    (void)context;
    return push(stream, &(job){.kind = JOB_RUN, .fn = fn, .user = user});
}

lf_status lf__cpu_event_record(void *context, void *event_, void *stream)
{
    (void)context;
    cpu_event *event = event_;
    lf__lock(event->mutex);
    uint64_t generation = ++event->recorded;
    lf__unlock(event->mutex);
    lf_status rc = push(stream, &(job){.kind = JOB_RECORD, .event = event, .generation = generation});
    if (rc < 0) event_mark(event, generation); /* nothing was queued: nobody may wait for it */
    return rc;
}

lf_status lf__cpu_stream_wait(void *context, void *stream, void *event)
{
    (void)context;
    return push(stream, &(job){.kind = JOB_WAIT, .event = event, .generation = event_generation(event)});
}
