/* SPDX-License-Identifier: Apache-2.0 */
/* The MPI transport: what callers do. Posts are queued for the host's thread, waits sleep until it is through. */
#include <stdio.h>
#include <string.h>

#include "nexus_mpi.h"

enum { ROOM_FIRST = 64, STAGE_LEAST = 4096, STAGE_MOST = 4 << 20 }; /* more does not stay in the caches */

static mpi_op *op_at(const mpi_link *link, int64_t ticket) { return link->ring[ticket & (link->room - 1)]; }

/* ---- operations ------------------------------------------------------------------------------------------------------ */

/* Twice the places, each with its operation. */
static lf_status grow_ring(mpi_link *link)
{
    const int64_t room = link->room ? link->room * 2 : ROOM_FIRST;
    mpi_op **ring = lf__alloc_array((size_t)room, sizeof(mpi_op *));
    bool whole = ring != NULL;
    for (int64_t t = link->waited; whole && t < link->waited + room; t++) {
        mpi_op **place = &ring[t & (room - 1)];
        *place = t < link->waited + link->room ? op_at(link, t) : lf__alloc(sizeof **place);
        whole = *place != NULL;
    }
    if (!whole) {
        for (int64_t t = link->waited + link->room; ring && t < link->waited + room; t++) lf__free(ring[t & (room - 1)]);
        lf__free(ring);
        return LF_FAIL(LF_ERR_NOMEM, "mpi ring of %lld", (long long)room);
    }
    lf__free(link->ring);
    link->ring = ring;
    link->room = room;
    return LF_OK;
}

static lf_status arrive(void *user)
{
    mpi_op *op = user;
    mpi_host *host = op->link->host;
    lf__lock(host->mutex);
    if (op->state == MPI_POSTED) op->state = host->world == 1 ? MPI_DONE : MPI_ARRIVED;
    lf__wake(host->mutex);
    lf__unlock(host->mutex);
    return LF_OK;
}

static lf_status link_post(void *user, void *data, int64_t count, int32_t dtype, lf_stream *stream, int64_t *ticket)
{
    mpi_link *link = user;
    mpi_host *host = link->host;
    lf_status rc = LF_OK;
    mpi_op *op = NULL;
    LF_CHECK_ARG(ticket && count >= 0 && (data || count == 0), "mpi: ticket or data is NULL, or count is negative");
    LF_CHECK_ARG(dtype == LF_DTYPE_F32 || dtype == LF_DTYPE_BF16 || dtype == LF_DTYPE_F64 || dtype == LF_DTYPE_I64,
                 "mpi: dtype is %s, expected f32, bf16, f64 or i64", lf_dtype_name(dtype));
    lf__lock(host->mutex);
    LF_TRY(lf__fault_raise(&host->fault));
    if (link->posted - link->waited == link->room) LF_TRY(grow_ring(link));
    *ticket = link->posted++;
    op = op_at(link, *ticket);
    *op = (mpi_op){.link = link, .data = data, .count = count, .ticket = *ticket, .dtype = dtype, .state = MPI_POSTED};
    if (host->world > 1) lf__mpi_enqueue(host, op);
out:
    lf__unlock(host->mutex);
    return op ? lf_stream_run(stream, arrive, op) : rc;
}

/* The lock is held: done, failed, or not yet. */
static lf_status look(const mpi_link *link, int64_t ticket)
{
    if (op_at(link, ticket)->state == MPI_DONE) return LF_OK;
    return link->host->fault.status < 0 ? lf__fault_raise(&link->host->fault) : LF_AGAIN;
}

/* The lock is held. The link's operations that are not done will not be: afterwards the owners may free their memory. What the
 * host is at right now it still holds, but not its data. */
static void withdraw(mpi_link *link)
{
    mpi_host *host = link->host;
    while (host->copying && host->current->link == link) lf__wait(host->mutex);
    for (int64_t t = link->waited; t < link->posted; t++)
        if (op_at(link, t)->state != MPI_DONE) op_at(link, t)->state = MPI_WITHDRAWN;
    mpi_op *kept = NULL, *next;
    for (mpi_op *op = host->first; op; op = next) {
        next = op->next;
        if (op->link == link) continue;
        if (kept) kept->next = op;
        else host->first = op;
        kept = op;
    }
    if (kept) kept->next = NULL;
    else host->first = NULL;
    host->last = kept;
    lf__wake(host->mutex);
}

/* The lock is held. What it is that did not come in time. */
static lf_status give_up(mpi_link *link, int64_t ticket, double timeout_s)
{
    mpi_host *host = link->host;
    const mpi_op *op = op_at(link, ticket);
    const char *where = "it waits for operations posted before";
    if (op->state == MPI_POSTED) where = "its stream has not got to it";
    else if (host->current == op && host->phase == MPI_MOVING) where = "MPI_Allreduce has not returned";
    else if (host->current == op) where = "not all ranks have come to it";
    return lf__mpi_fault(
        host, LF_ERR_TIMEOUT,
        "operation %lld, a sum of %lld %s, is not done after %g s: %s; hint: has another rank died, or is it that far "
        "behind? look at the other ranks' output",
        (long long)ticket, (long long)op->count, lf_dtype_name(op->dtype), timeout_s, where);
}

