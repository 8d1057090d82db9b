/* SPDX-License-Identifier: Apache-2.0 */
/* The caller's half of a save: the snapshot. This is the only time training waits. */
#include <string.h>

#include "vault_int.h"

void lf__vault_job_clear(lf__vault_job *job)
{
    for (int32_t i = 0; job->blobs && i < job->n_blobs; i++) {
        lf__free((char *)job->blobs[i].name);
        lf__free((void *)job->blobs[i].data);
    }
    lf__free(job->blobs);
    job->blobs = NULL;
    job->n_blobs = 0;
}

static lf_status copy_blobs(lf__vault_job *job, const lf_blob *blobs, int32_t n)
{
    job->blobs = lf__alloc_array((size_t)n, sizeof *job->blobs);
    if (!job->blobs) return LF_FAIL(LF_ERR_NOMEM, "%d blobs", n);
    for (; job->n_blobs < n; job->n_blobs++) {
        const lf_blob *from = &blobs[job->n_blobs];
        lf_blob *to = &job->blobs[job->n_blobs];
        LF_CHECK_ARG(from->name && *from->name && (from->data || from->bytes == 0), "blob %d has no name or no data",
                     job->n_blobs);
        LF_CHECK_ARG(from->bytes >= 0 && from->bytes <= LF__VAULT_MAX_BLOB_BYTES, "blob %s has %lld bytes, expected 0 to %d",
                     from->name, (long long)from->bytes, LF__VAULT_MAX_BLOB_BYTES);
        for (int32_t i = 0; i < job->n_blobs; i++)
            LF_CHECK_ARG(strcmp(blobs[i].name, from->name) != 0, "blob %s comes twice", from->name);
        char *name = lf__strdup(from->name);
        void *data = lf__alloc((size_t)from->bytes);
        if (!name || !data) {
            lf__free(name);
            lf__free(data);
            return LF_FAIL(LF_ERR_NOMEM, "blob %s of %lld bytes", from->name, (long long)from->bytes);
        }
        if (from->bytes) memcpy(data, from->data, (size_t)from->bytes);
        *to = (lf_blob){name, data, from->bytes};
    }
    return LF_OK;
}

/* The map's memory as it lies now: an attached parameter may have moved. */
lf_status lf__vault_refresh_views(lf_vault *v)
{
    for (int32_t i = 0; i < v->layout->n_planes; i++) {
        lf__vault_view fresh;
        lf_status rc = lf__vault_view_open(&fresh, v->map, v->layout->planes[i].klass, v->layout->planes[i].role);
        if (rc < 0) return rc;
        lf__vault_view_close(&v->views[i]);
        v->views[i] = fresh;
    }
    return LF_OK;
}

/* Staging, lists and encoders, at the first save: a vault that only restores needs none. */
static lf_status prepare(lf_vault *v)
{
    int64_t n = v->layout->n_slices;
    lf_status rc = LF_OK;
    if (v->staging) return LF_OK;
    if (!v->job.staged) v->job.staged = lf__alloc((size_t)n);
    if (!v->job.hashes) v->job.hashes = lf__alloc_array((size_t)n, sizeof *v->job.hashes);
    if (!v->job.list) v->job.list = lf__alloc_array((size_t)n, sizeof *v->job.list);
    if (!v->job.staged || !v->job.hashes || !v->job.list) return LF_FAIL(LF_ERR_NOMEM, "%lld slices", (long long)n);
    if (!v->crew.work) rc = lf__vault_crew_open(&v->crew, v->opts.threads, v->layout->slice_bytes);
    if (rc < 0) return rc;
    size_t bytes = (size_t)v->layout->staged_bytes + 64;
    lf_device *device = v->layout->n_planes > 0 ? v->views[0].device : NULL;
    if (device) {
        void *memory;
        rc = lf_host_alloc(device, bytes, &memory);
        if (rc < 0) return rc;
        v->staging = memory;
        v->staging_device = device;
    } else {
        v->staging = lf__alloc_aligned(bytes, 64);
    }
    return v->staging
               ? LF_OK
               : LF_FAIL(LF_ERR_NOMEM, "staging of %zu bytes for snapshots; hint: it takes one copy of the saved state", bytes);
}

const uint8_t *lf__vault_staged(const lf_vault *v, int64_t index, size_t *bytes)
{
    int64_t slice;
    const lf__vault_plane *p = lf__vault_plane_of(v->layout, index, &slice, bytes);
    return v->staging + p->raw_offset + slice * p->slice_elements * (int64_t)p->elem_bytes;
}

/* Host memory: copy one slice. */
static void stage_slice(void *user, int64_t i)
{
    lf_vault *v = user;
    int64_t slice;
    size_t bytes;
    const lf__vault_plane *p = lf__vault_plane_of(v->layout, i, &slice, NULL);
    uint8_t *to = (uint8_t *)lf__vault_staged(v, i, &bytes);
    lf__vault_gather(&v->views[p - v->layout->planes], slice * p->slice_elements, (int64_t)(bytes / p->elem_bytes), to, NULL);
    v->job.staged[i] = 1;
}

/* A frozen plane in one piece is hashed where it lies: a slice with the last checkpoint's content needs no staging memory. */
static bool is_unchanged_in_place(const lf_vault *v, const lf__vault_plane *p, int64_t i)
{
    const lf__vault_view *view = &v->views[p - v->layout->planes];
    if (!v->layout->classes[p->klass].frozen || !v->sound || !v->prev || view->device || view->n != 1 || !view->pieces[0].data)
        return false;
    int64_t slice;
    size_t bytes;
    lf__vault_plane_of(v->layout, i, &slice, &bytes);
    lf__hash128 h =
        lf__hash((const uint8_t *)view->pieces[0].data + (size_t)(slice * p->slice_elements) * p->elem_bytes, bytes, v->seed);
    const lf__hash128 *was = &v->prev->refs_of[i].hash;
    if (h.lo != was->lo || h.hi != was->hi) return false;
    v->job.hashes[i] = h;
    v->job.staged[i] = 0;
    return true;
}

static void take_slice(void *user, int64_t i)
{
    lf_vault *v = user;
    if (!is_unchanged_in_place(v, lf__vault_plane_of(v->layout, i, NULL, NULL), i)) stage_slice(v, i);
}

static lf_status copy_planes(lf_vault *v, lf_stream *stream)
{
    lf_status rc = LF_OK;
    bool host = true;
    for (int32_t i = 0; i < v->layout->n_planes; i++) {
        const lf__vault_plane *p = &v->layout->planes[i];
        if (!v->views[i].device) continue;
        host = false;
        rc = lf__vault_gather(&v->views[i], 0, p->count, v->staging + p->raw_offset, stream);
        if (rc < 0) return rc;
    }
    if (stream) rc = lf_stream_sync(stream);
    if (rc < 0) return rc;
    if (host) lf__parallel(v->opts.threads, v->layout->n_slices, take_slice, v);
    else memset(v->job.staged, 1, (size_t)v->layout->n_slices);
    return LF_OK;
}

lf_status lf__vault_snapshot(lf_vault *v, const lf_blob *blobs, int32_t n_blobs, lf_stream *stream)
{
    lf_status rc = lf__vault_refresh_views(v);
    if (rc == LF_OK) rc = prepare(v);
    if (rc == LF_OK) rc = copy_blobs(&v->job, blobs, n_blobs);
    if (rc == LF_OK) rc = copy_planes(v, stream);
    if (rc < 0) lf__vault_job_clear(&v->job);
    return rc;
}
