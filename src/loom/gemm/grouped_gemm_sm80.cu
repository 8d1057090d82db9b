/* SPDX-License-Identifier: Apache-2.0 */
/* Grouped GEMM for Ampere and everything newer that has no kernels of its own: CUTLASS 2's GemmGrouped (cp.async, mma.sync),
 * scheduled on the device. */
#include <type_traits>

#include "cutlass/cutlass.h"
#include "cutlass/epilogue/thread/linear_combination.h"
#include "cutlass/gemm/device/gemm_grouped.h"
#include "cutlass/gemm/kernel/default_gemm_grouped.h"
#include "loom/gemm/grouped_gemm_int.h"
#include "loongforge/device.h"

namespace {

template <int Layout, class Out> struct Sm80 {
    using Element = cutlass::bfloat16_t;
    using Row = cutlass::layout::RowMajor;
    using Column = cutlass::layout::ColumnMajor;
    using LayoutA = std::conditional_t<Layout == LF_GEMM_NT, Column, Row>;
    using LayoutB = std::conditional_t<Layout == LF_GEMM_TN, Column, Row>;
    using Kernel = typename cutlass::gemm::kernel::DefaultGemmGrouped<
        Element, LayoutA, cutlass::ComplexTransform::kNone, 8, Element, LayoutB, cutlass::ComplexTransform::kNone, 8, Out, Row,
        float, cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80, cutlass::gemm::GemmShape<128, 128, 32>,
        cutlass::gemm::GemmShape<64, 64, 32>, cutlass::gemm::GemmShape<16, 8, 16>,
        cutlass::epilogue::thread::LinearCombination<Out, 16 / sizeof(Out), float, float>,
        cutlass::gemm::threadblock::GemmBatchedIdentityThreadblockSwizzle, 4,
        cutlass::gemm::kernel::GroupScheduleMode::kDeviceOnly>::GemmKernel;
    using Gemm = cutlass::gemm::device::GemmGrouped<Kernel>;
    static_assert(sizeof(cutlass::gemm::GemmCoord) == 12 && sizeof(typename LayoutA::Stride::LongIndex) == 8,
                  "shapes are three int32, leading dimensions int64");

    static size_t workspace(int32_t) { return 0; }

    static cudaError_t prepare(int32_t *n_resident)
    {
        int device, units, blocks;
        constexpr int bytes = static_cast<int>(sizeof(typename Kernel::SharedStorage));
        auto *kernel = cutlass::Kernel<Kernel>;
        cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
        if (error == cudaSuccess) error = cudaGetDevice(&device);
        if (error == cudaSuccess) error = cudaDeviceGetAttribute(&units, cudaDevAttrMultiProcessorCount, device);
        if (error == cudaSuccess)
            error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, Kernel::kThreadCount, bytes);
        if (error == cudaSuccess) *n_resident = blocks * units;
        return error;
    }

    static cudaError_t launch(const lf__gemm_launch *launch)
    {
        const lf__gemm_groups &g = launch->groups;
        auto **d = reinterpret_cast<Out **>(g.d);
        typename Gemm::Arguments args(reinterpret_cast<cutlass::gemm::GemmCoord *>(g.shape), launch->n_groups, launch->n_resident,
                                      {1.0f, launch->accumulate ? 1.0f : 0.0f}, (Element **)g.a, (Element **)g.b, d, d, g.lda,
                                      g.ldb, g.ldd, g.ldd, nullptr);
        Gemm gemm;
        cutlass::Status status = gemm.initialize(args, nullptr, launch->stream);
        if (status == cutlass::Status::kSuccess) status = gemm.run(launch->stream);
        if (status == cutlass::Status::kSuccess) return cudaSuccess;
        cudaError_t error = cudaGetLastError();
        return error != cudaSuccess ? error : cudaErrorLaunchFailure;
    }
};

template <int Layout, class Out> constexpr lf__gemm_kernel describe(int32_t dtype)
{
    using K = Sm80<Layout, Out>;
    return {"sm80 128x128x32", Layout, dtype, 80, 0, K::workspace, K::prepare, K::launch};
}

} // namespace

extern "C" {
extern const lf__gemm_kernel lf__gemm_sm80_tn, lf__gemm_sm80_nn, lf__gemm_sm80_nt, lf__gemm_sm80_nt_f32;
const lf__gemm_kernel lf__gemm_sm80_tn = describe<LF_GEMM_TN, cutlass::bfloat16_t>(LF_DTYPE_BF16);
const lf__gemm_kernel lf__gemm_sm80_nn = describe<LF_GEMM_NN, cutlass::bfloat16_t>(LF_DTYPE_BF16);
const lf__gemm_kernel lf__gemm_sm80_nt = describe<LF_GEMM_NT, cutlass::bfloat16_t>(LF_DTYPE_BF16);
const lf__gemm_kernel lf__gemm_sm80_nt_f32 = describe<LF_GEMM_NT, float>(LF_DTYPE_F32);
}
