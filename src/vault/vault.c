/* SPDX-License-Identifier: Apache-2.0 */
/* Opening and closing, the hand-over between caller and writer thread, statistics. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "vault_int.h"

/* ---- the writer thread ---------------------------------------------------------------------------------------------------- */

static void run_writer(void *user)
{
    lf_vault *v = user;
    lf__lock(v->mutex);
    for (;;) {
        while (!v->job.busy && !v->stop) lf__wait(v->mutex);
        if (!v->job.busy) break;
        lf__unlock(v->mutex);
        int64_t from = lf__now_ns();
        lf_status rc = lf__vault_write(v);
        if (rc < 0) lf__log(LF_LOG_ERROR, "vault %s: %s", v->dir, lf_error_text());
        lf__vault_job_clear(&v->job);
        lf__lock(v->mutex);
        lf__fault_keep(&v->fault, rc);
        v->stats.write_s += (double)(lf__now_ns() - from) * 1e-9;
        v->job.busy = false;
        lf__wake(v->mutex);
    }
    lf__unlock(v->mutex);
}

/* Returns with the mutex held and no job in flight. */
static void lock_idle(lf_vault *v)
{
    lf__lock(v->mutex);
    while (v->job.busy) lf__wait(v->mutex);
}

/* The caller holds the mutex. Each error is reported once. */
static lf_status take_fault(lf_vault *v)
{
    lf_status rc = lf__fault_raise(&v->fault);
    v->fault = (lf__fault){0};
    return rc;
}

/* ---- open ------------------------------------------------------------------------------------------------------------------ */

static lf_status take_folder(lf_vault *v)
{
    char path[LF__VAULT_PATH_MAX], parent[LF__VAULT_PATH_MAX];
    bool there;
    lf_status rc = LF_OK;
    LF_TRY(v->io->ops->exists(v->io, v->dir, &there));
    if (!there) {
        LF_TRY(v->io->ops->make_dir(v->io, v->dir));
        LF_TRY(lf__io_dir_of(parent, sizeof parent, v->dir));
        LF_TRY(v->io->ops->sync_dir(v->io, parent));
    }
    LF_TRY(lf__io_join(path, sizeof path, v->dir, "vault.lock"));
    LF_TRY(v->io->ops->lock(v->io, path, &v->lock_file));
    LF_TRY(lf__vault_clean(v->io, v->dir));
    LF_TRY(lf__vault_catalog_open(&v->catalog, v->io, v->dir));
out:
    return rc;
}

/* The newest readable manifest tells whose vault this is. What cannot be read is stepped over, as in a restore. */
static lf_status look_at_newest(lf_vault *v)
{
    for (int32_t i = v->catalog.n - 1; i >= 0; i--) {
        lf__vault_entry *e = &v->catalog.entries[i];
        lf__vault_manifest *m = NULL;
        lf_status rc = lf__vault_entry_load(e, v->io, v->dir, &m);
        if (rc == LF_ERR_NOMEM || rc == LF_ERR_UNSUPPORTED) return rc;
        if (rc < 0) {
            e->damaged = true;
            lf__log(LF_LOG_WARN, "vault %s: stepped over: %s", v->dir, lf_error_text());
            continue;
        }
        rc = lf__vault_layout_match(v->layout, m->layout);
        v->seed = m->seed;
        lf__vault_manifest_unref(m);
        return rc < 0 ? lf__fail_prefix(rc, "vault %s, step %lld", v->dir, (long long)e->step) : LF_OK;
    }
    return LF_OK;
}

static uint64_t fresh_seed(void)
{
    uint64_t parts[3] = {(uint64_t)lf__unix_ns(), (uint64_t)lf__now_ns(), (uint64_t)getpid()};
    return lf__hash(parts, sizeof parts, 0).lo;
}

static lf_status check_options(const lf_vault *v)
{
    LF_CHECK_ARG(v->opts.slice_bytes % 4096 == 0, "slice_bytes is %lld, expected a multiple of 4096",
                 (long long)v->opts.slice_bytes);
    LF_CHECK_ARG(v->opts.staging_bytes == 0 || v->opts.staging_bytes >= v->layout->staged_bytes,
                 "staging_bytes is %lld, one snapshot of this map takes %lld; hint: 0 takes what is needed",
                 (long long)v->opts.staging_bytes, (long long)v->layout->staged_bytes);
    return LF_OK;
}

