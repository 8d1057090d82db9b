/* SPDX-License-Identifier: Apache-2.0 */
/* The small kernels around the grouped GEMMs: shapes and addresses from the row offsets, and SwiGLU over the regions. */
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "loom/gemm/grouped_gemm.h"
#include "loom/gemm/grouped_gemm_int.h"

namespace {

constexpr int kThreads = 256;   /* LF_MAX_EXPERTS fits one block */
constexpr int kFillBlocks = 32; /* that zero one expert's gradient */

struct Group {
    int m, n, k;
    const void *a, *b;
    void *d;
    int64_t lda, ldb, ldd;
};

__device__ const void *at(const void *base, int64_t element) { return static_cast<const char *>(base) + 2 * element; }
__device__ void *at(void *base, int64_t element) { return static_cast<char *>(base) + 2 * element; }

/* base: elements of h in front of this expert; first: its first row. */
__device__ Group describe(const lf__gemm_setup &s, const lf__loom_expert &e, int first, int rows, int64_t base)
{
    int f = static_cast<int>(e.hidden), d = s.d;
    int64_t row = static_cast<int64_t>(first) * d;
    switch (s.op) {
    case LF_GEMM_GU: return {rows, 2 * f, d, at(s.a, row), e.w_gu, at(s.out, 2 * base), d, d, 2 * f};
    case LF_GEMM_Y: return {rows, d, f, at(s.a, base), e.w_down, at(s.out, row), f, f, d};
    case LF_GEMM_DH: return {rows, f, d, at(s.a, row), e.w_down, at(s.out, base), d, f, f};
    case LF_GEMM_DX: return {rows, d, 2 * f, at(s.a, 2 * base), e.w_gu, at(s.out, row), 2 * f, d, d};
    case LF_GEMM_DW_GU: return {2 * f, d, rows, at(s.a, 2 * base), at(s.b, row), e.dw_gu, 2 * f, d, d};
    default: return {d, f, rows, at(s.a, row), at(s.b, base), e.dw_down, d, f, f};
    }
}

/* For thread i: elements of h in front of expert i. All threads of the block call it; scan: (kThreads) shared. */
__device__ int64_t region_base(int64_t elements, int64_t *scan)
{
    int i = threadIdx.x;
    scan[i] = elements;
    __syncthreads();
    for (int step = 1; step < kThreads; step *= 2) {
        int64_t before = i >= step ? scan[i - step] : 0;
        __syncthreads();
        scan[i] += before;
        __syncthreads();
    }
    return scan[i] - elements;
}

/* Place of this thread's group when the longest sums come first. All threads of the block call it; long_: (kThreads) shared. */
__device__ int rank_by_length(int k, int n_groups, int *long_)
{
    int i = threadIdx.x, rank = 0;
    long_[i] = k;
    __syncthreads();
    for (int j = 0; j < n_groups; j++) rank += long_[j] > k || (long_[j] == k && j < i);
    return rank;
}

__device__ void write_groups(const lf__gemm_setup &s)
{
    __shared__ int64_t scan[kThreads];
    __shared__ int length[kThreads];
    int i = threadIdx.x, rows = 0, first = 0;
    int4 *queue = reinterpret_cast<int4 *>(s.groups.queue);
    for (int j = i; j < static_cast<int>(sizeof(lf__gemm_queue) / sizeof(int4)); j += kThreads) queue[j] = {0, 0, 0, 0};
    lf__loom_expert e = {};
    if (i < s.n_experts) {
        e = s.experts[i];
        first = s.offset[i];
        rows = s.offset[i + 1] - first;
    }
    int64_t base = region_base(rows * e.hidden, scan);
    Group g = describe(s, e, first, rows, base);
    int to = rank_by_length(rows ? g.k : 0, s.n_experts, length);
    if (i >= s.n_experts) return;
    const lf__gemm_groups &groups = s.groups;
    groups.shape[3 * to] = rows ? g.m : 0; /* no tiles: CUTLASS leaves the sum over no rows undefined */
    groups.shape[3 * to + 1] = g.n;
    groups.shape[3 * to + 2] = g.k;
    groups.a[to] = g.a, groups.b[to] = g.b, groups.d[to] = g.d;
    groups.lda[to] = g.lda, groups.ldb[to] = g.ldb, groups.ldd[to] = g.ldd;
}

__device__ void zero_gradient(const lf__gemm_setup &s, int block)
{
    int i = block / kFillBlocks;
    if (s.offset[i + 1] != s.offset[i]) return;
    const lf__loom_expert &e = s.experts[i];
    bool gu = s.op == LF_GEMM_DW_GU;
    int64_t n = e.hidden * s.d * (gu ? 2 : 1) * s.out_bytes / 16;
    int4 *to = static_cast<int4 *>(gu ? e.dw_gu : e.dw_down);
    for (int64_t j = block % kFillBlocks * kThreads + threadIdx.x; j < n; j += kFillBlocks * kThreads) to[j] = {0, 0, 0, 0};
}

__global__ void set_up_kernel(const lf__gemm_setup s)
{
    if (blockIdx.x == 0) write_groups(s);
    else zero_gradient(s, blockIdx.x - 1);
}

/* ---- SwiGLU ---- */

struct Eight { /* 16 bytes of bf16, and as f32 */
    float v[8];
};

__device__ Eight load(const __nv_bfloat16 *p)
{
    int4 raw = *reinterpret_cast<const int4 *>(p);
    const __nv_bfloat162 *pair = reinterpret_cast<const __nv_bfloat162 *>(&raw);
    Eight out;
    for (int i = 0; i < 4; i++) {
        float2 two = __bfloat1622float2(pair[i]);
        out.v[2 * i] = two.x, out.v[2 * i + 1] = two.y;
    }
    return out;
}

__device__ void store(__nv_bfloat16 *p, const Eight &from)
{
    int4 raw;
    __nv_bfloat162 *pair = reinterpret_cast<__nv_bfloat162 *>(&raw);
    for (int i = 0; i < 4; i++) pair[i] = __floats2bfloat162_rn(from.v[2 * i], from.v[2 * i + 1]);
    *reinterpret_cast<int4 *>(p) = raw;
}

/* Where a row lies. offset and base are the block's copies in shared memory. */
struct Place {
    int64_t at; /* elements of h in front of the row */
    int f;
};

__device__ Place place_row(int row, const int *offset, const int64_t *base, const int *hidden, int n_experts)
{
    int low = 0, high = n_experts - 1; /* the last expert whose rows start at or before this row: it has the row */
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (offset[middle] <= row) low = middle;
        else high = middle - 1;
    }
    return {base[low] + static_cast<int64_t>(row - offset[low]) * hidden[low], hidden[low]};
}

