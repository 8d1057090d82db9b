/* SPDX-License-Identifier: Apache-2.0 */
/* What every table can do through its own operations. */
#include <stdio.h>
#include <string.h>

#include "io.h"

enum { PATH_MOST = 4096 };

lf_status lf__io_join(char *path, size_t size, const char *dir, const char *name)
{
    int n = snprintf(path, size, "%s/%s", dir, name);
    LF_CHECK_ARG(n >= 0 && (size_t)n < size, "path %s/%s is longer than %zu bytes", dir, name, size - 1);
    return LF_OK;
}

lf_status lf__io_dir_of(char *dir, size_t size, const char *path)
{
    const char *slash = strrchr(path, '/');
    size_t n = slash ? (slash == path ? 1 : (size_t)(slash - path)) : 1;
    LF_CHECK_ARG(n < size, "path %s is longer than %zu bytes", path, size - 1);
    memcpy(dir, slash ? path : ".", n);
    dir[n] = 0;
    return LF_OK;
}

lf_status lf__io_make_dirs(lf__io *io, const char *path)
{
    char part[PATH_MOST];
    size_t n = strlen(path);
    LF_CHECK_ARG(n < sizeof part, "path %s is too long", path);
    for (size_t i = 1; i <= n; i++) {
        if (path[i] != '/' && path[i] != 0) continue;
        memcpy(part, path, i);
        part[i] = 0;
        bool there;
        lf_status rc = io->ops->exists(io, part, &there);
        if (rc == LF_OK && !there) rc = io->ops->make_dir(io, part);
        if (rc < 0 && rc != LF_ERR_EXISTS) return rc;
    }
    return LF_OK;
}

/* Names are collected before anything is removed: removing while listing may skip entries. */
typedef struct names {
    lf__buf text; /* names, each with its 0 */
} names;

static lf_status keep_name(void *user, const char *name) { return lf__buf_add(&((names *)user)->text, name, strlen(name) + 1); }

static lf_status remove_tree(lf__io *io, const char *path, int32_t depth)
{
    lf_status rc = io->ops->remove(io, path);
    if (rc == LF_OK || rc == LF_ERR_NOTFOUND) return LF_OK;
    if (depth == 0) return rc;
    names all = {.text.max = 64 << 20};
    rc = io->ops->list(io, path, keep_name, &all);
    for (size_t at = 0; rc >= 0 && at < all.text.used; at += strlen(all.text.data + at) + 1) {
        char child[PATH_MOST];
        rc = lf__io_join(child, sizeof child, path, all.text.data + at);
        if (rc >= 0) rc = remove_tree(io, child, depth - 1);
    }
    lf__buf_free(&all.text);
    return rc < 0 ? rc : io->ops->remove(io, path);
}

lf_status lf__io_remove_tree(lf__io *io, const char *path) { return remove_tree(io, path, 8); }

lf_status lf__io_read_all(lf__io *io, const char *path, size_t max, char **data, size_t *bytes)
{
    lf_status rc = LF_OK;
    lf__file *file = NULL;
    char *text = NULL;
    int64_t size;
    *data = NULL;
    LF_TRY(io->ops->open(io, path, LF_IO_READ, &file));
    LF_TRY(io->ops->size(file, &size));
    if (size < 0 || (uint64_t)size > max)
        LF_THROW(LF_ERR_FORMAT, "%s has %lld bytes, expected at most %zu", path, (long long)size, max);
    text = lf__alloc((size_t)size + 1);
    if (!text) LF_THROW(LF_ERR_NOMEM, "reading %s (%lld bytes)", path, (long long)size);
    LF_TRY(io->ops->read(file, 0, text, (size_t)size, bytes));
    *data = text;
    text = NULL;
out:
    lf__free(text);
    io->ops->close(file);
    return rc;
}

lf_status lf__io_replace(lf__io *io, const char *path, const void *data, size_t bytes)
{
    lf_status rc = LF_OK;
    lf__file *file = NULL;
    char temp[PATH_MOST], dir[PATH_MOST];
    int n = snprintf(temp, sizeof temp, "%s.tmp", path);
    LF_CHECK_ARG(n > 0 && (size_t)n < sizeof temp, "path %s is too long", path);
    LF_TRY(lf__io_dir_of(dir, sizeof dir, path));
    LF_TRY(io->ops->open(io, temp, LF_IO_WRITE | LF_IO_TRUNCATE, &file));
    LF_TRY(io->ops->write(file, 0, data, bytes));
    LF_TRY(io->ops->sync(file));
    rc = io->ops->close(file);
    file = NULL;
    if (rc < 0) goto out;
    LF_TRY(io->ops->rename(io, temp, path));
    LF_TRY(io->ops->sync_dir(io, dir));
out:
    if (file) {
        io->ops->close(file);
        lf__fault first = {0};
        lf__fault_keep(&first, rc);
        io->ops->remove(io, temp);
        rc = lf__fault_raise(&first);
    }
    return rc;
}
