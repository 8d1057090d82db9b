/* SPDX-License-Identifier: Apache-2.0 */
/* The POSIX table, what every table can do through its operations, and that the crash simulator takes away what it should. */
#include <sys/wait.h>

#include "crash/crash_io.h"
#include "lf_test.h"

static lf_status count_name(void *user, const char *name)
{
    CHECK(name[0] != '.');
    ++*(int *)user;
    return LF_OK;
}

static lf_status stop_at_once(void *user, const char *name)
{
    (void)user;
    return LF_FAIL(LF_ERR_PEER, "stopped at %s", name);
}

/* The same list of promises for both tables. */
static void check_table(lf__io *io, const char *dir)
{
    const lf__io_ops *ops = io->ops;
    char a[600], b[600], data[16];
    size_t got;
    int64_t size;
    bool yes;
    int names = 0;
    lf__file *file;
    snprintf(a, sizeof a, "%s/a", dir);
    snprintf(b, sizeof b, "%s/b", dir);
    CHECK_OK(ops->make_dir(io, dir));
    CHECK_STATUS(ops->make_dir(io, dir), LF_ERR_EXISTS);
    CHECK_STATUS(ops->open(io, a, LF_IO_READ, &file), LF_ERR_NOTFOUND);
    CHECK(file == NULL);
    CHECK_HAS(lf_error_text(), a);
    CHECK_OK(ops->open(io, a, LF_IO_WRITE | LF_IO_CREATE, &file));
    CHECK_OK(ops->write(file, 3, "defg", 4));
    CHECK_OK(ops->write(file, 0, "abc", 3));
    CHECK_OK(ops->size(file, &size));
    CHECK_EQ(size, 7);
    CHECK_OK(ops->sync(file));
    CHECK_OK(ops->close(file));
    CHECK_STATUS(ops->open(io, a, LF_IO_WRITE | LF_IO_CREATE, &file), LF_ERR_EXISTS);
    CHECK_OK(ops->open(io, a, LF_IO_READ, &file));
    CHECK_OK(ops->read(file, 2, data, sizeof data, &got));
    CHECK_EQ(got, 5);
    CHECK(memcmp(data, "cdefg", 5) == 0);
    CHECK_OK(ops->read(file, 100, data, sizeof data, &got));
    CHECK_EQ(got, 0);
    CHECK_OK(ops->close(file));
    CHECK_OK(ops->close(NULL));
    CHECK_OK(ops->rename(io, a, b));
    CHECK_OK(ops->exists(io, a, &yes));
    CHECK(!yes);
    CHECK_OK(ops->exists(io, b, &yes));
    CHECK(yes);
    CHECK_STATUS(ops->rename(io, a, b), LF_ERR_NOTFOUND);
    CHECK_OK(ops->open(io, a, LF_IO_WRITE | LF_IO_TRUNCATE, &file));
    CHECK_OK(ops->close(file));
    CHECK_OK(ops->list(io, dir, count_name, &names));
    CHECK_EQ(names, 2);
    CHECK_STATUS(ops->list(io, dir, stop_at_once, NULL), LF_ERR_PEER);
    CHECK_STATUS(ops->list(io, a, count_name, &names), LF_ERR_IO); /* no folder */
    CHECK_OK(ops->sync_dir(io, dir));
    CHECK(ops->remove(io, dir) < 0); /* not empty */
    CHECK_OK(ops->rename(io, a, b)); /* replaces */
    CHECK_OK(ops->remove(io, b));
    CHECK_STATUS(ops->remove(io, b), LF_ERR_NOTFOUND);
    CHECK_OK(lf__io_replace(io, a, "first", 5));
    CHECK_OK(lf__io_replace(io, a, "second", 6));
    char *text;
    CHECK_OK(lf__io_read_all(io, a, 100, &text, &got));
    CHECK_STR(text, "second");
    lf__free(text);
    CHECK_STATUS(lf__io_read_all(io, a, 5, &text, &got), LF_ERR_FORMAT);
    names = 0;
    CHECK_OK(ops->list(io, dir, count_name, &names));
    CHECK_EQ(names, 1); /* no temporary file */
    CHECK_OK(lf__io_remove_tree(io, dir));
    CHECK_OK(ops->exists(io, dir, &yes));
    CHECK(!yes);
    CHECK_OK(lf__io_remove_tree(io, dir));
}

TEST(posix_keeps_what_the_table_promises)
{
    char dir[512];
    snprintf(dir, sizeof dir, "%s", lf_test_path("posix"));
    check_table(lf__io_posix(), dir);
}

