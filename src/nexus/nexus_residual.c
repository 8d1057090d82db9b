/* SPDX-License-Identifier: Apache-2.0 */
/* Residuals across handles: to a file and back, into one dense step, and the number of steps that turns go by.
 *
 * A file: head, ranges, their values, and the digest of all of it (docs/internals/nexus_sparse.md). It appears whole or not at all, and
 * is looked through before anything of it is taken. */
#include <stdio.h>
#include <string.h>

#include "io/io.h"
#include "nexus_int.h"

#define MAGIC "LFRESID1"

typedef struct file_head {
    char magic[8];
    uint8_t map[16];
    int32_t rank, world;
    int64_t n_ranges;
} file_head;

typedef struct file_range {
    int64_t klass, offset, count;
} file_range;

_Static_assert(sizeof(file_head) == 40 && sizeof(file_range) == 24, "the file's layout has no gaps");

/* A file being written or read, and the digest of what went through. */
typedef struct stream_file {
    lf__io *io;
    lf__file *file;
    int64_t at;
    lf__hash128 hash;
} stream_file;

static void mix(stream_file *f, const void *data, size_t bytes)
{
    const lf__hash128 parts[2] = {f->hash, lf__hash(data, bytes, 0)};
    f->hash = lf__hash(parts, sizeof parts, 0);
}

static lf_status put(stream_file *f, const void *data, size_t bytes)
{
    lf_status rc = f->io->ops->write(f->file, f->at, data, bytes);
    mix(f, data, bytes);
    f->at += (int64_t)bytes;
    return rc;
}

static lf_status get(stream_file *f, void *data, size_t bytes)
{
    size_t got = 0;
    lf_status rc = f->io->ops->read(f->file, f->at, data, bytes, &got);
    if (rc == LF_OK && got < bytes) rc = LF_FAIL(LF_ERR_CORRUPT, "it ends after %lld bytes", (long long)f->at + (long long)got);
    mix(f, data, got);
    f->at += (int64_t)bytes;
    return rc;
}

/* ---- saving ---------------------------------------------------------------------------------------------------------- */

static lf_status write_chunks(lf_nexus *nexus, stream_file *f, float *values)
{
    lf_status rc = LF_OK;
    for (int32_t pass = 0; pass < 2; pass++)
        for (int32_t i = 0; i < nexus->plan.n_chunks; i++) {
            const nexus_chunk *c = &nexus->plan.chunks[i];
            const file_range range = {c->range.klass, c->range.offset, c->range.count};
            const size_t bytes = (size_t)c->range.count * sizeof *values;
            if (!c->topk.residual) continue;
            if (pass == 0) {
                LF_TRY(put(f, &range, sizeof range));
                continue;
            }
            LF_TRY(lf_copy(nexus->device, values, c->topk.residual, bytes, NULL));
            LF_TRY(put(f, values, bytes));
        }
out:
    return rc;
}

static lf_status write_file(lf_nexus *nexus, const char *path, int64_t n_ranges, float *values, char hash[33])
{
    stream_file f = {.io = lf__io_posix()};
    file_head head = {.magic = MAGIC, .rank = nexus->transport.rank, .world = nexus->transport.world, .n_ranges = n_ranges};
    char dir[4096], temp[4096];
    lf_status rc = LF_OK;
    LF_TRY(lf_map_digest(nexus->map, head.map));
    LF_TRY(lf__io_dir_of(dir, sizeof dir, path));
    LF_TRY(lf__io_make_dirs(f.io, dir));
    if ((size_t)snprintf(temp, sizeof temp, "%s.tmp", path) >= sizeof temp)
        LF_THROW(LF_ERR_INVALID, "%.80s…: too long a path", path);
    LF_TRY(f.io->ops->open(f.io, temp, LF_IO_WRITE | LF_IO_TRUNCATE, &f.file));
    rc = put(&f, &head, sizeof head);
    if (rc == LF_OK) rc = write_chunks(nexus, &f, values);
    const lf__hash128 digest = f.hash;
    if (rc == LF_OK) rc = put(&f, &digest, sizeof digest);
    if (rc == LF_OK) rc = f.io->ops->sync(f.file);
    const lf_status closed = f.io->ops->close(f.file);
    if (rc == LF_OK) rc = closed;
    if (rc == LF_OK) rc = f.io->ops->rename(f.io, temp, path);
    if (rc == LF_OK) rc = f.io->ops->sync_dir(f.io, dir);
    if (rc < 0) return rc;
    lf__hash_hex(digest, hash);
out:
    return rc;
}

/* The largest chunk with a residual, and how many there are. */
static int64_t largest_of(const lf_nexus *nexus, int64_t *n)
{
    int64_t largest = 0;
    *n = 0;
    for (int32_t i = 0; i < nexus->plan.n_chunks; i++) {
        const nexus_chunk *c = &nexus->plan.chunks[i];
        if (!c->topk.residual) continue;
        ++*n;
        if (c->range.count > largest) largest = c->range.count;
    }
    return largest;
}

