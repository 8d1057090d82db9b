/* SPDX-License-Identifier: Apache-2.0 */
/* A manifest from JSON. What is read is anybody's text: every type, range, sum and overlap is checked before use. */
#include <jansson.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "vault_int.h"

/* ---- members of known type ------------------------------------------------------------------------------------------------ */

static lf_status get_int(const json_t *object, const char *key, int64_t low, int64_t high, int64_t *out)
{
    const json_t *value = json_object_get(object, key);
    if (!json_is_integer(value)) return LF_FAIL(LF_ERR_CORRUPT, "'%s' is missing or not a whole number", key);
    *out = json_integer_value(value);
    if (*out >= low && *out <= high) return LF_OK;
    return LF_FAIL(LF_ERR_CORRUPT, "'%s' is %lld, expected %lld to %lld", key, (long long)*out, (long long)low, (long long)high);
}

static lf_status get_i32(const json_t *object, const char *key, int32_t low, int32_t high, int32_t *out)
{
    int64_t x = 0;
    lf_status rc = get_int(object, key, low, high, &x);
    *out = (int32_t)x;
    return rc;
}

static lf_status get_text(const json_t *object, const char *key, const char **out)
{
    *out = json_string_value(json_object_get(object, key));
    return *out ? LF_OK : LF_FAIL(LF_ERR_CORRUPT, "'%s' is missing or not text", key);
}

static lf_status get_array(const json_t *object, const char *key, size_t most, const json_t **out)
{
    *out = json_object_get(object, key);
    if (!json_is_array(*out)) return LF_FAIL(LF_ERR_CORRUPT, "'%s' is missing or not an array", key);
    if (json_array_size(*out) <= most) return LF_OK;
    return LF_FAIL(LF_ERR_CORRUPT, "'%s' has %zu entries, expected at most %zu", key, json_array_size(*out), most);
}

static lf_status get_hash(const json_t *object, const char *key, lf__hash128 *out)
{
    const char *text = json_string_value(json_object_get(object, key));
    return text && lf__hash_parse(text, out) ? LF_OK : LF_FAIL(LF_ERR_CORRUPT, "'%s' is missing or not 32 hex digits", key);
}

static lf_status get_dtype(const json_t *object, int32_t *out)
{
    const char *text;
    lf_status rc = get_text(object, "dtype", &text);
    if (rc < 0) return rc;
    *out = lf__vault_dtype_parse(text);
    return *out ? LF_OK : LF_FAIL(LF_ERR_CORRUPT, "'dtype' is '%.32s', which is none", text);
}

/* ---- layout ---------------------------------------------------------------------------------------------------------------- */

static lf_status read_classes(lf__vault_layout *l, const json_t *root)
{
    const json_t *all;
    lf_status rc = get_array(root, "classes", LF__VAULT_MAX_CLASSES, &all);
    if (rc < 0) return rc;
    int32_t n = (int32_t)json_array_size(all);
    l->classes = lf__alloc_array((size_t)n, sizeof *l->classes);
    l->planes = lf__alloc_array((size_t)n * LF_N_ROLES, sizeof *l->planes);
    if (!l->classes || !l->planes) return LF_FAIL(LF_ERR_NOMEM, "%d classes", n);
    for (; l->n_classes < n; l->n_classes++) {
        const json_t *one = json_array_get(all, (size_t)l->n_classes), *frozen = json_object_get(one, "frozen");
        lf__vault_class *c = &l->classes[l->n_classes];
        if (!json_is_boolean(frozen))
            return LF_FAIL(LF_ERR_CORRUPT, "class %d: 'frozen' is missing or not true or false", l->n_classes);
        c->frozen = json_is_true(frozen);
        rc = get_dtype(one, &c->dtype);
        if (rc == LF_OK) rc = get_int(one, "count", 0, LF__VAULT_MAX_ELEMENTS, &c->count);
        if (rc == LF_OK) rc = get_int(one, "slice_elements", 1, LF__VAULT_MAX_SLICE_BYTES, &c->slice_elements);
        if (rc < 0) return lf__fail_prefix(rc, "class %d", l->n_classes);
    }
    return LF_OK;
}

