/* SPDX-License-Identifier: Apache-2.0 */
/** @file scope.h  Scope: the step clock and the options of a run.
 *
 *  A step has five parts: compute, data, communication, input/output, optimizer. Each crew adds *busy* time (whether hidden or
 *  not) and the trainer adds *exposed* time (when the step waited for that part); what nobody was waited for is compute, so the
 *  exposed parts add up to the step. Overlap efficiency is max(busy) / wall; the bottleneck is the part with the largest exposed
 *  time. */
#ifndef LOONGFORGE_SCOPE_H
#define LOONGFORGE_SCOPE_H

#include "loongforge/options.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct lf_clock lf_clock;

enum { LF_PART_COMPUTE = 0, LF_PART_DATA = 1, LF_PART_COMM = 2, LF_PART_IO = 3, LF_PART_OPTIMIZER = 4, LF_N_PARTS = 5 };
/** "compute", "data", "communication", "io", "optimizer"; "?" otherwise. Static. */
LF_API const char *lf_part_name(int32_t part);

/** Figures over steps; seconds. Indexed by LF_PART_*. */
typedef struct lf_clock_summary {
    size_t size;               /* set by the caller to sizeof */
    int64_t steps, tokens;     /* tokens: effective ones, as given to lf_clock_step_end */
    double wall_s;             /* sum over steps, from begin to end; time between steps is not in it */
    double busy_s[LF_N_PARTS]; /* sums */
    double exposed_s[LF_N_PARTS];
    double step_p50_s, step_p95_s, step_p99_s, step_max_s; /* percentiles within 3.2 %; of one step: its time */
    double overlap_efficiency;                             /* of the sums: max(busy) / wall; 0 without steps */
    double tokens_per_s;
    int32_t bottleneck; /* LF_PART_* */
} lf_clock_summary;

/** @param[out] out NULL on error; release with lf_clock_close (NULL is allowed).  @return LF_OK; LF_ERR_NOMEM. */
LF_API lf_status lf_clock_open(lf_clock **out);
LF_API void lf_clock_close(lf_clock *clock);

/** Steps, and parts by begin and end, belong to one thread, the trainer's; lf_clock_add and lf_clock_get to any.
 *  @return LF_OK; LF_ERR_STATE (the last step was not ended). */
LF_API lf_status lf_clock_step_begin(lf_clock *clock);
/** Give up a step that was begun: its time and what was added to it are dropped. No step open: nothing happens. */
LF_API void lf_clock_step_cancel(lf_clock *clock);
/** Add time to a part of the current step: `exposed` seconds the step waited, `busy` seconds the part worked. Time added
 *  between two steps (by a writer, say) counts for the next one.
 *  @return LF_OK; LF_ERR_INVALID (no such part, negative or not a number). Threads: any. */
LF_API lf_status lf_clock_add(lf_clock *clock, int32_t part, double busy_s, double exposed_s);
/** Time between a begin and an end on the trainer's thread, added as both busy and exposed. Parts do not nest.
 *  @return LF_OK; LF_ERR_INVALID (no such part); LF_ERR_STATE (no step, another part is open, or this one is not). */
LF_API lf_status lf_clock_part_begin(lf_clock *clock, int32_t part);
LF_API lf_status lf_clock_part_end(lf_clock *clock, int32_t part);
/** End the step; time not given to any part counts as compute.
 *  @param tokens trained on in this step.  @param last figures of this step alone, may be NULL.
 *  @return LF_OK; LF_ERR_STATE (no step, or a part still open: named); LF_ERR_INVALID (negative tokens, size not set). */
LF_API lf_status lf_clock_step_end(lf_clock *clock, int64_t tokens, lf_clock_summary *last);
/** Figures of all steps that were ended.  @return LF_OK; LF_ERR_INVALID (size not set). Threads: any. */
LF_API lf_status lf_clock_get(const lf_clock *clock, lf_clock_summary *summary);

/** Options of a training run, section "train". The Python package reads them by the same rows. */
typedef struct lf_train_options {
    size_t size;
    char preset[LF_TEXT_MAX];
    char data[LF_TEXT_MAX], val_data[LF_TEXT_MAX];
    char name[LF_TEXT_MAX]; /* of the run: files go to runs/<name> */
    char runs_dir[LF_TEXT_MAX];
    char device[LF_TEXT_MAX];
    char attention[LF_TEXT_MAX]; /* dsa | dense */
    char dtype[LF_TEXT_MAX];     /* of weights: auto | f32 | bf16 */
    int64_t steps;
    int32_t batch_size; /* global, over all ranks and micro steps */
    int32_t micro_steps;
    int32_t capture; /* 1: whole-step CUDA graph */
    int32_t threads; /* compute threads; 0: one a core */
    double lr, min_lr_ratio, weight_decay, beta1, beta2, eps, clip;
    int64_t warmup_steps;
    int64_t seed;
    int64_t eval_every, log_every;
    int32_t resume; /* 1: go on from the newest checkpoint of the run */
    int32_t eval;   /* 1: evaluate at the end: blanked images, attribute words */
} lf_train_options;

#ifdef __cplusplus
}
#endif
#endif
