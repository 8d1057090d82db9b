/* SPDX-License-Identifier: Apache-2.0 */
/* Watching over the communicator. The worker calls NCCL and asks events, and can get stuck in either; the guard only compares
 * times and always comes back. A failure is kept once, told at the caller's next call, and, where that is asked for, ends a process
 * whose caller does not come. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "nexus_nccl.h"

enum { ABORT_PATIENCE_MS = 1000 };

/* ---- failures -------------------------------------------------------------------------------------------------------- */

lf_status lf__nccl_fault(nccl_link *link, lf_status status, const char *format, ...)
{
    char text[400];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    lf__lock(link->mutex);
    if (link->fault.status == LF_OK) {
        snprintf(link->fault.text, sizeof link->fault.text, "rank %d of %d: %s", link->rank, link->world, text);
        link->fault.status = status;
        link->failed_ns = lf__now_ns();
        lf__wake(link->mutex);
    }
    lf__unlock(link->mutex);
    return status;
}

lf_status lf__nccl_raise(nccl_link *link)
{
    lf__lock(link->mutex);
    lf_status rc = lf__fault_raise(&link->fault);
    if (rc < 0 && !link->told_ns) link->told_ns = lf__now_ns();
    lf__unlock(link->mutex);
    return rc;
}

lf_status lf__nccl_result(nccl_link *link, const char *what, int result)
{
    char text[400];
    if (result == NCCL_SUCCESS) return LF_OK;
    const char *last = link->nccl.get_last_error ? link->nccl.get_last_error(NULL) : NULL;
    snprintf(text, sizeof text, "%s: %s (%d)%s%.200s", what, link->nccl.get_error_string(result), result,
             last && *last ? "; " : "", last ? last : "");
    lf_status status = lf__nccl_status(result);
    if (status >= 0) status = LF_ERR_TIMEOUT; /* in progress, and the link has failed meanwhile: that failure stays */
    lf__nccl_fault(link, status, "%s", text);
    return LF_FAIL(status, "%s", text);
}

/* Without a deadline of its own: the guard, or who waits for the worker, sets the failure that ends it. */
int lf__nccl_await(nccl_link *link, int result)
{
    for (int64_t pause = 2000; result == NCCL_IN_PROGRESS; pause = pause < 200000 ? pause * 2 : pause) {
        lf__lock(link->mutex);
        void *comm = link->comm;
        const bool over = link->fault.status < 0 || link->leaving || !comm;
        lf__unlock(link->mutex);
        if (over) break;
        lf__sleep_ns(pause);
        const int asked = link->nccl.comm_get_async_error(comm, &result);
        if (asked != NCCL_SUCCESS) return asked;
    }
    return result;
}

lf_status lf__nccl_call_begin(nccl_link *link, const char *what)
{
    lf__lock(link->mutex);
    lf_status rc = lf__fault_raise(&link->fault);
    if (rc < 0 && !link->told_ns) link->told_ns = lf__now_ns();
    if (rc == LF_OK) { /* from here on the worker waits for us before it aborts */
        link->call = what;
        link->call_ns = lf__now_ns();
        link->caller_comm = link->comm;
    }
    lf__unlock(link->mutex);
    return rc;
}

void lf__nccl_call_end(nccl_link *link)
{
    lf__lock(link->mutex);
    link->call = NULL;
    lf__unlock(link->mutex);
}

/* ---- runs that are done ---------------------------------------------------------------------------------------------- */

/* The oldest run that is not known to be done. */
static nccl_run *oldest(nccl_link *link, int64_t *ticket)
{
    lf__lock(link->mutex);
    *ticket = link->done;
    nccl_run *run = link->done < link->posted ? link->ring[link->done & (link->room - 1)] : NULL;
    lf__unlock(link->mutex);
    return run;
}

void lf__nccl_retire(nccl_link *link)
{
    int64_t ticket;
    for (nccl_run *run; (run = oldest(link, &ticket)) != NULL;) {
        double seconds = 0;
        const lf_status rc = lf_event_query(run->done);
        if (rc == LF_AGAIN) return;
        if (rc < 0) {
            lf__nccl_fault(link, rc, "%s: %s", run->label, lf_error_text());
            return;
        }
        const bool timed = run->timed && lf_event_elapsed(run->began, run->done, &seconds) == LF_OK;
        lf__lock(link->mutex);
        if (link->done == ticket) { /* the caller and the worker may both be here: one counts */
            link->done++;
            link->alive_ns = lf__now_ns();
            link->n_ops += run->n_ops;
            link->n_bytes += run->bytes;
            if (timed) lf__hist_add(&link->hist, (int64_t)(seconds * 1e9));
        }
        lf__unlock(link->mutex);
    }
}

