/* SPDX-License-Identifier: Apache-2.0 */
/** @file scope_int.h  What the files of the step clock share; see docs/internals/scope.md. */
#ifndef LF_SCOPE_INT_H
#define LF_SCOPE_INT_H

#include "base/base.h"
#include "device/device_int.h"
#include "scope_meter.h"

/** Times of one step, or their sums over steps. */
typedef struct lf__part_times {
    double wall_s, gap_s, busy_s[LF_N_PARTS], exposed_s[LF_N_PARTS];
    int64_t steps, tokens, step; /* step: the newest in it, by ends from 0 */
} lf__part_times;

/** What the host knows of a step that the device times: all that is not in its page. */
typedef struct lf__host_times {
    double busy_s[LF_N_PARTS], exposed_s[LF_N_PARTS]; /* added */
    double trainer_s[LF_N_PARTS];                     /* the trainer's own, between a part's begin and end */
} lf__host_times;

enum { LF_FLIGHT_OPEN = 0, LF_FLIGHT_ENDED = 1, LF_FLIGHT_CANCELLED = 2 };

/** A step in flight: begun, figures not yet taken. */
typedef struct lf__flight {
    lf__stamp open, close;   /* queued work refers to them */
    lf_event *begun, *ended; /* behind the stamps that open and close its page */
    lf__host_times host;
    int64_t tokens, step;
    int32_t state;
    bool alone; /* it ends at its own end, not at the begin of the next */
} lf__flight;

typedef struct lf__follow {
    lf_device *device;
    lf_stream *stream;
    const lf__scope_kernels *kernels; /* NULL: the CPU */
    lf__meter *meter;
    lf__meter_page *pages; /* (depth) */
    lf__flight *flights;   /* (depth) ticket t is at t % depth */
    int32_t depth;
    int64_t head, tail;            /* tickets: the next to be given, the oldest in flight */
    lf__stamp mark[2][LF_N_PARTS]; /* begins, ends */
    int32_t captured;              /* atomic; 1: a graph has a stamp, the meter stays */
} lf__follow;

struct lf_clock {
    lf__mutex *lock;
    lf__part_times sum;  /* of all complete steps */
    lf__part_times last; /* of the newest; steps 0 once it has been told */
    lf__host_times now;  /* of the open step, or what was added for the next one */
    lf__hist hist;       /* of steps */
    lf__fault fault;     /* a lost step, not yet told */
    int64_t begin_ns, part_ns;
    int64_t n_ended, lost;
    int32_t part;        /* that is open, -1: none */
    bool in_step, begun; /* begun: a step, ever */
    lf__follow *follow;  /* NULL: host time */
};

/** Count a complete step. The caller holds the lock. */
void lf__clock_count(lf_clock *clock, const lf__part_times *step, int64_t wall_ns);

/** Release; waits for the stream. NULL and half-made ones are allowed. */
void lf__follow_close(lf__follow *follow);
/** Stamp the begin of a step and give it a place in the ring; LF_AGAIN when that is full. */
lf_status lf__follow_begin(lf_clock *clock);
/** Stamp the end of the open step. */
lf_status lf__follow_end(lf_clock *clock, int64_t tokens);
/** Stamp the begin (0) or end (1) of a part on a stream. */
lf_status lf__follow_mark(lf__follow *follow, int32_t end, int32_t part, lf_stream *stream);
/** The open step, or the last one, ends at its own end; its figures are dropped with `cancel`. The caller holds the lock. */
void lf__follow_cut(lf__follow *follow, bool cancel);
/** Count the steps that are complete; does not wait. The caller holds the lock. */
lf_status lf__follow_collect(lf_clock *clock);
/** Wait for the oldest step of two or more, or for the newest that was ended. The caller does not hold the lock. */
lf_status lf__follow_wait_oldest(lf_clock *clock);
lf_status lf__follow_wait_ended(lf_clock *clock);
/** The oldest step in flight if it is done, ended at its own end. The caller holds the lock and has collected. */
bool lf__follow_pending(const lf_clock *clock, lf__part_times *out, int64_t *wall_ns);

/** Figures of a step from its page and what the host knows; until_ns: the begin of the next step, or its own end. */
void lf__follow_figures(const lf__meter_page *page, int64_t until_ns, const lf__host_times *host, lf__part_times *out);

/** Queue a stamp, which stays the caller's and valid until the work is done. `kernels` NULL: the CPU. */
lf_status lf__stamp_queue(lf__follow *follow, const lf__stamp *stamp, lf_stream *stream);

#endif
