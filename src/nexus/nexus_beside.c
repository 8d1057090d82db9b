/* SPDX-License-Identifier: Apache-2.0 */
/* Beside the steps: health, small sums, captures, statistics. */
#include "nexus_int.h"

lf_status lf_nexus_check(lf_nexus *nexus)
{
    LF_CHECK_ARG(nexus, "nexus is NULL");
    lf__lock(nexus->mutex);
    lf_status rc = lf__nexus_check_health(nexus);
    lf__unlock(nexus->mutex);
    return rc;
}

lf_status lf_nexus_settle(lf_nexus *nexus)
{
    LF_CHECK_ARG(nexus, "nexus is NULL");
    lf_status rc = LF_OK;
    lf__lock(nexus->mutex);
    LF_TRY(lf__nexus_check_health(nexus));
    rc = lf__chain_rest(nexus);
    if (rc == LF_OK) rc = lf__nexus_call_settle(nexus);
    if (rc < 0) LF_TRY(lf__nexus_fail_step(nexus, rc));
out:
    lf__unlock(nexus->mutex);
    return rc;
}

lf_status lf_nexus_reduce(lf_nexus *nexus, void *data, int64_t count, int32_t dtype, lf_stream *stream)
{
    LF_CHECK_ARG(nexus && count >= 0 && (data || count == 0), "nexus or data is NULL, or count is negative");
    LF_CHECK_ARG(dtype == LF_DTYPE_F64 || dtype == LF_DTYPE_I64, "dtype is %s, expected f64 or i64", lf_dtype_name(dtype));
    lf_status rc = LF_OK;
    int64_t ticket = 0;
    lf__lock(nexus->mutex);
    LF_TRY(lf__nexus_check_health(nexus));
    if (!nexus->transport.post) LF_THROW(LF_ERR_STATE, "nexus was opened without a transport and only shows the schedule");
    if (nexus->running)
        LF_THROW(LF_ERR_STATE,
                 "a sum beside the gradients while a step is running: ranks could not agree which comes first; hint: "
                 "before the backward pass, or after it");
    LF_TRY(lf__shard_check(nexus));
    rc = lf__chain_rest(nexus);
    if (rc == LF_OK) rc = lf__debug_compare(nexus, NEXUS_BESIDE, 0, 0, count, dtype, stream);
    if (rc == LF_OK) rc = lf__nexus_post(nexus, data, count, dtype, stream, &ticket);
    if (rc == LF_OK) rc = lf__nexus_wait(nexus, ticket, stream);
    if (rc < 0) {
        rc = lf__fail_prefix(rc, "a sum of %lld %s beside the gradients", (long long)count, lf_dtype_name(dtype));
        LF_TRY(lf__nexus_fail_step(nexus, rc));
    }
out:
    lf__unlock(nexus->mutex);
    return rc;
}

lf_status lf_nexus_cancel(lf_nexus *nexus)
{
    LF_CHECK_ARG(nexus, "nexus is NULL");
    lf_status rc = LF_OK;
    lf__lock(nexus->mutex);
    if (nexus->ran && (nexus->running || nexus->fault.status < 0))
        LF_THROW(LF_ERR_STATE, "part of the step has run, so ranks no longer agree; hint: restart from a checkpoint");
    LF_TRY(lf__nexus_call_check(nexus));
    if (nexus->running || nexus->fault.status < 0) nexus->fault = (lf__fault){0};
    if (nexus->running) lf__sparse_cancel(nexus);
    nexus->running = nexus->flushed = false;
    nexus->n_gathers = 0;
out:
    lf__unlock(nexus->mutex);
    return rc;
}

lf_status lf_nexus_replayed(lf_nexus *nexus, lf_stream *stream)
{
    LF_CHECK_ARG(nexus, "nexus is NULL");
    lf_status rc = LF_OK;
    lf__lock(nexus->mutex);
    LF_TRY(lf__nexus_check_health(nexus));
    if (!nexus->captured) LF_THROW(LF_ERR_STATE, "no step was captured; hint: begin, marks and finish on a capturing stream");
    rc = lf__nexus_call_replayed(nexus, stream);
    if (rc < 0) LF_TRY(lf__nexus_fail_step(nexus, rc));
    nexus->steps++;
    for (int32_t i = 0; i < nexus->plan.n_chunks; i++) {
        nexus->collectives++;
        nexus->bytes += lf__nexus_sent_bytes(&nexus->plan.chunks[i]);
    }
out:
    lf__unlock(nexus->mutex);
    return rc;
}

lf_status lf_nexus_get_stats(const lf_nexus *nexus_, lf_nexus_stats *stats)
{
    LF_CHECK_ARG(nexus_ && stats, "nexus or stats is NULL");
    LF_CHECK_ARG(stats->size == sizeof *stats, "lf_nexus_stats: size is %zu, expected %zu", stats->size, sizeof *stats);
    lf_nexus *nexus = (lf_nexus *)nexus_; /* reading the clock's events is no change that a caller sees */
    lf__lock(nexus->mutex);
    lf__nexus_spans_read(nexus);
    lf__chain_lock(nexus);
    *stats = (lf_nexus_stats){.size = sizeof *stats,
                              .steps = nexus->steps,
                              .collectives = nexus->collectives,
                              .bytes = nexus->bytes,
                              .late_blocks = nexus->late_blocks,
                              .exposed_s = nexus->exposed_s,
                              .held_s = nexus->held_s,
                              .p50_s = lf__hist_percentile(&nexus->hist, 50),
                              .p95_s = lf__hist_percentile(&nexus->hist, 95),
                              .p99_s = lf__hist_percentile(&nexus->hist, 99),
                              .busy_s = nexus->hist.sum_s,
                              .skipped = nexus->skipped,
                              .skipped_bytes = nexus->skipped_bytes};
    lf__chain_unlock(nexus);
    int64_t timed_bytes = stats->bytes;
    lf_status rc = lf__nexus_call_stats(nexus, stats, &timed_bytes);
    if (stats->busy_s > 0) {
        const double world = nexus->transport.world;
        stats->bus_bytes_s = (double)timed_bytes * 2 * (world - 1) / world / stats->busy_s;
        stats->exposed_share = stats->exposed_s / stats->busy_s;
    }
    lf__unlock(nexus->mutex);
    return rc;
}
