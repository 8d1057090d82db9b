/* SPDX-License-Identifier: Apache-2.0 */
/* Opening and closing the pipeline, and the consumer's side of it. */
#include <stdio.h>
#include <string.h>

#include "loader_int.h"

/* ---- memory of the slots -------------------------------------------------------------------------------------------------- */

static lf_status alloc_buffers(lf_loader *loader, lf_batch *batch, lf_status (*alloc)(lf_device *, size_t, void **))
{
    const lf_loader_options *o = &loader->opts;
    size_t b = (size_t)o->batch_size, t = b * (size_t)o->seq_len, side = (size_t)o->image_size;
    void *memory[6] = {NULL};
    const size_t bytes[6] = {
        b * 3 * side * side * sizeof(float), t * sizeof(int64_t), t * sizeof(int64_t), b * sizeof(int64_t), t, b * sizeof(float)};
    lf_status rc = LF_OK;
    for (int32_t i = 0; i < 6 && rc == LF_OK; i++) rc = alloc(loader->device, bytes[i], &memory[i]);
    batch->images = memory[0];
    batch->tokens = memory[1];
    batch->labels = memory[2];
    batch->index = memory[3];
    batch->mask = memory[4];
    batch->weight = memory[5];
    return rc < 0 ? lf__fail_prefix(rc, "a batch slot of %zu MB", (bytes[0] + bytes[1] * 2) >> 20) : rc;
}

static void free_buffers(lf_device *device, lf_batch *batch, void (*release)(lf_device *, void *))
{
    void *const memory[6] = {batch->images, batch->tokens, batch->labels, batch->index, batch->mask, batch->weight};
    for (int32_t i = 0; i < 6; i++) release(device, memory[i]);
}

static lf_status open_rows(lf_loader *loader, lf__slot *slot)
{
    size_t b = (size_t)loader->opts.batch_size, room = (size_t)loader->opts.seq_len;
    slot->rows = lf__alloc_array(b, sizeof *slot->rows);
    slot->token_room = lf__alloc_array(b * room, sizeof *slot->token_room);
    slot->trained_room = lf__alloc_array(b * room, 1);
    if (!slot->rows || !slot->token_room || !slot->trained_room) return LF_FAIL(LF_ERR_NOMEM, "texts of %zu samples", b);
    for (size_t i = 0; i < b; i++)
        slot->rows[i].tokens =
            (lf__tokens){.id = slot->token_room + i * room, .trained = slot->trained_room + i * room, .room = (int32_t)room};
    return LF_OK;
}

static lf_status open_slot(lf_loader *loader, int32_t i)
{
    lf__slot *slot = &loader->slots[i];
    bool on_host = lf__device_is_cpu(loader->device);
    lf_status rc = open_rows(loader, slot);
    slot->number_of_slot = i;
    if (rc == LF_OK) rc = lf_event_open(loader->device, &slot->ready);
    if (rc == LF_OK) rc = lf_event_open(loader->device, &slot->released);
    if (rc == LF_OK) rc = alloc_buffers(loader, &slot->host, on_host ? lf_device_alloc : lf_host_alloc);
    if (rc == LF_OK && !on_host) rc = alloc_buffers(loader, &slot->device, lf_device_alloc);
    if (rc == LF_OK && on_host) slot->device = slot->host;
    slot->device.n = loader->opts.batch_size;
    slot->device.image_size = loader->opts.image_size;
    slot->device.slot = i;
    return rc;
}

static void close_slot(lf_loader *loader, lf__slot *slot)
{
    if (lf__device_is_cpu(loader->device)) {
        free_buffers(loader->device, &slot->host, lf_device_free);
    } else {
        free_buffers(loader->device, &slot->host, lf_host_free);
        free_buffers(loader->device, &slot->device, lf_device_free);
    }
    lf_event_close(slot->ready);
    lf_event_close(slot->released);
    lf__free(slot->rows);
    lf__free(slot->token_room);
    lf__free(slot->trained_room);
}

/* ---- opening and closing ------------------------------------------------------------------------------------------------------ */

