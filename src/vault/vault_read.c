/* SPDX-License-Identifier: Apache-2.0 */
/* Reading checkpoints: manifests, data files, records. Every error names file and record. */
#include <stdio.h>
#include <string.h>

#include "vault_int.h"

enum { MOST_OPEN = 128 };

/* ---- manifests --------------------------------------------------------------------------------------------------------- */

lf_status lf__vault_load_meta(lf__io *io, const char *dir, int64_t step, lf__vault_manifest **out)
{
    lf_status rc = LF_OK;
    char path[LF__VAULT_PATH_MAX], name[LF__VAULT_NAME_MAX], *text = NULL;
    size_t bytes;
    *out = NULL;
    snprintf(name, sizeof name, "checkpoint_%lld/meta.json", (long long)step);
    LF_TRY(lf__io_join(path, sizeof path, dir, name));
    LF_TRY(lf__io_read_all(io, path, LF__VAULT_MAX_META_BYTES, &text, &bytes));
    LF_TRY(lf__vault_meta_read(out, text, bytes, name));
    if ((*out)->step != step) {
        int64_t inside = (*out)->step;
        lf__vault_manifest_unref(*out);
        *out = NULL;
        LF_THROW(LF_ERR_CORRUPT, "%s is that of step %lld", name, (long long)inside);
    }
out:
    lf__free(text);
    return rc;
}

/* The document and its place at the end of an open base file. */
static lf_status read_tail(lf__io *io, lf__file *file, const char *name, char **text, lf__vault_tail *tail)
{
    lf_status rc = LF_OK;
    uint8_t raw[LF__VAULT_TAIL_BYTES];
    int64_t size = 0;
    size_t got = 0;
    LF_TRY(io->ops->size(file, &size));
    if (size < LF__VAULT_HEAD_BYTES + LF__VAULT_TAIL_BYTES)
        LF_THROW(LF_ERR_CORRUPT, "%s: %lld bytes are too few for a base", name, (long long)size);
    LF_TRY(io->ops->read(file, size - LF__VAULT_TAIL_BYTES, raw, sizeof raw, &got));
    rc = got == sizeof raw ? lf__vault_tail_get(tail, raw) : LF_FAIL(LF_ERR_CORRUPT, "file tail: cut off");
    if (rc == LF_OK &&
        (tail->meta_offset < LF__VAULT_HEAD_BYTES || tail->meta_bytes < 0 || tail->meta_bytes > LF__VAULT_MAX_META_BYTES ||
         tail->meta_offset != size - LF__VAULT_TAIL_BYTES - tail->meta_bytes))
        rc = LF_FAIL(LF_ERR_CORRUPT, "file tail: manifest of %lld bytes at %lld does not fit a file of %lld",
                     (long long)tail->meta_bytes, (long long)tail->meta_offset, (long long)size);
    if (rc < 0) {
        rc = lf__fail_prefix(rc, "%s", name);
        goto out;
    }
    *text = lf__alloc((size_t)tail->meta_bytes + 1);
    if (!*text) LF_THROW(LF_ERR_NOMEM, "manifest of %s", name);
    LF_TRY(io->ops->read(file, tail->meta_offset, *text, (size_t)tail->meta_bytes, &got));
    lf__hash128 hash = lf__hash(*text, got, 0);
    if (got != (size_t)tail->meta_bytes || hash.lo != tail->meta_hash.lo || hash.hi != tail->meta_hash.hi)
        LF_THROW(LF_ERR_CORRUPT, "%s: the manifest at %lld does not have the hash that the tail says", name,
                 (long long)tail->meta_offset);
out:
    return rc;
}

static lf_status check_base_manifest(lf__vault_manifest *m, const char *name, const lf__vault_tail *tail)
{
    int64_t step;
    lf__vault_name_kind(name, &step);
    if (m->kind != LF__VAULT_BASE) return LF_FAIL(LF_ERR_CORRUPT, "%s: its manifest is that of a diff", name);
    if (step >= 0 && step != m->step) return LF_FAIL(LF_ERR_CORRUPT, "%s is the base of step %lld", name, (long long)m->step);
    if (m->files[0].end != tail->meta_offset)
        return LF_FAIL(LF_ERR_CORRUPT, "%s: records end at %lld, the manifest begins at %lld", name, (long long)m->files[0].end,
                       (long long)tail->meta_offset);
    snprintf(m->files[0].name, sizeof m->files[0].name, "%s", name);
    return LF_OK;
}

