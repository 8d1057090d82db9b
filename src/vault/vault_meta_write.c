/* SPDX-License-Identifier: Apache-2.0 */
/* A manifest as JSON: docs/format/vault.md. */
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "vault_int.h"

/* Every json_*_set_new steals its value and fails on NULL, so one flag at the end is enough to see any failure. Keys are
 * written sorted: `|` evaluates in any order. */

static json_t *hex(lf__hash128 h)
{
    char text[33];
    lf__hash_hex(h, text);
    return json_string(text);
}

static json_t *hex_bytes(const uint8_t bytes[16])
{
    char text[33];
    for (int i = 0; i < 16; i++) snprintf(text + 2 * i, 3, "%02x", bytes[i]);
    return json_string(text);
}

static int set(json_t *object, const char *key, json_t *value) { return json_object_set_new(object, key, value); }
static int add(json_t *array, json_t *value) { return json_array_append_new(array, value); }

static json_t *classes_json(const lf__vault_layout *l)
{
    json_t *all = json_array();
    int bad = 0;
    for (int32_t k = 0; k < l->n_classes; k++) {
        const lf__vault_class *c = &l->classes[k];
        json_t *one = json_object();
        bad |= set(one, "dtype", json_string(lf_dtype_name(c->dtype))) | set(one, "frozen", json_boolean(c->frozen)) |
               set(one, "count", json_integer(c->count)) | set(one, "slice_elements", json_integer(c->slice_elements)) |
               add(all, one);
    }
    if (bad) {
        json_decref(all);
        return NULL;
    }
    return all;
}

static json_t *params_json(const lf__vault_layout *l)
{
    json_t *all = json_array();
    int bad = 0;
    for (int32_t i = 0; i < l->n_params; i++) {
        const lf__vault_param *p = &l->params[i];
        json_t *one = json_object(), *shape = json_array();
        for (int32_t d = 0; d < p->ndim; d++) bad |= add(shape, json_integer(p->shape[d]));
        bad |= set(one, "name", json_string(p->name)) | set(one, "dtype", json_string(lf_dtype_name(p->dtype))) |
               set(one, "shape", shape) | set(one, "class", json_integer(p->klass)) |
               set(one, "offset", json_integer(p->offset)) | set(one, "tied_to", json_integer(p->tied_to)) | add(all, one);
    }
    if (bad) {
        json_decref(all);
        return NULL;
    }
    return all;
}

static json_t *files_json(const lf__vault_manifest *m)
{
    json_t *all = json_array();
    int bad = 0;
    for (int32_t i = 0; i < m->n_files; i++) {
        json_t *one = json_object();
        bad |= set(one, "name", json_string(m->files[i].name)) | set(one, "end", json_integer(m->files[i].end)) | add(all, one);
    }
    if (bad) {
        json_decref(all);
        return NULL;
    }
    return all;
}

static json_t *planes_json(const lf__vault_manifest *m)
{
    json_t *all = json_array();
    int bad = 0;
    for (int32_t i = 0; i < m->layout->n_planes; i++) {
        const lf__vault_plane *p = &m->layout->planes[i];
        json_t *one = json_object(), *hash = json_array(), *file = json_array(), *offset = json_array(), *stored = json_array();
        for (int32_t s = 0; s < p->n_slices; s++) {
            const lf__vault_ref *r = &m->refs_of[p->first + s];
            bad |= add(hash, hex(r->hash)) | add(file, json_integer(r->file)) | add(offset, json_integer(r->offset)) |
                   add(stored, json_integer(r->stored_bytes));
        }
        bad |= set(one, "class", json_integer(p->klass)) | set(one, "role", json_string(lf_role_name(p->role))) |
               set(one, "dtype", json_string(lf_dtype_name(p->dtype))) | set(one, "hash", hash) | set(one, "file", file) |
               set(one, "offset", offset) | set(one, "stored", stored) | add(all, one);
    }
    if (bad) {
        json_decref(all);
        return NULL;
    }
    return all;
}

static json_t *blobs_json(const lf__vault_manifest *m)
{
    json_t *all = json_array();
    int bad = 0;
    for (int32_t i = 0; i < m->n_blobs; i++) {
        const lf__vault_blob *b = &m->blobs[i];
        json_t *one = json_object();
        bad |= set(one, "name", json_string(b->name)) | set(one, "bytes", json_integer(b->bytes)) |
               set(one, "hash", hex(b->ref.hash)) | set(one, "file", json_integer(b->ref.file)) |
               set(one, "offset", json_integer(b->ref.offset)) | set(one, "stored", json_integer(b->ref.stored_bytes)) |
               add(all, one);
    }
    if (bad) {
        json_decref(all);
        return NULL;
    }
    return all;
}

static json_t *manifest_json(const lf__vault_manifest *m)
{
    char seed[17];
    snprintf(seed, sizeof seed, "%016llx", (unsigned long long)m->seed);
    json_t *all = json_object();
    int bad = set(all, "kind", json_string(m->kind == LF__VAULT_BASE ? "base" : "diff")) |
              set(all, "step", json_integer(m->step)) | set(all, "base_step", json_integer(m->base_step)) |
              set(all, "time_unix", json_integer(m->time_unix)) | set(all, "seed", json_string(seed)) |
              set(all, "map_digest", hex_bytes(m->layout->map_digest)) | set(all, "state_digest", hex(m->state_digest)) |
              set(all, "base_digest", hex(m->base_digest)) | set(all, "n_changed", json_integer(m->n_changed)) |
              set(all, "classes", classes_json(m->layout)) | set(all, "params", params_json(m->layout)) |
              set(all, "files", files_json(m)) | set(all, "blobs", blobs_json(m)) | set(all, "planes", planes_json(m));
    if (bad) {
        json_decref(all);
        return NULL;
    }
    return all;
}

typedef struct sink {
    lf__buf *text;
    bool began;
    lf_status rc; /* jansson does not pass on every failure of its callback */
} sink;

/* The document's first byte, '{', stands on the line before. */
static int take(const char *bytes, size_t n, void *user)
{
    sink *s = user;
    if (!s->began && n > 0) {
        s->began = true;
        bytes++;
        n--;
    }
    if (s->rc == LF_OK) s->rc = lf__buf_add(s->text, bytes, n);
    return s->rc == LF_OK ? 0 : -1;
}

lf_status lf__vault_meta_write(const lf__vault_manifest *m, lf__buf *text)
{
    lf_status rc = LF_OK;
    lf__buf body = {.max = LF__VAULT_MAX_META_BYTES};
    json_t *all = manifest_json(m);
    if (!all) LF_THROW(LF_ERR_NOMEM, "manifest of step %lld: no memory, or a name is not UTF-8", (long long)m->step);
    sink to = {.text = &body};
    int bad = json_dump_callback(all, take, &to, JSON_COMPACT | JSON_SORT_KEYS);
    LF_TRY(to.rc);
    if (bad) LF_THROW(LF_ERR_NOMEM, "manifest of step %lld: out of memory", (long long)m->step);
    LF_TRY(lf__buf_add(&body, "\n", 1));
    char digest[33];
    lf__hash_hex(lf__hash(body.data, body.used, 0), digest);
    LF_TRY(
        lf__buf_printf(text, "{\"format\":\"loongforge-vault\",\"version\":%d,\"digest\":\"%s\",\n", LF__VAULT_VERSION, digest));
    LF_TRY(lf__buf_add(text, body.data, body.used));
out:
    json_decref(all);
    lf__buf_free(&body);
    return rc;
}
