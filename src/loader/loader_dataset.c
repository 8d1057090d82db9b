/* SPDX-License-Identifier: Apache-2.0 */
/* A set: LMDB mapped read-only, and an index of its samples made by one walk over the keys. */
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "io/io.h"
#include "loader_int.h"

/* Pointers go into the map: values are read where they lie. */
typedef struct entry {
    const char *id;
    const void *image, *text;
    uint32_t image_bytes, text_bytes;
    uint16_t id_bytes;
    uint8_t has; /* HAS_* */
} entry;
enum { HAS_IMAGE = 1, HAS_TEXT = 2 };

struct lf_dataset {
    MDB_env *env;
    MDB_txn *txn; /* one for the life of the set: what it shows does not change */
    entry *entries;
    int64_t n, room;
    int64_t n_bytes, n_other;
    int64_t n_packed; /* samples that the metadata promise; -1: none */
    bool unsorted;
    char strange_key[96]; /* the first key of no known form */
    char *path;
    lf__vocabulary vocabulary;
    char source[128], tokenizer[128];
    _Atomic int32_t refs;
};

/* ---- opening ------------------------------------------------------------------------------------------------------------- */

lf_status lf__lmdb_fail(int err, const char *what, const char *path)
{
    switch (err) {
    case MDB_MAP_FULL:
        return LF_FAIL(LF_ERR_NOSPACE, "%s %s: the set would be larger than map_bytes; hint: --map_bytes", what, path);
    case MDB_INVALID:
    case MDB_VERSION_MISMATCH:
        return LF_FAIL(LF_ERR_FORMAT, "%s %s: no LMDB file, expected a set made by `loongforge pack`", what, path);
    case MDB_CORRUPTED:
    case MDB_PAGE_NOTFOUND:
    case MDB_PANIC: return LF_FAIL(LF_ERR_CORRUPT, "%s %s: %s", what, path, mdb_strerror(err));
    case MDB_BAD_VALSIZE: return LF_FAIL(LF_ERR_INVALID, "%s %s: a key or value of a size that LMDB does not take", what, path);
    default: break;
    }
    return err > 0 ? lf__fail_errno(err, "%s %s", what, path) : LF_FAIL(LF_ERR_IO, "%s %s: %s", what, path, mdb_strerror(err));
}

/* The data file's size, and whether `path` is the file itself. */
static lf_status find_data(const char *path, bool *is_file, int64_t *bytes)
{
    struct stat st;
    char data[4096];
    if (stat(path, &st) != 0) return lf__fail_errno(errno, "cannot open the set %s", path);
    *is_file = S_ISREG(st.st_mode);
    if (!*is_file) {
        lf_status rc = lf__io_join(data, sizeof data, path, "data.mdb");
        if (rc < 0) return rc;
        if (!S_ISDIR(st.st_mode) || stat(data, &st) != 0 || !S_ISREG(st.st_mode))
            return LF_FAIL(LF_ERR_NOTFOUND, "%s is no set: it has no data.mdb; hint: `loongforge pack` makes one", path);
    }
    if (st.st_size == 0) return LF_FAIL(LF_ERR_FORMAT, "%s is empty (0 bytes), expected an LMDB file", path);
    *bytes = st.st_size;
    return LF_OK;
}

/* A page that the file does not have would be a bus error when touched, so a short file is refused before that. */
static lf_status check_length(lf_dataset *set, int64_t bytes)
{
    MDB_envinfo info;
    MDB_stat stat_;
    int err = mdb_env_info(set->env, &info);
    if (!err) err = mdb_env_stat(set->env, &stat_);
    if (err) return lf__lmdb_fail(err, "reading", set->path);
    uint64_t pages = (uint64_t)info.me_last_pgno + 1, have = (uint64_t)bytes / stat_.ms_psize;
    if (pages > have)
        return LF_FAIL(LF_ERR_CORRUPT, "%s has %lld bytes, but its header speaks of %llu pages of %u; hint: copy it again",
                       set->path, (long long)bytes, (unsigned long long)pages, stat_.ms_psize);
    return LF_OK;
}