static lf_status read_param(const lf__vault_layout *l, lf__vault_param *p, const json_t *one, int32_t number)
{
    const char *name = NULL;
    const json_t *shape = NULL;
    lf_status rc = get_text(one, "name", &name);
    if (rc == LF_OK) rc = get_dtype(one, &p->dtype);
    if (rc == LF_OK) rc = get_i32(one, "class", 0, l->n_classes - 1, &p->klass);
    if (rc == LF_OK) rc = get_i32(one, "tied_to", -1, number - 1, &p->tied_to);
    if (rc == LF_OK) rc = get_array(one, "shape", LF_MAX_DIMS, &shape);
    if (rc < 0) return rc;
    p->count = 1;
    p->ndim = (int32_t)json_array_size(shape);
    for (int32_t d = 0; d < p->ndim; d++) {
        const json_t *size = json_array_get(shape, (size_t)d);
        int64_t n = json_is_integer(size) ? json_integer_value(size) : -1;
        if (n < 0 || n > LF__VAULT_MAX_ELEMENTS || (n > 0 && p->count > LF__VAULT_MAX_ELEMENTS / n))
            return LF_FAIL(LF_ERR_CORRUPT, "'shape' is no shape");
        p->shape[d] = n;
        p->count *= n;
    }
    rc = get_int(one, "offset", 0, l->classes[p->klass].count, &p->offset);
    if (rc < 0) return rc;
    if (p->count > l->classes[p->klass].count - p->offset)
        return LF_FAIL(LF_ERR_CORRUPT, "ends behind the end of class %d", p->klass);
    p->name = lf__strdup(name);
    return p->name ? LF_OK : LF_FAIL(LF_ERR_NOMEM, "parameter %.80s", name);
}

static lf_status read_params(lf__vault_layout *l, const json_t *root)
{
    const json_t *all;
    lf_status rc = get_array(root, "params", 1 << 24, &all);
    if (rc < 0) return rc;
    int32_t n = (int32_t)json_array_size(all);
    l->params = lf__alloc_array((size_t)n, sizeof *l->params);
    if (!l->params) return LF_FAIL(LF_ERR_NOMEM, "%d parameters", n);
    for (; l->n_params < n; l->n_params++) {
        rc = read_param(l, &l->params[l->n_params], json_array_get(all, (size_t)l->n_params), l->n_params);
        if (rc < 0) return lf__fail_prefix(rc, "parameter %d", l->n_params);
    }
    return LF_OK;
}

/* Planes come in order of (class, role), so none comes twice. */
static lf_status read_planes(lf__vault_layout *l, const json_t *root)
{
    const json_t *all;
    lf_status rc = get_array(root, "planes", (size_t)l->n_classes * LF_N_ROLES, &all);
    int64_t last = -1;
    for (size_t i = 0; rc == LF_OK && i < json_array_size(all); i++) {
        const json_t *one = json_array_get(all, i);
        lf__vault_plane *p = &l->planes[l->n_planes];
        const char *role = "";
        rc = get_text(one, "role", &role);
        if (rc == LF_OK) rc = get_i32(one, "class", 0, l->n_classes - 1, &p->klass);
        if (rc == LF_OK) rc = get_dtype(one, &p->dtype);
        if (rc < 0) return lf__fail_prefix(rc, "plane %zu", i);
        p->role = lf__vault_role_parse(role);
        int64_t order = (int64_t)p->klass * LF_N_ROLES + p->role;
        if (p->role < 0 || p->role == LF_ROLE_GRAD || order <= last)
            return LF_FAIL(LF_ERR_CORRUPT, "plane %zu: role '%.32s' of class %d is unknown or out of order", i, role, p->klass);
        last = order;
        l->n_planes++;
    }
    return rc;
}

