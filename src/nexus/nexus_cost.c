/* SPDX-License-Identifier: Apache-2.0 */
/* Which form saves time on the link at hand: a model of four numbers, told by options or taken by a short probe. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "nexus_int.h"

/* Sums of the probe: small ones for the latency, then larger ones while they are quick. */
enum { PROBE_SMALL = 64, PROBE_TRIES = 3, PROBE_ROUNDS = 12, PROBE_FIRST = 64 << 10, PROBE_MOST = 4 << 20, PROBE_TOPK = 1 << 18 };
static const double PROBE_QUICK_S = 0.05; /* a larger sum is tried only after one that took less */
static const double WORTH = 0.8; /* another form must take less than this share of the time: forms do not change for nothing */
static const double TOPK_MB_S = 500, CAST_MB_S = 4000; /* of gradients, when nothing was measured: a core of a server's CPU */

/* ---- the model -------------------------------------------------------------------------------------------------------- */

/* A form's time: what no link changes, and its bytes on the link. */
typedef struct price {
    double fixed_s, seconds;
    int64_t bytes;
} price;

static price price_of(const nexus_link *link, int64_t n_sums, int64_t bytes, double work_s)
{
    const double fixed_s = (double)n_sums * link->latency_s + work_s;
    return (price){fixed_s, fixed_s + (double)bytes / link->bytes_s, bytes};
}

/* The bandwidth below which `a`, which does more and moves less, takes less time than `b`. */
static double cheaper_below(const price *a, const price *b)
{
    if (a->bytes >= b->bytes) return 0;
    return a->fixed_s > b->fixed_s ? (double)(b->bytes - a->bytes) / (a->fixed_s - b->fixed_s) : INFINITY;
}

nexus_cost lf__nexus_cost(const nexus_link *link, const nexus_load *load)
{
    const int64_t n = load->n_chunks;
    const price dense = price_of(link, n, load->bytes, 0);
    const price bf16 = price_of(link, n, load->bf16_bytes, (double)load->cast_bytes / link->cast_bytes_s);
    const price sparse = price_of(link, 2 * n, load->sparse_bytes, (double)load->bytes / link->topk_bytes_s);
    nexus_cost cost = {.dense_s = dense.seconds, .bf16_s = INFINITY, .sparse_s = INFINITY, .form = NEXUS_DENSE};
    const price *best = &dense;
    if (load->bf16_bytes) {
        cost.bf16_s = bf16.seconds;
        cost.bf16_below_bytes_s = cheaper_below(&bf16, best);
        if (bf16.seconds < WORTH * best->seconds) {
            best = &bf16;
            cost.form = NEXUS_BF16;
        }
    }
    if (load->sparse_bytes) {
        cost.sparse_s = sparse.seconds;
        cost.sparse_below_bytes_s = cheaper_below(&sparse, best);
        if (sparse.seconds < WORTH * best->seconds) cost.form = NEXUS_SPARSE;
    }
    return cost;
}

/* ---- told ------------------------------------------------------------------------------------------------------------- */

bool lf__nexus_link_told(const lf_nexus_options *opts, nexus_link *link)
{
    *link = (nexus_link){.latency_s = opts->link_latency_us * 1e-6,
                         .bytes_s = opts->link_mb_s * 1e6,
                         .topk_bytes_s = (opts->topk_mb_s > 0 ? opts->topk_mb_s : TOPK_MB_S) * 1e6,
                         .cast_bytes_s = (opts->cast_mb_s > 0 ? opts->cast_mb_s : CAST_MB_S) * 1e6};
    return opts->link_mb_s > 0;
}

/* ---- measured --------------------------------------------------------------------------------------------------------- */

/* A transport can only sum, so each has a place of its own. */
lf_status lf__nexus_agree_on_largest(lf_nexus *nexus, double *numbers, int32_t n)
{
    const int32_t world = nexus->transport.world;
    const size_t bytes = (size_t)n * (size_t)world * sizeof(double);
    double *all = lf__alloc(bytes);
    void *shared = NULL;
    int64_t ticket;
    lf_status rc = all ? LF_OK : LF_FAIL(LF_ERR_NOMEM, "numbers of %d ranks", world);
    if (rc < 0) goto out;
    memcpy(all + (size_t)n * (size_t)nexus->transport.rank, numbers, (size_t)n * sizeof(double));
    LF_TRY(lf_device_alloc(nexus->device, bytes, &shared));
    LF_TRY(lf_copy(nexus->device, shared, all, bytes, NULL));
    LF_TRY(lf__nexus_post(nexus, shared, (int64_t)n * world, LF_DTYPE_F64, NULL, &ticket));
    LF_TRY(lf__nexus_wait(nexus, ticket, NULL));
    LF_TRY(lf_copy(nexus->device, all, shared, bytes, NULL));
    for (int32_t i = 0; i < n * world; i++)
        if (all[i] > numbers[i % n]) numbers[i % n] = all[i];
out:
    lf_device_free(nexus->device, shared);
    lf__free(all);
    return rc;
}

