/* SPDX-License-Identifier: Apache-2.0 */
/** @file check.cuh  A bench program ends at the first call that fails: CUDA(a CUDA call), OK(a call of the library). */
#ifndef LF_BENCH_CHECK_CUH
#define LF_BENCH_CHECK_CUH

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>

#include "loongforge/status.h"

#define CUDA(call)                                                                                 \
    do {                                                                                           \
        cudaError_t e_ = (call);                                                                   \
        if (e_ != cudaSuccess) {                                                                   \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(e_)); \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)
#define OK(call)                                                                            \
    do {                                                                                    \
        lf_status s_ = (call);                                                              \
        if (s_ != LF_OK) {                                                                  \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, lf_error_text()); \
            exit(1);                                                                        \
        }                                                                                   \
    } while (0)

#endif
