/* SPDX-License-Identifier: Apache-2.0 */
/* A CUDA device: memory, streams, events. Slabs are in cuda_slab.c. A NULL stream means now: the legacy default stream, which
 * waits for PyTorch's default stream, and the host waits for it. */
#include <stdio.h>
#include <string.h>

#include "cuda_int.h"
#include "cuda_slab.h"

/* Make the context's device current for this thread, and put the old one back. */
typedef struct guard {
    int before, mine;
} guard;

static guard enter(const void *context)
{
    guard g = {0, ((const cuda_context *)context)->index};
    cudaGetDevice(&g.before);
    if (g.before != g.mine) cudaSetDevice(g.mine);
    return g;
}

static void leave(guard g)
{
    if (g.before != g.mine) cudaSetDevice(g.before);
}

static cudaStream_t native_of(void *stream) { return stream ? ((cuda_stream *)stream)->native : NULL; }

/* The end of every call that works on a stream: an error by name, and for NULL streams a wait. */
static lf_status finish(cudaError_t error, const char *what, void *stream, guard g)
{
    if (error == cudaSuccess && !stream) error = cudaStreamSynchronize(NULL);
    lf_status rc = error == cudaSuccess ? LF_OK : lf__cuda_fail(error, what);
    leave(g);
    return rc;
}

static lf_status cuda_enter(void *context, int32_t *before)
{
    int was = 0;
    LF_CUDA(cudaGetDevice(&was));
    LF_CUDA(cudaSetDevice(((const cuda_context *)context)->index));
    *before = was;
    return LF_OK;
}

static void cuda_leave(void *context, int32_t before)
{
    if (before != ((const cuda_context *)context)->index) cudaSetDevice(before);
}

/* In the default mode a query by this thread would break a capture that another one began in mode `global`. */
static void cuda_watch_only(void *context)
{
    (void)context;
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaThreadExchangeStreamCaptureMode(&mode);
}

static lf_status cuda_open(int32_t index, void **out)
{
    int n = 0;
    cudaError_t error = cudaGetDeviceCount(&n);
    if (error != cudaSuccess)
        return lf__fail(LF_ERR_UNSUPPORTED, "no CUDA device: %s; hint: is the driver installed?", cudaGetErrorString(error));
    if (index >= n) return lf__fail(LF_ERR_INVALID, "device cuda:%d, expected cuda:0 to cuda:%d", index, n - 1);
    struct cudaDeviceProp p;
    LF_CUDA(cudaGetDeviceProperties(&p, index));
    cuda_context *c = lf__alloc(sizeof *c);
    if (!c) return lf__fail(LF_ERR_NOMEM, "device cuda:%d", index);
    c->index = index;
    c->n_units = p.multiProcessorCount;
    c->capability = p.major * 10 + p.minor;
    guard g = enter(c);
    int low = 0, high = 0;
    error = cudaFree(NULL); /* makes the primary context, which PyTorch shares */
    if (error == cudaSuccess) error = cudaDeviceGetStreamPriorityRange(&low, &high);
    leave(g);
    c->priority_low = low;
    c->priority_high = high;
    lf_status rc = error == cudaSuccess ? lf__cuda_slab_page(index, &c->page) : lf__cuda_fail(error, "opening the CUDA context");
    if (rc < 0) {
        lf__free(c);
        return rc;
    }
    *out = c;
    return LF_OK;
}

static void cuda_close(void *context) { lf__free(context); }

static lf_status cuda_info(void *context, lf_device_info *info)
{
    const cuda_context *c = context;
    struct cudaDeviceProp p;
    size_t free_bytes = 0, total = 0;
    LF_CUDA(cudaGetDeviceProperties(&p, c->index));
    guard g = enter(context);
    cudaError_t error = cudaMemGetInfo(&free_bytes, &total);
    leave(g);
    if (error != cudaSuccess) return lf__cuda_fail(error, "cudaMemGetInfo");
    snprintf(info->name, sizeof info->name, "cuda:%d: %.100s", c->index, p.name);
    info->memory_bytes = (int64_t)total;
    info->memory_free_bytes = (int64_t)free_bytes;
    info->page_bytes = (int64_t)c->page;
    info->n_units = c->n_units;
    info->capability = c->capability;
    info->priority_low = c->priority_low;
    info->priority_high = c->priority_high;
    return LF_OK;
}

