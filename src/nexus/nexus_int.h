/* SPDX-License-Identifier: Apache-2.0 */
/** @file nexus_int.h  NexusSync's own structures; see docs/internals/nexus.md. */
#ifndef LF_NEXUS_INT_H
#define LF_NEXUS_INT_H

#include "base/base.h"
#include "device/device_int.h"
#include "loongforge/nexus.h"
#include "nexus/nexus_parts.h"

/** What NexusSync needs from a device besides copies. `now` 1: finished on return. */
typedef struct lf__nexus_kernels {
    uint32_t size; /* sizeof(lf__nexus_kernels) */
    const char *name;
    /* data: (count) of F32 or BF16, multiplied in place */
    lf_status (*scale)(void *context, void *stream, int32_t now, void *data, int64_t count, int32_t dtype, float factor);
    /* part: LF__TOPK_* */
    lf_status (*topk)(void *context, void *stream, int32_t now, const lf_topk *t, int32_t part);
    /* data: (count) f32; wire: (count) bf16 = data, rounded to nearest even; a NaN stays one */
    lf_status (*narrow)(void *context, void *stream, int32_t now, const float *data, uint16_t *wire, int64_t count);
    /* wire: (count) bf16; data: (count) f32 = wire * factor */
    lf_status (*widen)(void *context, void *stream, int32_t now, const uint16_t *wire, float *data, int64_t count, float factor);
} lf__nexus_kernels;

extern const lf__nexus_kernels lf__nexus_cpu;
lf_status lf__nexus_cpu_topk(void *context, void *stream, int32_t now, const lf_topk *t, int32_t part);
/** One part of top-k in order of `stream`; `t` must stay until it is done. */
lf_status lf__nexus_topk(lf_device *device, const lf__nexus_kernels *kernels, const lf_topk *t, int32_t part, lf_stream *stream);
/** The table of a device. LF_ERR_UNSUPPORTED: it has none, or one of another build. */
lf_status lf__nexus_find_kernels(lf_device *device, const lf__nexus_kernels **kernels);

enum { NEXUS_DENSE, NEXUS_SPARSE, NEXUS_BF16 /* dense, of f32 gradients that travel as bf16 */ };

typedef struct nexus_chunk {
    int32_t group, dtype, layer; /* layer: the one that backward finishes last */
    const char *group_name;      /* the map's */
    lf_range range;
    int64_t bytes;
    int32_t run;
    int32_t n_blocks, n_left; /* blocks that lie in it; those not yet marked in this step */
    lf_range share, rest;     /* as in lf_chunk_info */
    void *data;               /* NULL without a transport */
    uint16_t *wire;           /* (range.count) what travels in its stead; NULL: the gradient itself */
    int64_t ticket, posted_ns;
    bool skip;           /* in this step: empty on every rank */
    int64_t rest_ticket; /* where a chunk has both a share and a rest */
    float factor;        /* that finish multiplies the sums by */
    int32_t form;        /* NEXUS_* */
    const char *why;
    lf_topk topk; /* count and k when the form is sparse; a residual also when an older form left one behind */
    bool own_residual;
} nexus_chunk;

/** Chunks [first, end) that become ready at about the same time: a layer's experts, or its dense parameters, or part of them. */
typedef struct nexus_run {
    int32_t first, end;
    int64_t bytes;
    char label[88];
} nexus_run;

/** The schedule: chunks in order of posting, and for block b its chunks chunk_of[first_of[b] … first_of[b + 1]). */
typedef struct nexus_schedule {
    nexus_chunk *chunks;
    int32_t n_chunks, chunks_room;
    nexus_run *runs;
    int32_t n_runs;
    int32_t n_blocks;
    int32_t *first_of, *chunk_of;
    int32_t *owner; /* of a block: itself or what it is tied to; -1 for frozen ones */
} nexus_schedule;

/** Two events on the step's stream, around one wait of it; opened when first used. */
typedef struct nexus_span {
    lf_event *from, *to;
    bool open;     /* recorded and not yet read */
    double last_s; /* what was read last */
} nexus_span;

enum { SPANS = 4 };

/** Memory of the chunks whose form is sparse, and what they do in the step that runs. */
typedef struct nexus_sparse {
    void *residuals, *wire, *scratch; /* wire: masks and values, what the transport moves */
    int64_t residual_bytes, wire_bytes, n_chunks;
    bool dirty;                /* a residual may hold something */
    bool asked;                /* lf_nexus_residual_flush: the next step is dense */
    bool now;                  /* this step is sparse */
    bool flushing;             /* this step is dense and takes the residuals along */
    bool own;                  /* this step takes along what was loaded for chunks that are dense */
    bool was_dirty, was_asked; /* before this step began */
    int64_t turn;              /* of this step */
} nexus_sparse;

