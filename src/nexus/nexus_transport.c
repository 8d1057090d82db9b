/* SPDX-License-Identifier: Apache-2.0 */
/* Calls through a transport's table: what it may leave out, and answers put into the form that the rest expects. */
#include <stdio.h>
#include <string.h>

#include "nexus_int.h"

lf_status lf_transport_fail(lf_status status, const char *text)
{
    return LF_FAIL(status < 0 ? status : LF_ERR_INTERNAL, "%s", text && *text ? text : lf_status_text(status));
}

lf_status lf__nexus_take_transport(lf_nexus *nexus, const lf_transport *t)
{
    LF_CHECK_ARG(t->size >= offsetof(lf_transport, query) && t->size <= sizeof *t,
                 "lf_transport: size is %zu, expected %zu to %zu", t->size, offsetof(lf_transport, query), sizeof *t);
    LF_CHECK_ARG(t->name && t->post && t->wait, "transport without a name, post or wait");
    LF_CHECK_ARG(t->world >= 1 && t->world <= 1 << 15 && t->rank >= 0 && t->rank < t->world,
                 "transport %s: rank %d of %d, expected a rank below a world of 1 to %d", t->name, t->rank, t->world, 1 << 15);
    memcpy(&nexus->transport, t, t->size);
    nexus->transport.size = sizeof nexus->transport;
    const bool mean = strcmp(nexus->opts.reduce, "mean") == 0;
    if (nexus->transport.mean && !mean) {
        nexus->transport = (lf_transport){0};
        return LF_FAIL(LF_ERR_INVALID,
                       "transport %s divides by the world, but reduce is sum; hint: open it with the same options", t->name);
    }
    return LF_OK;
}

lf_status lf__nexus_answer(const lf_nexus *nexus, const char *what, lf_status rc)
{
    const char *name = nexus->transport.name;
    if (rc == LF_OK) return LF_OK;
    if (rc > 0) return LF_FAIL(LF_ERR_INTERNAL, "transport %s: %s answered %d, expected 0 or an error", name, what, rc);
    if (!*lf_error_text()) return LF_FAIL(rc, "transport %s: %s: %s", name, what, lf_status_text(rc));
    return rc;
}

/* One of the table's functions that start something. */
typedef lf_status (*start_fn)(void *user, void *data, int64_t count, int32_t dtype, lf_stream *stream, int64_t *ticket);

static lf_status start(lf_nexus *nexus, const char *what, start_fn fn, void *data, int64_t count, int32_t dtype,
                       lf_stream *stream, int64_t *ticket)
{
    lf_error_clear();
    lf_status rc = lf__nexus_answer(nexus, what, fn(nexus->transport.user, data, count, dtype, stream, ticket));
    lf__nexus_trace_post(nexus, data, count, dtype, *ticket, rc);
    return rc < 0 ? rc : lf__debug_posted(nexus, *ticket, stream);
}

lf_status lf__nexus_post(lf_nexus *nexus, void *data, int64_t count, int32_t dtype, lf_stream *stream, int64_t *ticket)
{
    return start(nexus, "post", nexus->transport.post, data, count, dtype, stream, ticket);
}

lf_status lf__nexus_scatter(lf_nexus *nexus, void *data, int64_t count, int32_t dtype, lf_stream *stream, int64_t *ticket)
{
    const lf_transport *t = &nexus->transport;
    return start(nexus, t->scatter ? "scatter" : "post", t->scatter ? t->scatter : t->post, data, count, dtype, stream, ticket);
}

/* The parts of others are cleared, and the bits summed: exact, since only one rank's are not zero. */
static lf_status gather_by_sum(lf_nexus *nexus, char *data, int64_t bytes, lf_stream *stream, int64_t *ticket)
{
    const lf_transport *t = &nexus->transport;
    const size_t part = (size_t)(bytes / t->world), before = part * (size_t)t->rank, behind = (size_t)bytes - before - part;
    lf_status rc = LF_OK;
    if (before) rc = lf_fill(nexus->device, data, 0, before, stream);
    if (behind && rc == LF_OK) rc = lf_fill(nexus->device, data + before + part, 0, behind, stream);
    return rc == LF_OK ? lf__nexus_post(nexus, data, bytes / 8, LF_DTYPE_I64, stream, ticket) : rc;
}

