/* SPDX-License-Identifier: Apache-2.0 */
/** @file nexus.h  NexusSync: gradient ranges of the map, reduced in a fixed order while backward goes on.
 *
 *  The schedule is a table of chunks made once from the map's groups: the same on every rank (checked at open), in the order
 *  in which backward finishes them: layers from last to first, in a layer experts before dense parameters. A block is *marked*
 *  when its gradient is final; a chunk is posted when all its blocks are marked and every chunk before it has been posted, so
 *  ranks can never disagree on order. Blocks nobody marked count as zeros: lf_nexus_finish clears their gradient and posts
 *  them, so an expert without a token on this rank neither hangs the others nor sends what an earlier step left behind. With
 *  gradient accumulation a block is marked once, in the last micro-step; one that got its gradient in an earlier micro-step
 *  and none in the last must be marked by the caller before lf_nexus_finish (or lf_nexus_flush, its first half).
 *
 *  Only the GRAD plane is touched, and only of classes that are not frozen. Who divides: reduce = mean makes lf_nexus_finish
 *  divide by the world; with sum the caller does (for instance through lf_adamw's grad_scale, at no cost).
 *
 *  With the option wire_dtype = bf16 a chunk of f32 gradients that is summed densely is rounded to bf16 into memory of the
 *  handle's own when it is posted, summed there, and widened back when it is waited for: half the bytes on the way, and the
 *  plane is what it was to everyone else.
 *
 *  Under a CUDA capture begin, mark and finish put the whole reduction into the graph, in the same order and with the same
 *  transport, where that can be captured (NCCL). Each launch of the graph is then told by lf_nexus_replayed. Before capturing,
 *  lf_nexus_settle; all ranks capture or none does.
 *
 *  A transport is a table of functions; NexusSync calls it from the thread that marks. One reduction step at a time. Calls on
 *  one handle may come from any thread and exclude one another; a caller that holds a lock which the transport needs (the
 *  interpreter's) must let go of it first. */
#ifndef LOONGFORGE_NEXUS_H
#define LOONGFORGE_NEXUS_H

#include "loongforge/map.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct lf_nexus lf_nexus;

/** Counts and times since a handle was opened. Without a device's clock a collective's time runs from its post to the moment
 *  the host sees it done. */
typedef struct lf_nexus_stats {
    size_t size;
    int64_t steps, collectives, bytes, late_blocks; /* blocks that finish had to flush */
    double exposed_s;                               /* time that steps which were not captured waited for reductions, summed */
    double p50_s, p95_s, p99_s;                     /* of one collective; of one run where the transport has runs */
    double busy_s;                                  /* time of all of them, summed */
    double bus_bytes_s;   /* bytes * 2 (P - 1) / P over busy_s, for P ranks: what each link carries in a ring. 0 without a time */
    double exposed_share; /* exposed_s of busy_s */
    int64_t skipped, skipped_bytes; /* chunks of experts without a token anywhere, which did not move */
    double held_s;                  /* time that lf_nexus_gate held runs back */
} lf_nexus_stats;

/** How bytes move between ranks. Functions return LF_OK or an error, with its text kept by lf_transport_fail. All ranks post
 *  the same operations in the same order. Data is memory of the map's device; dtypes are F32, BF16 and, beside the steps, I64
 *  and F64. */
