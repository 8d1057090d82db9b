/* SPDX-License-Identifier: Apache-2.0 */
/** @file device.h  Devices: memory, streams, events behind one table a device.
 *
 *  "cpu" is complete and always there: its streams are worker threads, so overlap is real and can be tested. Other devices
 *  live in their own shared object ("loongforge_cuda") that is loaded when first asked for.
 *
 *  Caveats. Handles do not survive fork(). Work on a stream runs in order; work on two streams only where an event says so.
 *  Memory given to a stream must stay valid until that work is done. A NULL lf_stream means: now, on the calling thread,
 *  finished when the call returns. */
#ifndef LOONGFORGE_DEVICE_H
#define LOONGFORGE_DEVICE_H

#include "loongforge/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct lf_device lf_device;
typedef struct lf_stream lf_stream;
typedef struct lf_event lf_event;
typedef struct lf_slab lf_slab;

/** Element types. Values are stored in files: never renumber. */
enum {
    LF_DTYPE_F32 = 1,
    LF_DTYPE_BF16 = 2,
    LF_DTYPE_F16 = 3,
    LF_DTYPE_F64 = 4,
    LF_DTYPE_I64 = 5,
    LF_DTYPE_I32 = 6,
    LF_DTYPE_U8 = 7,
    LF_DTYPE_BOOL = 8
};

/** Bytes of one element; 0 for an unknown dtype. */
LF_API size_t lf_dtype_bytes(int32_t dtype);
/** "f32", "bf16", …; "?" for an unknown dtype. Static. */
LF_API const char *lf_dtype_name(int32_t dtype);

/** What a device is, for reports and plans. */
typedef struct lf_device_info {
    size_t size;               /* set by the caller to sizeof */
    char name[128];            /* "cpu: AMD EPYC …", "cuda:0: NVIDIA H200" */
    int64_t memory_bytes;      /* total */
    int64_t memory_free_bytes; /* now */
    int64_t page_bytes;        /* granularity of lf_slab_commit */
    int32_t kind;              /* 1 CPU, 2 CUDA: the DLPack device type */
    int32_t index;
    int32_t n_units;                     /* cores or multiprocessors */
    int32_t capability;                  /* CUDA: major*10+minor; CPU: 0 */
    int32_t priority_low, priority_high; /* range for lf_stream_open; CUDA counts down: high is the smaller number */
} lf_device_info;

/** Open a device by name: "cpu", "cuda", "cuda:N".
 *  @param[out] out new handle, NULL on error; reference counted, release with lf_device_close.
 *  @return LF_OK; LF_ERR_INVALID (no such name); LF_ERR_UNSUPPORTED (no driver, or its shared object is missing: the error
 *  says which); LF_ERR_DEVICE (the driver's own text). Threads: any. */
LF_API lf_status lf_device_open(lf_device **out, const char *name);
LF_API void lf_device_close(lf_device *device);
LF_API lf_status lf_device_get_info(lf_device *device, lf_device_info *info);

/** Which device this is, without asking it anything: kind 1 CPU, 2 CUDA (the DLPack device type), and its index. */
LF_API void lf_device_where(const lf_device *device, int32_t *kind, int32_t *index);

/** Plain device memory, 256-byte aligned.  @return LF_OK; LF_ERR_NOMEM (says bytes asked and free); LF_ERR_DEVICE.
 *  lf_device_free(NULL) is allowed; the caller has finished all work on the memory. */
LF_API lf_status lf_device_alloc(lf_device *device, size_t bytes, void **out);
LF_API void lf_device_free(lf_device *device, void *memory);

/** Host memory that the device reads and writes directly (page-locked on CUDA). Same errors. */
LF_API lf_status lf_host_alloc(lf_device *device, size_t bytes, void **out);
LF_API void lf_host_free(lf_device *device, void *memory);

/** Copy between any two of: device memory, host memory. Asynchronous on `stream`; NULL stream: done on return. */
LF_API lf_status lf_copy(lf_device *device, void *dst, const void *src, size_t bytes, lf_stream *stream);
LF_API lf_status lf_fill(lf_device *device, void *dst, int32_t byte, size_t bytes, lf_stream *stream);

/** A stream with a priority within the device's range (0 is the default).
 *  lf_stream_close waits for the work queued on it. */
LF_API lf_status lf_stream_open(lf_device *device, int32_t priority, lf_stream **out);
LF_API void lf_stream_close(lf_stream *stream);

/** Borrow a native stream (CUDA: cudaStream_t, such as the current stream of PyTorch). Closing does not destroy it.
 *  On the CPU `native` must be NULL and the stream is the calling thread. */
LF_API lf_status lf_stream_wrap(lf_device *device, void *native, lf_stream **out);
/** The native handle (CUDA: cudaStream_t; CPU: NULL). */
LF_API void *lf_stream_native(lf_stream *stream);

/** Wait on the host until all work queued so far is done. Errors of that work are returned here. */
LF_API lf_status lf_stream_sync(lf_stream *stream);

/** Run a host function in stream order. It must not call the device. An error it returns is kept by the stream, later host
 *  functions (on the CPU also copies and fills) are skipped, and the next lf_stream_sync returns it once. */
typedef lf_status (*lf_host_fn)(void *user);
LF_API lf_status lf_stream_run(lf_stream *stream, lf_host_fn fn, void *user);

/** Events mark a place in a stream. An event never recorded counts as done. */
LF_API lf_status lf_event_open(lf_device *device, lf_event **out);
LF_API void lf_event_close(lf_event *event);
/** On a CUDA stream under capture the record becomes part of the graph: every replay records anew (an external record). */
LF_API lf_status lf_event_record(lf_event *event, lf_stream *stream);
/** Make later work on `stream` wait for the event as recorded now. */
LF_API lf_status lf_stream_wait(lf_stream *stream, lf_event *event);
/** LF_OK when done, LF_AGAIN when not. */
LF_API lf_status lf_event_query(lf_event *event);
LF_API lf_status lf_event_sync(lf_event *event);
/** Seconds between two done events. LF_ERR_STATE when one was never recorded, LF_AGAIN when one is not done. */
LF_API lf_status lf_event_elapsed(lf_event *from, lf_event *to, double *seconds);

/** A slab: one reserved range of device addresses, backed by memory as far as it is committed. Grows without moving.
 *  @param reserve_bytes addresses to reserve, rounded up to the device's page.
 *  @return LF_OK; LF_ERR_NOMEM; LF_ERR_DEVICE. Release with lf_slab_close. */
LF_API lf_status lf_slab_open(lf_device *device, size_t reserve_bytes, lf_slab **out);
LF_API void lf_slab_close(lf_slab *slab);
/** Back [0, bytes) with memory (zeroed on first commit). All or nothing: on error the slab is as before. */
LF_API lf_status lf_slab_commit(lf_slab *slab, size_t bytes);
LF_API void *lf_slab_base(lf_slab *slab);
LF_API size_t lf_slab_committed(lf_slab *slab);

#ifdef __cplusplus
}
#endif
#endif