static lf_status open_map(lf_dataset *set)
{
    bool is_file = false;
    int64_t bytes = 0;
    lf_status rc = find_data(set->path, &is_file, &bytes);
    if (rc < 0) return rc;
    int err = mdb_env_create(&set->env);
    if (err) return lf__lmdb_fail(err, "opening", set->path);
    unsigned flags = MDB_RDONLY | MDB_NOLOCK | MDB_NOTLS | MDB_NORDAHEAD | (is_file ? MDB_NOSUBDIR : 0);
    err = mdb_env_open(set->env, set->path, flags, 0444);
    if (err == ENOENT) err = MDB_INVALID; /* a file too short to hold a header */
    if (err) return lf__lmdb_fail(err, "opening", set->path);
    rc = check_length(set, bytes);
    if (rc < 0) return rc;
    err = mdb_txn_begin(set->env, NULL, MDB_RDONLY, &set->txn);
    return err ? lf__lmdb_fail(err, "opening", set->path) : LF_OK;
}

/* ---- metadata ------------------------------------------------------------------------------------------------------------ */

static void take_text(char *to, size_t size, const json_t *root, const char *key)
{
    const char *text = json_string_value(json_object_get(root, key));
    if (text) snprintf(to, size, "%s", text);
}

static lf_status read_meta(lf_dataset *set, const MDB_val *value)
{
    json_error_t error;
    json_t *root = json_loadb(value->mv_data, value->mv_size, 0, &error);
    if (!json_is_object(root)) {
        json_decref(root);
        return LF_FAIL(LF_ERR_CORRUPT, "%s: its record %s is no JSON object", set->path, LF__META_KEY);
    }
    int64_t format = json_integer_value(json_object_get(root, "format"));
    int64_t ids = json_integer_value(json_object_get(root, "tokenizer_ids"));
    const json_t *samples = json_object_get(root, "samples");
    take_text(set->source, sizeof set->source, root, "source");
    take_text(set->tokenizer, sizeof set->tokenizer, root, "tokenizer");
    if (json_is_integer(samples)) set->n_packed = json_integer_value(samples);
    json_decref(root);
    if (format != LF__RECORD_FORMAT)
        return LF_FAIL(LF_ERR_UNSUPPORTED, "%s: records of format %lld, expected %d; hint: a newer loongforge made it", set->path,
                       (long long)format, LF__RECORD_FORMAT);
    if (ids < 0 || ids > (1 << 24))
        return LF_FAIL(LF_ERR_CORRUPT, "%s: its record %s says tokenizer_ids = %lld", set->path, LF__META_KEY, (long long)ids);
    lf__vocabulary_set(&set->vocabulary, (int32_t)ids);
    return LF_OK;
}

/* ---- the index ----------------------------------------------------------------------------------------------------------- */

static int compare_ids(const entry *a, const entry *b)
{
    size_t n = a->id_bytes < b->id_bytes ? a->id_bytes : b->id_bytes;
    int order = memcmp(a->id, b->id, n);
    return order ? order : (int)a->id_bytes - (int)b->id_bytes;
}

static int compare_entries(const void *a, const void *b) { return compare_ids(a, b); }

static lf_status add_entry(lf_dataset *set, const entry *new)
{
    if (set->n == set->room) {
        int64_t room = set->room ? set->room * 2 : 1024;
        entry *grown = lf__realloc(set->entries, (size_t)room, sizeof *grown);
        if (!grown) return LF_FAIL(LF_ERR_NOMEM, "index of %lld samples", (long long)room);
        set->entries = grown;
        set->room = room;
    }
    set->entries[set->n++] = *new;
    return LF_OK;
}

static void merge(entry *to, const entry *from)
{
    if (from->has & HAS_IMAGE) {
        to->image = from->image;
        to->image_bytes = from->image_bytes;
    }
    if (from->has & HAS_TEXT) {
        to->text = from->text;
        to->text_bytes = from->text_bytes;
    }
    to->has |= from->has;
}

static void note_strange(lf_dataset *set, const MDB_val *key)
{
    if (set->n_other++ > 0) return;
    int32_t n = key->mv_size < 64 ? (int32_t)key->mv_size : 64;
    snprintf(set->strange_key, sizeof set->strange_key, "%.*s", n, (const char *)key->mv_data);
}

