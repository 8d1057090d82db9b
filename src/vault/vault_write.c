/* SPDX-License-Identifier: Apache-2.0 */
/* The writer's half of a save: hash, compare, decide between diff and base, encode, write, commit. */
#include <stdio.h>
#include <string.h>

#include "vault_int.h"

enum { SAMPLES = 16 };

typedef struct writing {
    lf_vault *v;
    lf__vault_manifest *m;
    lf__vault_source prev; /* for slices that were not staged, and for XOR the base behind it; m NULL: none */
    bool as_base, sampling;
    _Atomic bool base_failed;  /* what is already stored could not be read: write a new base instead */
    int32_t own;               /* number of the file being written */
    int64_t n_list, raw_bytes; /* slices to write and their bytes */
    int64_t sample_raw, sample_stored;
    lf__vault_out out;
    lf__vault_commit commit;
} writing;

static bool same_hash(lf__hash128 a, lf__hash128 b) { return a.lo == b.lo && a.hi == b.hi; }

/* ---- what changed ------------------------------------------------------------------------------------------------------- */

static void hash_slice(void *user, int64_t i)
{
    lf_vault *v = user;
    size_t bytes;
    if (!v->job.staged[i]) return;
    const uint8_t *raw = lf__vault_staged(v, i, &bytes);
    v->job.hashes[i] = lf__hash(raw, bytes, v->seed);
}

/* Slices whose content is not that of the last checkpoint; the others keep their place. */
static void list_changes(writing *w)
{
    lf_vault *v = w->v;
    const lf__vault_manifest *prev = w->as_base ? NULL : v->prev;
    w->n_list = w->raw_bytes = 0;
    for (int64_t i = 0; i < v->layout->n_slices; i++) {
        lf__vault_ref *ref = &w->m->refs_of[i];
        if (prev && same_hash(v->job.hashes[i], prev->refs_of[i].hash)) {
            *ref = prev->refs_of[i];
            continue;
        }
        size_t bytes;
        lf__vault_plane_of(v->layout, i, NULL, &bytes);
        *ref = (lf__vault_ref){.hash = v->job.hashes[i], .file = -1};
        v->job.list[w->n_list++] = i;
        w->raw_bytes += (int64_t)bytes;
    }
}

/* ---- encoding ------------------------------------------------------------------------------------------------------------ */

static bool may_xor(const writing *w, const lf__vault_plane *p)
{
    /* Moments are as large coded against the base as by themselves. */
    return !w->as_base && w->v->opts.compress > 0 && (p->role == LF_ROLE_WEIGHT || p->role == LF_ROLE_MASTER);
}

static lf_status encode_slice(void *user, lf__vault_work *work, int64_t i)
{
    writing *w = user;
    lf_vault *v = w->v;
    size_t bytes;
    const lf__vault_plane *p = lf__vault_plane_of(v->layout, i, NULL, NULL);
    const uint8_t *raw = lf__vault_staged(v, i, &bytes), *base = NULL;
    lf__vault_record record;
    lf_status rc = LF_OK;
    if (!v->job.staged[i]) {
        rc = lf__vault_read_slice(&w->prev, i, work, work->raw, &record);
        raw = work->raw;
    } else if (may_xor(w, p)) {
        rc = lf__vault_read_base(&w->prev, i, work, work->raw);
        base = work->raw;
    }
    if (rc < 0 && rc != LF_ERR_NOMEM) w->base_failed = true;
    return rc < 0 ? rc : lf__vault_encode(work, raw, base, bytes, p->elem_bytes, v->opts.compress);
}

