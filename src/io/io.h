/* SPDX-License-Identifier: Apache-2.0 */
/** @file io.h  File operations as a table, so that a crash simulator or a failing disk can stand in for the real thing.
 *
 *  What a table promises (and a crash simulator takes away where it is not promised): rename within one file system is
 *  atomic; data is durable only after sync of its file; a name is durable only after sync_dir of its folder. */
#ifndef LF_IO_H
#define LF_IO_H

#include "base/base.h"

typedef struct lf__io lf__io;
typedef struct lf__file lf__file; /* each table's own */

enum {
    LF_IO_READ = 1,
    LF_IO_WRITE = 2,
    LF_IO_CREATE = 4, /* must not exist yet */
    LF_IO_TRUNCATE = 8,
};

/** Errors are LF_ERR_IO, LF_ERR_NOSPACE, LF_ERR_NOTFOUND, LF_ERR_EXISTS with path and errno in the text. */
typedef struct lf__io_ops {
    const char *name;
    lf_status (*open)(lf__io *io, const char *path, int32_t flags, lf__file **out);
    lf_status (*close)(lf__file *file); /* frees it also on error */
    /** Reads until `bytes` or the end of file; *got says how many. */
    lf_status (*read)(lf__file *file, int64_t offset, void *data, size_t bytes, size_t *got);
    /** Writes everything or fails. */
    lf_status (*write)(lf__file *file, int64_t offset, const void *data, size_t bytes);
    lf_status (*sync)(lf__file *file); /* data and size durable. A failure is final: the
                                                                                file's contents are unknown, write elsewhere */
    lf_status (*size)(lf__file *file, int64_t *bytes);
    lf_status (*reserve)(lf__file *file, int64_t bytes);               /* space for writing, or LF_ERR_NOSPACE now */
    lf_status (*rename)(lf__io *io, const char *from, const char *to); /* replaces `to` */
    lf_status (*remove)(lf__io *io, const char *path);                 /* a file or an empty folder */
    lf_status (*make_dir)(lf__io *io, const char *path);
    lf_status (*sync_dir)(lf__io *io, const char *path);
    /** Calls fn for each name in a folder but "." and "..", in any order; stops when fn returns an error and returns it. */
    lf_status (*list)(lf__io *io, const char *path, lf_status (*fn)(void *user, const char *name), void *user);
    lf_status (*exists)(lf__io *io, const char *path, bool *yes);
    /** Opens or creates a file, takes it for this handle alone and writes the process's number into it; close lets go, and so
     *  does the end of the process. LF_ERR_STATE when another handle has it: the text says its process. */
    lf_status (*lock)(lf__io *io, const char *path, lf__file **out);
} lf__io_ops;

/** A table with its state; tables that need more put lf__io first in their own struct. */
struct lf__io {
    const lf__io_ops *ops;
};

/** Plain POSIX files. Static, no state. */
lf__io *lf__io_posix(void);

/** Remove a file or a folder and everything in it; a path that does not exist is no error. */
lf_status lf__io_remove_tree(lf__io *io, const char *path);
/** Read a whole file of at most `max` bytes. *data is lf__alloc'ed with a 0 behind the last byte; owned by the caller. */
lf_status lf__io_read_all(lf__io *io, const char *path, size_t max, char **data, size_t *bytes);
/** Replace a small file so that after a crash either the old or the new content is there: temp, sync, rename, sync_dir. */
lf_status lf__io_replace(lf__io *io, const char *path, const void *data, size_t bytes);
/** "dir/name" into path (size bytes); LF_ERR_INVALID when too long. */
lf_status lf__io_join(char *path, size_t size, const char *dir, const char *name);
/** Make a folder and those above it that are missing. */
lf_status lf__io_make_dirs(lf__io *io, const char *path);
/** The folder part of a path, "." when it has none. */
lf_status lf__io_dir_of(char *dir, size_t size, const char *path);

#endif
