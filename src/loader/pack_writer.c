/* SPDX-License-Identifier: Apache-2.0 */
/* The writer: a set is built in a folder beside its target, made durable and then renamed, so that a target is either whole or
 * as it was. Writes go through write(), never through a writable map: a full disk is an error code, not a bus error. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "io/io.h"
#include "pack_int.h"

/* ---- the target --------------------------------------------------------------------------------------------------------------- */

/* Only what packing itself makes is ever replaced or removed. */
static lf_status check_is_set_file(void *user, const char *name)
{
    if (strcmp(name, "data.mdb") == 0 || strcmp(name, "lock.mdb") == 0) return LF_OK;
    return LF_FAIL(LF_ERR_EXISTS, "%s holds '%s', so it is no set made by pack; hint: choose another path, or remove it yourself",
                   (const char *)user, name);
}

/* *exists; an error when something else than a set is there. */
static lf_status look_at(char *path, bool *exists)
{
    lf__io *io = lf__io_posix();
    struct stat st;
    *exists = lstat(path, &st) == 0;
    if (!*exists) return LF_OK;
    if (!S_ISDIR(st.st_mode)) return LF_FAIL(LF_ERR_EXISTS, "%s is no folder; hint: choose another path", path);
    return io->ops->list(io, path, check_is_set_file, path);
}

static lf_status prepare_target(lf__pack_writer *w)
{
    lf__io *io = lf__io_posix();
    bool stale = false;
    lf_status rc = io->ops->exists(io, w->path, &w->replaces);
    if (rc < 0) return rc;
    if (w->replaces && !w->overwrite)
        return LF_FAIL(LF_ERR_EXISTS, "%s exists already; hint: --overwrite replaces a set, or choose another path", w->path);
    rc = look_at(w->path, &w->replaces);
    if (rc == LF_OK) rc = look_at(w->temp, &stale);
    if (rc == LF_OK && stale) {
        lf__log(LF_LOG_INFO, "removing %s, left by a pack that was stopped", w->temp);
        rc = lf__io_remove_tree(io, w->temp);
    }
    if (rc == LF_OK) rc = lf__io_make_dirs(io, w->temp);
    w->made_temp = rc == LF_OK;
    return rc;
}

/* ---- records -------------------------------------------------------------------------------------------------------------------- */

enum { FIRST_MAP = 16 << 20, MAP_STEP = 1 << 16 }; /* a step is a whole number of pages everywhere */

/* LMDB says EIO when a write stops short, as it does on a full disk: look whether it is full. */
static lf_status fail(lf__pack_writer *w, int err)
{
    struct statvfs disk;
    if (err == EIO && statvfs(w->temp, &disk) == 0) {
        int64_t left = (int64_t)disk.f_bavail * (int64_t)disk.f_frsize;
        if (left < w->chunk_bytes)
            return LF_FAIL(LF_ERR_NOSPACE, "writing %s: no space left: %lld bytes are free, the next records need up to %lld",
                           w->path, (long long)left, (long long)w->chunk_bytes);
    }
    return lf__lmdb_fail(err, "writing", w->path);
}

lf_status lf__pack_open(lf__pack_writer *w, const char *path, const lf_pack_options *opts)
{
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/') n--;
    LF_CHECK_ARG(n > 0 && n < sizeof w->path, "the set's path has %zu bytes, expected 1 to %zu", n, sizeof w->path - 1);
    memcpy(w->path, path, n);
    snprintf(w->temp, sizeof w->temp, "%s.tmp", w->path);
    w->overwrite = opts->overwrite;
    w->most = opts->map_bytes / MAP_STEP * MAP_STEP;
    w->mapped = w->most < FIRST_MAP ? w->most : FIRST_MAP;
    lf_status rc = prepare_target(w);
    if (rc < 0) return rc;
    int err = mdb_env_create(&w->env);
    if (!err) err = mdb_env_set_mapsize(w->env, (size_t)w->mapped);
    if (!err) err = mdb_env_open(w->env, w->temp, MDB_NOLOCK | MDB_NOSYNC | MDB_NOTLS, 0666);
    MDB_stat stat_;
    if (!err) err = mdb_env_stat(w->env, &stat_);
    if (err) return fail(w, err);
    w->page = stat_.ms_psize;
    return LF_OK;
}

