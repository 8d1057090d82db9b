/* SPDX-License-Identifier: Apache-2.0 */
/* The sharded optimizer: of each chunk a rank gets the sums of its own share, and what it makes of that goes to all ranks. */
#include "nexus_int.h"

enum { ALIGN = 64 }; /* elements of a share: whole cache lines and vectors in every plane */

void *lf__nexus_data(const nexus_chunk *c, const lf_range *part)
{
    return (char *)c->data + (part->offset - c->range.offset) * (int64_t)lf_dtype_bytes(c->dtype);
}

lf_status lf__shard_open(lf_nexus *nexus)
{
    const int32_t world = nexus->transport.world, rank = nexus->transport.rank;
    nexus->sharded = nexus->opts.shard_optimizer && world > 1;
    if (nexus->sharded && nexus->chain)
        return LF_FAIL(
            LF_ERR_INVALID,
            "shard_optimizer with chunks in the sparse form: a rank sums only its share, sparse sums are everyone's; hint: "
            "comm_strategy = dense");
    for (int32_t i = 0; i < nexus->plan.n_chunks; i++) {
        nexus_chunk *c = &nexus->plan.chunks[i];
        const int64_t part = nexus->sharded ? c->range.count / world / ALIGN * ALIGN : c->range.count;
        const int64_t covered = nexus->sharded ? part * world : part;
        c->share = c->rest = c->range;
        c->share.offset += nexus->sharded ? part * rank : 0;
        c->share.count = part;
        c->rest.offset += covered;
        c->rest.count -= covered;
    }
    if (!nexus->sharded) return LF_OK;
    lf__free(nexus->gather_ticket); /* of an earlier schedule */
    nexus->gather_ticket = lf__alloc_array((size_t)nexus->plan.n_chunks, sizeof *nexus->gather_ticket);
    return nexus->gather_ticket ? LF_OK : LF_FAIL(LF_ERR_NOMEM, "shares of %d chunks", nexus->plan.n_chunks);
}

lf_status lf__shard_post(lf_nexus *nexus, nexus_chunk *c, lf_stream *stream)
{
    if (!nexus->sharded || c->share.count == 0)
        return lf__nexus_post(nexus, lf__wire_data(c, &c->range), c->range.count, lf__wire_dtype(c), stream, &c->ticket);
    lf_status rc = lf__nexus_scatter(nexus, lf__wire_data(c, &c->range), c->share.count * nexus->transport.world,
                                     lf__wire_dtype(c), stream, &c->ticket);
    if (rc == LF_OK && c->rest.count)
        rc = lf__nexus_post(nexus, lf__wire_data(c, &c->rest), c->rest.count, lf__wire_dtype(c), stream, &c->rest_ticket);
    return rc;
}

lf_status lf__shard_wait(lf_nexus *nexus, nexus_chunk *c, lf_stream *stream)
{
    lf_status rc = lf__nexus_wait(nexus, c->ticket, stream);
    if (rc == LF_OK && nexus->sharded && c->share.count && c->rest.count) rc = lf__nexus_wait(nexus, c->rest_ticket, stream);
    return rc;
}

lf_status lf__shard_check(const lf_nexus *nexus)
{
    if (nexus->n_gathers == 0) return LF_OK;
    return LF_FAIL(LF_ERR_STATE, "%d gathers were not waited for; hint: lf_nexus_gathered", nexus->n_gathers);
}

static lf_status gather_chunk(lf_nexus *nexus, int32_t chunk, int32_t role, lf_stream *stream)
{
    const nexus_chunk *c = &nexus->plan.chunks[chunk];
    lf_class_info klass = {.size = sizeof klass};
    lf_range all = c->range;
    lf_status rc = lf_map_get_class(nexus->map, all.klass, &klass);
    if (rc < 0) return rc;
    all.count = c->share.count * nexus->transport.world;
    if (all.count == 0 || !klass.role_dtype[role]) return LF_OK;
    const int64_t bytes = all.count * (int64_t)lf_dtype_bytes(klass.role_dtype[role]);
    rc = lf__nexus_gather(nexus, lf_map_address(nexus->map, &all, role), bytes, stream, &nexus->gather_ticket[nexus->n_gathers]);
    if (rc == LF_OK) nexus->n_gathers++;
    if (rc == LF_OK && !nexus->capture) {
        nexus->collectives++;
        nexus->bytes += bytes;
    }
    return rc < 0 ? lf__fail_prefix(rc, "gathering %s of chunk %d of %d", lf_role_name(role), chunk, nexus->plan.n_chunks) : rc;
}

