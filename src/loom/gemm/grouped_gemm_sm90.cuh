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
#include "loom/gemm/grouped_gemm.h"
#include "loom/gemm/grouped_gemm_int.h"

namespace lf_gemm {

using cute::_1;
using cute::_128;
using cute::_2;
using cute::_256;
using cute::_64;
using cute::Shape;

/* The group scheduler of CUTLASS gives block b the tiles b, b + grid, b + 2 grid, ...: right when all tiles cost the same, but
 * the tiles of a weight's gradient cost what the expert has rows. Here a cluster takes the next tile when it is ready for it, in
 * order of experts with the longest sums first (the set-up kernel sorts them). The cluster's first block draws the ticket and
 * leaves it in a ring in global memory, where the second finds it. */
struct Problem : cutlass::gemm::GroupProblemShape<Shape<int, int, int>> {
    lf__gemm_queue *queue;
};

template <class Cluster, int Stages>
class QueueScheduler : public cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90Group<Problem, Stages> {
    using Base = cutlass::gemm::kernel::detail::PersistentTileSchedulerSm90Group<Problem, Stages>;
    static constexpr int kBlocks = cute::size<0>(Cluster{}) * cute::size<1>(Cluster{});
    /* Tiles that are drawn before every warp group has seen an earlier one. One would make loads wait for the epilogue. */
    static constexpr int kAhead = 2;
    static_assert(kAhead < Stages && kBlocks <= 2, "see next_ticket");

    uint32_t cluster_, rank_, n_clusters_, step_ = 0;

    /* The blocks of a cluster load parts of each other's operands, so neither gets more than the main loop's stages and kAhead
     * tiles in front of the other: the ring is longer, and the first block may write it without asking. */
    CUTLASS_DEVICE uint32_t next_ticket()
    {
        lf__gemm_queue *queue = this->scheduler_params.problem_shapes_.queue;
        uint32_t ticket = 0;
        step_++;
        if (cutlass::canonical_lane_idx() == 0) {
            uint64_t *slot = &queue->ring[cluster_][step_ % LF_GEMM_RING];
            if (rank_ == 0) {
                ticket = atomicAdd(&queue->next, 1u);
                if (kBlocks > 1) {
                    uint64_t entry = uint64_t(step_) << 32 | ticket;
                    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(slot), "l"(entry) : "memory");
                }
            } else {
                uint64_t entry;
                do asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(entry) : "l"(slot) : "memory");
                while (uint32_t(entry >> 32) != step_);
                ticket = uint32_t(entry);
            }
        }
        return __shfl_sync(0xffffffff, ticket, 0);
    }

  public:
    QueueScheduler() = default;

    CUTLASS_DEVICE explicit QueueScheduler(typename Base::Params const &params, typename Base::SchedulerResponse *response)
        : Base(params, response)
    {
        bool along_n = params.raster_order_ == Base::RasterOrder::AlongN;
        uint32_t block = along_n ? blockIdx.x + blockIdx.y * gridDim.x : blockIdx.x * gridDim.y + blockIdx.y;
        cluster_ = block / kBlocks;
        rank_ = block % kBlocks;
        n_clusters_ = gridDim.x * gridDim.y / kBlocks;
    }

    /* Called by the scheduler's warp alone. */
    template <class Pipeline, class State> CUTLASS_DEVICE auto advance_to_next_work(Pipeline &pipeline, State state, uint32_t = 1)
    {
        State before = state;
        before.advance(Stages - kAhead); /* the state that may be filled when the tile kAhead earlier has been seen by all */
        pipeline.producer_acquire(before);
        uint64_t index = uint64_t(n_clusters_ + next_ticket()) * kBlocks + rank_;
        auto tile = this->get_current_work_for_linear_idx(index);
        if (cute::elect_one_sync()) {
            this->response_ptr_[state.index()] = tile;
            cutlass::arch::fence_view_async_shared();
            pipeline.producer_commit(state);
        }
        return cute::make_tuple(tile, true);
    }
};

enum : bool { AlongM = false, AlongN = true };

struct Cooperative {
    using Kernel = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperative;
    using Epilogue = cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative;
};
struct Pingpong {
    using Kernel = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedPingpong;
    using Epilogue = cutlass::epilogue::PtrArrayTmaWarpSpecializedPingpong;
};

} // namespace lf_gemm

template <class Tile, class Cluster, uint32_t Stages>
struct cutlass::gemm::kernel::detail::TileSchedulerSelector<cutlass::gemm::GroupScheduler, cutlass::arch::Sm90, Tile, Cluster,
                                                            Stages, lf_gemm::Problem> {
    using Scheduler = lf_gemm::QueueScheduler<Cluster, Stages>;
};

namespace lf_gemm {

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

    static Arguments arguments(const lf__gemm_launch *launch, bool along_n)
    {
        const lf__gemm_groups &g = launch->groups;
        Arguments args{};
        args.mode = cutlass::gemm::GemmUniversalMode::kGrouped;
        args.problem_shape.num_groups = launch->n_groups;
        args.problem_shape.problem_shapes = reinterpret_cast<typename Problem::UnderlyingProblemShape *>(g.shape);
        args.problem_shape.queue = g.queue;
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
        using Order = typename Kernel::TileScheduler::RasterOrderOptions;
        args.scheduler.raster_order = along_n ? Order::AlongN : Order::AlongM;
        return args;
    }

    static size_t workspace(int32_t n_units)
    {
        lf__gemm_launch launch{};
        launch.n_units = n_units;
        return Gemm::get_workspace_size(arguments(&launch, false));
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

    template <bool AlongN> static cudaError_t launch(const lf__gemm_launch *launch)
    {
        auto params = Kernel::to_underlying_arguments(arguments(launch, AlongN), launch->workspace);
        cutlass::Status status = Gemm::run(params, launch->stream);
        if (status == cutlass::Status::kSuccess) return cudaSuccess;
        cudaError_t error = cudaGetLastError();
        return error != cudaSuccess ? error : cudaErrorLaunchFailure;
    }
};

template <class Out> constexpr int32_t dtype_of() { return std::is_same_v<Out, float> ? LF_DTYPE_F32 : LF_DTYPE_BF16; }

} // namespace lf_gemm

/* Defines `extern "C" const lf__gemm_kernel symbol`. prefer: bits 1 << op; tile_m, tile_n: a block's tile, 64 deep; a cluster of
 * cm x cn blocks; Raster: AlongM or AlongN, the direction in which neighbouring tiles follow (the same device code). */
#define LF_GEMM_SM90(symbol, prefer, layout, Out, tile_m, tile_n, cm, cn, Schedule, Raster)                                      \
    using symbol##_type = lf_gemm::Sm90<layout, Out, cute::Shape<cute::Int<tile_m>, cute::Int<tile_n>, cute::_64>,               \
                                        cute::Shape<cute::Int<cm>, cute::Int<cn>, cute::_1>, lf_gemm::Schedule>;                 \
    extern "C" const lf__gemm_kernel symbol = {"sm90 " #tile_m "x" #tile_n "x64 cluster " #cm "x" #cn " " #Schedule " " #Raster, \
                                               layout,                                                                           \
                                               lf_gemm::dtype_of<Out>(),                                                         \
                                               90,                                                                               \
                                               prefer,                                                                           \
                                               symbol##_type::workspace,                                                         \
                                               symbol##_type::prepare,                                                           \
                                               symbol##_type::launch<lf_gemm::Raster>}

#endif
