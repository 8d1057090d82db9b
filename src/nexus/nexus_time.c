/* SPDX-License-Identifier: Apache-2.0 */
/* How long a step waited for its reductions. On a device finish does not keep the host waiting, so two events on the step's stream
 * tell it, read later without waiting. */
#include "nexus_int.h"

static lf_status open_span(lf_nexus *nexus, nexus_span *span)
{
    lf_status rc = lf_event_open(nexus->device, &span->from);
    return rc == LF_OK ? lf_event_open(nexus->device, &span->to) : rc;
}

static void close_span(nexus_span *span)
{
    lf_event_close(span->from);
    lf_event_close(span->to);
}

lf_status lf__nexus_spans_open(lf_nexus *nexus)
{
    lf_status rc = LF_OK;
    if (lf__device_is_cpu(nexus->device)) return LF_OK;
    for (int32_t i = 0; i < SPANS && rc == LF_OK; i++) rc = open_span(nexus, &nexus->spans[i]);
    return rc == LF_OK ? open_span(nexus, &nexus->captured_span) : rc;
}

void lf__nexus_spans_close(lf_nexus *nexus)
{
    for (int32_t i = 0; i < SPANS; i++) close_span(&nexus->spans[i]);
    close_span(&nexus->captured_span);
}

/* LF_AGAIN: not there yet. */
static lf_status read_span(lf_nexus *nexus, nexus_span *span)
{
    double seconds = 0;
    lf_status rc = lf_event_elapsed(span->from, span->to, &seconds);
    if (rc == LF_AGAIN) return rc;
    span->open = false;
    if (rc == LF_OK) nexus->exposed_s += nexus->last_exposed_s = seconds;
    return rc;
}

void lf__nexus_spans_read(lf_nexus *nexus)
{
    for (int32_t i = 0; i < SPANS; i++)
        if (nexus->spans[i].open) read_span(nexus, &nexus->spans[i]);
}

static nexus_span *span_of(lf_nexus *nexus)
{
    return nexus->capture ? &nexus->captured_span : &nexus->spans[nexus->steps % SPANS];
}

lf_status lf__nexus_span_begin(lf_nexus *nexus, lf_stream *stream)
{
    nexus_span *span = span_of(nexus);
    if (!span->from || !stream) return LF_OK;
    if (span->open && read_span(nexus, span) == LF_AGAIN) nexus->exposed_s += nexus->last_exposed_s; /* SPANS steps behind */
    span->open = false;
    return lf_event_record(span->from, stream);
}

lf_status lf__nexus_span_end(lf_nexus *nexus, lf_stream *stream)
{
    nexus_span *span = span_of(nexus);
    if (!span->to || !stream) return LF_OK;
    lf_status rc = lf_event_record(span->to, stream);
    span->open = rc == LF_OK && !nexus->capture;
    return rc;
}

/* The next replay may be recording the events already: a pair of two replays reads as not ready or below zero, and then the last good
 * reading stands for this step. */
void lf__nexus_span_of_replay(lf_nexus *nexus)
{
    double seconds = 0;
    const nexus_span *span = &nexus->captured_span;
    if (!span->from) return;
    if (lf_event_elapsed(span->from, span->to, &seconds) == LF_OK && seconds >= 0) nexus->last_exposed_s = seconds;
    nexus->exposed_s += nexus->last_exposed_s;
}
