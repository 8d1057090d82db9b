/* SPDX-License-Identifier: Apache-2.0 */
#include "scope_nvml.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

enum {
    CLOCK_SM = 1,
    CLOCK_MEMORY = 2,
    PCIE_TX = 0,
    PCIE_RX = 1,
    FIELD_LINK_TX = 138, /* data through all links since the driver came up, KiB */
    FIELD_LINK_RX = 139,
    ALL_LINKS = -1
};

/* nvmlFieldValue_t */
typedef struct field {
    uint32_t id, scope;
    int64_t timestamp, latency_us;
    int32_t type, status;
    union {
        double f64;
        uint32_t u32;
        uint64_t u64;
        int64_t i64;
    } value;
} field;

typedef struct row {
    const char *name;
    size_t at;
    bool needed;
} row;

#define ROW(field_, name_, needed_)                \
    {                                              \
        name_, offsetof(lf__nvml, field_), needed_ \
    }
static const row rows[] = {
    ROW(init, "nvmlInit_v2", true),
    ROW(shutdown, "nvmlShutdown", true),
    ROW(by_uuid, "nvmlDeviceGetHandleByUUID", true),
    ROW(by_index, "nvmlDeviceGetHandleByIndex_v2", true),
    ROW(error_string, "nvmlErrorString", false),
    ROW(utilization, "nvmlDeviceGetUtilizationRates", false),
    ROW(memory, "nvmlDeviceGetMemoryInfo", false),
    ROW(clock, "nvmlDeviceGetClockInfo", false),
    ROW(power, "nvmlDeviceGetPowerUsage", false),
    ROW(pcie, "nvmlDeviceGetPcieThroughput", false),
    ROW(fields, "nvmlDeviceGetFieldValues", false),
};
#undef ROW

static lf_status fail(const lf__nvml *nvml, lf_status status, const char *what, int rc)
{
    return LF_FAIL(status, "NVML: %s: %s (%d)", what, nvml->error_string ? nvml->error_string(rc) : "error", rc);
}

static lf_status find_gpu(lf__nvml *nvml, const char *gpu)
{
    const bool uuid = strncmp(gpu, "GPU-", 4) == 0;
    char *end = NULL;
    const unsigned long index = strtoul(gpu, &end, 10);
    LF_CHECK_ARG(uuid || (end != gpu && !*end && index < 1024), "gpu is '%s', expected GPU-… (a UUID) or an index", gpu);
    const int rc = uuid ? nvml->by_uuid(gpu, &nvml->gpu) : nvml->by_index((unsigned)index, &nvml->gpu);
    return rc ? fail(nvml, LF_ERR_NOTFOUND, gpu, rc) : LF_OK;
}

lf_status lf__nvml_open(lf__nvml *nvml, const char *gpu, const char *library)
{
    const char *name = library ? library : "libnvidia-ml.so.1";
    lf_status rc = LF_OK;
    *nvml = (lf__nvml){0};
    nvml->library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!nvml->library) return LF_FAIL(LF_ERR_UNSUPPORTED, "no NVML: %s", dlerror());
    for (size_t i = 0; i < LF_COUNT(rows); i++) {
        void *symbol = dlsym(nvml->library, rows[i].name);
        if (!symbol && rows[i].needed) LF_THROW(LF_ERR_UNSUPPORTED, "no NVML: %s lacks %s", name, rows[i].name);
        memcpy((char *)nvml + rows[i].at, &symbol, sizeof symbol);
    }
    const int started = nvml->init();
    if (started) LF_TRY(fail(nvml, LF_ERR_DEVICE, "nvmlInit", started));
    nvml->running = true;
    LF_TRY(find_gpu(nvml, gpu));
    return LF_OK;
out:
    lf__nvml_close(nvml);
    return rc;
}

void lf__nvml_close(lf__nvml *nvml)
{
    if (nvml->running) nvml->shutdown();
    if (nvml->library) dlclose(nvml->library);
    *nvml = (lf__nvml){0};
}

static double clock_of(lf__nvml *nvml, unsigned which)
{
    unsigned mhz;
    return nvml->clock && nvml->clock(nvml->gpu, which, &mhz) == 0 ? (double)mhz : -1;
}

static double pcie_of(lf__nvml *nvml, unsigned which)
{
    unsigned kb;
    return nvml->pcie && nvml->pcie(nvml->gpu, which, &kb) == 0 ? 1024.0 * kb : -1;
}

/* Counters: a rate needs two samples. */
static void sample_links(lf__nvml *nvml, lf_monitor_sample *s)
{
    field f[2] = {{.id = FIELD_LINK_TX, .scope = (uint32_t)ALL_LINKS}, {.id = FIELD_LINK_RX, .scope = (uint32_t)ALL_LINKS}};
    if (!nvml->fields || nvml->fields(nvml->gpu, 2, f) || f[0].status || f[1].status) {
        nvml->link_ns = 0;
        return;
    }
    const double seconds = (double)(s->t_ns - nvml->link_ns) * 1e-9;
    if (nvml->link_ns && seconds > 0) {
        s->nvlink_tx_bytes_s = 1024.0 * (double)(f[0].value.i64 - nvml->link_kib[0]) / seconds;
        s->nvlink_rx_bytes_s = 1024.0 * (double)(f[1].value.i64 - nvml->link_kib[1]) / seconds;
    }
    nvml->link_kib[0] = f[0].value.i64;
    nvml->link_kib[1] = f[1].value.i64;
    nvml->link_ns = s->t_ns;
}

void lf__nvml_sample(lf__nvml *nvml, lf_monitor_sample *s)
{
    unsigned busy[2], mw;
    unsigned long long memory[3]; /* total, free, used */
    *s = (lf_monitor_sample){.size = sizeof *s, .t_ns = lf__now_ns()};
    s->sm_pct = s->memory_pct = s->memory_used_bytes = s->power_w = s->nvlink_tx_bytes_s = s->nvlink_rx_bytes_s = -1;
    if (nvml->utilization && nvml->utilization(nvml->gpu, busy) == 0) s->sm_pct = busy[0], s->memory_pct = busy[1];
    if (nvml->memory && nvml->memory(nvml->gpu, memory) == 0) s->memory_used_bytes = (double)memory[2];
    if (nvml->power && nvml->power(nvml->gpu, &mw) == 0) s->power_w = 1e-3 * mw;
    s->sm_mhz = clock_of(nvml, CLOCK_SM);
    s->memory_mhz = clock_of(nvml, CLOCK_MEMORY);
    sample_links(nvml, s);
    s->pcie_tx_bytes_s = pcie_of(nvml, PCIE_TX);
    s->pcie_rx_bytes_s = pcie_of(nvml, PCIE_RX);
}
