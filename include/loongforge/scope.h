/* SPDX-License-Identifier: Apache-2.0 */
/** @file scope.h  Scope: the step clock and the options of a run.
 *
 *  A step has five parts: compute, data, communication, input/output, optimizer. Each crew adds *busy* time (whether hidden or
 *  not) and the trainer adds *exposed* time (when the step waited for that part); what nobody was waited for is compute, so the
 *  exposed parts add up to the step. Overlap efficiency is max(busy) / wall; the bottleneck is the part with the largest exposed
 *  time.
 *
 *  A clock measures the trainer's thread, or, after lf_clock_follow, a device: steps are then queued and their figures come
 *  late, without a wait. The same calls serve both. */
#ifndef LOONGFORGE_SCOPE_H
#define LOONGFORGE_SCOPE_H

#include "loongforge/device.h"
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
    size_t size;           /* set by the caller to sizeof */
    int64_t steps, tokens; /* tokens: effective ones, as given to lf_clock_step_end */
    int64_t step;          /* the newest step in these figures, by ends from 0; -1 without one */
    int64_t lost;          /* of a device: steps without figures (lf_clock_mark_begin); they are in no other figure */
    double wall_s;         /* sum; host: from begin to end, without the time between steps; device: from begin to next begin */
    double gap_s;          /* device: of wall_s, from the end of a step to the begin of the next */
    double busy_s[LF_N_PARTS]; /* sums */
    double exposed_s[LF_N_PARTS];
    double step_p50_s, step_p95_s, step_p99_s, step_max_s; /* percentiles within 3.2 %; of one step: its time */
    double overlap_efficiency;                             /* of the sums: max(busy) / wall; 0 without steps */
    double tokens_per_s;
    int32_t bottleneck; /* LF_PART_* */
} lf_clock_summary;

/** @param[out] out NULL on error; release with lf_clock_close (NULL is allowed).  @return LF_OK; LF_ERR_NOMEM. */
LF_API lf_status lf_clock_open(lf_clock **out);
/** Waits for what the clock has queued on the stream it follows. Marks on other streams must be done before. */
LF_API void lf_clock_close(lf_clock *clock);

enum { LF_CLOCK_DEPTH = 16, LF_CLOCK_DEPTH_MOST = 1024 };
/** Measure a device from now on. Call it before the first step and not during a capture: it allocates.
 *  @param device NULL, or the CPU with a NULL stream: host time, as without this call.
 *  @param stream that steps run on; it must outlive the clock. What it does between begin and end of a step is the step.
 *  @param depth steps that may be begun and not yet complete on the device: 2 to LF_CLOCK_DEPTH_MOST, 0: LF_CLOCK_DEPTH.
 *  @return LF_OK; LF_ERR_INVALID (depth, or no stream for a device that is not the CPU); LF_ERR_STATE (a step was begun, or it
 *  follows a device already); LF_ERR_UNSUPPORTED (the device has no such kernels); LF_ERR_NOMEM; LF_ERR_DEVICE. */
LF_API lf_status lf_clock_follow(lf_clock *clock, lf_device *device, lf_stream *stream, int32_t depth);
/** The device that the clock follows; NULL: host time. Borrowed. */
LF_API lf_device *lf_clock_device(const lf_clock *clock);

/** Steps, and parts by begin and end, belong to one thread, the trainer's; lf_clock_add and lf_clock_get to any. With a device
 *  they queue work on its stream, which must not be under capture.
 *  @return LF_OK; LF_AGAIN (a device with `depth` steps in flight: nothing was begun and nothing waited for; lf_clock_wait
 *  makes room); LF_ERR_STATE (the last step was not ended, or the stream is captured); LF_ERR_DEVICE. */
LF_API lf_status lf_clock_step_begin(lf_clock *clock);
/** Wait until the oldest of two or more steps in flight is complete; else, and in host time, nothing happens.
 *  @return LF_OK; LF_ERR_DEVICE. */
LF_API lf_status lf_clock_wait(lf_clock *clock);
/** Give up a step that was begun: its time and what was added to it are dropped. No step open: nothing happens. */
LF_API void lf_clock_step_cancel(lf_clock *clock);
/** The next step does not follow on the last one (an evaluation lies between): a device's last step ends at its own end.
 *  @return LF_OK; LF_ERR_STATE (a step is open). */
LF_API lf_status lf_clock_pause(lf_clock *clock);
/** Add time to a part of the current step: `exposed` seconds the step waited, `busy` seconds the part worked. Time added
 *  between two steps (by a writer, say) counts for the next one. Of a device's step at most the time it was idle is exposed.
 *  @return LF_OK; LF_ERR_INVALID (no such part, negative or not a number). Threads: any. */
LF_API lf_status lf_clock_add(lf_clock *clock, int32_t part, double busy_s, double exposed_s);
/** Time between a begin and an end on the trainer's thread, added as both busy and exposed. With a device exposed is the time
 *  between the two calls as the stream reaches them: what it waited, and what was queued between them. Parts do not nest.
 *  @return LF_OK; LF_ERR_INVALID (no such part); LF_ERR_STATE (no step, another part is open, or this one is not);
 *  LF_ERR_DEVICE. */
