/* SPDX-License-Identifier: Apache-2.0 */
/* A step of reductions: marks come in, chunks go out in order, finish waits for all of them. */
#include <string.h>

#include "nexus_int.h"

/* ---- opening --------------------------------------------------------------------------------------------------------- */

lf_status lf__nexus_find_kernels(lf_device *device, const lf__nexus_kernels **kernels)
{
    const void *found = &lf__nexus_cpu;
    lf_status rc = lf__device_is_cpu(device) ? LF_OK : lf__device_kernels(device, "nexus", &found);
    *kernels = found;
    if (rc == LF_OK && (*kernels)->size != sizeof(lf__nexus_kernels))
        return LF_FAIL(LF_ERR_UNSUPPORTED, "kernels %s have a table of %u bytes, expected %zu; hint: rebuild both together",
                       (*kernels)->name, (*kernels)->size, sizeof(lf__nexus_kernels));
    return rc;
}

lf_status lf__nexus_resolve_chunks(lf_nexus *nexus)
{
    for (int32_t i = 0; i < nexus->plan.n_chunks; i++) {
        nexus_chunk *c = &nexus->plan.chunks[i];
        if (c->dtype != LF_DTYPE_F32 && c->dtype != LF_DTYPE_BF16)
            return LF_FAIL(LF_ERR_UNSUPPORTED, "gradients are %s, expected f32 or bf16; hint: [map] grad_f32 = true",
                           lf_dtype_name(c->dtype));
        c->data = lf_map_address(nexus->map, &c->range, LF_ROLE_GRAD);
        if (!c->data) return LF_FAIL(LF_ERR_INTERNAL, "chunk %d has no address", i);
        c->factor = strcmp(nexus->opts.reduce, "mean") == 0 && !nexus->transport.mean ? 1.0f / (float)nexus->transport.world : 1;
    }
    return LF_OK;
}

static lf_status open_for_steps(lf_nexus *nexus, const lf_transport *transport)
{
    lf_status rc = lf__nexus_take_transport(nexus, transport);
    if (rc < 0) return rc;
    nexus->device = lf_map_device(nexus->map);
    if (!nexus->device) return LF_FAIL(LF_ERR_STATE, "the map is not allocated; hint: lf_map_allocate before lf_nexus_open");
    rc = lf__nexus_find_kernels(nexus->device, &nexus->kernels);
    if (rc == LF_OK) rc = lf__nexus_choose_forms(nexus);
    if (rc == LF_OK) rc = lf_event_open(nexus->device, &nexus->event);
    if (rc == LF_OK) rc = lf__nexus_spans_open(nexus);
    if (rc == LF_OK) rc = lf__nexus_resolve_chunks(nexus);
    if (rc == LF_OK) rc = lf__wire_open(nexus);
    if (rc == LF_OK) rc = lf__sparse_open(nexus);
    if (rc == LF_OK) rc = lf__chain_open(nexus);
    if (rc == LF_OK) rc = lf__shard_open(nexus);
    if (rc == LF_OK) rc = lf__empty_open(nexus);
    if (rc == LF_OK) rc = lf__tune_open(nexus);
    if (rc == LF_OK) rc = lf__nexus_agree(nexus);
    if (rc == LF_OK) rc = lf__debug_open(nexus);
    return rc == LF_OK ? lf__nexus_announce_memory(nexus) : rc;
}

static void free_nexus(lf_nexus *nexus)
{
    if (!nexus) return;
    lf__chain_close(nexus);
    lf__sparse_close(nexus);
    lf__wire_close(nexus);
    lf_event_close(nexus->event);
    lf__nexus_spans_close(nexus);
    lf__nexus_trace_close(nexus);
    lf__debug_close(nexus);
    lf__tune_close(nexus);
    lf__nexus_schedule_free(&nexus->plan);
    for (int32_t i = 0; i < nexus->n_superseded; i++) lf__free(nexus->superseded[i]);
    lf__free(nexus->superseded);
    lf__mutex_close(nexus->mutex);
    lf__free(nexus->marked);
    lf__free(nexus->gather_ticket);
    lf__free(nexus->why);
    lf__empty_close(nexus);
    lf_map_unref(nexus->map);
    lf__free(nexus);
}