lf_status lf__vault_open_io(lf_vault **out, const char *dir, lf_map *map, const lf_vault_options *opts, lf__io *io)
{
    lf_status rc = LF_OK;
    LF_CHECK_ARG(out, "out is NULL");
    *out = NULL;
    LF_CHECK_ARG(dir && *dir && map && io, "dir or map is NULL");
    lf_vault *v = lf__alloc(sizeof *v);
    if (!v) return LF_FAIL(LF_ERR_NOMEM, "vault %s", dir);
    v->io = io;
    v->saved_step = INT64_MIN;
    v->seed = fresh_seed();
    v->map = lf_map_ref(map);
    if ((size_t)snprintf(v->dir, sizeof v->dir, "%s", dir) >= sizeof v->dir - LF__VAULT_NAME_MAX)
        LF_THROW(LF_ERR_INVALID, "the vault's path has more than %zu bytes", sizeof v->dir - LF__VAULT_NAME_MAX);
    for (size_t n = strlen(v->dir); n > 1 && v->dir[n - 1] == '/'; n--) v->dir[n - 1] = 0;
    LF_TRY(lf__options_take("vault", &v->opts, sizeof v->opts, opts));
    v->mutex = lf__mutex_open();
    if (!v->mutex) LF_THROW(LF_ERR_NOMEM, "vault %s", dir);
    LF_TRY(lf__vault_layout_of_map(&v->layout, map, v->opts.slice_bytes));
    LF_TRY(check_options(v));
    v->views = lf__alloc_array((size_t)v->layout->n_planes, sizeof *v->views);
    if (!v->views) LF_THROW(LF_ERR_NOMEM, "vault %s", dir);
    LF_TRY(take_folder(v));
    LF_TRY(look_at_newest(v));
    *out = v;
    return LF_OK;
out:
    lf_vault_close(v);
    return rc;
}

lf_status lf_vault_open(lf_vault **out, const char *dir, lf_map *map, const lf_vault_options *opts)
{
    return lf__vault_open_io(out, dir, map, opts, lf__io_posix());
}

/* ---- close ----------------------------------------------------------------------------------------------------------------- */

static void free_views(lf_vault *v)
{
    for (int32_t i = 0; v->views && i < v->layout->n_planes; i++) lf__vault_view_close(&v->views[i]);
    lf__free(v->views);
}

void lf__vault_free_blobs(lf_vault *v)
{
    for (int32_t i = 0; v->blob_data && i < v->n_blobs; i++) lf__free(v->blob_data[i]);
    lf__free(v->blob_data);
    lf__vault_manifest_unref(v->restored);
    v->blob_data = NULL;
    v->restored = NULL;
    v->n_blobs = 0;
}

lf_status lf_vault_close(lf_vault *v)
{
    if (!v) return LF_OK;
    lf__fault first = {0};
    char text[sizeof first.text]; /* open reports its own error through here: keep it when there is no other */
    snprintf(text, sizeof text, "%.*s", (int)sizeof text - 1, lf_error_text());
    if (v->mutex) {
        lf__lock(v->mutex);
        v->stop = true; /* a job in flight is finished first */
        lf__wake(v->mutex);
        lf__unlock(v->mutex);
        lf__thread_join(v->writer);
        first = v->fault;
    }
    if (v->lock_file) lf__fault_keep(&first, v->io->ops->close(v->lock_file));
    lf__vault_job_clear(&v->job);
    lf__free(v->job.staged);
    lf__free(v->job.hashes);
    lf__free(v->job.list);
    lf__vault_crew_close(&v->crew);
    lf__vault_catalog_close(&v->catalog);
    lf__vault_manifest_unref(v->prev);
    lf__vault_manifest_unref(v->base);
    lf__vault_free_blobs(v);
    if (v->layout) free_views(v);
    if (v->staging_device) lf_host_free(v->staging_device, v->staging);
    else lf__free(v->staging);
    lf__vault_layout_unref(v->layout);
    lf__mutex_close(v->mutex);
    lf_map_unref(v->map);
    lf__free(v);
    if (first.status < 0) return lf__fault_raise(&first);
    if (*text) LF_FAIL(LF_ERR_INTERNAL, "%s", text);
    return LF_OK;
}

/* ---- save ------------------------------------------------------------------------------------------------------------------ */