/* The map grows with the set: readers reserve as many addresses as the writer did. */
static lf_status make_room(lf__pack_writer *w, int64_t bytes)
{
    MDB_envinfo info;
    int err = mdb_env_info(w->env, &info);
    if (err) return fail(w, err);
    int64_t need = ((int64_t)info.me_last_pgno + 1) * w->page + bytes;
    if (need <= w->mapped) return LF_OK;
    int64_t size = w->mapped * 2 > need ? w->mapped * 2 : lf__round_up(need, MAP_STEP);
    if (size > w->most) size = w->most; /* LMDB then says that the map is full */
    if (size == w->mapped) return LF_OK;
    err = mdb_env_set_mapsize(w->env, (size_t)size);
    if (err) return fail(w, err);
    w->mapped = size;
    return LF_OK;
}

lf_status lf__pack_begin(lf__pack_writer *w, int64_t bytes, int64_t n_records)
{
    /* A large value takes whole pages, a record may split a page, and each page written to is copied first. */
    w->chunk_bytes = bytes + bytes / 4 + n_records * 4 * w->page + (1 << 20);
    lf_status rc = make_room(w, w->chunk_bytes);
    if (rc < 0) return rc;
    int err = mdb_txn_begin(w->env, NULL, 0, &w->txn);
    if (!err) err = mdb_dbi_open(w->txn, NULL, 0, &w->dbi);
    return err ? fail(w, err) : LF_OK;
}

static lf_status put_key(lf__pack_writer *w, const char *key, const void *value, size_t bytes, bool *taken)
{
    MDB_val k = {strlen(key), (void *)(uintptr_t)key}, v = {bytes, (void *)(uintptr_t)value};
    int err = mdb_put(w->txn, w->dbi, &k, &v, MDB_NOOVERWRITE);
    *taken = err == MDB_KEYEXIST;
    if (err && !*taken) return fail(w, err);
    if (!*taken) w->sum.bytes += (int64_t)bytes;
    return LF_OK;
}

lf_status lf__pack_put(lf__pack_writer *w, const char *id, const char *modality, const void *value, size_t bytes, bool *taken)
{
    char key[512];
    int n = snprintf(key, sizeof key, "%s_%s", id, modality);
    LF_CHECK_ARG(*id && n > 0 && (size_t)n < sizeof key, "id '%.40s' has %zu bytes, expected 1 to %zu", id, strlen(id),
                 sizeof key - 2 - strlen(modality));
    return put_key(w, key, value, bytes, taken);
}

lf_status lf__pack_commit(lf__pack_writer *w)
{
    MDB_txn *txn = w->txn;
    w->txn = NULL;
    int err = mdb_txn_commit(txn);
    return err ? fail(w, err) : LF_OK;
}

/* ---- the end -------------------------------------------------------------------------------------------------------------------- */

lf_status lf__pack_put_json_text(lf__buf *buf, const char *text)
{
    lf_status rc = lf__buf_add(buf, "\"", 1);
    for (const char *p = text; *p && rc == LF_OK; p++) {
        if (*p == '"' || *p == '\\') rc = lf__buf_printf(buf, "\\%c", *p);
        else if ((unsigned char)*p < 0x20) rc = lf__buf_printf(buf, "\\u%04x", (unsigned)(unsigned char)*p);
        else rc = lf__buf_add(buf, p, 1);
    }
    return rc == LF_OK ? lf__buf_add(buf, "\"", 1) : rc;
}

static lf_status put_meta(lf__pack_writer *w, const char *source, const char *tokenizer, int32_t tokenizer_ids)
{
    lf__vocabulary v;
    lf__vocabulary_set(&v, tokenizer_ids);
    lf__buf json = {.max = 1 << 16};
    bool taken = false;
    lf_status rc = LF_OK;
    LF_TRY(lf__buf_printf(&json, "{\"format\":%d,\"source\":", LF__RECORD_FORMAT));
    LF_TRY(lf__pack_put_json_text(&json, source));
    LF_TRY(lf__buf_printf(&json, ",\"tokenizer\":"));
    LF_TRY(lf__pack_put_json_text(&json, tokenizer));
    LF_TRY(lf__buf_printf(&json,
                          ",\"tokenizer_ids\":%d,\"vocab_size\":%d,\"ids\":{\"pad\":%d,\"bos\":%d,\"eos\":%d,\"image\":%d,"
                          "\"human\":%d,\"gpt\":%d},\"samples\":%lld}",
                          tokenizer_ids, v.size, v.pad, v.bos, v.eos, v.image, v.human, v.gpt, (long long)w->sum.samples));
    LF_TRY(lf__pack_begin(w, (int64_t)json.used, 1));
    LF_TRY(put_key(w, LF__META_KEY, json.data, json.used, &taken));
    w->sum.bytes -= (int64_t)json.used; /* the summary counts samples */
    LF_TRY(lf__pack_commit(w));
out:
    lf__buf_free(&json);
    return rc;
}

