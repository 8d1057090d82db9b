/* SPDX-License-Identifier: Apache-2.0 */
/** @file nexus_nccl.h  The NCCL transport's structures; see docs/internals/nexus_nccl.md.
 *
 *  Three threads: the caller's (NexusSync lets in one at a time), the *worker*, which alone makes, asks, aborts and destroys the
 *  communicator, and the *guard*, which only looks at clocks and so can never get stuck in NCCL or the driver. */
#ifndef LF_NEXUS_NCCL_H
#define LF_NEXUS_NCCL_H

#include "nexus_int.h"
#include "nexus_nccl_api.h"

/** Operations that were launched together, or a replay of a captured step. */
typedef struct nccl_run {
    lf_event *began, *done; /* on our stream */
    const char *label;
    int64_t posted_ns, bytes;
    int32_t n_ops;
    bool timed; /* `began` and `done` tell how long it took */
} nccl_run;

/** A collective in place; of the last two kinds `count` is of all ranks' parts. */
enum { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER };
typedef struct nccl_operation {
    int32_t kind, dtype;
    void *data;
    int64_t count;
} nccl_operation;

enum { ROOM_FIRST = 64, ROOM_MOST = 1024, REGISTERED_MOST = 16 };

/** What the worker is at. */
enum { LINK_JOINING, LINK_READY, LINK_BROKEN, LINK_GONE };

typedef struct nccl_link {
    lf__nccl nccl;
    lf_device *device;
    lf_nexus_options opts;
    int32_t rank, world;
    bool mean, exits; /* NCCL divides; a failure that nobody handles ends the process */
    nccl_id id;

    /* the caller's thread */
    lf_stream *stream;
    void *caller_comm;   /* within lf__nccl_call_begin and _end */
    nccl_run *open;      /* the run that posts go into */
    nccl_operation held; /* posted in a run, not called yet: neighbours may join it; count 0: none */
    int64_t open_ticket;
    bool in_run, in_group, broken_capture;
    const char *run_label;
    nccl_run **captured; /* runs of the newest capture; their events order, and are never asked */
    int32_t n_captured, captured_room;
    uint64_t capture;
    void *registered[REGISTERED_MOST];
    int32_t n_registered;
    char registered_text[160];

    lf__mutex *mutex; /* guards all below; never held in a call of NCCL or the driver */
    void *comm;       /* written by the worker; NULL when aborted or destroyed */
    int32_t state;
    nccl_run **ring; /* by ticket & (room - 1); runs stay where they are when it grows */
    int64_t room, posted, done, waited;
    int64_t alive_ns; /* when a run was last seen done */
    const char *call; /* of NCCL, that the caller is in */
    int64_t call_ns;
    lf__fault fault;
    int64_t failed_ns, told_ns;     /* when it failed, and when the caller first heard of it */
    bool leaving;                   /* close was called */
    bool worker_alone, guard_alone; /* close did not wait for these: the last one frees all */
    lf__hist hist;
    int64_t n_ops, n_bytes;
    lf__thread *worker, *guard;
} nccl_link;

/** A ticket of a captured run carries this bit; the rest is its number. */
#define NCCL_CAPTURED (INT64_C(1) << 62)

/* nexus_nccl_watch.c */

/** Keep the first failure, wake everyone. `format` says what happened; rank and world are put in front.  @return status */
lf_status lf__nccl_fault(nccl_link *link, lf_status status, const char *format, ...) LF_PRINTF(3, 4);
/** The failure as the caller's error, LF_OK when there is none. From here on it is known to have been told. */
lf_status lf__nccl_raise(nccl_link *link);
/** Note which runs are done. Any thread; asks events. */
void lf__nccl_retire(nccl_link *link);
/** The worker's and the guard's life. */
void lf__nccl_work(void *link);
void lf__nccl_guard(void *link);
/** Around calls of NCCL by the caller, which may not come back: the communicator stays, unless they last too long.
 *  @return the failure, when there is one: then nothing may be called. */
lf_status lf__nccl_call_begin(nccl_link *link, const char *what);
void lf__nccl_call_end(nccl_link *link);
/** A result of NCCL as a failure of the link, with NCCL's own words.  @return LF_OK for success */
lf_status lf__nccl_result(nccl_link *link, const char *what, int result);
/** After NCCL_IN_PROGRESS: wait until the communicator is ready for more, or the link has failed.  @return its result */
int lf__nccl_await(nccl_link *link, int result);

/* nexus_nccl.c: the table's functions. `user` is the link. */
lf_status lf__nccl_post(void *user, void *data, int64_t count, int32_t dtype, lf_stream *stream, int64_t *ticket);
lf_status lf__nccl_scatter(void *user, void *data, int64_t count, int32_t dtype, lf_stream *stream, int64_t *ticket);
lf_status lf__nccl_gather(void *user, void *data, int64_t count, int32_t dtype, lf_stream *stream, int64_t *ticket);
lf_status lf__nccl_wait(void *user, int64_t ticket, lf_stream *stream, double timeout_s);
lf_status lf__nccl_query(void *user, int64_t ticket);
lf_status lf__nccl_run(void *user, int32_t open, const char *label);
lf_status lf__nccl_check(void *user);
lf_status lf__nccl_replayed(void *user, lf_stream *stream, const char *label);
lf_status lf__nccl_settle(void *user, double timeout_s);
lf_status lf__nccl_stats(void *user, lf_nexus_stats *stats);
/** Twice the places in the ring, each with its run. The lock is not held. */
lf_status lf__nccl_grow(nccl_link *link);
void lf__nccl_free_runs(nccl_link *link);

/* nexus_nccl_memory.c */
lf_status lf__nccl_memory(void *user, void *base, int64_t bytes);

/* nexus_nccl_open.c */

/** What is left when both threads have ended. */
void lf__nccl_free(nccl_link *link);

#endif