typedef struct nexus_traced {
    int64_t seq, count, ticket, began_ns, ended_ns;
    const void *data;
    int32_t dtype, state;
} nexus_traced;

/** What was posted last, by sequence number. */
typedef struct nexus_trace {
    lf__mutex *mutex; /* guards the rest */
    int64_t n;
    nexus_traced ring[LF_NEXUS_RECENT];
} nexus_trace;

enum { TUNE_SIZES = 20, TUNE_TRIES = 8, TUNE_SKIP = 1, TUNE_START = 4 };

/** Which chunk sizes are tried, and how they did: no clock and no rank in it. */
typedef struct nexus_tuner {
    int64_t bytes[TUNE_SIZES];  /* (n), the first size in front */
    double seconds[TUNE_SIZES]; /* (n) of a step: the slowest rank's; INFINITY: not known */
    int32_t n, now;             /* now: the one in use */
    int32_t n_tried;
    int32_t skip, times; /* of this try: steps that are not yet counted, and steps that were */
    bool again;          /* the first one is tried once more, before another takes its place */
    bool settled;
} nexus_tuner;

/** A step's time: two events on its stream, or the host's clock where it has none. */
typedef struct nexus_lap {
    lf_event *from, *to;
    int64_t began_ns;
    double seconds;
    bool by_events;
} nexus_lap;

/** A tuner with a clock. */
typedef struct nexus_tuning {
    nexus_tuner tuner;
    nexus_lap laps[TUNE_TRIES];
    bool begun;
    const char *why; /* nothing is tuned */
} nexus_tuning;

struct nexus_chain;
struct nexus_debug;

struct lf_nexus {
    lf_map *map;
    lf_device *device;
    lf_transport transport; /* post NULL: the schedule alone */
    lf_nexus_options opts;
    const lf__nexus_kernels *kernels;
    nexus_schedule plan;
    char (*why)[240]; /* (n_groups) of its form, where the cost model chose it */
    lf__mutex *mutex; /* guards all below */
    uint8_t *marked;  /* by block */
    bool running;
    bool flushed;        /* everything of this step is posted; until the next begin */
    int32_t next, timed; /* chunks posted; of these, chunks whose time is known */
    int32_t taken;       /* runs that were waited for */
    lf__fault fault;     /* the first failure, for good */
    lf_event *event;     /* what the streams of this step's marks have in common */
    bool event_used;
    void *native; /* stream of the last mark, when it has a native handle */
    int64_t steps, collectives, bytes, late_blocks;
    double exposed_s;
    lf__hist hist;
    int64_t *tokens;     /* (n_blocks) of this step, summed over ranks; NULL: skip_empty is off */
    void *shared_tokens; /* the device's, for that sum */
    uint8_t *is_expert;  /* (n_blocks) */
    bool told;           /* in this step */
    int64_t skipped, skipped_bytes;
    bool sharded;           /* shard_optimizer, and several ranks */
    int64_t *gather_ticket; /* (n_chunks), the first n_gathers are to be waited for */
    int32_t n_gathers;
    void *wire; /* of all chunks in bf16; NULL: there is none */
    int64_t wire_bytes;
    nexus_sparse sparse;
    struct nexus_chain *chain; /* NULL: no chunk is sparse */
    int64_t steps_before;      /* lf_nexus_seek */
    uint64_t capture;          /* that this step is part of; 0: it runs */
    bool captured;             /* a whole step once was */
    bool ran;                  /* something of this step was posted outside a capture */
    nexus_span *spans;         /* (SPANS, n_runs), by the run that is waited for first, of steps that ran; NULL on the CPU */
    nexus_trace trace;
    lf_busy_fn busy; /* NULL: nothing is held back */
    void *busy_user;
    double held_s;
    struct nexus_debug *debug; /* NULL: the option is off */
    nexus_tuning tuning;
    nexus_run **superseded; /* (n_superseded) of earlier schedules: a transport may keep their labels until close */
    int32_t n_superseded;
};

/** Cut the map's groups into chunks of at most `chunk_bytes`, order them, and gather them into runs of at most `run_bytes`.
 *  LF_ERR_STATE, LF_ERR_NOMEM. */
