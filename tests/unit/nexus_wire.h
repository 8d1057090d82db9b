/* SPDX-License-Identifier: Apache-2.0 */
/** @file nexus_wire.h  Steps whose f32 gradients travel as bf16, and a serial computation of what every bit of them must be. */
#ifndef LF_NEXUS_WIRE_H
#define LF_NEXUS_WIRE_H

#include "nexus_ranks.h"
#include "wire_cases.h"

/* Gradients of many magnitudes with all bits of f32; every third step has NaN, infinities and the like among them. */
static inline float wire_value(int32_t from, int32_t step, int32_t block, int64_t i)
{
    uint32_t h =
        (uint32_t)from * 0x9e3779b1u + (uint32_t)step * 0x85ebca77u + (uint32_t)block * 0xc2b2ae3du + (uint32_t)i * 0x27d4eb2fu;
    h = (h ^ h >> 15) * 0x2c1b3c6du;
    h ^= h >> 13;
    if (step % 3 == 2 && h % 64 == 0) return wire_float(wire_specials[(h >> 6) % LF_COUNT(wire_specials)]);
    return wire_float((h & 0x807fffffu) | (100 + (h >> 23) % 24) << 23);
}

/* With skip_empty one expert has no token on any rank. */
static inline bool wire_is_late(const rank *r, int32_t from, int32_t step, const lf_block_info *b)
{
    return is_late(from, step, b) || (r->opts.skip_empty && b->expert == 1);
}

static inline void wire_write(const rank *r, int32_t step, int32_t block, bool garbage)
{
    const lf_block_info b = block_at(r->map, block);
    const int32_t dtype = dtype_of(r->map, b.range.klass, LF_ROLE_GRAD);
    void *g = lf_map_address(r->map, &b.range, LF_ROLE_GRAD);
    for (int64_t i = 0; i < b.range.count; i++)
        if (dtype == LF_DTYPE_F32) ((float *)g)[i] = garbage ? 777 : wire_value(r->t.rank, step, block, i);
        else put(g, i, dtype, (double)(garbage ? 777 : wire_value(r->t.rank, step, block, i)));
}

static inline lf_status wire_tell_tokens(rank *r, int32_t step)
{
    int64_t tokens[200];
    for (int32_t b = 0; b < lf_map_n_blocks(r->map); b++) {
        const lf_block_info info = block_at(r->map, b);
        tokens[b] = !wire_is_late(r, r->t.rank, step, &info);
    }
    return lf_nexus_present(r->nexus, tokens);
}

/* Even steps are finished, odd ones taken run by run. */
static inline lf_status wire_step(rank *r, int32_t step)
{
    int32_t order[200], first, n;
    const int32_t n_blocks = lf_map_n_blocks(r->map);
    lf_status rc = lf_nexus_begin(r->nexus);
    if (rc == LF_OK && r->opts.skip_empty) rc = wire_tell_tokens(r, step);
    order_of_marks(r->t.rank, step, order, n_blocks);
    for (int32_t i = 0; i < n_blocks && rc == LF_OK; i++) {
        const lf_block_info b = block_at(r->map, order[i]);
        const bool late = wire_is_late(r, r->t.rank, step, &b);
        wire_write(r, step, order[i], late);
        if (!late) rc = lf_nexus_mark(r->nexus, order[i], r->stream);
    }
    if (rc == LF_OK && step % 2) rc = lf_nexus_flush(r->nexus, r->stream);
    while (rc == LF_OK && step % 2) rc = lf_nexus_take(r->nexus, r->stream, &first, &n);
    if (rc == LF_OK) rc = lf_nexus_finish(r->nexus, r->stream);
    return rc == LF_OK || rc == LF_END ? lf_stream_sync(r->stream) : rc;
}

/* What rank `from` gives to the sum: nothing where it is late; in bf16, or as it is. */
static inline float wire_given(const rank *r, int32_t from, int32_t step, const lf_block_info *b, int32_t block, int64_t i,
                               bool bf16)
{
    const float v = wire_is_late(r, from, step, b) ? 0 : wire_value(from, step, block, i);
    return bf16 ? wire_widen(wire_narrow(v), 1) : v;
}

/* The element after a step: rounded on each rank, added in rank order, rounded, widened, divided. A transport that divides (its `mean`)
 * does so before it adds. */
static inline float wire_wanted(const rank *r, const lf_chunk_info *c, int32_t step, const lf_block_info *b, int32_t block,
                                int64_t i)
{
    const bool bf16 = strcmp(c->form, "bf16") == 0 || c->dtype == LF_DTYPE_BF16, mean = strcmp(r->opts.reduce, "mean") == 0;
    const float factor = mean && !r->t.mean ? 1.0f / (float)r->t.world : 1;
    float sum = -0.0f; /* what adds nothing, to zeros neither */
    for (int32_t from = 0; from < r->t.world; from++) {
        const float v = wire_given(r, from, step, b, block, i, bf16);
        sum += r->t.mean ? v / (float)r->t.world : v;
    }
    if (!bf16) return factor == 1 ? sum : sum * factor;
    const float wide = wire_widen(wire_narrow(sum), factor);
    return c->dtype == LF_DTYPE_BF16 ? wire_widen(wire_narrow(wide), 1) : wide;
}

static inline bool lies_in(const lf_range *part, int64_t at) { return at >= part->offset && at < part->offset + part->count; }

static inline void wire_check_block(rank *r, const lf_chunk_info *c, int32_t step, int32_t block)
{
    const lf_block_info b = block_at(r->map, block);
    if (b.range.klass != c->range.klass) return;
    const void *g = lf_map_address(r->map, &b.range, LF_ROLE_GRAD);
    for (int64_t i = 0; i < b.range.count; i++) {
        const int64_t at = b.range.offset + i;
        if (!lies_in(&c->share, at) && !lies_in(&c->rest, at)) continue;
        const float got = (float)get(g, i, c->dtype), want = wire_wanted(r, c, step, &b, block, i);
        const bool same = wire_same(got, want) || (r->open_end && got == want); /* the fake NCCL has one zero */
        if (!same)
            WRONG("rank %d step %d %s[%d] (%s, %s): %.9g, expected %.9g", r->t.rank, step, b.name, (int)i, c->form,
                  lf_dtype_name(c->dtype), (double)got, (double)want);
    }
}

/* Every bit of this rank's part of all chunks but sparse ones. */
static inline void wire_check(rank *r, int32_t step)
{
    for (int32_t k = 0; k < lf_nexus_n_chunks(r->nexus); k++) {
        const lf_chunk_info c = chunk_at(r->nexus, k);
        if (strcmp(c.form, "sparse") == 0) continue;
        for (int32_t b = 0; b < lf_map_n_blocks(r->map); b++) wire_check_block(r, &c, step, b);
    }
}

static inline int64_t wire_sent(const lf_nexus *nexus)
{
    int64_t sent = 0;
    for (int32_t k = 0; k < lf_nexus_n_chunks(nexus); k++) sent += chunk_at(nexus, k).sent_bytes;
    return sent;
}

static inline void wire_steps(rank *r)
{
    for (int32_t step = 0; step < r->steps && r->status == LF_OK; step++) {
        r->status = wire_step(r, step);
        if (r->status == LF_OK) wire_check(r, step);
    }
}

#endif