static lf_status take_options(lf_loader *loader, const lf_loader_options *opts)
{
    static const char *const policies[] = {"error", "skip", "substitute"};
    lf_loader_options *o = &loader->opts;
    lf_status rc = lf__options_take("loader", o, sizeof *o, opts);
    if (rc < 0) return rc;
    LF_CHECK_ARG(o->rank < o->world, "rank is %d, expected 0 to %d (world - 1)", o->rank, o->world - 1);
    for (int32_t i = 0; i < (int32_t)LF_COUNT(policies); i++)
        if (strcmp(o->bad_samples, policies[i]) == 0) loader->policy = i;
    lf_dataset_info info = {.size = sizeof info};
    rc = lf_dataset_get_info(loader->set, &info);
    if (rc < 0) return rc;
    int64_t global = (int64_t)o->batch_size * o->world;
    LF_CHECK_ARG(
        !o->drop_last || info.n_samples >= global,
        "the set has %lld samples, expected at least one global batch of %lld (batch_size %d x world %d); hint: drop_last off",
        (long long)info.n_samples, (long long)global, o->batch_size, o->world);
    loader->order = (lf__order){.n_samples = info.n_samples,
                                .seed = o->seed,
                                .batch = o->batch_size,
                                .rank = o->rank,
                                .world = o->world,
                                .shuffle = o->shuffle,
                                .drop_last = o->drop_last};
    loader->n_threads = o->threads ? o->threads : lf__n_cores();
    return LF_OK;
}

static lf_status open_parts(lf_loader *loader)
{
    int32_t depth = loader->opts.depth, n = loader->n_threads;
    lf_status rc = lf__bad_open(&loader->bad, loader->order.n_samples, loader->opts.bad_budget);
    if (rc < 0) return rc;
    loader->mutex = lf__mutex_open();
    loader->latency = lf__alloc(sizeof *loader->latency);
    loader->slots = lf__alloc_array((size_t)depth, sizeof *loader->slots);
    loader->decoders = lf__alloc_array((size_t)n + 1, sizeof *loader->decoders);
    loader->workers = lf__alloc_array((size_t)n, sizeof *loader->workers);
    if (!loader->mutex || !loader->latency || !loader->slots || !loader->decoders || !loader->workers)
        return LF_FAIL(LF_ERR_NOMEM, "loader");
    for (int32_t i = 0; i <= n; i++)
        if (!(loader->decoders[i] = lf__decoder_open(loader->opts.image_size))) return LF_FAIL(LF_ERR_NOMEM, "decoder");
    if (!lf__device_is_cpu(loader->device)) rc = lf_stream_open(loader->device, 0, &loader->copy_stream);
    for (int32_t i = 0; i < depth && rc == LF_OK; i++) rc = open_slot(loader, i);
    return rc;
}

static lf_status start_threads(lf_loader *loader)
{
    lf_status rc = lf__thread_start(&loader->reader, "lf-read", lf__stage_read, loader);
    for (int32_t i = 0; i < loader->n_threads && rc == LF_OK; i++) {
        loader->workers[i] = (struct lf__worker){.loader = loader, .decoder = loader->decoders[i]};
        rc = lf__thread_start(&loader->workers[i].thread, "lf-decode", lf__stage_decode, &loader->workers[i]);
    }
    return rc == LF_OK ? lf__thread_start(&loader->assembler, "lf-batch", lf__stage_assemble, loader) : rc;
}

lf_status lf_loader_open(lf_loader **out, lf_dataset *set, lf_device *device, const lf_loader_options *opts)
{
    LF_CHECK_ARG(out && set && device, "out, set or device is NULL");
    *out = NULL;
    lf_status rc = LF_OK;
    lf_loader *loader = lf__alloc(sizeof *loader);
    if (!loader) return LF_FAIL(LF_ERR_NOMEM, "loader");
    loader->set = lf__dataset_ref(set);
    loader->device = lf__device_ref(device);
    LF_TRY(take_options(loader, opts));
    LF_TRY(open_parts(loader));
    LF_TRY(start_threads(loader));
    *out = loader;
    loader = NULL;
out:
    lf_loader_close(loader);
    return rc;
}

static void stop_threads(lf_loader *loader)
{
    if (!loader->mutex) return;
    lf__lock(loader->mutex);
    loader->stop = true;
    lf__wake(loader->mutex);
    lf__unlock(loader->mutex);
    lf__thread_join(loader->reader);
    lf__thread_join(loader->assembler);
    for (int32_t i = 0; loader->workers && i < loader->n_threads; i++) lf__thread_join(loader->workers[i].thread);
}