lf_status lf__nexus_schedule(nexus_schedule *plan, const lf_map *map, int64_t chunk_bytes, int64_t run_bytes);
void lf__nexus_schedule_free(nexus_schedule *plan);
/** Compare the map and the options that shape the schedule with all ranks, by one sum. LF_ERR_PEER says which differ. */
lf_status lf__nexus_agree(lf_nexus *nexus);

/* nexus_transport.c: calls through the table. Errors have words; a function that is left out answers LF_OK. */
lf_status lf__nexus_take_transport(lf_nexus *nexus, const lf_transport *transport);
/** A transport answers LF_OK or an error with words; anything else is put into that form. */
lf_status lf__nexus_answer(const lf_nexus *nexus, const char *what, lf_status rc);
lf_status lf__nexus_post(lf_nexus *nexus, void *data, int64_t count, int32_t dtype, lf_stream *stream, int64_t *ticket);
/** Of (world, count / world) only this rank's part, summed; every rank's part, as it is. */
lf_status lf__nexus_scatter(lf_nexus *nexus, void *data, int64_t count, int32_t dtype, lf_stream *stream, int64_t *ticket);
lf_status lf__nexus_gather(lf_nexus *nexus, void *data, int64_t bytes, lf_stream *stream, int64_t *ticket);
lf_status lf__nexus_wait(lf_nexus *nexus, int64_t ticket, lf_stream *stream);
lf_status lf__nexus_call_run(lf_nexus *nexus, int32_t open, const char *label);
lf_status lf__nexus_call_check(lf_nexus *nexus);
lf_status lf__nexus_call_settle(lf_nexus *nexus);
lf_status lf__nexus_call_replayed(lf_nexus *nexus, lf_stream *stream);
/** @param[in,out] timed_bytes that busy_s is the time of. */
lf_status lf__nexus_call_stats(lf_nexus *nexus, lf_nexus_stats *stats, int64_t *timed_bytes);
lf_status lf__nexus_announce_memory(lf_nexus *nexus);

/* nexus_trace.c: the last collectives. The calls through the table write it. */
lf_status lf__nexus_trace_open(lf_nexus *nexus);
void lf__nexus_trace_close(lf_nexus *nexus);
void lf__nexus_trace_post(lf_nexus *nexus, const void *data, int64_t count, int32_t dtype, int64_t ticket, lf_status rc);
void lf__nexus_trace_wait(lf_nexus *nexus, int64_t ticket, lf_status rc);

/* nexus_gate.c: before something is posted in order of `stream`. */
lf_status lf__gate_hold(lf_nexus *nexus, lf_stream *stream);

/* nexus_debug.c: the option debug. Without it nothing happens. */
typedef enum nexus_stage { NEXUS_SUMS, NEXUS_VALUES, NEXUS_BESIDE, NEXUS_SHARES } nexus_stage;
lf_status lf__debug_open(lf_nexus *nexus);
void lf__debug_close(lf_nexus *nexus);
/** The schedule is another one, and nothing is under way. */
lf_status lf__debug_resize(lf_nexus *nexus);
/** A post is on its way. */
lf_status lf__debug_posted(lf_nexus *nexus, int64_t ticket, lf_stream *stream);
/** Its wait comes: whether a comparison has waited for it already. */
bool lf__debug_has_waited(lf_nexus *nexus, int64_t ticket);
/** All ranks are about to post chunks [first, end) (shares: of role `dtype`), or a sum of (count, dtype) beside them, in order of `stream`; collective.
 *  LF_ERR_PEER: they are not. */
lf_status lf__debug_compare(lf_nexus *nexus, nexus_stage stage, int32_t first, int32_t end, int64_t count, int32_t dtype,
                            lf_stream *stream);

/* nexus_time.c: how long the step was kept waiting, by the device's clock. On the CPU all of these do nothing. */
lf_status lf__nexus_spans_open(lf_nexus *nexus);
void lf__nexus_spans_close(lf_nexus *nexus);
/** Around one wait on `stream`, for run `run` and perhaps more. */
lf_status lf__nexus_span_begin(lf_nexus *nexus, int32_t run, lf_stream *stream);
lf_status lf__nexus_span_end(lf_nexus *nexus, int32_t run, lf_stream *stream);
/** Add to exposed_s what is known by now. */
void lf__nexus_spans_read(lf_nexus *nexus);

