/* SPDX-License-Identifier: Apache-2.0 */
/* In which form each group's chunks are summed. */
#include <stdio.h>
#include <string.h>

#include "nexus_int.h"

const char *lf__nexus_form_name(int32_t form)
{
    static const char *const names[] = {[NEXUS_DENSE] = "dense", [NEXUS_SPARSE] = "sparse", [NEXUS_BF16] = "bf16"};
    return names[form];
}

int64_t lf__nexus_sent_bytes(const nexus_chunk *c)
{
    if (c->form == NEXUS_DENSE) return c->bytes;
    if (c->form == NEXUS_BF16) return c->range.count * (int64_t)lf_dtype_bytes(LF_DTYPE_BF16);
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

/* wire_dtype is bf16, which is something to gradients that are wider. */
static bool narrows(const lf_nexus *nexus, const nexus_chunk *c)
{
    return c->dtype == LF_DTYPE_F32 && strcmp(nexus->opts.wire_dtype, "bf16") == 0;
}

static void set_form(const lf_nexus *nexus, nexus_chunk *c, int32_t form, const char *why)
{
    c->form = form == NEXUS_BF16 && !narrows(nexus, c) ? NEXUS_DENSE : form;
    c->why = why;
    c->topk = (lf_topk){.size = sizeof c->topk, .count = c->range.count, .dtype = c->dtype};
    if (form != NEXUS_SPARSE) return;
    const int64_t k = (int64_t)(nexus->opts.k_ratio * (double)c->range.count + 0.5);
    c->topk.k = k < 1 ? 1 : k > c->range.count ? c->range.count : k;
}

/* As it was asked for, by name or for want of a link. */
static void set_dense(const lf_nexus *nexus, nexus_chunk *c, const char *why)
{
    const bool bf16 = narrows(nexus, c);
    set_form(nexus, c, bf16 ? NEXUS_BF16 : NEXUS_DENSE, bf16 ? "wire_dtype is bf16" : why);
}

void lf__nexus_keep_forms(const lf_nexus *nexus, nexus_schedule *plan)
{
    for (int32_t i = 0; i < plan->n_chunks; i++)
        for (int32_t k = 0; k < nexus->plan.n_chunks; k++) {
            const nexus_chunk *old = &nexus->plan.chunks[k];
            if (old->group != plan->chunks[i].group || old->dtype != plan->chunks[i].dtype) continue;
            set_form(nexus, &plan->chunks[i], old->form, old->why);
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
    if (rc == LF_OK && nexus->opts.cast_mb_s > 0) link->cast_bytes_s = nexus->opts.cast_mb_s * 1e6;
    return rc;
}

/* Nothing is asked of the link then either. NULL: it may be sparse. */
static const char *why_never_sparse(const lf_nexus *nexus)
{
    if (nexus->opts.shard_optimizer) return "shard_optimizer sums densely";
    if (nexus->opts.every_micro_step) return "every_micro_step sums densely";
    return nexus->kernels && !nexus->kernels->topk ? "the device has no kernels for top-k" : NULL;
}

static const char *why_never_bf16(const lf_nexus *nexus)
{
    return strcmp(nexus->opts.wire_dtype, "bf16") == 0 ? NULL : "wire_dtype is grad";
}

/* What the group's chunks come to in every form that they can have. */
static nexus_load weigh_group(lf_nexus *nexus, int32_t group)
{
    nexus_load load = {0};
    for (int32_t i = 0; i < nexus->plan.n_chunks; i++) {
        nexus_chunk *c = &nexus->plan.chunks[i];
        if (c->group != group) continue;
        load.n_chunks++;
        load.bytes += c->bytes;
        load.cast_bytes += narrows(nexus, c) ? c->bytes : 0;
        set_form(nexus, c, NEXUS_BF16, NULL);
        if (!why_never_bf16(nexus)) load.bf16_bytes += lf__nexus_sent_bytes(c);
        set_form(nexus, c, NEXUS_SPARSE, NULL);
        if (!why_never_sparse(nexus)) load.sparse_bytes += lf__nexus_sent_bytes(c);
    }
    return load;
}

/* "told link 80 MB/s, 100 us: sparse 4 ms, bf16 6 ms, dense 10 ms; bf16 wins below …" */
static void say_why(const lf_nexus *nexus, const nexus_link *link, const char *source, const nexus_cost *cost, char *text,
                    int size)
{
    const char *never = why_never_sparse(nexus);
    int at = snprintf(text, (size_t)size, "%s link %.4g MB/s, %.3g us: ", source, link->bytes_s * 1e-6, link->latency_s * 1e6);
    if (!never) at += snprintf(text + at, (size_t)(size - at), "sparse %.4g ms, ", cost->sparse_s * 1e3);
    if (!why_never_bf16(nexus)) at += snprintf(text + at, (size_t)(size - at), "bf16 %.4g ms, ", cost->bf16_s * 1e3);
    at += snprintf(text + at, (size_t)(size - at), "dense %.4g ms; ", cost->dense_s * 1e3);
    if (!why_never_bf16(nexus))
        at += snprintf(text + at, (size_t)(size - at), "bf16 wins below %.4g MB/s, ", cost->bf16_below_bytes_s * 1e-6);
    if (never) snprintf(text + at, (size_t)(size - at), "%s", never);
    else snprintf(text + at, (size_t)(size - at), "sparse wins below %.4g MB/s", cost->sparse_below_bytes_s * 1e-6);
}

static lf_status choose_by_cost(lf_nexus *nexus)
{
    const int32_t n_groups = lf_map_n_groups(nexus->map);
    nexus_link link;
    const char *source = NULL;
    const char *otherwise = why_never_bf16(nexus) ? why_never_sparse(nexus) : NULL;
    lf_status rc = otherwise ? LF_OK : find_link(nexus, &link, &source);
    if (rc < 0) return rc;
    if (!source && !otherwise) otherwise = "no slow link was measured or told";
    if (source && !nexus->why) nexus->why = lf__alloc_array((size_t)n_groups, sizeof *nexus->why);
    if (source && !nexus->why) return LF_FAIL(LF_ERR_NOMEM, "reasons of %d groups", n_groups);
    for (int32_t i = 0; i < nexus->plan.n_chunks && !source; i++) set_dense(nexus, &nexus->plan.chunks[i], otherwise);
    for (int32_t g = 0; g < n_groups && source; g++) {
        const nexus_load load = weigh_group(nexus, g);
        const nexus_cost cost = lf__nexus_cost(&link, &load);
        say_why(nexus, &link, source, &cost, nexus->why[g], sizeof nexus->why[g]);
        for (int32_t i = 0; i < nexus->plan.n_chunks; i++)
            if (nexus->plan.chunks[i].group == g) set_form(nexus, &nexus->plan.chunks[i], cost.form, nexus->why[g]);
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
        if (form == NEXUS_SPARSE) set_form(nexus, &nexus->plan.chunks[i], form, why);
        else set_dense(nexus, &nexus->plan.chunks[i], why);
    }
    return LF_OK;
}
