/* SPDX-License-Identifier: Apache-2.0 */
/* From the lifetime table to a problem of blocks and back; figures of a plan. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sculptor_int.h"

/* Pairs compared in a second by an ordinary core: turns the time limit into a budget of work. */
#define PAIRS_PER_SECOND 6e8
/* The search is cut off when a slow machine needs this many times the limit and a second. */
#define SLOWEST 4.0
#define SLOWEST_S 1.0

const char *lf_class_name(int32_t klass)
{
    static const char *const names[] = {"static", "short", "medium", "long", "transient"};
    return klass >= 0 && klass < LF_N_CLASSES ? names[klass] : "?";
}

static int32_t class_of(const lf__row *row, const lf_plan_options *o)
{
    if (row->role == LF_TENSOR_WEIGHT) return LF_CLASS_STATIC;
    if (row->role == LF_TENSOR_OPTIMIZER) return LF_CLASS_TRANSIENT;
    uint64_t life = (uint64_t)row->last - (uint64_t)row->first;
    return life < (uint64_t)o->short_ops ? LF_CLASS_SHORT : life <= (uint64_t)o->long_ops ? LF_CLASS_MEDIUM : LF_CLASS_LONG;
}

/* ---- times and sums */

static int compare_times(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? -1 : x > y;
}

/* The distinct times at which rows with bytes begin or end, ascending; (2n) room. */
static int64_t collect_times(const lf_trace *trace, int64_t *times)
{
    int64_t n = 0, distinct = 0;
    for (int64_t i = 0; i < trace->n; i++) {
        if (trace->rows[i].bytes == 0) continue;
        times[n++] = trace->rows[i].first;
        times[n++] = trace->rows[i].last;
    }
    if (n) qsort(times, (size_t)n, sizeof times[0], compare_times);
    for (int64_t i = 0; i < n; i++)
        if (i == 0 || times[i] != times[distinct - 1]) times[distinct++] = times[i];
    return distinct;
}

static int32_t rank_of(const int64_t *times, int64_t n, int64_t time)
{
    const int64_t *at = bsearch(&time, times, (size_t)n, sizeof times[0], compare_times);
    return (int32_t)(at - times);
}

typedef struct rank_pair {
    int32_t first, last;
} rank_pair;

/* What is live when. `live` are sums over rows of the bytes that begin minus those that end at a rank, then summed up. */
typedef struct live_sums {
    int64_t *times;
    rank_pair *rank; /* (trace->n); rows without bytes: {0, 0} */
    int64_t *live;   /* (n_times) */
    int64_t n_times, common_align;
} live_sums;

static void sums_free(live_sums *s)
{
    lf__free(s->times);
    lf__free(s->rank);
    lf__free(s->live);
}