static lf_status link_wait(void *user, int64_t ticket, lf_stream *stream, double timeout_s)
{
    (void)stream; /* done on the host is done for every stream */
    mpi_link *link = user;
    mpi_host *host = link->host;
    const int64_t deadline = lf__now_ns() + (int64_t)(timeout_s * 1e9);
    lf_status rc;
    lf__lock(host->mutex);
    if (ticket != link->waited || ticket >= link->posted) {
        rc = LF_FAIL(LF_ERR_INVALID, "mpi: wait for operation %lld, expected %lld of %lld posted", (long long)ticket,
                     (long long)link->waited, (long long)link->posted);
        lf__unlock(host->mutex);
        return rc;
    }
    while ((rc = look(link, ticket)) == LF_AGAIN) {
        const int64_t left = deadline - lf__now_ns();
        if (left <= 0 && !host->copying) give_up(link, ticket, timeout_s);
        else lf__wait_ns(host->mutex, left > 1000000 ? left : 1000000);
    }
    if (rc < 0) withdraw(link);
    else link->waited++;
    lf__unlock(host->mutex);
    return rc;
}

static lf_status link_query(void *user, int64_t ticket)
{
    mpi_link *link = user;
    lf__lock(link->host->mutex);
    const bool known = ticket >= link->waited && ticket < link->posted;
    const lf_status rc = known ? look(link, ticket) : LF_FAIL(LF_ERR_INVALID, "mpi: no open operation %lld", (long long)ticket);
    lf__unlock(link->host->mutex);
    return rc;
}

static lf_status link_check(void *user)
{
    mpi_link *link = user;
    lf__lock(link->host->mutex);
    const lf_status rc = lf__fault_raise(&link->host->fault);
    lf__unlock(link->host->mutex);
    return rc;
}

static void link_describe(void *user, char *text, size_t size)
{
    const mpi_link *link = user;
    const mpi_host *host = link->host;
    snprintf(text, size, "%s (started by %s), rank %d of %d, host memory%s", host->mpi.text, host->ours ? "us" : "the program",
             host->rank, host->world, host->mpi.cuda ? "; it takes device memory too, which is not used" : "");
}

/* ---- opening and closing --------------------------------------------------------------------------------------------- */

void lf__mpi_free_link(mpi_link *link)
{
    for (int64_t i = 0; i < link->room; i++) lf__free(link->ring[i]);
    lf__free(link->ring);
    lf__free(link->stage);
    lf__free(link);
}

static void link_close(void *user)
{
    mpi_link *link = user;
    mpi_host *host = link->host;
    lf__lock(host->mutex);
    const bool held = host->current && host->current->link == link;
    if (held && host->current->state != MPI_DONE)
        lf__mpi_fault(host, LF_ERR_PEER, "this rank closed its transport in the middle of operation %lld",
                      (long long)host->current->ticket);
    withdraw(link);
    link->closed = true;
    lf__unlock(host->mutex);
    if (!held) lf__mpi_free_link(link);
    lf__mpi_host_leave(host);
}

lf_status lf_mpi_start(const lf_nexus_options *opts, lf_mpi_info *info)
{
    LF_CHECK_ARG(info && info->size == sizeof *info, "info is NULL, or its size is not %zu", sizeof *info);
    lf_nexus_options o;
    mpi_host *host = NULL;
    lf_status rc = lf__options_take("nexus", &o, sizeof o, opts);
    if (rc == LF_OK) rc = lf__mpi_host_use(&host, &o);
    if (rc < 0) return rc;
    *info = (lf_mpi_info){.size = sizeof *info, .rank = host->rank, .world = host->world, .ours = host->ours};
    snprintf(info->library, sizeof info->library, "%s", host->mpi.text);
    return LF_OK;
}

void lf_mpi_stop(void)
{
    mpi_host *host = lf__mpi_the_host();
    if (host) lf__mpi_host_leave(host);
}

/* Larger operations go through the stage in parts. */
static lf_status open_link(mpi_link **out, mpi_host *host, const lf_nexus_options *o)
{
    mpi_link *link = lf__alloc(sizeof *link);
    if (!link) return LF_FAIL(LF_ERR_NOMEM, "mpi transport");
    const int64_t asked = o->chunk_bytes < STAGE_LEAST ? STAGE_LEAST : o->chunk_bytes;
    link->host = host;
    link->stage_bytes = lf__round_up(asked < STAGE_MOST ? asked : STAGE_MOST, 4096);
    link->stage = lf__alloc_aligned((size_t)link->stage_bytes, 4096);
    lf_status rc =
        link->stage ? grow_ring(link) : LF_FAIL(LF_ERR_NOMEM, "mpi: %lld bytes to sum in", (long long)link->stage_bytes);
    if (rc < 0) {
        lf__mpi_free_link(link);
        return rc;
    }
    lf__lock(host->mutex);
    link->number = host->n_links++;
    lf__unlock(host->mutex);
    *out = link;
    return LF_OK;
}

lf_status lf_mpi_open(const lf_nexus_options *opts, lf_device *device, lf_transport *out)
{
    LF_CHECK_ARG(device && out, "device or out is NULL");
    lf_nexus_options o;
    mpi_host *host = NULL;
    mpi_link *link = NULL;
    lf_status rc = LF_OK;
    LF_TRY(lf__options_take("nexus", &o, sizeof o, opts));
    LF_TRY(lf__mpi_host_use(&host, &o));
    if (!lf__device_is_cpu(device))
        LF_THROW(LF_ERR_UNSUPPORTED, "MPI sums host memory, the device is a GPU%s; hint: transport nccl",
                 host->mpi.cuda ? " (this MPI takes device memory too, which is not used yet)" : "");
    LF_TRY(open_link(&link, host, &o));
    *out = (lf_transport){.size = sizeof *out,
                          .name = "mpi",
                          .user = link,
                          .rank = host->rank,
                          .world = host->world,
                          .post = link_post,
                          .wait = link_wait,
                          .close = link_close,
                          .query = link_query,
                          .check = link_check,
                          .describe = link_describe};
out:
    if (rc < 0 && host) {
        char text[512];
        snprintf(text, sizeof text, "%s", lf_error_text());
        lf__mpi_host_leave(host);
        return LF_FAIL(rc, "%s", text);
    }
    return rc;
}
