/* SPDX-License-Identifier: Apache-2.0 */
/* Cores, memory, limits, file systems, Python. */
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/statfs.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "doctor.h"

#define MIB ((int64_t)1 << 20)
#define GIB ((int64_t)1 << 30)

/* First line of a small file without its newline; 0 when it cannot be read. */
static int read_line(const char *path, char *text, size_t size)
{
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    int got = fgets(text, (int)size, file) != NULL;
    fclose(file);
    if (got) text[strcspn(text, "\n")] = 0;
    return got;
}

static void check_system(doctor_report *report)
{
    struct utsname u;
    char line[256], name[96] = "";
    FILE *file = fopen("/etc/os-release", "r");
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "PRETTY_NAME=\"%95[^\"]\"", name) == 1) break;
    if (file) fclose(file);
    if (uname(&u) != 0) return;
    doctor_row *row = doctor_add(report, "system");
    snprintf(row->found, sizeof row->found, "%s, Linux %.60s", name[0] ? name : "unknown distribution", u.release);
}

/* A container may allow less time than its cores could give. */
static double quota_cores(void)
{
    char line[64];
    long long quota, period;
    if (read_line("/sys/fs/cgroup/cpu.max", line, sizeof line) && sscanf(line, "%lld %lld", &quota, &period) == 2 && period > 0)
        return (double)quota / (double)period;
    return 0;
}

static void check_cores(doctor_report *report)
{
    cpu_set_t set;
    long online = sysconf(_SC_NPROCESSORS_ONLN);
    int usable = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : (int)online;
    double quota = quota_cores();
    doctor_row *row = doctor_add(report, "cores");
    snprintf(row->found, sizeof row->found, "%d usable of %ld", usable, online);
    if (quota > 0 && quota < usable)
        doctor_say(row, DOCTOR_WARN, "the container's quota is %.1f cores: set --threads %d, more would be throttled", quota,
                   quota < 1 ? 1 : (int)quota);
}

static void check_memory(doctor_report *report)
{
    char line[128], total_text[24], free_text[24];
    long long total_kb = 0, free_kb = 0, limit = 0;
    FILE *file = fopen("/proc/meminfo", "r");
    while (file && fgets(line, sizeof line, file)) {
        (void)sscanf(line, "MemTotal: %lld", &total_kb);
        (void)sscanf(line, "MemAvailable: %lld", &free_kb);
    }
    if (file) fclose(file);
    doctor_row *row = doctor_add(report, "memory");
    snprintf(row->found, sizeof row->found, "%s, %s available", cmd_bytes(total_text, sizeof total_text, total_kb * 1024),
             cmd_bytes(free_text, sizeof free_text, free_kb * 1024));
    if (read_line("/sys/fs/cgroup/memory.max", line, sizeof line) && sscanf(line, "%lld", &limit) == 1 && limit > 0 &&
        limit < total_kb * 1024)
        doctor_say(row, DOCTOR_WARN, "the container's limit is %s: going over it ends the process without a message",
                   cmd_bytes(total_text, sizeof total_text, limit));
    else if (total_kb && free_kb * 1024 < GIB)
        doctor_say(row, DOCTOR_WARN, "under 1 GiB available: the tiny preset wants about 2 GiB, end other programs");
}

static void print_limit(char *text, size_t size, rlim_t limit)
{
    if (limit == RLIM_INFINITY) snprintf(text, size, "unlimited");
    else cmd_bytes(text, size, (int64_t)limit);
}

static void check_limits(doctor_report *report)
{
    struct rlimit limit;
    char text[24];
    if (getrlimit(RLIMIT_MEMLOCK, &limit) == 0) {
        doctor_row *row = doctor_add(report, "locked memory");
        print_limit(text, sizeof text, limit.rlim_cur);
        snprintf(row->found, sizeof row->found, "RLIMIT_MEMLOCK %s", text);
        if (limit.rlim_cur != RLIM_INFINITY && limit.rlim_cur < (rlim_t)(64 * MIB))
            doctor_say(row, DOCTOR_WARN,
                       "RDMA and io_uring register memory against this limit: `ulimit -l unlimited`, or memlock in "
                       "/etc/security/limits.conf; a container needs --ulimit memlock=-1");
    }
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
        doctor_row *row = doctor_add(report, "open files");
        snprintf(row->found, sizeof row->found, "RLIMIT_NOFILE %lld",
                 limit.rlim_cur == RLIM_INFINITY ? -1LL : (long long)limit.rlim_cur);
        if (limit.rlim_cur < 1024) doctor_say(row, DOCTOR_WARN, "NCCL opens several files a peer: `ulimit -n 65536`");
    }
}

static void check_shm(doctor_report *report)
{
    struct statfs fs;
    char size[24], left[24];
    doctor_row *row = doctor_add(report, "/dev/shm");
    if (statfs("/dev/shm", &fs) != 0) {
        snprintf(row->found, sizeof row->found, "missing");
        doctor_say(row, DOCTOR_WARN,
                   "NCCL and gloo share memory between the processes of a machine there: mount -t tmpfs tmpfs /dev/shm");
        return;
    }
    int64_t total = (int64_t)fs.f_blocks * fs.f_bsize, available = (int64_t)fs.f_bavail * fs.f_bsize;
    snprintf(row->found, sizeof row->found, "%s, %s free", cmd_bytes(size, sizeof size, total),
             cmd_bytes(left, sizeof left, available));
    if (available < GIB)
        doctor_say(row, DOCTOR_WARN,
                   "under 1 GiB: NCCL fails with 'unhandled system error' and PyTorch workers with a bus error; a container "
                   "needs --shm-size=8g");
}

/* ---- the folder that runs are written to */

