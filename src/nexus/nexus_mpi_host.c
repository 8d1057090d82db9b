/* SPDX-License-Identifier: Apache-2.0 */
/* The process's one thread for MPI: starts it, works off the queue, ends it. */
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "nexus_mpi.h"

enum { STOP_PATIENCE_S = 20, STUCK_PATIENCE_S = 1 };

/* ---- failures -------------------------------------------------------------------------------------------------------- */

lf_status lf__mpi_fault(mpi_host *host, lf_status status, const char *format, ...)
{
    char text[400];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (host->fault.status == LF_OK) {
        host->fault.status = status;
        if (host->world > 0)
            snprintf(host->fault.text, sizeof host->fault.text, "rank %d of %d: %s", host->rank, host->world, text);
        else snprintf(host->fault.text, sizeof host->fault.text, "%s", text);
        lf__wake(host->mutex);
    }
    return status;
}

lf_status lf__mpi_result(mpi_host *host, const char *what, int result)
{
    char text[1024] = ""; /* the longest of any MPI is 512 */
    int length = 0;
    if (result == MPI_OK) return LF_OK;
    if (host->mpi.error_string(result, text, &length) != MPI_OK) snprintf(text, sizeof text, "error %d", result);
    lf__lock(host->mutex);
    lf__mpi_fault(host, LF_ERR_PEER, "%s: %.300s", what, text);
    lf__unlock(host->mutex);
    return LF_ERR_PEER;
}

/* ---- the queue -------------------------------------------------------------------------------------------------------- */

void lf__mpi_enqueue(mpi_host *host, mpi_op *op)
{
    op->next = NULL;
    if (host->last) host->last->next = op;
    else host->first = op;
    host->last = op;
}

static mpi_op *take_first(mpi_host *host)
{
    mpi_op *op = host->first;
    host->first = op->next;
    if (!host->first) host->last = NULL;
    return op;
}

/* The lock is held. */
static void work_off(mpi_host *host)
{
    while (host->fault.status == LF_OK && !(host->state == HOST_STOPPING && !host->first)) {
        if (!host->first || host->first->state == MPI_POSTED) {
            lf__wait(host->mutex);
            continue;
        }
        mpi_op *op = host->current = take_first(host);
        lf__unlock(host->mutex);
        const lf_status rc = lf__mpi_sum(host, op);
        lf__lock(host->mutex);
        host->current = NULL;
        host->phase = MPI_IDLE;
        if (rc == LF_OK && op->state == MPI_ARRIVED) op->state = MPI_DONE;
        if (op->link->closed) lf__mpi_free_link(op->link);
        lf__wake(host->mutex);
    }
}

/* ---- starting and ending ---------------------------------------------------------------------------------------------- */

static void enter_call(mpi_host *host, const char *call)
{
    lf__lock(host->mutex);
    host->call = call;
    lf__unlock(host->mutex);
}

static lf_status fail_start(mpi_host *host, const char *text)
{
    lf__lock(host->mutex);
    lf__mpi_fault(host, LF_ERR_UNSUPPORTED, "%s: %s", host->mpi.text, text);
    lf__unlock(host->mutex);
    return LF_ERR_UNSUPPORTED;
}

/* Start MPI unless the program has; either way we need to be allowed to call it from this thread. */
static lf_status init_mpi(mpi_host *host)
{
    const lf__mpi *mpi = &host->mpi;
    int started = 0, over = 0, level = 0;
    lf_status rc = lf__mpi_result(host, "MPI_Initialized", mpi->initialized(&started));
    if (rc == LF_OK) rc = lf__mpi_result(host, "MPI_Finalized", mpi->finalized(&over));
    if (rc < 0) return rc;
    if (over) return fail_start(host, "MPI_Finalize was called before, and MPI cannot be started twice in one process");
    if (!started) {
        enter_call(host, "MPI_Init_thread");
        rc = lf__mpi_result(host, "MPI_Init_thread", mpi->init_thread(NULL, NULL, MPI_LEVEL_SERIALIZED, &level));
        host->ours = rc == LF_OK;
    } else {
        rc = lf__mpi_result(host, "MPI_Query_thread", mpi->query_thread(&level));
    }
    if (rc < 0 || level >= MPI_LEVEL_SERIALIZED) return rc;
    return fail_start(host, host->ours ? "it does not allow calls from a thread of ours (MPI_THREAD_SERIALIZED)"
                                       : "the program started it for its main thread alone; hint: MPI_Init_thread with "
                                         "MPI_THREAD_SERIALIZED or more");
}

/* A communicator of our own: what the program sends on its own cannot mix with it, and errors come back instead of ending it. */
static lf_status make_comm(mpi_host *host)
{
    const lf__mpi *mpi = &host->mpi;
    int rank = 0, world = 0;
    enter_call(host, "MPI_Comm_dup");
    lf_status rc = lf__mpi_result(host, "MPI_Comm_dup", lf__mpi_comm_dup(mpi, mpi->world, &host->comm));
    enter_call(host, NULL);
    if (rc == LF_OK) rc = lf__mpi_result(host, "MPI_Comm_set_errhandler", lf__mpi_return_errors(mpi, host->comm));
    if (rc == LF_OK) rc = lf__mpi_result(host, "MPI_Comm_rank", lf__mpi_comm_rank(mpi, host->comm, &rank));
    if (rc == LF_OK) rc = lf__mpi_result(host, "MPI_Comm_size", lf__mpi_comm_size(mpi, host->comm, &world));
    if (rc == LF_OK) rc = lf__mpi_result(host, "MPI_Op_create", lf__mpi_op_create(mpi, lf__mpi_add_bf16, &host->bf16_sum));
    host->rank = rank;
    host->world = world;
    return rc;
}