void lf_loader_close(lf_loader *loader)
{
    if (!loader) return;
    stop_threads(loader);
    lf_stream_close(loader->copy_stream);
    for (int32_t i = 0; loader->slots && i < loader->opts.depth; i++) {
        if (loader->slots[i].released) lf_event_sync(loader->slots[i].released);
        close_slot(loader, &loader->slots[i]);
    }
    for (int32_t i = 0; loader->decoders && i <= loader->n_threads; i++) lf__decoder_close(loader->decoders[i]);
    lf__free(loader->slots);
    lf__free(loader->decoders);
    lf__free(loader->workers);
    lf__free(loader->latency);
    lf__bad_close(&loader->bad);
    lf__mutex_close(loader->mutex);
    lf_dataset_close(loader->set);
    lf_device_close(loader->device);
    lf__free(loader);
}

/* ---- batches -------------------------------------------------------------------------------------------------------------------- */

static bool all_held(const lf_loader *loader)
{
    for (int32_t i = 0; i < loader->opts.depth; i++)
        if (loader->slots[i].state != SLOT_HELD) return false;
    return true;
}

/* The next batch's slot once it is ready; NULL: every slot is held. The mutex is held. */
static lf__slot *await_ready(lf_loader *loader)
{
    int64_t from = lf__now_ns();
    lf__slot *slot = NULL; /* batches become ready in order, so the first ready one is the next */
    loader->go = true;
    lf__wake(loader->mutex);
    while (!all_held(loader) && !(slot = lf__find_slot(loader, SLOT_READY))) lf__wait(loader->mutex);
    loader->stall_ns += lf__now_ns() - from;
    return slot;
}

static lf_status deliver(lf_loader *loader, lf__slot **out)
{
    if (loader->fault.status < 0) return lf__fault_raise(&loader->fault);
    lf__slot *slot = await_ready(loader);
    if (!slot)
        return LF_FAIL(LF_ERR_STATE, "all %d batch slots are held; hint: release a batch before the next one, or raise depth",
                       loader->opts.depth);
    if (slot->fault.status < 0) {
        loader->fault = slot->fault;
        return lf__fault_raise(&loader->fault);
    }
    slot->state = SLOT_HELD;
    loader->delivered = slot->after;
    loader->stats.batches++;
    loader->stats.samples += loader->opts.batch_size;
    *out = slot;
    return LF_OK;
}

lf_status lf_loader_next(lf_loader *loader, lf_batch *batch, lf_stream *stream)
{
    LF_CHECK_ARG(loader && batch, "loader or batch is NULL");
    LF_CHECK_ARG(batch->size == sizeof *batch, "lf_batch: size is %zu, expected %zu", batch->size, sizeof *batch);
    lf__slot *slot = NULL;
    lf__lock(loader->mutex);
    lf_status rc = deliver(loader, &slot);
    lf__unlock(loader->mutex);
    if (rc < 0) return rc;
    if (loader->copy_stream) rc = stream ? lf_stream_wait(stream, slot->ready) : lf_event_sync(slot->ready);
    if (rc < 0) {
        lf__lock(loader->mutex);
        lf__fault_keep(&loader->fault, rc);
        lf__unlock(loader->mutex);
        return rc;
    }
    *batch = slot->device;
    batch->size = sizeof *batch;
    return LF_OK;
}

lf_status lf_batch_release(lf_loader *loader, const lf_batch *batch, lf_stream *stream)
{
    LF_CHECK_ARG(loader && batch, "loader or batch is NULL");
    LF_CHECK_ARG(batch->slot >= 0 && batch->slot < loader->opts.depth, "batch of slot %d, expected 0 to %d", batch->slot,
                 loader->opts.depth - 1);
    lf__slot *slot = &loader->slots[batch->slot];
    lf__lock(loader->mutex);
    bool held = slot->state == SLOT_HELD && slot->epoch == batch->epoch && slot->number == batch->number;
    lf_status rc = held ? lf_event_record(slot->released, stream)
                        : LF_FAIL(LF_ERR_STATE, "batch %lld of epoch %lld is not held; hint: it was released before",
                                  (long long)batch->number, (long long)batch->epoch);
    if (rc == LF_OK) {
        slot->state = SLOT_FREE;
        lf__wake(loader->mutex);
    }
    lf__unlock(loader->mutex);
    return rc;
}

