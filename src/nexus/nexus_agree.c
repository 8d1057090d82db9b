/* SPDX-License-Identifier: Apache-2.0 */
/* Do all ranks have the same schedule? A transport can only sum, and sums answer that: over W ranks, W * sum(x^2) equals
 * (sum x)^2 exactly when all x are equal (Cauchy-Schwarz). x are 16-bit words of digests, so for W up to 2^15 nothing
 * overflows 63 bits. */
#include <string.h>

#include "nexus_int.h"

enum { WORDS = 8, DIGESTS = 2, COUNT = 1 + 2 * WORDS * DIGESTS };

static void put_digest(lf__buf *text, uint8_t digest[16])
{
    lf__hash128 h = lf__hash(text->data, text->used, 0);
    lf__buf_free(text);
    for (int32_t i = 0; i < 8; i++) {
        digest[i] = (uint8_t)(h.hi >> (56 - 8 * i));
        digest[8 + i] = (uint8_t)(h.lo >> (56 - 8 * i));
    }
}

/* The map's own digest, which checkpoints hold, says nothing of a class's gradients and moments. */
static lf_status map_digest(const lf_map *map, uint8_t digest[16])
{
    lf__buf text = {.max = 1 << 20};
    lf_status rc = lf_map_digest(map, digest);
    if (rc == LF_OK) rc = lf__buf_add(&text, digest, 16);
    for (int32_t k = 0; k < lf_map_n_classes(map) && rc == LF_OK; k++) {
        lf_class_info info = {.size = sizeof info};
        rc = lf_map_get_class(map, k, &info);
        for (int32_t role = 0; role < LF_N_ROLES && rc == LF_OK; role++) rc = lf__buf_printf(&text, " %d", info.role_dtype[role]);
    }
    if (rc == LF_OK) put_digest(&text, digest);
    else lf__buf_free(&text);
    return rc;
}

/* What shapes the schedule, the launches or the meaning of the sums, besides the map. */
static lf_status options_digest(const lf_nexus *nexus, uint8_t digest[16])
{
    lf__buf text = {.max = 1 << 26};
    lf_status rc =
        lf__buf_printf(&text, "nexus 9 %s %s %s %lld %lld %s %d %lld %d %d %d %d %lld %lld %d", nexus->transport.name,
                       nexus->opts.comm_strategy, nexus->opts.wire_dtype, (long long)nexus->opts.chunk_bytes,
                       (long long)nexus->opts.run_bytes, nexus->opts.reduce, nexus->plan.n_chunks, (long long)nexus->steps_before,
                       nexus->opts.shard_optimizer, nexus->opts.debug, nexus->opts.skip_empty, nexus->opts.chunk_tune,
                       (long long)nexus->opts.chunk_least, (long long)nexus->opts.chunk_most, nexus->opts.every_micro_step);
    for (int32_t i = 0; i < nexus->plan.n_chunks && rc == LF_OK && (nexus->sparse.n_chunks || nexus->wire); i++) {
        const nexus_chunk *c = &nexus->plan.chunks[i];
        if (c->form == NEXUS_SPARSE) rc = lf__buf_add(&text, &c->topk.k, sizeof c->topk.k);
        else rc = lf__buf_printf(&text, c->form == NEXUS_BF16 ? "b" : "-");
    }
    if (rc == LF_OK) rc = lf__buf_printf(&text, "%lld", (long long)nexus->opts.sparse_warmup_steps);
    if (rc == LF_OK) put_digest(&text, digest);
    else lf__buf_free(&text);
    return rc;
}

/* sums: 1, then for each digest its words and their squares. */
static void fill_terms(int64_t terms[COUNT], const uint8_t digest[DIGESTS][16])
{
    terms[0] = 1;
    for (int32_t d = 0; d < DIGESTS; d++)
        for (int32_t w = 0; w < WORDS; w++) {
            int64_t x = digest[d][2 * w] * 256 + digest[d][2 * w + 1];
            terms[1 + d * 2 * WORDS + w] = x;
            terms[1 + d * 2 * WORDS + WORDS + w] = x * x;
        }
}