typedef struct lf_transport {
    size_t size;
    const char *name; /* "torch", "nccl", "mpi", "loopback" */
    void *user;
    int32_t rank, world;
    /** Start summing `count` elements over all ranks, in place; returns at once.  @param stream the data is ready when work
     *  queued on it so far is done (NULL: ready now).  @param[out] ticket names the operation for `wait`. */
    lf_status (*post)(void *user, void *data, int64_t count, int32_t dtype, lf_stream *stream, int64_t *ticket);
    /** Wait until a posted operation is done: on the host, or by making `stream` wait. Called once a post, in order of
     *  posting. LF_ERR_TIMEOUT, LF_ERR_PEER; after an error the transport no longer touches the operation's data. */
    lf_status (*wait)(void *user, int64_t ticket, lf_stream *stream, double timeout_s);
    /** (optional) Called by lf_nexus_close. */
    void (*close)(void *user);
    /** (optional) LF_OK when the operation is done, LF_AGAIN when not, or its error. Called now and then from the thread that
     *  marks, so that times of collectives end when they end; without it they end when lf_nexus_finish gets to them. */
    lf_status (*query)(void *user, int64_t ticket);
    /** (optional) open 1, some posts, open 0: a run. It is the same on every rank and posted in one go, so the transport may
     *  launch it as one; several posts may then get the same ticket. A transport without this gets its posts one by one, as
     *  each is ready. After a post that failed the run is over.  @param label names it in errors; lives until `close`. */
    lf_status (*run)(void *user, int32_t open, const char *label);
    /** (optional) LF_OK, or an error that the transport found by itself since. */
    lf_status (*check)(void *user);
    /** (optional) All posts of steps will lie in these pieces of memory: called a few times when a handle opens, in the same
     *  order on every rank; the transport may use it to move data without copies of its own. */
    lf_status (*memory)(void *user, void *base, int64_t bytes);
    /** (optional) A captured step was launched on `stream`. `label` as for `run`. */
    lf_status (*replayed)(void *user, lf_stream *stream, const char *label);
    /** (optional) Wait on the host until all that was posted is done. LF_ERR_TIMEOUT, LF_ERR_PEER. */
    lf_status (*settle)(void *user, double timeout_s);
    /** (optional) Fill collectives, bytes and times of operations that ran outside a capture, by the device's clock. */
    lf_status (*stats)(void *user, lf_nexus_stats *stats);
    /** (optional) One line for people: which library, what is used of it and what is not. */
    void (*describe)(void *user, char *text, size_t size);
    int32_t mean; /* 1: F32 and BF16 are divided by the world on the way; allowed when the option reduce is mean */
    /** (optional) As post, but only part `rank` of `world` equal parts of the data is to hold the sum here; what the other parts
     *  hold then does not matter. Without it, post.  @param count a multiple of world. */
    lf_status (*scatter)(void *user, void *data, int64_t count, int32_t dtype, lf_stream *stream, int64_t *ticket);
    /** (optional) As post, but nothing is summed: part r of `world` equal parts becomes rank r's, on every rank. Without it, a sum of
     *  bits.  @param dtype I64; count a multiple of world. */
    lf_status (*gather)(void *user, void *data, int64_t count, int32_t dtype, lf_stream *stream, int64_t *ticket);
} lf_transport;

/** For transports written outside the library: keep `text` as the calling thread's error.  @return status, or
 *  LF_ERR_INTERNAL when it is not negative. */
LF_API lf_status lf_transport_fail(lf_status status, const char *text);

/** Options, section "nexus". */
typedef struct lf_nexus_options {
    size_t size;
    char comm_strategy[LF_TEXT_MAX]; /* hybrid | dense | sparse */
    double k_ratio;                  /* sparse: share of a chunk's entries that one step sends */
    int64_t sparse_warmup_steps;     /* sparse: so many first steps are dense */
    int32_t error_feedback;          /* sparse: 0 loses what is not sent instead of adding it to the next step */
    int64_t chunk_bytes;             /* of one collective; ranges are cut at block edges where that fits, else inside */
    int32_t priority;                /* of the stream of a transport that opens one of its own */
    double timeout_s;                /* of one collective */
    char reduce[LF_TEXT_MAX];        /* mean | sum */
    int64_t run_bytes;               /* of chunks that become ready together and are launched as one */
    int32_t max_ctas;                /* NCCL: most multiprocessors it may take; 0: its own choice */
    int32_t nccl_blocking;           /* NCCL: calls return when the work is queued, instead of threads of NCCL's queueing it */
    int32_t register_buffers;        /* NCCL: move gradients without copies of its own, where it can */
    char fail[LF_TEXT_MAX];          /* NCCL: error | exit */
    double grace_s;                  /* NCCL: between a failure and the process's end */
    double launch_busy_pct;          /* lf_nexus_gate: a run waits while the device is busier than this; 0: never */
    double launch_wait_ms;           /* and no longer than this */
    int32_t debug;                   /* 1: compare over ranks what they do next, before each collective; not in captures */
    char nccl_library[LF_TEXT_MAX];  /* path; "": the one that is loaded already, or the loader's */
    char mpi_library[LF_TEXT_MAX];   /* path or name; "": the one that is loaded already, or one of the usual names */
    int32_t skip_empty;              /* chunks of experts without a token on any rank do not move: lf_nexus_present */
    int32_t shard_optimizer;         /* each rank gets the sums of its share alone, to update that: lf_nexus_gather */
    int32_t probe;                   /* hybrid: measure the link when a handle opens */
    double link_latency_us;          /* hybrid: of a small sum over all ranks */
    double link_mb_s;                /* hybrid: 10^6 bytes of an array summed over all ranks a second; 0: not told */
    double topk_mb_s;   /* hybrid: 10^6 bytes of gradients a second through top-k; 0: measured with the link, else 500 */
    int32_t chunk_tune; /* chunk_bytes is the first size, lf_nexus_tune_end finds the quickest */
    int64_t chunk_least, chunk_most; /* sizes that it tries */
    int32_t every_micro_step; /* a step is one micro-step, and gradients hold what earlier ones left: mean, dense, whole chunks */
    char wire_dtype[LF_TEXT_MAX]; /* grad | bf16: in what f32 gradients travel that are summed densely */
    double cast_mb_s; /* hybrid: 10^6 bytes of f32 gradients a second to bf16 and back; 0: measured with the link, else 4000 */
} lf_nexus_options;