lf_status lf__nexus_gather(lf_nexus *nexus, void *data, int64_t bytes, lf_stream *stream, int64_t *ticket)
{
    const lf_transport *t = &nexus->transport;
    if (!t->gather) return gather_by_sum(nexus, data, bytes, stream, ticket);
    return start(nexus, "gather", t->gather, data, bytes / 8, LF_DTYPE_I64, stream, ticket);
}

lf_status lf__nexus_wait(lf_nexus *nexus, int64_t ticket, lf_stream *stream)
{
    lf_error_clear();
    lf_status rc = LF_OK;
    if (!lf__debug_has_waited(nexus, ticket))
        rc = lf__nexus_answer(nexus, "wait", nexus->transport.wait(nexus->transport.user, ticket, stream, nexus->opts.timeout_s));
    lf__nexus_trace_wait(nexus, ticket, rc);
    return rc;
}

lf_status lf__nexus_call_run(lf_nexus *nexus, int32_t open, const char *label)
{
    if (!nexus->transport.run) return LF_OK;
    lf_error_clear();
    lf_status rc = lf__nexus_answer(nexus, "run", nexus->transport.run(nexus->transport.user, open, label));
    return rc < 0 ? lf__fail_prefix(rc, "%s", label) : rc;
}

lf_status lf__nexus_call_check(lf_nexus *nexus)
{
    if (!nexus->transport.check) return LF_OK;
    lf_error_clear();
    return lf__nexus_answer(nexus, "check", nexus->transport.check(nexus->transport.user));
}

lf_status lf__nexus_call_settle(lf_nexus *nexus)
{
    if (!nexus->transport.settle) return LF_OK;
    lf_error_clear();
    return lf__nexus_answer(nexus, "settle", nexus->transport.settle(nexus->transport.user, nexus->opts.timeout_s));
}

lf_status lf__nexus_call_replayed(lf_nexus *nexus, lf_stream *stream)
{
    if (!nexus->transport.replayed) return LF_OK;
    lf_error_clear();
    return lf__nexus_answer(nexus, "replayed", nexus->transport.replayed(nexus->transport.user, stream, "a captured step"));
}

lf_status lf__nexus_call_stats(lf_nexus *nexus, lf_nexus_stats *stats, int64_t *timed_bytes)
{
    if (!nexus->transport.stats) return LF_OK;
    lf_nexus_stats own = {.size = sizeof own};
    lf_error_clear();
    lf_status rc = lf__nexus_answer(nexus, "stats", nexus->transport.stats(nexus->transport.user, &own));
    if (rc < 0) return rc;
    stats->p50_s = own.p50_s;
    stats->p95_s = own.p95_s;
    stats->p99_s = own.p99_s;
    stats->busy_s = own.busy_s;
    *timed_bytes = own.bytes;
    return LF_OK;
}

static lf_status announce(lf_nexus *nexus, void *base, int64_t bytes)
{
    if (!base || !nexus->transport.memory) return LF_OK;
    lf_error_clear();
    return lf__nexus_answer(nexus, "memory", nexus->transport.memory(nexus->transport.user, base, bytes));
}

lf_status lf__nexus_announce_memory(lf_nexus *nexus)
{
    lf_status rc = LF_OK;
    for (int32_t k = 0; k < lf_map_n_classes(nexus->map) && nexus->transport.memory && rc == LF_OK; k++) {
        lf_class_info info = {.size = sizeof info};
        rc = lf_map_get_class(nexus->map, k, &info);
        const int32_t dtype = info.role_dtype[LF_ROLE_GRAD];
        const lf_range all = {.klass = k, .count = info.count};
        if (rc < 0 || info.frozen || !dtype || info.count == 0) continue;
        rc = announce(nexus, lf_map_address(nexus->map, &all, LF_ROLE_GRAD), info.count * (int64_t)lf_dtype_bytes(dtype));
    }
    if (rc == LF_OK) rc = announce(nexus, lf__wire_memory(nexus), nexus->wire_bytes);
    return rc == LF_OK ? announce(nexus, nexus->sparse.wire, nexus->sparse.wire_bytes) : rc;
}

lf_status lf_nexus_describe(const lf_nexus *nexus, char *text, size_t size)
{
    LF_CHECK_ARG(nexus && text && size > 0, "nexus or text is NULL, or size is 0");
    const lf_transport *t = &nexus->transport;
    if (!t->post) snprintf(text, size, "no transport: the schedule alone");
    else if (t->describe) t->describe(t->user, text, size);
    else snprintf(text, size, "transport %s, rank %d of %d", t->name, t->rank, t->world);
    return LF_OK;
}