/* The lock is held and given back. The last thread that close did not wait for frees the link. */
static void let_go(nccl_link *link, bool *alone)
{
    const bool was = *alone;
    *alone = false;
    const bool last = was && !link->worker_alone && !link->guard_alone;
    lf__unlock(link->mutex);
    if (last) lf__nccl_free(link);
}

/* ---- the worker ------------------------------------------------------------------------------------------------------ */

static int64_t tick_ns(const nccl_link *link)
{
    const double tick = link->opts.timeout_s / 20 < 0.02 ? link->opts.timeout_s / 20 : 0.02;
    return (int64_t)(tick * 1e9);
}

static int init_comm(nccl_link *link, void **comm)
{
    nccl_config config = {.size = sizeof config,
                          .magic = NCCL_MAGIC,
                          .version = (unsigned)(link->nccl.version < NCCL_HAS_CTAS ? link->nccl.version : NCCL_HAS_CTAS),
                          .blocking = link->opts.nccl_blocking,
                          .cga_cluster_size = NCCL_UNDEFINED,
                          .min_ctas = NCCL_UNDEFINED,
                          .max_ctas = link->opts.max_ctas ? link->opts.max_ctas : NCCL_UNDEFINED};
    if (link->nccl.version < NCCL_HAS_CONFIG) return link->nccl.comm_init_rank(comm, link->world, link->id, link->rank);
    return link->nccl.comm_init_rank_config(comm, link->world, link->id, link->rank, &config);
}

/* Meet the other ranks. Runs on the worker, so that a rank which never comes costs the caller its deadline and no more. */
static void join(nccl_link *link)
{
    void *comm = NULL;
    int result = init_comm(link, &comm);
    lf__lock(link->mutex);
    link->comm = comm;
    lf__unlock(link->mutex);
    if (result == NCCL_SUCCESS && !link->opts.nccl_blocking && link->nccl.version >= NCCL_HAS_CONFIG) result = NCCL_IN_PROGRESS;
    result = lf__nccl_await(link, result); /* a success of a non-blocking call is only that of its start */
    const lf_status rc = lf__nccl_result(link, "meeting the other ranks", result);
    lf__lock(link->mutex);
    if (rc == LF_OK && link->fault.status == LF_OK) link->state = LINK_READY;
    lf__wake(link->mutex);
    lf__unlock(link->mutex);
}

static void take_comm(nccl_link *link, void **comm)
{
    lf__lock(link->mutex);
    *comm = link->comm;
    link->comm = NULL;
    lf__unlock(link->mutex);
}

/* End what is on the device, so that a caller who waits for it comes back. The caller's own call of NCCL is given a while to return
 * first; if it does not, aborting is what may make it. */
static void give_up(nccl_link *link)
{
    void *comm;
    char text[512];
    lf__lock(link->mutex);
    link->state = LINK_BROKEN;
    snprintf(text, sizeof text, "%s", link->fault.text);
    for (int32_t ms = 0; link->call && ms < ABORT_PATIENCE_MS; ms += 10) lf__wait_ns(link->mutex, 10000000);
    lf__unlock(link->mutex);
    lf__log(LF_LOG_ERROR, "NCCL: %s", text);
    take_comm(link, &comm);
    if (comm) link->nccl.comm_abort(comm);
}

/* All ranks are through: the orderly end. Finalize waits for the others, so it has a deadline. */
static void leave(nccl_link *link)
{
    void *comm;
    int result = NCCL_SUCCESS;
    for (int32_t i = 0; i < link->n_registered; i++) link->nccl.comm_deregister(link->comm, link->registered[i]);
    take_comm(link, &comm);
    if (!comm) return;
    if (link->nccl.comm_finalize) result = link->nccl.comm_finalize(comm);
    for (int32_t ms = 0; result == NCCL_IN_PROGRESS && ms < 5000; ms++) {
        lf__sleep_ns(1000000);
        if (link->nccl.comm_get_async_error(comm, &result) != NCCL_SUCCESS) break;
    }
    if (result == NCCL_SUCCESS) link->nccl.comm_destroy(comm);
    else link->nccl.comm_abort(comm);
}

