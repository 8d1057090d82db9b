/* SPDX-License-Identifier: Apache-2.0 */
/* The three stages, each on threads of its own. A slot belongs to the stage that its state names; the mutex guards states,
 * not contents. */
#include <sys/mman.h>
#include <unistd.h>

#include "loader_int.h"

lf__slot *lf__find_slot(lf_loader *loader, int32_t state)
{
    lf__slot *found = NULL;
    for (int32_t i = 0; i < loader->opts.depth; i++) {
        lf__slot *s = &loader->slots[i];
        if (s->state == state && (!found || s->serial < found->serial)) found = s;
    }
    return found;
}

/* Ask for a value's pages ahead of the decoder: the map is opened without read-ahead. Best effort. */
static void will_need(const void *data, int64_t bytes)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), at = (uintptr_t)data & ~(page - 1);
    if (bytes > 0) madvise((void *)at, (uintptr_t)data + (size_t)bytes - at, MADV_WILLNEED);
}

/* ---- stage 1: records ---------------------------------------------------------------------------------------------------------- */

static void read_batch(lf_loader *loader, lf__slot *slot)
{
    for (int32_t i = 0; i < loader->opts.batch_size; i++) {
        lf__row *row = &slot->rows[i];
        lf_sample peek = {.size = sizeof peek};
        row->sample = lf__order_sample(&loader->order, slot->epoch, slot->position + i, &row->repeated);
        if (lf_dataset_get(loader->set, row->sample, &peek) == LF_OK) will_need(peek.image, peek.image_bytes);
    }
    for (int32_t i = 0; i < loader->opts.batch_size; i++) lf__row_read(loader, &slot->rows[i]);
}

void lf__stage_read(void *user)
{
    lf_loader *loader = user;
    lf__lock(loader->mutex);
    for (;;) {
        lf__slot *slot = NULL;
        while (!loader->stop && (!loader->go || loader->failed || !(slot = lf__find_slot(loader, SLOT_FREE))))
            lf__wait(loader->mutex);
        if (loader->stop) break;
        slot->state = SLOT_READING;
        slot->serial = loader->read_serial++;
        slot->fault = (lf__fault){0};
        slot->next_row = slot->done_rows = 0;
        lf__order_next(&loader->order, &loader->read_at, &slot->epoch, &slot->number, &slot->position);
        slot->after = loader->read_at;
        lf__unlock(loader->mutex);

        /* On the host: the consumer's queued work may still read the slot. */
        lf__fault_keep(&slot->fault, lf_event_sync(slot->released));
        slot->started_ns = lf__now_ns();
        read_batch(loader, slot);

        lf__lock(loader->mutex);
        loader->read_ns += lf__now_ns() - slot->started_ns;
        slot->state = SLOT_DECODING;
        lf__wake(loader->mutex);
    }
    lf__unlock(loader->mutex);
}

/* ---- stage 2: pixels ------------------------------------------------------------------------------------------------------------- */

/* A row of the oldest batch that has rows left; NULL: none. The mutex is held. */
static lf__slot *take_row(lf_loader *loader, int32_t *row)
{
    lf__slot *found = NULL;
    for (int32_t i = 0; i < loader->opts.depth; i++) {
        lf__slot *s = &loader->slots[i];
        if (s->state != SLOT_DECODING || s->next_row == loader->opts.batch_size) continue;
        if (!found || s->serial < found->serial) found = s;
    }
    if (found) *row = found->next_row++;
    return found;
}

void lf__stage_decode(void *user)
{
    struct lf__worker *worker = user;
    lf_loader *loader = worker->loader;
    lf__lock(loader->mutex);
    for (;;) {
        lf__slot *slot = NULL;
        int32_t row = 0;
        while (!loader->stop && !(slot = take_row(loader, &row))) lf__wait(loader->mutex);
        if (loader->stop) break;
        lf__unlock(loader->mutex);

        int64_t started = lf__now_ns();
        lf__row_decode(loader, slot, row, worker->decoder);
        int64_t spent = lf__now_ns() - started;

        lf__lock(loader->mutex);
        loader->decode_ns += spent;
        if (++slot->done_rows == loader->opts.batch_size) {
            slot->state = SLOT_DECODED;
            lf__wake(loader->mutex);
        }
    }
    lf__unlock(loader->mutex);
}

/* ---- stage 3: batches -------------------------------------------------------------------------------------------------------------- */

/* Batches are built in order, whichever was decoded first. */
static lf__slot *next_decoded(lf_loader *loader)
{
    lf__slot *slot = loader->failed ? NULL : lf__find_slot(loader, SLOT_DECODED);
    return slot && slot->serial == loader->assemble_serial ? slot : NULL;
}

static void count_batch(lf_loader *loader, const lf__slot *slot, int64_t started_ns, int64_t now_ns)
{
    loader->assemble_ns += now_ns - started_ns;
    lf__hist_add(loader->latency, now_ns - slot->started_ns);
    loader->stats.tokens += slot->n_tokens;
    loader->stats.padding_tokens += (int64_t)loader->opts.batch_size * slot->host.seq - slot->n_tokens;
    loader->stats.label_tokens += slot->n_label_tokens;
    loader->stats.cut_texts += slot->n_cut;
}

void lf__stage_assemble(void *user)
{
    lf_loader *loader = user;
    lf__lock(loader->mutex);
    for (;;) {
        lf__slot *slot = NULL;
        while (!loader->stop && !(slot = next_decoded(loader))) lf__wait(loader->mutex);
        if (loader->stop) break;
        slot->state = SLOT_ASSEMBLING;
        loader->assemble_serial++;
        lf__unlock(loader->mutex);

        int64_t started = lf__now_ns();
        lf__fault_keep(&slot->fault, lf__batch_build(loader, slot, loader->decoders[loader->n_threads]));

        lf__lock(loader->mutex);
        if (slot->fault.status < 0) loader->failed = true; /* nothing behind this batch is delivered */
        else count_batch(loader, slot, started, lf__now_ns());
        slot->state = SLOT_READY;
        lf__wake(loader->mutex);
    }
    lf__unlock(loader->mutex);
}