/* Options that do not go together. */
static lf_status check_options(const lf_nexus_options *o)
{
    LF_CHECK_ARG(o->chunk_least <= o->chunk_most, "chunk_least is %lld, expected at most chunk_most, %lld",
                 (long long)o->chunk_least, (long long)o->chunk_most);
    if (!o->every_micro_step) return LF_OK;
    LF_CHECK_ARG(strcmp(o->reduce, "mean") == 0,
                 "every_micro_step is true and reduce is %s, expected mean: a sum would count earlier micro-steps once a rank",
                 o->reduce);
    LF_CHECK_ARG(strcmp(o->comm_strategy, "sparse") != 0 && !o->shard_optimizer && !o->skip_empty,
                 "every_micro_step is true, expected no %s beside it: gradients of earlier micro-steps would be lost",
                 o->shard_optimizer ? "shard_optimizer"
                 : o->skip_empty    ? "skip_empty"
                                    : "comm_strategy sparse");
    return LF_OK;
}

lf_status lf_nexus_open(lf_nexus **out, lf_map *map, const lf_transport *transport, const lf_nexus_options *opts)
{
    LF_CHECK_ARG(out && map, "out or map is NULL");
    *out = NULL;
    lf_status rc = LF_OK;
    lf_nexus *nexus = lf__alloc(sizeof *nexus);
    if (!nexus) return LF_FAIL(LF_ERR_NOMEM, "nexus");
    nexus->map = lf_map_ref(map);
    LF_TRY(lf__options_take("nexus", &nexus->opts, sizeof nexus->opts, opts));
    LF_TRY(check_options(&nexus->opts));
    if (lf_map_n_groups(map) == 0) LF_THROW(LF_ERR_STATE, "the map is not planned; hint: lf_map_plan before lf_nexus_open");
    LF_TRY(lf__nexus_schedule(&nexus->plan, map, nexus->opts.chunk_bytes, nexus->opts.run_bytes));
    if (!transport) LF_TRY(lf__nexus_choose_forms(nexus));
    nexus->mutex = lf__mutex_open();
    nexus->marked = lf__alloc((size_t)nexus->plan.n_blocks);
    if (!nexus->mutex || !nexus->marked) LF_THROW(LF_ERR_NOMEM, "nexus");
    LF_TRY(lf__nexus_trace_open(nexus));
    if (transport) LF_TRY(open_for_steps(nexus, transport));
    *out = nexus;
    return LF_OK;
out:
    free_nexus(nexus);
    return rc;
}

void lf_nexus_close(lf_nexus *nexus)
{
    if (!nexus) return;
    lf__chain_stop(nexus);
    if (nexus->transport.close) nexus->transport.close(nexus->transport.user);
    free_nexus(nexus);
}

int32_t lf_nexus_n_chunks(const lf_nexus *nexus) { return nexus ? nexus->plan.n_chunks : 0; }

lf_status lf_nexus_get_chunk(const lf_nexus *nexus, int32_t chunk, lf_chunk_info *info)
{
    LF_CHECK_ARG(nexus && info, "nexus or info is NULL");
    LF_CHECK_ARG(chunk >= 0 && chunk < nexus->plan.n_chunks, "chunk %d, expected 0 to %d", chunk, nexus->plan.n_chunks - 1);
    LF_CHECK_ARG(info->size == sizeof *info, "lf_chunk_info: size is %zu, expected %zu", info->size, sizeof *info);
    const nexus_chunk *c = &nexus->plan.chunks[chunk];
    *info = (lf_chunk_info){.size = sizeof *info,
                            .group = c->group,
                            .dtype = c->dtype,
                            .range = c->range,
                            .bytes = c->bytes,
                            .form = lf__nexus_form_name(c->form),
                            .run = c->run,
                            .why = c->why,
                            .sent_bytes = lf__nexus_sent_bytes(c),
                            .share = nexus->sharded ? c->share : c->range,
                            .rest = c->rest};
    return LF_OK;
}

