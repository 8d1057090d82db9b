/* SPDX-License-Identifier: Apache-2.0 */
/* Base and diffs into one base file, in one pass: a manifest says where the newest record of each slice is, so older ones are
 * never read. Records that need no base are copied as they are; the others are coded anew. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "vault_int.h"

enum { LEVEL = 1 };

typedef struct merging {
    lf__vault_source src;
    lf__vault_manifest *to;
    lf__vault_out out;
} merging;

typedef struct place {
    int64_t offset, index;
    int32_t file;
} place;

static int compare_places(const void *a_, const void *b_)
{
    const place *a = a_, *b = b_;
    if (a->file != b->file) return a->file < b->file ? -1 : 1;
    return a->offset < b->offset ? -1 : a->offset > b->offset;
}

/* Slices in the order in which they lie on disk. */
static lf_status order_slices(const lf__vault_manifest *m, int64_t **out)
{
    int64_t n = m->layout->n_slices;
    place *all = lf__alloc_array((size_t)n, sizeof *all);
    *out = lf__alloc_array((size_t)n, sizeof **out);
    if (!all || !*out) {
        lf__free(all);
        return LF_FAIL(LF_ERR_NOMEM, "%lld slices", (long long)n);
    }
    for (int64_t i = 0; i < n; i++) all[i] = (place){m->refs_of[i].offset, i, m->refs_of[i].file};
    if (n > 0) qsort(all, (size_t)n, sizeof *all, compare_places);
    for (int64_t i = 0; i < n; i++) (*out)[i] = all[i].index;
    lf__free(all);
    return LF_OK;
}

static lf_status fetch(void *user, lf__vault_work *work, int64_t i)
{
    merging *g = user;
    lf__vault_record record;
    lf_status rc = lf__vault_read_slice(&g->src, i, work, work->raw, &record);
    if (rc < 0 || !lf__vault_codecs[record.codec].needs_base) return rc;
    const lf__vault_plane *p = lf__vault_plane_of(g->to->layout, i, NULL, NULL);
    return lf__vault_encode(work, work->raw, NULL, (size_t)record.raw_bytes, p->elem_bytes, LEVEL);
}

static lf_status append(void *user, lf__vault_work *work, int64_t i)
{
    merging *g = user;
    int64_t slice;
    size_t bytes;
    const lf__vault_plane *p = lf__vault_plane_of(g->to->layout, i, &slice, &bytes);
    lf__vault_record record = {.klass = p->klass,
                               .role = p->role,
                               .codec = work->codec,
                               .slice = slice,
                               .raw_bytes = (int64_t)bytes,
                               .stored_bytes = (int64_t)work->stored_bytes,
                               .hash = g->src.m->refs_of[i].hash,
                               .checksum = work->checksum};
    g->to->refs_of[i].file = 0;
    return lf__vault_out_record(&g->out, work, &record, &g->to->refs_of[i]);
}

static lf_status merge_blobs(merging *g)
{
    const lf__vault_manifest *m = g->src.m;
    g->to->blobs = lf__alloc_array((size_t)m->n_blobs, sizeof *g->to->blobs);
    if (!g->to->blobs) return LF_FAIL(LF_ERR_NOMEM, "%d blobs", m->n_blobs);
    for (int32_t i = 0; i < m->n_blobs; i++) {
        lf__vault_blob *b = &g->to->blobs[g->to->n_blobs++];
        void *data = NULL;
        *b = (lf__vault_blob){.name = lf__strdup(m->blobs[i].name), .bytes = m->blobs[i].bytes};
        lf_status rc = b->name ? lf__vault_read_blob(&g->src, i, &data) : LF_FAIL(LF_ERR_NOMEM, "blob %d", i);
        lf_blob blob = {b->name, data, b->bytes};
        if (rc == LF_OK) rc = lf__vault_out_blob(&g->out, &blob, i, m->seed, LEVEL, &b->ref);
        lf__free(data);
        if (rc < 0) return rc;
    }
    return LF_OK;
}