/* data: (count) f32; the shortest of a few sums, as the slowest rank sees it. The first, which sets up connections, is not counted. */
static lf_status time_sum(lf_nexus *nexus, void *data, int64_t count, double *seconds)
{
    lf_status rc = LF_OK;
    *seconds = 0;
    for (int32_t i = -1; i < PROBE_TRIES; i++) {
        int64_t ticket;
        const int64_t began = lf__now_ns();
        LF_TRY(lf__nexus_post(nexus, data, count, LF_DTYPE_F32, NULL, &ticket));
        LF_TRY(lf__nexus_wait(nexus, ticket, NULL));
        const double took = (double)(lf__now_ns() - began) * 1e-9;
        if (i == 0 || (i > 0 && took < *seconds)) *seconds = took;
    }
    rc = lf__nexus_agree_on_largest(nexus, seconds, 1);
out:
    return rc;
}

static lf_status probe_link(lf_nexus *nexus, void *data, nexus_link *link)
{
    double small_s, seconds;
    lf_status rc = LF_OK;
    LF_TRY(time_sum(nexus, data, PROBE_SMALL, &small_s));
    link->latency_s = small_s;
    for (int64_t bytes = PROBE_FIRST; bytes <= PROBE_MOST; bytes *= 4) {
        LF_TRY(time_sum(nexus, data, bytes / 4, &seconds));
        const double moving_s = seconds > 1.1 * small_s ? seconds - small_s : 0.1 * small_s;
        link->bytes_s = (double)bytes / moving_s;
        if (seconds > PROBE_QUICK_S) break;
    }
out:
    return rc;
}

/* One round of the kernels of a sparse chunk. Where the device has none, nobody asks what they take. */
static lf_status run_topk(lf_nexus *nexus, const lf_topk *t)
{
    lf_status rc = LF_OK;
    if (!nexus->kernels->topk) return LF_OK;
    for (int32_t part = LF__TOPK_FOLD; part <= LF__TOPK_SCATTER && rc == LF_OK; part++)
        rc = lf__nexus_topk(nexus->device, nexus->kernels, t, part, NULL);
    return rc;
}

/* One round of those of a chunk in bf16; `values` is the wire. */
static lf_status run_cast(lf_nexus *nexus, const lf_topk *t)
{
    const lf__nexus_kernels *k = nexus->kernels;
    lf_status rc = k->narrow(nexus->device->context, NULL, 1, t->data, t->values, t->count);
    return rc == LF_OK ? k->widen(nexus->device->context, NULL, 1, t->values, t->out, t->count, 1) : rc;
}

/* The mean, not the best: ranks of one host share its cores, in a step as here. start: (count) what data holds before a round */
static lf_status time_rounds(lf_nexus *nexus, lf_status (*round)(lf_nexus *nexus, const lf_topk *t), const lf_topk *t,
                             const float *start, double *mean)
{
    lf_status rc = LF_OK;
    *mean = 0;
    for (int32_t i = 0; i <= PROBE_ROUNDS && rc == LF_OK; i++) {
        rc = lf_copy(nexus->device, t->out, start, (size_t)t->count * sizeof(float), NULL);
        const int64_t began = lf__now_ns();
        if (rc == LF_OK) rc = round(nexus, t);
        if (i > 0) *mean += (double)(lf__now_ns() - began) * 1e-9 / PROBE_ROUNDS; /* the first touches new memory */
    }
    return rc;
}

static double rate(double bytes, double seconds) { return bytes / (seconds > 1e-9 ? seconds : 1e-9); }

static lf_status probe_kernels(lf_nexus *nexus, void *data, nexus_link *link)
{
    const int64_t n = PROBE_TOPK;
    lf_topk t = {
        .size = sizeof t, .count = n, .k = n / 8, .data = data, .out = data, .dtype = LF_DTYPE_F32, .keep = 1, .factor = 1};
    float *start = lf__alloc((size_t)n * sizeof(float));
    char *room = NULL;
    double means[2];
    lf_status rc = start ? LF_OK : LF_FAIL(LF_ERR_NOMEM, "the probe of kernels");
    if (rc < 0) goto out;
    for (int64_t i = 0; i < n; i++) start[i] = (float)((i * 2654435761u) % 65537) - 32768;
    LF_TRY(lf_device_alloc(nexus->device, (size_t)(n * 8 + n / 8 + lf_topk_scratch_bytes(n)), (void **)&room));
    t.residual = (float *)room;
    t.values = room + 4 * n;
    t.mask = (int64_t *)(room + 8 * n);
    t.scratch = room + 8 * n + n / 8;
    LF_TRY(lf_fill(nexus->device, t.residual, 0, (size_t)n * 4, NULL));
    LF_TRY(time_rounds(nexus, run_topk, &t, start, &means[0]));
    LF_TRY(time_rounds(nexus, run_cast, &t, start, &means[1]));
    LF_TRY(lf__nexus_agree_on_largest(nexus, means, 2));
    link->topk_bytes_s = rate((double)n * 4, means[0]);
    link->cast_bytes_s = rate((double)n * 4, means[1]);
out:
    lf_device_free(nexus->device, room);
    lf__free(start);
    return rc;
}

lf_status lf__nexus_probe(lf_nexus *nexus, nexus_link *link)
{
    void *data = NULL;
    lf_status rc = LF_OK;
    LF_TRY(lf_device_alloc(nexus->device, PROBE_MOST, &data));
    LF_TRY(lf_fill(nexus->device, data, 0, PROBE_MOST, NULL));
    LF_TRY(probe_link(nexus, data, link));
    LF_TRY(probe_kernels(nexus, data, link));
out:
    lf_device_free(nexus->device, data);
    return rc < 0 ? lf__fail_prefix(rc, "measuring the link (probe)") : rc;
}