/* ---- failures --------------------------------------------------------------------------------------------------------- */

/* The step is over, and so is the handle: ranks may have summed different things. */
lf_status lf__nexus_fail_step(lf_nexus *nexus, lf_status rc)
{
    lf__fault_keep(&nexus->fault, rc);
    nexus->running = false;
    return rc;
}

lf_status lf__nexus_fail_prefix(const lf_nexus *nexus, int32_t chunk, lf_status rc)
{
    const nexus_chunk *c = &nexus->plan.chunks[chunk];
    return lf__fail_prefix(rc, "chunk %d of %d (group %s, class %d, elements %lld to %lld)", chunk, nexus->plan.n_chunks,
                           c->group_name, c->range.klass, (long long)c->range.offset,
                           (long long)(c->range.offset + c->range.count));
}

static lf_status fail_chunk(lf_nexus *nexus, int32_t i, lf_status rc)
{
    return lf__nexus_fail_step(nexus, lf__nexus_fail_prefix(nexus, i, rc));
}

/* The handle's error, or one that the transport has found meanwhile. */
lf_status lf__nexus_check_health(lf_nexus *nexus)
{
    lf_status rc = lf__fault_raise(&nexus->fault);
    if (rc == LF_OK) rc = lf__chain_check(nexus);
    if (rc == LF_OK && !lf__chain_has_transport(nexus)) rc = lf__nexus_call_check(nexus);
    return rc < 0 ? lf__nexus_fail_step(nexus, rc) : rc;
}

/* ---- order between streams ------------------------------------------------------------------------------------------- */

/* Everything marked so far is to happen before whatever follows on `stream`. Streams with a native handle that does not change
 * from mark to mark, the usual case, cost nothing: only a change of stream records an event. On the CPU, whose streams have no
 * native handle, every mark records one. */
static lf_status order_behind_marks(lf_nexus *nexus, lf_stream *stream)
{
    lf_status rc = LF_OK;
    lf_stream *last = NULL;
    void *native = lf_stream_native(stream);
    if (native && native == nexus->native) return LF_OK;
    if (nexus->native) {
        LF_TRY(lf_stream_wrap(nexus->device, nexus->native, &last));
        LF_TRY(lf__event_mark(nexus->event, last));
        nexus->event_used = true;
    }
    if (nexus->event_used) LF_TRY(stream ? lf_stream_wait(stream, nexus->event) : lf_event_sync(nexus->event));
    nexus->native = native;
    if (stream && !native) {
        LF_TRY(lf__event_mark(nexus->event, stream));
        nexus->event_used = true;
    }
out:
    lf_stream_close(last);
    return rc;
}

/* ---- a step ---------------------------------------------------------------------------------------------------------- */

lf_status lf_nexus_begin(lf_nexus *nexus)
{
    LF_CHECK_ARG(nexus, "nexus is NULL");
    lf_status rc = LF_OK;
    lf__lock(nexus->mutex);
    LF_TRY(lf__nexus_check_health(nexus));
    if (!nexus->transport.post) LF_THROW(LF_ERR_STATE, "nexus was opened without a transport and only shows the schedule");
    if (nexus->running) LF_THROW(LF_ERR_STATE, "a step was begun and not finished; hint: lf_nexus_finish");
    LF_TRY(lf__shard_check(nexus));
    memset(nexus->marked, 0, (size_t)nexus->plan.n_blocks);
    for (int32_t i = 0; i < nexus->plan.n_chunks; i++) {
        nexus->plan.chunks[i].n_left = nexus->plan.chunks[i].n_blocks;
        nexus->plan.chunks[i].skip = false;
    }
    LF_TRY(lf__chain_begin(nexus));
    lf__sparse_begin(nexus);
    nexus->next = nexus->timed = nexus->taken = 0;
    nexus->flushed = nexus->told = false;
    nexus->event_used = false;
    nexus->native = NULL;
    nexus->capture = 0;
    nexus->ran = false;
    nexus->running = true;
out:
    lf__unlock(nexus->mutex);
    return rc;
}