static const struct {
    long magic;
    const char *name, *meaning; /* NULL: nothing to say */
} file_systems[] = {
    {0xEF53, "ext4", NULL},
    {0x58465342, "xfs", NULL},
    {0x9123683E, "btrfs", "copy on write: rewritten checkpoints fragment; chattr +C on the folder before the first one"},
    {0x2FC12FC1, "zfs", "copy on write, no direct I/O before 2.3: checkpoints go through the page cache"},
    {0x01021994, "tmpfs", "memory: checkpoints are gone after a reboot and count as used memory; use a disk"},
    {0x794C7630, "overlayfs", "a container's layer: slow, and gone with the container; mount a volume for runs and data"},
    {0x6969, "nfs", "other hosts see commits late and locks may be missing: keep one writer; LMDB is not safe when hosts write"},
    {0x517B, "smb", "locks and rename differ from a local disk: write checkpoints to one and copy"},
    {0xFE534D42, "smb2", "locks and rename differ from a local disk: write checkpoints to one and copy"},
    {0x65735546, "fuse", "speed and durability depend on the program behind it: test with `loongforge vault verify`"},
    {0x0BD00BD0, "lustre", "fine for checkpoints with striping (lfs setstripe -c 4); read data sets from a local disk"},
    {0x01021997, "9p", "a virtual machine's share: mmap may not see changes, LMDB may refuse; use a disk of the machine"},
};

static void check_folder(doctor_report *report)
{
    struct statfs fs;
    char left[24];
    doctor_row *row = doctor_add(report, "current folder");
    if (statfs(".", &fs) != 0) {
        snprintf(row->found, sizeof row->found, "cannot be looked at");
        doctor_say(row, DOCTOR_BROKEN, "runs are written here: change to a folder that exists");
        return;
    }
    int64_t available = (int64_t)fs.f_bavail * fs.f_bsize;
    const char *name = "unknown file system", *meaning = NULL;
    for (size_t i = 0; i < sizeof file_systems / sizeof file_systems[0]; i++)
        if (((unsigned long)fs.f_type & 0xFFFFFFFFul) == (unsigned long)file_systems[i].magic) {
            name = file_systems[i].name;
            meaning = file_systems[i].meaning;
        }
    snprintf(row->found, sizeof row->found, "%s, %s free", name, cmd_bytes(left, sizeof left, available));
    if (meaning) doctor_say(row, DOCTOR_WARN, "%s", meaning);
    if (access(".", W_OK) != 0)
        doctor_say(row, DOCTOR_BROKEN, "not writable: `loongforge train` writes runs/ here, or set --runs_dir");
    else if (available < 64 * MIB)
        doctor_say(row, DOCTOR_BROKEN, "no room for a checkpoint: free some, or set --runs_dir to another disk");
    else if (available < 4 * GIB)
        doctor_say(row, DOCTOR_WARN, "a checkpoint of the n16 preset with its optimizer state needs about 20 GB");
}

/* ---- Python */

static const char probe[] = "import sys; from importlib import metadata as m, util as u\n"
                            "def v(n):\n try: return m.version(n)\n except Exception: return '-'\n"
                            "print(sys.version.split()[0], v('torch') if u.find_spec('torch') else '-', 'yes' if "
                            "u.find_spec('loongforge') else '-')";

/* 1 when the probe printed its three words. The shell in between gets the path in single quotes. */
static int run_probe(const char *python, char version[32], char torch[64], char package[8])
{
    char command[8300];
    if (strchr(python, '\'')) return 0;
    snprintf(command, sizeof command, "'%s' -c \"%s\" 2>/dev/null", python, probe);
    FILE *pipe = popen(command, "r");
    if (!pipe) return 0;
    int got = fscanf(pipe, "%31s %63s %7s", version, torch, package);
    return pclose(pipe) == 0 && got == 3;
}

static void check_python(doctor_report *report)
{
    char path[4096], version[32], torch[64], package[8];
    doctor_row *row = doctor_add(report, "python");
    if (!cmd_find_python(path, sizeof path)) {
        snprintf(row->found, sizeof row->found, "missing");
        doctor_say(row, DOCTOR_BROKEN, "`loongforge train` needs Python 3.10 or newer: `make build` sets it up in .venv");
        return;
    }
    if (!run_probe(path, version, torch, package)) {
        snprintf(row->found, sizeof row->found, "%.120s does not run", path);
        doctor_say(row, DOCTOR_BROKEN, "`loongforge train` uses it: `make build` sets one up in .venv");
        return;
    }
    int has_torch = strcmp(torch, "-") != 0, has_package = strcmp(package, "-") != 0;
    snprintf(row->found, sizeof row->found, "%s, torch %s (%.80s)", version, has_torch ? torch : "missing", path);
    if (!has_torch || !has_package)
        doctor_say(row, DOCTOR_BROKEN, "`loongforge train` needs the package%s%s%s: `make build`, then `. .venv/bin/activate`",
                   has_package ? "" : " loongforge", has_torch || has_package ? "" : " and", has_torch ? "" : " torch");
}

static void check_environment(doctor_report *report)
{
    static const char *const names[] = {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        const char *value = getenv(names[i]);
        if (!value || strcmp(value, "0") != 0) continue;
        doctor_row *row = doctor_add(report, "NCCL errors");
        snprintf(row->found, sizeof row->found, "%s=0", names[i]);
        doctor_say(row, DOCTOR_WARN, "a failed collective then hangs or passes silently and the loss goes wrong: unset it");
    }
}

void doctor_check_system(doctor_report *report)
{
    check_system(report);
    check_cores(report);
    check_memory(report);
    check_limits(report);
    check_shm(report);
    check_folder(report);
    check_python(report);
    check_environment(report);
}