static lf_status write_slice(void *user, lf__vault_work *work, int64_t i)
{
    writing *w = user;
    int64_t slice;
    size_t bytes;
    const lf__vault_plane *p = lf__vault_plane_of(w->v->layout, i, &slice, &bytes);
    if (w->sampling) {
        w->sample_raw += (int64_t)bytes;
        w->sample_stored += (int64_t)work->stored_bytes + LF__VAULT_HEAD_BYTES;
        return LF_OK;
    }
    lf__vault_record record = {.klass = p->klass,
                               .role = p->role,
                               .codec = work->codec,
                               .slice = slice,
                               .raw_bytes = (int64_t)bytes,
                               .stored_bytes = (int64_t)work->stored_bytes,
                               .hash = w->m->refs_of[i].hash,
                               .checksum = work->checksum};
    w->m->refs_of[i].file = w->own;
    return lf__vault_out_record(&w->out, work, &record, &w->m->refs_of[i]);
}

/* ---- diff or base ----------------------------------------------------------------------------------------------------------- */

/* Bytes of a diff by encoding a few of its slices. */
static lf_status measure_diff(writing *w, double *bytes)
{
    lf_vault *v = w->v;
    int64_t pick[SAMPLES], n = w->n_list < SAMPLES ? w->n_list : SAMPLES;
    for (int64_t k = 0; k < n; k++) pick[k] = v->job.list[k * w->n_list / n];
    w->sampling = true;
    w->sample_raw = w->sample_stored = 0;
    lf_status rc = lf__vault_crew_run(&v->crew, pick, n, encode_slice, write_slice, NULL, w);
    w->sampling = false;
    *bytes = w->sample_raw > 0 ? (double)w->raw_bytes * (double)w->sample_stored / (double)w->sample_raw : 0;
    return rc;
}

static lf_status decide(writing *w)
{
    lf_vault *v = w->v;
    double bytes = 0, limit;
    w->as_base = !v->sound || (v->opts.rebase_every > 0 && v->n_diffs >= v->opts.rebase_every);
    list_changes(w);
    if (w->as_base) return LF_OK;
    lf_status rc = lf__vault_source_open(&w->prev, v->io, v->dir, v->prev, v->base);
    if (rc == LF_ERR_NOMEM) return rc;
    if (rc == LF_OK) rc = measure_diff(w, &bytes);
    if (rc < 0 && !w->base_failed && w->prev.m) return rc;
    limit = v->opts.rebase_ratio * (double)v->base->files[0].end;
    if (rc < 0) {
        lf__log(LF_LOG_WARN, "vault %s: a new base is written because the old one cannot be read: %s", v->dir, lf_error_text());
        w->as_base = true;
    } else if (bytes > limit) {
        lf__log(LF_LOG_INFO, "vault %s: step %lld: a diff would have %.1f MB, more than %.0f %% of the base: writing a new base",
                v->dir, (long long)w->m->step, bytes / 1e6, 100 * v->opts.rebase_ratio);
        w->as_base = true;
    }
    if (w->as_base) list_changes(w);
    return LF_OK;
}

/* ---- files --------------------------------------------------------------------------------------------------------------- */

static lf_status choose_base_name(writing *w, char name[LF__VAULT_NAME_MAX])
{
    char path[LF__VAULT_PATH_MAX];
    bool taken = false;
    snprintf(name, LF__VAULT_NAME_MAX, "base_model.bin");
    lf_status rc = lf__io_join(path, sizeof path, w->v->dir, name);
    if (rc == LF_OK) rc = w->v->io->ops->exists(w->v->io, path, &taken);
    if (taken) snprintf(name, LF__VAULT_NAME_MAX, "base_%lld.bin", (long long)w->m->step);
    return rc;
}