/* Before memory for that many slices is asked for. */
static lf_status check_plane_sizes(const lf__vault_layout *l, const json_t *root)
{
    static const char *const keys[] = {"hash", "file", "offset", "stored"};
    for (int32_t i = 0; i < l->n_planes; i++) {
        const json_t *one = json_array_get(json_object_get(root, "planes"), (size_t)i);
        for (size_t k = 0; k < LF_COUNT(keys); k++) {
            const json_t *array;
            size_t n = (size_t)l->planes[i].n_slices;
            lf_status rc = get_array(one, keys[k], n, &array);
            if (rc == LF_OK && json_array_size(array) != n)
                rc = LF_FAIL(LF_ERR_CORRUPT, "'%s' has %zu entries, expected %zu", keys[k], json_array_size(array), n);
            if (rc < 0) return lf__fail_prefix(rc, "plane %d", i);
        }
    }
    return LF_OK;
}

static lf_status read_layout(lf__vault_layout **out, const json_t *root)
{
    lf_status rc = LF_OK;
    lf__vault_layout *l = lf__alloc(sizeof *l);
    lf__hash128 digest;
    *out = NULL;
    if (!l) return LF_FAIL(LF_ERR_NOMEM, "layout");
    atomic_init(&l->refs, 1);
    LF_TRY(get_hash(root, "map_digest", &digest));
    for (int i = 0; i < 8; i++) {
        l->map_digest[i] = (uint8_t)(digest.hi >> (56 - 8 * i));
        l->map_digest[8 + i] = (uint8_t)(digest.lo >> (56 - 8 * i));
    }
    LF_TRY(read_classes(l, root));
    LF_TRY(read_params(l, root));
    LF_TRY(read_planes(l, root));
    LF_TRY(lf__vault_layout_finish(l));
    LF_TRY(check_plane_sizes(l, root));
    *out = l;
    l = NULL;
out:
    lf__vault_layout_unref(l);
    return rc == LF_ERR_FORMAT ? LF_ERR_CORRUPT : rc;
}

/* ---- files and refs -------------------------------------------------------------------------------------------------------- */

static lf_status read_files(lf__vault_manifest *m, const json_t *root)
{
    const json_t *all;
    lf_status rc = get_array(root, "files", 1 << 20, &all);
    if (rc < 0) return rc;
    int32_t n = (int32_t)json_array_size(all);
    if (n < 1 || (m->kind == LF__VAULT_BASE && n != 1)) return LF_FAIL(LF_ERR_CORRUPT, "'files' has %d entries", n);
    m->files = lf__alloc_array((size_t)n, sizeof *m->files);
    if (!m->files) return LF_FAIL(LF_ERR_NOMEM, "%d files", n);
    for (m->n_files = 0; m->n_files < n; m->n_files++) {
        lf__vault_file *f = &m->files[m->n_files];
        const char *name = "";
        int64_t step = -1;
        rc = get_text(json_array_get(all, (size_t)m->n_files), "name", &name);
        if (rc == LF_OK)
            rc = get_int(json_array_get(all, (size_t)m->n_files), "end", LF__VAULT_HEAD_BYTES, INT64_MAX / 2, &f->end);
        if (rc < 0) return lf__fail_prefix(rc, "file %d", m->n_files);
        int32_t kind = strlen(name) < sizeof f->name ? lf__vault_data_kind(name, &step) : -1;
        bool fits = m->n_files == 0 ? kind == LF__VAULT_BASE && (step < 0 || step == m->base_step)
                                    : kind == LF__VAULT_DIFF && step > m->base_step && step <= m->step;
        if (!fits) return LF_FAIL(LF_ERR_CORRUPT, "file %d: name '%.80s' does not belong there", m->n_files, name);
        snprintf(f->name, sizeof f->name, "%s", name);
    }
    return LF_OK;
}