lf_status lf__vault_load_base(lf__io *io, const char *dir, const char *name, lf__vault_manifest **out)
{
    lf_status rc = LF_OK;
    char path[LF__VAULT_PATH_MAX], *text = NULL;
    lf__file *file = NULL;
    lf__vault_tail tail;
    *out = NULL;
    LF_TRY(lf__io_join(path, sizeof path, dir, name));
    LF_TRY(io->ops->open(io, path, LF_IO_READ, &file));
    LF_TRY(read_tail(io, file, name, &text, &tail));
    LF_TRY(lf__vault_meta_read(out, text, (size_t)tail.meta_bytes, name));
    rc = check_base_manifest(*out, name, &tail);
    if (rc < 0) {
        lf__vault_manifest_unref(*out);
        *out = NULL;
    }
out:
    if (file) io->ops->close(file);
    lf__free(text);
    return rc;
}

/* ---- data files ---------------------------------------------------------------------------------------------------------- */

static bool same_hash(lf__hash128 a, lf__hash128 b) { return a.lo == b.lo && a.hi == b.hi; }

static lf_status find_base(lf__vault_source *src, lf__vault_manifest *known)
{
    lf__vault_manifest *m = src->m;
    lf_status rc = LF_OK;
    if (m->kind == LF__VAULT_BASE) {
        src->base = lf__vault_manifest_ref(m);
        return LF_OK;
    }
    if (known) src->base = lf__vault_manifest_ref(known);
    else rc = lf__vault_load_base(src->io, src->dir, m->files[0].name, &src->base);
    if (rc < 0) return rc;
    if (src->base->step == m->base_step && src->base->seed == m->seed && same_hash(src->base->state_digest, m->base_digest) &&
        lf__vault_layout_same_slices(src->base->layout, m->layout))
        return LF_OK;
    return LF_FAIL(LF_ERR_CORRUPT, "%s is not the base (step %lld) that checkpoint %lld was written against", m->files[0].name,
                   (long long)m->base_step, (long long)m->step);
}

lf_status lf__vault_source_open(lf__vault_source *src, lf__io *io, const char *dir, lf__vault_manifest *m,
                                lf__vault_manifest *base)
{
    lf_status rc = LF_OK;
    *src = (lf__vault_source){.io = io, .dir = dir, .m = lf__vault_manifest_ref(m), .other_file = -1};
    src->files = lf__alloc_array((size_t)m->n_files, sizeof *src->files);
    src->lock = lf__mutex_open();
    if (!src->files || !src->lock) LF_THROW(LF_ERR_NOMEM, "reading checkpoint %lld", (long long)m->step);
    LF_TRY(find_base(src, base));
out:
    if (rc < 0) lf__vault_source_close(src);
    return rc;
}

static void close_files(lf__vault_source *src)
{
    for (int32_t i = 0; src->files && i < src->m->n_files; i++) {
        if (src->files[i]) src->io->ops->close(src->files[i]);
        src->files[i] = NULL;
    }
    src->n_open = 0;
}

void lf__vault_source_close(lf__vault_source *src)
{
    if (!src->m) return;
    close_files(src);
    lf__free(src->files);
    lf__mutex_close(src->lock);
    lf__vault_manifest_unref(src->base);
    lf__vault_manifest_unref(src->m);
    *src = (lf__vault_source){0};
}

void lf__vault_source_trim(lf__vault_source *src)
{
    if (src->n_open > MOST_OPEN) close_files(src);
}

static lf_status check_file_head(lf__vault_source *src, lf__file *file, int32_t number)
{
    const lf__vault_manifest *m = src->m;
    uint8_t raw[LF__VAULT_HEAD_BYTES];
    lf__vault_file_head head;
    size_t got;
    int64_t step;
    lf_status rc = src->io->ops->read(file, 0, raw, sizeof raw, &got);
    if (rc == LF_OK) rc = got == sizeof raw ? lf__vault_file_head_get(&head, raw) : LF_FAIL(LF_ERR_CORRUPT, "file head: cut off");
    if (rc < 0) return lf__fail_prefix(rc, "%s", m->files[number].name);
    lf__vault_data_kind(m->files[number].name, &step);
    if (number == 0) step = m->base_step;
    if (head.kind != (number == 0 ? LF__VAULT_BASE : LF__VAULT_DIFF) || head.step != step || head.seed != m->seed ||
        memcmp(head.map_digest, m->layout->map_digest, 16) != 0)
        return LF_FAIL(LF_ERR_CORRUPT, "%s: file head: a file of kind %d, step %lld of another vault or place",
                       m->files[number].name, head.kind, (long long)head.step);
    return LF_OK;
}

