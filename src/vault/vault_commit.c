/* SPDX-License-Identifier: Apache-2.0 */
/* Writing data files, and the order of operations that makes a checkpoint appear whole or not at all:
 *
 *   data files, each fsync'ed ▸ meta.json.tmp, fsync ▸ rename to meta.json ▸ fsync of checkpoint_<step>.tmp
 *   ▸ rename to checkpoint_<step> ▸ fsync of the vault's folder
 *
 * A base goes the same way before its folder: base_<step>.bin.tmp, fsync, rename, fsync of the vault's folder. A failed
 * operation, above all a failed fsync, is never tried again: what was written is removed and the save has failed. */
#include <stdio.h>
#include <string.h>

#include "vault_int.h"

/* ---- data files ---------------------------------------------------------------------------------------------------------- */

lf_status lf__vault_out_open(lf__vault_out *out, lf__io *io, const char *path, const lf__vault_file_head *head)
{
    uint8_t raw[LF__VAULT_HEAD_BYTES];
    *out = (lf__vault_out){.io = io};
    lf_status rc = io->ops->open(io, path, LF_IO_WRITE | LF_IO_CREATE, &out->file);
    if (rc < 0) return rc;
    lf__vault_file_head_put(raw, head);
    rc = io->ops->write(out->file, 0, raw, sizeof raw);
    out->end = sizeof raw;
    return rc;
}

lf_status lf__vault_out_record(lf__vault_out *out, lf__vault_work *work, const lf__vault_record *record, lf__vault_ref *ref)
{
    lf__vault_record_put(work->head, record);
    size_t bytes = LF__VAULT_HEAD_BYTES + work->stored_bytes;
    lf_status rc = out->io->ops->write(out->file, out->end, work->head, bytes);
    ref->hash = record->hash;
    ref->offset = out->end;
    ref->stored_bytes = record->stored_bytes;
    out->end += (int64_t)bytes;
    return rc;
}

lf_status lf__vault_out_blob(lf__vault_out *out, const lf_blob *blob, int32_t index, uint64_t seed, int32_t level,
                             lf__vault_ref *ref)
{
    lf_status rc = LF_OK;
    size_t bytes = (size_t)blob->bytes;
    lf__vault_work w = {0};
    lf__vault_record record = {.klass = LF__VAULT_CLASS_BLOB,
                               .role = LF__VAULT_ROLE_BLOB,
                               .slice = index,
                               .raw_bytes = blob->bytes,
                               .hash = lf__hash(blob->data, bytes, seed)};
    w.head = lf__alloc(bytes + LF__VAULT_HEAD_BYTES);
    w.pack = ZSTD_createCCtx();
    if (!w.head || !w.pack) LF_THROW(LF_ERR_NOMEM, "blob %.80s of %zu bytes", blob->name, bytes);
    w.stored = w.head + LF__VAULT_HEAD_BYTES;
    rc = LF_AGAIN;
    record.codec = LF__CODEC_ZSTD;
    if (level > 0 && bytes > 0)
        LF_TRY(
            lf__vault_codecs[LF__CODEC_ZSTD].encode(&w, blob->data, NULL, bytes, 1, level, w.stored, bytes - 1, &w.stored_bytes));
    if (rc == LF_AGAIN) {
        record.codec = LF__CODEC_RAW;
        w.stored_bytes = bytes;
        if (bytes) memcpy(w.stored, blob->data, bytes);
    }
    record.stored_bytes = (int64_t)w.stored_bytes;
    record.checksum = lf__vault_checksum(w.stored, w.stored_bytes);
    LF_TRY(lf__vault_out_record(out, &w, &record, ref));
out:
    ZSTD_freeCCtx(w.pack);
    lf__free(w.head);
    return rc;
}

lf_status lf__vault_out_tail(lf__vault_out *out, const lf__vault_manifest *m)
{
    lf__buf text = {.max = LF__VAULT_MAX_META_BYTES};
    uint8_t raw[LF__VAULT_TAIL_BYTES];
    lf_status rc = lf__vault_meta_write(m, &text);
    if (rc < 0) goto out;
    lf__vault_tail_put(raw, &(lf__vault_tail){out->end, (int64_t)text.used, lf__hash(text.data, text.used, 0)});
    LF_TRY(out->io->ops->write(out->file, out->end, text.data, text.used));
    LF_TRY(out->io->ops->write(out->file, out->end + (int64_t)text.used, raw, sizeof raw));
    out->end += (int64_t)text.used + LF__VAULT_TAIL_BYTES;
out:
    lf__buf_free(&text);
    return rc;
}

lf_status lf__vault_out_sync_close(lf__vault_out *out, bool sync)
{
    lf__file *file = out->file;
    lf_status rc = sync ? out->io->ops->sync(file) : LF_OK;
    if (rc < 0) return rc; /* lf__vault_out_abandon closes it */
    out->file = NULL;
    return out->io->ops->close(file);
}

void lf__vault_out_abandon(lf__vault_out *out)
{
    if (out->file) out->io->ops->close(out->file);
    out->file = NULL;
}

/* ---- commit -------------------------------------------------------------------------------------------------------------- */

