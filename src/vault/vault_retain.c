/* SPDX-License-Identifier: Apache-2.0 */
/* Retention: which checkpoints go, and how they go so that a crash in between loses nothing that stays.
 *
 * A folder is first renamed to "….tmp" (from then on it is no checkpoint), the names are made durable, and only then are its
 * files deleted. Whatever is interrupted is finished by lf__vault_clean when the vault is opened next. */
#include <stdio.h>
#include <string.h>

#include "vault_int.h"

static lf_status read_entries(lf__vault_catalog *c, lf__io *io, const char *dir)
{
    for (int32_t i = 0; i < c->n; i++) {
        lf__vault_entry *e = &c->entries[i];
        lf__vault_manifest *m = NULL;
        if (e->read || e->damaged) continue;
        lf_status rc = lf__vault_entry_load(e, io, dir, &m);
        if (rc == LF_OK) rc = lf__vault_entry_note(e, m);
        lf__vault_manifest_unref(m);
        if (rc == LF_ERR_NOMEM) return rc;
        if (rc < 0) {
            e->damaged = true;
            lf__log(LF_LOG_WARN, "vault %s: not counted and not deleted: %s", dir, lf_error_text());
        }
    }
    return LF_OK;
}

/* Damaged ones and those of another vault are nobody's to delete; base_model.bin is where everything began. */
static bool is_wanted(const lf__vault_entry *e, const lf__vault_keep *keep, int32_t newer)
{
    if (e->damaged || !e->read || e->seed != keep->seed || e->step == keep->current) return true;
    if (strcmp(e->base, "base_model.bin") == 0) return true;
    if (keep->after >= 0 && e->step > keep->after) return false;
    return (keep->last == 0 && keep->every == 0) || newer < keep->last || (keep->every > 0 && e->step % keep->every == 0);
}

static bool needs(const lf__vault_entry *a, const lf__vault_entry *b)
{
    if (b->step == a->base_step && strcmp(a->own_base, b->own_base) == 0 && b->base_step == b->step) return true;
    for (int64_t i = 0; !b->base[0] && i < a->n_refs; i++)
        if (a->refs[i] == b->step) return true;
    return false;
}

static void choose(const lf__vault_catalog *c, const lf__vault_keep *keep, bool *stays)
{
    int32_t newer = 0;
    for (int32_t i = c->n - 1; i >= 0; i--) {
        const lf__vault_entry *e = &c->entries[i];
        bool counts = e->read && !e->damaged && e->seed == keep->seed && (keep->after < 0 || e->step <= keep->after);
        stays[i] = is_wanted(e, keep, newer);
        newer += counts;
    }
    /* Newest first: what a checkpoint needs is never newer than it, so one pass down suffices. */
    for (int32_t i = c->n - 1; i >= 0; i--)
        for (int32_t j = 0; stays[i] && c->entries[i].read && j < i; j++)
            if (!stays[j] && needs(&c->entries[i], &c->entries[j])) stays[j] = true;
}

static lf_status rename_away(lf__io *io, const char *dir, const lf__vault_entry *e)
{
    char name[LF__VAULT_NAME_MAX], from[LF__VAULT_PATH_MAX], to[LF__VAULT_PATH_MAX + 8];
    lf__vault_entry_text(e, name);
    lf_status rc = lf__io_join(from, sizeof from, dir, name);
    if (rc < 0) return rc;
    snprintf(to, sizeof to, "%s.tmp", from);
    return io->ops->rename(io, from, to);
}

/* The folder's own base goes with it, unless it is base_model.bin. */
static lf_status delete_renamed(lf__io *io, const char *dir, const lf__vault_entry *e)
{
    char name[LF__VAULT_NAME_MAX], path[LF__VAULT_PATH_MAX], temp[LF__VAULT_PATH_MAX + 8];
    lf__vault_entry_text(e, name);
    lf_status rc = lf__io_join(path, sizeof path, dir, name);
    if (rc < 0) return rc;
    snprintf(temp, sizeof temp, "%s.tmp", path);
    rc = e->base[0] ? io->ops->remove(io, temp) : lf__vault_remove_folder(io, temp);
    if (rc < 0 || e->base[0] || e->base_step != e->step || strcmp(e->own_base, "base_model.bin") == 0) return rc;
    rc = lf__io_join(path, sizeof path, dir, e->own_base);
    return rc < 0 ? rc : io->ops->remove(io, path);
}

lf_status lf__vault_retain(lf__vault_catalog *c, lf__io *io, const char *dir, const lf__vault_keep *keep, int32_t *removed)
{
    lf_status rc = LF_OK;
    bool *stays = NULL;
    int32_t n_gone = 0, n = 0;
    if (removed) *removed = 0;
    LF_TRY(read_entries(c, io, dir));
    stays = lf__alloc_array((size_t)c->n, sizeof *stays);
    if (!stays) LF_THROW(LF_ERR_NOMEM, "retention of %d checkpoints", c->n);
    choose(c, keep, stays);
    for (int32_t i = c->n - 1; i >= 0; i--) { /* newest first: what remains after a crash never needs what went */
        if (stays[i]) continue;
        LF_TRY(rename_away(io, dir, &c->entries[i]));
        n_gone++;
    }
    if (n_gone == 0) goto out;
    LF_TRY(io->ops->sync_dir(io, dir));
    for (int32_t i = 0; i < c->n; i++) {
        if (!stays[i]) LF_TRY(delete_renamed(io, dir, &c->entries[i]));
    }
    LF_TRY(io->ops->sync_dir(io, dir));
    for (int32_t i = 0; i < c->n; i++) {
        if (stays[i]) c->entries[n++] = c->entries[i];
        else lf__free(c->entries[i].refs);
    }
    c->n = n;
    if (removed) *removed = n_gone;
out:
    lf__free(stays);
    return rc;
}
