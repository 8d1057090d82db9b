/* SPDX-License-Identifier: Apache-2.0 */
/* Opening devices and calling through their table. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device_int.h"

struct lf_stream {
    lf_device *device;
    void *inner; /* the table's stream; NULL on the CPU: the calling thread */
};

struct lf_event {
    lf_device *device;
    void *inner;
};

struct lf_slab {
    lf_device *device;
    void *base;
    size_t reserved, committed, page;
};

size_t lf_dtype_bytes(int32_t dtype)
{
    static const uint8_t bytes[] = {0, 4, 2, 2, 8, 8, 4, 1, 1};
    return dtype > 0 && dtype < (int32_t)sizeof bytes ? bytes[dtype] : 0;
}

const char *lf_dtype_name(int32_t dtype)
{
    static const char *const names[] = {"?", "f32", "bf16", "f16", "f64", "i64", "i32", "u8", "bool"};
    return names[lf_dtype_bytes(dtype) ? dtype : 0];
}

/* ---- finding a table ------------------------------------------------------------------------------------------------ */

/* `lib<name>.so` beside the file that this code is in, then wherever the loader looks. */
static void *open_library(const char *name, char *why, size_t why_bytes)
{
    char path[4096];
    Dl_info self;
    void *library = NULL;
    if (dladdr(&lf__device_cpu, &self) && self.dli_fname) {
        const char *slash = strrchr(self.dli_fname, '/');
        int32_t dir = slash ? (int32_t)(slash - self.dli_fname) : 0;
        snprintf(path, sizeof path, "%.*s/%s", dir ? dir : 1, dir ? self.dli_fname : ".", name);
        library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    }
    if (!library) library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!library) snprintf(why, why_bytes, "%s", dlerror());
    return library;
}

/* Libraries stay loaded: drivers do not survive being unloaded. */
static lf_status find_table(const char *kind, const lf__device_ops **ops)
{
    if (strcmp(kind, "cpu") == 0) {
        *ops = &lf__device_cpu;
        return LF_OK;
    }
    if (strcmp(kind, "cuda") != 0) return LF_FAIL(LF_ERR_INVALID, "device '%s' is unknown, expected cpu, cuda or cuda:N", kind);
    char why[300] = "";
    void *library = open_library("libloongforge_cuda.so", why, sizeof why);
    if (!library)
        return LF_FAIL(LF_ERR_UNSUPPORTED,
                       "no CUDA device support: %s; hint: build with -DLF_CUDA=ON on a machine with nvcc, or use device cpu",
                       why);
    static const lf__host_ops host = {LF_DEVICE_ABI, sizeof host, lf__fail, lf_error_text, lf__log, lf__alloc, lf__free};
    lf__device_entry entry;
    *(void **)&entry = dlsym(library, "lf_device_entry_v1");
    const lf__device_ops *found = entry ? entry(&host) : NULL;
    if (!found)
        return LF_FAIL(LF_ERR_UNSUPPORTED, "libloongforge_cuda.so has no device table for ABI %d; hint: rebuild both together",
                       LF_DEVICE_ABI);
    if (found->abi != LF_DEVICE_ABI || found->size != sizeof(lf__device_ops))
        return LF_FAIL(LF_ERR_UNSUPPORTED,
                       "libloongforge_cuda.so has device ABI %u (%u bytes), expected %d (%zu bytes); hint: rebuild both together",
                       found->abi, found->size, LF_DEVICE_ABI, sizeof(lf__device_ops));
    *ops = found;
    return LF_OK;
}

lf_status lf_device_open(lf_device **out, const char *name)
{
    LF_CHECK_ARG(out && name, "out or name is NULL");
    *out = NULL;
    char kind[32];
    const char *colon = strchr(name, ':');
    size_t length = colon ? (size_t)(colon - name) : strlen(name);
    LF_CHECK_ARG(length > 0 && length < sizeof kind, "device '%s' is unknown, expected cpu, cuda or cuda:N", name);
    memcpy(kind, name, length);
    kind[length] = 0;
    char *end = NULL;
    long index = colon ? strtol(colon + 1, &end, 10) : 0;
    LF_CHECK_ARG(!colon || (end != colon + 1 && *end == 0 && index >= 0 && index < 1024),
                 "device '%s': expected a number behind ':'", name);
    const lf__device_ops *ops = NULL;
    lf_status rc = find_table(kind, &ops);
    if (rc < 0) return rc;
    lf_device *device = lf__alloc(sizeof *device);
    if (!device) return LF_FAIL(LF_ERR_NOMEM, "device %s", name);
    device->ops = ops;
    device->index = (int32_t)index;
    device->refs = 1;
    rc = ops->open(device->index, &device->context);
    if (rc < 0) {
        lf__free(device);
        return rc;
    }
    *out = device;
    return LF_OK;
}

