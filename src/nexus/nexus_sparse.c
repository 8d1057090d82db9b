/* SPDX-License-Identifier: Apache-2.0 */
/* The sparse form of one chunk: its memory, and what happens to it before and after each of its two sums.
 *
 * In each step one rank in turn selects the largest entries of its gradient + residual; the mask goes to all ranks as a sum of words in
 * which the others have zeros; then every rank packs its own entries at the mask's places, and their sum is an ordinary one. */
#include "nexus_int.h"

enum { ALIGN = 256 };

static int64_t mask_bytes(const nexus_chunk *c) { return (c->range.count + 63) / 64 * (int64_t)sizeof(int64_t); }
static int64_t value_bytes(const nexus_chunk *c) { return c->topk.k * (int64_t)lf_dtype_bytes(c->dtype); }

/* Places of all sparse chunks, one behind another; with memory their addresses too. */
static void lay_out(lf_nexus *nexus)
{
    nexus_sparse *s = &nexus->sparse;
    int64_t residual = 0, wire = 0;
    for (int32_t i = 0; i < nexus->plan.n_chunks; i++) {
        nexus_chunk *c = &nexus->plan.chunks[i];
        if (c->form != NEXUS_SPARSE) continue;
        if (s->wire) {
            c->topk.residual = (float *)((char *)s->residuals + residual);
            c->topk.mask = (int64_t *)((char *)s->wire + wire);
            c->topk.values = (char *)s->wire + wire + lf__round_up(mask_bytes(c), ALIGN);
            c->topk.scratch = s->scratch;
        }
        residual += lf__round_up(c->range.count * (int64_t)sizeof(float), ALIGN);
        wire += lf__round_up(mask_bytes(c), ALIGN) + lf__round_up(value_bytes(c), ALIGN);
    }
    s->residual_bytes = residual;
    s->wire_bytes = wire;
}

lf_status lf__sparse_open(lf_nexus *nexus)
{
    nexus_sparse *s = &nexus->sparse;
    int64_t largest = 0;
    lf_status rc = LF_OK;
    for (int32_t i = 0; i < nexus->plan.n_chunks; i++) {
        nexus_chunk *c = &nexus->plan.chunks[i];
        c->topk.data = c->topk.out = c->data;
        c->topk.factor = c->factor;
        c->topk.keep = nexus->opts.error_feedback;
        if (c->form != NEXUS_SPARSE) continue;
        s->n_chunks++;
        if (c->range.count > largest) largest = c->range.count;
        if (c->range.count >= 1ll << 32)
            return LF_FAIL(LF_ERR_UNSUPPORTED,
                           "a sparse chunk of %lld elements, expected fewer than 2^32; hint: smaller chunk_bytes",
                           (long long)c->range.count);
    }
    if (!s->n_chunks) return LF_OK;
    lay_out(nexus);
    LF_TRY(lf_device_alloc(nexus->device, (size_t)s->residual_bytes, &s->residuals));
    LF_TRY(lf_device_alloc(nexus->device, (size_t)lf_topk_scratch_bytes(largest), &s->scratch));
    LF_TRY(lf_device_alloc(nexus->device, (size_t)s->wire_bytes, &s->wire));
    LF_TRY(lf_fill(nexus->device, s->residuals, 0, (size_t)s->residual_bytes, NULL));
    LF_TRY(lf_fill(nexus->device, s->wire, 0, (size_t)s->wire_bytes, NULL));
    lay_out(nexus);
out:
    return rc;
}

void lf__sparse_drop_residual(lf_nexus *nexus, nexus_chunk *c)
{
    if (!c->own_residual) return;
    lf_device_free(nexus->device, c->topk.residual);
    c->topk.residual = NULL;
    c->own_residual = false;
}

void lf__sparse_close(lf_nexus *nexus)
{
    nexus_sparse *s = &nexus->sparse;
    for (int32_t i = 0; i < nexus->plan.n_chunks; i++) lf__sparse_drop_residual(nexus, &nexus->plan.chunks[i]);
    lf_device_free(nexus->device, s->residuals);
    lf_device_free(nexus->device, s->scratch);
    lf_device_free(nexus->device, s->wire);
    *s = (nexus_sparse){0};
}

/* What was loaded for dense chunks and has gone into a step is dropped; whether there is more. */
static bool keep_own(lf_nexus *nexus)
{
    bool any = false;
    for (int32_t i = 0; i < nexus->plan.n_chunks; i++) {
        if (nexus->sparse.own) lf__sparse_drop_residual(nexus, &nexus->plan.chunks[i]);
        any |= nexus->plan.chunks[i].own_residual;
    }
    return any;
}

/* Whether this step is sparse, from what all ranks know alike. What is kept back of dense chunks goes into the next step whatever that
 * is, and needs no agreement: it is this rank's own. */
void lf__sparse_begin(lf_nexus *nexus)
{
    nexus_sparse *s = &nexus->sparse;
    const int64_t step = nexus->steps_before + nexus->steps;
    if (!s->n_chunks && !s->dirty && !s->own) return;
    s->own = keep_own(nexus);
    s->was_dirty = s->dirty;
    s->was_asked = s->asked;
    s->turn = step % nexus->transport.world;
    s->now = s->n_chunks && !s->asked && step >= nexus->opts.sparse_warmup_steps;
    s->flushing = s->dirty && !s->now;
    s->dirty = s->now && nexus->opts.error_feedback;
    s->asked = false;
}

/* Nothing of the step has run. */
void lf__sparse_cancel(lf_nexus *nexus)
{
    nexus_sparse *s = &nexus->sparse;
    if (!s->n_chunks && !s->was_dirty && !s->own) return;
    s->dirty = s->was_dirty;
    s->asked = s->was_asked;
    s->flushing = s->own = false;
}

static bool my_turn(const lf_nexus *nexus, int32_t chunk)
{
    return (nexus->sparse.turn + chunk) % nexus->transport.world == nexus->transport.rank;
}

lf_status lf__sparse_prepare(lf_nexus *nexus, int32_t chunk, lf_stream *stream)
{
    const nexus_chunk *c = &nexus->plan.chunks[chunk];
    if (c->topk.residual && (nexus->sparse.flushing || c->own_residual))
        return lf__nexus_topk(nexus->device, nexus->kernels, &c->topk, LF__TOPK_FLUSH, stream);
    if (!lf__sparse_now(nexus, c)) return LF_OK;
    lf_status rc = lf__nexus_topk(nexus->device, nexus->kernels, &c->topk, LF__TOPK_FOLD, stream);
    if (rc < 0) return rc;
    if (my_turn(nexus, chunk)) return lf__nexus_topk(nexus->device, nexus->kernels, &c->topk, LF__TOPK_SELECT, stream);
    return lf_fill(nexus->device, c->topk.mask, 0, (size_t)mask_bytes(c), stream);
}

lf_status lf__sparse_pack(lf_nexus *nexus, nexus_chunk *c, lf_stream *stream)
{
    return lf__nexus_topk(nexus->device, nexus->kernels, &c->topk, LF__TOPK_PACK, stream);
}

lf_status lf__sparse_scatter(lf_nexus *nexus, nexus_chunk *c, lf_stream *stream)
{
    return lf__nexus_topk(nexus->device, nexus->kernels, &c->topk, LF__TOPK_SCATTER, stream);
}
