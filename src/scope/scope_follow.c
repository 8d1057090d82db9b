/* SPDX-License-Identifier: Apache-2.0 */
/* Following a device: steps in flight in a ring of pages, figures taken from a page when the begin of the next step is done. */
#include "scope_int.h"

/* ---- opening, closing ----------------------------------------------------------------------------------------------- */

static lf_status find_kernels(lf__follow *f)
{
    if (lf__device_is_cpu(f->device)) return LF_OK;
    const void *found = NULL;
    lf_status rc = lf__device_kernels(f->device, "scope", &found);
    f->kernels = found;
    if (rc == LF_OK && f->kernels->size != sizeof *f->kernels)
        return LF_FAIL(LF_ERR_UNSUPPORTED, "kernels %s have a table of %u bytes, expected %zu; hint: rebuild both together",
                       f->kernels->name, f->kernels->size, sizeof *f->kernels);
    return rc;
}

static lf_status open_flight(lf__follow *f, int32_t i)
{
    lf__flight *s = &f->flights[i];
    s->open = (lf__stamp){f->meter, &f->pages[i], 0, LF_STAMP_OPEN, 0};
    s->close = (lf__stamp){f->meter, NULL, 0, LF_STAMP_CLOSE, 0};
    lf_status rc = lf_event_open(f->device, &s->begun);
    return rc < 0 ? rc : lf_event_open(f->device, &s->ended);
}

static lf_status open_follow(lf_device *device, lf_stream *stream, int32_t depth, lf__follow **out)
{
    lf_status rc = LF_OK;
    lf__follow *f = lf__alloc(sizeof *f);
    if (!f) return LF_FAIL(LF_ERR_NOMEM, "step clock of a device");
    f->device = lf__device_ref(device);
    f->stream = stream;
    f->depth = depth;
    f->flights = lf__alloc_array((size_t)depth, sizeof *f->flights);
    if (!f->flights) LF_THROW(LF_ERR_NOMEM, "step clock of a device: %d steps in flight", depth);
    LF_TRY(find_kernels(f));
    LF_TRY(lf_device_alloc(device, sizeof *f->meter, (void **)&f->meter));
    LF_TRY(lf_host_alloc(device, (size_t)depth * sizeof *f->pages, (void **)&f->pages));
    for (int32_t i = 0; i < depth; i++) {
        f->pages[i] = (lf__meter_page){.opened = -1, .closed = -1};
        LF_TRY(open_flight(f, i));
    }
    for (int32_t end = 0; end < 2; end++)
        for (int32_t part = 0; part < LF_N_PARTS; part++)
            f->mark[end][part] = (lf__stamp){f->meter, NULL, 0, end ? LF_STAMP_END : LF_STAMP_BEGIN, part};
    LF_TRY(lf_fill(device, f->meter, 0, sizeof *f->meter, NULL));
    LF_TRY(lf__stamp_queue(f, &f->flights[0].close, stream)); /* closes nothing; a kernel must not be loaded during a capture */
    *out = f;
    f = NULL;
out:
    lf__follow_close(f);
    return rc;
}

lf_status lf_clock_follow(lf_clock *clock, lf_device *device, lf_stream *stream, int32_t depth)
{
    LF_CHECK_ARG(clock, "clock is NULL");
    LF_CHECK_ARG(depth == 0 || (depth >= 2 && depth <= LF_CLOCK_DEPTH_MOST), "depth is %d, expected 2 to %d, or 0: %d", depth,
                 LF_CLOCK_DEPTH_MOST, LF_CLOCK_DEPTH);
    lf__lock(clock->lock);
    bool late = clock->begun || clock->follow;
    lf__unlock(clock->lock);
    if (late) return LF_FAIL(LF_ERR_STATE, "the clock has begun steps or follows a device already; hint: open another clock");
    if (!device || (!stream && lf__device_is_cpu(device))) return LF_OK;
    LF_CHECK_ARG(stream, "stream is NULL, expected the one that steps run on: work on none would be waited for");
    lf__follow *follow = NULL;
    lf_status rc = open_follow(device, stream, depth ? depth : LF_CLOCK_DEPTH, &follow);
    lf__lock(clock->lock);
    clock->follow = follow;
    lf__unlock(clock->lock);
    return rc;
}