static lf_status read_ref(const lf__vault_manifest *m, lf__vault_ref *r, const json_t *file, const json_t *offset,
                          const json_t *stored, int64_t raw_bytes)
{
    if (!json_is_integer(file) || !json_is_integer(offset) || !json_is_integer(stored))
        return LF_FAIL(LF_ERR_CORRUPT, "'file', 'offset' or 'stored' is missing or not a whole number");
    int64_t f = json_integer_value(file);
    r->offset = json_integer_value(offset);
    r->stored_bytes = json_integer_value(stored);
    if (f < 0 || f >= m->n_files) return LF_FAIL(LF_ERR_CORRUPT, "file %lld, expected 0 to %d", (long long)f, m->n_files - 1);
    r->file = (int32_t)f;
    int64_t end = m->files[f].end;
    if (r->stored_bytes < 0 || r->stored_bytes > raw_bytes || r->offset < LF__VAULT_HEAD_BYTES ||
        r->offset > end - LF__VAULT_HEAD_BYTES || r->stored_bytes > end - LF__VAULT_HEAD_BYTES - r->offset)
        return LF_FAIL(LF_ERR_CORRUPT,
                       "record of %lld bytes at %lld is outside %s (ends at %lld) or larger than its content (%lld)",
                       (long long)r->stored_bytes, (long long)r->offset, m->files[f].name, (long long)end, (long long)raw_bytes);
    return LF_OK;
}

static lf_status read_plane_refs(lf__vault_manifest *m, const lf__vault_plane *p, const json_t *one)
{
    const json_t *hash = json_object_get(one, "hash"), *file = json_object_get(one, "file");
    const json_t *offset = json_object_get(one, "offset"), *stored = json_object_get(one, "stored");
    for (size_t s = 0; s < (size_t)p->n_slices; s++) {
        lf__vault_ref *r = &m->refs_of[p->first + (int64_t)s];
        const char *text = json_string_value(json_array_get(hash, s));
        size_t bytes;
        lf__vault_plane_of(m->layout, p->first + (int64_t)s, NULL, &bytes);
        if (!text || !lf__hash_parse(text, &r->hash))
            return LF_FAIL(LF_ERR_CORRUPT, "slice %zu: the hash is not 32 hex digits", s);
        lf_status rc =
            read_ref(m, r, json_array_get(file, s), json_array_get(offset, s), json_array_get(stored, s), (int64_t)bytes);
        if (rc < 0) return lf__fail_prefix(rc, "slice %zu", s);
    }
    return LF_OK;
}

static lf_status read_blobs(lf__vault_manifest *m, const json_t *root)
{
    const json_t *all;
    lf_status rc = get_array(root, "blobs", LF__VAULT_MAX_BLOBS, &all);
    if (rc < 0) return rc;
    int32_t n = (int32_t)json_array_size(all), own = lf__vault_own_file(m);
    m->blobs = lf__alloc_array((size_t)n, sizeof *m->blobs);
    if (!m->blobs) return LF_FAIL(LF_ERR_NOMEM, "%d blobs", n);
    for (; m->n_blobs < n; m->n_blobs++) {
        const json_t *one = json_array_get(all, (size_t)m->n_blobs);
        lf__vault_blob *b = &m->blobs[m->n_blobs];
        const char *name = "";
        rc = get_text(one, "name", &name);
        if (rc == LF_OK) rc = get_int(one, "bytes", 0, LF__VAULT_MAX_BLOB_BYTES, &b->bytes);
        if (rc == LF_OK) rc = get_hash(one, "hash", &b->ref.hash);
        if (rc == LF_OK)
            rc = read_ref(m, &b->ref, json_object_get(one, "file"), json_object_get(one, "offset"),
                          json_object_get(one, "stored"), b->bytes);
        if (rc == LF_OK && b->ref.file != own) rc = LF_FAIL(LF_ERR_CORRUPT, "is in a file of another checkpoint");
        if (rc == LF_OK && (b->name = lf__strdup(name)) == NULL) rc = LF_FAIL(LF_ERR_NOMEM, "name");
        if (rc < 0) return lf__fail_prefix(rc, "blob %d", m->n_blobs);
    }
    return LF_OK;
}

