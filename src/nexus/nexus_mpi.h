/* SPDX-License-Identifier: Apache-2.0 */
/** @file nexus_mpi.h  The MPI transport's structures; see docs/internals/nexus_mpi.md.
 *
 *  MPI belongs to the process, so its *host* does too: one thread that makes every call of MPI, one after another, in order of
 *  posting. Transports (*links*) only queue for it. Nobody else ever waits inside MPI. */
#ifndef LF_NEXUS_MPI_H
#define LF_NEXUS_MPI_H

#include "nexus_int.h"
#include "nexus_mpi_api.h"

enum { MPI_POSTED, MPI_ARRIVED, MPI_DONE, MPI_WITHDRAWN }; /* an operation: posted; its data is there; summed; given up */
enum { MPI_IDLE, MPI_MEETING, MPI_MOVING };                /* what the host does with its current one */
enum { HOST_OFF, HOST_STARTING, HOST_READY, HOST_STOPPING, HOST_GONE, HOST_LOST };

typedef struct mpi_op {
    struct mpi_link *link;
    struct mpi_op *next; /* in order of posting, over all links */
    void *data;
    int64_t count, ticket;
    int32_t dtype, state;
} mpi_op;

typedef struct mpi_link {
    struct mpi_host *host;
    int64_t number; /* counted alike on all ranks */
    void *stage;    /* what MPI sees of an operation's data: stage_bytes */
    int64_t stage_bytes;
    mpi_op **ring; /* by ticket & (room - 1); the operations stay where they are when it grows */
    int64_t room, posted, waited;
    bool closed; /* the host still held an operation of it, and frees it */
} mpi_link;

/** What all ranks have to agree on before an operation's data moves: each value and its negative, maximised over ranks. */
enum { HEAD_LINK, HEAD_TICKET, HEAD_COUNT, HEAD_DTYPE, HEAD_FIELDS };

typedef struct mpi_host {
    lf__mutex *mutex; /* guards all below but what the worker alone uses; never held in a call of MPI */
    lf__thread *worker;
    int32_t state, users;
    bool ours; /* started MPI, so ends it */
    int32_t rank, world;
    int64_t n_links;
    mpi_op *first, *last; /* queue */
    mpi_op *current;
    int32_t phase;
    bool copying;     /* the worker reads or writes the current operation's data */
    const char *call; /* of MPI, that the worker is in */
    lf__fault fault;  /* for good: what MPI left behind is not known */

    /* the worker's */
    lf__mpi mpi;
    mpi_handle comm, bf16_sum;
    int64_t head[2 * HEAD_FIELDS];
} mpi_host;

/* nexus_mpi_host.c */

/** The process's host, made by whoever comes first. NULL: out of memory. */
mpi_host *lf__mpi_the_host(void);
/** The same, started for one more user; waits for it up to timeout_s. */
lf_status lf__mpi_host_use(mpi_host **out, const lf_nexus_options *opts);
/** One user less; the last one ends MPI when we started it. Waits for that at most about 20 s. */
void lf__mpi_host_leave(mpi_host *host);
/** The lock is held. Keep the first failure, wake everyone.  @return status */
lf_status lf__mpi_fault(mpi_host *host, lf_status status, const char *format, ...) LF_PRINTF(3, 4);
/** The lock is held. Queue an operation. */
void lf__mpi_enqueue(mpi_host *host, mpi_op *op);
/** A result of MPI as a failure of the host with MPI's own words. The lock is not held.  @return LF_OK for success */
lf_status lf__mpi_result(mpi_host *host, const char *what, int result);

/* nexus_mpi_sum.c: on the worker */

/** Wait for all ranks and compare what they have come for. op NULL: for the end. The lock is not held. */
lf_status lf__mpi_meet(mpi_host *host, const mpi_op *op);
/** Sum the current operation over all ranks. The lock is not held.  @return an error: the host has failed */
lf_status lf__mpi_sum(mpi_host *host, mpi_op *op);
/** in, inout: (*n) bf16; inout = in + inout in f32, rounded. */
void lf__mpi_add_bf16(void *in, void *inout, int *n, void *type);

/* nexus_mpi.c */
void lf__mpi_free_link(mpi_link *link);

#endif
