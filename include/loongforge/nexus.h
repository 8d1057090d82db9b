/* SPDX-License-Identifier: Apache-2.0 */
/** @file nexus.h  NexusSync: gradient ranges of the map, reduced in a fixed order while backward goes on.
 *
 *  The schedule is a table of chunks made once from the map's groups: the same on every rank (checked at open), in the order
 *  in which backward finishes them. A block is *marked* when its gradient is final; a chunk is posted when all its blocks are
 *  marked and every chunk before it has been posted, so ranks can never disagree on order. Blocks nobody marked (an expert
 *  without a token here) count as zeros and are posted by lf_nexus_finish.
 *
 *  A transport is a table of functions; NexusSync calls it from the thread that marks. One reduction step at a time. */
#ifndef LOONGFORGE_NEXUS_H
#define LOONGFORGE_NEXUS_H

#include "loongforge/map.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct lf_nexus lf_nexus;

/** How bytes move between ranks. Functions return LF_OK or an error; text goes into lf_error_text. */
typedef struct lf_transport {
    size_t size;
    const char *name;   /* "torch", "nccl", "mpi", "loopback" */
    void *user;
    int32_t rank, world;
    /** Start summing `count` elements over all ranks, in place; returns at once.  @param stream the data is ready when work
     *  queued on it so far is done (NULL: ready now).  @param[out] ticket names the operation for `wait`. */
    lf_status (*post)(void *user, void *data, int64_t count, int32_t dtype, lf_stream *stream, int64_t *ticket);
    /** Wait until a posted operation is done: on the host, or by making `stream` wait.  LF_ERR_TIMEOUT, LF_ERR_PEER. */
    lf_status (*wait)(void *user, int64_t ticket, lf_stream *stream, double timeout_s);
    /** (optional) Called by lf_nexus_close. */
    void (*close)(void *user);
} lf_transport;

/** Options, section "nexus". */
typedef struct lf_nexus_options {
    size_t size;
    char comm_strategy[LF_TEXT_MAX]; /* hybrid | dense | sparse */
    int64_t chunk_bytes;             /* of one collective; ranges are cut at block edges where that fits, else inside */
    int32_t priority;                /* of the communication stream */
    double timeout_s;                /* of one collective */
    char reduce[LF_TEXT_MAX];        /* mean | sum */
} lf_nexus_options;

/** One row of the schedule. */
typedef struct lf_chunk_info {
    size_t size;
    int32_t group;
    int32_t dtype;
    lf_range range;
    int64_t bytes;
    const char *form; /* "dense"; owned by the library */
} lf_chunk_info;

typedef struct lf_nexus_stats {
    size_t size;
    int64_t steps, collectives, bytes, late_blocks; /* blocks that finish had to flush */
    double exposed_s;                               /* time lf_nexus_finish waited, summed */
    double p50_s, p95_s, p99_s;                     /* of one collective, post to done as seen by the host */
} lf_nexus_stats;

/** @param transport copied; its `user` must outlive the handle.
 *  @return LF_OK; LF_ERR_INVALID; LF_ERR_STATE (map not allocated); LF_ERR_PEER (ranks planned different maps);
 *  LF_ERR_UNSUPPORTED (strategy sparse, which needs a slow link's cost model: says so). */
LF_API lf_status lf_nexus_open(lf_nexus **out, lf_map *map, const lf_transport *transport, const lf_nexus_options *opts);
LF_API void lf_nexus_close(lf_nexus *nexus);

LF_API int32_t lf_nexus_n_chunks(const lf_nexus *nexus);
LF_API lf_status lf_nexus_get_chunk(const lf_nexus *nexus, int32_t chunk, lf_chunk_info *info);

/** Start a step's reductions: forget all marks. LF_ERR_STATE when the last step was not finished. */
LF_API lf_status lf_nexus_begin(lf_nexus *nexus);
/** Block `index` has its final gradient in the map (in order of `stream`). Posts every chunk this completes.
 *  @return LF_ERR_STATE (marked twice in one step, or no step begun: names the parameter); the transport's error. */
LF_API lf_status lf_nexus_mark(lf_nexus *nexus, int32_t index, lf_stream *stream);
/** Post what is left, wait for everything, divide by the world when reduce is mean.
 *  @return the first error of any chunk; the step's gradients are then not usable. */
LF_API lf_status lf_nexus_finish(lf_nexus *nexus, lf_stream *stream);
LF_API lf_status lf_nexus_get_stats(const lf_nexus *nexus, lf_nexus_stats *stats);

/** A transport inside one process: `world` ends that sum each other's data, for tests and dry runs.
 *  @param[out] ends room for `world` tables; closing all of them frees the loopback. */
LF_API lf_status lf_loopback_open(int32_t world, lf_transport *ends);

#ifdef __cplusplus
}
#endif
#endif
