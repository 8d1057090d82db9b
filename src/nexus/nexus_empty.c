/* SPDX-License-Identifier: Apache-2.0 */
/* Experts without a token on any rank: their chunks are zeros everywhere, and need not move. */
#include <string.h>

#include "nexus_int.h"

lf_status lf__empty_open(lf_nexus *nexus)
{
    if (!nexus->opts.skip_empty) return LF_OK;
    if (nexus->chain)
        return LF_FAIL(
            LF_ERR_INVALID,
            "skip_empty with chunks in the sparse form, which send what earlier steps kept back; hint: comm_strategy = "
            "dense");
    const size_t n = (size_t)nexus->plan.n_blocks;
    nexus->tokens = lf__alloc_array(n, sizeof *nexus->tokens);
    nexus->is_expert = lf__alloc(n);
    if (!nexus->tokens || !nexus->is_expert) return LF_FAIL(LF_ERR_NOMEM, "tokens of %zu blocks", n);
    for (int32_t b = 0; b < nexus->plan.n_blocks; b++) {
        lf_block_info block = {.size = sizeof block};
        const lf_status rc = lf_map_get_block(nexus->map, b, &block);
        if (rc < 0) return rc;
        nexus->is_expert[b] = nexus->plan.owner[b] == b && block.expert >= 0;
    }
    return lf_device_alloc(nexus->device, n * sizeof *nexus->tokens, &nexus->shared_tokens);
}

void lf__empty_close(lf_nexus *nexus)
{
    if (nexus->shared_tokens) lf_device_free(nexus->device, nexus->shared_tokens);
    lf__free(nexus->tokens);
    lf__free(nexus->is_expert);
}

/* Sums over ranks into nexus->tokens; the host waits. */
static lf_status sum_tokens(lf_nexus *nexus)
{
    const size_t bytes = (size_t)nexus->plan.n_blocks * sizeof *nexus->tokens;
    int64_t ticket = 0;
    lf_status rc = LF_OK;
    nexus->ran = true;
    LF_TRY(lf_copy(nexus->device, nexus->shared_tokens, nexus->tokens, bytes, NULL));
    LF_TRY(lf__nexus_post(nexus, nexus->shared_tokens, nexus->plan.n_blocks, LF_DTYPE_I64, NULL, &ticket));
    LF_TRY(lf__nexus_wait(nexus, ticket, NULL));
    LF_TRY(lf_copy(nexus->device, nexus->tokens, nexus->shared_tokens, bytes, NULL));
out:
    return rc < 0 ? lf__fail_prefix(rc, "agreeing on empty experts") : rc;
}

static void choose_chunks(lf_nexus *nexus)
{
    const nexus_schedule *plan = &nexus->plan;
    for (int32_t i = 0; i < plan->n_chunks; i++) plan->chunks[i].skip = plan->chunks[i].n_blocks > 0;
    for (int32_t b = 0; b < plan->n_blocks; b++) {
        if (nexus->is_expert[b] && nexus->tokens[b] == 0) continue;
        for (int32_t k = plan->first_of[b]; k < plan->first_of[b + 1]; k++) plan->chunks[plan->chunk_of[k]].skip = false;
    }
}

lf_status lf_nexus_present(lf_nexus *nexus, const int64_t *tokens)
{
    LF_CHECK_ARG(nexus && tokens, "nexus or tokens is NULL");
    lf_status rc = LF_OK;
    lf__lock(nexus->mutex);
    LF_TRY(lf__nexus_check_health(nexus));
    if (!nexus->tokens) LF_THROW(LF_ERR_STATE, "tokens are told without skip_empty, or without a transport");
    if (!nexus->running || nexus->told || memchr(nexus->marked, 1, (size_t)nexus->plan.n_blocks))
        LF_THROW(LF_ERR_STATE, "tokens are told once a step: after lf_nexus_begin and before the first mark");
    for (int32_t b = 0; b < nexus->plan.n_blocks; b++) {
        if (tokens[b] < 0) LF_THROW(LF_ERR_INVALID, "block %d has %lld tokens, expected 0 or more", b, (long long)tokens[b]);
        nexus->tokens[b] = nexus->is_expert[b] ? tokens[b] : 0;
    }
    nexus->told = true;
    rc = sum_tokens(nexus);
    if (rc < 0) LF_TRY(lf__nexus_fail_step(nexus, rc));
    choose_chunks(nexus);
out:
    lf__unlock(nexus->mutex);
    return rc;
}

/* The sum of nothing, whatever an earlier step left there. */
lf_status lf__empty_clear(lf_nexus *nexus, const nexus_chunk *c, lf_stream *stream)
{
    nexus->skipped++;
    nexus->skipped_bytes += lf__nexus_sent_bytes(c);
    return lf_fill(nexus->device, c->data, 0, (size_t)c->bytes, stream);
}