/* ---- memory --------------------------------------------------------------------------------------------------------- */

static lf_status cuda_alloc(void *context, size_t bytes, void **out)
{
    guard g = enter(context);
    cudaError_t error = cudaMalloc(out, bytes ? bytes : 1);
    size_t free_bytes = 0, total = 0;
    if (error != cudaSuccess) {
        cudaGetLastError();
        cudaMemGetInfo(&free_bytes, &total);
    }
    leave(g);
    if (error == cudaSuccess) return LF_OK;
    *out = NULL;
    if (error != cudaErrorMemoryAllocation) return lf__cuda_fail(error, "cudaMalloc");
    return lf__fail(LF_ERR_NOMEM, "%zu bytes on cuda:%d, %zu of %zu are free", bytes, g.mine, free_bytes, total);
}

static void cuda_free(void *context, void *memory)
{
    guard g = enter(context);
    cudaFree(memory);
    leave(g);
}

static lf_status cuda_host_alloc(void *context, size_t bytes, void **out)
{
    guard g = enter(context);
    cudaError_t error = cudaHostAlloc(out, bytes ? bytes : 1, cudaHostAllocDefault);
    leave(g);
    if (error == cudaSuccess) return LF_OK;
    *out = NULL;
    return lf__cuda_fail(error, "cudaHostAlloc");
}

static void cuda_host_free(void *context, void *memory)
{
    (void)context;
    cudaFreeHost(memory);
}

static lf_status cuda_copy(void *context, void *dst, const void *src, size_t bytes, void *stream)
{
    guard g = enter(context);
    return finish(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, native_of(stream)), "copy", stream, g);
}

static lf_status cuda_fill(void *context, void *dst, int32_t byte, size_t bytes, void *stream)
{
    guard g = enter(context);
    return finish(cudaMemsetAsync(dst, byte, bytes, native_of(stream)), "fill", stream, g);
}

/* ---- streams -------------------------------------------------------------------------------------------------------- */

static lf_status new_stream(cudaStream_t native, bool owned, void **out)
{
    cuda_stream *s = lf__alloc(sizeof *s);
    if (!s) {
        if (owned) cudaStreamDestroy(native);
        return lf__fail(LF_ERR_NOMEM, "stream");
    }
    s->native = native;
    s->owned = owned;
    *out = s;
    return LF_OK;
}

static lf_status cuda_stream_open(void *context, int32_t priority, void **out)
{
    const cuda_context *c = context;
    if (priority > c->priority_low || priority < c->priority_high)
        return lf__fail(LF_ERR_INVALID, "stream priority %d, expected %d (highest) to %d", priority, c->priority_high,
                        c->priority_low);
    guard g = enter(context);
    cudaStream_t native = NULL;
    cudaError_t error = cudaStreamCreateWithPriority(&native, cudaStreamNonBlocking, priority);
    leave(g);
    return error == cudaSuccess ? new_stream(native, true, out) : lf__cuda_fail(error, "cudaStreamCreateWithPriority");
}

static lf_status cuda_stream_wrap(void *context, void *native, void **out)
{
    (void)context;
    return new_stream(native, false, out);
}

static void cuda_stream_close(void *context, void *stream)
{
    cuda_stream *s = stream;
    if (!s) return;
    guard g = enter(context);
    if (s->owned) {
        cudaStreamSynchronize(s->native);
        cudaStreamDestroy(s->native);
    }
    leave(g);
    lf__free(s);
}

static void *cuda_stream_native(void *context, void *stream)
{
    (void)context;
    return native_of(stream);
}

