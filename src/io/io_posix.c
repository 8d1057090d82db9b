/* SPDX-License-Identifier: Apache-2.0 */
/* The table over plain POSIX calls. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "io.h"

struct lf__file {
    int fd;
    char path[]; /* for error texts */
};

static lf_status posix_open(lf__io *io, const char *path, int32_t flags, lf__file **out)
{
    (void)io;
    *out = NULL;
    lf__file *file = lf__alloc(sizeof *file + strlen(path) + 1);
    if (!file) return LF_FAIL(LF_ERR_NOMEM, "opening %s", path);
    memcpy(file->path, path, strlen(path) + 1);
    int how = (flags & LF_IO_WRITE) ? (flags & LF_IO_READ ? O_RDWR : O_WRONLY) : O_RDONLY;
    if (flags & LF_IO_CREATE) how |= O_CREAT | O_EXCL;
    if (flags & LF_IO_TRUNCATE) how |= O_CREAT | O_TRUNC;
    file->fd = open(path, how | O_CLOEXEC, 0666);
    if (file->fd < 0) {
        int err = errno;
        lf__free(file);
        return lf__fail_errno(err, "cannot open %s", path);
    }
    *out = file;
    return LF_OK;
}

static lf_status posix_close(lf__file *file)
{
    if (!file) return LF_OK;
    lf_status rc = LF_OK;
    if (close(file->fd) != 0) rc = lf__fail_errno(errno, "closing %s", file->path);
    lf__free(file);
    return rc;
}

static lf_status posix_read(lf__file *file, int64_t offset, void *data, size_t bytes, size_t *got)
{
    *got = 0;
    while (*got < bytes) {
        ssize_t n = pread(file->fd, (char *)data + *got, bytes - *got, offset + (int64_t)*got);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return lf__fail_errno(errno, "reading %zu bytes at %lld of %s", bytes, (long long)offset, file->path);
        if (n == 0) break;
        *got += (size_t)n;
    }
    return LF_OK;
}

static lf_status posix_write(lf__file *file, int64_t offset, const void *data, size_t bytes)
{
    size_t done = 0;
    while (done < bytes) {
        ssize_t n = pwrite(file->fd, (const char *)data + done, bytes - done, offset + (int64_t)done);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0)
            return lf__fail_errno(n < 0 ? errno : EIO, "writing %zu bytes at %lld of %s", bytes, (long long)offset, file->path);
        done += (size_t)n;
    }
    return LF_OK;
}

static lf_status posix_sync(lf__file *file)
{
    return fsync(file->fd) == 0 ? LF_OK : lf__fail_errno(errno, "fsync of %s", file->path);
}

static lf_status posix_size(lf__file *file, int64_t *bytes)
{
    struct stat st;
    if (fstat(file->fd, &st) != 0) return lf__fail_errno(errno, "size of %s", file->path);
    *bytes = st.st_size;
    return LF_OK;
}

static lf_status posix_reserve(lf__file *file, int64_t bytes)
{
    if (bytes <= 0) return LF_OK;
    int err = posix_fallocate(file->fd, 0, bytes);
    /* File systems without the call (EOPNOTSUPP, EINVAL) find out while writing. */
    if (err && err != EOPNOTSUPP && err != EINVAL)
        return lf__fail_errno(err, "reserving %lld bytes for %s", (long long)bytes, file->path);
    return LF_OK;
}

static lf_status posix_rename(lf__io *io, const char *from, const char *to)
{
    (void)io;
    return rename(from, to) == 0 ? LF_OK : lf__fail_errno(errno, "renaming %s to %s", from, to);
}

static lf_status posix_remove(lf__io *io, const char *path)
{
    (void)io;
    if (unlink(path) == 0) return LF_OK;
    int err = errno;
    if ((err == EISDIR || err == EPERM) && rmdir(path) == 0) return LF_OK;
    return lf__fail_errno(err == EISDIR || err == EPERM ? errno : err, "removing %s", path);
}

