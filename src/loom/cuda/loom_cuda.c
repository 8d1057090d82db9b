/* SPDX-License-Identifier: Apache-2.0 */
/* ExpertLoom on CUDA: the table, the current device, and scratch memory that needs no allocation once a stream is known. */
#include <pthread.h>
#include <stdatomic.h>

#include "loom_cuda.h"

int lf__loom_cuda_enter(const lf__loom_call *call)
{
    const int mine = ((const cuda_context *)call->context)->index;
    int before = mine;
    cudaGetDevice(&before);
    if (before != mine) cudaSetDevice(mine);
    return before;
}

lf_status lf__loom_cuda_leave(const lf__loom_call *call, int before, lf_status rc, const char *kernel)
{
    if (rc == LF_OK) rc = lf__cuda_launched(kernel, call->stream, call->now);
    if (before != ((const cuda_context *)call->context)->index) cudaSetDevice(before);
    return rc;
}

/* ---- scratch --------------------------------------------------------------------------------------------------------- */

/* One piece of scratch: a stream's, or a stream's inside one captured graph. Pieces are only ever added to the list; the
 * graph's give themselves back when the graph and all that was made from it are gone. */
typedef struct area {
    struct area *next;
    void *memory;
    int32_t device;
    unsigned long long stream, capture; /* capture 0: work that is not captured */
    _Atomic int32_t used;
} area;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static area *first;

/* A handle names its stream as long as the stream has work, except the one that means another stream in each thread. */
static cudaError_t stream_key(cudaStream_t stream, unsigned long long *key)
{
    *key = (unsigned long long)(uintptr_t)stream;
    return stream == cudaStreamPerThread ? cudaStreamGetId(stream, key) : cudaSuccess;
}

static cudaError_t capture_of(cudaStream_t stream, unsigned long long *id, cudaGraph_t *graph)
{
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
#if CUDART_VERSION >= 13000
    cudaError_t error = cudaStreamGetCaptureInfo(stream, &status, id, graph, NULL, NULL, NULL);
#else
    cudaError_t error = cudaStreamGetCaptureInfo_v2(stream, &status, id, graph, NULL, NULL);
#endif
    if (status != cudaStreamCaptureStatusActive) *id = 0;
    return error;
}

/* Called by the driver, on a thread of its own, where neither CUDA nor a lock may be used. */
static void CUDART_CB give_back(void *user) { atomic_store_explicit(&((area *)user)->used, 0, memory_order_release); }

/* Keep `a` for as long as the graph, or a graph instantiated from it, exists or runs. */
static cudaError_t tie_to_graph(area *a, cudaGraph_t graph)
{
    cudaUserObject_t object;
    cudaError_t error = cudaUserObjectCreate(&object, a, give_back, 1, cudaUserObjectNoDestructorSync);
    if (error != cudaSuccess) {
        give_back(a);
        return error;
    }
    error = cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove);
    if (error != cudaSuccess) cudaUserObjectRelease(object, 1); /* gives `a` back */
    return error;
}

/* An unused piece or a new one. Allocating is allowed during a capture when the thread says that it knows. */
static lf_status take_area(int32_t device, area **out)
{
    for (area *a = first; a; a = a->next) {
        if (a->device != device || atomic_load_explicit(&a->used, memory_order_acquire)) continue;
        *out = a;
        return LF_OK;
    }
    area *a = lf__alloc(sizeof *a);
    if (!a) return lf__fail(LF_ERR_NOMEM, "scratch of a stream");
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaError_t error = cudaThreadExchangeStreamCaptureMode(&mode);
    if (error == cudaSuccess) {
        error = cudaMalloc(&a->memory, LF_LOOM_CUDA_SCRATCH);
        cudaThreadExchangeStreamCaptureMode(&mode);
    }
    if (error != cudaSuccess) {
        lf__free(a);
        return lf__cuda_fail(error, "scratch of a stream");
    }
    a->device = device;
    a->next = first;
    first = a;
    *out = a;
    return LF_OK;
}

static lf_status find_area(int32_t device, unsigned long long stream, unsigned long long capture, cudaGraph_t graph, area **out)
{
    for (area *a = first; a; a = a->next) {
        if (a->device != device || a->stream != stream || a->capture != capture) continue;
        if (!atomic_load_explicit(&a->used, memory_order_acquire)) continue;
        *out = a;
        return LF_OK;
    }
    lf_status rc = take_area(device, out);
    if (rc < 0) return rc;
    (*out)->stream = stream;
    (*out)->capture = capture;
    atomic_store_explicit(&(*out)->used, 1, memory_order_relaxed);
    cudaError_t error = capture ? tie_to_graph(*out, graph) : cudaSuccess;
    return error == cudaSuccess ? LF_OK : lf__cuda_fail(error, "tying scratch to a captured graph");
}

lf_status lf__loom_cuda_scratch(const lf__loom_call *call, void **out)
{
    const int32_t device = ((const cuda_context *)call->context)->index;
    unsigned long long stream, capture = 0;
    cudaGraph_t graph = NULL;
    cudaError_t error = stream_key(call->stream, &stream);
    if (error == cudaSuccess) error = capture_of(call->stream, &capture, &graph);
    if (error != cudaSuccess) return lf__cuda_fail(error, "asking a stream whether it is captured");
    area *a = NULL;
    pthread_mutex_lock(&lock);
    lf_status rc = find_area(device, stream, capture, graph, &a);
    pthread_mutex_unlock(&lock);
    if (rc == LF_OK) *out = a->memory;
    return rc;
}

const lf__loom_kernels lf__loom_cuda = {
    .size = sizeof(lf__loom_kernels),
    .layout = LF_LOOM_LAYOUT,
    .name = "cuda",
    .router = lf__loom_cuda_router,
    .router_backward = lf__loom_cuda_router_backward,
    .route = lf__loom_cuda_route,
    .sort = lf__loom_cuda_sort,
    .route_backward = lf__loom_cuda_route_backward,
    .permute = lf__loom_cuda_permute,
    .permute_backward = lf__loom_cuda_permute_backward,
    .combine = lf__loom_cuda_combine,
    .combine_backward = lf__loom_cuda_combine_backward,
    .adamw = lf__loom_cuda_adamw,
    .sumsq = lf__loom_cuda_sumsq,
    .add = lf__loom_cuda_add,
    .clip = lf__loom_cuda_clip,
    .add_norm = lf__loom_cuda_add_norm,
    .combine_add_norm = lf__loom_cuda_combine_add_norm,
    .add_norm_backward = lf__loom_cuda_add_norm_backward,
    .cross_entropy = lf__loom_cuda_cross_entropy,
    .experts_open = lf__loom_cuda_experts_open,
#ifdef LF_LOOM_CUTLASS
    .experts_close = lf__loom_cuda_experts_close,
    .experts_forward = lf__loom_cuda_experts_forward,
    .experts_backward = lf__loom_cuda_experts_backward,
#endif
};
