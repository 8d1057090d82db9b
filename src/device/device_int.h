/* SPDX-License-Identifier: Apache-2.0 */
/** @file device_int.h  The device table. CPU first and complete; others load from their own shared object.
 *
 *  A shared object `loongforge_<name>.so` exports `lf_device_entry_v1` (lf__device_entry), which takes the host's functions and
 *  returns its table; a table of another ABI is refused with both numbers. Crews get their kernels for a device by name through `kernels` (NULL: the crew answers
 *  LF_ERR_UNSUPPORTED); the CPU's kernels are the crew's own C code and need no look-up. */
#ifndef LF_DEVICE_INT_H
#define LF_DEVICE_INT_H

#include "base/base.h"
#include "loongforge/device.h"

#define LF_DEVICE_ABI 2

typedef struct lf__device_ops {
    uint32_t abi;
    uint32_t size; /* sizeof(lf__device_ops) */
    const char *name;
    int32_t kind; /* DLPack device type: 1 CPU, 2 CUDA */
    lf_status (*open)(int32_t index, void **context);
    void (*close)(void *context);
    lf_status (*info)(void *context, lf_device_info *info);
    lf_status (*alloc)(void *context, size_t bytes, void **out);
    void (*free)(void *context, void *memory);
    lf_status (*host_alloc)(void *context, size_t bytes, void **out);
    void (*host_free)(void *context, void *memory);
    /* `stream` is the table's own stream, NULL: now. */
    lf_status (*copy)(void *context, void *dst, const void *src, size_t bytes, void *stream);
    lf_status (*fill)(void *context, void *dst, int32_t byte, size_t bytes, void *stream);
    lf_status (*stream_open)(void *context, int32_t priority, void **stream);
    lf_status (*stream_wrap)(void *context, void *native, void **stream);
    void (*stream_close)(void *context, void *stream);
    void *(*stream_native)(void *context, void *stream);
    lf_status (*stream_sync)(void *context, void *stream);
    lf_status (*stream_run)(void *context, void *stream, lf_host_fn fn, void *user);
    lf_status (*event_open)(void *context, void **event);
    void (*event_close)(void *context, void *event);
    lf_status (*event_record)(void *context, void *event, void *stream);
    lf_status (*stream_wait)(void *context, void *stream, void *event);
    lf_status (*event_query)(void *context, void *event);
    lf_status (*event_sync)(void *context, void *event);
    lf_status (*event_elapsed)(void *context, void *from, void *to, double *seconds);
    lf_status (*slab_reserve)(void *context, size_t bytes, void **base);
    lf_status (*slab_commit)(void *context, void *base, size_t from, size_t to);
    void (*slab_release)(void *context, void *base, size_t reserved, size_t committed);
    const void *(*kernels)(void *context, const char *crew); /* (optional) default: none */
    /* (optional) Make the device current on the calling thread, for libraries that go by that; `before` is for leave. */
    lf_status (*enter)(void *context, int32_t *before);
    void (*leave)(void *context, int32_t before);
    /* (optional) The capture that `stream` takes part in, 0 for none. Default: none. */
    lf_status (*stream_capture)(void *context, void *stream, uint64_t *id);
    /* (optional) event_record whose only use is order: under capture it ties streams together. Default: event_record. */
    lf_status (*event_mark)(void *context, void *event, void *stream);
    /* (optional) For threads that only watch: from now on the calling thread's calls disturb no other thread's capture. */
    void (*watch_only)(void *context);
} lf__device_ops;

/** What a table's shared object may use of the library that loads it. */
typedef struct lf__host_ops {
    uint32_t abi, size;
    lf_status (*fail)(lf_status status, const char *format, ...);
    const char *(*error_text)(void);
    void (*log)(int32_t level, const char *format, ...);
    void *(*alloc)(size_t bytes);
    void (*free)(void *p);
} lf__host_ops;
typedef const lf__device_ops *(*lf__device_entry)(const lf__host_ops *host);

struct lf_device {
    const lf__device_ops *ops;
    void *context;
    int32_t index;
    int32_t refs; /* atomic */
};

extern const lf__device_ops lf__device_cpu;

/** Another reference to an open device. */
lf_device *lf__device_ref(lf_device *device);
static inline bool lf__device_is_cpu(const lf_device *device) { return device->ops->kind == 1; }
/** A crew's kernel table for a device that is not the CPU. LF_ERR_UNSUPPORTED names crew and device. */
lf_status lf__device_kernels(lf_device *device, const char *crew, const void **table);

/** Between the two, libraries that the calling thread calls (NCCL) work on this device. `leave` only after LF_OK. */
lf_status lf__device_enter(lf_device *device, int32_t *before);
void lf__device_leave(lf_device *device, int32_t before);
/** The calling thread only watches (events) and never takes part in a capture: its calls do not break those of other threads. */
void lf__device_watch_only(lf_device *device);
/** The capture that work on `stream` goes into; 0: none, it runs. */
lf_status lf__stream_capture(lf_stream *stream, uint64_t *id);
/** As lf_event_record, for order alone. Under capture this is an ordinary record: a stream that waits for it joins the capture,
 *  and the event must not be asked (query, sync, elapsed) before it has been recorded again outside. */
lf_status lf__event_mark(lf_event *event, lf_stream *stream);

#endif