lf_status lf__vault_commit_init(lf__vault_commit *c, lf__io *io, const char *dir, int64_t step, const char *base, uint32_t plant)
{
    char name[LF__VAULT_NAME_MAX + 16];
    *c = (lf__vault_commit){.io = io, .dir = dir, .plant = plant, .with_base = base != NULL};
    snprintf(name, sizeof name, "checkpoint_%lld", (long long)step);
    lf_status rc = lf__io_join(c->folder, sizeof c->folder, dir, name);
    snprintf(name, sizeof name, "checkpoint_%lld.tmp", (long long)step);
    if (rc == LF_OK) rc = lf__io_join(c->folder_temp, sizeof c->folder_temp, dir, name);
    if (rc < 0 || !base) return rc;
    rc = lf__io_join(c->base, sizeof c->base, dir, base);
    snprintf(name, sizeof name, "%s.tmp", base);
    return rc < 0 ? rc : lf__io_join(c->base_temp, sizeof c->base_temp, dir, name);
}

/* Only what did not verify is ever in the way: it moves aside, nothing is deleted. */
static lf_status set_aside(lf__io *io, const char *path)
{
    char to[LF__VAULT_PATH_MAX + 32];
    bool taken = false;
    lf_status rc = io->ops->exists(io, path, &taken);
    for (int i = 1; rc == LF_OK && taken; i++) {
        snprintf(to, sizeof to, "%s.damaged_%d", path, i);
        rc = io->ops->exists(io, to, &taken);
        if (rc < 0 || taken) continue;
        lf__log(LF_LOG_WARN, "%s does not verify: renamed to %s", path, to);
        return io->ops->rename(io, path, to);
    }
    return rc;
}

lf_status lf__vault_commit_base(lf__vault_commit *c)
{
    lf_status rc = set_aside(c->io, c->base);
    if (rc == LF_OK) rc = c->io->ops->rename(c->io, c->base_temp, c->base);
    if (rc < 0) return rc;
    c->base_shown = true;
    return c->plant & LF__VAULT_PLANT_NO_DIR_SYNC ? LF_OK : c->io->ops->sync_dir(c->io, c->dir);
}

lf_status lf__vault_commit_make_folder(lf__vault_commit *c)
{
    lf_status rc = c->io->ops->make_dir(c->io, c->folder_temp);
    if (rc == LF_OK) c->folder_made = true;
    return rc;
}

static lf_status write_meta(lf__vault_commit *c, const char *path, const lf__vault_manifest *m)
{
    lf__io *io = c->io;
    lf__file *file = NULL;
    lf__buf text = {.max = LF__VAULT_MAX_META_BYTES};
    lf_status rc = lf__vault_meta_write(m, &text);
    if (rc == LF_OK) rc = io->ops->open(io, path, LF_IO_WRITE | LF_IO_CREATE, &file);
    if (rc == LF_OK) rc = io->ops->write(file, 0, text.data, text.used);
    if (rc == LF_OK && !(c->plant & LF__VAULT_PLANT_NO_META_SYNC)) rc = io->ops->sync(file);
    lf__fault first = {0};
    lf__fault_keep(&first, rc);
    lf__buf_free(&text);
    if (file) lf__fault_keep(&first, io->ops->close(file));
    return lf__fault_raise(&first);
}

static lf_status show_folder(lf__vault_commit *c)
{
    lf_status rc = set_aside(c->io, c->folder);
    if (rc == LF_OK) rc = c->io->ops->rename(c->io, c->folder_temp, c->folder);
    if (rc == LF_OK) c->folder_shown = true;
    return rc;
}

lf_status lf__vault_commit_folder(lf__vault_commit *c, const lf__vault_manifest *m)
{
    char temp[LF__VAULT_PATH_MAX], path[LF__VAULT_PATH_MAX];
    lf__io *io = c->io;
    lf_status rc = LF_OK;
    LF_TRY(lf__io_join(temp, sizeof temp, c->folder_temp, "meta.json.tmp"));
    LF_TRY(lf__io_join(path, sizeof path, c->folder_temp, "meta.json"));
    LF_TRY(write_meta(c, temp, m));
    LF_TRY(io->ops->rename(io, temp, path));
    if (!(c->plant & LF__VAULT_PLANT_NO_FOLDER_SYNC)) LF_TRY(io->ops->sync_dir(io, c->folder_temp));
    LF_TRY(show_folder(c));
    if (!(c->plant & LF__VAULT_PLANT_NO_DIR_SYNC)) LF_TRY(io->ops->sync_dir(io, c->dir));
out:
    return rc;
}

/* Remove what this save wrote, and nothing else. A shown folder first stops being a checkpoint by its name. Keeps the caller's
 * error text: this is called because of it. */
void lf__vault_commit_undo(lf__vault_commit *c)
{
    lf__io *io = c->io;
    lf__fault first = {0};
    lf__fault_keep(&first, LF_FAIL(LF_ERR_INTERNAL, "%s", lf_error_text()));
    lf_status rc = LF_OK;
    if (c->folder_shown) rc = io->ops->rename(io, c->folder, c->folder_temp);
    if (rc == LF_OK && c->folder_made) rc = lf__vault_remove_folder(io, c->folder_temp);
    if (rc < 0) lf__log(LF_LOG_WARN, "after a failed save: %s", lf_error_text());
    if (c->with_base && (rc == LF_OK || !c->folder_shown)) {
        rc = io->ops->remove(io, c->base_shown ? c->base : c->base_temp);
        if (rc < 0 && rc != LF_ERR_NOTFOUND) lf__log(LF_LOG_WARN, "after a failed save: %s", lf_error_text());
    }
    lf__fault_raise(&first);
}
