/* SPDX-License-Identifier: Apache-2.0 */
/* From a checkpoint back into the map: the newest that verifies, stepping back over damaged ones. */
#include <stdio.h>
#include <string.h>

#include "vault_int.h"

typedef struct loading {
    lf_vault *v;
    lf__vault_source src;
    const lf__vault_layout *layout; /* the checkpoint's: its slices may be cut differently from ours */
    lf__vault_view *weights;        /* (n_classes): where weights are rounded from masters */
} loading;

void lf__vault_info(const lf__vault_manifest *m, const char *dir, const char *base, lf_checkpoint_info *info)
{
    *info = (lf_checkpoint_info){.size = sizeof *info,
                                 .step = m->step,
                                 .base_step = m->base_step,
                                 .time_unix = m->time_unix,
                                 .bytes = lf__vault_diff_bytes(m),
                                 .raw_bytes = m->layout->raw_bytes,
                                 .n_slices = (int32_t)m->layout->n_slices,
                                 .n_changed = (int32_t)m->n_changed};
    if (base && *base) snprintf(info->path, sizeof info->path, "%.900s/%s", dir, base);
    else snprintf(info->path, sizeof info->path, "%.900s/checkpoint_%lld", dir, (long long)m->step);
}

static lf_status load_slice(void *user, lf__vault_work *work, int64_t i)
{
    loading *l = user;
    int64_t slice;
    size_t bytes;
    lf__vault_record record;
    const lf__vault_plane *p = lf__vault_plane_of(l->layout, i, &slice, &bytes);
    int64_t first = slice * p->slice_elements, count = (int64_t)(bytes / p->elem_bytes);
    lf_status rc = lf__vault_read_slice(&l->src, i, work, work->raw, &record);
    if (rc == LF_OK) rc = lf__vault_scatter(&l->v->views[p - l->layout->planes], first, count, work->raw);
    if (rc < 0 || p->role != LF_ROLE_MASTER) return rc;
    lf__vault_round(work->raw, count, l->layout->classes[p->klass].dtype, work->stored);
    return lf__vault_scatter(&l->weights[p->klass], first, count, work->stored);
}

static lf_status load_blobs(lf_vault *v, lf__vault_source *src)
{
    const lf__vault_manifest *m = src->m;
    v->blob_data = lf__alloc_array((size_t)m->n_blobs, sizeof *v->blob_data);
    if (!v->blob_data) return LF_FAIL(LF_ERR_NOMEM, "%d blobs", m->n_blobs);
    for (v->n_blobs = 0; v->n_blobs < m->n_blobs; v->n_blobs++) {
        lf_status rc = lf__vault_read_blob(src, v->n_blobs, &v->blob_data[v->n_blobs]);
        if (rc < 0) return rc;
    }
    return LF_OK;
}

static lf_status open_weights(loading *l)
{
    l->weights = lf__alloc_array((size_t)l->layout->n_classes, sizeof *l->weights);
    if (!l->weights) return LF_FAIL(LF_ERR_NOMEM, "restoring");
    for (int32_t i = 0; i < l->layout->n_planes; i++) {
        const lf__vault_plane *p = &l->layout->planes[i];
        lf_status rc =
            p->role == LF_ROLE_MASTER ? lf__vault_view_open(&l->weights[p->klass], l->v->map, p->klass, LF_ROLE_WEIGHT) : LF_OK;
        if (rc < 0) return rc;
    }
    return LF_OK;
}

/* Everything of one checkpoint into map and blobs. */
static lf_status load(lf_vault *v, lf__vault_manifest *m)
{
    lf_status rc = LF_OK;
    loading l = {.v = v, .layout = m->layout};
    lf__vault_crew crew = {0};
    LF_TRY(lf__vault_source_open(&l.src, v->io, v->dir, m, NULL));
    LF_TRY(open_weights(&l));
    LF_TRY(lf__vault_crew_open(&crew, v->opts.threads, m->layout->slice_bytes));
    LF_TRY(lf__vault_crew_run(&crew, NULL, m->layout->n_slices, load_slice, NULL, &l.src, &l));
    LF_TRY(load_blobs(v, &l.src));
    lf__vault_manifest_unref(v->base);
    v->base = lf__vault_manifest_ref(l.src.base);
out:
    for (int32_t k = 0; l.weights && k < m->layout->n_classes; k++) lf__vault_view_close(&l.weights[k]);
    lf__free(l.weights);
    lf__vault_crew_close(&crew);
    lf__vault_source_close(&l.src);
    return rc;
}