void lf__nexus_add_time(lf_nexus *nexus, int64_t bytes, int64_t ns)
{
    nexus->collectives++;
    nexus->bytes += bytes;
    if (!nexus->transport.stats) lf__hist_add(&nexus->hist, ns);
}

static void add_time(lf_nexus *nexus, const nexus_chunk *c)
{
    lf__nexus_add_time(nexus, lf__nexus_sent_bytes(c), lf__now_ns() - c->posted_ns);
}

/* See which of the posted chunks are done by now. */
static lf_status poll_posted(lf_nexus *nexus)
{
    if (nexus->transport.stats || nexus->chain || nexus->debug) return LF_OK; /* they take times themselves, or wait early */
    while (nexus->transport.query && nexus->timed < nexus->next) {
        const nexus_chunk *c = &nexus->plan.chunks[nexus->timed];
        if (c->skip) {
            nexus->timed++;
            continue;
        }
        lf_error_clear();
        lf_status rc = nexus->transport.query(nexus->transport.user, c->ticket);
        if (rc == LF_AGAIN) break;
        rc = lf__nexus_answer(nexus, "query", rc);
        if (rc < 0) return fail_chunk(nexus, nexus->timed, rc);
        add_time(nexus, c);
        nexus->timed++;
    }
    return LF_OK;
}

/* Chunks [first, end), as one run where the transport has runs. */
static lf_status post_chunks(lf_nexus *nexus, int32_t first, int32_t end, lf_stream *stream)
{
    const nexus_run *run = &nexus->plan.runs[nexus->plan.chunks[first].run];
    uint64_t capture = 0;
    lf_status rc = lf__stream_capture(stream, &capture);
    while (first < end && nexus->plan.chunks[first].skip) first++;
    if (rc == LF_OK && first == end) return LF_OK;
    if (rc == LF_OK) rc = lf__debug_compare(nexus, NEXUS_SUMS, first, end, 0, 0, stream);
    if (rc == LF_OK && !capture) nexus->ran = true;
    if (rc == LF_OK && capture && lf__sparse_takes(nexus))
        rc = LF_FAIL(LF_ERR_STATE, "this step takes residuals along, once, and is captured; hint: one eager step first");
    for (int32_t i = first; i < end && rc == LF_OK && lf__sparse_takes(nexus); i++) rc = lf__sparse_prepare(nexus, i, stream);
    for (int32_t i = first; i < end && rc == LF_OK; i++)
        if (!nexus->plan.chunks[i].skip) rc = lf__wire_narrow(nexus, &nexus->plan.chunks[i], stream);
    if (rc == LF_OK) rc = lf__nexus_call_run(nexus, 1, run->label);
    if (rc < 0) return lf__nexus_fail_step(nexus, rc);
    for (int32_t i = first; i < end; i++) {
        nexus_chunk *c = &nexus->plan.chunks[i];
        if (c->skip) continue;
        c->posted_ns = lf__now_ns();
        rc = lf__shard_post(nexus, c, stream);
        if (rc < 0) return fail_chunk(nexus, i, rc);
    }
    rc = lf__nexus_call_run(nexus, 0, run->label);
    return rc < 0 ? lf__nexus_fail_step(nexus, rc) : rc;
}

