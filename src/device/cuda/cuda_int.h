/* SPDX-License-Identifier: Apache-2.0 */
/** @file cuda_int.h  What the files of libloongforge_cuda.so share. C on the host side, CUDA C in kernels. */
#ifndef LF_CUDA_INT_H
#define LF_CUDA_INT_H

#include <cuda_runtime_api.h>

#include "device/device_int.h"

#ifdef __cplusplus
extern "C" {
#endif

/** One opened device. */
typedef struct cuda_context {
    int32_t index;
    int32_t n_units, capability;
    size_t page; /* granularity of virtual memory */
    int32_t priority_low, priority_high;
} cuda_context;

/** A table's stream: ours, or borrowed from the caller (PyTorch). */
typedef struct cuda_stream {
    cudaStream_t native;
    bool owned;
    lf__fault fault; /* of host functions; its status is written last and read first */
} cuda_stream;

/** Turn a CUDA error into a status and clear it. `what` names the call or kernel. */
lf_status lf__cuda_fail(cudaError_t error, const char *what);
#define LF_CUDA(call)                                                        \
    do {                                                                     \
        cudaError_t e_ = (call);                                             \
        if (LF_UNLIKELY(e_ != cudaSuccess)) return lf__cuda_fail(e_, #call); \
    } while (0)

/** The calling thread's error text, which the host keeps. */
const char *lf__cuda_error_text(void);

/** After a launch: LF_OK, or an error that names the kernel. With `now` it also waits for the kernel. */
lf_status lf__cuda_launched(const char *kernel, cudaStream_t stream, int32_t now);

/** The device's own table: crews allocate through it. */
extern const lf__device_ops lf__device_cuda;

/** Kernel tables of the crews, NULL where a crew has none. */
const void *lf__cuda_kernels(void *context, const char *crew);

#ifdef __cplusplus
}
#endif
#endif
