/* SPDX-License-Identifier: Apache-2.0 */
/* The option debug: before each collective of a step, or run of them, one small sum tells whether all ranks are about to do the
 * same: every rank puts a hash of that into its own place among zeros, so the sum is the list of all. Without it ranks that differ
 * hang, or sum what does not belong together.
 *
 * Waits must come in order of posts, so all that was posted is waited for before a comparison: nothing overlaps. Such posts stand in
 * a ring until their own wait comes, which is then done at once. What is posted to a capture is neither compared nor waited for. */
#include <stdio.h>
#include <string.h>

#include "nexus_int.h"

enum { MOST_NAMED = 8 };

typedef struct nexus_debug {
    int64_t *host, turn;                   /* (world); compared so far */
    void *shared;                          /* on the device: what is summed */
    int64_t *tickets;                      /* (room), a ring: posts that no caller has waited for */
    int64_t room, posted, settled, waited; /* settled: of these, waited for here; waited <= settled <= posted */
} nexus_debug;

/* A whole step's shares, rests and gathers. */
static int64_t room_for(const lf_nexus *nexus) { return 3 * (int64_t)nexus->plan.n_chunks + 2; }

lf_status lf__debug_open(lf_nexus *nexus)
{
    if (!nexus->opts.debug) return LF_OK;
    nexus_debug *d = nexus->debug = lf__alloc(sizeof *d);
    if (!d) return LF_FAIL(LF_ERR_NOMEM, "nexus");
    const size_t world = (size_t)nexus->transport.world;
    d->host = lf__alloc_array(world, sizeof *d->host);
    if (!d->host) return LF_FAIL(LF_ERR_NOMEM, "nexus");
    d->room = room_for(nexus);
    d->tickets = lf__alloc_array((size_t)d->room, sizeof *d->tickets);
    if (!d->tickets) return LF_FAIL(LF_ERR_NOMEM, "nexus");
    return lf_device_alloc(nexus->device, world * sizeof *d->host, &d->shared);
}

lf_status lf__debug_resize(lf_nexus *nexus)
{
    nexus_debug *d = nexus->debug;
    if (!d) return LF_OK;
    const int64_t room = room_for(nexus);
    int64_t *tickets = lf__alloc_array((size_t)room, sizeof *tickets);
    if (!tickets) return LF_FAIL(LF_ERR_NOMEM, "nexus");
    lf__free(d->tickets);
    d->tickets = tickets;
    d->room = room;
    return LF_OK;
}

void lf__debug_close(lf_nexus *nexus)
{
    nexus_debug *d = nexus->debug;
    if (!d) return;
    lf_device_free(nexus->device, d->shared);
    lf__free(d->host);
    lf__free(d->tickets);
    lf__free(d);
    nexus->debug = NULL;
}

lf_status lf__debug_posted(lf_nexus *nexus, int64_t ticket, lf_stream *stream)
{
    nexus_debug *d = nexus->debug;
    uint64_t capture = 0;
    if (!d) return LF_OK;
    lf_status rc = lf__stream_capture(stream, &capture);
    if (rc < 0 || capture) return rc;
    if (d->posted - d->waited == d->room) return LF_FAIL(LF_ERR_INTERNAL, "debug: %lld posts without a wait", (long long)d->room);
    d->tickets[d->posted++ % d->room] = ticket;
    return LF_OK;
}

bool lf__debug_has_waited(lf_nexus *nexus, int64_t ticket)
{
    nexus_debug *d = nexus->debug;
    if (!d || d->waited == d->posted || d->tickets[d->waited % d->room] != ticket) return false;
    if (d->waited++ < d->settled) return true;
    d->settled = d->waited;
    return false;
}

static lf_status wait_on_host(lf_nexus *nexus, int64_t ticket)
{
    const lf_transport *t = &nexus->transport;
    lf_error_clear();
    return lf__nexus_answer(nexus, "wait", t->wait(t->user, ticket, NULL, nexus->opts.timeout_s));
}

/* All posts so far, in order. */
static lf_status settle(lf_nexus *nexus)
{
    nexus_debug *d = nexus->debug;
    for (lf_status rc; d->settled < d->posted; d->settled++)
        if ((rc = wait_on_host(nexus, d->tickets[d->settled % d->room])) < 0)
            return lf__fail_prefix(rc, "debug: collective %lld that was posted", (long long)d->settled);
    return LF_OK;
}