/* Post every chunk, or run, that is complete and has no incomplete one before it. */
static lf_status post_ready(lf_nexus *nexus, lf_stream *stream)
{
    while (nexus->next < nexus->plan.n_chunks) {
        const int32_t first = nexus->next;
        const int32_t end = nexus->transport.run ? nexus->plan.runs[nexus->plan.chunks[first].run].end : first + 1;
        int32_t ready = first;
        while (ready < end && (nexus->plan.chunks[ready].n_left == 0 || nexus->plan.chunks[ready].skip)) ready++;
        if (ready < end) break;
        lf_status held = lf__gate_hold(nexus, stream);
        if (held < 0) return lf__nexus_fail_step(nexus, held);
        lf_status rc = nexus->chain ? lf__chain_post(nexus, first, end, stream) : post_chunks(nexus, first, end, stream);
        if (rc < 0) return nexus->chain ? lf__nexus_fail_step(nexus, rc) : rc;
        nexus->next = end;
    }
    return poll_posted(nexus);
}

static void take_mark(lf_nexus *nexus, int32_t block)
{
    const nexus_schedule *plan = &nexus->plan;
    nexus->marked[block] = 1;
    for (int32_t i = plan->first_of[block]; i < plan->first_of[block + 1]; i++) plan->chunks[plan->chunk_of[i]].n_left--;
}

static lf_status check_mark(const lf_nexus *nexus, int32_t index)
{
    LF_CHECK_ARG(index >= 0 && index < nexus->plan.n_blocks, "block %d, expected 0 to %d", index, nexus->plan.n_blocks - 1);
    lf_block_info block = {.size = sizeof block};
    const int32_t owner = nexus->plan.owner[index];
    if (nexus->running && owner >= 0 && !nexus->marked[owner]) return LF_OK;
    lf_status rc = lf_map_get_block(nexus->map, index, &block);
    if (rc < 0) return rc;
    LF_CHECK_ARG(owner >= 0, "%s is frozen and has no gradient to mark", block.name);
    if (!nexus->running) return LF_FAIL(LF_ERR_STATE, "%s is marked before a step was begun; hint: lf_nexus_begin", block.name);
    if (nexus->flushed) return LF_FAIL(LF_ERR_STATE, "%s is marked after lf_nexus_flush has posted everything", block.name);
    return LF_FAIL(LF_ERR_STATE,
                   "%s is marked twice in one step; hint: with gradient accumulation mark in the last micro-step only",
                   block.name);
}

lf_status lf_nexus_mark(lf_nexus *nexus, int32_t index, lf_stream *stream)
{
    LF_CHECK_ARG(nexus, "nexus is NULL");
    lf_status rc = LF_OK;
    lf__lock(nexus->mutex);
    LF_TRY(lf__fault_raise(&nexus->fault));
    LF_TRY(check_mark(nexus, index));
    rc = lf__chain_check(nexus);
    if (rc < 0) LF_TRY(lf__nexus_fail_step(nexus, rc));
    LF_TRY(order_behind_marks(nexus, stream));
    take_mark(nexus, nexus->plan.owner[index]);
    LF_TRY(post_ready(nexus, stream));
out:
    lf__unlock(nexus->mutex);
    return rc;
}

/* Nobody marked it: no gradient on this rank, whatever an earlier step left there. */
static lf_status clear_late_blocks(lf_nexus *nexus, lf_stream *stream)
{
    for (int32_t b = 0; b < nexus->plan.n_blocks; b++) {
        if (nexus->plan.owner[b] != b || nexus->marked[b]) continue;
        lf_block_info block = {.size = sizeof block};
        lf_class_info klass = {.size = sizeof klass};
        lf_status rc = lf_map_get_block(nexus->map, b, &block);
        if (rc == LF_OK) rc = lf_map_get_class(nexus->map, block.range.klass, &klass);
        if (rc == LF_OK)
            rc = lf_fill(nexus->device, lf_map_address(nexus->map, &block.range, LF_ROLE_GRAD), 0,
                         (size_t)block.range.count * lf_dtype_bytes(klass.role_dtype[LF_ROLE_GRAD]), stream);
        if (rc < 0) return rc;
        take_mark(nexus, b);
        nexus->late_blocks++;
    }
    return LF_OK;
}