int32_t lf_vault_due(const lf_vault *v, int64_t step) { return v && step > 0 && step % v->opts.diff_interval == 0; }

/* Steps grow. What lies there from another course of training is not written over. */
static lf_status check_step(const lf_vault *v, int64_t step)
{
    LF_CHECK_ARG(step >= 0 && step < INT64_C(1000000000000000000), "step is %lld, expected 0 to 10^18 - 1", (long long)step);
    for (int32_t i = v->catalog.n - 1; i >= 0; i--) {
        const lf__vault_entry *e = &v->catalog.entries[i];
        if (e->damaged || e->step < step) continue;
        return LF_FAIL(
            LF_ERR_EXISTS,
            "step %lld: checkpoint %lld is committed in %s; hint: another folder, or `loongforge vault gc %s --after STEP` "
            "to give up what is newer than STEP",
            (long long)step, (long long)e->step, v->dir, v->dir);
    }
    LF_CHECK_ARG(step > v->saved_step, "step is %lld, expected more than %lld, which was saved before", (long long)step,
                 (long long)v->saved_step);
    return LF_OK;
}

static lf_status refuse_busy(lf_vault *v, int64_t step)
{
    v->stats.skipped_busy++;
    lf__unlock(v->mutex);
    lf__log(
        LF_LOG_INFO,
        "vault %s: step %lld not saved, step %lld is still being written: the interval stretches from %d to at least %lld steps",
        v->dir, (long long)step, (long long)v->saved_step, v->opts.diff_interval,
        (long long)(step - v->saved_step + v->opts.diff_interval));
    return LF_AGAIN;
}

static lf_status hand_over(lf_vault *v, int64_t step)
{
    lf_status rc = LF_OK;
    if (!v->writer) rc = lf__thread_start(&v->writer, "lf-vault", run_writer, v);
    if (rc < 0) {
        lf__vault_job_clear(&v->job);
        return rc;
    }
    lf__lock(v->mutex);
    v->job.step = v->saved_step = step;
    v->job.busy = true;
    v->stats.saves++;
    lf__wake(v->mutex);
    lf__unlock(v->mutex);
    return LF_OK;
}

lf_status lf_vault_save(lf_vault *v, int64_t step, const lf_blob *blobs, int32_t n_blobs, lf_stream *stream)
{
    LF_CHECK_ARG(v && n_blobs >= 0 && n_blobs <= LF__VAULT_MAX_BLOBS && (blobs || n_blobs == 0),
                 "vault is NULL, or %d blobs, expected 0 to %d", n_blobs, LF__VAULT_MAX_BLOBS);
    int64_t from = lf__now_ns();
    lf__lock(v->mutex);
    lf_status rc = take_fault(v);
    if (rc == LF_OK && v->job.busy) return refuse_busy(v, step);
    lf__unlock(v->mutex);
    if (rc == LF_OK) rc = check_step(v, step); /* nothing is in flight: the catalog is ours */
    if (rc == LF_OK) rc = lf__vault_snapshot(v, blobs, n_blobs, stream);
    if (rc == LF_OK) rc = hand_over(v, step);
    if (rc < 0) return rc;
    double stall = (double)(lf__now_ns() - from) * 1e-9;
    lf__lock(v->mutex);
    v->stats.stall_last_s = stall;
    v->stats.stall_sum_s += stall;
    if (stall > v->stats.stall_max_s) v->stats.stall_max_s = stall;
    lf__unlock(v->mutex);
    return LF_OK;
}

lf_status lf_vault_wait(lf_vault *v)
{
    LF_CHECK_ARG(v, "vault is NULL");
    lock_idle(v);
    lf_status rc = take_fault(v);
    lf__unlock(v->mutex);
    return rc;
}

void lf__vault_idle(lf_vault *v)
{
    lock_idle(v);
    lf__unlock(v->mutex);
}

lf_status lf_vault_get_stats(const lf_vault *v, lf_vault_stats *stats)
{
    LF_CHECK_ARG(v && stats && stats->size == sizeof *stats, "vault is NULL, or stats->size is not %zu", sizeof *stats);
    lf__lock(v->mutex);
    *stats = v->stats;
    lf__unlock(v->mutex);
    stats->size = sizeof *stats;
    return LF_OK;
}

void lf__vault_plant(lf_vault *v, uint32_t faults) { v->plant = faults; }
