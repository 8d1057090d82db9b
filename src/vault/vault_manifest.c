/* SPDX-License-Identifier: Apache-2.0 */
/* Layouts (what is saved, how it is cut) and manifests (where each slice lies). */
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "vault_int.h"

/* ---- layout ------------------------------------------------------------------------------------------------------------ */

static lf_status add_plane(lf__vault_layout *l, int32_t klass, int32_t role, int32_t dtype)
{
    lf__vault_plane *p = &l->planes[l->n_planes++];
    *p = (lf__vault_plane){.klass = klass, .role = role, .dtype = dtype};
    return LF_OK;
}

/* The weight is not stored where a master is: rounding gives it back. */
static void add_class(lf__vault_layout *l, int32_t klass, const lf_class_info *info, int64_t slice_bytes)
{
    static const int32_t saved[] = {LF_ROLE_WEIGHT, LF_ROLE_MASTER, LF_ROLE_EXP_AVG, LF_ROLE_EXP_AVG_SQ};
    size_t widest = 1;
    for (size_t i = 0; i < LF_COUNT(saved); i++) {
        int32_t role = saved[i], dtype = info->role_dtype[role];
        if (!dtype || (role == LF_ROLE_WEIGHT && info->role_dtype[LF_ROLE_MASTER])) continue;
        add_plane(l, klass, role, dtype);
        if (lf_dtype_bytes(dtype) > widest) widest = lf_dtype_bytes(dtype);
    }
    l->classes[klass] = (lf__vault_class){info->dtype, info->frozen, info->count, slice_bytes / (int64_t)widest};
}

static lf_status add_param(lf__vault_layout *l, const lf_map *map, int32_t i)
{
    lf_block_info b = {.size = sizeof b};
    lf_status rc = lf_map_get_block(map, i, &b);
    if (rc < 0) return rc;
    lf__vault_param *p = &l->params[i];
    *p = (lf__vault_param){.name = lf__strdup(b.name),
                           .ndim = b.ndim,
                           .klass = b.range.klass,
                           .tied_to = b.tied_to,
                           .offset = b.range.offset,
                           .count = b.range.count,
                           .dtype = l->classes[b.range.klass].dtype};
    memcpy(p->shape, b.shape, sizeof p->shape);
    return p->name ? LF_OK : LF_FAIL(LF_ERR_NOMEM, "parameter %s", b.name);
}

lf_status lf__vault_layout_of_map(lf__vault_layout **out, const lf_map *map, int64_t slice_bytes)
{
    lf_status rc = LF_OK;
    lf__vault_layout *l = lf__alloc(sizeof *l);
    *out = NULL;
    if (!l) return LF_FAIL(LF_ERR_NOMEM, "vault layout");
    atomic_init(&l->refs, 1);
    LF_TRY(lf_map_digest(map, l->map_digest));
    int32_t n_classes = lf_map_n_classes(map), n_params = lf_map_n_blocks(map);
    if (n_classes < 1 || n_classes > LF__VAULT_MAX_CLASSES)
        LF_THROW(LF_ERR_INVALID, "the map has %d classes, expected 1 to %d", n_classes, LF__VAULT_MAX_CLASSES);
    l->classes = lf__alloc_array((size_t)n_classes, sizeof *l->classes);
    l->params = lf__alloc_array((size_t)n_params, sizeof *l->params);
    l->planes = lf__alloc_array((size_t)n_classes * LF_N_ROLES, sizeof *l->planes);
    if (!l->classes || !l->params || !l->planes) LF_THROW(LF_ERR_NOMEM, "vault layout of %d parameters", n_params);
    l->n_classes = n_classes;
    for (int32_t k = 0; k < n_classes; k++) {
        lf_class_info info = {.size = sizeof info};
        LF_TRY(lf_map_get_class(map, k, &info));
        add_class(l, k, &info, slice_bytes);
    }
    l->n_params = n_params;
    for (int32_t i = 0; i < n_params; i++) LF_TRY(add_param(l, map, i));
    LF_TRY(lf__vault_layout_finish(l));
    *out = l;
    l = NULL;
out:
    lf__vault_layout_unref(l);
    return rc;
}

lf__vault_layout *lf__vault_layout_ref(lf__vault_layout *l)
{
    atomic_fetch_add(&l->refs, 1);
    return l;
}

