/* SPDX-License-Identifier: Apache-2.0 */
/* Versions of the libraries that are linked in, and of the optional ones that are looked for at run time. */
#include <dlfcn.h>
#include <jansson.h>
#include <lmdb.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <jpeglib.h>
#include <xxhash.h>
#include <zstd.h>

#include "doctor.h"

#define TEXT_OF(x) #x
#define VERSION_TEXT(x) TEXT_OF(x)

static void add_linked(doctor_report *report, const char *name, const char *version)
{
    doctor_row *row = doctor_add(report, name);
    snprintf(row->found, sizeof row->found, "%s", version);
}

static void check_linked(doctor_report *report)
{
    char text[32];
    int major, minor, patch;
    unsigned xxh = XXH_versionNumber();
    mdb_version(&major, &minor, &patch);
    snprintf(text, sizeof text, "%d.%d.%d", major, minor, patch);
    add_linked(report, "LMDB", text);
    add_linked(report, "libjpeg-turbo", VERSION_TEXT(LIBJPEG_TURBO_VERSION) " (headers)");
    add_linked(report, "zstd", ZSTD_versionString());
    snprintf(text, sizeof text, "%u.%u.%u", xxh / 10000, xxh / 100 % 100, xxh % 100);
    add_linked(report, "xxHash", text);
    add_linked(report, "jansson", jansson_version_str());
}

/* ---- optional libraries. Each reads its version through the library's own call: 1 when it could.
 * A function pointer is copied out of dlsym's object pointer, as POSIX allows and ISO C does not convert. */

#define LOOK_UP(function, library, name)                 \
    do {                                                 \
        void *address_ = dlsym(library, name);           \
        memcpy(&(function), &address_, sizeof address_); \
    } while (0)

static int cuda_version(void *library, char *text, size_t size)
{
    int (*get)(int *), version = 0;
    LOOK_UP(get, library, "cuDriverGetVersion");
    if (!get || get(&version) != 0) return 0;
    snprintf(text, size, "%d.%d", version / 1000, version % 1000 / 10);
    return 1;
}

static int nccl_version(void *library, char *text, size_t size)
{
    int (*get)(int *), v = 0;
    LOOK_UP(get, library, "ncclGetVersion");
    if (!get || get(&v) != 0) return 0;
    if (v < 10000) snprintf(text, size, "%d.%d.%d", v / 1000, v % 1000 / 100, v % 100);
    else snprintf(text, size, "%d.%d.%d", v / 10000, v % 10000 / 100, v % 100);
    return 1;
}

static int nvjpeg_version(void *library, char *text, size_t size)
{
    int (*get)(int, int *), part[3] = {0, 0, 0};
    LOOK_UP(get, library, "nvjpegGetProperty");
    for (int i = 0; i < 3; i++)
        if (!get || get(i, &part[i]) != 0) return 0;
    snprintf(text, size, "%d.%d.%d", part[0], part[1], part[2]);
    return 1;
}

typedef struct cufile_error {
    int error, cuda_error;
} cufile_error;

static int cufile_version(void *library, char *text, size_t size)
{
    cufile_error (*get)(int *);
    int v = 0;
    LOOK_UP(get, library, "cuFileGetVersion");
    if (!get || get(&v).error != 0) return 0;
    snprintf(text, size, "%d.%d", v / 1000, v % 1000 / 10);
    return 1;
}

static int nvml_version(void *library, char *text, size_t size)
{
    int (*init)(void), (*shut)(void), (*get)(char *, unsigned);
    LOOK_UP(init, library, "nvmlInit_v2");
    LOOK_UP(shut, library, "nvmlShutdown");
    LOOK_UP(get, library, "nvmlSystemGetDriverVersion");
    if (!init || !shut || !get || init() != 0) return 0;
    int ok = get(text, (unsigned)size) == 0;
    (void)shut();
    return ok;
}

static int mpi_version(void *library, char *text, size_t size)
{
    static char whole[8192]; /* the longest that any MPI says */
    int (*get)(char *, int *), length = 0;
    LOOK_UP(get, library, "MPI_Get_library_version");
    if (!get || get(whole, &length) != 0) return 0;
    snprintf(text, size, "%.*s", (int)strcspn(whole, ",\n"), whole);
    return 1;
}

typedef struct optional_library {
    const char *name;
    const char *files[4]; /* tried in this order */
    int (*version)(void *library, char *text, size_t size);
    int least_major, least_minor; /* 0, 0: any */
    const char *without;          /* what is missing without it */
    const char *older;            /* what an older one costs */
} optional_library;

