/* SPDX-License-Identifier: Apache-2.0 */
/* The shared object's way in, and its way back to the library that loaded it: errors, log lines and memory go through the
 * host's functions, so there is one error text a thread and one fault point, wherever the code runs. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_int.h"

static const lf__host_ops *host;

__attribute__((visibility("default"))) const lf__device_ops *lf_device_entry_v1(const lf__host_ops *from);

const lf__device_ops *lf_device_entry_v1(const lf__host_ops *from)
{
    if (from->abi != LF_DEVICE_ABI || from->size != sizeof *from) return NULL;
    host = from;
    return &lf__device_cuda;
}

lf_status lf__fail(lf_status status, const char *format, ...)
{
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return host->fail(status, "%s", text);
}

void lf__log(int32_t level, const char *format, ...)
{
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    host->log(level, "%s", text);
}

const char *lf__cuda_error_text(void) { return host->error_text(); }

void *lf__alloc(size_t bytes) { return host->alloc(bytes); }
void lf__free(void *p) { host->free(p); }

lf_status lf__cuda_fail(cudaError_t error, const char *what)
{
    cudaGetLastError(); /* clear it: the next call must not report it again */
    lf_status status = error == cudaErrorMemoryAllocation ? LF_ERR_NOMEM : LF_ERR_DEVICE;
    return lf__fail(status, "%s: %s (%s)", what, cudaGetErrorString(error), cudaGetErrorName(error));
}

lf_status lf__cuda_launched(const char *kernel, cudaStream_t stream, int32_t now)
{
    cudaError_t error = cudaGetLastError();
    if (error == cudaSuccess && now) error = cudaStreamSynchronize(stream);
    return error == cudaSuccess ? LF_OK : lf__cuda_fail(error, kernel);
}
