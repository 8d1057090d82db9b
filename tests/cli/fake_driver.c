/* SPDX-License-Identifier: Apache-2.0 */
/* Stands in for libcuda, NCCL, NVML, nvJPEG, cuFile and MPI, so that `loongforge doctor` can be shown versions and faults.
 * What it answers comes from the environment. */
#include <stdio.h>
#include <stdlib.h>

static int number(const char *name, int otherwise)
{
    const char *text = getenv(name);
    return text ? (int)strtol(text, NULL, 10) : otherwise;
}

int cuDriverGetVersion(int *version);
int cuInit(unsigned flags);
int cuDeviceGetCount(int *count);
int ncclGetVersion(int *version);
int nvmlInit_v2(void);
int nvmlShutdown(void);
int nvmlSystemGetDriverVersion(char *text, unsigned size);
int nvjpegGetProperty(int which, int *value);
int MPI_Get_library_version(char *text, int *length);
typedef struct fake_error {
    int error, cuda_error;
} fake_error;
fake_error cuFileGetVersion(int *version);

int cuDriverGetVersion(int *version)
{
    *version = number("FAKE_CUDA", 12040);
    return 0;
}

int cuInit(unsigned flags)
{
    (void)flags;
    return number("FAKE_CUINIT", 0);
}

int cuDeviceGetCount(int *count)
{
    *count = 2;
    return 0;
}

int ncclGetVersion(int *version)
{
    *version = number("FAKE_NCCL", 22105);
    return 0;
}

int nvmlInit_v2(void) { return number("FAKE_NVML_FAILS", 0); }
int nvmlShutdown(void) { return 0; }

int nvmlSystemGetDriverVersion(char *text, unsigned size)
{
    const char *version = getenv("FAKE_DRIVER");
    snprintf(text, size, "%s", version ? version : "550.54.15");
    return 0;
}

int nvjpegGetProperty(int which, int *value)
{
    *value = which == 0 ? 12 : which == 1 ? 3 : 1;
    return 0;
}

fake_error cuFileGetVersion(int *version)
{
    *version = 1060;
    return (fake_error){0, 0};
}

int MPI_Get_library_version(char *text, int *length)
{
    *length = snprintf(text, 256, "Open MPI v4.1.4, package: nobody's\nmore");
    return 0;
}
