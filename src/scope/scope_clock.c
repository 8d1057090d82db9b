/* SPDX-License-Identifier: Apache-2.0 */
/* The step clock: order of calls, host time, figures. One lock guards everything; it is taken a few times a step, and not held
 * while a device is given work. Only the trainer's thread changes whether a step or a part is open. */
#include <math.h>

#include "scope_int.h"

const char *lf_part_name(int32_t part)
{
    static const char *const names[] = {"compute", "data", "communication", "io", "optimizer"};
    return part >= 0 && part < LF_N_PARTS ? names[part] : "?";
}

lf_status lf_clock_open(lf_clock **out)
{
    LF_CHECK_ARG(out, "out is NULL");
    *out = NULL;
    lf_clock *clock = lf__alloc(sizeof *clock);
    if (!clock) return LF_FAIL(LF_ERR_NOMEM, "step clock");
    clock->part = -1;
    clock->sum.step = -1;
    clock->lock = lf__mutex_open();
    if (!clock->lock) {
        lf_clock_close(clock);
        return LF_FAIL(LF_ERR_NOMEM, "step clock");
    }
    *out = clock;
    return LF_OK;
}

void lf_clock_close(lf_clock *clock)
{
    if (!clock) return;
    lf__follow_close(clock->follow);
    lf__mutex_close(clock->lock);
    lf__free(clock);
}

lf_status lf_clock_step_begin(lf_clock *clock)
{
    LF_CHECK_ARG(clock, "clock is NULL");
    lf__lock(clock->lock);
    bool was_open = clock->in_step;
    clock->begun = true;
    lf__unlock(clock->lock);
    if (was_open) return LF_FAIL(LF_ERR_STATE, "a step is open already; hint: end or cancel it before the next begins");
    lf_status rc = clock->follow ? lf__follow_begin(clock) : LF_OK;
    if (rc != LF_OK) return rc;
    lf__lock(clock->lock);
    clock->in_step = true;
    clock->begin_ns = lf__now_ns();
    lf__unlock(clock->lock);
    return LF_OK;
}

lf_status lf_clock_wait(lf_clock *clock)
{
    LF_CHECK_ARG(clock, "clock is NULL");
    return clock->follow ? lf__follow_wait_oldest(clock) : LF_OK;
}

void lf_clock_step_cancel(lf_clock *clock)
{
    if (!clock) return;
    lf__lock(clock->lock);
    if (clock->in_step) {
        clock->in_step = false;
        clock->part = -1;
        clock->now = (lf__host_times){0};
        if (clock->follow) lf__follow_cut(clock->follow, true);
    }
    lf__unlock(clock->lock);
}

lf_status lf_clock_pause(lf_clock *clock)
{
    LF_CHECK_ARG(clock, "clock is NULL");
    lf__lock(clock->lock);
    bool in_step = clock->in_step;
    if (!in_step && clock->follow) lf__follow_cut(clock->follow, false);
    lf__unlock(clock->lock);
    return in_step ? LF_FAIL(LF_ERR_STATE, "a pause inside a step; hint: end or cancel it first") : LF_OK;
}

static lf_status check_part(const lf_clock *clock, int32_t part)
{
    LF_CHECK_ARG(clock, "clock is NULL");
    LF_CHECK_ARG(part >= 0 && part < LF_N_PARTS, "part is %d, expected 0 to %d", part, LF_N_PARTS - 1);
    return LF_OK;
}

lf_status lf_clock_add(lf_clock *clock, int32_t part, double busy_s, double exposed_s)
{
    lf_status rc = check_part(clock, part);
    if (rc < 0) return rc;
    LF_CHECK_ARG(busy_s >= 0 && isfinite(busy_s) && exposed_s >= 0 && isfinite(exposed_s),
                 "%s: busy is %g s, exposed %g s, expected 0 or more", lf_part_name(part), busy_s, exposed_s);
    lf__lock(clock->lock);
    clock->now.busy_s[part] += busy_s;
    clock->now.exposed_s[part] += exposed_s;
    lf__unlock(clock->lock);
    return LF_OK;
}