/* A key `{id}_{modality}`, split at its last '_'. */
static lf_status take_record(lf_dataset *set, const MDB_val *key, const MDB_val *value)
{
    const char *k = key->mv_data;
    size_t split = key->mv_size;
    if (key->mv_size == sizeof LF__META_KEY - 1 && memcmp(k, LF__META_KEY, key->mv_size) == 0) return read_meta(set, value);
    while (split > 0 && k[split - 1] != '_') split--;
    size_t n = key->mv_size - split, id_bytes = split > 0 ? split - 1 : 0;
    bool is_image = n == 5 && memcmp(k + split, "image", 5) == 0, is_text = n == 4 && memcmp(k + split, "text", 4) == 0;
    if (id_bytes == 0 || (!is_image && !is_text) || value->mv_size > UINT32_MAX) {
        note_strange(set, key);
        return LF_OK;
    }
    entry e = {.id = k, .id_bytes = (uint16_t)id_bytes, .has = is_image ? HAS_IMAGE : HAS_TEXT};
    if (is_image) {
        e.image = value->mv_data;
        e.image_bytes = (uint32_t)value->mv_size;
    } else {
        e.text = value->mv_data;
        e.text_bytes = (uint32_t)value->mv_size;
    }
    set->n_bytes += (int64_t)value->mv_size;
    entry *last = set->n ? &set->entries[set->n - 1] : NULL;
    int order = last ? compare_ids(last, &e) : -1;
    if (order == 0) {
        merge(last, &e);
        return LF_OK;
    }
    if (order > 0) set->unsorted = true;
    return add_entry(set, &e);
}

/* Keys sort as text, so records of id "a" may lie on both sides of those of "a_b": bring ids into their own order. */
static void sort_entries(lf_dataset *set)
{
    if (!set->unsorted) return;
    qsort(set->entries, (size_t)set->n, sizeof *set->entries, compare_entries);
    int64_t kept = 0;
    for (int64_t i = 1; i < set->n; i++) {
        if (compare_ids(&set->entries[kept], &set->entries[i]) == 0) merge(&set->entries[kept], &set->entries[i]);
        else set->entries[++kept] = set->entries[i];
    }
    set->n = kept + 1;
}

static lf_status check_count(const lf_dataset *set)
{
    if (set->n == 0 && set->n_other == 0)
        return LF_FAIL(LF_ERR_FORMAT, "%s holds no sample, expected keys {id}_image and {id}_text", set->path);
    if (set->n == 0)
        return LF_FAIL(LF_ERR_FORMAT, "%s holds no sample: keys are such as '%s', expected {id}_image and {id}_text", set->path,
                       set->strange_key);
    if (set->n < set->n_packed)
        return LF_FAIL(LF_ERR_CORRUPT, "%s holds %lld samples, but %lld were packed", set->path, (long long)set->n,
                       (long long)set->n_packed);
    if (set->n_packed >= 0 && set->n > set->n_packed)
        lf__log(LF_LOG_WARN, "%s holds %lld samples, %lld more than were packed", set->path, (long long)set->n,
                (long long)(set->n - set->n_packed));
    if (set->n_other > 0)
        lf__log(LF_LOG_WARN, "%s: %lld records left alone, such as '%s'", set->path, (long long)set->n_other, set->strange_key);
    return LF_OK;
}

static lf_status build_index(lf_dataset *set)
{
    MDB_dbi dbi;
    MDB_cursor *cursor = NULL;
    MDB_val key, value;
    lf_status rc = LF_OK;
    int err = mdb_dbi_open(set->txn, NULL, 0, &dbi);
    if (!err) err = mdb_cursor_open(set->txn, dbi, &cursor);
    while (!err && rc >= 0 && (err = mdb_cursor_get(cursor, &key, &value, MDB_NEXT)) == 0) rc = take_record(set, &key, &value);
    if (cursor) mdb_cursor_close(cursor);
    if (rc < 0) return rc;
    if (err != MDB_NOTFOUND) return lf__lmdb_fail(err, "reading", set->path);
    sort_entries(set);
    return check_count(set);
}

/* ---- public -------------------------------------------------------------------------------------------------------------- */