/* The last checkpoint's files that are still needed, renumbered, and this one's own. */
static lf_status list_files(writing *w, const char *own_name)
{
    lf__vault_manifest *m = w->m;
    const lf__vault_manifest *prev = w->as_base ? NULL : w->v->prev;
    int32_t n_prev = prev ? prev->n_files : 0, *number = NULL;
    lf_status rc = LF_OK;
    m->files = lf__alloc_array((size_t)n_prev + 1, sizeof *m->files);
    number = lf__alloc_array((size_t)n_prev + 1, sizeof *number);
    if (!m->files || !number) LF_THROW(LF_ERR_NOMEM, "%d files", n_prev + 1);
    for (int64_t i = 0; i < m->layout->n_slices; i++)
        if (m->refs_of[i].file >= 0) number[m->refs_of[i].file] = 1;
    for (int32_t f = 0; f < n_prev; f++) {
        if (f > 0 && !number[f]) continue;
        number[f] = m->n_files;
        m->files[m->n_files++] = prev->files[f];
    }
    for (int64_t i = 0; i < m->layout->n_slices; i++)
        if (m->refs_of[i].file >= 0) m->refs_of[i].file = number[m->refs_of[i].file];
    w->own = -1;
    if (w->as_base || w->n_list > 0 || w->v->job.n_blobs > 0) {
        w->own = m->n_files++;
        snprintf(m->files[w->own].name, sizeof m->files[w->own].name, "%s", own_name);
    }
out:
    lf__free(number);
    return rc;
}

static lf_status write_blobs(writing *w)
{
    const lf__vault_job *job = &w->v->job;
    w->m->blobs = lf__alloc_array((size_t)job->n_blobs, sizeof *w->m->blobs);
    if (!w->m->blobs) return LF_FAIL(LF_ERR_NOMEM, "%d blobs", job->n_blobs);
    for (int32_t i = 0; i < job->n_blobs; i++) {
        const lf_blob *from = &job->blobs[i];
        lf__vault_blob *to = &w->m->blobs[w->m->n_blobs++];
        *to = (lf__vault_blob){.name = lf__strdup(from->name), .bytes = from->bytes, .ref.file = w->own};
        if (!to->name) return LF_FAIL(LF_ERR_NOMEM, "blob %.80s", from->name);
        lf_status rc = lf__vault_out_blob(&w->out, from, i, w->m->seed, w->v->opts.compress, &to->ref);
        if (rc < 0) return rc;
    }
    return LF_OK;
}

static lf_status check_slice(void *user, lf__vault_work *work, int64_t i)
{
    lf__vault_record record;
    return lf__vault_read_slice(user, i, work, work->raw, &record);
}

/* Read back what was written, before anybody can see it. */
static lf_status read_back(writing *w, const char *path)
{
    lf_vault *v = w->v;
    lf__vault_source src;
    lf_status rc = lf__vault_source_open(&src, v->io, v->dir, w->m, w->as_base ? NULL : v->base);
    if (rc < 0) return rc;
    src.other_file = w->own;
    src.other_path = path;
    rc = lf__vault_crew_run(&v->crew, v->job.list, w->n_list, check_slice, NULL, NULL, &src);
    for (int32_t i = 0; rc == LF_OK && i < w->m->n_blobs; i++) {
        void *data;
        rc = lf__vault_read_blob(&src, i, &data);
        lf__free(data);
    }
    lf__vault_source_close(&src);
    return rc < 0 ? lf__fail_prefix(rc, "reading back what was just written") : LF_OK;
}

static lf_status write_data(writing *w, const char *path)
{
    lf_vault *v = w->v;
    lf__vault_manifest *m = w->m;
    lf__vault_file_head head = {w->as_base ? LF__VAULT_BASE : LF__VAULT_DIFF, m->step, m->seed, {0}};
    memcpy(head.map_digest, m->layout->map_digest, 16);
    lf_status rc = LF_OK;
    LF_TRY(lf__vault_out_open(&w->out, v->io, path, &head));
    LF_TRY(lf__vault_crew_run(&v->crew, v->job.list, w->n_list, encode_slice, write_slice, w->prev.m ? &w->prev : NULL, w));
    LF_TRY(write_blobs(w));
    m->files[w->own].end = w->out.end;
    if (w->as_base) LF_TRY(lf__vault_out_tail(&w->out, m));
    LF_TRY(lf__vault_out_sync_close(&w->out, !(v->plant & LF__VAULT_PLANT_NO_DATA_SYNC)));
    if (v->opts.verify) LF_TRY(read_back(w, path));
out:
    return rc;
}