lf_status lf__device_enter(lf_device *device, int32_t *before)
{
    *before = -1;
    return device->ops->enter ? device->ops->enter(device->context, before) : LF_OK;
}

void lf__device_leave(lf_device *device, int32_t before)
{
    if (device->ops->leave) device->ops->leave(device->context, before);
}

void lf__device_watch_only(lf_device *device)
{
    if (device->ops->watch_only) device->ops->watch_only(device->context);
}

lf_device *lf__device_ref(lf_device *device)
{
    __atomic_fetch_add(&device->refs, 1, __ATOMIC_RELAXED);
    return device;
}

void lf_device_close(lf_device *device)
{
    if (!device || __atomic_sub_fetch(&device->refs, 1, __ATOMIC_ACQ_REL) != 0) return;
    device->ops->close(device->context);
    lf__free(device);
}

lf_status lf_device_get_info(lf_device *device, lf_device_info *info)
{
    LF_CHECK_ARG(device && info, "device or info is NULL");
    LF_CHECK_ARG(info->size == sizeof *info, "lf_device_info: size is %zu, expected %zu", info->size, sizeof *info);
    *info = (lf_device_info){.size = sizeof *info, .kind = device->ops->kind, .index = device->index};
    return device->ops->info(device->context, info);
}

void lf_device_where(const lf_device *device, int32_t *kind, int32_t *index)
{
    *kind = device->ops->kind;
    *index = device->index;
}

lf_status lf__device_kernels(lf_device *device, const char *crew, const void **table)
{
    *table = device->ops->kernels ? device->ops->kernels(device->context, crew) : NULL;
    return *table ? LF_OK : LF_FAIL(LF_ERR_UNSUPPORTED, "the %s device has no kernels for %s", device->ops->name, crew);
}

/* ---- memory --------------------------------------------------------------------------------------------------------- */

lf_status lf_device_alloc(lf_device *device, size_t bytes, void **out)
{
    LF_CHECK_ARG(device && out, "device or out is NULL");
    *out = NULL;
    return device->ops->alloc(device->context, bytes, out);
}

void lf_device_free(lf_device *device, void *memory)
{
    if (memory) device->ops->free(device->context, memory);
}

lf_status lf_host_alloc(lf_device *device, size_t bytes, void **out)
{
    LF_CHECK_ARG(device && out, "device or out is NULL");
    *out = NULL;
    return device->ops->host_alloc(device->context, bytes, out);
}

void lf_host_free(lf_device *device, void *memory)
{
    if (memory) device->ops->host_free(device->context, memory);
}

static void *inner_of(const lf_stream *stream) { return stream ? stream->inner : NULL; }

lf_status lf_copy(lf_device *device, void *dst, const void *src, size_t bytes, lf_stream *stream)
{
    LF_CHECK_ARG(device && ((dst && src) || bytes == 0), "device, dst or src is NULL");
    return device->ops->copy(device->context, dst, src, bytes, inner_of(stream));
}

lf_status lf_fill(lf_device *device, void *dst, int32_t byte, size_t bytes, lf_stream *stream)
{
    LF_CHECK_ARG(device && (dst || bytes == 0), "device or dst is NULL");
    return device->ops->fill(device->context, dst, byte, bytes, inner_of(stream));
}

lf_status lf_slab_open(lf_device *device, size_t reserve_bytes, lf_slab **out)
{
    LF_CHECK_ARG(device && out && reserve_bytes > 0, "device or out is NULL, or no bytes to reserve");
    *out = NULL;
    lf_device_info info = {.size = sizeof info};
    lf_status rc = lf_device_get_info(device, &info);
    if (rc < 0) return rc;
    lf_slab *slab = lf__alloc(sizeof *slab);
    if (!slab) return LF_FAIL(LF_ERR_NOMEM, "slab");
    slab->page = (size_t)info.page_bytes;
    slab->reserved = (size_t)lf__round_up((int64_t)reserve_bytes, info.page_bytes);
    rc = device->ops->slab_reserve(device->context, slab->reserved, &slab->base);
    if (rc < 0) {
        lf__free(slab);
        return rc;
    }
    slab->device = lf__device_ref(device);
    *out = slab;
    return LF_OK;
}

void lf_slab_close(lf_slab *slab)
{
    if (!slab) return;
    slab->device->ops->slab_release(slab->device->context, slab->base, slab->reserved, slab->committed);
    lf_device_close(slab->device);
    lf__free(slab);
}

lf_status lf_slab_commit(lf_slab *slab, size_t bytes)
{
    LF_CHECK_ARG(slab, "slab is NULL");
    LF_CHECK_ARG(bytes <= slab->reserved, "slab: commit of %zu bytes, expected at most the %zu reserved", bytes, slab->reserved);
    size_t to = (size_t)lf__round_up((int64_t)bytes, (int64_t)slab->page);
    if (to <= slab->committed) return LF_OK;
    lf_status rc = slab->device->ops->slab_commit(slab->device->context, slab->base, slab->committed, to);
    if (rc == LF_OK) slab->committed = to;
    return rc;
}

