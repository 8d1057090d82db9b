/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels that were compiled. A build for other architectures alone defines LF_GEMM_NO_SM90 or LF_GEMM_NO_SM80. */
#include <stddef.h>

#include "grouped_gemm_int.h"

extern const lf__gemm_kernel lf__gemm_sm90_tn, lf__gemm_sm90_nn, lf__gemm_sm90_nt, lf__gemm_sm90_nt_f32;
extern const lf__gemm_kernel lf__gemm_sm80_tn, lf__gemm_sm80_nn, lf__gemm_sm80_nt, lf__gemm_sm80_nt_f32;

const lf__gemm_kernel *const lf__gemm_kernels[] = {
#ifndef LF_GEMM_NO_SM90
    &lf__gemm_sm90_tn,
    &lf__gemm_sm90_nn,
    &lf__gemm_sm90_nt,
    &lf__gemm_sm90_nt_f32,
#endif
#ifndef LF_GEMM_NO_SM80
    &lf__gemm_sm80_tn,
    &lf__gemm_sm80_nn,
    &lf__gemm_sm80_nt,
    &lf__gemm_sm80_nt_f32,
#endif
    NULL,
};
