/* SPDX-License-Identifier: Apache-2.0 */
/* CPU: gumbel noise, routing and its backward. Every token is independent; only the stable sort walks them in order. */
#include <math.h>
#include <string.h>

#include "loom_int.h"

static void gumbel_span(const void *user, int64_t from, int64_t to)
{
    const lf__loom_gumbel_args *a = user;
    const uint32_t key[2] = {(uint32_t)a->seed, (uint32_t)((uint64_t)a->seed >> 32)};
    for (int64_t t = from; t < to; t++) {
        const uint64_t token = (uint64_t)a->token[t];
        uint32_t word[4] = {0};
        for (int32_t e = 0; e < a->e; e++) {
            if (e % 4 == 0) {
                const uint32_t block = (uint32_t)(a->layer * 64 + e / 4);
                lf__philox((const uint32_t[4]){(uint32_t)token, (uint32_t)(token >> 32), (uint32_t)a->step, block}, key, word);
            }
            double u = (word[e % 4] >> 8) * 0x1p-24 + 0x1p-25; /* inside (0, 1); its largest value is not a float */
            a->noise[t * a->e + e] = (float)-log(-log(u));
        }
    }
}

lf_status lf__loom_cpu_gumbel(const lf__loom_call *call, const lf__loom_args *args)
{
    (void)call;
    lf__loom_spans(args->gumbel.n, 64 * (int64_t)args->gumbel.e, gumbel_span, &args->gumbel);
    return LF_OK;
}

/* z: (e) scaled logits; prob: (e) softmax of z, summed in order. */
static void softmax(const float *z, int32_t e, float *prob)
{
    float most = z[0], sum = 0;
    for (int32_t j = 1; j < e; j++)
        if (z[j] > most) most = z[j];
    for (int32_t j = 0; j < e; j++) {
        prob[j] = expf(z[j] - most);
        sum += prob[j];
    }
    for (int32_t j = 0; j < e; j++) prob[j] /= sum;
}

/* The k largest of z, best first, ties to the lower index. A NaN is never larger, so the indices are always k different ones. */
static void choose(const float *z, int32_t e, int32_t k, int32_t *chosen)
{
    uint64_t taken[LF_MAX_EXPERTS / 64] = {0};
    for (int32_t c = 0; c < k; c++) {
        int32_t best = -1;
        for (int32_t j = 0; j < e; j++) {
            if (taken[j / 64] >> (j % 64) & 1) continue;
            if (best < 0 || z[j] > z[best]) best = j;
        }
        taken[best / 64] |= (uint64_t)1 << (best % 64);
        chosen[c] = best;
    }
}

static void route_span(const void *user, int64_t from, int64_t to)
{
    const lf__loom_route_args *a = user;
    float z[LF_MAX_EXPERTS];
    for (int64_t t = from; t < to; t++) {
        const float *logit = a->logits + t * a->e, *noise = a->noise ? a->noise + t * a->e : NULL;
        float *prob = a->routing.prob + t * a->e, *weight = a->routing.weight + t * a->k;
        int32_t *expert = a->routing.expert + t * a->k;
        for (int32_t j = 0; j < a->e; j++) z[j] = (noise ? logit[j] + noise[j] : logit[j]) / a->temperature;
        softmax(z, a->e, prob);
        if (a->valid && !a->valid[t]) {
            for (int32_t c = 0; c < a->k; c++) expert[c] = -1, weight[c] = 0;
            continue;
        }
        choose(z, a->e, a->k, expert);
        float sum = 0;
        for (int32_t c = 0; c < a->k; c++) sum += prob[expert[c]];
        for (int32_t c = 0; c < a->k; c++) weight[c] = prob[expert[c]] / sum;
    }
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
    lf__loom_spans(a->n, (16 + a->k) * (int64_t)a->e, route_span, a);
    sort_rows(a->routing.expert, &a->routing, a->n * a->k, a->e);
    return LF_OK;
}

lf_status lf__loom_cpu_sort(const lf__loom_call *call, const lf__loom_args *args)
{
    (void)call;
    const lf__loom_route_args *a = &args->route;
    sort_rows(a->given, &a->routing, a->n * a->k, a->e);
    return LF_OK;
}

/* The weights are a softmax over the chosen z alone: dz_c = w_c (dw_c - sum_j w_j dw_j). */
static void route_backward_span(const void *user, int64_t from, int64_t to)
{
    const lf__loom_route_args *a = user;
    for (int64_t t = from; t < to; t++) {
        const float *weight = a->routing.weight + t * a->k, *dweight = a->dweight + t * a->k;
        const int32_t *expert = a->routing.expert + t * a->k;
        float *dlogits = a->dlogits + t * a->e, mean = 0;
        memset(dlogits, 0, (size_t)a->e * sizeof *dlogits);
        if (expert[0] < 0) continue;
        for (int32_t c = 0; c < a->k; c++) mean += weight[c] * dweight[c];
        for (int32_t c = 0; c < a->k; c++) dlogits[expert[c]] = weight[c] * (dweight[c] - mean) / a->temperature;
    }
}

lf_status lf__loom_cpu_route_backward(const lf__loom_call *call, const lf__loom_args *args)
{
    (void)call;
    lf__loom_spans(args->route.n, args->route.e + 4 * (int64_t)args->route.k, route_backward_span, &args->route);
    return LF_OK;
}