/* Between steps, and with nothing under way. */
static lf_status rest(lf_nexus *nexus)
{
    lf_status rc = lf__fault_raise(&nexus->fault);
    if (rc < 0) return rc;
    if (!nexus->transport.post) return LF_FAIL(LF_ERR_STATE, "nexus was opened without a transport and only shows the schedule");
    if (nexus->running) return LF_FAIL(LF_ERR_STATE, "a step is running; hint: lf_nexus_finish");
    return lf__chain_drain(nexus);
}

lf_status lf_nexus_residual_save(lf_nexus *nexus, const char *path, char hash[33])
{
    LF_CHECK_ARG(nexus && path && hash, "nexus, path or hash is NULL");
    float *values = NULL;
    int64_t n = 0;
    lf_status rc = LF_OK;
    hash[0] = 0;
    lf__lock(nexus->mutex);
    LF_TRY(rest(nexus));
    const int64_t largest = largest_of(nexus, &n);
    if (n == 0) {
        rc = LF_END;
        goto out;
    }
    values = lf__alloc_array((size_t)largest, sizeof *values);
    if (!values) LF_THROW(LF_ERR_NOMEM, "a residual of %lld values", (long long)largest);
    rc = write_file(nexus, path, n, values, hash);
    if (rc < 0) LF_TRY(lf__fail_prefix(rc, "residual %s", path));
out:
    lf__unlock(nexus->mutex);
    lf__free(values);
    return rc;
}

/* ---- loading --------------------------------------------------------------------------------------------------------- */

/* The part of a saved range that lies in a chunk is added to its residual. */
static lf_status add_part(lf_nexus *nexus, nexus_chunk *c, const file_range *r, const float *saved, float *have, float factor)
{
    const int64_t from = r->offset > c->range.offset ? r->offset : c->range.offset;
    const int64_t end = r->offset + r->count, chunk_end = c->range.offset + c->range.count;
    const int64_t n = (end < chunk_end ? end : chunk_end) - from;
    lf_status rc = LF_OK;
    if (r->klass != c->range.klass || n <= 0) return LF_OK;
    if (!c->topk.residual) { /* dense now: the next step takes it along */
        void *memory = NULL;
        const size_t bytes = (size_t)c->range.count * sizeof(float);
        LF_TRY(lf_device_alloc(nexus->device, bytes, &memory));
        c->topk.residual = memory;
        c->own_residual = true;
        LF_TRY(lf_fill(nexus->device, memory, 0, bytes, NULL));
    }
    float *place = c->topk.residual + (from - c->range.offset);
    saved += from - r->offset;
    LF_TRY(lf_copy(nexus->device, have, place, (size_t)n * sizeof *have, NULL));
    for (int64_t i = 0; i < n; i++) have[i] = have[i] == 0 ? saved[i] * factor : have[i] + saved[i] * factor;
    LF_TRY(lf_copy(nexus->device, place, have, (size_t)n * sizeof *have, NULL));
out:
    return rc;
}

static lf_status check_head(const lf_nexus *nexus, const file_head *head)
{
    uint8_t map[16];
    if (memcmp(head->magic, MAGIC, sizeof head->magic) != 0) return LF_FAIL(LF_ERR_FORMAT, "it is no residual");
    if (head->world < 1 || head->n_ranges < 1 || head->n_ranges > INT32_MAX)
        return LF_FAIL(LF_ERR_CORRUPT, "its head is damaged");
    lf_status rc = lf_map_digest(nexus->map, map);
    if (rc == LF_OK && memcmp(map, head->map, sizeof map) != 0)
        return LF_FAIL(LF_ERR_STATE,
                       "it belongs to another map; hint: the same model, dtypes and [map] options as when it was saved");
    return rc;
}