/* The first error of a host function since the last sync is told once. */
static lf_status take_fault(cuda_stream *s)
{
    if (!s || __atomic_load_n(&s->fault.status, __ATOMIC_ACQUIRE) >= 0) return LF_OK;
    lf_status rc = lf__fail(s->fault.status, "%s", s->fault.text);
    __atomic_store_n(&s->fault.status, LF_OK, __ATOMIC_RELEASE);
    return rc;
}

static lf_status cuda_stream_sync(void *context, void *stream)
{
    guard g = enter(context);
    lf_status rc = finish(cudaStreamSynchronize(native_of(stream)), "waiting for a stream", stream, g);
    return rc < 0 ? rc : take_fault(stream);
}

typedef struct host_job {
    lf_host_fn fn;
    void *user;
    cuda_stream *stream;
} host_job;

/* Runs on a driver thread, in stream order, one at a time a stream. */
static void CUDART_CB run_host_job(void *user)
{
    host_job *job = user;
    cuda_stream *s = job->stream;
    if (__atomic_load_n(&s->fault.status, __ATOMIC_ACQUIRE) >= 0) {
        lf_status rc = job->fn(job->user);
        if (rc < 0) {
            snprintf(s->fault.text, sizeof s->fault.text, "%.511s", lf__cuda_error_text());
            __atomic_store_n(&s->fault.status, rc, __ATOMIC_RELEASE);
        }
    }
    lf__free(job);
}

static lf_status cuda_stream_run(void *context, void *stream, lf_host_fn fn, void *user)
{
    host_job *job = lf__alloc(sizeof *job);
    if (!job) return lf__fail(LF_ERR_NOMEM, "queueing a host function");
    *job = (host_job){fn, user, stream};
    guard g = enter(context);
    cudaError_t error = cudaLaunchHostFunc(native_of(stream), run_host_job, job);
    if (error != cudaSuccess) lf__free(job);
    return finish(error, "cudaLaunchHostFunc", stream, g);
}

static lf_status cuda_stream_capture(void *context, void *stream, uint64_t *id)
{
    guard g = enter(context);
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    cudaError_t error = cudaStreamIsCapturing(native_of(stream), &status);
    unsigned long long number = 0;
    if (error == cudaSuccess && status != cudaStreamCaptureStatusNone)
#if CUDART_VERSION >= 13000
        error = cudaStreamGetCaptureInfo(native_of(stream), &status, &number, NULL, NULL, NULL, NULL);
#else
        error = cudaStreamGetCaptureInfo_v2(native_of(stream), &status, &number, NULL, NULL, NULL);
#endif
    leave(g);
    if (error == cudaErrorStreamCaptureImplicit) { /* the legacy stream while another one is captured: not part of it */
        cudaGetLastError();
        error = cudaSuccess;
    }
    *id = number;
    if (error != cudaSuccess) return lf__cuda_fail(error, "cudaStreamIsCapturing");
    return status == cudaStreamCaptureStatusInvalidated
               ? lf__fail(LF_ERR_STATE, "the stream's capture was invalidated by an earlier call")
               : LF_OK;
}

/* ---- events --------------------------------------------------------------------------------------------------------- */

typedef struct cuda_event {
    cudaEvent_t native;
    bool recorded;
} cuda_event;

static lf_status cuda_event_open(void *context, void **out)
{
    cuda_event *e = lf__alloc(sizeof *e);
    if (!e) return lf__fail(LF_ERR_NOMEM, "event");
    guard g = enter(context);
    cudaError_t error = cudaEventCreate(&e->native);
    leave(g);
    if (error != cudaSuccess) {
        lf__free(e);
        return lf__cuda_fail(error, "cudaEventCreate");
    }
    *out = e;
    return LF_OK;
}

static void cuda_event_close(void *context, void *event)
{
    guard g = enter(context);
    cudaEventDestroy(((cuda_event *)event)->native);
    leave(g);
    lf__free(event);
}

static lf_status cuda_event_mark(void *context, void *event, void *stream)
{
    cuda_event *e = event;
    guard g = enter(context);
    const cudaError_t error = cudaEventRecord(e->native, native_of(stream));
    if (error == cudaSuccess) e->recorded = true;
    return finish(error, "cudaEventRecord", stream, g);
}

