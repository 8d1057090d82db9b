/* SPDX-License-Identifier: Apache-2.0 */
/* Which Python the command works with. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cmd.h"

/* "dir/name" into path when that is a program; dir has `n` characters. */
static const char *try_program(char *path, size_t size, const char *dir, size_t n, const char *name)
{
    int used = snprintf(path, size, "%.*s/%s", (int)n, dir, name);
    return used > 0 && (size_t)used < size && access(path, X_OK) == 0 ? path : NULL;
}

/* A program on the PATH. */
static const char *find_on_path(char *path, size_t size, const char *name)
{
    const char *dirs = getenv("PATH");
    while (dirs && *dirs) {
        size_t n = strcspn(dirs, ":");
        if (n && try_program(path, size, dirs, n, name)) return path;
        dirs += n + (dirs[n] == ':');
    }
    return NULL;
}

static const char *try_beside(char *path, size_t size, const char *program)
{
    const char *slash = strrchr(program, '/');
    return slash ? try_program(path, size, program, (size_t)(slash - program), "python3") : NULL;
}

const char *cmd_find_python(char *path, size_t size)
{
    char self[4096];
    const char *called = strchr(cmd_program, '/') ? cmd_program : find_on_path(self, sizeof self, cmd_program);
    if (called && try_beside(path, size, called)) return path;
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    if (n > 0) {
        self[n] = 0;
        if (try_beside(path, size, self)) return path;
    }
    return find_on_path(path, size, "python3");
}
