/* SPDX-License-Identifier: Apache-2.0 */
/* The last collectives, for the report of a failure. A lock of its own: the handle's is held while the transport waits. */
#include "nexus_int.h"

lf_status lf__nexus_trace_open(lf_nexus *nexus)
{
    nexus->trace.mutex = lf__mutex_open();
    return nexus->trace.mutex ? LF_OK : LF_FAIL(LF_ERR_NOMEM, "nexus");
}

void lf__nexus_trace_close(lf_nexus *nexus) { lf__mutex_close(nexus->trace.mutex); }

void lf__nexus_trace_post(lf_nexus *nexus, const void *data, int64_t count, int32_t dtype, int64_t ticket, lf_status rc)
{
    nexus_trace *t = &nexus->trace;
    lf__lock(t->mutex);
    t->ring[t->n % LF_NEXUS_RECENT] = (nexus_traced){.seq = t->n,
                                                     .data = data,
                                                     .count = count,
                                                     .dtype = dtype,
                                                     .ticket = ticket,
                                                     .began_ns = lf__now_ns(),
                                                     .state = rc < 0 ? LF_COLLECTIVE_FAILED : LF_COLLECTIVE_POSTED};
    t->n++;
    lf__unlock(t->mutex);
}

/* Those of a run have one ticket. */
void lf__nexus_trace_wait(lf_nexus *nexus, int64_t ticket, lf_status rc)
{
    nexus_trace *t = &nexus->trace;
    lf__lock(t->mutex);
    const int64_t oldest = t->n > LF_NEXUS_RECENT ? t->n - LF_NEXUS_RECENT : 0;
    for (int64_t i = oldest; i < t->n; i++) {
        nexus_traced *e = &t->ring[i % LF_NEXUS_RECENT];
        if (e->ticket != ticket || e->state != LF_COLLECTIVE_POSTED) continue;
        e->state = rc < 0 ? LF_COLLECTIVE_FAILED : LF_COLLECTIVE_DONE;
        e->ended_ns = lf__now_ns();
    }
    lf__unlock(t->mutex);
}

/* A chunk's collective may begin inside it: the rest of one that ranks share. */
static int32_t chunk_at(const nexus_schedule *plan, const void *data)
{
    for (int32_t i = 0; i < plan->n_chunks; i++) {
        const nexus_chunk *c = &plan->chunks[i];
        const char *begin = c->data;
        if (begin && (const char *)data >= begin && (const char *)data < begin + c->bytes) return i;
        if (c->wire && (const uint16_t *)data >= c->wire && (const uint16_t *)data < c->wire + c->range.count) return i;
        if (c->topk.mask && (c->topk.mask == data || c->topk.values == data)) return i;
    }
    return -1;
}

lf_status lf_nexus_get_recent(const lf_nexus *nexus, int32_t back, lf_collective_info *info)
{
    LF_CHECK_ARG(nexus && info && back >= 0, "nexus or info is NULL, or back is negative");
    LF_CHECK_ARG(info->size == sizeof *info, "lf_collective_info: size is %zu, expected %zu", info->size, sizeof *info);
    const nexus_trace *t = &nexus->trace;
    lf__lock(t->mutex);
    const bool kept = back < LF_NEXUS_RECENT && back < t->n;
    const nexus_traced e = kept ? t->ring[(t->n - 1 - back) % LF_NEXUS_RECENT] : (nexus_traced){0};
    const int32_t chunk = kept ? chunk_at(&nexus->plan, e.data) : -1; /* a schedule is replaced under this lock */
    lf__unlock(t->mutex);
    if (!kept) return LF_END;
    const int64_t until = e.state == LF_COLLECTIVE_POSTED ? lf__now_ns() : e.ended_ns;
    *info = (lf_collective_info){.size = sizeof *info,
                                 .state = e.state,
                                 .seq = e.seq,
                                 .chunk = chunk,
                                 .dtype = e.dtype,
                                 .count = e.count,
                                 .bytes = e.count * (int64_t)lf_dtype_bytes(e.dtype),
                                 .seconds = (double)(until - e.began_ns) * 1e-9};
    return LF_OK;
}
