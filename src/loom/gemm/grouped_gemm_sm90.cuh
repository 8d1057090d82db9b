/* SPDX-License-Identifier: Apache-2.0 */
/** @file grouped_gemm_sm90.cuh  Grouped GEMM on Hopper: CUTLASS 3's pointer-array kernels (TMA, wgmma, warp-specialised,
 *  persistent), problem shapes on the device only. LF_GEMM_SM90 makes one lf__gemm_kernel; each costs minutes to compile. */
#ifndef LF_GROUPED_GEMM_SM90_CUH
#define LF_GROUPED_GEMM_SM90_CUH

#include <type_traits>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/group_array_problem_shape.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "loom/gemm/grouped_gemm_int.h"
#include "loongforge/device.h"

namespace lf_gemm {

using cute::_1;
using cute::_128;
using cute::_2;
using cute::_256;
using cute::_64;
using cute::Shape;

struct Cooperative {
    using Kernel = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperative;
    using Epilogue = cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative;
};
struct Pingpong {
    using Kernel = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedPingpong;
    using Epilogue = cutlass::epilogue::PtrArrayTmaWarpSpecializedPingpong;
};

/* Rows and columns of the part of a tile that the epilogue moves at once. The f32 gradients take narrow ones: what the
 * epilogue does not take of the shared memory is stages of the main loop. */
template <class Out, class Tile, class Schedule>
using EpilogueTile = std::conditional_t<std::is_same_v<Out, float> && std::is_same_v<Schedule, Cooperative>,
                                        Shape<_128, cute::_16>, cutlass::epilogue::collective::EpilogueTileAuto>;

template <int Layout, class Out, class Tile, class Cluster, class Schedule> struct Sm90 {
    using Element = cutlass::bfloat16_t;
    using Row = cutlass::layout::RowMajor;
    using Column = cutlass::layout::ColumnMajor;
    using LayoutA = std::conditional_t<Layout == LF_GEMM_NT, Column, Row>;
    using LayoutB = std::conditional_t<Layout == LF_GEMM_TN, Column, Row>;
    /* Only gradients of weights accumulate: the others need no shared memory for a source. */
    using Source = std::conditional_t<Layout == LF_GEMM_NT, Out, void>;
    static constexpr int kAlign = 8, kAlignOut = 16 / sizeof(Out);

    using Problem = cutlass::gemm::GroupProblemShape<Shape<int, int, int>>;
    using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
        cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster, EpilogueTile<Out, Tile, Schedule>, float, float,
        Source, Row *, kAlignOut, Out, Row *, kAlignOut, typename Schedule::Epilogue,
        cutlass::epilogue::fusion::LinearCombination<Out, float, Source>>::CollectiveOp;
    using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
        cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, LayoutA *, kAlign, Element, LayoutB *, kAlign, float, Tile,
        Cluster, cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
        typename Schedule::Kernel>::CollectiveOp;
    using Kernel = cutlass::gemm::kernel::GemmUniversal<Problem, Mainloop, Epilogue>;
    using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
    using Arguments = typename Gemm::Arguments;

    using StrideA = typename Kernel::InternalStrideA;
    using StrideB = typename Kernel::InternalStrideB;
    using StrideD = typename Kernel::InternalStrideD;
    static_assert(sizeof(StrideA) == 8 && sizeof(StrideB) == 8 && sizeof(StrideD) == 8, "a stride is one leading dimension");
    static_assert(sizeof(typename Problem::UnderlyingProblemShape) == 12, "a shape is three int32");

    static Arguments arguments(const lf__gemm_launch *launch)
    {
        const lf__gemm_groups &g = launch->groups;
        Arguments args{};
        args.mode = cutlass::gemm::GemmUniversalMode::kGrouped;
        args.problem_shape = {launch->n_groups, reinterpret_cast<typename Problem::UnderlyingProblemShape *>(g.shape), nullptr};
        args.mainloop = {reinterpret_cast<const Element **>(g.a), reinterpret_cast<StrideA *>(g.lda),
                         reinterpret_cast<const Element **>(g.b), reinterpret_cast<StrideB *>(g.ldb)};
        args.epilogue.thread.alpha = 1.0f;
        args.epilogue.thread.beta = launch->accumulate ? 1.0f : 0.0f;
        if constexpr (!std::is_void_v<Source>) {
            args.epilogue.ptr_C = (const Out **)g.d;
            args.epilogue.dC = reinterpret_cast<StrideD *>(g.ldd);
        }
        args.epilogue.ptr_D = reinterpret_cast<Out **>(g.d);
        args.epilogue.dD = reinterpret_cast<StrideD *>(g.ldd);
        args.hw_info.device_id = launch->device;
        args.hw_info.sm_count = launch->n_units;
        args.hw_info.max_active_clusters = launch->n_resident;
        return args;
    }

    static size_t workspace(int32_t n_units)
    {
        lf__gemm_launch launch{};
        launch.n_units = n_units;
        return Gemm::get_workspace_size(arguments(&launch));
    }

    static cudaError_t prepare(int32_t *n_resident)
    {
        const void *kernel = reinterpret_cast<const void *>(cutlass::device_kernel<Kernel>);
        cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Kernel::SharedStorageSize);
        if (error != cudaSuccess) return error;
        cudaLaunchAttribute cluster{};
        cluster.id = cudaLaunchAttributeClusterDimension;
        cluster.val.clusterDim = {cute::size<0>(Cluster{}), cute::size<1>(Cluster{}), 1};
        cudaLaunchConfig_t config{};
        config.gridDim = dim3(cute::size<0>(Cluster{}), cute::size<1>(Cluster{}));
        config.blockDim = dim3(Kernel::MaxThreadsPerBlock);
        config.dynamicSmemBytes = Kernel::SharedStorageSize;
        config.attrs = &cluster;
        config.numAttrs = 1;
        return cudaOccupancyMaxActiveClusters(n_resident, kernel, &config);
    }

    static cudaError_t launch(const lf__gemm_launch *launch)
    {
        auto params = Kernel::to_underlying_arguments(arguments(launch), launch->workspace);
        cutlass::Status status = Gemm::run(params, launch->stream);
        if (status == cutlass::Status::kSuccess) return cudaSuccess;
        cudaError_t error = cudaGetLastError();
        return error != cudaSuccess ? error : cudaErrorLaunchFailure;
    }
};

template <class Out> constexpr int32_t dtype_of() { return std::is_same_v<Out, float> ? LF_DTYPE_F32 : LF_DTYPE_BF16; }

} // namespace lf_gemm

/* Defines `extern "C" const lf__gemm_kernel symbol`. prefer: bits 1 << op; tile_m, tile_n: a block's tile, 64 deep; cluster of
 * cm x cn blocks. */
#define LF_GEMM_SM90(symbol, prefer, layout, Out, tile_m, tile_n, cm, cn, Schedule)                                  \
    using symbol##_type = lf_gemm::Sm90<layout, Out, cute::Shape<cute::Int<tile_m>, cute::Int<tile_n>, cute::_64>,   \
                                        cute::Shape<cute::Int<cm>, cute::Int<cn>, cute::_1>, lf_gemm::Schedule>;     \
    extern "C" const lf__gemm_kernel symbol = {"sm90 " #tile_m "x" #tile_n "x64 cluster " #cm "x" #cn " " #Schedule, \
                                               layout,                                                               \
                                               lf_gemm::dtype_of<Out>(),                                             \
                                               90,                                                                   \
                                               prefer,                                                               \
                                               symbol##_type::workspace,                                             \
                                               symbol##_type::prepare,                                               \
                                               symbol##_type::launch}

#endif
