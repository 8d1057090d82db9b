/* SPDX-License-Identifier: Apache-2.0 */
/* In which form each group's chunks are summed. */
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

static int32_t form_of_group(const lf_nexus *nexus, const char *group, bool experts, const char **why)
{
    const char *strategy = nexus->opts.comm_strategy;
    *why = "comm_strategy is dense";
    if (strcmp(strategy, "dense") == 0) return NEXUS_DENSE;
    *why = "no slow link was measured";
    if (strcmp(strategy, "hybrid") == 0) return NEXUS_DENSE;
    *why = experts ? "experts with little load" : "comm_strategy is sparse and there are no experts";
    if (!experts || strcmp(group, "low") == 0) return NEXUS_SPARSE;
    *why = "sparse is for experts with little load";
    return NEXUS_DENSE;
}

lf_status lf__nexus_choose_forms(lf_nexus *nexus)
{
    const bool experts = has_experts(&nexus->plan);
    for (int32_t i = 0; i < nexus->plan.n_chunks; i++) {
        nexus_chunk *c = &nexus->plan.chunks[i];
        c->form = form_of_group(nexus, c->group_name, experts, &c->why);
        c->topk = (lf_topk){.size = sizeof c->topk, .count = c->range.count, .dtype = c->dtype};
        if (c->form == NEXUS_DENSE) continue;
        const int64_t k = (int64_t)(nexus->opts.k_ratio * (double)c->range.count + 0.5);
        c->topk.k = k < 1 ? 1 : k > c->range.count ? c->range.count : k;
    }
    return LF_OK;
}
