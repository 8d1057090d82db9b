/* SPDX-License-Identifier: Apache-2.0 */
/** @file nexus_cuda.h  Launchers of nexus_cuda.cu, nexus_cuda_topk.cu and nexus_cuda_wire.cu. */
#ifndef LF_NEXUS_CUDA_H
#define LF_NEXUS_CUDA_H

#include <cuda_runtime_api.h>
#include <stdint.h>

#include "loongforge/nexus.h"
#include "nexus/nexus_parts.h"

#ifdef __cplusplus
extern "C" {
#endif

/** data: (count) f32 or bf16 on the current device, multiplied in place in order of `stream`. */
cudaError_t lf__nexus_cuda_scale(cudaStream_t stream, void *data, int64_t count, int bf16, float factor);
/** One part of top-k (LF__TOPK_*) in order of `stream`. */
cudaError_t lf__nexus_cuda_topk(cudaStream_t stream, const lf_topk *t, int part);
/** data: (count) f32, wire: (count) bf16, on the current device, in order of `stream`: rounded to nearest even; back, times factor. */
cudaError_t lf__nexus_cuda_narrow(cudaStream_t stream, const float *data, uint16_t *wire, int64_t count);
cudaError_t lf__nexus_cuda_widen(cudaStream_t stream, const uint16_t *wire, float *data, int64_t count, float factor);

#ifdef __cplusplus
}
#endif
#endif