static lf_status open_file(lf__vault_source *src, int32_t number, lf__file **out)
{
    char path[LF__VAULT_PATH_MAX];
    lf__file *file = NULL;
    lf_status rc = number == src->other_file ? (snprintf(path, sizeof path, "%s", src->other_path), LF_OK)
                                             : lf__io_join(path, sizeof path, src->dir, src->m->files[number].name);
    if (rc == LF_OK) rc = src->io->ops->open(src->io, path, LF_IO_READ, &file);
    if (rc < 0) return rc;
    rc = check_file_head(src, file, number);
    if (rc < 0) {
        src->io->ops->close(file);
        return rc;
    }
    src->files[number] = *out = file;
    src->n_open++;
    return LF_OK;
}

static lf_status get_file(lf__vault_source *src, int32_t number, lf__file **out)
{
    lf__lock(src->lock);
    *out = src->files[number];
    lf_status rc = *out ? LF_OK : open_file(src, number, out);
    lf__unlock(src->lock);
    return rc;
}

/* ---- records ------------------------------------------------------------------------------------------------------------- */

/* What a record must be: filled by the caller from the manifest. */
typedef struct wanted {
    const lf__vault_ref *ref;
    int32_t klass, role;
    int64_t slice, raw_bytes;
} wanted;

static wanted want_slice(const lf__vault_manifest *m, int64_t index)
{
    int64_t slice;
    size_t bytes;
    const lf__vault_plane *p = lf__vault_plane_of(m->layout, index, &slice, &bytes);
    return (wanted){&m->refs_of[index], p->klass, p->role, slice, (int64_t)bytes};
}

static lf_status check_record(const wanted *w, const lf__vault_record *r)
{
    if (r->klass == w->klass && r->role == w->role && r->slice == w->slice && r->raw_bytes == w->raw_bytes &&
        r->stored_bytes == w->ref->stored_bytes && same_hash(r->hash, w->ref->hash))
        return LF_OK;
    return LF_FAIL(LF_ERR_CORRUPT, "record head: class %d role %d slice %lld of %lld bytes, which is not what the manifest says",
                   r->klass, r->role, (long long)r->slice, (long long)r->raw_bytes);
}

/* Head and stored bytes, `to` has room for both. */
static lf_status read_record(lf__vault_source *src, const wanted *w, uint8_t *to, lf__vault_record *record)
{
    lf__file *file;
    size_t want = LF__VAULT_HEAD_BYTES + (size_t)w->ref->stored_bytes, got;
    lf_status rc = get_file(src, w->ref->file, &file);
    if (rc == LF_OK) rc = src->io->ops->read(file, w->ref->offset, to, want, &got);
    if (rc == LF_OK && got != want) rc = LF_FAIL(LF_ERR_CORRUPT, "cut off after %zu of %zu bytes", got, want);
    if (rc == LF_OK) rc = lf__vault_record_get(record, to);
    if (rc == LF_OK) rc = check_record(w, record);
    if (rc < 0) return rc;
    uint64_t sum = lf__vault_checksum(to + LF__VAULT_HEAD_BYTES, want - LF__VAULT_HEAD_BYTES);
    if (sum != record->checksum)
        return LF_FAIL(LF_ERR_CORRUPT, "stored bytes: checksum is %016llx, expected %016llx", (unsigned long long)sum,
                       (unsigned long long)record->checksum);
    return LF_OK;
}

/* Put file and record in front of what went wrong. */
static lf_status name_record(const lf__vault_manifest *m, int64_t index, lf_status rc)
{
    char text[160];
    lf__vault_slice_text(m->layout, index, text, sizeof text);
    return lf__fail_prefix(rc, "%s, record at %lld, %s", m->files[m->refs_of[index].file].name,
                           (long long)m->refs_of[index].offset, text);
}

lf_status lf__vault_read_stored(lf__vault_source *src, const lf__vault_manifest *m, int64_t index, lf__vault_work *work,
                                lf__vault_record *record)
{
    wanted w = want_slice(m, index);
    lf_status rc = read_record(src, &w, work->head, record);
    if (rc < 0) return name_record(m, index, rc);
    work->codec = record->codec;
    work->stored_bytes = (size_t)record->stored_bytes;
    work->checksum = record->checksum;
    return LF_OK;
}

/* Decode what work->stored holds and check the content. */
static lf_status decode(lf__vault_source *src, const lf__vault_manifest *m, int64_t index, lf__vault_work *work,
                        const lf__vault_record *record, const uint8_t *base, uint8_t *raw)
{
    const lf__vault_plane *p = lf__vault_plane_of(m->layout, index, NULL, NULL);
    size_t bytes = (size_t)record->raw_bytes;
    lf_status rc =
        lf__vault_codecs[record->codec].decode(work, work->stored, work->stored_bytes, base, p->elem_bytes, raw, bytes);
    if (rc == LF_OK && !same_hash(lf__hash(raw, bytes, src->m->seed), record->hash))
        rc = LF_FAIL(LF_ERR_CORRUPT, "the content does not have the hash that the manifest says");
    return rc < 0 ? name_record(m, index, rc) : LF_OK;
}