static void probe(nccl_link *link)
{
    int state = NCCL_SUCCESS;
    lf__nccl_retire(link);
    const int asked = link->nccl.comm_get_async_error(link->comm, &state);
    if (asked != NCCL_SUCCESS) lf__nccl_result(link, "ncclCommGetAsyncError", asked);
    else if (state != NCCL_IN_PROGRESS) lf__nccl_result(link, "the communicator", state);
}

void lf__nccl_work(void *user)
{
    nccl_link *link = user;
    int32_t before = 0;
    const lf_status entered = lf__device_enter(link->device, &before);
    lf__device_watch_only(link->device);
    if (entered == LF_OK) join(link);
    else lf__nccl_fault(link, entered, "%s", lf_error_text());
    lf__lock(link->mutex);
    while (!link->leaving) {
        const bool failed = link->fault.status < 0;
        if (!failed || link->state != LINK_BROKEN) {
            lf__unlock(link->mutex);
            if (failed) give_up(link);
            else probe(link);
            lf__lock(link->mutex);
        }
        if (!link->leaving) lf__wait_ns(link->mutex, tick_ns(link));
    }
    const bool failed = link->fault.status < 0, broken = link->state == LINK_BROKEN;
    lf__unlock(link->mutex);
    if (!failed) leave(link);
    else if (!broken) give_up(link);
    lf_stream_close(link->stream); /* waits for the device: the worker may, the caller not */
    lf__nccl_free_runs(link);
    lf__lock(link->mutex);
    link->state = LINK_GONE;
    lf__wake(link->mutex);
    let_go(link, &link->worker_alone);
}

/* ---- the guard ------------------------------------------------------------------------------------------------------- */

/* The lock is held. What is late, in words; false when nothing is. Time counts from the post or, when the host has run ahead, from
 * the end of the run before: a run's own turn. */
static bool find_late(nccl_link *link, int64_t now, char *text, size_t size)
{
    const int64_t limit = (int64_t)(link->opts.timeout_s * 1e9);
    if (link->call && now - link->call_ns > limit) {
        snprintf(text, size, "the call %s has not returned for %.1f s; hint: has another rank died?", link->call,
                 (double)(now - link->call_ns) * 1e-9);
        return true;
    }
    if (link->done >= link->posted) return false;
    const nccl_run *run = link->ring[link->done & (link->room - 1)];
    const int64_t since = run->posted_ns > link->alive_ns ? run->posted_ns : link->alive_ns;
    if (now - since <= limit) return false;
    snprintf(text, size,
             "%s is not done after %.1f s (timeout_s %g): %d operations, %lld bytes, run %lld of %lld posted, posted %.1f s ago; "
             "hint: has another rank died, or is it that far behind? look at the other ranks' logs",
             run->label, (double)(now - since) * 1e-9, link->opts.timeout_s, run->n_ops, (long long)run->bytes,
             (long long)link->done + 1, (long long)link->posted, (double)(now - run->posted_ns) * 1e-9);
    return true;
}

/* The end of a process whose caller does not come back, or cannot. Nothing here may wait: no lock, no log, no destructors. */
static void end_process(const nccl_link *link)
{
    char line[640];
    const int n = snprintf(line, sizeof line, "loongforge: NCCL: %s; exit with code %d after %g s of grace (fail = exit)\n",
                           link->fault.text, LF_NCCL_EXIT_CODE, link->opts.grace_s);
    if (write(STDERR_FILENO, line, (size_t)(n < (int)sizeof line ? n : (int)sizeof line - 1)) < 0) {}
    _exit(LF_NCCL_EXIT_CODE);
}

/* A failed link is guarded until its worker is through, also after close: what cannot be aborted may hang the process's end as well. */
static bool is_over(const nccl_link *link)
{
    return link->leaving && (link->state == LINK_GONE || !link->exits || link->fault.status == LF_OK);
}

void lf__nccl_guard(void *user)
{
    nccl_link *link = user;
    char text[400];
    lf__lock(link->mutex);
    while (!is_over(link)) {
        const int64_t now = lf__now_ns();
        if (link->fault.status < 0) {
            const int64_t since = link->told_ns > link->failed_ns ? link->told_ns : link->failed_ns;
            if (link->exits && now - since > (int64_t)(link->opts.grace_s * 1e9)) end_process(link);
        } else if (!link->leaving && find_late(link, now, text, sizeof text)) {
            lf__unlock(link->mutex);
            lf__nccl_fault(link, LF_ERR_TIMEOUT, "%s", text);
            lf__lock(link->mutex);
        }
        lf__wait_ns(link->mutex, tick_ns(link));
    }
    let_go(link, &link->guard_alone);
}
