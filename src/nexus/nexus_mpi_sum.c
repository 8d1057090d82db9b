/* SPDX-License-Identifier: Apache-2.0 */
/* One operation: all ranks meet and compare what they have come for, then the data moves, a stage at a time. */
#include <stdio.h>
#include <string.h>

#include "nexus_mpi.h"

enum { PAUSE_FIRST_NS = 5000, PAUSE_MOST_NS = 200000 };

void lf__mpi_add_bf16(void *in, void *inout, int *n, void *type)
{
    const uint16_t *a = in;
    uint16_t *b = inout;
    (void)type;
    for (int i = 0; i < *n; i++) b[i] = lf__bf16_from_f32(lf__f32_from_bf16(a[i]) + lf__f32_from_bf16(b[i]));
}

/* ---- meeting --------------------------------------------------------------------------------------------------------- */

/* op NULL: the end. */
static void fill_head(mpi_host *host, const mpi_op *op)
{
    int64_t fields[HEAD_FIELDS] = {[HEAD_LINK] = -1};
    if (op) {
        fields[HEAD_LINK] = op->link->number;
        fields[HEAD_TICKET] = op->ticket;
        fields[HEAD_COUNT] = op->count;
        fields[HEAD_DTYPE] = op->dtype;
    }
    for (int32_t i = 0; i < HEAD_FIELDS; i++) {
        host->head[2 * i] = fields[i];
        host->head[2 * i + 1] = -fields[i];
    }
}

/* Did anyone come for something else? The largest of a field and of its negative are its range over ranks. */
static lf_status compare_heads(mpi_host *host, const mpi_op *op)
{
    static const char *const names[HEAD_FIELDS] = {"handle", "operation", "elements", "dtypes"};
    char here[96] = "the end of MPI";
    if (op)
        snprintf(here, sizeof here, "operation %lld of handle %lld, a sum of %lld %s", (long long)op->ticket,
                 (long long)op->link->number, (long long)op->count, lf_dtype_name(op->dtype));
    for (int32_t i = 0; i < HEAD_FIELDS; i++) {
        const int64_t most = host->head[2 * i], least = -host->head[2 * i + 1];
        if (most == least) continue;
        lf__lock(host->mutex);
        if (least < 0) lf__mpi_fault(host, LF_ERR_PEER, "some ranks are at the end of MPI, others are not; here it is %s", here);
        else
            lf__mpi_fault(
                host, LF_ERR_PEER,
                "the ranks are at different operations (%s: %lld to %lld); here it is %s; hint: the same model, options and "
                "order of calls on every rank",
                names[i], (long long)least, (long long)most, here);
        lf__unlock(host->mutex);
        return LF_ERR_PEER;
    }
    return LF_OK;
}

/* Note what the worker is at; false when nobody wants it any more. */
static bool enter_phase(mpi_host *host, const mpi_op *op, int32_t phase, const char *call)
{
    lf__lock(host->mutex);
    const bool wanted = host->fault.status == LF_OK && (!op || op->state == MPI_ARRIVED);
    host->phase = phase;
    host->call = call;
    lf__unlock(host->mutex);
    return wanted;
}

/* Waiting for a late rank can take long, and MPI's own waiting burns a core: so this asks now and then, and sleeps in between. */
lf_status lf__mpi_meet(mpi_host *host, const mpi_op *op)
{
    mpi_handle request = host->mpi.no_request;
    int there = 0;
    fill_head(host, op);
    int result = lf__mpi_iallreduce(&host->mpi, host->head, 2 * HEAD_FIELDS, host->mpi.i64, host->mpi.max, host->comm, &request);
    for (int64_t pause = PAUSE_FIRST_NS; result == MPI_OK; pause = pause < PAUSE_MOST_NS ? pause * 5 / 4 : pause) {
        result = lf__mpi_test(&host->mpi, &request, &there);
        if (there || result != MPI_OK) break;
        if (!enter_phase(host, op, MPI_MEETING, NULL)) return LF_ERR_PEER; /* the fault is set by whoever gave up */
        lf__sleep_ns(pause);
    }
    lf_status rc = lf__mpi_result(host, "meeting the other ranks", result);
    return rc == LF_OK ? compare_heads(host, op) : rc;
}

/* ---- moving ---------------------------------------------------------------------------------------------------------- */

/* Between the caller's memory and ours, unless the caller gave up: its memory is not ours to touch then. */
static lf_status copy_part(mpi_host *host, const mpi_op *op, void *to, const void *from, size_t bytes)
{
    lf__lock(host->mutex);
    const bool wanted = host->fault.status == LF_OK && op->state == MPI_ARRIVED;
    host->copying = wanted;
    lf__unlock(host->mutex);
    if (!wanted) return LF_ERR_PEER;
    memcpy(to, from, bytes);
    lf__lock(host->mutex);
    host->copying = false;
    lf__wake(host->mutex);
    lf__unlock(host->mutex);
    return LF_OK;
}

static lf_status move_part(mpi_host *host, const mpi_op *op, char *data, int64_t n)
{
    const size_t bytes = (size_t)n * lf_dtype_bytes(op->dtype);
    const lf__mpi *mpi = &host->mpi;
    mpi_handle type = mpi->i64, sum = mpi->sum;
    if (op->dtype == LF_DTYPE_F32) type = mpi->f32;
    if (op->dtype == LF_DTYPE_F64) type = mpi->f64;
    if (op->dtype == LF_DTYPE_BF16) {
        type = mpi->u16;
        sum = host->bf16_sum;
    }
    lf_status rc = LF_OK;
    LF_TRY(copy_part(host, op, op->link->stage, data, bytes));
    if (!enter_phase(host, op, MPI_MOVING, "MPI_Allreduce")) return LF_ERR_PEER;
    LF_TRY(lf__mpi_result(host, "MPI_Allreduce", lf__mpi_allreduce(mpi, op->link->stage, (int)n, type, sum, host->comm)));
    LF_TRY(copy_part(host, op, data, op->link->stage, bytes));
out:
    return rc;
}

lf_status lf__mpi_sum(mpi_host *host, mpi_op *op)
{
    const int64_t width = (int64_t)lf_dtype_bytes(op->dtype), most = op->link->stage_bytes / width;
    if (!enter_phase(host, op, MPI_MEETING, NULL)) return LF_ERR_PEER;
    lf_status rc = lf__mpi_meet(host, op);
    for (int64_t at = 0; at < op->count && rc == LF_OK; at += most)
        rc = move_part(host, op, (char *)op->data + at * width, op->count - at < most ? op->count - at : most);
    enter_phase(host, op, MPI_IDLE, NULL);
    return rc;
}
