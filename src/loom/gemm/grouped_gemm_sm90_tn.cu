/* SPDX-License-Identifier: Apache-2.0 */
/* Forward products on Hopper. */
#include "grouped_gemm_sm90.cuh"

LF_GEMM_SM90(lf__gemm_sm90_tn, 1u << LF_GEMM_GU | 1u << LF_GEMM_Y, LF_GEMM_TN, cutlass::bfloat16_t, 128, 128, 2, 1, Pingpong,
             AlongN);
