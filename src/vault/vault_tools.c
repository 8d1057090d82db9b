/* SPDX-License-Identifier: Apache-2.0 */
/* Without a model: list, verify, restore check, compare, delete. */
#include <stdio.h>
#include <string.h>

#include "vault_int.h"

/* The newest entry of at most `step` (-1: any). */
static lf_status find_entry(const lf__vault_catalog *c, const char *dir, int64_t step, const lf__vault_entry **out)
{
    for (int32_t i = c->n - 1; i >= 0; i--)
        if (step < 0 || c->entries[i].step <= step) {
            *out = &c->entries[i];
            return LF_OK;
        }
    return step < 0 ? LF_FAIL(LF_ERR_NOTFOUND, "no checkpoint in %s", dir)
                    : LF_FAIL(LF_ERR_NOTFOUND, "no checkpoint at or before step %lld in %s", (long long)step, dir);
}

lf_status lf__vault_find(lf__io *io, const char *dir, int64_t step, bool exactly, lf__vault_manifest **out,
                         char base[LF__VAULT_NAME_MAX])
{
    lf__vault_catalog c;
    const lf__vault_entry *e = NULL;
    *out = NULL;
    lf_status rc = lf__vault_catalog_open(&c, io, dir);
    if (rc < 0) return rc;
    rc = find_entry(&c, dir, step, &e);
    if (rc == LF_OK && exactly && e->step != step)
        rc = LF_FAIL(LF_ERR_NOTFOUND, "no checkpoint of step %lld in %s", (long long)step, dir);
    if (rc == LF_OK) rc = lf__vault_entry_load(e, io, dir, out);
    if (rc == LF_OK && base) snprintf(base, LF__VAULT_NAME_MAX, "%s", e->base);
    lf__vault_catalog_close(&c);
    return rc;
}

/* ---- list ------------------------------------------------------------------------------------------------------------------ */

lf_status lf__vault_list_io(lf__io *io, const char *dir, lf_checkpoint_info *infos, int32_t *n)
{
    LF_CHECK_ARG(dir && n, "dir or n is NULL");
    lf__vault_catalog c;
    int32_t room = infos ? *n : 0, count = 0;
    lf_status rc = lf__vault_catalog_open(&c, io, dir);
    if (rc < 0) return rc;
    for (int32_t i = 0; i < c.n; i++) {
        lf__vault_manifest *m;
        rc = lf__vault_entry_load(&c.entries[i], io, dir, &m);
        if (rc == LF_ERR_NOMEM) break;
        if (rc < 0) {
            lf__log(LF_LOG_WARN, "vault %s: not listed: %s", dir, lf_error_text());
            rc = LF_OK;
            continue;
        }
        if (count < room) lf__vault_info(m, dir, c.entries[i].base, &infos[count]);
        count++;
        lf__vault_manifest_unref(m);
    }
    lf__vault_catalog_close(&c);
    if (rc < 0) return rc;
    *n = count;
    return infos && count > room ? LF_FAIL(LF_ERR_NOMEM, "room for %d checkpoints, there are %d", room, count) : LF_OK;
}

lf_status lf_vault_list(const char *dir, lf_checkpoint_info *infos, int32_t *n)
{
    return lf__vault_list_io(lf__io_posix(), dir, infos, n);
}

/* ---- verify ---------------------------------------------------------------------------------------------------------------- */

typedef struct findings {
    const char *dir;
    lf__mutex *lock;
    int64_t n;
    lf__fault first;
} findings;

typedef struct verifying {
    lf__vault_source src;
    int32_t own;   /* -1: read every slice, wherever it lies */
    findings *bad; /* NULL: stop at the first */
} verifying;

/* Count and log what is wrong and go on; running out of memory is no finding. */
static lf_status find_bad(findings *bad, lf_status rc)
{
    if (rc >= 0 || rc == LF_ERR_NOMEM || !bad) return rc;
    lf__log(LF_LOG_ERROR, "vault %s: %s", bad->dir, lf_error_text());
    lf__lock(bad->lock);
    lf__fault_keep(&bad->first, rc);
    bad->n++;
    lf__unlock(bad->lock);
    return LF_OK;
}

/* Records of this checkpoint in full; of those it shares with others, which are read there, that they are the right ones. */
static lf_status verify_slice(void *user, lf__vault_work *work, int64_t i)
{
    verifying *v = user;
    lf__vault_record record;
    bool mine = v->own < 0 || v->src.m->refs_of[i].file == v->own;
    lf_status rc = mine ? lf__vault_read_slice(&v->src, i, work, work->raw, &record) : lf__vault_check_head(&v->src, i, &record);
    return find_bad(v->bad, rc);
}