/* nexus_empty.c */
lf_status lf__empty_open(lf_nexus *nexus);
void lf__empty_close(lf_nexus *nexus);
lf_status lf__empty_clear(lf_nexus *nexus, const nexus_chunk *c, lf_stream *stream);

/* nexus_shard.c */
/** Who updates what: all of it, or this rank's share. */
lf_status lf__shard_open(lf_nexus *nexus);
lf_status lf__shard_post(lf_nexus *nexus, nexus_chunk *c, lf_stream *stream);
lf_status lf__shard_wait(lf_nexus *nexus, nexus_chunk *c, lf_stream *stream);
/** Masters and moments of every rank's shares to all, in order of `stream`; the host waits. */
lf_status lf__shard_gather_state(lf_nexus *nexus, lf_stream *stream);
/** LF_ERR_STATE when gathers were not waited for. */
lf_status lf__shard_check(const lf_nexus *nexus);
/** Address of part of a chunk's gradient. */
void *lf__nexus_data(const nexus_chunk *c, const lf_range *part);

/* nexus_cost.c */

/** What the cost model knows: a sum of all ranks costs latency_s + bytes / bytes_s, top-k of an array bytes / topk_bytes_s, rounding
 *  f32 gradients to bf16 and widening them bytes / cast_bytes_s. */
typedef struct nexus_link {
    double latency_s, bytes_s, topk_bytes_s, cast_bytes_s;
} nexus_link;
/** What a group's chunks come to: bytes of gradients, and what moves of them in other forms; 0: that form cannot be. */
typedef struct nexus_load {
    int64_t n_chunks, bytes, bf16_bytes, sparse_bytes;
    int64_t cast_bytes; /* of gradients that bf16 rounds */
} nexus_load;
typedef struct nexus_cost {
    double dense_s, bf16_s, sparse_s; /* INFINITY: that form cannot be */
    double bf16_below_bytes_s;        /* below it bf16 takes less time than dense; 0: never */
    double sparse_below_bytes_s;      /* below it sparse takes less time than what would be chosen without it; 0: never */
    int32_t form;                     /* the cheapest by a clear margin */
} nexus_cost;
nexus_cost lf__nexus_cost(const nexus_link *link, const nexus_load *load);
/** The largest of every rank's numbers, on all of them. numbers: (n); collective, the host waits. */
lf_status lf__nexus_agree_on_largest(lf_nexus *nexus, double *numbers, int32_t n);
/** The link as options tell it; false: they do not. */
bool lf__nexus_link_told(const lf_nexus_options *opts, nexus_link *link);
/** The link as a few sums and rounds of the kernels show it: the slowest rank's numbers, the same on all. Collective. */
lf_status lf__nexus_probe(lf_nexus *nexus, nexus_link *link);

/* nexus_form.c */
/** The form of each group's chunks, and why: from what all ranks know alike, so that they choose alike. Measures the link where that is
 *  asked for and there is a transport; its kernels must be there then. */
lf_status lf__nexus_choose_forms(lf_nexus *nexus);
/** Chunks of another schedule of the same groups, none of which is sparse: their forms are those of now, for the same reasons. */
void lf__nexus_keep_forms(const lf_nexus *nexus, nexus_schedule *plan);
const char *lf__nexus_form_name(int32_t form);
/** What a step posts for a chunk. */
int64_t lf__nexus_sent_bytes(const nexus_chunk *c);

/* nexus_wire.c: chunks that travel as bf16. Of others nothing happens. */
/** Places of all of them; memory for them where there is none yet: another cut of the same groups needs as much. */
lf_status lf__wire_open(lf_nexus *nexus);
void lf__wire_close(lf_nexus *nexus);
/** (wire_bytes) what the transport works on; NULL: no chunk travels so. */
void *lf__wire_memory(const lf_nexus *nexus);
/** What the transport sums: of which dtype, and where part of it lies. */
int32_t lf__wire_dtype(const nexus_chunk *c);
void *lf__wire_data(const nexus_chunk *c, const lf_range *part);
/** Before the chunk's post, in order of `stream` (NULL: now). */
lf_status lf__wire_narrow(lf_nexus *nexus, nexus_chunk *c, lf_stream *stream);
/** Once its sum is there: this rank's share and the rest, times the chunk's factor. */
lf_status lf__wire_widen(lf_nexus *nexus, nexus_chunk *c, lf_stream *stream);