LF_API lf_status lf_clock_part_begin(lf_clock *clock, int32_t part);
LF_API lf_status lf_clock_part_end(lf_clock *clock, int32_t part);
/** Mark work of a part: what is queued on `stream` between the two calls, in the device's time. Marks may lie in one another and
 *  in parts, up to 8 deep, ended in the reverse order: time belongs to the innermost. They may be captured in a CUDA graph and
 *  count for every step in which it is replayed; between steps, and in replays after lf_clock_close, they count for nothing. A
 *  step whose marks are out of order is lost: a later lf_clock_step_end says which.
 *  In host time: as lf_clock_part_begin and _end; a mark of compute is nothing.
 *  @param stream the one that the clock follows, or one that is ordered with it within the step; not NULL with a device.
 *  @return LF_OK; LF_ERR_INVALID (no such part, no stream); LF_ERR_DEVICE; in host time also LF_ERR_STATE. Threads: any, one at
 *  a time. */
LF_API lf_status lf_clock_mark_begin(lf_clock *clock, int32_t part, lf_stream *stream);
LF_API lf_status lf_clock_mark_end(lf_clock *clock, int32_t part, lf_stream *stream);
/** End the step; time not given to any part counts as compute.
 *  @param tokens trained on in this step.
 *  @param last host time: figures of this step alone. Device: of the newest step that became complete since the last call, which
 *  last->step names. May be NULL.
 *  @return LF_OK; LF_AGAIN (a device: no step became complete, `last` has steps 0; the step is ended); LF_ERR_STATE (no step, or
 *  a part still open: named; or the step is ended and an earlier one is found to be lost); LF_ERR_INVALID (negative tokens,
 *  size not set); LF_ERR_DEVICE. */
LF_API lf_status lf_clock_step_end(lf_clock *clock, int64_t tokens, lf_clock_summary *last);
/** Figures of all steps that were ended. With a device it waits for them.
 *  @return LF_OK; LF_ERR_INVALID (size not set); LF_ERR_DEVICE. Threads: any. */
LF_API lf_status lf_clock_get(lf_clock *clock, lf_clock_summary *summary);

typedef struct lf_monitor lf_monitor;
enum { LF_MONITOR_MS = 50, LF_MONITOR_KEPT = 1200 }; /* how often by default; samples that are kept: a minute of them */
/** What a GPU reports of itself at one moment. -1: this GPU or driver does not tell. */
typedef struct lf_monitor_sample {
    size_t size;
    int64_t t_ns;              /* the library's monotonic clock */
    double sm_pct, memory_pct; /* of the driver's last sampling period: time in which a kernel ran, in which memory was busy */
    double memory_used_bytes;  /* of all processes */
    double sm_mhz, memory_mhz, power_w;
    double pcie_tx_bytes_s, pcie_rx_bytes_s;
    double nvlink_tx_bytes_s, nvlink_rx_bytes_s; /* since the sample before, all links */
} lf_monitor_sample;
/** Over all samples since the monitor was opened. */
typedef struct lf_monitor_summary {
    size_t size;
    int64_t samples, missed;      /* missed: intervals that passed while the driver had not answered */
    lf_monitor_sample mean, most; /* -1: never told; their t_ns: of the first and of the last sample */
} lf_monitor_summary;

/** Sample a GPU's utilisation, memory, clocks and links on a thread of its own, through NVML, found at run time. It asks the driver, never
 *  the device's streams; one sample takes the driver some 20 ms where it measures PCIe traffic.
 *  @param gpu "GPU-…": a UUID, which is the same whatever a process sees of the machine; or NVML's index, "0".
 *  @param interval_ms 1 to 60000; 0: LF_MONITOR_MS.  @param library path of libnvidia-ml; NULL: the loader's.
 *  @return LF_OK; LF_ERR_INVALID; LF_ERR_UNSUPPORTED (no NVML); LF_ERR_NOTFOUND (no such GPU); LF_ERR_DEVICE (NVML's words);
 *  LF_ERR_NOMEM; LF_ERR_IO (no thread). On error *out is NULL. */
LF_API lf_status lf_monitor_open(lf_monitor **out, const char *gpu, int32_t interval_ms, const char *library);
/** Ends the thread after the sample it is taking. NULL is allowed. */
LF_API void lf_monitor_close(lf_monitor *monitor);
/** The newest sample but `back`.  @return LF_OK; LF_END (so many are not kept, or not there yet); LF_ERR_INVALID. Threads: any. */
LF_API lf_status lf_monitor_latest(const lf_monitor *monitor, int32_t back, lf_monitor_sample *sample);
/** @return LF_OK, also without a sample yet; LF_ERR_INVALID. Threads: any. */
LF_API lf_status lf_monitor_get(const lf_monitor *monitor, lf_monitor_summary *summary);

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