static lf_status verify_blobs(lf__vault_source *src, findings *bad)
{
    lf_status rc = LF_OK;
    for (int32_t i = 0; rc == LF_OK && i < src->m->n_blobs; i++) {
        void *data = NULL;
        rc = find_bad(bad, lf__vault_read_blob(src, i, &data));
        lf__free(data);
    }
    return rc;
}

static lf_status verify_manifest(lf__io *io, const char *dir, lf__vault_manifest *m, findings *bad)
{
    lf__vault_crew crew = {0};
    verifying v = {.own = lf__vault_own_file(m), .bad = bad};
    if (v.own < 0) v.own = m->n_files; /* wrote nothing */
    lf_status rc = lf__vault_source_open(&v.src, io, dir, m, NULL);
    if (rc < 0) return find_bad(bad, rc);
    rc = lf__vault_crew_open(&crew, 0, m->layout->slice_bytes);
    if (rc == LF_OK) rc = lf__vault_crew_run(&crew, NULL, m->layout->n_slices, verify_slice, NULL, &v.src, &v);
    if (rc == LF_OK) rc = verify_blobs(&v.src, bad);
    if (rc == LF_OK && v.own < m->n_files) rc = find_bad(bad, lf__vault_check_size(&v.src, v.own));
    lf__vault_crew_close(&crew);
    lf__vault_source_close(&v.src);
    return rc;
}

/* A base file carries a manifest of its own, which must be good too: it is what a lost folder leaves. */
static lf_status verify_entry(lf__io *io, const char *dir, const lf__vault_entry *e, findings *bad)
{
    lf__vault_manifest *m = NULL, *own = NULL;
    lf_status rc = lf__vault_entry_load(e, io, dir, &m);
    if (rc < 0) return find_bad(bad, rc);
    rc = verify_manifest(io, dir, m, bad);
    if (rc == LF_OK && !e->base[0] && m->kind == LF__VAULT_BASE) {
        rc = lf__vault_load_base(io, dir, m->files[0].name, &own);
        if (rc == LF_OK && (own->state_digest.lo != m->state_digest.lo || own->state_digest.hi != m->state_digest.hi))
            rc =
                LF_FAIL(LF_ERR_CORRUPT, "%s and checkpoint_%lld describe different states", m->files[0].name, (long long)m->step);
        rc = find_bad(bad, rc);
        lf__vault_manifest_unref(own);
    }
    lf__vault_manifest_unref(m);
    return rc;
}

lf_status lf__vault_verify_io(lf__io *io, const char *dir)
{
    LF_CHECK_ARG(dir, "dir is NULL");
    lf__vault_catalog c;
    findings bad = {.dir = dir, .lock = lf__mutex_open()};
    if (!bad.lock) return LF_FAIL(LF_ERR_NOMEM, "verifying %s", dir);
    lf_status rc = lf__vault_catalog_open(&c, io, dir);
    if (rc == LF_OK && c.n == 0) rc = LF_FAIL(LF_ERR_NOTFOUND, "no checkpoint in %s", dir);
    for (int32_t i = 0; rc == LF_OK && i < c.n; i++) rc = verify_entry(io, dir, &c.entries[i], &bad);
    lf__vault_catalog_close(&c);
    lf__mutex_close(bad.lock);
    if (rc < 0 || bad.n == 0) return rc;
    lf__fault_raise(&bad.first);
    return lf__fail_prefix(LF_ERR_CORRUPT, "%lld findings in %s, the first", (long long)bad.n, dir);
}

lf_status lf_vault_verify(const char *dir) { return lf__vault_verify_io(lf__io_posix(), dir); }

/* ---- restore check ---------------------------------------------------------------------------------------------------------- */

lf_status lf__vault_check_io(lf__io *io, const char *dir, int64_t step, lf_checkpoint_info *info)
{
    LF_CHECK_ARG(dir && step >= -1, "dir is NULL, or step is %lld, expected -1 or more", (long long)step);
    LF_CHECK_ARG(!info || info->size == sizeof *info, "info->size is %zu, expected %zu", info->size, sizeof *info);
    lf_status rc = LF_OK;
    lf__vault_manifest *m = NULL;
    lf__vault_crew crew = {0};
    verifying v = {.own = -1};
    char base[LF__VAULT_NAME_MAX];
    LF_TRY(lf__vault_find(io, dir, step, false, &m, base));
    LF_TRY(lf__vault_source_open(&v.src, io, dir, m, NULL));
    LF_TRY(lf__vault_crew_open(&crew, 0, m->layout->slice_bytes));
    LF_TRY(lf__vault_crew_run(&crew, NULL, m->layout->n_slices, verify_slice, NULL, &v.src, &v));
    LF_TRY(verify_blobs(&v.src, NULL));
    if (info) lf__vault_info(m, dir, base, info);
out:
    lf__vault_crew_close(&crew);
    lf__vault_source_close(&v.src);
    lf__vault_manifest_unref(m);
    return rc;
}