lf_device *lf_clock_device(const lf_clock *clock) { return clock && clock->follow ? clock->follow->device : NULL; }

void lf__follow_close(lf__follow *f)
{
    if (!f) return;
    lf_event *last = f->flights ? f->flights[0].ended : NULL; /* any event serves: it is recorded behind all stamps */
    if (last && lf_event_record(last, f->stream) == LF_OK) (void)lf_event_sync(last);
    for (int32_t i = 0; f->flights && i < f->depth; i++) {
        lf_event_close(f->flights[i].begun);
        lf_event_close(f->flights[i].ended);
    }
    lf_host_free(f->device, f->pages);
    if (!f->captured) lf_device_free(f->device, f->meter); /* else a graph may still have stamps, and nothing tells */
    lf__free(f->flights);
    lf_device_close(f->device);
    lf__free(f);
}

/* ---- stamping ------------------------------------------------------------------------------------------------------- */

static lf__flight *flight_of(const lf__follow *f, int64_t ticket) { return &f->flights[ticket % f->depth]; }

lf_status lf__follow_begin(lf_clock *clock)
{
    lf__follow *f = clock->follow;
    lf__lock(clock->lock);
    lf_status rc = lf__follow_collect(clock);
    if (rc == LF_OK && f->head - f->tail == f->depth) rc = LF_AGAIN;
    lf__unlock(clock->lock);
    if (rc != LF_OK) return rc;
    lf__flight *s = flight_of(f, f->head); /* free: nobody else looks at it before the head moves */
    s->state = LF_FLIGHT_OPEN;
    s->alone = false;
    s->open.ticket = s->close.ticket = f->head;
    rc = lf__stamp_queue(f, &s->open, f->stream);
    if (rc == LF_OK) rc = lf_event_record(s->begun, f->stream);
    if (rc < 0) return rc;
    lf__lock(clock->lock);
    f->head++;
    lf__unlock(clock->lock);
    return LF_OK;
}

lf_status lf__follow_end(lf_clock *clock, int64_t tokens)
{
    lf__follow *f = clock->follow;
    lf__flight *s = flight_of(f, f->head - 1);
    lf_status rc = lf__stamp_queue(f, &s->close, f->stream);
    if (rc == LF_OK) rc = lf_event_record(s->ended, f->stream);
    if (rc < 0) return rc;
    lf__lock(clock->lock);
    s->host = clock->now;
    s->tokens = tokens;
    s->step = clock->n_ended++;
    s->state = LF_FLIGHT_ENDED;
    clock->now = (lf__host_times){0};
    clock->in_step = false;
    lf__unlock(clock->lock);
    return LF_OK;
}

lf_status lf__follow_mark(lf__follow *follow, int32_t end, int32_t part, lf_stream *stream)
{
    return lf__stamp_queue(follow, &follow->mark[end][part], stream);
}

void lf__follow_cut(lf__follow *f, bool cancel)
{
    if (f->head == f->tail) return;
    lf__flight *s = flight_of(f, f->head - 1);
    s->alone = true;
    if (cancel) s->state = LF_FLIGHT_CANCELLED;
}

/* ---- reading late --------------------------------------------------------------------------------------------------- */

static double max_of(double a, double b) { return a > b ? a : b; }

void lf__follow_figures(const lf__meter_page *page, int64_t until_ns, const lf__host_times *host, lf__part_times *out)
{
    int64_t idle_ns = until_ns - page->begin_ns;
    double claimed = 0;
    *out = (lf__part_times){.wall_s = (double)idle_ns * 1e-9, .gap_s = (double)(until_ns - page->end_ns) * 1e-9};
    for (int32_t i = 0; i < LF_N_PARTS; i++) {
        idle_ns -= page->part_ns[i];
        claimed += host->exposed_s[i];
    }
    const double idle = (double)idle_ns * 1e-9, share = claimed > idle ? idle / claimed : 1;
    for (int32_t i = 0; i < LF_N_PARTS; i++) {
        const double part = (double)page->part_ns[i] * 1e-9;
        const bool on_device = i == LF_PART_COMPUTE || i == LF_PART_OPTIMIZER;
        out->exposed_s[i] = part + share * host->exposed_s[i];
        out->busy_s[i] = host->busy_s[i] + (on_device ? part : max_of(part, host->trainer_s[i]));
    }
    const double rest = max_of(idle - claimed, 0); /* nobody was waited for */
    out->exposed_s[LF_PART_COMPUTE] += rest;
    if (!(page->seen & 1 << LF_PART_COMPUTE)) out->busy_s[LF_PART_COMPUTE] += max_of(rest - out->gap_s, 0);
}