/* As runs, where the transport has them. */
static lf_status gather_chunks(lf_nexus *nexus, int32_t first, int32_t end, int32_t role, lf_stream *stream)
{
    lf_status rc = LF_OK;
    for (int32_t i = first; i < end && rc == LF_OK;) {
        const nexus_run *run = &nexus->plan.runs[nexus->plan.chunks[i].run];
        rc = lf__debug_compare(nexus, NEXUS_SHARES, i, end < run->end ? end : run->end, 0, role, stream);
        if (rc == LF_OK) rc = lf__nexus_call_run(nexus, 1, run->label);
        for (; i < end && i < run->end && rc == LF_OK; i++) rc = gather_chunk(nexus, i, role, stream);
        if (rc == LF_OK) rc = lf__nexus_call_run(nexus, 0, run->label);
    }
    return rc;
}

static lf_status wait_for_gathers(lf_nexus *nexus, lf_stream *stream)
{
    lf_status rc = LF_OK;
    for (int32_t i = 0; i < nexus->n_gathers && rc == LF_OK; i++) rc = lf__nexus_wait(nexus, nexus->gather_ticket[i], stream);
    nexus->n_gathers = 0;
    return rc < 0 ? lf__fail_prefix(rc, "gathering shares") : rc;
}

lf_status lf__shard_gather_state(lf_nexus *nexus, lf_stream *stream)
{
    static const int32_t roles[] = {LF_ROLE_MASTER, LF_ROLE_EXP_AVG, LF_ROLE_EXP_AVG_SQ};
    lf_status rc = LF_OK;
    for (size_t i = 0; i < LF_COUNT(roles) && rc == LF_OK && nexus->sharded; i++) {
        rc = gather_chunks(nexus, 0, nexus->plan.n_chunks, roles[i], stream);
        if (rc == LF_OK) rc = wait_for_gathers(nexus, NULL);
    }
    return rc;
}

lf_status lf_nexus_gather(lf_nexus *nexus, int32_t role, int32_t first, int32_t n, lf_stream *stream)
{
    LF_CHECK_ARG(nexus && role >= 0 && role < LF_N_ROLES, "nexus is NULL, or role %d is none", role);
    LF_CHECK_ARG(first >= 0 && n >= 0 && n <= nexus->plan.n_chunks - first, "chunks %d to %d, expected 0 to %d", first, first + n,
                 nexus->plan.n_chunks);
    lf_status rc = LF_OK;
    uint64_t capture = 0;
    lf__lock(nexus->mutex);
    LF_TRY(lf__nexus_check_health(nexus));
    if (!nexus->transport.post) LF_THROW(LF_ERR_STATE, "nexus was opened without a transport and only shows the schedule");
    if (nexus->running && !nexus->flushed)
        LF_THROW(LF_ERR_STATE, "gathering in the middle of a step; hint: lf_nexus_flush first");
    if (!nexus->sharded) goto out;
    if (n > nexus->plan.n_chunks - nexus->n_gathers) LF_TRY(lf__shard_check(nexus));
    LF_TRY(lf__stream_capture(stream, &capture));
    if (!capture) nexus->ran = true;
    rc = gather_chunks(nexus, first, first + n, role, stream);
    if (rc < 0) LF_TRY(lf__nexus_fail_step(nexus, rc));
out:
    lf__unlock(nexus->mutex);
    return rc;
}

lf_status lf_nexus_gathered(lf_nexus *nexus, lf_stream *stream)
{
    LF_CHECK_ARG(nexus, "nexus is NULL");
    lf_status rc = LF_OK;
    lf__lock(nexus->mutex);
    LF_TRY(lf__nexus_check_health(nexus));
    if (nexus->running) LF_THROW(LF_ERR_STATE, "a step was not taken whole; hint: lf_nexus_take or lf_nexus_finish first");
    rc = wait_for_gathers(nexus, stream);
    if (rc < 0) LF_TRY(lf__nexus_fail_step(nexus, rc));
out:
    lf__unlock(nexus->mutex);
    return rc;
}
