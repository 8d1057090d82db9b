/* SPDX-License-Identifier: Apache-2.0 */
/* In which form each group's chunks are summed. */
#include <stdio.h>
#include <string.h>

#include "nexus_int.h"

const char *lf__nexus_form_name(int32_t form) { return form == NEXUS_SPARSE ? "sparse" : "dense"; }

int64_t lf__nexus_sent_bytes(const nexus_chunk *c)
{
    if (c->form == NEXUS_DENSE) return c->bytes;
    return (c->range.count + 63) / 64 * 8 + c->topk.k * (int64_t)lf_dtype_bytes(c->dtype);
}

static bool has_experts(const nexus_schedule *plan)
{
    for (int32_t i = 0; i < plan->n_chunks; i++)
        if (strcmp(plan->chunks[i].group_name, "dense") != 0) return true;
    return false;
}

/* What was asked for by name. */
static int32_t forced_form(const lf_nexus *nexus, const char *group, bool experts, const char **why)
{
    *why = "comm_strategy is dense";
    if (strcmp(nexus->opts.comm_strategy, "dense") == 0) return NEXUS_DENSE;
    *why = experts ? "experts with little load" : "comm_strategy is sparse and there are no experts";
    if (!experts || strcmp(group, "low") == 0) return NEXUS_SPARSE;
    *why = "sparse is for experts with little load";
    return NEXUS_DENSE;
}

static void set_form(const lf_nexus *nexus, nexus_chunk *c, int32_t form, const char *why)
{
    c->form = form;
    c->why = why;
    c->topk = (lf_topk){.size = sizeof c->topk, .count = c->range.count, .dtype = c->dtype};
    if (form == NEXUS_DENSE) return;
    const int64_t k = (int64_t)(nexus->opts.k_ratio * (double)c->range.count + 0.5);
    c->topk.k = k < 1 ? 1 : k > c->range.count ? c->range.count : k;
}

void lf__nexus_keep_dense(const lf_nexus *nexus, nexus_schedule *plan)
{
    for (int32_t i = 0; i < plan->n_chunks; i++)
        for (int32_t k = 0; k < nexus->plan.n_chunks; k++)
            if (nexus->plan.chunks[k].group == plan->chunks[i].group) {
                set_form(nexus, &plan->chunks[i], NEXUS_DENSE, nexus->plan.chunks[k].why);
                break;
            }
}

/* ---- hybrid ------------------------------------------------------------------------------------------------------------ */

static lf_status find_link(lf_nexus *nexus, nexus_link *link, const char **source)
{
    *source = "told";
    if (lf__nexus_link_told(&nexus->opts, link)) return LF_OK;
    *source = nexus->opts.probe && nexus->transport.post && nexus->transport.world > 1 ? "measured" : NULL;
    if (!*source) return LF_OK;
    lf_status rc = lf__nexus_probe(nexus, link);
    if (rc == LF_OK && nexus->opts.topk_mb_s > 0) link->topk_bytes_s = nexus->opts.topk_mb_s * 1e6;
    return rc;
}

/* Nothing is asked of the link then either. NULL: it may be sparse. */
static const char *why_never_sparse(const lf_nexus *nexus)
{
    if (nexus->opts.shard_optimizer) return "shard_optimizer sums densely";
    if (nexus->opts.every_micro_step) return "every_micro_step sums densely";
    return nexus->kernels && !nexus->kernels->topk ? "the device has no kernels for top-k" : NULL;
}

/* As if all of the group were sparse: what that sends, and whether it pays. */
static nexus_cost price_group(lf_nexus *nexus, int32_t group, const nexus_link *link)
{
    int64_t n = 0, bytes = 0, sent = 0;
    for (int32_t i = 0; i < nexus->plan.n_chunks; i++) {
        nexus_chunk *c = &nexus->plan.chunks[i];
        if (c->group != group) continue;
        set_form(nexus, c, NEXUS_SPARSE, NULL);
        n++;
        bytes += c->bytes;
        sent += lf__nexus_sent_bytes(c);
    }
    return lf__nexus_cost(link, n, bytes, sent);
}

static lf_status choose_by_cost(lf_nexus *nexus)
{
    const int32_t n_groups = lf_map_n_groups(nexus->map);
    nexus_link link;
    const char *source;
    const char *otherwise = why_never_sparse(nexus);
    lf_status rc = LF_OK;
    if (otherwise) source = NULL;
    else rc = find_link(nexus, &link, &source);
    if (rc < 0) return rc;
    if (!source && !otherwise) otherwise = "no slow link was measured or told";
    if (source && !nexus->why) nexus->why = lf__alloc_array((size_t)n_groups, sizeof *nexus->why);
    if (source && !nexus->why) return LF_FAIL(LF_ERR_NOMEM, "reasons of %d groups", n_groups);
    for (int32_t g = 0; g < n_groups; g++) {
        nexus_cost cost = {0};
        if (source) {
            cost = price_group(nexus, g, &link);
            snprintf(nexus->why[g], sizeof nexus->why[g],
                     "%s link %.4g MB/s, %.3g us: sparse %.4g ms, dense %.4g ms; sparse wins below %.4g MB/s", source,
                     link.bytes_s * 1e-6, link.latency_s * 1e6, cost.sparse_s * 1e3, cost.dense_s * 1e3,
                     cost.break_even_bytes_s * 1e-6);
        }
        for (int32_t i = 0; i < nexus->plan.n_chunks; i++)
            if (nexus->plan.chunks[i].group == g)
                set_form(nexus, &nexus->plan.chunks[i], cost.pays ? NEXUS_SPARSE : NEXUS_DENSE,
                         source ? nexus->why[g] : otherwise);
    }
    return LF_OK;
}

lf_status lf__nexus_choose_forms(lf_nexus *nexus)
{
    const bool experts = has_experts(&nexus->plan);
    if (strcmp(nexus->opts.comm_strategy, "hybrid") == 0) return choose_by_cost(nexus);
    for (int32_t i = 0; i < nexus->plan.n_chunks; i++) {
        const char *why;
        const int32_t form = forced_form(nexus, nexus->plan.chunks[i].group_name, experts, &why);
        set_form(nexus, &nexus->plan.chunks[i], form, why);
    }
    return LF_OK;
}