/* All ranks come to the end, or none of them calls MPI_Finalize: one that waits in it while others fail can hang their launcher. */
static lf_status end_mpi(mpi_host *host)
{
    const lf_status rc = host->world > 1 ? lf__mpi_meet(host, NULL) : LF_OK;
    if (rc < 0) return rc;
    enter_call(host, "MPI_Finalize");
    lf__mpi_op_free(&host->mpi, &host->bf16_sum);
    lf__mpi_comm_free(&host->mpi, &host->comm);
    if (host->ours) host->mpi.finalize();
    enter_call(host, NULL);
    return LF_OK;
}

static void host_work(void *user)
{
    mpi_host *host = user;
    lf_status rc = init_mpi(host);
    if (rc == LF_OK) rc = make_comm(host);
    lf__lock(host->mutex);
    host->call = NULL;
    if (rc == LF_OK && host->fault.status == LF_OK) {
        if (host->state == HOST_STARTING) host->state = HOST_READY;
        lf__wake(host->mutex);
        work_off(host);
    }
    rc = lf__fault_raise(&host->fault);
    lf__unlock(host->mutex);
    if (rc == LF_OK) rc = end_mpi(host);
    lf__lock(host->mutex);
    if (rc < 0) lf__log(LF_LOG_WARN, "MPI is not ended: %s", host->fault.text);
    host->state = rc < 0 ? HOST_LOST : host->ours ? HOST_GONE : HOST_OFF;
    lf__wake(host->mutex);
    lf__unlock(host->mutex);
}

mpi_host *lf__mpi_the_host(void) /* and kept: MPI is the process's */
{
    static mpi_host host;
    static lf__mutex *_Atomic mutex;
    if (!atomic_load(&mutex)) {
        lf__mutex *none = NULL, *made = lf__mutex_open();
        if (!made) return NULL;
        if (!atomic_compare_exchange_strong(&mutex, &none, made)) lf__mutex_close(made);
    }
    host.mutex = atomic_load(&mutex);
    return &host;
}

/* The lock is held; nobody uses the host. */
static lf_status start_host(mpi_host *host, const lf_nexus_options *opts)
{
    while (host->state == HOST_STOPPING) lf__wait_ns(host->mutex, 10000000);
    if (host->state == HOST_GONE)
        return LF_FAIL(LF_ERR_STATE, "MPI has been ended in this process and cannot be started again; hint: keep one user of it "
                                     "(lf_mpi_start) until the end");
    lf_status rc = lf__mpi_load(&host->mpi, opts->mpi_library);
    if (rc < 0) return rc;
    host->ours = false;
    host->world = 0;
    host->n_links = 0;
    host->state = HOST_STARTING;
    rc = lf__thread_start(&host->worker, "lf-mpi", host_work, host);
    if (rc < 0) host->state = HOST_OFF;
    return rc;
}

/* The lock is held. */
static lf_status await_start(mpi_host *host, double timeout_s)
{
    const int64_t deadline = lf__now_ns() + (int64_t)(timeout_s * 1e9);
    while (host->state == HOST_STARTING && host->fault.status == LF_OK) {
        const int64_t left = deadline - lf__now_ns();
        if (left <= 0)
            lf__mpi_fault(host, LF_ERR_TIMEOUT,
                          "%s: %s has not returned for %g s; hint: did all ranks start, by the same MPI's mpirun or srun?",
                          host->mpi.text, host->call ? host->call : "the start", timeout_s);
        else lf__wait_ns(host->mutex, left);
    }
    return lf__fault_raise(&host->fault);
}

lf_status lf__mpi_host_use(mpi_host **out, const lf_nexus_options *opts)
{
    mpi_host *host = lf__mpi_the_host();
    if (!host) return LF_FAIL(LF_ERR_NOMEM, "the host of MPI");
    lf_status rc = LF_OK;
    lf__lock(host->mutex);
    LF_TRY(lf__fault_raise(&host->fault));
    if (host->users == 0) LF_TRY(start_host(host, opts));
    host->users++;
    *out = host;
    rc = await_start(host, opts->timeout_s);
out:
    lf__unlock(host->mutex);
    if (rc < 0 && *out) {
        char text[512];
        snprintf(text, sizeof text, "%s", lf_error_text());
        lf__mpi_host_leave(host);
        *out = NULL;
        return LF_FAIL(rc, "%s", text);
    }
    return rc;
}

/* The lock is held. Has the worker come to its end? */
static bool await_end(mpi_host *host, int64_t patience_s)
{
    const int64_t deadline = lf__now_ns() + patience_s * 1000000000;
    while (host->state == HOST_STOPPING) {
        const int64_t left = deadline - lf__now_ns();
        if (left <= 0) return false;
        lf__wait_ns(host->mutex, left);
    }
    return true;
}

void lf__mpi_host_leave(mpi_host *host)
{
    lf__lock(host->mutex);
    if (--host->users > 0 || !host->worker) {
        lf__unlock(host->mutex);
        return;
    }
    if (host->state == HOST_READY || host->state == HOST_STARTING) host->state = HOST_STOPPING;
    lf__wake(host->mutex);
    bool ended = host->fault.status == LF_OK && await_end(host, STOP_PATIENCE_S);
    if (!ended)
        lf__mpi_fault(host, LF_ERR_TIMEOUT, "the other ranks did not come to the end of MPI within %d s", STOP_PATIENCE_S);
    ended = ended || await_end(host, STUCK_PATIENCE_S);
    lf__thread *worker = host->worker;
    host->worker = NULL;
    lf__unlock(host->mutex);
    if (ended) lf__thread_join(worker);
    else lf__thread_forget(worker);
}
