/* SPDX-License-Identifier: Apache-2.0 */
/* What lies in a vault's folder, and removing what an interrupted save left. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "vault_int.h"

static int compare_entries(const void *a_, const void *b_)
{
    const lf__vault_entry *a = a_, *b = b_;
    if (a->step != b->step) return a->step < b->step ? -1 : 1;
    return (a->base[0] == 0) - (b->base[0] == 0); /* a lone base before a folder of the same step */
}

lf_status lf__vault_catalog_add(lf__vault_catalog *c, int64_t step, const char *base)
{
    if (c->n == c->room) {
        int32_t room = c->room ? c->room * 2 : 16;
        lf__vault_entry *grown = lf__realloc(c->entries, (size_t)room, sizeof *grown);
        if (!grown) return LF_FAIL(LF_ERR_NOMEM, "list of %d checkpoints", room);
        c->entries = grown;
        c->room = room;
    }
    c->entries[c->n] = (lf__vault_entry){.step = step};
    snprintf(c->entries[c->n++].base, LF__VAULT_NAME_MAX, "%s", base ? base : "");
    qsort(c->entries, (size_t)c->n, sizeof *c->entries, compare_entries);
    return LF_OK;
}

void lf__vault_catalog_close(lf__vault_catalog *c)
{
    for (int32_t i = 0; i < c->n; i++) lf__free(c->entries[i].refs);
    lf__free(c->entries);
    *c = (lf__vault_catalog){0};
}

typedef struct scan {
    lf__vault_catalog *c;
    bool base_model;
} scan;

/* Bases are entered for now; those with a folder of their step are taken out below. */
static lf_status see_name(void *user, const char *name)
{
    scan *s = user;
    int64_t step;
    int32_t kind = lf__vault_name_kind(name, &step);
    if (kind == LF__NAME_BASE_MODEL) s->base_model = true;
    if (kind == LF__NAME_CHECKPOINT) return lf__vault_catalog_add(s->c, step, NULL);
    if (kind == LF__NAME_BASE) return lf__vault_catalog_add(s->c, step, name);
    return LF_OK;
}

static void drop_bases_with_folders(lf__vault_catalog *c)
{
    int32_t n = 0;
    for (int32_t i = 0; i < c->n; i++) {
        bool twin =
            c->entries[i].base[0] && i + 1 < c->n && c->entries[i + 1].step == c->entries[i].step && !c->entries[i + 1].base[0];
        if (!twin) c->entries[n++] = c->entries[i];
    }
    c->n = n;
}

/* base_model.bin does not tell its step by name. Unreadable, it is an entry at step 0 that will not verify. */
static lf_status add_base_model(lf__vault_catalog *c, lf__io *io, const char *dir)
{
    static const char name[] = "base_model.bin";
    lf__vault_manifest *m = NULL;
    lf_status rc = lf__vault_load_base(io, dir, name, &m);
    if (rc == LF_ERR_NOMEM) return rc;
    if (rc < 0) lf__log(LF_LOG_WARN, "vault %s: %s", dir, lf_error_text());
    rc = lf__vault_catalog_add(c, m ? m->step : 0, name);
    lf__vault_manifest_unref(m);
    return rc;
}

lf_status lf__vault_catalog_open(lf__vault_catalog *c, lf__io *io, const char *dir)
{
    scan s = {c, false};
    *c = (lf__vault_catalog){0};
    lf_status rc = io->ops->list(io, dir, see_name, &s);
    if (rc == LF_OK && s.base_model) rc = add_base_model(c, io, dir);
    if (rc < 0) lf__vault_catalog_close(c);
    else drop_bases_with_folders(c);
    return rc;
}

lf_status lf__vault_entry_load(const lf__vault_entry *e, lf__io *io, const char *dir, lf__vault_manifest **out)
{
    return e->base[0] ? lf__vault_load_base(io, dir, e->base, out) : lf__vault_load_meta(io, dir, e->step, out);
}

lf_status lf__vault_entry_note(lf__vault_entry *e, const lf__vault_manifest *m)
{
    int64_t *refs = lf__alloc_array((size_t)m->n_files, sizeof *refs);
    if (!refs) return LF_FAIL(LF_ERR_NOMEM, "files of checkpoint %lld", (long long)m->step);
    lf__free(e->refs);
    e->refs = refs;
    e->n_refs = 0;
    for (int32_t i = 1; i < m->n_files; i++) lf__vault_data_kind(m->files[i].name, &refs[e->n_refs++]);
    snprintf(e->own_base, sizeof e->own_base, "%s", m->files[0].name);
    e->base_step = m->base_step;
    e->seed = m->seed;
    e->read = true;
    return LF_OK;
}

void lf__vault_entry_text(const lf__vault_entry *e, char text[LF__VAULT_NAME_MAX])
{
    if (e->base[0]) snprintf(text, LF__VAULT_NAME_MAX, "%s", e->base);
    else snprintf(text, LF__VAULT_NAME_MAX, "checkpoint_%lld", (long long)e->step);
}

/* ---- removing ------------------------------------------------------------------------------------------------------------- */

/* Names of one kind, collected before anything is removed: removing while listing may skip some. */
typedef struct collected {
    lf__buf names;
    bool foreign;
} collected;

static lf_status see_content(void *user, const char *name)
{
    collected *c = user;
    size_t n = strlen(name);
    bool diff = n == 12 && strncmp(name, "diff_", 5) == 0 && strcmp(name + 8, ".bin") == 0;
    if (!diff && strcmp(name, "meta.json") != 0 && strcmp(name, "meta.json.tmp") != 0) {
        c->foreign = true;
        return LF_OK;
    }
    return lf__buf_add(&c->names, name, n + 1);
}

lf_status lf__vault_remove_folder(lf__io *io, const char *path)
{
    collected c = {.names.max = 1 << 20};
    lf_status rc = io->ops->list(io, path, see_content, &c);
    for (size_t at = 0; rc == LF_OK && at < c.names.used; at += strlen(c.names.data + at) + 1) {
        char child[LF__VAULT_PATH_MAX];
        rc = lf__io_join(child, sizeof child, path, c.names.data + at);
        if (rc == LF_OK) rc = io->ops->remove(io, child);
    }
    lf__buf_free(&c.names);
    if (rc < 0) return rc;
    if (c.foreign) return LF_FAIL(LF_ERR_STATE, "%s holds files that are not a vault's; they are left alone", path);
    return io->ops->remove(io, path);
}

static lf_status see_temp(void *user, const char *name)
{
    int64_t step;
    collected *c = user;
    return lf__vault_name_kind(name, &step) == LF__NAME_TEMP ? lf__buf_add(&c->names, name, strlen(name) + 1) : LF_OK;
}

lf_status lf__vault_clean(lf__io *io, const char *dir)
{
    collected c = {.names.max = 64 << 20};
    lf_status rc = io->ops->list(io, dir, see_temp, &c);
    for (size_t at = 0; rc == LF_OK && at < c.names.used; at += strlen(c.names.data + at) + 1) {
        const char *name = c.names.data + at;
        char path[LF__VAULT_PATH_MAX];
        rc = lf__io_join(path, sizeof path, dir, name);
        if (rc < 0) break;
        lf_status gone = name[0] == 'b' ? io->ops->remove(io, path) : lf__vault_remove_folder(io, path);
        lf__log(gone < 0 ? LF_LOG_WARN : LF_LOG_INFO, "vault %s: %s of an interrupted save%s%s", dir, name,
                gone < 0 ? " cannot be removed: " : " removed", gone < 0 ? lf_error_text() : "");
    }
    lf__buf_free(&c.names);
    return rc;
}
