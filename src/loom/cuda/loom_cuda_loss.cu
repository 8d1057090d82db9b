/* SPDX-License-Identifier: Apache-2.0 */
/* CUDA: cross-entropy. A block has one row. For a gradient it asks for the whole row: it arrives in shared memory in a few groups,
 * and of each every thread keeps the largest logit and the sum of exp(logit - largest). The gradient is made from shared memory, so
 * memory is read once and written once. Rows that do not fit there are read twice where they are. */
#include "loom_cuda_vec.cuh"

enum { THREADS = 512, WARPS = THREADS / 32, AT_ONCE = 2, GROUPS = 4, SUM_THREADS = 1024 };

struct losses {
    void *logits;
    const int64_t *target;
    float *row_loss;
    int64_t v, ld;
};

/* sum of exp(x - largest) over some logits. */
struct partial_sum {
    float largest, sum;
};

/* Both as if they had one largest. -inf, the largest of nothing, is a factor of 0 rather than a NaN. */
__device__ __forceinline__ partial_sum joined(partial_sum a, partial_sum b)
{
    const float top = fmaxf(a.largest, b.largest), base = top == -INFINITY ? 0 : top;
    return {top, a.sum * __expf(a.largest - base) + b.sum * __expf(b.largest - base)};
}

template <int N> __device__ __forceinline__ void include(partial_sum &p, const float (&x)[N])
{
    float top = p.largest;
#pragma unroll
    for (int j = 0; j < N; j++) top = fmaxf(top, x[j]);
    const float base = top == -INFINITY ? 0 : top;
    if (top > p.largest) p.sum *= __expf(p.largest - base);
    p.largest = top;
    float e[N];
#pragma unroll
    for (int j = 0; j < N; j++) e[j] = __expf(x[j] - base);
#pragma unroll
    for (int half = N / 2; half > 0; half /= 2) /* as a tree: additions do not wait for one another */
#pragma unroll
        for (int j = 0; j < half; j++) e[j] += e[j + half];
    p.sum += e[0];
}

/* Of all threads, the same bits in each. */
__device__ __forceinline__ partial_sum block_join(partial_sum p)
{
    __shared__ partial_sum warps[WARPS];
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
        p = joined(p, {__shfl_xor_sync(~0u, p.largest, step), __shfl_xor_sync(~0u, p.sum, step)});
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = p;
    __syncthreads();
    p = warps[threadIdx.x % WARPS];
#pragma unroll
    for (int step = WARPS / 2; step > 0; step /= 2)
        p = joined(p, {__shfl_xor_sync(~0u, p.largest, step), __shfl_xor_sync(~0u, p.sum, step)});
    return p;
}

/* A row of one value: no target, or an impossible one. */
template <typename T, int N> __device__ __forceinline__ void fill_row(T *row, int64_t v, float value)
{
    float x[N];
#pragma unroll
    for (int j = 0; j < N; j++) x[j] = value;
    pack<T, N> p;
    p.set(x);
    for (int64_t i = threadIdx.x; i < v / N; i += THREADS) store_pack<T, N>(row, i, p);
    for (int64_t i = v / N * N + threadIdx.x; i < v; i += THREADS) narrow(value, row[i]);
}

/* 16 bytes into shared memory, later; a thread waits for what it has asked for itself. */
__device__ __forceinline__ void ask16(void *shared, const void *from)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((uint32_t)__cvta_generic_to_shared(shared)), "l"(from)
                 : "memory");
}
__device__ __forceinline__ void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/* Until all groups but the last PENDING have arrived. */
template <int PENDING> __device__ __forceinline__ void await_groups()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

/* fn(i) for this thread's packs of a quarter of a row. */
template <typename F> __device__ __forceinline__ void each_of_group(int group, int units, const F &fn)
{
    const int rounds = (units + THREADS - 1) / THREADS;
#pragma unroll 2
    for (int r = group * rounds / GROUPS; r < (group + 1) * rounds / GROUPS; r++)
        if (r * THREADS + threadIdx.x < units) fn(r * THREADS + threadIdx.x);
}

/* The sum over this thread's packs of a row, which stays in `kept`. */
template <typename T, int N> __device__ __forceinline__ partial_sum sum_kept(const T *row, int units, pack<T, N> *kept)
{
    static_assert(GROUPS == 4, "as many waits");
    partial_sum mine = {-INFINITY, 0};
    const auto add = [&](int i) {
        float x[N];
        kept[i].unpack(x);
        include<N>(mine, x);
    };
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        each_of_group(g, units, [&](int i) { ask16(kept + i, row + (int64_t)i * N); });
        end_group();
    }
    await_groups<3>();
    each_of_group(0, units, add);
    await_groups<2>();
    each_of_group(1, units, add);
    await_groups<1>();
    each_of_group(2, units, add);
    await_groups<0>();
    each_of_group(3, units, add);
    return mine;
}

/* The same of a row that stays where it is. */
template <typename T, int N> __device__ __forceinline__ partial_sum sum_row(const T *row, int units)
{
    partial_sum mine = {-INFINITY, 0};
#pragma unroll 1
    for (int i = threadIdx.x; i < units; i += AT_ONCE * THREADS) {
        pack<T, N> p[AT_ONCE];
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++)
            if (i + u * THREADS < units) p[u] = load_own<T, N>(row, i + u * THREADS);
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) {
            if (i + u * THREADS >= units) break;
            float x[N];
            p[u].unpack(x);
            include<N>(mine, x);
        }
    }
    return mine;
}

