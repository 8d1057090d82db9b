/* SPDX-License-Identifier: Apache-2.0 */
/* What is done with one sample and one batch: records to tokens, JPEG to planes, bad rows, padding, masks, labels. */
#include <stdio.h>
#include <string.h>

#include "loader_int.h"

enum { IGNORED = -100, MOST_SUBSTITUTES = 16 };

static size_t plane_floats(const lf_loader *loader)
{
    return (size_t)3 * (size_t)loader->opts.image_size * (size_t)loader->opts.image_size;
}

void lf__row_read(lf_loader *loader, lf__row *row)
{
    row->fault = (lf__fault){0};
    row->record.size = sizeof row->record;
    lf_status rc = lf_dataset_get(loader->set, row->sample, &row->record);
    const lf_sample *s = &row->record;
    if (rc == LF_OK) rc = lf__record_tokens(s->text, (size_t)s->text_bytes, lf__dataset_vocabulary(loader->set), &row->tokens);
    lf__fault_keep(&row->fault, rc);
}

void lf__row_decode(lf_loader *loader, lf__slot *slot, int32_t i, lf__decoder *decoder)
{
    lf__row *row = &slot->rows[i];
    float *planes = slot->host.images + (size_t)i * plane_floats(loader);
    if (row->fault.status < 0) return;
    lf_status rc = LF_OK;
    if (row->record.image) {
        lf__decode_want want = {.size = loader->opts.image_size, .max_pixels = loader->opts.max_pixels, .right = 1, .bottom = 1};
        if (loader->opts.augment) lf__order_augment(&loader->order, slot->epoch, row->sample, &want);
        rc = lf__decoder_run(decoder, row->record.image, (size_t)row->record.image_bytes, &want);
        lf__fault_keep(&row->fault, rc);
    }
    if (rc == LF_OK && row->record.image && !loader->opts.blank_images) lf__decoder_planes(decoder, planes);
    else memset(planes, 0, plane_floats(loader) * sizeof *planes); /* mid grey */
}

/* ---- bad rows ------------------------------------------------------------------------------------------------------------ */

/* Note it; a lack of memory is no fault of the sample and always ends the loader. */
static lf_status note_bad(lf_loader *loader, const lf__row *row)
{
    char line[sizeof row->fault.text + 160];
    if (row->fault.status == LF_ERR_NOMEM) return lf__fault_raise(&row->fault);
    snprintf(line, sizeof line, "%.*s: %s", (int)(row->record.id_bytes < 128 ? row->record.id_bytes : 128), row->record.id,
             row->fault.text);
    for (char *p = line; *p; p++)
        if (*p == '\n') *p = ' ';
    if (loader->policy == POLICY_ERROR) return LF_FAIL(row->fault.status, "sample %s", line);
    lf__lock(loader->mutex);
    bool news = lf__bad_add(&loader->bad, row->sample, line);
    lf_status rc = lf__bad_check_budget(&loader->bad);
    lf__unlock(loader->mutex);
    if (news) lf__log(LF_LOG_WARN, "bad sample %s", line);
    return rc;
}

/* Put another sample in the row's place; LF_AGAIN when the attempts are bad as well. */
static lf_status substitute(lf_loader *loader, lf__slot *slot, int32_t i, lf__decoder *decoder)
{
    lf__row *row = &slot->rows[i];
    int64_t bad = row->sample;
    for (int32_t attempt = 0; attempt < MOST_SUBSTITUTES; attempt++) {
        row->sample = lf__order_substitute(&loader->order, slot->epoch, bad, attempt);
        lf__row_read(loader, row);
        lf__row_decode(loader, slot, i, decoder);
        if (row->fault.status == LF_OK) return LF_OK;
        lf_status rc = note_bad(loader, row);
        if (rc < 0) return rc;
    }
    return LF_AGAIN;
}

/* Put a copy of a good row in its place, without weight; with no good row at all, an empty text and a grey image. */
static void copy_good_row(lf_loader *loader, lf__slot *slot, int32_t i)
{
    lf__row *row = &slot->rows[i];
    float *planes = slot->host.images + (size_t)i * plane_floats(loader);
    int32_t from = 0;
    while (from < loader->opts.batch_size && (from == i || slot->rows[from].fault.status < 0)) from++;
    row->repeated = true;
    if (from == loader->opts.batch_size) {
        lf__record_tokens(NULL, 0, lf__dataset_vocabulary(loader->set), &row->tokens);
        memset(planes, 0, plane_floats(loader) * sizeof *planes);
        return;
    }
    const lf__row *good = &slot->rows[from];
    memcpy(planes, slot->host.images + (size_t)from * plane_floats(loader), plane_floats(loader) * sizeof *planes);
    memcpy(row->tokens.id, good->tokens.id, (size_t)good->tokens.n * sizeof *good->tokens.id);
    memcpy(row->tokens.trained, good->tokens.trained, (size_t)good->tokens.n);
    row->tokens.n = good->tokens.n;
    row->tokens.cut = false;
    row->sample = good->sample;
}