void lf__vault_layout_unref(lf__vault_layout *l)
{
    if (!l || atomic_fetch_sub(&l->refs, 1) > 1) return;
    for (int32_t i = 0; l->params && i < l->n_params; i++) lf__free(l->params[i].name);
    lf__free(l->params);
    lf__free(l->classes);
    lf__free(l->planes);
    lf__free(l);
}

static lf_status finish_plane(lf__vault_layout *l, lf__vault_plane *p)
{
    const lf__vault_class *c = &l->classes[p->klass];
    p->elem_bytes = lf_dtype_bytes(p->dtype);
    p->count = c->count;
    p->slice_elements = c->slice_elements;
    int64_t n = (p->count + p->slice_elements - 1) / p->slice_elements;
    size_t bytes = (size_t)(p->slice_elements < p->count ? p->slice_elements : p->count) * p->elem_bytes;
    if (bytes > LF__VAULT_MAX_SLICE_BYTES)
        return LF_FAIL(LF_ERR_FORMAT, "class %d %s: a slice has %zu bytes, expected at most %d", p->klass, lf_role_name(p->role),
                       bytes, LF__VAULT_MAX_SLICE_BYTES);
    if (n > LF__VAULT_MAX_SLICES - l->n_slices)
        return LF_FAIL(LF_ERR_FORMAT, "more than %lld slices; hint: a larger slice_bytes", (long long)LF__VAULT_MAX_SLICES);
    if (bytes > l->slice_bytes) l->slice_bytes = bytes;
    p->first = l->n_slices;
    p->n_slices = (int32_t)n;
    l->n_slices += n;
    p->raw_offset = l->staged_bytes;
    l->raw_bytes += p->count * (int64_t)p->elem_bytes;
    l->staged_bytes = lf__round_up(l->staged_bytes + p->count * (int64_t)p->elem_bytes, 64);
    return LF_OK;
}

lf_status lf__vault_layout_finish(lf__vault_layout *l)
{
    for (int32_t k = 0; k < l->n_classes; k++) {
        const lf__vault_class *c = &l->classes[k];
        if (c->count < 0 || c->count > LF__VAULT_MAX_ELEMENTS || c->slice_elements < 1)
            return LF_FAIL(LF_ERR_FORMAT, "class %d has %lld elements in slices of %lld", k, (long long)c->count,
                           (long long)c->slice_elements);
    }
    l->n_slices = l->raw_bytes = l->staged_bytes = 0;
    l->slice_bytes = 64;
    for (int32_t i = 0; i < l->n_planes; i++) {
        lf_status rc = finish_plane(l, &l->planes[i]);
        if (rc < 0) return rc;
    }
    return LF_OK;
}

const lf__vault_plane *lf__vault_plane_of(const lf__vault_layout *l, int64_t index, int64_t *slice, size_t *bytes)
{
    const lf__vault_plane *p = l->planes;
    while (index >= p->first + p->n_slices) p++;
    int64_t s = index - p->first, from = s * p->slice_elements, left = p->count - from;
    if (slice) *slice = s;
    if (bytes) *bytes = (size_t)(left < p->slice_elements ? left : p->slice_elements) * p->elem_bytes;
    return p;
}

/* ---- does a stored layout fit? ----------------------------------------------------------------------------------------- */

static void shape_text(const lf__vault_param *p, char text[128])
{
    int n = snprintf(text, 128, "(");
    for (int32_t d = 0; d < p->ndim && n < 100; d++)
        n += snprintf(text + n, (size_t)(128 - n), "%s%lld", d ? ", " : "", (long long)p->shape[d]);
    snprintf(text + n, (size_t)(128 - n), ")");
}

static const lf__vault_param *find_param(const lf__vault_layout *l, const char *name)
{
    for (int32_t i = 0; i < l->n_params; i++)
        if (strcmp(l->params[i].name, name) == 0) return &l->params[i];
    return NULL;
}