/* KEEP: the row's packs lie in shared memory. GRADIENT: the row becomes its gradient. */
template <typename T, int N, bool KEEP, bool GRADIENT>
__global__ void __launch_bounds__(THREADS, GRADIENT ? 2 : 4) loom_cross_entropy(const __grid_constant__ losses a)
{
    extern __shared__ uint4 kept_raw[];
    pack<T, N> *const kept = reinterpret_cast<pack<T, N> *>(kept_raw);
    T *const row = (T *)a.logits + blockIdx.x * a.ld;
    const int64_t target = a.target[blockIdx.x];
    if (target < 0 || target >= a.v) {
        const float value = target < 0 ? 0 : NAN;
        if (threadIdx.x == 0) a.row_loss[blockIdx.x] = value;
        if (GRADIENT) fill_row<T, N>(row, a.v, value);
        return;
    }
    const float wanted = widen(row[target]); /* before any thread writes */
    const int units = (int)(a.v / N);
    partial_sum mine;
    if constexpr (KEEP) mine = sum_kept<T, N>(row, units, kept);
    else mine = sum_row<T, N>(row, units);
    for (int64_t i = (int64_t)units * N + threadIdx.x; i < a.v; i += THREADS) {
        const float x[1] = {widen(row[i])};
        include<1>(mine, x);
    }
    const partial_sum all = block_join(mine);
    if (threadIdx.x == 0) a.row_loss[blockIdx.x] = logf(all.sum) - (wanted - all.largest);
    if (!GRADIENT) return;
    const float inverse = 1 / all.sum;
#pragma unroll 2
    for (int i = threadIdx.x; i < units; i += THREADS) {
        float x[N];
        pack<T, N> p = KEEP ? kept[i] : load_own<T, N>(row, i);
        p.unpack(x);
#pragma unroll
        for (int j = 0; j < N; j++) x[j] = __expf(x[j] - all.largest) * inverse;
        if (i == target / N) {
#pragma unroll
            for (int j = 0; j < N; j++)
                if (j == target % N) x[j] -= 1;
        }
        p.set(x);
        store_pack<T, N>(row, i, p);
    }
    for (int64_t i = (int64_t)units * N + threadIdx.x; i < a.v; i += THREADS)
        narrow(__expf(widen(row[i]) - all.largest) * inverse - (i == target ? 1.0f : 0.0f), row[i]);
}

__global__ void __launch_bounds__(SUM_THREADS)
    loom_loss_sum(const float *row_loss, int64_t n, double *loss_sum, int32_t accumulate)
{
    __shared__ double warps[SUM_THREADS / 32];
    double sum = 0;
#pragma unroll 8
    for (int64_t i = threadIdx.x; i < n; i += SUM_THREADS) sum += (double)row_loss[i];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x > 0) return;
    sum = 0;
    for (int w = 0; w < SUM_THREADS / 32; w++) sum += warps[w];
    *loss_sum = accumulate ? *loss_sum + sum : sum;
}

/* ---- launching ------------------------------------------------------------------------------------------------------- */

/* The kernel may use all the shared memory that the device has for a block. */
template <typename T, int N> static lf_status launch_kept(const losses &a, unsigned n, size_t bytes, cudaStream_t stream)
{
    const auto kernel = loom_cross_entropy<T, N, true, true>;
    LF_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
    LF_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
    kernel<<<n, THREADS, bytes, stream>>>(a);
    return LF_OK;
}

template <typename T> static lf_status launch_loss(const lf__loom_loss_args *b, int32_t device, cudaStream_t stream)
{
    constexpr int N = 16 / sizeof(T);
    const losses a = {b->logits, b->target, b->row_loss, b->v, b->ld};
    const unsigned n = (unsigned)b->n;
    const bool packs = (((uintptr_t)b->logits | (uintptr_t)b->ld * sizeof(T)) & 15) == 0;
    const size_t bytes = (size_t)(b->v / N) * 16;
    int room = 0;
    LF_CUDA(cudaDeviceGetAttribute(&room, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    if (b->backward && packs && bytes + 1024 <= (size_t)room) return launch_kept<T, N>(a, n, bytes, stream);
    if (b->backward && packs) loom_cross_entropy<T, N, false, true><<<n, THREADS, 0, stream>>>(a);
    else if (packs) loom_cross_entropy<T, N, false, false><<<n, THREADS, 0, stream>>>(a);
    else if (b->backward) loom_cross_entropy<T, 1, false, true><<<n, THREADS, 0, stream>>>(a);
    else loom_cross_entropy<T, 1, false, false><<<n, THREADS, 0, stream>>>(a);
    return LF_OK;
}

lf_status lf__loom_cuda_cross_entropy(const lf__loom_call *call, const lf__loom_args *args)
{
    const lf__loom_loss_args *a = &args->loss;
    const int32_t device = ((const cuda_context *)call->context)->index;
    const cudaStream_t stream = (cudaStream_t)call->stream;
    const int before = lf__loom_cuda_enter(call);
    lf_status rc = LF_OK;
    if (a->n > 0) rc = a->dtype == LF_DTYPE_F32 ? launch_loss<float>(a, device, stream) : launch_loss<bf16>(a, device, stream);
    if (rc == LF_OK && a->n > 0) rc = lf__cuda_launched("loom_cross_entropy", stream, 0);
    if (rc == LF_OK) loom_loss_sum<<<1, SUM_THREADS, 0, stream>>>(a->row_loss, a->n, a->loss_sum, a->accumulate);
    return lf__loom_cuda_leave(call, before, rc, "loom_loss_sum");
}