static bool all_equal(const int64_t sums[COUNT], int32_t d, int64_t world)
{
    for (int32_t w = 0; w < WORDS; w++) {
        int64_t sum = sums[1 + d * 2 * WORDS + w], squares = sums[1 + d * 2 * WORDS + WORDS + w];
        if (world * squares != sum * sum) return false;
    }
    return true;
}

static lf_status judge(const lf_nexus *nexus, const int64_t sums[COUNT], const uint8_t digest[16])
{
    const int32_t world = nexus->transport.world;
    char hex[33];
    lf__hash128 h = {0};
    for (int32_t i = 0; i < 8; i++) {
        h.hi = h.hi << 8 | digest[i];
        h.lo = h.lo << 8 | digest[8 + i];
    }
    lf__hash_hex(h, hex);
    if (sums[0] != world)
        return LF_FAIL(LF_ERR_PEER, "transport %s summed over %lld ranks, expected %d; hint: do all ranks see the same world?",
                       nexus->transport.name, (long long)sums[0], world);
    if (!all_equal(sums, 0, world))
        return LF_FAIL(LF_ERR_PEER,
                       "the %d ranks planned different maps (rank %d: %s), expected one; hint: the same model, dtypes, frozen "
                       "parameters and [map] options on every rank",
                       world, nexus->transport.rank, hex);
    if (!all_equal(sums, 1, world))
        return LF_FAIL(
            LF_ERR_PEER,
            "the %d ranks use different [nexus] options (rank %d: transport %s, comm_strategy %s, wire_dtype %s, chunk_bytes %lld, "
            "chunk_tune %d (%lld to %lld), run_bytes %lld, reduce %s, k_ratio %g, sparse_warmup_steps %lld, shard_optimizer %d, skip_empty %d, every_micro_step %d, after %lld steps), expected the "
            "same on every rank",
            world, nexus->transport.rank, nexus->transport.name, nexus->opts.comm_strategy, nexus->opts.wire_dtype,
            (long long)nexus->opts.chunk_bytes, nexus->opts.chunk_tune, (long long)nexus->opts.chunk_least,
            (long long)nexus->opts.chunk_most, (long long)nexus->opts.run_bytes, nexus->opts.reduce, nexus->opts.k_ratio,
            (long long)nexus->opts.sparse_warmup_steps, nexus->opts.shard_optimizer, nexus->opts.skip_empty,
            nexus->opts.every_micro_step, (long long)nexus->steps_before);
    return LF_OK;
}

lf_status lf__nexus_agree(lf_nexus *nexus)
{
    uint8_t digest[DIGESTS][16];
    int64_t terms[COUNT], ticket = 0;
    void *shared = NULL;
    lf_status rc = LF_OK;
    LF_TRY(map_digest(nexus->map, digest[0]));
    LF_TRY(options_digest(nexus, digest[1]));
    fill_terms(terms, (const uint8_t(*)[16])digest);
    LF_TRY(lf_device_alloc(nexus->device, sizeof terms, &shared));
    LF_TRY(lf_copy(nexus->device, shared, terms, sizeof terms, NULL));
    rc = lf__nexus_post(nexus, shared, COUNT, LF_DTYPE_I64, NULL, &ticket);
    if (rc == LF_OK) rc = lf__nexus_wait(nexus, ticket, NULL);
    if (rc < 0) LF_TRY(lf__fail_prefix(rc, "comparing the map over %d ranks", nexus->transport.world));
    LF_TRY(lf_copy(nexus->device, terms, shared, sizeof terms, NULL));
    LF_TRY(judge(nexus, terms, digest[0]));
out:
    lf_device_free(nexus->device, shared);
    return rc;
}