/* ---- overlaps ---------------------------------------------------------------------------------------------------------------- */

typedef struct span {
    int64_t offset, end;
    int32_t file;
} span;

static int compare_spans(const void *a_, const void *b_)
{
    const span *a = a_, *b = b_;
    if (a->file != b->file) return a->file < b->file ? -1 : 1;
    return a->offset < b->offset ? -1 : a->offset > b->offset;
}

/* Records never overlap, and those of the checkpoint's own file leave no byte of it uncovered. */
static lf_status check_spans(const lf__vault_manifest *m)
{
    lf_status rc = LF_OK;
    int64_t n = m->layout->n_slices + m->n_blobs;
    int32_t own = lf__vault_own_file(m);
    span *all = lf__alloc_array((size_t)n, sizeof *all);
    if (!all) return LF_FAIL(LF_ERR_NOMEM, "%lld records", (long long)n);
    for (int64_t i = 0; i < n; i++) {
        const lf__vault_ref *r = i < m->layout->n_slices ? &m->refs_of[i] : &m->blobs[i - m->layout->n_slices].ref;
        all[i] = (span){r->offset, r->offset + LF__VAULT_HEAD_BYTES + r->stored_bytes, r->file};
    }
    if (n > 0) qsort(all, (size_t)n, sizeof *all, compare_spans);
    int64_t own_end = LF__VAULT_HEAD_BYTES;
    for (int64_t i = 0; i < n; i++) {
        if (i > 0 && all[i].file == all[i - 1].file && all[i].offset < all[i - 1].end)
            LF_THROW(LF_ERR_CORRUPT, "records at %lld and %lld of %s overlap", (long long)all[i - 1].offset,
                     (long long)all[i].offset, m->files[all[i].file].name);
        if (all[i].file != own) continue;
        if (all[i].offset != own_end) LF_THROW(LF_ERR_CORRUPT, "a gap at %lld of %s", (long long)own_end, m->files[own].name);
        own_end = all[i].end;
    }
    if (own >= 0 && own_end != m->files[own].end)
        LF_THROW(LF_ERR_CORRUPT, "the records of %s end at %lld, not at %lld", m->files[own].name, (long long)own_end,
                 (long long)m->files[own].end);
out:
    lf__free(all);
    return rc;
}

/* ---- the whole ------------------------------------------------------------------------------------------------------------------ */

static lf_status read_head(lf__vault_manifest *m, const json_t *root)
{
    const char *kind = "", *seed = "";
    lf_status rc = LF_OK;
    LF_TRY(get_text(root, "kind", &kind));
    m->kind = strcmp(kind, "base") == 0 ? LF__VAULT_BASE : LF__VAULT_DIFF;
    if (m->kind == LF__VAULT_DIFF && strcmp(kind, "diff") != 0)
        LF_THROW(LF_ERR_CORRUPT, "'kind' is '%.32s', expected base or diff", kind);
    LF_TRY(get_int(root, "step", 0, INT64_MAX / 2, &m->step));
    LF_TRY(get_int(root, "base_step", 0, m->step, &m->base_step));
    LF_TRY(get_int(root, "time_unix", INT64_MIN / 2, INT64_MAX / 2, &m->time_unix));
    LF_TRY(get_int(root, "n_changed", 0, m->layout->n_slices, &m->n_changed));
    LF_TRY(get_text(root, "seed", &seed));
    char padded[33];
    lf__hash128 number;
    snprintf(padded, sizeof padded, "0000000000000000%.16s", seed);
    if (strlen(seed) != 16 || !lf__hash_parse(padded, &number)) LF_THROW(LF_ERR_CORRUPT, "'seed' is not 16 hex digits");
    m->seed = number.lo;
    LF_TRY(get_hash(root, "state_digest", &m->state_digest));
    LF_TRY(get_hash(root, "base_digest", &m->base_digest));
    if (m->kind == LF__VAULT_BASE &&
        (m->base_step != m->step || m->base_digest.lo != m->state_digest.lo || m->base_digest.hi != m->state_digest.hi))
        LF_THROW(LF_ERR_CORRUPT, "a base has another base");
out:
    return rc;
}