/* All bad rows are noted first, in the order of rows, so that what is logged and when the budget is passed does not depend
 * on threads. Rows that became copies stay marked bad until the end: nothing is copied from a copy. */
static lf_status settle_bad_rows(lf_loader *loader, lf__slot *slot, lf__decoder *decoder)
{
    for (int32_t i = 0; i < loader->opts.batch_size; i++) {
        if (slot->rows[i].fault.status == LF_OK) continue;
        lf_status rc = note_bad(loader, &slot->rows[i]);
        if (rc < 0) return rc;
        if (loader->policy != POLICY_SUBSTITUTE) continue;
        rc = substitute(loader, slot, i, decoder);
        if (rc < 0) return rc;
    }
    for (int32_t i = 0; i < loader->opts.batch_size; i++)
        if (slot->rows[i].fault.status < 0) copy_good_row(loader, slot, i);
    return LF_OK;
}

/* ---- the batch ------------------------------------------------------------------------------------------------------------ */

static int32_t padded_length(const lf_loader *loader, const lf__slot *slot)
{
    int32_t multiple = loader->opts.pad_multiple, most = loader->opts.seq_len, longest = 1;
    for (int32_t i = 0; i < loader->opts.batch_size; i++)
        if (slot->rows[i].tokens.n > longest) longest = slot->rows[i].tokens.n;
    if (multiple == 0) return most;
    int64_t padded = lf__round_up(longest, multiple);
    return padded < most ? (int32_t)padded : most;
}

/* tokens, labels: (T) i64; mask: (T) u8 */
static void fill_row(const lf_loader *loader, lf__slot *slot, int32_t i, int32_t seq)
{
    const lf__row *row = &slot->rows[i];
    const lf__tokens *t = &row->tokens;
    int64_t *tokens = slot->host.tokens + (size_t)i * seq, *labels = slot->host.labels + (size_t)i * seq;
    uint8_t *mask = slot->host.mask + (size_t)i * seq;
    int32_t pad = lf__dataset_vocabulary(loader->set)->pad;
    for (int32_t k = 0; k < t->n; k++) {
        bool trained = t->trained[k] && !row->repeated;
        tokens[k] = t->id[k];
        labels[k] = trained ? t->id[k] : IGNORED;
        mask[k] = 1;
        slot->n_label_tokens += trained;
    }
    for (int32_t k = t->n; k < seq; k++) {
        tokens[k] = pad;
        labels[k] = IGNORED;
        mask[k] = 0;
    }
    slot->host.index[i] = row->sample;
    slot->host.weight[i] = row->repeated ? 0.0f : 1.0f;
    slot->n_tokens += t->n;
    slot->n_cut += t->cut && !row->repeated;
}

/* To the device: one copy a tensor, then the event that the consumer's stream waits for. */
static lf_status send(lf_loader *loader, lf__slot *slot)
{
    if (!loader->copy_stream) return LF_OK;
    size_t b = (size_t)loader->opts.batch_size, t = b * (size_t)slot->host.seq;
    const struct {
        void *to, *from;
        size_t bytes;
    } parts[] = {
        {slot->device.images, slot->host.images, b * plane_floats(loader) * sizeof(float)},
        {slot->device.tokens, slot->host.tokens, t * sizeof(int64_t)},
        {slot->device.labels, slot->host.labels, t * sizeof(int64_t)},
        {slot->device.mask, slot->host.mask, t},
        {slot->device.index, slot->host.index, b * sizeof(int64_t)},
        {slot->device.weight, slot->host.weight, b * sizeof(float)},
    };
    lf_status rc = LF_OK;
    for (size_t i = 0; i < LF_COUNT(parts) && rc == LF_OK; i++)
        rc = lf_copy(loader->device, parts[i].to, parts[i].from, parts[i].bytes, loader->copy_stream);
    return rc == LF_OK ? lf_event_record(slot->ready, loader->copy_stream) : rc;
}

lf_status lf__batch_build(lf_loader *loader, lf__slot *slot, lf__decoder *decoder)
{
    lf_status rc = settle_bad_rows(loader, slot, decoder);
    if (rc < 0) return rc;
    int32_t seq = padded_length(loader, slot);
    slot->n_tokens = slot->n_label_tokens = slot->n_cut = 0;
    for (int32_t i = 0; i < loader->opts.batch_size; i++) fill_row(loader, slot, i, seq);
    slot->host.seq = slot->device.seq = seq;
    slot->device.epoch = slot->epoch;
    slot->device.number = slot->number;
    slot->device.label_tokens = slot->n_label_tokens;
    slot->device.last_of_epoch = slot->after.epoch > slot->epoch;
    return send(loader, slot);
}