static lf_status match_param(const lf__vault_param *a, const lf__vault_param *b, const lf__vault_layout *here,
                             const lf__vault_layout *stored)
{
    char mine[128], theirs[128];
    shape_text(a, mine);
    shape_text(b, theirs);
    if (a->dtype != b->dtype || strcmp(mine, theirs) != 0 || a->ndim != b->ndim ||
        memcmp(a->shape, b->shape, sizeof a->shape) != 0)
        return LF_FAIL(LF_ERR_FORMAT, "parameter %s is %s %s in the model, %s %s in the checkpoint", a->name,
                       lf_dtype_name(a->dtype), mine, lf_dtype_name(b->dtype), theirs);
    if (here->classes[a->klass].frozen != stored->classes[b->klass].frozen)
        return LF_FAIL(LF_ERR_FORMAT, "parameter %s is %s in the model, not so in the checkpoint", a->name,
                       here->classes[a->klass].frozen ? "frozen" : "trained");
    if (a->tied_to != b->tied_to)
        return LF_FAIL(LF_ERR_FORMAT, "parameter %s is tied to number %d in the model, to %d in the checkpoint", a->name,
                       a->tied_to, b->tied_to);
    if (a->klass != b->klass || a->offset != b->offset)
        return LF_FAIL(LF_ERR_FORMAT,
                       "parameter %s lies at element %lld of class %d in the model, %lld of %d in the checkpoint; "
                       "hint: layer and expert numbers or align_elements differ",
                       a->name, (long long)a->offset, a->klass, (long long)b->offset, b->klass);
    return LF_OK;
}

static lf_status match_params(const lf__vault_layout *here, const lf__vault_layout *stored)
{
    int32_t n = here->n_params > stored->n_params ? here->n_params : stored->n_params;
    for (int32_t i = 0; i < n; i++) {
        const lf__vault_param *a = i < here->n_params ? &here->params[i] : NULL,
                              *b = i < stored->n_params ? &stored->params[i] : NULL;
        if (a && b && strcmp(a->name, b->name) == 0) {
            lf_status rc = match_param(a, b, here, stored);
            if (rc < 0) return rc;
            continue;
        }
        if (b && !find_param(here, b->name))
            return LF_FAIL(LF_ERR_FORMAT, "parameter %s of the checkpoint is not in the model", b->name);
        if (a && !find_param(stored, a->name))
            return LF_FAIL(LF_ERR_FORMAT, "parameter %s of the model is not in the checkpoint", a->name);
        return LF_FAIL(LF_ERR_FORMAT, "parameter number %d is %s in the model, %s in the checkpoint", i, a ? a->name : "none",
                       b ? b->name : "none");
    }
    return LF_OK;
}

static lf_status match_planes(const lf__vault_layout *here, const lf__vault_layout *stored)
{
    for (int32_t i = 0; i < here->n_planes || i < stored->n_planes; i++) {
        const lf__vault_plane *a = i < here->n_planes ? &here->planes[i] : NULL,
                              *b = i < stored->n_planes ? &stored->planes[i] : NULL;
        if (a && b && a->klass == b->klass && a->role == b->role && a->dtype == b->dtype && a->count == b->count) continue;
        return LF_FAIL(LF_ERR_FORMAT,
                       "saved state differs: %s of class %d (%s, %lld elements) in the model, %s of class %d (%s, %lld elements) "
                       "in the checkpoint; hint: [map] optimizer_state and moments_bf16 must be as when it was saved",
                       a ? lf_role_name(a->role) : "nothing", a ? a->klass : -1, a ? lf_dtype_name(a->dtype) : "-",
                       a ? (long long)a->count : 0, b ? lf_role_name(b->role) : "nothing", b ? b->klass : -1,
                       b ? lf_dtype_name(b->dtype) : "-", b ? (long long)b->count : 0);
    }
    return LF_OK;
}

lf_status lf__vault_layout_match(const lf__vault_layout *here, const lf__vault_layout *stored)
{
    lf_status rc = match_params(here, stored);
    if (rc == LF_OK) rc = match_planes(here, stored);
    if (rc < 0 || memcmp(here->map_digest, stored->map_digest, 16) == 0) return rc;
    return LF_FAIL(LF_ERR_FORMAT, "all parameters are the same but the map is not: groups or padding differ; "
                                  "hint: high_load_experts and align_elements must be as when the checkpoint was saved");
}