/* Later saves build on what was restored: every record of it has just been read and found good. */
static void adopt(lf_vault *v, lf__vault_manifest *m)
{
    lf__vault_manifest_unref(v->prev);
    v->prev = lf__vault_manifest_ref(m);
    v->restored = lf__vault_manifest_ref(m);
    v->seed = m->seed;
    v->sound = lf__vault_layout_same_slices(v->layout, m->layout);
    v->n_diffs = m->n_files - 1;
    v->saved_step = m->step;
}

static bool is_final(lf_status rc)
{
    return rc == LF_ERR_NOMEM || rc == LF_ERR_FORMAT || rc == LF_ERR_UNSUPPORTED || rc == LF_ERR_DEVICE || rc == LF_ERR_STATE;
}

static lf_status try_entry(lf_vault *v, lf__vault_entry *e, lf_checkpoint_info *info)
{
    lf_status rc = LF_OK;
    lf__vault_manifest *m = NULL;
    lf__vault_free_blobs(v);
    LF_TRY(lf__vault_entry_load(e, v->io, v->dir, &m));
    LF_TRY(lf__vault_layout_match(v->layout, m->layout));
    LF_TRY(load(v, m));
    adopt(v, m);
    e->damaged = false;
    if (info) lf__vault_info(m, v->dir, e->base, info);
out:
    lf__vault_manifest_unref(m);
    return rc;
}

lf_status lf_vault_restore(lf_vault *v, int64_t step, lf_checkpoint_info *info)
{
    LF_CHECK_ARG(v && step >= -1, "vault is NULL, or step is %lld, expected -1 or more", (long long)step);
    LF_CHECK_ARG(!info || info->size == sizeof *info, "info->size is %zu, expected %zu", info->size, sizeof *info);
    lf__fault newest = {0};
    lf__vault_idle(v);
    v->sound = false; /* until something has been restored, the map is not what the last checkpoint says */
    lf_status rc = lf__vault_refresh_views(v);
    for (int32_t i = v->catalog.n - 1; rc == LF_OK && i >= 0; i--) {
        lf__vault_entry *e = &v->catalog.entries[i];
        if (step >= 0 && e->step > step) continue;
        lf_status tried = try_entry(v, e, info);
        if (tried == LF_OK || is_final(tried)) return tried;
        e->damaged = true;
        lf__fault_keep(&newest, tried);
        lf__log(LF_LOG_WARN, "vault %s: checkpoint %lld is damaged, stepping back: %s", v->dir, (long long)e->step,
                lf_error_text());
    }
    if (rc < 0) return rc;
    if (newest.status == LF_OK)
        return LF_FAIL(LF_ERR_NOTFOUND, "no checkpoint in %s%s", v->dir, step >= 0 ? " at or before that step" : "");
    lf__fault_raise(&newest);
    return lf__fail_prefix(LF_ERR_CORRUPT, "no checkpoint in %s verifies; the newest", v->dir);
}

lf_status lf_vault_blob(lf_vault *v, const char *name, const void **data, int64_t *bytes)
{
    LF_CHECK_ARG(v && name && data && bytes, "vault, name, data or bytes is NULL");
    for (int32_t i = 0; v->restored && i < v->n_blobs; i++) {
        if (strcmp(v->restored->blobs[i].name, name) != 0) continue;
        *data = v->blob_data[i];
        *bytes = v->restored->blobs[i].bytes;
        return LF_OK;
    }
    return LF_FAIL(LF_ERR_NOTFOUND, "no blob %s in %s", name,
                   v->restored ? "the restored checkpoint" : "this vault: nothing was restored");
}