static const optional_library optionals[] = {
    {"libcuda",
     {"libcuda.so.1"},
     cuda_version,
     12,
     2,
     "no NVIDIA driver: training runs on the CPU",
     "update the driver to 535.104 or newer"},
    {"libnvidia-ml",
     {"libnvidia-ml.so.1"},
     nvml_version,
     535,
     104,
     "no GPU load, power and clocks in reports",
     "update the driver to 535.104 or newer"},
    {"libnccl",
     {"libnccl.so.2"},
     nccl_version,
     2,
     19,
     "GPUs reduce through PyTorch's own copy, or gloo where it has none",
     "update it together with torch"},
    {"libnvjpeg",
     {"libnvjpeg.so.13", "libnvjpeg.so.12", "libnvjpeg.so.11", "libnvjpeg.so"},
     nvjpeg_version,
     12,
     0,
     "images are decoded on the CPU by libjpeg-turbo",
     "install CUDA 12's nvJPEG for the batched hardware decoder"},
    {"libcufile",
     {"libcufile.so.0", "libcufile.so"},
     cufile_version,
     0,
     0,
     "checkpoints go through host memory (pinned buffers, direct I/O)",
     ""},
    {"libmpi",
     {"libmpi.so.40", "libmpi.so.12", "libmpi.so"},
     mpi_version,
     0,
     0,
     "ranks start with torchrun only, not mpirun",
     ""},
};

static void *open_first(const optional_library *o, const char **file)
{
    for (size_t i = 0; i < sizeof o->files / sizeof o->files[0] && o->files[i]; i++) {
        void *library = dlopen(o->files[i], RTLD_NOW | RTLD_LOCAL);
        *file = o->files[i];
        if (library) return library;
    }
    return NULL;
}

/* Codes that cuInit answers when a part of the driver is at fault. */
static const struct {
    int code, state;
    const char *meaning;
} cuda_faults[] = {
    {100, DOCTOR_MISSING,
     "the driver is there but sees no GPU: training runs on the CPU; in a container start it with --gpus all"},
    {101, DOCTOR_BROKEN, "CUDA_VISIBLE_DEVICES names a GPU that does not exist"},
    {802, DOCTOR_BROKEN,
     "system not ready: the fabric manager of this NVSwitch machine does not run (systemctl start nvidia-fabricmanager)"},
    {803, DOCTOR_BROKEN,
     "kernel module and user library of the driver differ in version: reboot, or install both from one package"},
    {804, DOCTOR_BROKEN, "forward compatibility is not supported on this GPU: remove the cuda-compat libraries"},
    {999, DOCTOR_BROKEN, "unknown error: kernel module not loaded or its device files missing; look at nvidia-smi and dmesg"},
};

static void check_gpus(doctor_report *report, void *cuda)
{
    int (*init)(unsigned), (*count)(int *), n = 0;
    LOOK_UP(init, cuda, "cuInit");
    LOOK_UP(count, cuda, "cuDeviceGetCount");
    doctor_row *row = doctor_add(report, "GPUs");
    int code = init ? init(0) : -1;
    if (code == 0 && count && count(&n) == 0) {
        snprintf(row->found, sizeof row->found, "%d", n);
        return;
    }
    snprintf(row->found, sizeof row->found, "CUDA does not start (error %d)", code);
    doctor_say(row, DOCTOR_BROKEN, "the driver's error %d: look at nvidia-smi and dmesg", code);
    for (size_t i = 0; i < sizeof cuda_faults / sizeof cuda_faults[0]; i++)
        if (cuda_faults[i].code == code) doctor_say(row, cuda_faults[i].state, "%s", cuda_faults[i].meaning);
}

/* Libraries stay loaded until the process ends: drivers do not survive being unloaded. */
static void check_optional(doctor_report *report, const optional_library *o)
{
    const char *file = "";
    char version[120] = "";
    doctor_row *row = doctor_add(report, o->name);
    void *library = open_first(o, &file);
    if (!library) {
        snprintf(row->found, sizeof row->found, "missing");
        doctor_say(row, DOCTOR_MISSING, "%s", o->without);
        return;
    }
    int known = o->version(library, version, sizeof version), major = 0, minor = 0;
    snprintf(row->found, sizeof row->found, "%s (%s)", known ? version : "version unknown", file);
    if (!known)
        doctor_say(row, DOCTOR_WARN, "it is there but does not answer, so it will not be used; without it: %s", o->without);
    if (known && o->least_major && sscanf(version, "%d.%d", &major, &minor) == 2 &&
        (major < o->least_major || (major == o->least_major && minor < o->least_minor)))
        doctor_say(row, DOCTOR_WARN, "expected %d.%d or newer: %s", o->least_major, o->least_minor, o->older);
    if (strcmp(o->name, "libcuda") == 0) check_gpus(report, library);
}

void doctor_check_libraries(doctor_report *report)
{
    check_linked(report);
    for (size_t i = 0; i < sizeof optionals / sizeof optionals[0]; i++) check_optional(report, &optionals[i]);
}
