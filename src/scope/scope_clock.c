/* SPDX-License-Identifier: Apache-2.0 */
/* The step clock. One lock guards everything; it is taken a few times a step. */
#include <math.h>

#include "base/base.h"
#include "loongforge/scope.h"

/* Times of one step, or their sums over steps. */
typedef struct part_times {
    double wall_s, busy_s[LF_N_PARTS], exposed_s[LF_N_PARTS];
    int64_t steps, tokens;
} part_times;

struct lf_clock {
    lf__mutex *lock;
    part_times now, sum; /* the open step or what was added for the next one; all ended steps */
    lf__hist hist;       /* of steps */
    int64_t begin_ns, part_ns;
    int32_t part; /* that is open, -1: none */
    bool in_step;
};

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
    lf__mutex_close(clock->lock);
    lf__free(clock);
}

lf_status lf_clock_step_begin(lf_clock *clock)
{
    LF_CHECK_ARG(clock, "clock is NULL");
    lf__lock(clock->lock);
    bool was_open = clock->in_step;
    if (!was_open) {
        clock->in_step = true;
        clock->begin_ns = lf__now_ns();
    }
    lf__unlock(clock->lock);
    if (was_open) return LF_FAIL(LF_ERR_STATE, "a step is open already; hint: end or cancel it before the next begins");
    return LF_OK;
}

void lf_clock_step_cancel(lf_clock *clock)
{
    if (!clock) return;
    lf__lock(clock->lock);
    if (clock->in_step) {
        clock->in_step = false;
        clock->part = -1;
        clock->now = (part_times){0};
    }
    lf__unlock(clock->lock);
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
    if (in_step && open < 0) {
        clock->part = part;
        clock->part_ns = lf__now_ns();
    }
    lf__unlock(clock->lock);
    if (!in_step) return LF_FAIL(LF_ERR_STATE, "part %s begins outside a step", lf_part_name(part));
    if (open >= 0)
        return LF_FAIL(LF_ERR_STATE, "part %s begins inside part %s; parts do not nest", lf_part_name(part), lf_part_name(open));
    return LF_OK;
}

lf_status lf_clock_part_end(lf_clock *clock, int32_t part)
{
    lf_status rc = check_part(clock, part);
    if (rc < 0) return rc;
    lf__lock(clock->lock);
    int32_t open = clock->part;
    if (open == part) {
        double s = (double)(lf__now_ns() - clock->part_ns) * 1e-9;
        clock->now.busy_s[part] += s;
        clock->now.exposed_s[part] += s;
        clock->part = -1;
    }
    lf__unlock(clock->lock);
    if (open != part)
        return LF_FAIL(LF_ERR_STATE, "part %s ends, open is %s", lf_part_name(part), open < 0 ? "none" : lf_part_name(open));
    return LF_OK;
}

/* ---- figures */

static int32_t find_bottleneck(const part_times *t)
{
    int32_t most = LF_PART_COMPUTE;
    for (int32_t i = 0; i < LF_N_PARTS; i++)
        if (t->exposed_s[i] > t->exposed_s[most]) most = i;
    return most;
}

static void fill_summary(lf_clock_summary *out, const part_times *t)
{
    double busiest = 0;
    *out = (lf_clock_summary){.size = sizeof *out, .steps = t->steps, .tokens = t->tokens, .wall_s = t->wall_s};
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

/* Close the open step; the caller holds the lock and has checked the state. */
static void end_step(lf_clock *clock, int64_t tokens, lf_clock_summary *last)
{
    part_times *now = &clock->now, *sum = &clock->sum;
    int64_t ns = lf__now_ns() - clock->begin_ns;
    double given = 0;
    now->wall_s = (double)ns * 1e-9;
    now->steps = 1;
    now->tokens = tokens;
    for (int32_t i = 0; i < LF_N_PARTS; i++) given += now->exposed_s[i];
    if (now->wall_s > given) {
        now->busy_s[LF_PART_COMPUTE] += now->wall_s - given;
        now->exposed_s[LF_PART_COMPUTE] += now->wall_s - given;
    }
    lf__hist_add(&clock->hist, ns);
    sum->wall_s += now->wall_s;
    sum->steps++;
    sum->tokens += tokens;
    for (int32_t i = 0; i < LF_N_PARTS; i++) {
        sum->busy_s[i] += now->busy_s[i];
        sum->exposed_s[i] += now->exposed_s[i];
    }
    if (last) {
        fill_summary(last, now);
        last->step_p50_s = last->step_p95_s = last->step_p99_s = last->step_max_s = now->wall_s;
    }
    *now = (part_times){0};
    clock->in_step = false;
}

lf_status lf_clock_step_end(lf_clock *clock, int64_t tokens, lf_clock_summary *last)
{
    LF_CHECK_ARG(clock, "clock is NULL");
    LF_CHECK_ARG(tokens >= 0, "tokens is %lld, expected 0 or more", (long long)tokens);
    LF_CHECK_ARG(!last || last->size == sizeof *last, "clock summary: size is %zu, expected %zu", last->size, sizeof *last);
    lf__lock(clock->lock);
    int32_t open = clock->part;
    bool in_step = clock->in_step;
    if (in_step && open < 0) end_step(clock, tokens, last);
    lf__unlock(clock->lock);
    if (!in_step) return LF_FAIL(LF_ERR_STATE, "a step ends that was not begun");
    if (open >= 0) return LF_FAIL(LF_ERR_STATE, "the step ends while part %s is open", lf_part_name(open));
    return LF_OK;
}

lf_status lf_clock_get(const lf_clock *clock, lf_clock_summary *summary)
{
    LF_CHECK_ARG(clock && summary, "clock or summary is NULL");
    LF_CHECK_ARG(summary->size == sizeof *summary, "clock summary: size is %zu, expected %zu", summary->size, sizeof *summary);
    lf__lock(clock->lock);
    fill_summary(summary, &clock->sum);
    summary->step_p50_s = lf__hist_percentile(&clock->hist, 50);
    summary->step_p95_s = lf__hist_percentile(&clock->hist, 95);
    summary->step_p99_s = lf__hist_percentile(&clock->hist, 99);
    summary->step_max_s = (double)clock->hist.max_ns * 1e-9;
    lf__unlock(clock->lock);
    return LF_OK;
}