lf_status lf_clock_part_begin(lf_clock *clock, int32_t part)
{
    lf_status rc = check_part(clock, part);
    if (rc < 0) return rc;
    lf__lock(clock->lock);
    int32_t open = clock->part;
    bool in_step = clock->in_step;
    lf__unlock(clock->lock);
    if (!in_step) return LF_FAIL(LF_ERR_STATE, "part %s begins outside a step", lf_part_name(part));
    if (open >= 0)
        return LF_FAIL(LF_ERR_STATE, "part %s begins inside part %s; parts do not nest", lf_part_name(part), lf_part_name(open));
    if (clock->follow) rc = lf__follow_mark(clock->follow, 0, part, clock->follow->stream);
    if (rc < 0) return rc;
    lf__lock(clock->lock);
    clock->part = part;
    clock->part_ns = lf__now_ns();
    lf__unlock(clock->lock);
    return LF_OK;
}

lf_status lf_clock_part_end(lf_clock *clock, int32_t part)
{
    lf_status rc = check_part(clock, part);
    if (rc < 0) return rc;
    lf__lock(clock->lock);
    int32_t open = clock->part;
    double trainer_s = (double)(lf__now_ns() - clock->part_ns) * 1e-9;
    lf__unlock(clock->lock);
    if (open != part)
        return LF_FAIL(LF_ERR_STATE, "part %s ends, open is %s", lf_part_name(part), open < 0 ? "none" : lf_part_name(open));
    if (clock->follow) rc = lf__follow_mark(clock->follow, 1, part, clock->follow->stream);
    if (rc < 0) return rc;
    lf__lock(clock->lock);
    clock->now.trainer_s[part] += trainer_s;
    clock->part = -1;
    lf__unlock(clock->lock);
    return LF_OK;
}

static lf_status mark(lf_clock *clock, int32_t end, int32_t part, lf_stream *stream)
{
    lf_status rc = check_part(clock, part);
    if (rc < 0) return rc;
    if (!clock->follow) {
        if (part == LF_PART_COMPUTE) return LF_OK; /* what is left of the step is compute anyway */
        return end ? lf_clock_part_end(clock, part) : lf_clock_part_begin(clock, part);
    }
    LF_CHECK_ARG(stream, "mark of %s: stream is NULL, expected the one that its work is queued on", lf_part_name(part));
    return lf__follow_mark(clock->follow, end, part, stream);
}

lf_status lf_clock_mark_begin(lf_clock *clock, int32_t part, lf_stream *stream) { return mark(clock, 0, part, stream); }
lf_status lf_clock_mark_end(lf_clock *clock, int32_t part, lf_stream *stream) { return mark(clock, 1, part, stream); }

/* ---- figures -------------------------------------------------------------------------------------------------------- */

static int32_t find_bottleneck(const lf__part_times *t)
{
    int32_t most = LF_PART_COMPUTE;
    for (int32_t i = 0; i < LF_N_PARTS; i++)
        if (t->exposed_s[i] > t->exposed_s[most]) most = i;
    return most;
}

static void fill_summary(lf_clock_summary *out, const lf__part_times *t)
{
    double busiest = 0;
    *out = (lf_clock_summary){.size = sizeof *out,
                              .steps = t->steps,
                              .tokens = t->tokens,
                              .step = t->steps > 0 ? t->step : -1,
                              .wall_s = t->wall_s,
                              .gap_s = t->gap_s};
    for (int32_t i = 0; i < LF_N_PARTS; i++) {
        out->busy_s[i] = t->busy_s[i];
        out->exposed_s[i] = t->exposed_s[i];
        if (t->busy_s[i] > busiest) busiest = t->busy_s[i];
    }
    if (t->wall_s > 0) {
        out->overlap_efficiency = busiest / t->wall_s;
        out->tokens_per_s = (double)t->tokens / t->wall_s;
    }
    out->bottleneck = find_bottleneck(t);
}

static void fill_one(lf_clock_summary *out, const lf__part_times *step)
{
    fill_summary(out, step);
    out->step_p50_s = out->step_p95_s = out->step_p99_s = out->step_max_s = step->wall_s;
}

static void add_times(lf__part_times *sum, const lf__part_times *step)
{
    sum->wall_s += step->wall_s;
    sum->gap_s += step->gap_s;
    sum->steps++;
    sum->tokens += step->tokens;
    sum->step = step->step;
    for (int32_t i = 0; i < LF_N_PARTS; i++) {
        sum->busy_s[i] += step->busy_s[i];
        sum->exposed_s[i] += step->exposed_s[i];
    }
}