/* What this rank has the sum of: its share and the rest, or all of it. */
static lf_status scale_part(lf_nexus *nexus, const nexus_chunk *c, const lf_range *part, lf_stream *stream)
{
    if (part->count == 0) return LF_OK;
    return nexus->kernels->scale(nexus->device->context, lf_stream_native(stream), stream == NULL, lf__nexus_data(c, part),
                                 part->count, c->dtype, c->factor);
}

/* A stream's worker runs this; the chunk holds what it needs, so nothing is allocated. */
static lf_status run_scale(void *user)
{
    const nexus_chunk *c = user;
    lf_status rc = lf__nexus_cpu.scale(NULL, NULL, 1, lf__nexus_data(c, &c->share), c->share.count, c->dtype, c->factor);
    if (rc == LF_OK && c->rest.count)
        rc = lf__nexus_cpu.scale(NULL, NULL, 1, lf__nexus_data(c, &c->rest), c->rest.count, c->dtype, c->factor);
    return rc;
}

lf_status lf__nexus_divide(lf_nexus *nexus, nexus_chunk *c, lf_stream *stream)
{
    if (c->wire) return lf__wire_widen(nexus, c, stream);
    if (c->factor == 1) return LF_OK;
    if (lf__device_is_cpu(nexus->device)) return lf_stream_run(stream, run_scale, c);
    lf_status rc = scale_part(nexus, c, &c->share, stream);
    return rc == LF_OK ? scale_part(nexus, c, &c->rest, stream) : rc;
}

/* Wait for a run's chunks, in order. */
static lf_status wait_for_run(lf_nexus *nexus, const nexus_run *run, lf_stream *stream)
{
    if (nexus->chain) return lf__chain_take(nexus, (int32_t)(run - nexus->plan.runs), stream);
    for (int32_t i = run->first; i < run->end; i++) {
        nexus_chunk *c = &nexus->plan.chunks[i];
        lf_status rc = c->skip ? lf__empty_clear(nexus, c, stream) : lf__shard_wait(nexus, c, stream);
        if (rc < 0) return fail_chunk(nexus, i, rc);
        if (c->skip) {
            nexus->timed = i >= nexus->timed ? i + 1 : nexus->timed;
            continue;
        }
        if (i >= nexus->timed && !nexus->capture) {
            add_time(nexus, c);
            nexus->timed = i + 1;
        }
        rc = lf__nexus_divide(nexus, c, stream);
        if (rc < 0) return fail_chunk(nexus, i, rc);
    }
    return LF_OK;
}

/* Runs [first, end): the stream, or the host, waits once for all of them. The last one ends the step. */
static lf_status take_runs(lf_nexus *nexus, int32_t first, int32_t end, lf_stream *stream)
{
    lf_status rc = LF_OK;
    const int64_t began = lf__now_ns();
    LF_TRY(lf__nexus_span_begin(nexus, first, stream));
    for (int32_t r = first; r < end; r++) LF_TRY(wait_for_run(nexus, &nexus->plan.runs[r], stream));
    LF_TRY(lf__nexus_span_end(nexus, first, stream));
    if ((!nexus->spans || !stream) && !nexus->capture) nexus->exposed_s += (double)(lf__now_ns() - began) * 1e-9;
    nexus->taken = end;
    if (end < nexus->plan.n_runs) return LF_OK;
    nexus->running = false;
    if (nexus->capture) nexus->captured = true;
    else nexus->steps++;
out:
    return rc;
}