static lf_status posix_make_dir(lf__io *io, const char *path)
{
    (void)io;
    return mkdir(path, 0777) == 0 ? LF_OK : lf__fail_errno(errno, "making folder %s", path);
}

static lf_status posix_sync_dir(lf__io *io, const char *path)
{
    (void)io;
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return lf__fail_errno(errno, "cannot open folder %s", path);
    /* Some file systems cannot sync a folder and say EINVAL; there the rename itself is all there is. */
    int err = fsync(fd) == 0 || errno == EINVAL ? 0 : errno;
    close(fd);
    return err ? lf__fail_errno(err, "fsync of folder %s", path) : LF_OK;
}

static lf_status posix_list(lf__io *io, const char *path, lf_status (*fn)(void *, const char *), void *user)
{
    (void)io;
    DIR *dir = opendir(path);
    if (!dir) return lf__fail_errno(errno, "cannot list %s", path);
    lf_status rc = LF_OK;
    struct dirent *entry;
    while (rc >= 0 && (errno = 0, entry = readdir(dir)) != NULL) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0) continue;
        rc = fn(user, entry->d_name);
    }
    if (rc >= 0 && errno) rc = lf__fail_errno(errno, "listing %s", path);
    closedir(dir);
    return rc < 0 ? rc : LF_OK;
}

static lf_status posix_exists(lf__io *io, const char *path, bool *yes)
{
    (void)io;
    struct stat st;
    *yes = lstat(path, &st) == 0;
    return *yes || errno == ENOENT || errno == ENOTDIR ? LF_OK : lf__fail_errno(errno, "looking at %s", path);
}

static lf_status name_holder(int fd, const char *path)
{
    char pid[24] = "";
    ssize_t n = pread(fd, pid, sizeof pid - 1, 0);
    for (ssize_t i = 0; i < n; i++)
        if (pid[i] < '0' || pid[i] > '9') pid[i] = 0;
    return LF_FAIL(LF_ERR_STATE, "%s is held by process %s", path, *pid ? pid : "(unknown)");
}

static lf_status posix_lock(lf__io *io, const char *path, lf__file **out)
{
    (void)io;
    lf_status rc = LF_OK;
    char pid[24];
    *out = NULL;
    lf__file *file = lf__alloc(sizeof *file + strlen(path) + 1);
    if (!file) return LF_FAIL(LF_ERR_NOMEM, "locking %s", path);
    memcpy(file->path, path, strlen(path) + 1);
    file->fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (file->fd < 0) {
        rc = lf__fail_errno(errno, "cannot open %s", path);
    } else if (flock(file->fd, LOCK_EX | LOCK_NB) != 0) {
        rc = errno == EWOULDBLOCK ? name_holder(file->fd, path) : lf__fail_errno(errno, "locking %s", path);
    } else {
        int n = snprintf(pid, sizeof pid, "%ld\n", (long)getpid());
        if (ftruncate(file->fd, 0) != 0 || pwrite(file->fd, pid, (size_t)n, 0) != n)
            rc = lf__fail_errno(errno, "writing to %s", path);
    }
    if (rc < 0) {
        if (file->fd >= 0) close(file->fd);
        lf__free(file);
        return rc;
    }
    *out = file;
    return LF_OK;
}

static const lf__io_ops posix_ops = {
    .name = "posix",
    .open = posix_open,
    .close = posix_close,
    .read = posix_read,
    .write = posix_write,
    .sync = posix_sync,
    .size = posix_size,
    .reserve = posix_reserve,
    .rename = posix_rename,
    .remove = posix_remove,
    .make_dir = posix_make_dir,
    .sync_dir = posix_sync_dir,
    .list = posix_list,
    .exists = posix_exists,
    .lock = posix_lock,
};

lf__io *lf__io_posix(void)
{
    static lf__io io = {&posix_ops};
    return &io;
}