/* While the stream is being captured the record becomes an external node, so that replays time themselves. */
static lf_status cuda_event_record(void *context, void *event, void *stream)
{
    cuda_event *e = event;
    guard g = enter(context);
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    cudaError_t error = stream ? cudaStreamIsCapturing(native_of(stream), &status) : cudaSuccess;
    if (error == cudaSuccess)
        error =
            cudaEventRecordWithFlags(e->native, native_of(stream),
                                     status == cudaStreamCaptureStatusActive ? cudaEventRecordExternal : cudaEventRecordDefault);
    if (error == cudaSuccess) e->recorded = true;
    return finish(error, "cudaEventRecord", stream, g);
}

static lf_status cuda_stream_wait(void *context, void *stream, void *event)
{
    cuda_event *e = event;
    if (!e->recorded) return LF_OK;
    guard g = enter(context);
    return finish(cudaStreamWaitEvent(native_of(stream), e->native, cudaEventWaitDefault), "cudaStreamWaitEvent", stream, g);
}

static lf_status cuda_event_query(void *context, void *event)
{
    (void)context;
    const cuda_event *e = event;
    cudaError_t error = e->recorded ? cudaEventQuery(e->native) : cudaSuccess;
    if (error == cudaErrorNotReady) {
        cudaGetLastError();
        return LF_AGAIN;
    }
    return error == cudaSuccess ? LF_OK : lf__cuda_fail(error, "cudaEventQuery");
}

static lf_status cuda_event_sync(void *context, void *event)
{
    (void)context;
    const cuda_event *e = event;
    if (e->recorded) LF_CUDA(cudaEventSynchronize(e->native));
    return LF_OK;
}

static lf_status cuda_event_elapsed(void *context, void *from_, void *to_, double *seconds)
{
    (void)context;
    const cuda_event *from = from_, *to = to_;
    if (!from->recorded || !to->recorded)
        return lf__fail(LF_ERR_STATE, "elapsed: the %s event was never recorded", from->recorded ? "second" : "first");
    float ms = 0;
    cudaError_t error = cudaEventElapsedTime(&ms, from->native, to->native);
    if (error == cudaErrorNotReady) {
        cudaGetLastError();
        return LF_AGAIN;
    }
    if (error != cudaSuccess) return lf__cuda_fail(error, "cudaEventElapsedTime");
    *seconds = (double)ms * 1e-3;
    return LF_OK;
}

const lf__device_ops lf__device_cuda = {
    .abi = LF_DEVICE_ABI,
    .size = sizeof(lf__device_ops),
    .name = "cuda",
    .kind = 2,
    .open = cuda_open,
    .close = cuda_close,
    .info = cuda_info,
    .alloc = cuda_alloc,
    .free = cuda_free,
    .host_alloc = cuda_host_alloc,
    .host_free = cuda_host_free,
    .copy = cuda_copy,
    .fill = cuda_fill,
    .stream_open = cuda_stream_open,
    .stream_wrap = cuda_stream_wrap,
    .stream_close = cuda_stream_close,
    .stream_native = cuda_stream_native,
    .stream_sync = cuda_stream_sync,
    .stream_run = cuda_stream_run,
    .event_open = cuda_event_open,
    .event_close = cuda_event_close,
    .event_record = cuda_event_record,
    .stream_wait = cuda_stream_wait,
    .event_query = cuda_event_query,
    .event_sync = cuda_event_sync,
    .event_elapsed = cuda_event_elapsed,
    .slab_reserve = lf__cuda_slab_reserve,
    .slab_commit = lf__cuda_slab_commit,
    .slab_release = lf__cuda_slab_release,
    .kernels = lf__cuda_kernels,
    .enter = cuda_enter,
    .leave = cuda_leave,
    .stream_capture = cuda_stream_capture,
    .event_mark = cuda_event_mark,
    .watch_only = cuda_watch_only,
};
