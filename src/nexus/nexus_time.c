/* SPDX-License-Identifier: Apache-2.0 */
/* How long a step waited for its reductions. On a device a wait does not keep the host, so two events on the step's stream tell it,
 * read later without waiting. Of captured steps nothing is known here: an event in a graph holds its newest replay alone, which a host
 * that is ahead cannot tell from the one before. A step clock's marks of communication serve them. */
#include "nexus_int.h"

static int32_t n_spans(const lf_nexus *nexus) { return SPANS * nexus->plan.n_runs; }

lf_status lf__nexus_spans_open(lf_nexus *nexus)
{
    if (lf__device_is_cpu(nexus->device) || nexus->plan.n_runs == 0) return LF_OK;
    nexus->spans = lf__alloc_array((size_t)n_spans(nexus), sizeof *nexus->spans);
    return nexus->spans ? LF_OK : LF_FAIL(LF_ERR_NOMEM, "times of %d runs", nexus->plan.n_runs);
}

void lf__nexus_spans_close(lf_nexus *nexus)
{
    for (int32_t i = 0; nexus->spans && i < n_spans(nexus); i++) {
        lf_event_close(nexus->spans[i].from);
        lf_event_close(nexus->spans[i].to);
    }
    lf__free(nexus->spans);
    nexus->spans = NULL;
}

/* LF_AGAIN: not there yet. */
static lf_status read_span(lf_nexus *nexus, nexus_span *span)
{
    double seconds = 0;
    lf_status rc = lf_event_elapsed(span->from, span->to, &seconds);
    if (rc == LF_AGAIN) return rc;
    span->open = false;
    if (rc == LF_OK) nexus->exposed_s += span->last_s = seconds;
    return rc;
}

void lf__nexus_spans_read(lf_nexus *nexus)
{
    if (!nexus->spans) return;
    for (int32_t i = 0; i < n_spans(nexus); i++)
        if (nexus->spans[i].open) read_span(nexus, &nexus->spans[i]);
}

static nexus_span *span_of(lf_nexus *nexus, int32_t run, const lf_stream *stream)
{
    if (!nexus->spans || !stream || nexus->capture) return NULL;
    return nexus->spans + nexus->steps % SPANS * nexus->plan.n_runs + run;
}

lf_status lf__nexus_span_begin(lf_nexus *nexus, int32_t run, lf_stream *stream)
{
    nexus_span *span = span_of(nexus, run, stream);
    lf_status rc = LF_OK;
    if (!span) return LF_OK;
    if (!span->from) rc = lf_event_open(nexus->device, &span->from);
    if (!span->to && rc == LF_OK) rc = lf_event_open(nexus->device, &span->to);
    if (rc < 0) return rc;
    if (span->open && read_span(nexus, span) == LF_AGAIN) nexus->exposed_s += span->last_s; /* behind by SPANS */
    span->open = false;
    return lf_event_record(span->from, stream);
}

lf_status lf__nexus_span_end(lf_nexus *nexus, int32_t run, lf_stream *stream)
{
    nexus_span *span = span_of(nexus, run, stream);
    if (!span) return LF_OK;
    lf_status rc = lf_event_record(span->to, stream);
    span->open = rc == LF_OK;
    return rc;
}