lf_status lf_dataset_open(lf_dataset **out, const char *path)
{
    LF_CHECK_ARG(out && path, "out or path is NULL");
    *out = NULL;
    lf_status rc = LF_OK;
    lf_dataset *set = lf__alloc(sizeof *set);
    if (!set) return LF_FAIL(LF_ERR_NOMEM, "set %s", path);
    atomic_init(&set->refs, 1);
    set->n_packed = -1;
    lf__vocabulary_set(&set->vocabulary, 0);
    snprintf(set->tokenizer, sizeof set->tokenizer, "bytes");
    set->path = lf__strdup(path);
    if (!set->path) LF_THROW(LF_ERR_NOMEM, "set %s", path);
    LF_TRY(open_map(set));
    LF_TRY(build_index(set));
    *out = set;
    set = NULL;
out:
    lf_dataset_close(set);
    return rc;
}

lf_dataset *lf__dataset_ref(lf_dataset *set)
{
    atomic_fetch_add(&set->refs, 1);
    return set;
}

void lf_dataset_close(lf_dataset *set)
{
    if (!set || atomic_fetch_sub(&set->refs, 1) != 1) return;
    if (set->txn) mdb_txn_abort(set->txn);
    if (set->env) mdb_env_close(set->env);
    lf__free(set->entries);
    lf__free(set->path);
    lf__free(set);
}

const lf__vocabulary *lf__dataset_vocabulary(const lf_dataset *set) { return &set->vocabulary; }

lf_status lf_dataset_get_info(const lf_dataset *set, lf_dataset_info *info)
{
    LF_CHECK_ARG(set && info, "set or info is NULL");
    LF_CHECK_ARG(info->size == sizeof *info, "lf_dataset_info: size is %zu, expected %zu", info->size, sizeof *info);
    const lf__vocabulary *v = &set->vocabulary;
    *info = (lf_dataset_info){.size = sizeof *info,
                              .n_samples = set->n,
                              .n_bytes = set->n_bytes,
                              .vocab_size = v->size,
                              .pad_id = v->pad,
                              .bos_id = v->bos,
                              .eos_id = v->eos,
                              .image_id = v->image,
                              .human_id = v->human,
                              .gpt_id = v->gpt,
                              .n_other = set->n_other};
    snprintf(info->source, sizeof info->source, "%s", set->source);
    snprintf(info->tokenizer, sizeof info->tokenizer, "%s", set->tokenizer);
    return LF_OK;
}

lf_status lf_dataset_get(const lf_dataset *set, int64_t i, lf_sample *sample)
{
    LF_CHECK_ARG(set && sample, "set or sample is NULL");
    LF_CHECK_ARG(sample->size == sizeof *sample, "lf_sample: size is %zu, expected %zu", sample->size, sizeof *sample);
    LF_CHECK_ARG(i >= 0 && i < set->n, "sample %lld, expected 0 to %lld", (long long)i, (long long)set->n - 1);
    const entry *e = &set->entries[i];
    *sample = (lf_sample){.size = sizeof *sample, .id = e->id, .id_bytes = e->id_bytes};
    if (e->has & HAS_IMAGE) {
        sample->image = e->image;
        sample->image_bytes = e->image_bytes;
    }
    if (e->has & HAS_TEXT) {
        sample->text = e->text;
        sample->text_bytes = e->text_bytes;
    }
    return LF_OK;
}

lf_status lf_dataset_verify(const lf_dataset *set, int64_t i, int64_t max_pixels)
{
    lf_sample sample = {.size = sizeof sample};
    lf__tokens tokens = {0};
    int32_t id[1];
    uint8_t trained[1], rgb[8 * 8 * 3];
    tokens.id = id;
    tokens.trained = trained;
    tokens.room = 1;
    lf_status rc = lf_dataset_get(set, i, &sample);
    if (rc < 0) return rc;
    rc = lf__record_tokens(sample.text, (size_t)sample.text_bytes, &set->vocabulary, &tokens);
    if (rc == LF_OK && sample.image) rc = lf_decode_image(sample.image, (size_t)sample.image_bytes, 8, max_pixels, rgb);
    return rc < 0 ? lf__fail_prefix(rc, "%.*s", (int)sample.id_bytes, sample.id) : LF_OK;
}