/* Read everything: to look (apply false), or to take it. */
static lf_status go_through(lf_nexus *nexus, stream_file *f, const char *hash, bool apply)
{
    file_head head;
    file_range *ranges = NULL;
    float *saved = NULL, *have = NULL;
    lf__hash128 digest, said;
    char hex[33];
    int64_t largest = 0, bytes = 0;
    lf_status rc = LF_OK;
    f->at = 0;
    f->hash = (lf__hash128){0};
    LF_TRY(f->io->ops->size(f->file, &bytes));
    LF_TRY(get(f, &head, sizeof head));
    LF_TRY(check_head(nexus, &head));
    const float factor = strcmp(nexus->opts.reduce, "mean") == 0 ? (float)nexus->transport.world / (float)head.world : 1;
    ranges = lf__alloc_array((size_t)head.n_ranges, sizeof *ranges);
    if (!ranges) LF_THROW(LF_ERR_NOMEM, "%lld ranges", (long long)head.n_ranges);
    for (int64_t i = 0; i < head.n_ranges; i++) {
        LF_TRY(get(f, &ranges[i], sizeof *ranges));
        if (ranges[i].count < 1 || ranges[i].count > bytes / 4 || ranges[i].offset < 0)
            LF_THROW(LF_ERR_CORRUPT, "range %lld is damaged", (long long)i);
        if (ranges[i].count > largest) largest = ranges[i].count;
    }
    saved = lf__alloc_array((size_t)largest, sizeof *saved);
    have = lf__alloc_array((size_t)largest, sizeof *have);
    if (!saved || !have) LF_THROW(LF_ERR_NOMEM, "%lld values", (long long)largest);
    for (int64_t i = 0; i < head.n_ranges; i++) {
        LF_TRY(get(f, saved, (size_t)ranges[i].count * sizeof *saved));
        for (int32_t c = 0; apply && c < nexus->plan.n_chunks; c++)
            LF_TRY(add_part(nexus, &nexus->plan.chunks[c], &ranges[i], saved, have, factor));
    }
    digest = f->hash;
    LF_TRY(get(f, &said, sizeof said));
    lf__hash_hex(digest, hex);
    if (said.lo != digest.lo || said.hi != digest.hi) LF_THROW(LF_ERR_CORRUPT, "its digest does not fit its contents");
    if (hash && strcmp(hash, hex) != 0)
        LF_THROW(LF_ERR_CORRUPT, "its digest is %s, expected %s: it belongs to another save", hex, hash);
out:
    lf__free(ranges);
    lf__free(saved);
    lf__free(have);
    return rc;
}

lf_status lf_nexus_residual_load(lf_nexus *nexus, const char *path, const char *hash)
{
    LF_CHECK_ARG(nexus && path, "nexus or path is NULL");
    stream_file f = {.io = lf__io_posix()};
    lf_status rc = LF_OK;
    lf__lock(nexus->mutex);
    LF_TRY(rest(nexus));
    LF_TRY(f.io->ops->open(f.io, path, LF_IO_READ, &f.file));
    rc = go_through(nexus, &f, hash, false);
    if (rc == LF_OK) {
        nexus->sparse.dirty = true;
        nexus->sparse.own = false; /* the last step has taken none of this */
        rc = go_through(nexus, &f, hash, true);
    }
    f.io->ops->close(f.file);
    if (rc < 0) LF_TRY(lf__fail_prefix(rc, "residual %s", path));
out:
    lf__unlock(nexus->mutex);
    return rc;
}

/* ---- steps ------------------------------------------------------------------------------------------------------------ */

int64_t lf_nexus_residual_bytes(const lf_nexus *nexus)
{
    int64_t bytes = 0;
    if (!nexus) return 0;
    lf__lock(nexus->mutex);
    for (int32_t i = 0; i < nexus->plan.n_chunks && nexus->sparse.dirty; i++)
        if (nexus->plan.chunks[i].topk.residual) bytes += nexus->plan.chunks[i].range.count * (int64_t)sizeof(float);
    lf__unlock(nexus->mutex);
    return bytes;
}

lf_status lf_nexus_residual_drop(lf_nexus *nexus)
{
    LF_CHECK_ARG(nexus, "nexus is NULL");
    nexus_sparse *s = &nexus->sparse;
    lf_status rc = LF_OK;
    lf__lock(nexus->mutex);
    LF_TRY(rest(nexus));
    for (int32_t i = 0; i < nexus->plan.n_chunks; i++) lf__sparse_drop_residual(nexus, &nexus->plan.chunks[i]);
    if (s->residuals) LF_TRY(lf_fill(nexus->device, s->residuals, 0, (size_t)s->residual_bytes, NULL));
    s->dirty = s->asked = s->flushing = s->own = false;
out:
    lf__unlock(nexus->mutex);
    return rc;
}

lf_status lf_nexus_residual_flush(lf_nexus *nexus)
{
    LF_CHECK_ARG(nexus, "nexus is NULL");
    lf_status rc = LF_OK;
    lf__lock(nexus->mutex);
    LF_TRY(rest(nexus));
    nexus->sparse.asked = nexus->sparse.n_chunks > 0;
out:
    lf__unlock(nexus->mutex);
    return rc;
}

lf_status lf_nexus_seek(lf_nexus *nexus, int64_t steps)
{
    LF_CHECK_ARG(nexus && steps >= 0, "nexus is NULL, or steps is negative");
    lf_status rc = LF_OK;
    lf__lock(nexus->mutex);
    LF_TRY(rest(nexus));
    nexus->steps_before = steps - nexus->steps;
    rc = lf__nexus_agree(nexus);
    if (rc < 0) lf__fault_keep(&nexus->fault, rc);
out:
    lf__unlock(nexus->mutex);
    return rc;
}
