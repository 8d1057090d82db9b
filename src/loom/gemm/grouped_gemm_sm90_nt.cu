/* SPDX-License-Identifier: Apache-2.0 */
/* Gradients of weights on Hopper. */
#include "grouped_gemm_sm90.cuh"

LF_GEMM_SM90(lf__gemm_sm90_nt, 1u << LF_GEMM_DW_GU | 1u << LF_GEMM_DW_DOWN, LF_GEMM_NT, cutlass::bfloat16_t, 128, 128, 2, 1,
             Pingpong, AlongN);
LF_GEMM_SM90(lf__gemm_sm90_nt_f32, 1u << LF_GEMM_DW_GU | 1u << LF_GEMM_DW_DOWN, LF_GEMM_NT, float, 128, 128, 2, 1, Pingpong,
             AlongN);