/** One row of the schedule. */
typedef struct lf_chunk_info {
    size_t size;
    int32_t group;
    int32_t dtype;
    lf_range range;
    int64_t bytes;
    const char *form;   /* "dense", "bf16" (dense, rounded for the way) or "sparse"; owned by the library */
    int32_t run;        /* chunks of one run are posted together where the transport can */
    const char *why;    /* that form, in words; owned by the library */
    int64_t sent_bytes; /* that this rank puts into a step's sums for it; a sparse chunk: of its mask and its values, two sums */
    lf_range share;     /* with shard_optimizer: of this rank alone; otherwise the whole range */
    lf_range rest;      /* with shard_optimizer: what does not divide by the ranks, which all of them sum and update; else none */
} lf_chunk_info;

/** Make the schedule and check that all ranks have the same one (one small sum over the transport).
 *  @param map the handle keeps a reference.
 *  @param transport copied; its `user` must outlive the handle. NULL: the schedule alone, for reports; the map needs only be
 *  planned, and lf_nexus_begin is LF_ERR_STATE.
 *  @return LF_OK; LF_ERR_INVALID (an option, a transport without functions, rank outside the world); LF_ERR_STATE (map not
 *  planned, or not allocated); LF_ERR_PEER (ranks planned different maps or use different options: says which);
 *  LF_ERR_UNSUPPORTED (f16 gradients; a device without kernels for a sparse chunk); LF_ERR_NOMEM; the transport's error. On error *out is NULL and the transport is not closed. */
LF_API lf_status lf_nexus_open(lf_nexus **out, lf_map *map, const lf_transport *transport, const lf_nexus_options *opts);
/** Close the transport and free the schedule. NULL is allowed. A step that was begun is given up. */
LF_API void lf_nexus_close(lf_nexus *nexus);

/** This and the next change with the schedule: not while lf_nexus_retune or lf_nexus_tune_end runs. */
LF_API int32_t lf_nexus_n_chunks(const lf_nexus *nexus);
/** The i-th chunk in the order of posting.  @return LF_ERR_INVALID (no such chunk, or info->size). */
LF_API lf_status lf_nexus_get_chunk(const lf_nexus *nexus, int32_t chunk, lf_chunk_info *info);

/** One line on the transport and what is used of it, cut to `size` bytes.  @return LF_ERR_INVALID (text NULL, size 0). */
LF_API lf_status lf_nexus_describe(const lf_nexus *nexus, char *text, size_t size);

/** Start a step's reductions: forget all marks.  @return LF_ERR_STATE (the last step was not finished, or no transport); after
 *  a failed step that step's error, for good: ranks can no longer be known to agree. Close the handle. */
LF_API lf_status lf_nexus_begin(lf_nexus *nexus);
/** With skip_empty: how many tokens each block's expert had on this rank, in all of this step's forward passes; told between
 *  lf_nexus_begin and the first mark, on every rank or on none. They are summed over ranks, and the host waits for that. Chunks that
 *  hold nothing but experts without a token anywhere are zeros on every rank: they are not posted in this step, and cleared where
 *  the others are waited for. An expert said to be empty must have no gradient, or one of zeros. Not inside a capture.
 *  @param tokens (number of blocks), by block; numbers of dense ones are not read. An expert whose number is not known: 1.
 *  @return LF_ERR_INVALID (a negative number); LF_ERR_STATE (skip_empty is off; no step begun, or marks came; told already); the
 *  transport's error, which ends the handle. */
