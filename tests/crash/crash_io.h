/* SPDX-License-Identifier: Apache-2.0 */
/* A file system in memory that remembers every operation, so that a test can ask: what may be on disk if the power goes now?
 *
 * Promised are only the rules of io.h: content is durable after a sync of its file, a name after a sync_dir of its folder, a
 * rename happens whole or not at all. Whatever is not yet promised may be there, missing, or for content torn or zeros, in any
 * combination. crash_states() walks through such states; each is a fresh table on which a program can be run.
 *
 * crash_fail() makes an operation fail instead: with an I/O error, a full disk, or half of a write. A sync that fails loses
 * what was not yet durable, and a later sync of the same file does not bring it back: as Linux does. */
#ifndef LF_CRASH_IO_H
#define LF_CRASH_IO_H

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "io/io.h"

enum { OP_CREATE, OP_WRITE, OP_TRUNCATE, OP_SYNC, OP_SYNC_FAILED, OP_RENAME, OP_REMOVE, OP_SYNC_DIR, OP_ACK };
enum { CRASH_EIO = 1, CRASH_NOSPACE, CRASH_SHORT };
enum { FATE_DROP, FATE_KEEP, FATE_TORN, FATE_ZERO };

typedef struct crash_op {
    int kind, dir, node; /* node: the file or folder; dir: the folder whose names change */
    bool folder;
    char name[64], to[64];
    int to_dir;
    int64_t offset, value;
    uint8_t *data;
    size_t bytes;
} crash_op;

typedef struct crash_node {
    bool folder;
    uint8_t *data;
    size_t bytes, room;
    struct crash_name {
        char name[64];
        int node;
    } * names;
    int n_names;
} crash_node;

typedef struct crash_io {
    lf__io io; /* first */
    pthread_mutex_t lock;
    crash_node *nodes;
    int n_nodes;
    crash_op *ops;
    int n_ops;
    int n_open;                /* files not closed */
    int64_t calls;             /* operations that can fail, since crash_fail */
    int64_t fail_at;           /* 0: none */
    int fail_kind, fail_count; /* how many fail from there on */
} crash_io;

struct lf__file {
    crash_io *c;
    int node;
    char path[256];
};

/* ---- nodes ----------------------------------------------------------------------------------------------------------- */

static inline int crash_new_node(crash_io *c, bool folder)
{
    c->nodes = realloc(c->nodes, (size_t)(c->n_nodes + 1) * sizeof *c->nodes);
    c->nodes[c->n_nodes] = (crash_node){.folder = folder};
    return c->n_nodes++;
}

static inline int crash_lookup(const crash_io *c, int dir, const char *name)
{
    for (int i = 0; i < c->nodes[dir].n_names; i++)
        if (strcmp(c->nodes[dir].names[i].name, name) == 0) return c->nodes[dir].names[i].node;
    return -1;
}

static inline void crash_unlink(crash_io *c, int dir, const char *name)
{
    crash_node *d = &c->nodes[dir];
    for (int i = 0; i < d->n_names; i++)
        if (strcmp(d->names[i].name, name) == 0) {
            d->names[i] = d->names[--d->n_names];
            return;
        }
}

static inline void crash_link(crash_io *c, int dir, const char *name, int node)
{
    crash_unlink(c, dir, name);
    crash_node *d = &c->nodes[dir];
    d->names = realloc(d->names, (size_t)(d->n_names + 1) * sizeof *d->names);
    snprintf(d->names[d->n_names].name, sizeof d->names[0].name, "%s", name);
    d->names[d->n_names++].node = node;
}

static inline void crash_resize(crash_node *n, size_t bytes)
{
    if (bytes > n->room) {
        n->room = bytes * 2;
        n->data = realloc(n->data, n->room);
    }
    if (bytes > n->bytes) memset(n->data + n->bytes, 0, bytes - n->bytes);
    n->bytes = bytes;
}

