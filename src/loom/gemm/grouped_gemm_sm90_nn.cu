/* SPDX-License-Identifier: Apache-2.0 */
/* Gradients of activations on Hopper. */
#include "grouped_gemm_sm90.cuh"

LF_GEMM_SM90(lf__gemm_sm90_nn, 1u << LF_GEMM_DH | 1u << LF_GEMM_DX, LF_GEMM_NN, cutlass::bfloat16_t, 128, 128, 2, 1, Pingpong,
             AlongN);