/* Pages at the end that were taken and given back before they were written leave the file shorter than its header says, which
 * readers refuse. */
static lf_status fill_length(lf__pack_writer *w)
{
    MDB_envinfo info;
    mdb_filehandle_t fd;
    struct stat st;
    int err = mdb_env_info(w->env, &info);
    if (!err) err = mdb_env_get_fd(w->env, &fd);
    if (err) return fail(w, err);
    off_t need = ((off_t)info.me_last_pgno + 1) * w->page;
    if (fstat(fd, &st) != 0 || (st.st_size < need && ftruncate(fd, need) != 0))
        return lf__fail_errno(errno, "writing %s", w->path);
    return LF_OK;
}

/* With a set in the way: both change names at once, then the old one is removed. A file system that cannot do that moves the
 * old one aside first. */
static lf_status swap_in(lf__pack_writer *w)
{
    lf__io *io = lf__io_posix();
    char old[LF__PACK_PATH_BYTES];
    bool exists = false;
    if (!w->replaces) return io->ops->rename(io, w->temp, w->path);
    if (renameat2(AT_FDCWD, w->temp, AT_FDCWD, w->path, RENAME_EXCHANGE) == 0) return lf__io_remove_tree(io, w->temp);
    if (errno != EINVAL && errno != ENOSYS) return lf__fail_errno(errno, "renaming %s to %s", w->temp, w->path);
    snprintf(old, sizeof old, "%s.old", w->path);
    lf_status rc = look_at(old, &exists);
    if (rc == LF_OK && exists) rc = lf__io_remove_tree(io, old);
    if (rc == LF_OK) rc = io->ops->rename(io, w->path, old);
    if (rc < 0) return rc;
    rc = io->ops->rename(io, w->temp, w->path);
    if (rc < 0) {
        lf__fault first = {0};
        lf__fault_keep(&first, rc);
        io->ops->rename(io, old, w->path);
        return lf__fault_raise(&first);
    }
    return lf__io_remove_tree(io, old);
}

lf_status lf__pack_finish(lf__pack_writer *w, const char *source, const char *tokenizer, int32_t tokenizer_ids)
{
    lf__io *io = lf__io_posix();
    char dir[LF__PACK_PATH_BYTES];
    lf_status rc = put_meta(w, source, tokenizer, tokenizer_ids);
    if (rc == LF_OK) rc = fill_length(w);
    if (rc < 0) return rc;
    int err = mdb_env_sync(w->env, 1);
    if (err) return fail(w, err);
    mdb_env_close(w->env);
    w->env = NULL;
    rc = io->ops->sync_dir(io, w->temp);
    if (rc == LF_OK) rc = swap_in(w);
    if (rc < 0) return rc;
    w->made_temp = false;
    rc = lf__io_dir_of(dir, sizeof dir, w->path);
    return rc == LF_OK ? io->ops->sync_dir(io, dir) : rc;
}

void lf__pack_close(lf__pack_writer *w)
{
    if (w->txn) mdb_txn_abort(w->txn);
    if (w->env) mdb_env_close(w->env);
    if (w->made_temp) {
        lf__fault first = {.status = LF_ERR_IO}; /* keep the error that led here */
        snprintf(first.text, sizeof first.text, "%.511s", lf_error_text());
        lf__io_remove_tree(lf__io_posix(), w->temp);
        lf__fault_raise(&first);
    }
    *w = (lf__pack_writer){0};
}

lf_status lf__pack_progress(lf_progress_fn progress, void *user, int64_t done, int64_t total)
{
    if (!progress || progress(user, done, total) == 0) return LF_OK;
    return LF_FAIL(LF_ERR_STATE, "cancelled after %lld of %lld samples", (long long)done, (long long)total);
}