/* The last marks are in: what nobody marked is cleared, what is left is posted. */
static lf_status flush_step(lf_nexus *nexus, lf_stream *stream)
{
    lf_status rc = LF_OK;
    LF_TRY(lf__stream_capture(stream, &nexus->capture));
    LF_TRY(order_behind_marks(nexus, stream));
    LF_TRY(clear_late_blocks(nexus, stream));
    LF_TRY(post_ready(nexus, stream));
    LF_TRY(lf__chain_flush(nexus));
    nexus->flushed = true;
out:
    return rc;
}

/* A captured step's waits belong to its graph, and only to that. */
static lf_status check_capture(const lf_nexus *nexus, lf_stream *stream)
{
    uint64_t capture = 0;
    lf_status rc = lf__stream_capture(stream, &capture);
    if (rc < 0 || capture == nexus->capture) return rc;
    return LF_FAIL(LF_ERR_STATE, "the step was flushed %s a capture, and is taken %s it", nexus->capture ? "inside" : "outside",
                   nexus->capture ? "outside" : "inside");
}

lf_status lf_nexus_flush(lf_nexus *nexus, lf_stream *stream)
{
    LF_CHECK_ARG(nexus, "nexus is NULL");
    lf_status rc = LF_OK;
    lf__lock(nexus->mutex);
    LF_TRY(lf__nexus_check_health(nexus));
    if (!nexus->running) LF_THROW(LF_ERR_STATE, "no step was begun; hint: lf_nexus_begin");
    if (nexus->flushed) LF_THROW(LF_ERR_STATE, "the step was flushed already; hint: lf_nexus_take, or lf_nexus_finish");
    rc = flush_step(nexus, stream);
    if (rc < 0) LF_TRY(lf__nexus_fail_step(nexus, rc));
    if (nexus->plan.n_runs == 0) LF_TRY(take_runs(nexus, 0, 0, stream)); /* nothing is trained */
out:
    lf__unlock(nexus->mutex);
    return rc;
}

lf_status lf_nexus_take(lf_nexus *nexus, lf_stream *stream, int32_t *first, int32_t *n)
{
    LF_CHECK_ARG(nexus && first && n, "nexus, first or n is NULL");
    lf_status rc = LF_OK;
    *first = *n = 0;
    lf__lock(nexus->mutex);
    LF_TRY(lf__nexus_check_health(nexus));
    if (!nexus->flushed) LF_THROW(LF_ERR_STATE, "no step was flushed; hint: lf_nexus_begin, marks, lf_nexus_flush");
    if (!nexus->running) {
        rc = LF_END;
        goto out;
    }
    LF_TRY(check_capture(nexus, stream));
    const int32_t r = nexus->taken;
    rc = poll_posted(nexus);
    if (rc == LF_OK) rc = take_runs(nexus, r, r + 1, stream);
    if (rc < 0) LF_TRY(lf__nexus_fail_step(nexus, rc));
    *first = nexus->plan.runs[r].first;
    *n = nexus->plan.runs[r].end - *first;
out:
    lf__unlock(nexus->mutex);
    return rc;
}

lf_status lf_nexus_finish(lf_nexus *nexus, lf_stream *stream)
{
    LF_CHECK_ARG(nexus, "nexus is NULL");
    lf_status rc = LF_OK;
    lf__lock(nexus->mutex);
    LF_TRY(lf__nexus_check_health(nexus));
    if (!nexus->running) LF_THROW(LF_ERR_STATE, "no step was begun; hint: lf_nexus_begin");
    if (nexus->flushed) LF_TRY(check_capture(nexus, stream));
    else rc = flush_step(nexus, stream);
    if (rc == LF_OK) rc = take_runs(nexus, nexus->taken, nexus->plan.n_runs, stream);
    if (rc < 0) LF_TRY(lf__nexus_fail_step(nexus, rc));
out:
    lf__unlock(nexus->mutex);
    return rc;
}
