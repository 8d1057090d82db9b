/* SPDX-License-Identifier: Apache-2.0 */
/** @file scope_cuda.h  Launchers of scope_cuda.cu. */
#ifndef LF_SCOPE_CUDA_H
#define LF_SCOPE_CUDA_H

#include <cuda_runtime_api.h>

#include "scope/scope_meter.h"

#ifdef __cplusplus
extern "C" {
#endif

/** The current device stamps when `stream` gets there. */
cudaError_t lf__scope_cuda_stamp(cudaStream_t stream, const lf__stamp *stamp);

#ifdef __cplusplus
}
#endif
#endif
