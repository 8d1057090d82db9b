/* SPDX-License-Identifier: Apache-2.0 */
/* CPU: routing and its backward. Every token is independent; only the stable sort walks them in order. What is summed over the
 * experts of a token is summed by fours and then as a tree, the order that lanes of a GPU have. */
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "loom_cpu.h"
#include "loom_math.h"

enum { QUADS = LF_MAX_EXPERTS / 4 };

/* x: (e) padded with zeros to a multiple of 4. Quads are added in order, then their sums as a tree over a power of two. */
static float sum_quads(const float *x, int32_t e)
{
    float quad[QUADS];
    int32_t n = 1;
    while (4 * n < e) n *= 2;
    for (int32_t q = 0; q < n; q++) quad[q] = 4 * q < e ? x[4 * q] + x[4 * q + 1] + x[4 * q + 2] + x[4 * q + 3] : 0;
    for (int32_t half = n / 2; half > 0; half /= 2)
        for (int32_t q = 0; q < half; q++) quad[q] += quad[q + half];
    return quad[0];
}

/* z: (e) scaled logits; prob: (e and up to 3 zeros) softmax of z. Returns whether it is a number. */
static bool softmax(const float *z, int32_t e, float *prob)
{
    float most = z[0];
    for (int32_t j = 1; j < e; j++)
        if (z[j] > most) most = z[j];
    for (int32_t j = 0; j < e; j++) prob[j] = lf__loom_exp(z[j] - most);
    for (int32_t j = e; j % 4; j++) prob[j] = 0;
    const float sum = sum_quads(prob, e);
    for (int32_t j = 0; j < e; j++) prob[j] /= sum;
    return sum == sum;
}

/* A NaN is below everything, and a tie goes to the lower index. */
static bool better(float z, float than) { return z > than || (z == z && than != than); }

/* The k largest of z, best first. */
static void choose(const float *z, int32_t e, int32_t k, int32_t *chosen)
{
    uint64_t taken[LF_MAX_EXPERTS / 64] = {0};
    for (int32_t c = 0; c < k; c++) {
        int32_t best = -1;
        for (int32_t j = 0; j < e; j++) {
            if (taken[j / 64] >> (j % 64) & 1) continue;
            if (best < 0 || better(z[j], z[best])) best = j;
        }
        taken[best / 64] |= (uint64_t)1 << (best % 64);
        chosen[c] = best;
    }
}

/* The softmax of the chosen z, summed in order of choice; NaN when any z is one. */
static void weigh(const float *z, int32_t e, int32_t k, const int32_t *chosen, float *weight)
{
    float sum = 0;
    for (int32_t c = 0; c < k; c++) sum += weight[c] = lf__loom_exp(z[chosen[c]] - z[chosen[0]]);
    for (int32_t j = 0; j < e; j++)
        if (z[j] != z[j]) sum = z[j];
    for (int32_t c = 0; c < k; c++) weight[c] /= sum;
}

/* noise: (up to e + 3) */
static void draw(const lf__loom_route_args *a, const lf_route_schedule *s, int64_t t, float *noise)
{
    const uint64_t token = (uint64_t)a->token[t], seed = (uint64_t)a->seed;
    for (int32_t j = 0; j < a->e; j += 4) {
        const uint32_t counter[4] = {(uint32_t)token, (uint32_t)(token >> 32), (uint32_t)s->step,
                                     (uint32_t)(a->layer * 64 + j / 4)};
        uint32_t word[4];
        lf__philox(counter, (const uint32_t[2]){(uint32_t)seed, (uint32_t)(seed >> 32)}, word);
        for (int32_t i = 0; i < 4; i++) noise[j + i] = lf__loom_gumbel(word[i]);
    }
}

static lf_route_schedule schedule_of(const lf__loom_route_args *a)
{
    return a->schedule ? *a->schedule : (lf_route_schedule){0, 0, 1};
}

/* What the threads add to: sums of probabilities in units, and whether a NaN was among them. */
typedef struct route_job {
    const lf__loom_route_args *a;
    lf_route_schedule schedule;
    _Atomic uint64_t *units; /* (e) */
    _Atomic int32_t *spoiled;
} route_job;

static void route_token(const route_job *job, int64_t t, uint64_t *units, int32_t *spoiled)
{
    const lf__loom_route_args *a = job->a;
    const lf_route_schedule *s = &job->schedule;
    const float *logit = a->logits + t * a->e;
    const bool valid = !a->valid || a->valid[t];
    float z[LF_MAX_EXPERTS], other[LF_MAX_EXPERTS], *weight = a->routing.weight + t * a->k;
    int32_t *expert = a->routing.expert + t * a->k;
    for (int32_t j = 0; j < a->e; j++) z[j] = logit[j] / s->temperature;
    if (a->routing.prob || a->prob_sum) {
        if (!softmax(z, a->e, other)) *spoiled |= valid;
        else
            for (int32_t j = 0; valid && j < a->e; j++) units[j] += lf__loom_units(other[j]);
        if (a->routing.prob) memcpy(a->routing.prob + t * a->e, other, (size_t)a->e * sizeof *other);
    }
    for (int32_t c = 0; !valid && c < a->k; c++) expert[c] = -1, weight[c] = 0;
    if (!valid) return;
    if (a->token && s->noise_scale != 0) {
        draw(a, s, t, other);
        for (int32_t j = 0; j < a->e; j++) z[j] = (logit[j] + s->noise_scale * other[j]) / s->temperature;
    }
    choose(z, a->e, a->k, expert);
    weigh(z, a->e, a->k, expert, weight);
}