LF_API lf_status lf_nexus_present(lf_nexus *nexus, const int64_t *tokens);
/** Block `index` has its final gradient in the map (in order of `stream`). Posts every chunk this completes. Marks may come
 *  from several streams: a chunk is posted behind all of them. A tied parameter marks its owner's block.
 *  @return LF_ERR_STATE (marked twice in one step, or no step begun: names the parameter); LF_ERR_INVALID (no such block, or a
 *  frozen one); the transport's error, naming chunk and group, which also ends the step. */
LF_API lf_status lf_nexus_mark(lf_nexus *nexus, int32_t index, lf_stream *stream);
/** Clear and post what nobody marked, in order of `stream`, and do not wait: lf_nexus_take does, part by part, so that the first
 *  parts can be used while the last are under way; lf_nexus_finish for all that is left.
 *  @return LF_ERR_STATE (no step begun, or flushed already); the transport's error, which ends the step. */
LF_API lf_status lf_nexus_flush(lf_nexus *nexus, lf_stream *stream);
/** Wait for the next run of a flushed step, in the schedule's order, and divide it by the world when reduce is mean: the gradients
 *  of its chunks are there in order of `stream` (NULL: on return). Runs are those of lf_chunk_info, whatever the transport. The last
 *  one ends the step.  @param stream capturing exactly when the one of lf_nexus_flush was; runs may go to different streams.
 *  @param[out] first the run's first chunk.  @param[out] n how many chunks it has.
 *  @return LF_OK; LF_END: all are taken; LF_ERR_STATE (not flushed; inside a capture, but flushed outside, or the other way round);
 *  the error of a chunk, which ends the step: none of its gradients, also those taken before, are to be used then. */
LF_API lf_status lf_nexus_take(lf_nexus *nexus, lf_stream *stream, int32_t *first, int32_t *n);
/** lf_nexus_flush unless that was called, and lf_nexus_take of all that is left, as one wait. The reduced gradients are there in
 *  order of `stream` (NULL: on return).
 *  @return LF_ERR_STATE (no step begun); the first error of any chunk: the step's gradients are then not usable. */
LF_API lf_status lf_nexus_finish(lf_nexus *nexus, lf_stream *stream);
/** With shard_optimizer a step leaves, of each chunk, the sums of this rank's share and of the rest; the other shares hold nothing of
 *  use. Who updates its share then gives it to the other ranks: each share of chunks [first, first + n) in the plane of `role` becomes
 *  that of its rank, behind what was queued on `stream`. Posted, not waited for. Between lf_nexus_flush and the next lf_nexus_begin,
 *  the same calls on every rank. Without shard_optimizer, with one rank, and for a role that a class does not have: nothing happens.
 *  (Sharding the optimizer's work: Rajbhandari et al., "ZeRO", SC 2020; here the state of other shares stays allocated.)
 *  @return LF_ERR_INVALID (no such chunks or role); LF_ERR_STATE (no transport, a step that was not flushed, or more gathers than the
 *  schedule has chunks that nobody waited for); the transport's error, which ends the handle. */
LF_API lf_status lf_nexus_gather(lf_nexus *nexus, int32_t role, int32_t first, int32_t n, lf_stream *stream);
/** Wait for all gathers, in order of `stream` (NULL: on return). Once all runs are taken.
 *  @return LF_ERR_STATE (a step is not taken whole); the transport's error, which ends the handle. */
LF_API lf_status lf_nexus_gathered(lf_nexus *nexus, lf_stream *stream);
LF_API lf_status lf_nexus_get_stats(const lf_nexus *nexus, lf_nexus_stats *stats);

/** Make the schedule anew with another chunk size: the same map, transport and forms. Between steps, on every rank in the same place; waits
 *  on the host, compares with all ranks as lf_nexus_open does. Steps captured before must not be launched any more. With shard_optimizer
 *  shares change too, so masters and moments go to all ranks first. Ends tuning.
 *  @param chunk_bytes 4096 to 2^40, as the option.  @param stream the last step's update was queued there (NULL: it is done).
 *  @return LF_ERR_INVALID (chunk_bytes); LF_ERR_STATE (a step is running, gathers are not waited for, something is kept back of
 *  gradients, no transport); LF_ERR_UNSUPPORTED (chunks in the sparse form): nothing has changed. LF_ERR_PEER (another size on another
 *  rank), LF_ERR_NOMEM, the transport's error: the handle is ended. */
