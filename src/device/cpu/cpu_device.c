/* SPDX-License-Identifier: Apache-2.0 */
/* The CPU as a device: memory by the host allocator, slabs by mmap, streams in cpu_stream.c. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cpu_int.h"

static lf_status cpu_open(int32_t index, void **context)
{
    LF_CHECK_ARG(index == 0, "device cpu:%d, expected cpu", index);
    *context = NULL; /* the CPU needs no state */
    return LF_OK;
}

static void cpu_close(void *context) { (void)context; }

/* "model name" of the first core, "unknown" where the kernel does not say. */
static void read_model_name(char *name, size_t size)
{
    char line[256];
    snprintf(name, size, "cpu: unknown");
    FILE *file = fopen("/proc/cpuinfo", "re");
    while (file && fgets(line, sizeof line, file)) {
        char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) != 0 || !colon) continue;
        colon[strcspn(colon, "\n")] = 0;
        snprintf(name, size, "cpu:%.100s", colon + 1);
        break;
    }
    if (file) fclose(file);
}

static lf_status cpu_info(void *context, lf_device_info *info)
{
    (void)context;
    read_model_name(info->name, sizeof info->name);
    int64_t page = sysconf(_SC_PAGESIZE);
    info->memory_bytes = sysconf(_SC_PHYS_PAGES) * page;
    info->memory_free_bytes = sysconf(_SC_AVPHYS_PAGES) * page;
    info->page_bytes = page;
    info->n_units = lf__n_cores();
    return LF_OK;
}

static lf_status cpu_alloc(void *context, size_t bytes, void **out)
{
    (void)context;
    *out = lf__alloc_aligned(bytes, 256);
    return *out ? LF_OK
                : LF_FAIL(LF_ERR_NOMEM, "%zu bytes of host memory, %lld are free", bytes,
                          (long long)sysconf(_SC_AVPHYS_PAGES) * sysconf(_SC_PAGESIZE));
}

static void cpu_free(void *context, void *memory)
{
    (void)context;
    lf__free(memory);
}

static lf_status cpu_slab_reserve(void *context, size_t bytes, void **base)
{
    (void)context;
    void *p = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return lf__fail_errno(errno, "reserving %zu bytes of addresses", bytes);
    *base = p;
    return LF_OK;
}

static lf_status cpu_slab_commit(void *context, void *base, size_t from, size_t to)
{
    (void)context;
    if (mprotect((char *)base + from, to - from, PROT_READ | PROT_WRITE) != 0)
        return lf__fail_errno(errno, "committing %zu bytes of a slab", to - from);
    return LF_OK;
}

static void cpu_slab_release(void *context, void *base, size_t reserved, size_t committed)
{
    (void)context, (void)committed;
    munmap(base, reserved);
}

const lf__device_ops lf__device_cpu = {
    .abi = LF_DEVICE_ABI,
    .size = sizeof(lf__device_ops),
    .name = "cpu",
    .kind = 1,
    .open = cpu_open,
    .close = cpu_close,
    .info = cpu_info,
    .alloc = cpu_alloc,
    .free = cpu_free,
    .host_alloc = cpu_alloc,
    .host_free = cpu_free,
    .copy = lf__cpu_copy,
    .fill = lf__cpu_fill,
    .stream_open = lf__cpu_stream_open,
    .stream_wrap = lf__cpu_stream_wrap,
    .stream_close = lf__cpu_stream_close,
    .stream_native = lf__cpu_stream_native,
    .stream_sync = lf__cpu_stream_sync,
    .stream_run = lf__cpu_stream_run,
    .event_open = lf__cpu_event_open,
    .event_close = lf__cpu_event_close,
    .event_record = lf__cpu_event_record,
    .stream_wait = lf__cpu_stream_wait,
    .event_query = lf__cpu_event_query,
    .event_sync = lf__cpu_event_sync,
    .event_elapsed = lf__cpu_event_elapsed,
    .slab_reserve = cpu_slab_reserve,
    .slab_commit = cpu_slab_commit,
    .slab_release = cpu_slab_release,
};