void *lf_slab_base(lf_slab *slab) { return slab ? slab->base : NULL; }
size_t lf_slab_committed(lf_slab *slab) { return slab ? slab->committed : 0; }

/* ---- streams and events --------------------------------------------------------------------------------------------- */

static lf_status new_stream(lf_device *device, lf_status rc, void *inner, lf_stream **out)
{
    if (rc < 0) return rc;
    lf_stream *stream = lf__alloc(sizeof *stream);
    if (!stream) {
        device->ops->stream_close(device->context, inner);
        return LF_FAIL(LF_ERR_NOMEM, "stream");
    }
    *stream = (lf_stream){lf__device_ref(device), inner};
    *out = stream;
    return LF_OK;
}

lf_status lf_stream_open(lf_device *device, int32_t priority, lf_stream **out)
{
    LF_CHECK_ARG(device && out, "device or out is NULL");
    *out = NULL;
    void *inner = NULL;
    lf_status rc = device->ops->stream_open(device->context, priority, &inner);
    return new_stream(device, rc, inner, out);
}

lf_status lf_stream_wrap(lf_device *device, void *native, lf_stream **out)
{
    LF_CHECK_ARG(device && out, "device or out is NULL");
    *out = NULL;
    void *inner = NULL;
    lf_status rc = device->ops->stream_wrap(device->context, native, &inner);
    return new_stream(device, rc, inner, out);
}

void lf_stream_close(lf_stream *stream)
{
    if (!stream) return;
    stream->device->ops->stream_close(stream->device->context, stream->inner);
    lf_device_close(stream->device);
    lf__free(stream);
}

void *lf_stream_native(lf_stream *stream)
{
    return stream ? stream->device->ops->stream_native(stream->device->context, stream->inner) : NULL;
}

lf_status lf_stream_sync(lf_stream *stream)
{
    return stream ? stream->device->ops->stream_sync(stream->device->context, stream->inner) : LF_OK;
}

lf_status lf__stream_capture(lf_stream *stream, uint64_t *id)
{
    *id = 0;
    if (!stream || !stream->device->ops->stream_capture) return LF_OK;
    return stream->device->ops->stream_capture(stream->device->context, stream->inner, id);
}

lf_status lf_stream_run(lf_stream *stream, lf_host_fn fn, void *user)
{
    LF_CHECK_ARG(fn, "fn is NULL");
    return stream ? stream->device->ops->stream_run(stream->device->context, stream->inner, fn, user) : fn(user);
}

lf_status lf_event_open(lf_device *device, lf_event **out)
{
    LF_CHECK_ARG(device && out, "device or out is NULL");
    *out = NULL;
    lf_event *event = lf__alloc(sizeof *event);
    if (!event) return LF_FAIL(LF_ERR_NOMEM, "event");
    lf_status rc = device->ops->event_open(device->context, &event->inner);
    if (rc < 0) {
        lf__free(event);
        return rc;
    }
    event->device = lf__device_ref(device);
    *out = event;
    return LF_OK;
}

void lf_event_close(lf_event *event)
{
    if (!event) return;
    event->device->ops->event_close(event->device->context, event->inner);
    lf_device_close(event->device);
    lf__free(event);
}

lf_status lf_event_record(lf_event *event, lf_stream *stream)
{
    LF_CHECK_ARG(event, "event is NULL");
    return event->device->ops->event_record(event->device->context, event->inner, inner_of(stream));
}

lf_status lf__event_mark(lf_event *event, lf_stream *stream)
{
    const lf__device_ops *ops = event->device->ops;
    return (ops->event_mark ? ops->event_mark : ops->event_record)(event->device->context, event->inner, inner_of(stream));
}

lf_status lf_stream_wait(lf_stream *stream, lf_event *event)
{
    LF_CHECK_ARG(event, "event is NULL");
    return event->device->ops->stream_wait(event->device->context, inner_of(stream), event->inner);
}

lf_status lf_event_query(lf_event *event)
{
    LF_CHECK_ARG(event, "event is NULL");
    return event->device->ops->event_query(event->device->context, event->inner);
}

lf_status lf_event_sync(lf_event *event)
{
    LF_CHECK_ARG(event, "event is NULL");
    return event->device->ops->event_sync(event->device->context, event->inner);
}

lf_status lf_event_elapsed(lf_event *from, lf_event *to, double *seconds)
{
    LF_CHECK_ARG(from && to && seconds, "from, to or seconds is NULL");
    LF_CHECK_ARG(from->device->ops == to->device->ops, "events of two devices");
    return from->device->ops->event_elapsed(from->device->context, from->inner, to->inner, seconds);
}