TEST(the_simulator_behaves_like_posix)
{
    crash_io *c = crash_new();
    check_table(&c->io, "/v");
    CHECK_EQ(c->n_open, 0);
    crash_free(c);
}

TEST(a_lock_excludes_other_handles_and_processes)
{
    lf__io *io = lf__io_posix();
    lf__file *file, *second;
    char path[512], pid[40];
    snprintf(path, sizeof path, "%s", lf_test_path("lock"));
    CHECK_OK(io->ops->lock(io, path, &file));
    CHECK_STATUS(io->ops->lock(io, path, &second), LF_ERR_STATE);
    snprintf(pid, sizeof pid, "held by process %ld", (long)getpid());
    CHECK_HAS(lf_error_text(), pid);
    CHECK_OK(io->ops->close(file));
    int ready[2], release[2];
    CHECK(pipe(ready) == 0 && pipe(release) == 0);
    fflush(stdout);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        char byte = io->ops->lock(io, path, &file) == LF_OK ? 'y' : 'n';
        if (write(ready[1], &byte, 1) != 1) _exit(1);
        _exit(read(release[0], &byte, 1) == 1 ? 0 : 1); /* lets go by ending */
    }
    char byte;
    int how;
    CHECK(read(ready[0], &byte, 1) == 1);
    CHECK_EQ(byte, 'y');
    CHECK_STATUS(io->ops->lock(io, path, &second), LF_ERR_STATE);
    snprintf(pid, sizeof pid, "held by process %ld", (long)child);
    CHECK_HAS(lf_error_text(), pid);
    CHECK(write(release[1], &byte, 1) == 1);
    CHECK(waitpid(child, &how, 0) == child && WIFEXITED(how) && WEXITSTATUS(how) == 0);
    CHECK_OK(io->ops->lock(io, path, &second));
    CHECK_OK(io->ops->close(second));
    for (int i = 0; i < 2; i++) close(ready[i]), close(release[i]);
}

/* ---- lf__io_replace in every crash state: old or new, never anything else -------------------------------------------------- */

static lf_status forget_sync(lf__file *file)
{
    (void)file;
    return LF_OK;
}

typedef struct outcome {
    int old, fresh, other, states;
} outcome;

static void look(void *user, crash_io *state, int at, int64_t acknowledged, const char *what)
{
    (void)at, (void)what;
    outcome *o = user;
    char *text = NULL;
    size_t bytes;
    lf_status rc = lf__io_read_all(&state->io, "/f", 100, &text, &bytes);
    o->states++;
    if (rc == LF_OK && strcmp(text, "new") == 0) o->fresh++;
    else if (acknowledged < 2 && (acknowledged < 1 || (rc == LF_OK && strcmp(text, "old") == 0))) o->old++;
    else o->other++;
    lf__free(text);
}

static outcome crash_replace(bool with_sync)
{
    crash_io *c = crash_new();
    lf__io_ops lazy = *c->io.ops;
    CHECK_OK(lf__io_replace(&c->io, "/f", "old", 3));
    crash_ack(c, 1);
    if (!with_sync) {
        lazy.sync = forget_sync;
        c->io.ops = &lazy;
    }
    CHECK_OK(lf__io_replace(&c->io, "/f", "new", 3));
    crash_ack(c, 2);
    outcome o = {0};
    for (int at = 0; at <= c->n_ops; at++) crash_states(c, at, 0, look, &o);
    crash_free(c);
    return o;
}

TEST(replace_is_old_or_new_after_any_crash)
{
    outcome o = crash_replace(true);
    CHECK_EQ(o.other, 0);
    CHECK(o.old > 0 && o.fresh > 0 && o.states > 30);
}

TEST(the_simulator_shows_a_missing_sync)
{
    outcome o = crash_replace(false);
    CHECK(o.other > 0);
}

TEST(a_failed_sync_loses_what_it_should_have_saved)
{
    crash_io *c = crash_new();
    lf__file *file;
    CHECK_OK(c->io.ops->open(&c->io, "/f", LF_IO_WRITE | LF_IO_CREATE, &file));
    CHECK_OK(c->io.ops->sync_dir(&c->io, "/"));
    CHECK_OK(c->io.ops->write(file, 0, "abc", 3));
    crash_fail(c, 1, CRASH_EIO, 1);
    CHECK_STATUS(c->io.ops->sync(file), LF_ERR_IO);
    CHECK_OK(c->io.ops->sync(file)); /* "works" the second time */
    CHECK_OK(c->io.ops->close(file));
    CHECK(crash_is_open(c, 2, c->n_ops)); /* and yet the write may be missing */
    crash_free(c);
}

LF_TEST_MAIN