static lf_status read_manifest(lf__vault_manifest **out, const json_t *root)
{
    lf_status rc = LF_OK;
    lf__vault_layout *layout = NULL;
    lf__vault_manifest *m = NULL;
    *out = NULL;
    LF_TRY(read_layout(&layout, root));
    LF_TRY(lf__vault_manifest_new(&m, layout));
    LF_TRY(read_head(m, root));
    LF_TRY(read_files(m, root));
    for (int32_t i = 0; i < layout->n_planes; i++) {
        rc = read_plane_refs(m, &layout->planes[i], json_array_get(json_object_get(root, "planes"), (size_t)i));
        if (rc < 0) {
            rc = lf__fail_prefix(rc, "plane %d", i);
            goto out;
        }
    }
    LF_TRY(read_blobs(m, root));
    LF_TRY(check_spans(m));
    lf__hash128 digest = lf__vault_manifest_digest(m);
    if (digest.lo != m->state_digest.lo || digest.hi != m->state_digest.hi)
        LF_THROW(LF_ERR_CORRUPT, "'state_digest' does not fit the slice hashes");
    *out = m;
    m = NULL;
out:
    lf__vault_manifest_unref(m);
    lf__vault_layout_unref(layout);
    return rc;
}

/* The first line carries version and digest of the rest in one exact spelling. */
static lf_status check_first_line(const char *text, size_t bytes)
{
    static const char head[] = "{\"format\":\"loongforge-vault\",\"version\":", middle[] = ",\"digest\":\"";
    size_t at = sizeof head - 1;
    if (bytes < at || memcmp(text, head, at) != 0) return LF_FAIL(LF_ERR_CORRUPT, "no vault manifest");
    long version = 0;
    size_t from = at;
    while (at < bytes && at < from + 6 && text[at] >= '0' && text[at] <= '9') version = version * 10 + (text[at++] - '0');
    if (version != LF__VAULT_VERSION)
        return LF_FAIL(LF_ERR_UNSUPPORTED, "format version %ld, this library reads %d", version, LF__VAULT_VERSION);
    char hash[33] = "";
    lf__hash128 stored, real;
    bool fits = at == from + 1 && bytes - at >= sizeof middle - 1 + 32 + 3 && memcmp(text + at, middle, sizeof middle - 1) == 0;
    at += sizeof middle - 1;
    if (fits) memcpy(hash, text + at, 32);
    at += 32;
    if (!fits || !lf__hash_parse(hash, &stored) || memcmp(text + at, "\",\n", 3) != 0)
        return LF_FAIL(LF_ERR_CORRUPT, "the first line is damaged");
    at += 3;
    real = lf__hash(text + at, bytes - at, 0);
    return real.lo == stored.lo && real.hi == stored.hi
               ? LF_OK
               : LF_FAIL(LF_ERR_CORRUPT, "the text does not have the digest that its first line says");
}

lf_status lf__vault_meta_read(lf__vault_manifest **out, const char *text, size_t bytes, const char *what)
{
    lf_status rc = LF_OK;
    json_t *root = NULL;
    json_error_t error;
    *out = NULL;
    LF_TRY(check_first_line(text, bytes));
    root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &error);
    if (!root) {
        bool memory = json_error_code(&error) == json_error_out_of_memory;
        LF_THROW(memory ? LF_ERR_NOMEM : LF_ERR_CORRUPT, "JSON line %d: %s", error.line, error.text);
    }
    LF_TRY(read_manifest(out, root));
out:
    json_decref(root);
    return rc < 0 ? lf__fail_prefix(rc, "%s", what) : LF_OK;
}