/* Let an operation happen, wholly or as its fate says. */
static inline void crash_apply(crash_io *c, const crash_op *op, int fate)
{
    if (fate == FATE_DROP) return;
    while (op->node >= c->n_nodes) crash_new_node(c, false);
    if (op->kind == OP_CREATE) {
        c->nodes[op->node].folder = op->folder;
        crash_link(c, op->dir, op->name, op->node);
    } else if (op->kind == OP_WRITE) {
        crash_node *n = &c->nodes[op->node];
        size_t bytes = fate == FATE_TORN ? op->bytes / 2 : op->bytes;
        if ((size_t)op->offset + bytes > n->bytes) crash_resize(n, (size_t)op->offset + bytes);
        if (fate != FATE_ZERO && bytes) memcpy(n->data + op->offset, op->data, bytes);
    } else if (op->kind == OP_TRUNCATE) {
        crash_resize(&c->nodes[op->node], 0);
    } else if (op->kind == OP_RENAME) {
        crash_unlink(c, op->dir, op->name);
        crash_link(c, op->to_dir, op->to, op->node);
    } else if (op->kind == OP_REMOVE) {
        crash_unlink(c, op->dir, op->name);
    }
}

/* Remember and do. */
static inline crash_op *crash_do(crash_io *c, crash_op op)
{
    c->ops = realloc(c->ops, (size_t)(c->n_ops + 1) * sizeof *c->ops);
    c->ops[c->n_ops] = op;
    crash_apply(c, &op, FATE_KEEP);
    return &c->ops[c->n_ops++];
}

/* Folder and last part of a path; false when a folder on the way is missing. */
static inline bool crash_walk(const crash_io *c, const char *path, int *dir, char name[64])
{
    *dir = 0;
    while (*path == '/') path++;
    for (;;) {
        size_t n = strcspn(path, "/");
        if (n >= 64) return false;
        memcpy(name, path, n);
        name[n] = 0;
        path += n;
        while (*path == '/') path++;
        if (!*path) return true;
        *dir = crash_lookup(c, *dir, name);
        if (*dir < 0 || !c->nodes[*dir].folder) return false;
    }
}

static inline int crash_find(const crash_io *c, const char *path)
{
    int dir;
    char name[64];
    if (!crash_walk(c, path, &dir, name)) return -1;
    return *name ? crash_lookup(c, dir, name) : 0;
}

/* ---- the table --------------------------------------------------------------------------------------------------------- */

static inline lf_status crash_missing(const char *path) { return LF_FAIL(LF_ERR_NOTFOUND, "%s: no such file", path); }

/* Called with the lock held at the start of everything that can fail. */
static inline lf_status crash_fault(crash_io *c, const char *what, const char *path)
{
    c->calls++;
    if (c->fail_at == 0 || c->calls < c->fail_at || c->calls >= c->fail_at + c->fail_count) return LF_OK;
    return LF_FAIL(c->fail_kind == CRASH_NOSPACE ? LF_ERR_NOSPACE : LF_ERR_IO, "%s %s: planted fault", what, path);
}

#define CRASH_BEGIN(io_, what, path)           \
    crash_io *c = (crash_io *)(io_);           \
    pthread_mutex_lock(&c->lock);              \
    lf_status rc = crash_fault(c, what, path); \
    if (rc < 0) {                              \
        pthread_mutex_unlock(&c->lock);        \
        return rc;                             \
    }
#define CRASH_END                   \
    pthread_mutex_unlock(&c->lock); \
    return rc;

static inline lf_status crash_open(lf__io *io, const char *path, int32_t flags, lf__file **out)
{
    *out = NULL;
    CRASH_BEGIN(io, "open", path)
    int dir = 0, node = -1;
    char name[64];
    if (!crash_walk(c, path, &dir, name)) rc = crash_missing(path);
    else node = crash_lookup(c, dir, name);
    if (rc == LF_OK && node >= 0 && (flags & LF_IO_CREATE)) rc = LF_FAIL(LF_ERR_EXISTS, "%s exists", path);
    if (rc == LF_OK && node < 0 && !(flags & (LF_IO_CREATE | LF_IO_TRUNCATE))) rc = crash_missing(path);
    if (rc == LF_OK && node < 0) {
        node = crash_new_node(c, false);
        crash_op op = {.kind = OP_CREATE, .dir = dir, .node = node};
        snprintf(op.name, sizeof op.name, "%s", name);
        crash_do(c, op);
    } else if (rc == LF_OK && (flags & LF_IO_TRUNCATE)) {
        crash_do(c, (crash_op){.kind = OP_TRUNCATE, .node = node});
    }
    lf__file *file = rc == LF_OK ? lf__alloc(sizeof *file) : NULL;
    if (file) {
        *file = (lf__file){.c = c, .node = node};
        snprintf(file->path, sizeof file->path, "%s", path);
        *out = file;
        c->n_open++;
    } else if (rc == LF_OK) {
        rc = LF_FAIL(LF_ERR_NOMEM, "opening %s", path);
    }
    CRASH_END
}