void lf__clock_count(lf_clock *clock, const lf__part_times *step, int64_t wall_ns)
{
    lf__hist_add(&clock->hist, wall_ns);
    add_times(&clock->sum, step);
    clock->last = *step;
}

/* Close the open step in host time; the caller holds the lock and has checked the state. */
static void end_host_step(lf_clock *clock, int64_t tokens)
{
    const lf__host_times *now = &clock->now;
    const int64_t ns = lf__now_ns() - clock->begin_ns;
    lf__part_times step = {.wall_s = (double)ns * 1e-9, .steps = 1, .tokens = tokens, .step = clock->n_ended++};
    double given = 0;
    for (int32_t i = 0; i < LF_N_PARTS; i++) {
        step.busy_s[i] = now->busy_s[i] + now->trainer_s[i];
        step.exposed_s[i] = now->exposed_s[i] + now->trainer_s[i];
        given += step.exposed_s[i];
    }
    if (step.wall_s > given) {
        step.busy_s[LF_PART_COMPUTE] += step.wall_s - given;
        step.exposed_s[LF_PART_COMPUTE] += step.wall_s - given;
    }
    lf__clock_count(clock, &step, ns);
    clock->now = (lf__host_times){0};
    clock->in_step = false;
}

/* The newest complete step that has not been told, or a lost one's error. The caller holds the lock. */
static lf_status tell_last(lf_clock *clock, lf_clock_summary *last)
{
    lf_status rc = clock->fault.status;
    if (rc < 0) {
        rc = lf__fault_raise(&clock->fault);
        clock->fault = (lf__fault){0};
        return rc;
    }
    rc = clock->last.steps > 0 ? LF_OK : LF_AGAIN;
    if (last) fill_one(last, &clock->last);
    clock->last = (lf__part_times){0};
    return rc;
}

lf_status lf_clock_step_end(lf_clock *clock, int64_t tokens, lf_clock_summary *last)
{
    LF_CHECK_ARG(clock, "clock is NULL");
    LF_CHECK_ARG(tokens >= 0, "tokens is %lld, expected 0 or more", (long long)tokens);
    LF_CHECK_ARG(!last || last->size == sizeof *last, "clock summary: size is %zu, expected %zu", last->size, sizeof *last);
    lf__lock(clock->lock);
    int32_t open = clock->part;
    bool in_step = clock->in_step;
    lf__unlock(clock->lock);
    if (!in_step) return LF_FAIL(LF_ERR_STATE, "a step ends that was not begun");
    if (open >= 0) return LF_FAIL(LF_ERR_STATE, "the step ends while part %s is open", lf_part_name(open));
    lf_status rc = clock->follow ? lf__follow_end(clock, tokens) : LF_OK;
    if (rc < 0) return rc;
    lf__lock(clock->lock);
    if (clock->follow) rc = lf__follow_collect(clock);
    else end_host_step(clock, tokens);
    if (rc == LF_OK) rc = tell_last(clock, last);
    lf__unlock(clock->lock);
    return rc;
}

lf_status lf_clock_get(lf_clock *clock, lf_clock_summary *summary)
{
    LF_CHECK_ARG(clock && summary, "clock or summary is NULL");
    LF_CHECK_ARG(summary->size == sizeof *summary, "clock summary: size is %zu, expected %zu", summary->size, sizeof *summary);
    lf_status rc = clock->follow ? lf__follow_wait_ended(clock) : LF_OK;
    if (rc < 0) return rc;
    lf__lock(clock->lock);
    if (clock->follow) rc = lf__follow_collect(clock);
    lf__part_times sum = clock->sum, newest;
    lf__hist hist = clock->hist;
    int64_t wall_ns;
    if (rc == LF_OK && clock->follow && lf__follow_pending(clock, &newest, &wall_ns)) {
        add_times(&sum, &newest);
        lf__hist_add(&hist, wall_ns);
    }
    fill_summary(summary, &sum);
    summary->lost = clock->lost;
    lf__unlock(clock->lock);
    summary->step_p50_s = lf__hist_percentile(&hist, 50);
    summary->step_p95_s = lf__hist_percentile(&hist, 95);
    summary->step_p99_s = lf__hist_percentile(&hist, 99);
    summary->step_max_s = (double)hist.max_ns * 1e-9;
    return rc;
}