/* nexus_sparse.c: one chunk at a time, in order of `stream` (NULL: now) */
lf_status lf__sparse_open(lf_nexus *nexus);
void lf__sparse_close(lf_nexus *nexus);
/** Free the residual of a chunk that is dense now. */
void lf__sparse_drop_residual(lf_nexus *nexus, nexus_chunk *c);
void lf__sparse_begin(lf_nexus *nexus);
/** Nothing of the step that was begun ran. */
void lf__sparse_cancel(lf_nexus *nexus);
/** Whether this step sends the chunk as mask and values. */
static inline bool lf__sparse_now(const lf_nexus *nexus, const nexus_chunk *c)
{
    return nexus->sparse.now && c->form == NEXUS_SPARSE;
}
/** Whether this step takes residuals along as they are. */
static inline bool lf__sparse_takes(const lf_nexus *nexus) { return nexus->sparse.flushing || nexus->sparse.own; }
/** Before the chunk's first post: its mask is made, or a residual that an older form left behind is added to the gradient. */
lf_status lf__sparse_prepare(lf_nexus *nexus, int32_t chunk, lf_stream *stream);
lf_status lf__sparse_pack(lf_nexus *nexus, nexus_chunk *c, lf_stream *stream);
lf_status lf__sparse_scatter(lf_nexus *nexus, nexus_chunk *c, lf_stream *stream);

/* nexus_chain.c: a step's collectives when some of them need the result of others. */
lf_status lf__chain_open(lf_nexus *nexus);
/** Let a worker end what it is at, so that nobody calls the transport any more. */
void lf__chain_stop(lf_nexus *nexus);
void lf__chain_close(lf_nexus *nexus);
lf_status lf__chain_begin(lf_nexus *nexus);
/** Chunks [first, end) are complete in order of `stream`. */
lf_status lf__chain_post(lf_nexus *nexus, int32_t first, int32_t end, lf_stream *stream);
/** Everything was posted: put the ends of all runs in order. */
lf_status lf__chain_flush(lf_nexus *nexus);
/** Make `stream`, or the host, wait for a run. */
lf_status lf__chain_take(lf_nexus *nexus, int32_t run, lf_stream *stream);
/** What its worker has met so far. */
lf_status lf__chain_check(lf_nexus *nexus);
/** Wait until its worker rests, so that the transport may be called. */
lf_status lf__chain_rest(lf_nexus *nexus);
/** Wait on the host until its stream is through: before residuals are touched. */
lf_status lf__chain_drain(lf_nexus *nexus);
/** A step is under way, in which its worker alone calls the transport. */
bool lf__chain_has_transport(const lf_nexus *nexus);
/** Around reading counts and times. */
void lf__chain_lock(lf_nexus *nexus);
void lf__chain_unlock(lf_nexus *nexus);

/* nexus_retune.c. The handle is locked. */
/** NULL, or why the chunk size cannot change as long as the handle is open. */
const char *lf__nexus_why_fixed(const lf_nexus *nexus);
/** As lf_nexus_retune, and tuning goes on. */
lf_status lf__nexus_retune(lf_nexus *nexus, int64_t chunk_bytes, lf_stream *stream);

/* nexus_tune.c */
/** Sizes to try: `first`, and within the bounds. */
void lf__tuner_init(nexus_tuner *t, int64_t first, int64_t least, int64_t most);
/** A step that counts: whether its time is asked for, as number t->times - 1 of this try. */
bool lf__tuner_step(nexus_tuner *t);
/** The median of those times (n, sorted here) that are numbers above 0; INFINITY when none is. */
double lf__tuner_figure(double *times, int32_t n);
/** The try is over: `seconds` is what all ranks agreed on for bytes[now]. Chooses the next `now`. */
void lf__tuner_take(nexus_tuner *t, double seconds);
lf_status lf__tune_open(lf_nexus *nexus);
void lf__tune_close(lf_nexus *nexus);

/* nexus.c */
/** Addresses of all chunks, and whether we can reduce what is there. */
lf_status lf__nexus_resolve_chunks(lf_nexus *nexus);
lf_status lf__nexus_fail_prefix(const lf_nexus *nexus, int32_t chunk, lf_status rc);
void lf__nexus_add_time(lf_nexus *nexus, int64_t bytes, int64_t ns);
lf_status lf__nexus_divide(lf_nexus *nexus, nexus_chunk *c, lf_stream *stream);
/** The step and the handle are over. */
lf_status lf__nexus_fail_step(lf_nexus *nexus, lf_status rc);
/** The handle's error, or one that the transport has found meanwhile. */
lf_status lf__nexus_check_health(lf_nexus *nexus);

#endif