lf_status lf_vault_check(const char *dir, int64_t step, lf_checkpoint_info *info)
{
    return lf__vault_check_io(lf__io_posix(), dir, step, info);
}

/* ---- compare ---------------------------------------------------------------------------------------------------------------- */

static void compare_plane(const lf__vault_manifest *a, const lf__vault_manifest *b, const lf__vault_plane *p,
                          lf_plane_change *change)
{
    *change = (lf_plane_change){.size = sizeof *change,
                                .klass = p->klass,
                                .role = p->role,
                                .n_slices = p->n_slices,
                                .bytes = p->count * (int64_t)p->elem_bytes};
    for (int64_t i = p->first; i < p->first + p->n_slices; i++) {
        size_t bytes;
        if (a->refs_of[i].hash.lo == b->refs_of[i].hash.lo && a->refs_of[i].hash.hi == b->refs_of[i].hash.hi) continue;
        lf__vault_plane_of(b->layout, i, NULL, &bytes);
        change->n_changed++;
        change->changed_bytes += (int64_t)bytes;
    }
}

lf_status lf_vault_diff(const char *dir, int64_t from, int64_t to, lf_plane_change *changes, int32_t *n)
{
    LF_CHECK_ARG(dir && n && from >= 0 && to >= 0, "dir or n is NULL, or a step is negative");
    lf_status rc = LF_OK;
    lf__io *io = lf__io_posix();
    lf__vault_manifest *a = NULL, *b = NULL;
    int32_t room = changes ? *n : 0;
    LF_TRY(lf__vault_find(io, dir, from, true, &a, NULL));
    LF_TRY(lf__vault_find(io, dir, to, true, &b, NULL));
    LF_TRY(lf__vault_layout_match(a->layout, b->layout));
    if (a->seed != b->seed || !lf__vault_layout_same_slices(a->layout, b->layout))
        LF_THROW(LF_ERR_FORMAT, "steps %lld and %lld are cut into other slices or hashed with other seeds", (long long)from,
                 (long long)to);
    for (int32_t i = 0; i < b->layout->n_planes && i < room; i++) compare_plane(a, b, &b->layout->planes[i], &changes[i]);
    *n = b->layout->n_planes;
    if (changes && *n > room) LF_THROW(LF_ERR_NOMEM, "room for %d entries, there are %d", room, *n);
out:
    lf__vault_manifest_unref(a);
    lf__vault_manifest_unref(b);
    return rc;
}

/* ---- delete ----------------------------------------------------------------------------------------------------------------- */

lf_status lf_vault_gc(const char *dir, int32_t keep_last, int32_t keep_every, int64_t after, int32_t *removed)
{
    LF_CHECK_ARG(dir && keep_last >= 0 && keep_every >= 0 && after >= -1,
                 "dir is NULL, or keep_last %d, keep_every %d or after %lld is negative", keep_last, keep_every,
                 (long long)after);
    LF_CHECK_ARG(keep_last > 0 || keep_every == 0, "keep_every is %d without keep_last; hint: keep_last 1 keeps the newest",
                 keep_every);
    lf_status rc = LF_OK;
    lf__io *io = lf__io_posix();
    lf__file *lock = NULL;
    lf__vault_catalog c = {0};
    lf__vault_manifest *m = NULL;
    char path[LF__VAULT_PATH_MAX];
    bool there;
    if (removed) *removed = 0;
    LF_TRY(io->ops->exists(io, dir, &there));
    if (!there) LF_THROW(LF_ERR_NOTFOUND, "no folder %s", dir);
    LF_TRY(lf__io_join(path, sizeof path, dir, "vault.lock"));
    LF_TRY(io->ops->lock(io, path, &lock));
    LF_TRY(lf__vault_clean(io, dir));
    LF_TRY(lf__vault_catalog_open(&c, io, dir));
    for (int32_t i = c.n - 1; i >= 0 && !m; i--) /* the newest readable one says whose vault this is */
        if (lf__vault_entry_load(&c.entries[i], io, dir, &m) == LF_ERR_NOMEM) LF_THROW(LF_ERR_NOMEM, "reading %s", dir);
    if (!m) LF_THROW(LF_ERR_NOTFOUND, "no readable checkpoint in %s", dir);
    lf__vault_keep keep = {keep_last, keep_every, after, -1, m->seed};
    LF_TRY(lf__vault_retain(&c, io, dir, &keep, removed));
out:
    lf__vault_manifest_unref(m);
    lf__vault_catalog_close(&c);
    if (lock) io->ops->close(lock);
    return rc;
}