static inline lf_status crash_close(lf__file *file)
{
    if (!file) return LF_OK;
    crash_io *c = file->c;
    pthread_mutex_lock(&c->lock);
    lf_status rc = crash_fault(c, "close", file->path);
    c->n_open--;
    lf__free(file);
    CRASH_END
}

static inline lf_status crash_read(lf__file *file, int64_t offset, void *data, size_t bytes, size_t *got)
{
    *got = 0;
    CRASH_BEGIN(file->c, "read", file->path)
    const crash_node *n = &c->nodes[file->node];
    if (offset < (int64_t)n->bytes) {
        size_t left = n->bytes - (size_t)offset;
        *got = left < bytes ? left : bytes;
        if (*got) memcpy(data, n->data + offset, *got);
    }
    CRASH_END
}

static inline lf_status crash_write(lf__file *file, int64_t offset, const void *data, size_t bytes)
{
    crash_io *c = file->c;
    pthread_mutex_lock(&c->lock);
    lf_status rc = crash_fault(c, "write", file->path);
    size_t n = rc == LF_OK ? bytes : c->fail_kind == CRASH_SHORT ? bytes / 2 : 0;
    if (n > 0) {
        crash_op op = {.kind = OP_WRITE, .node = file->node, .offset = offset, .bytes = n, .data = malloc(n)};
        memcpy(op.data, data, n);
        crash_do(c, op);
    }
    CRASH_END
}

static inline lf_status crash_sync(lf__file *file)
{
    crash_io *c = file->c;
    pthread_mutex_lock(&c->lock);
    lf_status rc = crash_fault(c, "fsync", file->path);
    crash_do(c, (crash_op){.kind = rc == LF_OK ? OP_SYNC : OP_SYNC_FAILED, .node = file->node});
    CRASH_END
}

static inline lf_status crash_size(lf__file *file, int64_t *bytes)
{
    CRASH_BEGIN(file->c, "size", file->path)
    *bytes = (int64_t)c->nodes[file->node].bytes;
    CRASH_END
}

static inline lf_status crash_reserve(lf__file *file, int64_t bytes)
{
    (void)file, (void)bytes;
    return LF_OK;
}

static inline lf_status crash_rename(lf__io *io, const char *from, const char *to)
{
    CRASH_BEGIN(io, "rename", from)
    crash_op op = {.kind = OP_RENAME};
    if (!crash_walk(c, from, &op.dir, op.name) || !crash_walk(c, to, &op.to_dir, op.to)) rc = crash_missing(from);
    op.node = rc == LF_OK ? crash_lookup(c, op.dir, op.name) : -1;
    int there = rc == LF_OK ? crash_lookup(c, op.to_dir, op.to) : -1;
    if (rc == LF_OK && op.node < 0) rc = crash_missing(from);
    else if (rc == LF_OK && there >= 0 && c->nodes[there].n_names > 0) rc = LF_FAIL(LF_ERR_IO, "%s is not empty", to);
    else if (rc == LF_OK) crash_do(c, op);
    CRASH_END
}

static inline lf_status crash_remove(lf__io *io, const char *path)
{
    CRASH_BEGIN(io, "remove", path)
    crash_op op = {.kind = OP_REMOVE};
    op.node = crash_walk(c, path, &op.dir, op.name) ? crash_lookup(c, op.dir, op.name) : -1;
    if (op.node < 0) rc = crash_missing(path);
    else if (c->nodes[op.node].n_names > 0) rc = LF_FAIL(LF_ERR_IO, "%s is not empty", path);
    else crash_do(c, op);
    CRASH_END
}

static inline lf_status crash_make_dir(lf__io *io, const char *path)
{
    CRASH_BEGIN(io, "mkdir", path)
    crash_op op = {.kind = OP_CREATE, .folder = true};
    if (!crash_walk(c, path, &op.dir, op.name)) rc = crash_missing(path);
    else if (crash_lookup(c, op.dir, op.name) >= 0) rc = LF_FAIL(LF_ERR_EXISTS, "%s exists", path);
    else {
        op.node = crash_new_node(c, true);
        crash_do(c, op);
    }
    CRASH_END
}