bool lf__vault_layout_same_slices(const lf__vault_layout *a, const lf__vault_layout *b)
{
    if (a->n_slices != b->n_slices || a->n_classes != b->n_classes) return false;
    for (int32_t k = 0; k < a->n_classes; k++)
        if (a->classes[k].slice_elements != b->classes[k].slice_elements) return false;
    return true;
}

/* ---- manifest ------------------------------------------------------------------------------------------------------------ */

lf_status lf__vault_manifest_new(lf__vault_manifest **out, lf__vault_layout *layout)
{
    lf__vault_manifest *m = lf__alloc(sizeof *m);
    *out = NULL;
    if (!m) return LF_FAIL(LF_ERR_NOMEM, "manifest");
    atomic_init(&m->refs, 1);
    m->layout = lf__vault_layout_ref(layout);
    m->refs_of = lf__alloc_array((size_t)layout->n_slices, sizeof *m->refs_of);
    if (!m->refs_of) {
        lf__vault_manifest_unref(m);
        return LF_FAIL(LF_ERR_NOMEM, "manifest of %lld slices", (long long)layout->n_slices);
    }
    for (int64_t i = 0; i < layout->n_slices; i++) m->refs_of[i].file = -1;
    *out = m;
    return LF_OK;
}

lf__vault_manifest *lf__vault_manifest_ref(lf__vault_manifest *m)
{
    atomic_fetch_add(&m->refs, 1);
    return m;
}

void lf__vault_manifest_unref(lf__vault_manifest *m)
{
    if (!m || atomic_fetch_sub(&m->refs, 1) > 1) return;
    for (int32_t i = 0; m->blobs && i < m->n_blobs; i++) lf__free(m->blobs[i].name);
    lf__free(m->blobs);
    lf__free(m->files);
    lf__free(m->refs_of);
    lf__vault_layout_unref(m->layout);
    lf__free(m);
}

/* Over all slice hashes in order, 16 little-endian bytes each, in blocks whose hashes are hashed again. */
lf__hash128 lf__vault_manifest_digest(const lf__vault_manifest *m)
{
    enum { BLOCK = 256 };
    uint8_t bytes[16 + BLOCK * 16];
    lf__hash128 sum = {0, 0};
    for (int64_t from = 0; from < m->layout->n_slices; from += BLOCK) {
        int64_t n = m->layout->n_slices - from < BLOCK ? m->layout->n_slices - from : BLOCK;
        for (int64_t i = -1; i < n; i++) {
            lf__hash128 h = i < 0 ? sum : m->refs_of[from + i].hash;
            for (int b = 0; b < 8; b++) {
                bytes[(i + 1) * 16 + b] = (uint8_t)(h.lo >> (8 * b));
                bytes[(i + 1) * 16 + 8 + b] = (uint8_t)(h.hi >> (8 * b));
            }
        }
        sum = lf__hash(bytes, (size_t)(n + 1) * 16, m->seed);
    }
    return sum;
}

int32_t lf__vault_own_file(const lf__vault_manifest *m)
{
    if (m->kind == LF__VAULT_BASE) return 0;
    for (int32_t i = 1; i < m->n_files; i++) {
        int64_t step;
        if (lf__vault_data_kind(m->files[i].name, &step) == LF__VAULT_DIFF && step == m->step) return i;
    }
    return -1;
}

int64_t lf__vault_diff_bytes(const lf__vault_manifest *m)
{
    int32_t own = lf__vault_own_file(m);
    return m->kind == LF__VAULT_DIFF && own >= 0 ? m->files[own].end : 0;
}

void lf__vault_slice_text(const lf__vault_layout *l, int64_t index, char *text, size_t size)
{
    int64_t slice;
    const lf__vault_plane *p = lf__vault_plane_of(l, index, &slice, NULL);
    int64_t from = slice * p->slice_elements, to = from + p->slice_elements;
    const char *name = NULL;
    for (int32_t i = 0; i < l->n_params && !name; i++) {
        const lf__vault_param *q = &l->params[i];
        if (q->klass == p->klass && q->offset < to && q->offset + q->count > from) name = q->name;
    }
    snprintf(text, size, "class %d %s slice %lld%s%.80s%s", p->klass, lf_role_name(p->role), (long long)slice,
             name ? " (from " : "", name ? name : "", name ? ")" : "");
}