lf_status lf__vault_read_base(lf__vault_source *src, int64_t index, lf__vault_work *work, uint8_t *raw)
{
    lf__vault_record record;
    lf_status rc = lf__vault_read_stored(src, src->base, index, work, &record);
    if (rc == LF_OK && lf__vault_codecs[record.codec].needs_base)
        rc = name_record(src->base, index, LF_FAIL(LF_ERR_CORRUPT, "a base that needs a base"));
    return rc < 0 ? rc : decode(src, src->base, index, work, &record, NULL, raw);
}

lf_status lf__vault_read_slice(lf__vault_source *src, int64_t index, lf__vault_work *work, uint8_t *raw, lf__vault_record *record)
{
    lf_status rc = lf__vault_read_stored(src, src->m, index, work, record);
    if (rc < 0) return rc;
    bool coded = lf__vault_codecs[record->codec].needs_base;
    if (coded) {
        if (src->m->refs_of[index].file == 0)
            return name_record(src->m, index, LF_FAIL(LF_ERR_CORRUPT, "a base that needs a base"));
        rc = lf__vault_read_base(src, index, work, work->base);
        if (rc == LF_OK) rc = lf__vault_read_stored(src, src->m, index, work, record); /* the base's took its buffer */
    }
    return rc < 0 ? rc : decode(src, src->m, index, work, record, coded ? work->base : NULL, raw);
}

lf_status lf__vault_check_size(lf__vault_source *src, int32_t number)
{
    lf__file *file;
    int64_t size = 0;
    lf_status rc = get_file(src, number, &file);
    if (rc == LF_OK) rc = src->io->ops->size(file, &size);
    if (rc < 0 || number == 0 || size == src->m->files[number].end) return rc;
    return LF_FAIL(LF_ERR_CORRUPT, "%s has %lld bytes, its records end at %lld", src->m->files[number].name, (long long)size,
                   (long long)src->m->files[number].end);
}

lf_status lf__vault_check_head(lf__vault_source *src, int64_t index, lf__vault_record *record)
{
    uint8_t raw[LF__VAULT_HEAD_BYTES];
    lf__file *file;
    size_t got;
    wanted w = want_slice(src->m, index);
    lf_status rc = get_file(src, w.ref->file, &file);
    if (rc == LF_OK) rc = src->io->ops->read(file, w.ref->offset, raw, sizeof raw, &got);
    if (rc == LF_OK && got != sizeof raw) rc = LF_FAIL(LF_ERR_CORRUPT, "cut off");
    if (rc == LF_OK) rc = lf__vault_record_get(record, raw);
    if (rc == LF_OK) rc = check_record(&w, record);
    return rc < 0 ? name_record(src->m, index, rc) : LF_OK;
}

lf_status lf__vault_read_blob(lf__vault_source *src, int32_t index, void **data)
{
    lf_status rc = LF_OK;
    const lf__vault_blob *b = &src->m->blobs[index];
    wanted w = {&b->ref, LF__VAULT_CLASS_BLOB, LF__VAULT_ROLE_BLOB, index, b->bytes};
    lf__vault_record record;
    lf__vault_work unpack = {.unpack = ZSTD_createDCtx()};
    uint8_t *stored = lf__alloc((size_t)b->ref.stored_bytes + LF__VAULT_HEAD_BYTES), *raw = lf__alloc((size_t)b->bytes + 1);
    *data = NULL;
    if (!stored || !raw || !unpack.unpack) LF_THROW(LF_ERR_NOMEM, "blob %s of %lld bytes", b->name, (long long)b->bytes);
    LF_TRY(read_record(src, &w, stored, &record));
    if (record.codec != LF__CODEC_RAW && record.codec != LF__CODEC_ZSTD)
        LF_THROW(LF_ERR_CORRUPT, "codec %d, expected 0 or 1", record.codec);
    LF_TRY(lf__vault_codecs[record.codec].decode(&unpack, stored + LF__VAULT_HEAD_BYTES, (size_t)record.stored_bytes, NULL, 1,
                                                 raw, (size_t)b->bytes));
    if (!same_hash(lf__hash(raw, (size_t)b->bytes, src->m->seed), record.hash))
        LF_THROW(LF_ERR_CORRUPT, "the content does not have its hash");
    *data = raw;
    raw = NULL;
out:
    ZSTD_freeDCtx(unpack.unpack);
    lf__free(stored);
    lf__free(raw);
    return rc < 0 ? lf__fail_prefix(rc, "%s, record at %lld, blob %.80s", src->m->files[b->ref.file].name,
                                    (long long)b->ref.offset, b->name)
                  : LF_OK;
}