static int64_t common_divisor(int64_t a, int64_t b)
{
    while (b) {
        int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

static int64_t align_of(const lf__row *row, const lf_plan_options *o) { return row->align ? row->align : o->align_bytes; }

static lf_status sums_open(live_sums *s, const lf_trace *trace, const lf_plan_options *o)
{
    *s = (live_sums){.times = lf__alloc_array((size_t)trace->n * 2, sizeof *s->times),
                     .rank = lf__alloc_array((size_t)trace->n, sizeof *s->rank)};
    if (!s->times || !s->rank) return LF_FAIL(LF_ERR_NOMEM, "plan of %lld tensors", (long long)trace->n);
    s->n_times = collect_times(trace, s->times);
    s->live = lf__alloc_array((size_t)s->n_times, sizeof *s->live);
    if (!s->live) return LF_FAIL(LF_ERR_NOMEM, "plan of %lld tensors", (long long)trace->n);
    for (int64_t i = 0; i < trace->n; i++) {
        const lf__row *row = &trace->rows[i];
        if (row->bytes == 0) continue;
        s->rank[i] = (rank_pair){rank_of(s->times, s->n_times, row->first), rank_of(s->times, s->n_times, row->last)};
        s->common_align = common_divisor(align_of(row, o), s->common_align);
    }
    return LF_OK;
}

/* Largest sum of live bytes of the rows of one class (-1: all), each rounded up to `align`, and the rank where it is. */
static int64_t largest_sum(live_sums *s, const lf_trace *trace, const lf_plan_options *o, int32_t klass, int64_t align,
                           int64_t *where)
{
    int64_t most = 0, now = 0;
    memset(s->live, 0, (size_t)s->n_times * sizeof s->live[0]);
    for (int64_t i = 0; i < trace->n; i++) {
        const lf__row *row = &trace->rows[i];
        if (row->bytes == 0 || (klass >= 0 && class_of(row, o) != klass)) continue;
        s->live[s->rank[i].first] += lf__round_up(row->bytes, align);
        s->live[s->rank[i].last] -= lf__round_up(row->bytes, align);
    }
    if (where) *where = 0;
    for (int64_t t = 0; t < s->n_times; t++) {
        now += s->live[t];
        if (now <= most) continue;
        most = now;
        if (where) *where = t;
    }
    return most;
}

/* ---- the problem */

static void problem_free(lf__problem *p)
{
    lf__free(p->block);
    lf__free(p->placed.first);
    lf__free(p->placed.last);
    lf__free(p->placed.offset);
    lf__free(p->placed.end);
    lf__free(p->offset);
    lf__free(p->best);
}

static lf_status problem_alloc(lf__problem *p, int64_t n)
{
    size_t room = (size_t)n;
    p->block = lf__alloc_array(room, sizeof *p->block);
    p->placed.first = lf__alloc_array(room, sizeof *p->placed.first);
    p->placed.last = lf__alloc_array(room, sizeof *p->placed.last);
    p->placed.offset = lf__alloc_array(room, sizeof *p->placed.offset);
    p->placed.end = lf__alloc_array(room, sizeof *p->placed.end);
    p->offset = lf__alloc_array(room, sizeof *p->offset);
    p->best = lf__alloc_array(room, sizeof *p->best);
    bool complete = p->block && p->placed.first && p->placed.last && p->placed.offset && p->placed.end && p->offset && p->best;
    return complete ? LF_OK : LF_FAIL(LF_ERR_NOMEM, "plan of %lld tensors", (long long)n);
}

static bool always_live(const live_sums *s, int64_t i) { return s->rank[i].first == 0 && s->rank[i].last == s->n_times - 1; }

/* Rows that live through the whole trace go to the bottom, widest alignment first; the rest become blocks. */
static void fill_problem(lf__problem *p, const lf_trace *trace, const lf_plan_options *o, const live_sums *s, int64_t *offset)
{
    for (int64_t above = INT64_MAX; above > 0;) { /* one round an alignment */
        int64_t align = 0;
        for (int64_t i = 0; i < trace->n; i++) {
            int64_t a = align_of(&trace->rows[i], o);
            if (trace->rows[i].bytes && always_live(s, i) && a < above && a > align) align = a;
        }
        for (int64_t i = 0; align && i < trace->n; i++) {
            const lf__row *row = &trace->rows[i];
            if (!row->bytes || !always_live(s, i) || align_of(row, o) != align) continue;
            offset[i] = lf__round_up(p->base, align);
            p->base = offset[i] + lf__round_up(row->bytes, s->common_align);
        }
        above = align;
    }
    for (int64_t i = 0; i < trace->n; i++) {
        const lf__row *row = &trace->rows[i];
        if (!row->bytes || always_live(s, i)) continue;
        p->block[p->n++] = (lf__block){.bytes = lf__round_up(row->bytes, s->common_align),
                                       .align = align_of(row, o),
                                       .first = s->rank[i].first,
                                       .last = s->rank[i].last,
                                       .row = (int32_t)i};
    }
}

static lf_status solve(lf__problem *p, const lf_plan_options *o, int64_t started_ns)
{
    if (p->n == 0) {
        p->best_peak = p->base;
        return LF_OK;
    }
    if (strcmp(o->strategy, "greedy") == 0) return lf__plan_greedy(p);
    p->budget = (int64_t)(o->time_limit_s * PAIRS_PER_SECOND);
    p->stop_ns = started_ns + (int64_t)((o->time_limit_s * SLOWEST + SLOWEST_S) * 1e9);
    lf_status rc = lf__plan_search(p);
    if (rc == LF_OK && p->best_peak > p->bound && p->work < p->budget && o->time_limit_s > 0)
        lf__log(LF_LOG_WARN,
                "planner: this machine is slow, the search was cut short after %.1f s; the plan is valid but may differ "
                "from another machine's",
                o->time_limit_s * SLOWEST + SLOWEST_S);
    return rc;
}

/* ---- the result */

static void summarise(lf_plan_summary *out, const lf_trace *trace, const lf_plan_options *o, live_sums *s, const lf__problem *p,
                      int64_t started_ns)
{
    *out = (lf_plan_summary){.size = sizeof *out, .n = trace->n, .peak_bytes = p->best_peak};
    out->bound_bytes = largest_sum(s, trace, o, -1, 1, NULL);
    for (int64_t i = 0; i < trace->n; i++) {
        out->live_sum_bytes += trace->rows[i].bytes;
        out->class_n[class_of(&trace->rows[i], o)]++;
    }
    for (int32_t k = 0; k < LF_N_CLASSES; k++) out->class_peak_bytes[k] = largest_sum(s, trace, o, k, 1, NULL);
    out->waste = out->peak_bytes > 0 ? 1.0 - (double)out->bound_bytes / (double)out->peak_bytes : 0;
    out->optimal = p->best_peak <= p->bound;
    out->seconds = (double)(lf__now_ns() - started_ns) * 1e-9;
}

/* "'a' 12 bytes (weight), 'b' …": the three largest tensors live at a rank. */
static void name_largest(const lf_trace *trace, const live_sums *s, int64_t rank, char *text, size_t size)
{
    int64_t taken[3];
    size_t used = 0;
    text[0] = 0;
    for (int32_t k = 0; k < 3; k++) {
        int64_t best = -1;
        for (int64_t i = 0; i < trace->n; i++) {
            bool free_row = trace->rows[i].bytes && !(k > 0 && taken[0] == i) && !(k > 1 && taken[1] == i);
            if (!free_row || s->rank[i].first > rank || rank >= s->rank[i].last) continue;
            if (best < 0 || trace->rows[i].bytes > trace->rows[best].bytes) best = i;
        }
        if (best < 0) return;
        taken[k] = best;
        const lf__row *row = &trace->rows[best];
        int n = snprintf(text + used, size - used, "%s'%.60s' %lld bytes (%s)", k ? ", " : "", row->name, (long long)row->bytes,
                         lf_tensor_role_name(row->role));
        if (n < 0 || (size_t)n >= size - used) return;
        used += (size_t)n;
    }
}

static lf_status fail_capacity(const lf_trace *trace, const lf_plan_options *o, live_sums *s, const lf__problem *p)
{
    char largest[320];
    int64_t where, most = 0, klass_of_most = 0;
    largest_sum(s, trace, o, -1, s->common_align, &where);
    name_largest(trace, s, where, largest, sizeof largest);
    int64_t at_peak[LF_N_CLASSES] = {0};
    for (int64_t i = 0; i < trace->n; i++)
        if (trace->rows[i].bytes && s->rank[i].first <= where && where < s->rank[i].last)
            at_peak[class_of(&trace->rows[i], o)] += trace->rows[i].bytes;
    for (int32_t k = 0; k < LF_N_CLASSES; k++)
        if (at_peak[k] > most) {
            most = at_peak[k];
            klass_of_most = k;
        }
    return LF_FAIL(
        LF_ERR_POOL,
        "the plan needs %lld bytes, capacity_bytes is %lld: %lld too few. At ordinal %lld %lld bytes must be live, %lld of "
        "them %s; largest: %s; hint: %s",
        (long long)p->best_peak, (long long)o->capacity_bytes, (long long)(p->best_peak - o->capacity_bytes),
        (long long)s->times[where], (long long)p->bound, (long long)most, lf_class_name((int32_t)klass_of_most), largest,
        p->bound > o->capacity_bytes ? "no plan can be smaller: a smaller batch or recomputation, or more capacity_bytes"
                                     : "a smaller plan is not ruled out: raise time_limit_s");
}

static lf_status plan_rows(lf_trace *trace, const lf_plan_options *o, lf_plan_summary *summary, live_sums *s, lf__problem *p,
                           int64_t *offset)
{
    int64_t started = lf__now_ns();
    lf_status rc;
    LF_TRY(sums_open(s, trace, o));
    LF_TRY(problem_alloc(p, trace->n));
    p->bound = largest_sum(s, trace, o, -1, s->common_align ? s->common_align : 1, NULL);
    p->best_peak = INT64_MAX;
    fill_problem(p, trace, o, s, offset);
    LF_TRY(solve(p, o, started));
    if (summary) summarise(summary, trace, o, s, p, started);
    if (o->capacity_bytes && p->best_peak > o->capacity_bytes) return fail_capacity(trace, o, s, p);
    for (int32_t i = 0; i < p->n; i++) offset[p->block[i].row] = p->best[i];
    for (int64_t i = 0; i < trace->n; i++) trace->rows[i].offset = offset[i];
    trace->default_align = o->align_bytes;
out:
    return rc;
}

lf_status lf_trace_plan(lf_trace *trace, const lf_plan_options *opts, lf_plan_summary *summary)
{
    lf_plan_options o;
    live_sums s = {0};
    lf__problem p = {0};
    LF_CHECK_ARG(trace, "trace is NULL");
    LF_CHECK_ARG(!summary || summary->size == sizeof *summary, "plan summary: size is %zu, expected %zu", summary->size,
                 sizeof *summary);
    lf_status rc = lf__options_take("sculptor", &o, sizeof o, opts);
    if (rc < 0) return rc;
    LF_CHECK_ARG(o.short_ops <= o.long_ops, "[sculptor] short_ops is %d, expected at most long_ops, %d", o.short_ops, o.long_ops);
    LF_CHECK_ARG(trace->n == 0 || o.align_bytes <= (LF_TRACE_MAX_BYTES - trace->total_bytes) / trace->n / 2,
                 "[sculptor] align_bytes is %lld, too much for %lld rows", (long long)o.align_bytes, (long long)trace->n);
    int64_t *offset = lf__alloc_array((size_t)trace->n, sizeof *offset);
    rc = offset ? plan_rows(trace, &o, summary, &s, &p, offset)
                : LF_FAIL(LF_ERR_NOMEM, "plan of %lld tensors", (long long)trace->n);
    lf__free(offset);
    sums_free(&s);
    problem_free(&p);
    return rc;
}
