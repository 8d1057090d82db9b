/* SPDX-License-Identifier: Apache-2.0 */
/* Another chunk size between steps: the schedule is made anew, and compared with all ranks as when the handle was opened. */
#include "nexus_int.h"

const char *lf__nexus_why_fixed(const lf_nexus *nexus)
{
    return nexus->sparse.n_chunks ? "chunks in the sparse form keep residuals by their cut; hint: comm_strategy = dense" : NULL;
}

static lf_status check_retune(lf_nexus *nexus)
{
    const char *fixed = lf__nexus_why_fixed(nexus);
    lf_status rc = lf__nexus_check_health(nexus);
    if (rc < 0) return rc;
    if (!nexus->transport.post) return LF_FAIL(LF_ERR_STATE, "nexus was opened without a transport and only shows the schedule");
    if (nexus->running)
        return LF_FAIL(LF_ERR_STATE, "another chunk size in the middle of a step; hint: lf_nexus_finish or lf_nexus_take first");
    if (fixed) return LF_FAIL(LF_ERR_UNSUPPORTED, "the chunk size cannot change: %s", fixed);
    if (nexus->sparse.dirty)
        return LF_FAIL(LF_ERR_STATE, "part of the gradients is kept back by the cut of now; hint: one step first takes it along");
    return lf__shard_check(nexus);
}

/* What was loaded for dense chunks has gone into the last step. */
static void drop_residuals(lf_nexus *nexus)
{
    for (int32_t i = 0; i < nexus->plan.n_chunks; i++) lf__sparse_drop_residual(nexus, &nexus->plan.chunks[i]);
    nexus->sparse.own = nexus->sparse.flushing = false;
}

/* Readers of the trace look at the schedule without the handle's lock. Labels of its runs stay. */
static lf_status replace_plan(lf_nexus *nexus, nexus_schedule *plan)
{
    nexus_run **more = lf__realloc(nexus->superseded, (size_t)nexus->n_superseded + 1, sizeof *more);
    if (!more) return LF_FAIL(LF_ERR_NOMEM, "a schedule of %d chunks", plan->n_chunks);
    nexus->superseded = more;
    nexus->superseded[nexus->n_superseded++] = nexus->plan.runs;
    nexus->plan.runs = NULL;
    lf__lock(nexus->trace.mutex);
    const nexus_schedule before = nexus->plan;
    nexus->plan = *plan;
    *plan = before;
    const lf_status rc = lf__nexus_resolve_chunks(nexus);
    lf__unlock(nexus->trace.mutex);
    return rc;
}

lf_status lf__nexus_retune(lf_nexus *nexus, int64_t chunk_bytes, lf_stream *stream)
{
    nexus_schedule plan = {0};
    lf_status rc = check_retune(nexus);
    if (rc < 0) return rc;
    nexus->capture = 0; /* the newest step may have been captured; this is not */
    LF_TRY(lf__shard_gather_state(nexus, stream));
    LF_TRY(lf__nexus_call_settle(nexus));
    LF_TRY(lf_stream_sync(stream)); /* what is queued there of the last step works on chunks of now */
    drop_residuals(nexus);
    LF_TRY(lf__nexus_schedule(&plan, nexus->map, chunk_bytes, nexus->opts.run_bytes));
    lf__nexus_keep_forms(nexus, &plan);
    lf__nexus_spans_read(nexus);
    lf__nexus_spans_close(nexus);
    LF_TRY(replace_plan(nexus, &plan));
    nexus->opts.chunk_bytes = chunk_bytes;
    nexus->captured = nexus->flushed = false;
    LF_TRY(lf__nexus_spans_open(nexus));
    LF_TRY(lf__wire_open(nexus));
    LF_TRY(lf__sparse_open(nexus));
    LF_TRY(lf__shard_open(nexus));
    LF_TRY(lf__debug_resize(nexus));
    LF_TRY(lf__nexus_agree(nexus));
out:
    lf__nexus_schedule_free(&plan);
    return rc < 0 ? lf__nexus_fail_step(nexus, lf__fail_prefix(rc, "changing chunk_bytes to %lld", (long long)chunk_bytes)) : rc;
}

lf_status lf_nexus_retune(lf_nexus *nexus, int64_t chunk_bytes, lf_stream *stream)
{
    LF_CHECK_ARG(nexus, "nexus is NULL");
    LF_CHECK_ARG(chunk_bytes >= 4096 && chunk_bytes <= 1ll << 40, "chunk_bytes is %lld, expected 4096 to %lld",
                 (long long)chunk_bytes, 1ll << 40);
    lf__lock(nexus->mutex);
    lf_status rc = lf__nexus_retune(nexus, chunk_bytes, stream);
    if (rc == LF_OK && !nexus->tuning.tuner.settled) {
        nexus->tuning.tuner = (nexus_tuner){.settled = true};
        nexus->tuning.why = "lf_nexus_retune was given a size";
    }
    lf__unlock(nexus->mutex);
    return rc;
}