static lf_status write_base(writing *w)
{
    lf__vault_manifest *m = w->m;
    char name[LF__VAULT_NAME_MAX];
    lf_status rc = LF_OK;
    LF_TRY(choose_base_name(w, name));
    LF_TRY(lf__vault_commit_init(&w->commit, w->v->io, w->v->dir, m->step, name, w->v->plant));
    LF_TRY(list_files(w, name));
    m->kind = LF__VAULT_BASE;
    m->base_step = m->step;
    m->base_digest = m->state_digest;
    if (!w->prev.m && w->v->prev && memchr(w->v->job.staged, 0, (size_t)m->layout->n_slices))
        LF_TRY(lf__vault_source_open(&w->prev, w->v->io, w->v->dir, w->v->prev, w->v->base));
    LF_TRY(write_data(w, w->commit.base_temp));
    LF_TRY(lf__vault_commit_base(&w->commit));
    LF_TRY(lf__vault_commit_make_folder(&w->commit));
    LF_TRY(lf__vault_commit_folder(&w->commit, m));
out:
    return rc;
}

static lf_status write_diff(writing *w)
{
    lf__vault_manifest *m = w->m;
    char name[LF__VAULT_NAME_MAX], path[LF__VAULT_PATH_MAX];
    lf_status rc = LF_OK;
    LF_TRY(lf__vault_commit_init(&w->commit, w->v->io, w->v->dir, m->step, NULL, w->v->plant));
    snprintf(name, sizeof name, "checkpoint_%lld/diff_001.bin", (long long)m->step);
    LF_TRY(list_files(w, name));
    m->kind = LF__VAULT_DIFF;
    m->base_step = w->v->base->step;
    m->base_digest = w->v->base->state_digest;
    LF_TRY(lf__vault_commit_make_folder(&w->commit));
    LF_TRY(lf__io_join(path, sizeof path, w->commit.folder_temp, "diff_001.bin"));
    if (w->own >= 0) LF_TRY(write_data(w, path));
    LF_TRY(lf__vault_commit_folder(&w->commit, m));
out:
    return rc;
}

/* ---- the whole -------------------------------------------------------------------------------------------------------------- */

static lf_status note_commit(writing *w)
{
    lf_vault *v = w->v;
    lf__vault_manifest *m = w->m;
    lf_status rc = LF_OK;
    int32_t n = 0;
    for (int32_t i = 0; i < v->catalog.n; i++) { /* a damaged one of this step was set aside */
        if (v->catalog.entries[i].step == m->step && v->catalog.entries[i].damaged) lf__free(v->catalog.entries[i].refs);
        else v->catalog.entries[n++] = v->catalog.entries[i];
    }
    v->catalog.n = n;
    rc = lf__vault_catalog_add(&v->catalog, m->step, NULL);
    for (int32_t i = 0; rc == LF_OK && i < v->catalog.n; i++)
        if (v->catalog.entries[i].step == m->step) rc = lf__vault_entry_note(&v->catalog.entries[i], m);
    return rc;
}

static void adopt(writing *w)
{
    lf_vault *v = w->v;
    lf__lock(v->mutex);
    v->stats.committed++;
    v->stats.rebases += w->as_base && v->base;
    v->stats.bytes_written += w->out.end;
    v->stats.bytes_raw += v->layout->raw_bytes;
    v->stats.slices_changed += w->n_list;
    v->stats.slices_total += v->layout->n_slices;
    lf__unlock(v->mutex);
    if (w->as_base) {
        lf__vault_manifest_unref(v->base);
        v->base = lf__vault_manifest_ref(w->m);
    }
    v->n_diffs = w->as_base ? 0 : v->n_diffs + 1;
    lf__vault_manifest_unref(v->prev);
    v->prev = lf__vault_manifest_ref(w->m);
    v->sound = true;
    lf__log(LF_LOG_INFO, "vault %s: step %lld committed: %s of %lld of %lld slices, %.1f of %.1f MB", v->dir,
            (long long)w->m->step, w->as_base ? "base" : "diff", (long long)w->n_list, (long long)v->layout->n_slices,
            (double)w->out.end / 1e6, (double)v->layout->raw_bytes / 1e6);
}