static inline lf_status crash_sync_dir(lf__io *io, const char *path)
{
    CRASH_BEGIN(io, "fsync of folder", path)
    int node = crash_find(c, path);
    if (node < 0) rc = crash_missing(path);
    else crash_do(c, (crash_op){.kind = OP_SYNC_DIR, .dir = node});
    CRASH_END
}

static inline lf_status crash_list(lf__io *io, const char *path, lf_status (*fn)(void *user, const char *name), void *user)
{
    CRASH_BEGIN(io, "list", path)
    int node = crash_find(c, path), n = node < 0 ? 0 : c->nodes[node].n_names;
    struct crash_name *names = NULL;
    if (n > 0) {
        names = malloc((size_t)n * sizeof *names);
        memcpy(names, c->nodes[node].names, (size_t)n * sizeof *names);
    }
    pthread_mutex_unlock(&c->lock); /* fn may come back to us */
    if (node < 0) rc = crash_missing(path);
    else if (!c->nodes[node].folder) rc = LF_FAIL(LF_ERR_IO, "%s is no folder", path);
    for (int i = 0; i < n && rc >= 0; i++) rc = fn(user, names[i].name);
    free(names);
    return rc < 0 ? rc : LF_OK;
}

static inline lf_status crash_exists(lf__io *io, const char *path, bool *yes)
{
    CRASH_BEGIN(io, "stat", path)
    *yes = crash_find(c, path) >= 0;
    CRASH_END
}

/* One program at a time uses a table: nobody to exclude. */
static inline lf_status crash_lock(lf__io *io, const char *path, lf__file **out)
{
    return crash_open(io, path, LF_IO_WRITE | LF_IO_TRUNCATE, out);
}

static inline crash_io *crash_new(void)
{
    static const lf__io_ops ops = {"crash",        crash_open,     crash_close,   crash_read,   crash_write,
                                   crash_sync,     crash_size,     crash_reserve, crash_rename, crash_remove,
                                   crash_make_dir, crash_sync_dir, crash_list,    crash_exists, crash_lock};
    crash_io *c = calloc(1, sizeof *c);
    c->io.ops = &ops;
    pthread_mutex_init(&c->lock, NULL);
    crash_new_node(c, true);
    return c;
}

static inline void crash_free(crash_io *c)
{
    for (int i = 0; i < c->n_nodes; i++) {
        free(c->nodes[i].data);
        free(c->nodes[i].names);
    }
    for (int i = 0; i < c->n_ops; i++) free(c->ops[i].data);
    free(c->nodes);
    free(c->ops);
    pthread_mutex_destroy(&c->lock);
    free(c);
}

/* The n-th operation from now and `count - 1` after it fail; 0: none. Returns how many there were since the last call. */
static inline int64_t crash_fail(crash_io *c, int64_t n, int kind, int count)
{
    pthread_mutex_lock(&c->lock);
    int64_t calls = c->calls;
    c->calls = 0;
    c->fail_at = n;
    c->fail_kind = kind;
    c->fail_count = count;
    pthread_mutex_unlock(&c->lock);
    return calls;
}

/* The program has just been promised that `value` is safe. */
static inline void crash_ack(crash_io *c, int64_t value)
{
    pthread_mutex_lock(&c->lock);
    crash_do(c, (crash_op){.kind = OP_ACK, .value = value});
    pthread_mutex_unlock(&c->lock);
}

/* Names in a folder that a test does not expect, such as left-over temporary ones. */
static inline int crash_count(const crash_io *c, const char *path, const char *ending)
{
    int node = crash_find(c, path), n = 0;
    for (int i = 0; node >= 0 && i < c->nodes[node].n_names; i++) {
        const char *name = c->nodes[node].names[i].name;
        size_t a = strlen(name), b = strlen(ending);
        n += a >= b && strcmp(name + a - b, ending) == 0;
    }
    return n;
}

/* ---- crash states ------------------------------------------------------------------------------------------------------ */