/* The backward makes the same h: keep both expressions alike. */
__device__ Eight swiglu(const Eight &g, const Eight &u)
{
    Eight out;
    for (int i = 0; i < 8; i++) out.v[i] = g.v[i] * (1.0f / (1.0f + __expf(-g.v[i]))) * u.v[i];
    return out;
}

__device__ void forward_row(const lf__gemm_swiglu_args &s, const Place &p, int lane)
{
    const __nv_bfloat16 *gate = static_cast<const __nv_bfloat16 *>(s.gu) + 2 * p.at, *up = gate + p.f;
    __nv_bfloat16 *h = static_cast<__nv_bfloat16 *>(s.h) + p.at;
    for (int j = lane * 8; j < p.f; j += 512) { /* all loads in front of the first store */
        bool more = j + 256 < p.f;
        Eight g0 = load(gate + j), u0 = load(up + j), g1 = {}, u1 = {};
        if (more) g1 = load(gate + j + 256), u1 = load(up + j + 256);
        store(h + j, swiglu(g0, u0));
        if (more) store(h + j + 256, swiglu(g1, u1));
    }
}

__device__ void backward_row(const lf__gemm_swiglu_args &s, const Place &p, int lane)
{
    const __nv_bfloat16 *gate = static_cast<const __nv_bfloat16 *>(s.gu) + 2 * p.at, *up = gate + p.f;
    const __nv_bfloat16 *dh = static_cast<const __nv_bfloat16 *>(s.dh) + p.at;
    __nv_bfloat16 *dgate = static_cast<__nv_bfloat16 *>(s.dgu) + 2 * p.at, *dup = dgate + p.f;
    __nv_bfloat16 *h = s.h ? static_cast<__nv_bfloat16 *>(s.h) + p.at : nullptr;
    for (int j = lane * 8; j < p.f; j += 256) {
        Eight g = load(gate + j), u = load(up + j), dy = load(dh + j), dg, du, out;
        for (int i = 0; i < 8; i++) {
            float sigmoid = 1.0f / (1.0f + __expf(-g.v[i])), silu = g.v[i] * sigmoid;
            dg.v[i] = dy.v[i] * u.v[i] * sigmoid * (1.0f + g.v[i] * (1.0f - sigmoid));
            du.v[i] = dy.v[i] * silu;
            out.v[i] = silu * u.v[i];
        }
        store(dgate + j, dg);
        store(dup + j, du);
        if (h) store(h + j, out);
    }
}

/* One warp a row. */
template <bool Backward> __global__ void __launch_bounds__(kThreads) swiglu_kernel(const lf__gemm_swiglu_args s)
{
    __shared__ int64_t base[kThreads];
    __shared__ int offset[kThreads + 1], hidden[kThreads];
    int i = threadIdx.x;
    int rows = 0;
    hidden[i] = 0;
    if (i < s.n_experts) {
        offset[i] = s.offset[i];
        rows = s.offset[i + 1] - s.offset[i];
        hidden[i] = static_cast<int>(s.experts[i].hidden);
    }
    int64_t mine = region_base(static_cast<int64_t>(rows) * hidden[i], base);
    __syncthreads();
    base[i] = mine;
    __syncthreads();
    int n_rows = s.offset[s.n_experts];
    int warps = gridDim.x * (kThreads / 32);
    for (int row = blockIdx.x * (kThreads / 32) + i / 32; row < n_rows; row += warps) {
        Place p = place_row(row, offset, base, hidden, s.n_experts);
        if (Backward) backward_row(s, p, i % 32);
        else forward_row(s, p, i % 32);
    }
}

} // namespace

extern "C" cudaError_t lf__gemm_set_up(const lf__gemm_setup *setup, cudaStream_t stream)
{
    bool fill = setup->op >= LF_GEMM_DW_GU && !setup->accumulate;
    set_up_kernel<<<1 + (fill ? setup->n_experts * kFillBlocks : 0), kThreads, 0, stream>>>(*setup);
    return cudaGetLastError();
}

extern "C" cudaError_t lf__gemm_swiglu_forward(const lf__gemm_swiglu_args *args, cudaStream_t stream)
{
    swiglu_kernel<false><<<args->n_units * 8, kThreads, 0, stream>>>(*args);
    return cudaGetLastError();
}

extern "C" cudaError_t lf__gemm_swiglu_backward(const lf__gemm_swiglu_args *args, cudaStream_t stream)
{
    swiglu_kernel<true><<<args->n_units * 8, kThreads, 0, stream>>>(*args);
    return cudaGetLastError();
}