LF_API lf_status lf_nexus_retune(lf_nexus *nexus, int64_t chunk_bytes, lf_stream *stream);

/** With chunk_tune: around a whole training step, its update included. Sizes within chunk_least and chunk_most are tried, each for a few
 *  steps, and the one whose steps were shortest on the slowest rank stays, when it is at least 2 % quicker than the first. The host waits
 *  for the device where a try ends, once a size. Without chunk_tune, and when it is settled, both calls do nothing.
 *  @param stream that the step is queued on, the same in both (NULL: the step is done on return, and the host's clock counts). Not capturing.
 *  @return LF_ERR_STATE (a step is running); the handle's error. */
LF_API lf_status lf_nexus_tune_begin(lf_nexus *nexus, lf_stream *stream);
/** The step is queued.  @param counts 0: its time says nothing (warming up, capturing). All ranks call this in the same steps with the same
 *  `counts`.  @param[out] changed 1: the schedule is another one, as after lf_nexus_retune.
 *  @return LF_ERR_STATE (a step is running, or lf_nexus_tune_begin was not called); as lf_nexus_retune. */
LF_API lf_status lf_nexus_tune_end(lf_nexus *nexus, lf_stream *stream, int32_t counts, int32_t *changed);
/** What tuning is at. */
typedef struct lf_tuning_info {
    size_t size;
    int64_t chunk_bytes, first_bytes; /* of now; that it began with */
    int32_t n_sizes, n_tried;         /* to try, with the first; 0: nothing is tuned */
    int32_t settled;                  /* chunk_bytes stays */
    double first_s, chunk_s;          /* a step with either; 0: not known */
    const char *why;                  /* nothing is tuned, in words; "" when it is; owned by the library */
} lf_tuning_info;
/** @return LF_ERR_INVALID (info->size). */
LF_API lf_status lf_nexus_get_tuning(const lf_nexus *nexus, lf_tuning_info *info);

enum {
    LF_NEXUS_RECENT = 32, /* collectives that are remembered */
    LF_COLLECTIVE_POSTED = 0,
    LF_COLLECTIVE_DONE = 1, /* waited for: on a device the wait is queued */
    LF_COLLECTIVE_FAILED = 2
};
/** One of the last collectives of a handle. Replays of a captured step are not among them. */
typedef struct lf_collective_info {
    size_t size;
    int32_t state;
    int32_t dtype;
    int64_t seq;   /* counted from 0 at open; the same collective has the same number on every rank */
    int32_t chunk; /* of the schedule; -1: a sum beside the steps, or shares on their way to all ranks */
    int64_t count, bytes;
    double seconds; /* from its post to the end of its wait, or until now */
} lf_collective_info;
/** The newest collective but `back`, for the report of a failure. May be called while another thread waits for the transport.
 *  @return LF_END: so many are not remembered; LF_ERR_INVALID (info->size, back negative). */
LF_API lf_status lf_nexus_get_recent(const lf_nexus *nexus, int32_t back, lf_collective_info *info);

/** How busy the device is, in percent; negative: unknown, which holds nothing back. Called with the handle locked. */
typedef double (*lf_busy_fn)(void *user);
/** Ask `busy` before each run is posted, and again, while it answers more than launch_busy_pct, for launch_wait_ms at most. The thread
 *  that marks waits. What is captured is not held back. Order and results are the same; ranks need not agree.
 *  @param busy NULL: no longer.  @return LF_ERR_STATE (launch_busy_pct is 0). */
LF_API lf_status lf_nexus_gate(lf_nexus *nexus, lf_busy_fn busy, void *user);

/** LF_OK, or the error that ended the handle, also one that the transport found while nobody called (a peer that died, a
 *  collective past its deadline). Asks no device and costs next to nothing: for once a step, and before a checkpoint is saved.
 *  Where lf_nexus_finish does not wait on the host, a step is known to be good when this is LF_OK after its work is done. */
LF_API lf_status lf_nexus_check(lf_nexus *nexus);
/** Wait on the host until everything posted is done: before a capture, and before memory of the map is given up.
 *  @return LF_ERR_TIMEOUT, LF_ERR_PEER. */
LF_API lf_status lf_nexus_settle(lf_nexus *nexus);
/** Sum a small array over all ranks, in place and in order of `stream` (NULL: done on return): statistics, agreement, the first
 *  weights. Between steps, in the same order on every rank; may be captured.  @param dtype F64 or I64, which nobody divides.
 *  @return LF_ERR_STATE (a step is running, whose order against this call ranks could not agree on; no transport);
 *  LF_ERR_INVALID (another dtype); the transport's error, which ends the handle. */