/* May operation j still be missing when the power goes before operation `at`? */
static inline bool crash_is_open(const crash_io *c, int j, int at)
{
    const crash_op *op = &c->ops[j];
    bool content = op->kind == OP_WRITE || op->kind == OP_TRUNCATE;
    if (!content && op->kind != OP_CREATE && op->kind != OP_RENAME && op->kind != OP_REMOVE) return false;
    bool one = false, other = content || op->kind != OP_RENAME || op->to_dir == op->dir;
    for (int k = j + 1; k < at && !(one && other); k++) {
        const crash_op *s = &c->ops[k];
        if (content && s->kind == OP_SYNC_FAILED && s->node == op->node) return true; /* lost for good */
        if (content) one |= s->kind == OP_SYNC && s->node == op->node;
        else if (s->kind == OP_SYNC_DIR) {
            one |= s->dir == op->dir;
            other |= op->kind == OP_RENAME && s->dir == op->to_dir;
        }
    }
    return !(one && other);
}

static inline crash_io *crash_build(const crash_io *c, int at, const int *open, int n_open, const int *fates)
{
    crash_io *state = crash_new();
    for (int j = 0, u = 0; j < at; j++) {
        int fate = FATE_KEEP;
        if (u < n_open && open[u] == j) fate = fates[u++];
        while (c->ops[j].node >= state->n_nodes) crash_new_node(state, false);
        if (c->ops[j].kind == OP_CREATE) state->nodes[c->ops[j].node].folder = c->ops[j].folder; /* reached by a rename too */
        crash_apply(state, &c->ops[j], fate);
    }
    return state;
}

static inline uint32_t crash_random(uint64_t *seed)
{
    *seed = *seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(*seed >> 33);
}

typedef void (*crash_check)(void *user, crash_io *state, int at, int64_t acknowledged, const char *what);

/* Does a crash before operation `at` allow states that a crash a moment later does not? Only a promise takes states away: right
 * before one, everything since the last can still be dropped, which covers every crash in between. */
static inline bool crash_matters(const crash_io *c, int at)
{
    return at == c->n_ops || c->ops[at].kind == OP_SYNC || c->ops[at].kind == OP_SYNC_DIR || c->ops[at].kind == OP_ACK;
}

/* All states when there are few, else: all dropped, all kept, only names, only content; for each operation: it alone dropped,
 * torn, zeroed, it alone kept, everything up to it kept; and `more` random ones. */
static inline int64_t crash_states(const crash_io *c, int at, int more, crash_check check, void *user)
{
    enum { MOST = 512, ALL = 256 };
    int open[MOST], fates[MOST], n = 0, choices[MOST];
    int64_t acknowledged = -1, count = 0, product = 1;
    uint64_t seed = (uint64_t)at * 7919 + 1;
    char what[96];
    for (int j = 0; j < at; j++) {
        if (c->ops[j].kind == OP_ACK) acknowledged = c->ops[j].value;
        if (n < MOST && crash_is_open(c, j, at)) open[n++] = j;
    }
    for (int u = 0; u < n; u++) {
        choices[u] = c->ops[open[u]].kind == OP_WRITE ? 4 : 2;
        if (product <= ALL) product *= choices[u];
    }
    int64_t patterns = product <= ALL ? product : 4 + (int64_t)n * 5 + more;
    for (int64_t p = 0; p < patterns; p++) {
        int64_t code = p, one = (p - 4) / 5;
        for (int u = 0; u < n; u++) {
            bool content = choices[u] == 4;
            if (product <= ALL) {
                fates[u] = (int)(code % choices[u]);
                code /= choices[u];
            } else if (p < 4) {
                fates[u] = p == 1 || (p == 2 && !content) || (p == 3 && content) ? FATE_KEEP : FATE_DROP;
            } else if (one < n) {
                static const int alone[] = {FATE_DROP, FATE_TORN, FATE_ZERO};
                int kind = (int)((p - 4) % 5);
                if (kind == 3) fates[u] = u == one ? FATE_KEEP : FATE_DROP;
                else if (kind == 4) fates[u] = u <= one ? FATE_KEEP : FATE_DROP;
                else fates[u] = u != one ? FATE_KEEP : content ? alone[kind] : FATE_DROP;
            } else {
                fates[u] = (int)(crash_random(&seed) % (uint32_t)choices[u]);
            }
        }
        snprintf(what, sizeof what, "crash before operation %d, state %lld of %lld", at, (long long)p, (long long)patterns);
        crash_io *state = crash_build(c, at, open, n, fates);
        check(user, state, at, acknowledged, what);
        crash_free(state);
        count++;
    }
    return count;
}

#endif