/* host[rank] = own, 0 elsewhere -> the values of all ranks */
static lf_status exchange(lf_nexus *nexus, int64_t own)
{
    nexus_debug *d = nexus->debug;
    const lf_transport *t = &nexus->transport;
    const size_t bytes = (size_t)t->world * sizeof *d->host;
    int64_t ticket = 0;
    lf_status rc = LF_OK;
    memset(d->host, 0, bytes);
    d->host[t->rank] = own;
    LF_TRY(lf_copy(nexus->device, d->shared, d->host, bytes, NULL));
    lf_error_clear();
    LF_TRY(lf__nexus_answer(nexus, "post", t->post(t->user, d->shared, t->world, LF_DTYPE_I64, NULL, &ticket)));
    LF_TRY(wait_on_host(nexus, ticket));
    LF_TRY(lf_copy(nexus->device, d->host, d->shared, bytes, NULL));
out:
    return rc;
}

static int64_t digest_of(lf_nexus *nexus, nexus_stage stage, int32_t first, int32_t end, int64_t count, int32_t dtype)
{
    const int64_t head[] = {nexus->debug->turn, stage, first, end, count, dtype};
    lf__hash128 h = lf__hash(head, sizeof head, 0);
    for (int32_t i = first; i < end; i++) {
        const nexus_chunk *c = &nexus->plan.chunks[i];
        const int64_t terms[] = {(int64_t)h.hi,  (int64_t)h.lo,     c->range.klass,           c->range.offset,
                                 c->range.count, lf__wire_dtype(c), lf__sparse_now(nexus, c), c->skip};
        h = lf__hash(terms, sizeof terms, 0);
    }
    return (int64_t)(h.lo >> 1) | 1; /* never 0: a rank that sent nothing is none that agrees */
}

/* "chunks 3 to 5 of 9 (group high, 8192 bytes)" */
static void describe(const lf_nexus *nexus, nexus_stage stage, int32_t first, int32_t end, int64_t count, int32_t dtype,
                     char *text, size_t size)
{
    int64_t bytes = 0;
    if (stage == NEXUS_BESIDE) {
        snprintf(text, size, "a sum of %lld %s beside the gradients", (long long)count, lf_dtype_name(dtype));
        return;
    }
    for (int32_t i = first; i < end; i++) bytes += nexus->plan.chunks[i].bytes;
    snprintf(text, size, "%s chunk%s %d to %d of %d (group %s, %lld bytes)",
             stage == NEXUS_VALUES   ? "the values of"
             : stage == NEXUS_SHARES ? "the shares of"
                                     : "the sums of",
             end - first > 1 ? "s" : "", first, end - 1, nexus->plan.n_chunks, nexus->plan.chunks[first].group_name,
             (long long)bytes);
}

/* The ranks that are about to do something else, "0, 2, 5 and 7 more". */
static int32_t list_others(const nexus_debug *d, int32_t world, int64_t own, char *text, size_t size)
{
    int32_t n = 0;
    size_t used = 0;
    text[0] = 0;
    for (int32_t r = 0; r < world; r++) {
        if (d->host[r] == own) continue;
        if (n++ < MOST_NAMED) used += (size_t)snprintf(text + used, size - used, "%s%d", n > 1 ? ", " : "", r);
    }
    if (n > MOST_NAMED) snprintf(text + used, size - used, " and %d more", n - MOST_NAMED);
    return n;
}

lf_status lf__debug_compare(lf_nexus *nexus, nexus_stage stage, int32_t first, int32_t end, int64_t count, int32_t dtype,
                            lf_stream *stream)
{
    nexus_debug *d = nexus->debug;
    char what[200], others[MOST_NAMED * 8 + 32];
    uint64_t capture = 0;
    lf_status rc = LF_OK;
    if (!d) return LF_OK;
    LF_TRY(lf__stream_capture(stream, &capture));
    if (capture) return LF_OK;
    LF_TRY(settle(nexus));
    const int32_t world = nexus->transport.world;
    const int64_t own = digest_of(nexus, stage, first, end, count, dtype);
    describe(nexus, stage, first, end, count, dtype, what, sizeof what);
    rc = exchange(nexus, own);
    if (rc < 0) LF_TRY(lf__fail_prefix(rc, "debug: comparing what ranks do next, here %s", what));
    if (list_others(d, world, own, others, sizeof others))
        LF_THROW(LF_ERR_PEER,
                 "debug: the ranks are not about to do the same: rank %d, collective %lld: %s; something else: rank %s; hint: "
                 "do all ranks run the same steps, and make the same calls between them?",
                 nexus->transport.rank, (long long)d->turn, what, others);
    d->turn++;
out:
    return rc;
}
