/* SPDX-License-Identifier: Apache-2.0 */
/* NVML of two GPUs that count up: GPU-0 tells everything, GPU-1 neither power nor links, and takes its time. */
#include <stdint.h>
#include <string.h>
#include <time.h>

typedef struct fake_field {
    uint32_t id, scope;
    int64_t timestamp, latency_us;
    int32_t type, status;
    int64_t value;
} fake_field;

static int started, gpus[2], calls, links;

int nvmlInit_v2(void);
int nvmlShutdown(void);
const char *nvmlErrorString(int rc);
int nvmlDeviceGetHandleByUUID(const char *uuid, void **gpu);
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **gpu);
int nvmlDeviceGetUtilizationRates(void *gpu, unsigned busy[2]);
int nvmlDeviceGetMemoryInfo(void *gpu, unsigned long long memory[3]);
int nvmlDeviceGetClockInfo(void *gpu, unsigned which, unsigned *mhz);
int nvmlDeviceGetPowerUsage(void *gpu, unsigned *mw);
int nvmlDeviceGetPcieThroughput(void *gpu, unsigned which, unsigned *kb);
int nvmlDeviceGetFieldValues(void *gpu, int n, fake_field *f);
int fake_nvml_started(void);

int nvmlInit_v2(void) { return started++, 0; }
int nvmlShutdown(void) { return started--, 0; }
int fake_nvml_started(void) { return started; }
const char *nvmlErrorString(int rc) { return rc == 6 ? "Not Found" : "Not Supported"; }

int nvmlDeviceGetHandleByUUID(const char *uuid, void **gpu)
{
    return strcmp(uuid, "GPU-0") == 0 ? nvmlDeviceGetHandleByIndex_v2(0, gpu) : 6;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **gpu)
{
    if (index > 1) return 6;
    *gpu = &gpus[index];
    return 0;
}

int nvmlDeviceGetUtilizationRates(void *gpu, unsigned busy[2])
{
    if (gpu == &gpus[1]) nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
    busy[0] = calls++ % 2 ? 90 : 30;
    busy[1] = 40;
    return 0;
}

int nvmlDeviceGetMemoryInfo(void *gpu, unsigned long long memory[3])
{
    (void)gpu;
    memory[0] = 1000, memory[1] = 300, memory[2] = 700;
    return 0;
}

int nvmlDeviceGetClockInfo(void *gpu, unsigned which, unsigned *mhz)
{
    (void)gpu;
    *mhz = which == 1 ? 1980 : which == 2 ? 2619 : 0;
    return 0;
}

int nvmlDeviceGetPowerUsage(void *gpu, unsigned *mw)
{
    *mw = 512500;
    return gpu == &gpus[1] ? 3 : 0;
}

int nvmlDeviceGetPcieThroughput(void *gpu, unsigned which, unsigned *kb)
{
    (void)gpu;
    *kb = which ? 7 : 3;
    return 0;
}

int nvmlDeviceGetFieldValues(void *gpu, int n, fake_field *f)
{
    links++;
    for (int i = 0; i < n; i++) {
        f[i].status = gpu == &gpus[1] || f[i].scope != UINT32_MAX ? 3 : 0;
        f[i].value = (f[i].id == 138 ? 10 : f[i].id == 139 ? 20 : 0) * (int64_t)links;
    }
    return 0;
}