static void route_span(const void *user, int64_t from, int64_t to)
{
    const route_job *job = user;
    uint64_t units[LF_MAX_EXPERTS] = {0};
    int32_t spoiled = 0;
    for (int64_t t = from; t < to; t++) route_token(job, t, units, &spoiled);
    for (int32_t j = 0; j < job->a->e; j++) atomic_fetch_add(&job->units[j], units[j]);
    if (spoiled) atomic_store(job->spoiled, 1);
}

static int32_t or_nowhere(int32_t expert, int32_t e) { return expert >= 0 && expert < e ? expert : e; }

/* expert: (n_slots). Counting sort, stable by token * k + choice; what is routed nowhere comes last. */
static void sort_rows(const int32_t *expert, const lf_routing *r, int64_t n_slots, int32_t e)
{
    int32_t next[LF_MAX_EXPERTS + 1]; /* the next free row of an expert; [e]: of those routed nowhere */
    memset(r->count, 0, (size_t)e * sizeof *r->count);
    for (int64_t s = 0; s < n_slots; s++)
        if (or_nowhere(expert[s], e) < e) r->count[expert[s]]++;
    int32_t at = 0;
    for (int32_t j = 0; j < e; j++) {
        r->offset[j] = next[j] = at;
        at += r->count[j];
    }
    r->offset[e] = next[e] = at;
    for (int64_t s = 0; s < n_slots; s++) {
        int32_t row = next[or_nowhere(expert[s], e)]++;
        r->row[row] = (int32_t)s;
        r->slot[s] = row;
    }
}

lf_status lf__loom_cpu_route(const lf__loom_call *call, const lf__loom_args *args)
{
    (void)call;
    const lf__loom_route_args *a = &args->route;
    _Atomic uint64_t units[LF_MAX_EXPERTS];
    _Atomic int32_t spoiled = 0;
    for (int32_t j = 0; j < a->e; j++) atomic_init(&units[j], 0);
    const route_job job = {a, schedule_of(a), units, &spoiled};
    lf__loom_spans(a->n, (a->token && job.schedule.noise_scale != 0 ? 96 : 32) * (int64_t)a->e, route_span, &job);
    sort_rows(a->routing.expert, &a->routing, a->n * a->k, a->e);
    for (int32_t j = 0; a->prob_sum && j < a->e; j++)
        a->prob_sum[j] = spoiled ? NAN : lf__loom_from_units(atomic_load(&units[j]));
    return LF_OK;
}

lf_status lf__loom_cpu_sort(const lf__loom_call *call, const lf__loom_args *args)
{
    (void)call;
    const lf__loom_route_args *a = &args->route;
    sort_rows(a->given, &a->routing, a->n * a->k, a->e);
    return LF_OK;
}

/* dlogits: (e) += p (g - <p, g>), the gradient of a softmax. */
static void add_softmax_backward(const float *p, const float *g, int32_t e, float *dlogits)
{
    float product[LF_MAX_EXPERTS] = {0};
    for (int32_t j = 0; j < e; j++) product[j] = p[j] * g[j];
    const float mean = sum_quads(product, e);
    for (int32_t j = 0; j < e; j++) dlogits[j] += p[j] * (g[j] - mean);
}

/* The weights are a softmax over the chosen z alone: dz_c = w_c (dw_c - sum_j w_j dw_j). */
static void route_backward_span(const void *user, int64_t from, int64_t to)
{
    const route_job *job = user;
    const lf__loom_route_args *a = job->a;
    for (int64_t t = from; t < to; t++) {
        const float *weight = a->routing.weight + t * a->k, *dweight = a->dweight + t * a->k;
        const int32_t *expert = a->routing.expert + t * a->k;
        float *dlogits = a->dlogits + t * a->e, mean = 0;
        memset(dlogits, 0, (size_t)a->e * sizeof *dlogits);
        if ((a->valid && !a->valid[t]) || expert[0] < 0) continue;
        for (int32_t c = 0; c < a->k; c++) mean += weight[c] * dweight[c];
        for (int32_t c = 0; c < a->k; c++) dlogits[expert[c]] = weight[c] * (dweight[c] - mean);
        if (a->dprob_sum) add_softmax_backward(a->routing.prob + t * a->e, a->dprob_sum, a->e, dlogits);
        for (int32_t j = 0; j < a->e; j++) dlogits[j] /= job->schedule.temperature;
    }
}

lf_status lf__loom_cpu_route_backward(const lf__loom_call *call, const lf__loom_args *args)
{
    (void)call;
    const route_job job = {&args->route, schedule_of(&args->route), NULL, NULL};
    lf__loom_spans(args->route.n, 8 * (int64_t)args->route.e + 4 * (int64_t)args->route.k, route_backward_span, &job);
    return LF_OK;
}