/* False when the step is lost; `why` says how. */
static bool read_flight(const lf__flight *s, int64_t until_ns, lf__part_times *out, const char **why)
{
    const lf__meter_page *page = s->open.page;
    *why = page->opened != s->open.ticket || page->closed != s->open.ticket ? "the stream dropped its stamps after an error"
           : page->wrong ? "marks were not ended in the reverse order of their begins, or left open, or more than 8 deep"
                         : NULL;
    if (*why) return false;
    lf__follow_figures(page, until_ns, &s->host, out);
    out->steps = 1;
    out->tokens = s->tokens;
    out->step = s->step;
    return true;
}

static void take_flight(lf_clock *clock, const lf__flight *s, int64_t until_ns)
{
    const char *why;
    lf__part_times times;
    if (read_flight(s, until_ns, &times, &why)) {
        lf__clock_count(clock, &times, until_ns - s->open.page->begin_ns);
        return;
    }
    clock->lost++;
    lf__fault_keep(&clock->fault, LF_FAIL(LF_ERR_STATE, "step %lld has no figures: %s", (long long)s->step, why));
}

lf_status lf__follow_collect(lf_clock *clock)
{
    lf__follow *f = clock->follow;
    for (; f->tail < f->head; f->tail++) {
        const lf__flight *s = flight_of(f, f->tail);
        const lf__flight *next = !s->alone && f->tail + 1 < f->head ? flight_of(f, f->tail + 1) : NULL;
        const bool dropped = s->state == LF_FLIGHT_CANCELLED;
        if (s->state == LF_FLIGHT_OPEN || !(s->alone || next)) break;
        lf_status rc = lf_event_query(dropped ? s->begun : next ? next->begun : s->ended);
        if (rc != LF_OK) return rc < 0 ? rc : LF_OK;
        if (dropped) continue; /* its stamp is done: the place can be used again */
        const bool follows = next && next->open.page->opened == next->open.ticket;
        take_flight(clock, s, follows ? next->open.page->begin_ns : s->open.page->end_ns);
    }
    return LF_OK;
}

bool lf__follow_pending(const lf_clock *clock, lf__part_times *out, int64_t *wall_ns)
{
    const lf__follow *f = clock->follow;
    if (f->tail == f->head) return false;
    const lf__flight *s = flight_of(f, f->tail);
    const char *why;
    if (s->state != LF_FLIGHT_ENDED || lf_event_query(s->ended) != LF_OK) return false;
    *wall_ns = s->open.page->end_ns - s->open.page->begin_ns;
    return read_flight(s, s->open.page->end_ns, out, &why);
}

lf_status lf__follow_wait_oldest(lf_clock *clock)
{
    lf__follow *f = clock->follow;
    lf__lock(clock->lock);
    lf_event *next = f->head - f->tail >= 2 ? flight_of(f, f->tail + 1)->begun : NULL;
    lf__unlock(clock->lock);
    return next ? lf_event_sync(next) : LF_OK;
}

lf_status lf__follow_wait_ended(lf_clock *clock)
{
    const lf__follow *f = clock->follow;
    lf_event *ended = NULL;
    lf__lock(clock->lock);
    for (int64_t t = f->head; t > f->tail && !ended; t--)
        if (flight_of(f, t - 1)->state == LF_FLIGHT_ENDED) ended = flight_of(f, t - 1)->ended;
    lf__unlock(clock->lock);
    return ended ? lf_event_sync(ended) : LF_OK;
}