static lf_status start(merging *g, lf__io *io, const char *temp)
{
    lf__vault_manifest *from = g->src.m, *to;
    lf__vault_file_head head = {LF__VAULT_BASE, from->step, from->seed, {0}};
    lf_status rc = lf__vault_manifest_new(&g->to, from->layout);
    if (rc < 0) return rc;
    to = g->to;
    to->kind = LF__VAULT_BASE;
    to->step = to->base_step = from->step;
    to->time_unix = from->time_unix;
    to->seed = from->seed;
    to->state_digest = to->base_digest = from->state_digest;
    to->n_changed = from->layout->n_slices;
    to->files = lf__alloc(sizeof *to->files);
    if (!to->files) return LF_FAIL(LF_ERR_NOMEM, "merging");
    to->n_files = 1;
    snprintf(to->files[0].name, sizeof to->files[0].name, "base_model.bin");
    memcpy(head.map_digest, from->layout->map_digest, 16);
    return lf__vault_out_open(&g->out, io, temp, &head);
}

static lf_status write_all(merging *g, lf__io *io, const char *temp)
{
    lf_status rc = LF_OK;
    lf__vault_crew crew = {0};
    int64_t *order = NULL;
    LF_TRY(order_slices(g->src.m, &order));
    LF_TRY(lf__vault_crew_open(&crew, 0, g->src.m->layout->slice_bytes));
    LF_TRY(start(g, io, temp));
    LF_TRY(lf__vault_crew_run(&crew, order, g->src.m->layout->n_slices, fetch, append, &g->src, g));
    LF_TRY(merge_blobs(g));
    g->to->files[0].end = g->out.end;
    LF_TRY(lf__vault_out_tail(&g->out, g->to));
    LF_TRY(lf__vault_out_sync_close(&g->out, true));
out:
    lf__vault_crew_close(&crew);
    lf__free(order);
    return rc;
}

lf_status lf__vault_merge_io(lf__io *io, const char *dir, int64_t step, const char *target)
{
    LF_CHECK_ARG(dir && target && *target && step >= -1, "dir or target is NULL, or step is %lld, expected -1 or more",
                 (long long)step);
    lf_status rc = LF_OK;
    lf__vault_manifest *m = NULL;
    merging g = {0};
    char temp[LF__VAULT_PATH_MAX], parent[LF__VAULT_PATH_MAX];
    bool there, began = false;
    if ((size_t)snprintf(temp, sizeof temp, "%s.tmp", target) >= sizeof temp)
        return LF_FAIL(LF_ERR_INVALID, "the target's path is too long");
    LF_TRY(io->ops->exists(io, target, &there));
    if (there) LF_THROW(LF_ERR_EXISTS, "%s is there already; hint: another name", target);
    LF_TRY(lf__io_dir_of(parent, sizeof parent, target));
    LF_TRY(lf__vault_find(io, dir, step, false, &m, NULL));
    LF_TRY(lf__vault_source_open(&g.src, io, dir, m, NULL));
    LF_TRY(io->ops->exists(io, temp, &there));
    if (there) LF_TRY(io->ops->remove(io, temp)); /* of a merge that was interrupted */
    began = true;
    LF_TRY(write_all(&g, io, temp));
    LF_TRY(io->ops->rename(io, temp, target));
    began = false;
    LF_TRY(io->ops->sync_dir(io, parent));
out:
    lf__vault_out_abandon(&g.out);
    if (rc < 0 && began) {
        lf__fault first = {0};
        lf__fault_keep(&first, rc);
        io->ops->remove(io, temp);
        lf__fault_raise(&first);
    }
    lf__vault_source_close(&g.src);
    lf__vault_manifest_unref(g.to);
    lf__vault_manifest_unref(m);
    return rc;
}

lf_status lf_vault_merge(const char *dir, int64_t step, const char *target)
{
    return lf__vault_merge_io(lf__io_posix(), dir, step, target);
}
