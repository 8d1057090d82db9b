/* SPDX-License-Identifier: Apache-2.0 */
/* Dense sums of f32 gradients that travel as bf16: a chunk is rounded into memory of our own when it is posted, summed there by the
 * transport, and widened back into the map when it is waited for.
 *
 * The wire holds such chunks one behind another in the schedule's order, with nothing between them: chunks of a run are neighbours, which
 * a transport may join into one operation, and the wire is as large however the map is cut. */
#include "nexus_int.h"

/* Around the wire: no operation on it touches one on other memory, which would then be joined on one rank and not on another. */
enum { MARGIN = 256 };

/* Bytes of all chunks; with memory their addresses too. */
static int64_t lay_out(nexus_schedule *plan, char *memory)
{
    int64_t at = 0;
    for (int32_t i = 0; i < plan->n_chunks; i++) {
        nexus_chunk *c = &plan->chunks[i];
        c->wire = memory && c->form == NEXUS_BF16 ? (uint16_t *)(memory + MARGIN + at) : NULL;
        if (c->form == NEXUS_BF16) at += lf__nexus_sent_bytes(c);
    }
    return at;
}

lf_status lf__wire_open(lf_nexus *nexus)
{
    const int64_t bytes = lay_out(&nexus->plan, nexus->wire);
    if (nexus->wire && bytes != nexus->wire_bytes)
        return LF_FAIL(LF_ERR_INTERNAL, "chunks of another size have %lld bytes in bf16, expected %lld", (long long)bytes,
                       (long long)nexus->wire_bytes);
    if (nexus->wire || bytes == 0) return LF_OK;
    const size_t room = (size_t)bytes + 2 * MARGIN;
    lf_status rc = lf_device_alloc(nexus->device, room, &nexus->wire);
    if (rc == LF_OK) rc = lf_fill(nexus->device, nexus->wire, 0, room, NULL);
    if (rc < 0) return rc;
    nexus->wire_bytes = bytes;
    lay_out(&nexus->plan, nexus->wire);
    return LF_OK;
}

void lf__wire_close(lf_nexus *nexus)
{
    lf_device_free(nexus->device, nexus->wire);
    nexus->wire = NULL;
}

void *lf__wire_memory(const lf_nexus *nexus) { return nexus->wire ? (char *)nexus->wire + MARGIN : NULL; }

/* ---- what of a chunk travels ------------------------------------------------------------------------------------------ */

int32_t lf__wire_dtype(const nexus_chunk *c) { return c->wire ? LF_DTYPE_BF16 : c->dtype; }

void *lf__wire_data(const nexus_chunk *c, const lf_range *part)
{
    return c->wire ? c->wire + (part->offset - c->range.offset) : lf__nexus_data(c, part);
}

/* ---- there and back --------------------------------------------------------------------------------------------------- */

/* A stream's worker runs these; the chunk holds what they need, so nothing is allocated. */
static lf_status run_narrow(void *user)
{
    const nexus_chunk *c = user;
    return lf__nexus_cpu.narrow(NULL, NULL, 1, c->data, c->wire, c->range.count);
}

static lf_status widen_part(lf_nexus *nexus, const nexus_chunk *c, const lf_range *part, lf_stream *stream)
{
    if (part->count == 0) return LF_OK;
    return nexus->kernels->widen(nexus->device->context, lf_stream_native(stream), stream == NULL, lf__wire_data(c, part),
                                 lf__nexus_data(c, part), part->count, c->factor);
}

static lf_status run_widen(void *user)
{
    const nexus_chunk *c = user;
    const lf_range *parts[] = {&c->share, &c->rest};
    lf_status rc = LF_OK;
    for (int32_t i = 0; i < 2 && rc == LF_OK; i++)
        if (parts[i]->count)
            rc = lf__nexus_cpu.widen(NULL, NULL, 1, lf__wire_data(c, parts[i]), lf__nexus_data(c, parts[i]), parts[i]->count,
                                     c->factor);
    return rc;
}

lf_status lf__wire_narrow(lf_nexus *nexus, nexus_chunk *c, lf_stream *stream)
{
    if (!c->wire) return LF_OK;
    if (lf__device_is_cpu(nexus->device)) return lf_stream_run(stream, run_narrow, c);
    return nexus->kernels->narrow(nexus->device->context, lf_stream_native(stream), stream == NULL, c->data, c->wire,
                                  c->range.count);
}

lf_status lf__wire_widen(lf_nexus *nexus, nexus_chunk *c, lf_stream *stream)
{
    if (lf__device_is_cpu(nexus->device)) return lf_stream_run(stream, run_widen, c);
    lf_status rc = widen_part(nexus, c, &c->share, stream);
    return rc == LF_OK ? widen_part(nexus, c, &c->rest, stream) : rc;
}