LF_API lf_status lf_nexus_reduce(lf_nexus *nexus, void *data, int64_t count, int32_t dtype, lf_stream *stream);
/** Forget a step that was begun under a capture which failed: nothing of it ran, so the handle goes on.
 *  @return LF_OK, also when no step is running; LF_ERR_STATE (part of it ran: ranks no longer agree); the transport's error. */
LF_API lf_status lf_nexus_cancel(lf_nexus *nexus);
/** A graph that holds one captured step (begin, marks and finish on a capturing stream) was launched on `stream`, just now: count
 *  it and watch over it.  @return LF_ERR_STATE (nothing was captured); the handle's error. */
LF_API lf_status lf_nexus_replayed(lf_nexus *nexus, lf_stream *stream);

/** What the sparse form keeps back: for each of its entries, in f32, what was not sent so far. It is this rank's own, part of the
 *  training's state beside weights and moments. All of these between steps.
 *
 *  Write it to a file, which appears whole or not at all.  @param[out] hash digest of the file, 32 hex digits: kept with the
 *  checkpoint that the residual belongs to, it tells it from another save's.
 *  @return LF_OK; LF_END (no chunk is sparse: nothing was written); LF_ERR_STATE (a step is running); LF_ERR_IO, LF_ERR_NOSPACE;
 *  LF_ERR_NOMEM. */
LF_API lf_status lf_nexus_residual_save(lf_nexus *nexus, const char *path, char hash[33]);
/** Add a saved residual to this rank's. With as many ranks as before each loads its own, and training goes on bit for bit; with another
 *  number rank r loads those of r, r + world, r + 2 world, … so that nothing is lost (reduce = mean weighs them by the change).
 *  Entries whose chunk is dense now are added to the gradient of the next step.  @param hash NULL: not compared.
 *  @return LF_OK; LF_ERR_NOTFOUND; LF_ERR_FORMAT, LF_ERR_CORRUPT (no residual, damaged, or another save's); LF_ERR_STATE (another
 *  map's; a step is running); LF_ERR_IO; LF_ERR_NOMEM. The file is checked before anything of it is taken. */
LF_API lf_status lf_nexus_residual_load(lf_nexus *nexus, const char *path, const char *hash);
/** Bytes of entries that may have something kept back; 0 after a step that flushed them. */
LF_API int64_t lf_nexus_residual_bytes(const lf_nexus *nexus);
/** Forget what is kept back: before loading another course's. Between steps.  @return LF_ERR_STATE (a step is running); the
 *  handle's error; LF_ERR_DEVICE. */
LF_API lf_status lf_nexus_residual_drop(lf_nexus *nexus);
/** The next step is dense and takes the residuals along: on all ranks alike. */
LF_API lf_status lf_nexus_residual_flush(lf_nexus *nexus);
/** `steps` steps of the training were done before now, on all ranks alike: whose turn it is to select, and the warm-up, go by it. A
 *  resumed training gives its checkpoint's step. Compares it over all ranks.
 *  @return LF_ERR_PEER (not the same on all ranks), which ends the handle; LF_ERR_STATE. */
LF_API lf_status lf_nexus_seek(lf_nexus *nexus, int64_t steps);

/** The largest entries of an array, with error feedback: what the sparse form does to one chunk, by itself (in Python:
 *  topk_allreduce). A round is fold; select on one rank, whose mask then goes to all; pack; the values' sum over ranks; scatter.
 *  For every entry what is packed and what stays in the residual add up exactly to gradient + old residual, rounded once to f32.
 *  Sources: Lin et al., "Deep Gradient Compression", ICLR 2018 (top-k with the rest kept); Chen et al., "ScaleCom", NeurIPS 2020
 *  (one rank in turn selects for all, so that an ordinary all-reduce can sum); radix select: Alabi et al., "Fast K-Selection
 *  Algorithms for Graphics Processing Units", JEA 2012.
 *
 *  All memory is the device's and the caller's. It must stay until the work on `stream` is done; on the CPU this struct too. Same bits on
 *  every device, in every run. */