/* ---- state and statistics ----------------------------------------------------------------------------------------------------------- */

lf_status lf_loader_get_state(const lf_loader *loader, lf_loader_state *state)
{
    LF_CHECK_ARG(loader && state, "loader or state is NULL");
    LF_CHECK_ARG(state->size == sizeof *state, "lf_loader_state: size is %zu, expected %zu", state->size, sizeof *state);
    lf__lock(loader->mutex);
    *state = (lf_loader_state){.size = sizeof *state,
                               .epoch = loader->delivered.epoch,
                               .samples_done = loader->delivered.done,
                               .seed = loader->opts.seed,
                               .n_samples = loader->order.n_samples};
    lf__unlock(loader->mutex);
    return LF_OK;
}

lf_status lf_loader_set_state(lf_loader *loader, const lf_loader_state *state)
{
    LF_CHECK_ARG(loader && state, "loader or state is NULL");
    LF_CHECK_ARG(state->size == sizeof *state, "lf_loader_state: size is %zu, expected %zu", state->size, sizeof *state);
    LF_CHECK_ARG(state->n_samples == loader->order.n_samples, "the state is of a set of %lld samples, this one has %lld",
                 (long long)state->n_samples, (long long)loader->order.n_samples);
    LF_CHECK_ARG(state->seed == loader->opts.seed, "the state has seed %lld, the loader %lld", (long long)state->seed,
                 (long long)loader->opts.seed);
    LF_CHECK_ARG(state->epoch >= 0 && state->samples_done >= 0 && state->samples_done <= state->n_samples,
                 "the state says epoch %lld, %lld of %lld samples done", (long long)state->epoch, (long long)state->samples_done,
                 (long long)state->n_samples);
    lf__lock(loader->mutex);
    bool started = loader->go;
    if (!started) loader->read_at = loader->delivered = (lf__cursor){state->epoch, state->samples_done};
    lf__unlock(loader->mutex);
    return started ? LF_FAIL(LF_ERR_STATE, "the loader has started; hint: set its state before the first batch") : LF_OK;
}

lf_status lf_loader_get_stats(const lf_loader *loader, lf_loader_stats *stats)
{
    LF_CHECK_ARG(loader && stats, "loader or stats is NULL");
    LF_CHECK_ARG(stats->size == sizeof *stats, "lf_loader_stats: size is %zu, expected %zu", stats->size, sizeof *stats);
    lf__lock(loader->mutex);
    *stats = loader->stats;
    stats->size = sizeof *stats;
    stats->bad_samples = loader->bad.count;
    stats->read_s = (double)loader->read_ns * 1e-9;
    stats->decode_s = (double)loader->decode_ns * 1e-9;
    stats->assemble_s = (double)loader->assemble_ns * 1e-9;
    stats->stall_s = (double)loader->stall_ns * 1e-9;
    stats->latency_mean_s = lf__hist_mean(loader->latency);
    stats->latency_std_s = lf__hist_std(loader->latency);
    stats->latency_p50_s = lf__hist_percentile(loader->latency, 50);
    stats->latency_p95_s = lf__hist_percentile(loader->latency, 95);
    stats->latency_p99_s = lf__hist_percentile(loader->latency, 99);
    lf__unlock(loader->mutex);
    return LF_OK;
}

int64_t lf_loader_batches_per_epoch(const lf_loader *loader)
{
    if (!loader) return 0;
    int64_t global = (int64_t)loader->opts.batch_size * loader->opts.world, n = loader->order.n_samples;
    return loader->opts.drop_last ? n / global : (n + global - 1) / global;
}

lf_status lf_loader_bad_samples(const lf_loader *loader, char *text, size_t size)
{
    LF_CHECK_ARG(loader && text && size > 0, "loader or text is NULL, or size is 0");
    lf__lock(loader->mutex);
    const char *from = loader->bad.text;
    size_t n = loader->bad.used;
    while (n >= size) { /* leave the oldest lines out */
        const char *end = memchr(from, '\n', n);
        size_t line = end ? (size_t)(end - from) + 1 : n;
        from += line;
        n -= line;
    }
    memcpy(text, from, n);
    text[n] = 0;
    lf__unlock(loader->mutex);
    return LF_OK;
}