/* The list no longer says what lies there: read it again, and finish deletions that were interrupted. */
static lf_status reread_catalog(lf_vault *v)
{
    lf__vault_catalog fresh;
    lf_status rc = lf__vault_clean(v->io, v->dir);
    if (rc == LF_OK) rc = lf__vault_catalog_open(&fresh, v->io, v->dir);
    if (rc < 0) return rc;
    for (int32_t i = 0; i < fresh.n; i++)
        for (int32_t j = 0; j < v->catalog.n; j++)
            if (fresh.entries[i].step == v->catalog.entries[j].step) fresh.entries[i].damaged |= v->catalog.entries[j].damaged;
    lf__vault_catalog_close(&v->catalog);
    v->catalog = fresh;
    return LF_OK;
}

/* The checkpoint is safe by now: what fails here is said and tried again after the next one. */
static void retain(lf_vault *v, int64_t step)
{
    lf__vault_keep keep = {v->opts.keep_last, v->opts.keep_every, -1, step, v->seed};
    if (keep.last == 0) return;
    lf_status rc = v->stale ? reread_catalog(v) : LF_OK;
    if (rc == LF_OK) rc = lf__vault_retain(&v->catalog, v->io, v->dir, &keep, NULL);
    v->stale = rc < 0;
    if (rc < 0) lf__log(LF_LOG_WARN, "vault %s: old checkpoints stay for now: %s", v->dir, lf_error_text());
}

static lf_status start(writing *w)
{
    lf_vault *v = w->v;
    lf_status rc = lf__vault_manifest_new(&w->m, v->layout);
    if (rc < 0) return rc;
    w->m->step = v->job.step;
    w->m->seed = v->seed;
    w->m->time_unix = lf__unix_ns() / 1000000000;
    lf__parallel(v->opts.threads, v->layout->n_slices, hash_slice, v);
    rc = decide(w);
    w->m->n_changed = w->n_list;
    w->m->state_digest = lf__vault_manifest_digest(w->m);
    return rc;
}

static lf_status attempt(lf_vault *v, bool *base_failed)
{
    lf_status rc;
    writing *w = lf__alloc(sizeof *w);
    if (!w) return LF_FAIL(LF_ERR_NOMEM, "writing checkpoint %lld", (long long)v->job.step);
    w->v = v;
    rc = start(w);
    if (rc == LF_OK) rc = w->as_base ? write_base(w) : write_diff(w);
    if (rc < 0) {
        lf__vault_out_abandon(&w->out);
        if (w->commit.io) lf__vault_commit_undo(&w->commit);
        *base_failed = w->base_failed;
    } else {
        adopt(w);
        v->stale |= note_commit(w) < 0;
        retain(v, w->m->step);
    }
    lf__vault_source_close(&w->prev);
    lf__vault_manifest_unref(w->m);
    lf__free(w);
    return rc;
}

lf_status lf__vault_write(lf_vault *v)
{
    bool base_failed = false;
    lf_status rc = attempt(v, &base_failed);
    if (rc < 0 && base_failed && !memchr(v->job.staged, 0, (size_t)v->layout->n_slices)) {
        lf__log(LF_LOG_WARN, "vault %s: a new base is written because the old one cannot be read: %s", v->dir, lf_error_text());
        v->sound = false;
        rc = attempt(v, &base_failed);
    }
    if (rc < 0 && base_failed) v->sound = false;
    return rc < 0 ? lf__fail_prefix(rc, "checkpoint %lld was not saved", (long long)v->job.step) : LF_OK;
}