typedef struct lf_topk {
    size_t size;
    int64_t count, k; /* entries; of these taken: 1 to count, 0 for an empty array */
    const void *data; /* (count) the gradient */
    void *out;        /* (count) the dense result; may be `data` */
    float *residual;  /* (count) */
    int64_t *mask;    /* ((count + 63) / 64) bit i % 64 of word i / 64 is entry i's */
    void *values;     /* (k) */
    void *scratch;    /* lf_topk_scratch_bytes; arrays worked on one after another may share it */
    int32_t dtype;    /* of data, out and values: F32 or BF16 */
    int32_t keep;     /* 0: forget the residual instead of adding it */
    float factor;     /* that scatter multiplies by */
} lf_topk;

/** Bytes of scratch for `count` entries, about an eighth of a byte for each. */
LF_API int64_t lf_topk_scratch_bytes(int64_t count);
/** residual = data + residual (keep 0: data). Reads data, residual.
 *  @param stream of the device; NULL: now, done on return.
 *  @return of this and the next three: LF_OK; LF_ERR_INVALID (size, count, k, dtype or a pointer); LF_ERR_UNSUPPORTED (a device
 *  without these kernels); LF_ERR_DEVICE. */
LF_API lf_status lf_topk_fold(lf_device *device, const lf_topk *topk, lf_stream *stream);
/** mask = the k entries of the residual largest in magnitude. Exactly k: of equal ones those in front; NaN counts above infinity, so
 *  neither is ever passed over. */
LF_API lf_status lf_topk_select(lf_device *device, const lf_topk *topk, lf_stream *stream);
/** values = the residual's entries in the mask, in order, in the data's dtype; what rounding them loses stays in the residual, and
 *  nothing of those that are not finite.  @return also LF_ERR_PEER on the CPU: the mask has not k entries. */
LF_API lf_status lf_topk_pack(lf_device *device, const lf_topk *topk, lf_stream *stream);
/** out = values * factor at the mask's places, 0 elsewhere.  @return as lf_topk_pack. */
LF_API lf_status lf_topk_scatter(lf_device *device, const lf_topk *topk, lf_stream *stream);

/** A transport inside one process: `world` ends, used by one thread each, that sum each other's data in rank order (BF16 in
 *  f32, rounded once), for tests and dry runs. An end that closes early, posts another count or dtype than rank 0, or gives up
 *  after its timeout makes the others' open operations fail with LF_ERR_PEER. Streams given to post must be done or closed
 *  before the ends are.
 *  @param[out] ends room for `world` tables, each to be closed by its `close` (lf_nexus_close does); the last one frees the
 *  loopback.  @return LF_ERR_INVALID (world outside 1 to 64); LF_ERR_NOMEM; LF_ERR_IO (no thread). */
LF_API lf_status lf_loopback_open(int32_t world, lf_transport *ends);

/** NCCL, found at run time (2.10 or newer): one communicator a handle, on a stream of its own, one rank a GPU.
 *
 *  Chunks of a run are launched as one. A step's end makes the caller's stream wait, not the host; so failures come late, and a
 *  watcher looks for them: an error of NCCL's, and a run that makes no progress for timeout_s after its turn came. It then keeps
 *  the error for the next call on the handle, aborts the communicator (which lets a stuck device go on, with useless results), and
 *  logs. With the option fail = exit a process that has not closed the handle grace_s after the failure, or after the caller first
 *  got to know of it, is ended with LF_NCCL_EXIT_CODE and one line on stderr: a host that hangs in the driver cannot be told.
 *  timeout_s must be longer than the time by which ranks may be apart (a checkpoint, an evaluation on one of them). */
enum {
    LF_NCCL_ID_BYTES = 128,
    LF_NCCL_EXIT_CODE = 75,
    LF_NCCL_MEAN_MOST = 4 /* ranks up to which NCCL divides; above, sums may be made in the switch, which cannot */
};
/** @param opts section "nexus", NULL for defaults; nccl_library is used.  @param[out] version 22809: 2.28.9, in words in `text`
 *  (may be NULL).  @return LF_ERR_UNSUPPORTED: no NCCL, too old, or not whole: says which. */
LF_API lf_status lf_nccl_version(const lf_nexus_options *opts, int32_t *version, char *text, size_t size);
/** The bytes by which ranks meet: made on rank 0, brought to all others by the caller.
 *  @return LF_ERR_UNSUPPORTED as above; LF_ERR_PEER (no network interface). */
LF_API lf_status lf_nccl_id(const lf_nexus_options *opts, uint8_t id[LF_NCCL_ID_BYTES]);
/** The same through a file that all ranks see: rank 0 makes it, the others wait for it up to timeout_s. Its name must be new for
 *  every run; rank 0 removes it once lf_nccl_open is through.
 *  @return as lf_nccl_id; LF_ERR_IO; LF_ERR_FORMAT (another kind of file); LF_ERR_TIMEOUT. */
LF_API lf_status lf_nccl_id_by_file(const lf_nexus_options *opts, const char *path, int32_t rank, uint8_t id[LF_NCCL_ID_BYTES]);
/** Meet the other ranks, within timeout_s.  @param opts give lf_nexus_open the same.  @param device CUDA, this rank's own; a
 *  reference is kept.  @param[out] out to be closed by its `close` (lf_nexus_close does), which takes at most about 20 s, also when
 *  other ranks are gone.
 *  @return LF_ERR_INVALID (an option, rank, a CPU device); LF_ERR_UNSUPPORTED; LF_ERR_TIMEOUT (a rank did not come); LF_ERR_PEER,
 *  LF_ERR_DEVICE (with NCCL's words); LF_ERR_NOMEM. */
LF_API lf_status lf_nccl_open(const lf_nexus_options *opts, lf_device *device, int32_t rank, int32_t world,
                              const uint8_t id[LF_NCCL_ID_BYTES], lf_transport *out);

/** MPI, found at run time: Open MPI, or MPICH and its relatives (Intel MPI, MVAPICH, Cray), version 3.0 or newer; ranks are those of
 *  `mpirun` or `srun`. For the CPU: device memory is refused, also by a library that would take it.
 *
 *  MPI belongs to the process. One thread of ours makes every call of it, in order of posting over all handles; callers never wait
 *  inside MPI, only for that thread, and no longer than their timeout. Before data moves all ranks compare what they have come for,
 *  so ranks that are at different operations get LF_ERR_PEER and not each other's numbers; waiting for a late rank sleeps. Data is
 *  copied to memory of ours and back: an operation that was given up never touches the caller's again.
 *
 *  Sums are MPI_SUM of the type; BF16 is added pair by pair in f32 and rounded each time. In which order ranks are added is the
 *  library's choice, from count, type and world: the same bits on every rank and in every run of the same library and settings, which
 *  MPI recommends and does not promise, and not those of another transport, but for values whose sums are exact.
 *
 *  A failure (a deadline passed, ranks that disagree, an error of MPI's) ends MPI for the process: every later call gives its text, and
 *  MPI_Finalize, which would wait for the others, is left out. End the process with a code other than 0, and the launcher ends
 *  the others. */
typedef struct lf_mpi_info {
    size_t size;
    int32_t rank, world;
    int32_t ours;     /* we called MPI_Init_thread, and will call MPI_Finalize */
    char library[96]; /* "Open MPI v4.1.4" */
} lf_mpi_info;

/** One more user of MPI in this process: the first starts it (MPI_Init_thread with MPI_THREAD_SERIALIZED), unless the program has.
 *  A program that uses MPI itself besides must have started it with MPI_THREAD_MULTIPLE. Waits for the other ranks up to timeout_s.
 *  A rank that cannot be reached may make MPI itself end the process here: its error handlers are not in force yet.
 *  @param opts section "nexus", NULL for defaults: mpi_library, timeout_s.  @param[out] info with its size set.
 *  @return LF_ERR_UNSUPPORTED: no MPI, of another family, not whole, or started for one thread: says which; LF_ERR_STATE: it was ended
 *  in this process; LF_ERR_TIMEOUT; LF_ERR_PEER with MPI's words; LF_ERR_NOMEM, LF_ERR_IO (no thread). On error nothing is started. */
LF_API lf_status lf_mpi_start(const lf_nexus_options *opts, lf_mpi_info *info);
/** One user less. The last one ends MPI where we started it, which waits for the other ranks, at most about 20 s; it cannot be started
 *  again then. For each lf_mpi_start that was LF_OK once. */
LF_API void lf_mpi_stop(void);
/** A transport, and one more user until its `close`. All ranks open the same ones in the same order.  @param device the CPU.
 *  @param[out] out rank and world are MPI's.
 *  @return as lf_mpi_start; LF_ERR_UNSUPPORTED (another device). */
LF_API lf_status lf_mpi_open(const lf_nexus_options *opts, lf_device *device, lf_transport *out);

#ifdef __cplusplus
}
#endif
#endif
