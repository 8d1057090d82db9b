/* SPDX-License-Identifier: Apache-2.0 */
/* Stands in for libloongforge_cuda.so: a device "cuda" whose streams are the CPU's worker threads, so that what sits on top of a GPU
 * (NexusSync over NCCL) can be tested without one. A native stream is a pointer to the CPU's stream; fake_nccl.c queues its
 * "kernels" there. It carries a copy of src/base, src/device/cpu and NexusSync's top-k; errors go to the library that loaded it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/cpu/cpu_int.h"
#include "fake_cuda.h"
#include "nexus/nexus_int.h"

typedef struct fake_stream {
    void *cpu; /* NULL: the calling thread */
    bool owned;
} fake_stream;

typedef struct fake_event {
    void *cpu;
    bool captured; /* recorded for order under capture: asking it is an error, as on CUDA */
} fake_event;

static const lf__host_ops *host;
static _Atomic uint64_t capture;
static _Atomic int32_t last_priority;
static _Thread_local int32_t current = 0;

/* ---- errors, as in src/device/cuda/cuda_host.c ---- */

lf_status lf__fail(lf_status status, const char *format, ...)
{
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return host->fail(status, "%s", text);
}
lf_status lf__fail_errno(int err, const char *format, ...) { return lf__fail(LF_ERR_IO, "%s: %s", format, strerror(err)); }
const char *lf_error_text(void) { return host->error_text(); }
void lf__fault_keep(lf__fault *fault, lf_status status)
{
    if (status >= 0 || fault->status < 0) return;
    fault->status = status;
    snprintf(fault->text, sizeof fault->text, "%.511s", lf_error_text());
}
lf_status lf__fault_raise(const lf__fault *fault)
{
    return fault->status < 0 ? lf__fail(fault->status, "%s", fault->text) : LF_OK;
}
void lf__log(int32_t level, const char *format, ...) { host->log(level, "%s", format); }

/* ---- what tests plant and ask ---- */

void fake_cuda_capture(uint64_t id) { capture = id; }
uint64_t fake_cuda_capturing(void) { return capture; }
int32_t fake_cuda_last_priority(void) { return last_priority; }
int32_t fake_cuda_current(void) { return current; }
int32_t fake_cuda_run(void *native, int32_t (*fn)(void *), void *user) { return lf__cpu_stream_run(NULL, native, fn, user); }

/* ---- the table ---- */

static void *cpu_of(void *stream) { return stream ? ((fake_stream *)stream)->cpu : NULL; }

static lf_status fake_open(int32_t index, void **context)
{
    *context = (void *)(intptr_t)(index + 1);
    return LF_OK;
}
static void fake_close(void *context) { (void)context; }

static lf_status fake_info(void *context, lf_device_info *info)
{
    lf_status rc = lf__device_cpu.info(NULL, info);
    snprintf(info->name, sizeof info->name, "cuda:%d: fake", (int)(intptr_t)context - 1);
    info->priority_low = 0;
    info->priority_high = -5;
    info->capability = 90;
    return rc;
}

static lf_status new_stream(void *cpu, bool owned, void **out)
{
    fake_stream *s = calloc(1, sizeof *s);
    if (!s) return lf__fail(LF_ERR_NOMEM, "stream");
    *s = (fake_stream){cpu, owned};
    *out = s;
    return LF_OK;
}

static lf_status fake_stream_open(void *context, int32_t priority, void **out)
{
    (void)context;
    void *cpu;
    if (priority > 0 || priority < -5)
        return lf__fail(LF_ERR_INVALID, "stream priority %d, expected -5 (highest) to 0", priority);
    last_priority = priority;
    lf_status rc = lf__cpu_stream_open(NULL, 0, &cpu);
    return rc < 0 ? rc : new_stream(cpu, true, out);
}

static lf_status fake_stream_wrap(void *context, void *native, void **out)
{
    (void)context;
    return new_stream(native, false, out);
}

static void fake_stream_close(void *context, void *stream)
{
    (void)context;
    fake_stream *s = stream;
    if (s && s->owned) lf__cpu_stream_close(NULL, s->cpu);
    free(s);
}

static void *fake_stream_native(void *context, void *stream)
{
    (void)context;
    return cpu_of(stream);
}

static lf_status fake_stream_sync(void *context, void *stream) { return lf__cpu_stream_sync(context, cpu_of(stream)); }
static lf_status fake_stream_run(void *context, void *stream, lf_host_fn fn, void *user)
{
    return lf__cpu_stream_run(context, cpu_of(stream), fn, user);
}
static lf_status fake_copy(void *context, void *dst, const void *src, size_t bytes, void *stream)
{
    return lf__cpu_copy(context, dst, src, bytes, cpu_of(stream));
}
static lf_status fake_fill(void *context, void *dst, int32_t byte, size_t bytes, void *stream)
{
    return lf__cpu_fill(context, dst, byte, bytes, cpu_of(stream));
}

static lf_status fake_event_open(void *context, void **out)
{
    fake_event *e = calloc(1, sizeof *e);
    if (!e) return lf__fail(LF_ERR_NOMEM, "event");
    lf_status rc = lf__cpu_event_open(context, &e->cpu);
    if (rc < 0) free(e);
    else *out = e;
    return rc;
}

static void fake_event_close(void *context, void *event)
{
    lf__cpu_event_close(context, ((fake_event *)event)->cpu);
    free(event);
}

static lf_status record(void *event, void *stream, bool captured)
{
    fake_event *e = event;
    e->captured = captured;
    return lf__cpu_event_record(NULL, e->cpu, cpu_of(stream));
}
static lf_status fake_event_record(void *context, void *event, void *stream)
{
    (void)context;
    return record(event, stream, false);
}
static lf_status fake_event_mark(void *context, void *event, void *stream)
{
    (void)context;
    return record(event, stream, capture != 0);
}
static lf_status fake_stream_wait(void *context, void *stream, void *event)
{
    return lf__cpu_stream_wait(context, cpu_of(stream), ((fake_event *)event)->cpu);
}

static lf_status may_ask(const fake_event *e)
{
    return e->captured ? lf__fail(LF_ERR_DEVICE, "a captured event was asked (cudaErrorCapturedEvent)") : LF_OK;
}
static lf_status fake_event_query(void *context, void *event)
{
    lf_status rc = may_ask(event);
    return rc < 0 ? rc : lf__cpu_event_query(context, ((fake_event *)event)->cpu);
}
static lf_status fake_event_sync(void *context, void *event)
{
    lf_status rc = may_ask(event);
    return rc < 0 ? rc : lf__cpu_event_sync(context, ((fake_event *)event)->cpu);
}
static lf_status fake_event_elapsed(void *context, void *from, void *to, double *seconds)
{
    lf_status rc = may_ask(from);
    if (rc == LF_OK) rc = may_ask(to);
    return rc < 0 ? rc : lf__cpu_event_elapsed(context, ((fake_event *)from)->cpu, ((fake_event *)to)->cpu, seconds);
}

static lf_status fake_stream_capture(void *context, void *stream, uint64_t *id)
{
    (void)context, (void)stream;
    *id = capture;
    return capture == UINT64_MAX ? lf__fail(LF_ERR_STATE, "the stream's capture was invalidated by an earlier call") : LF_OK;
}

static lf_status fake_enter(void *context, int32_t *before)
{
    *before = current;
    current = (int32_t)(intptr_t)context;
    return LF_OK;
}
static void fake_leave(void *context, int32_t before)
{
    (void)context;
    current = before;
}

/* ---- NexusSync's kernels ---- */

typedef struct scale_job {
    void *data;
    int64_t count;
    int32_t dtype;
    float factor;
} scale_job;

static lf_status run_scale(void *user)
{
    scale_job *j = user;
    for (int64_t i = 0; i < j->count; i++) {
        uint16_t *half = j->data;
        if (j->dtype == LF_DTYPE_F32) ((float *)j->data)[i] *= j->factor;
        else half[i] = lf__bf16_from_f32(lf__f32_from_bf16(half[i]) * j->factor);
    }
    free(j);
    return LF_OK;
}

static lf_status scale(void *context, void *stream, int32_t now, void *data, int64_t count, int32_t dtype, float factor)
{
    scale_job *j = malloc(sizeof *j);
    if (!j) return lf__fail(LF_ERR_NOMEM, "scale");
    *j = (scale_job){data, count, dtype, factor};
    return lf__cpu_stream_run(context, now ? NULL : stream, run_scale, j);
}

typedef struct topk_job {
    lf_topk t;
    int32_t part;
} topk_job;

static lf_status run_topk(void *user)
{
    topk_job *j = user;
    lf_status rc = lf__nexus_cpu_topk(NULL, NULL, 1, &j->t, j->part);
    free(j);
    return rc;
}

static lf_status topk(void *context, void *stream, int32_t now, const lf_topk *t, int32_t part)
{
    topk_job *j = malloc(sizeof *j);
    if (!j) return lf__fail(LF_ERR_NOMEM, "topk");
    *j = (topk_job){*t, part};
    return lf__cpu_stream_run(context, now ? NULL : stream, run_topk, j);
}

typedef struct cast_job {
    float *data;
    uint16_t *wire;
    int64_t count;
    float factor; /* 0: narrow */
} cast_job;

static lf_status run_cast(void *user)
{
    cast_job *j = user;
    for (int64_t i = 0; i < j->count; i++) {
        if (j->factor == 0) j->wire[i] = lf__bf16_from_f32(j->data[i]);
        else j->data[i] = lf__f32_from_bf16(j->wire[i]) * j->factor;
    }
    free(j);
    return LF_OK;
}

static lf_status cast(void *context, void *stream, int32_t now, cast_job job)
{
    cast_job *j = malloc(sizeof *j);
    if (!j) return lf__fail(LF_ERR_NOMEM, "cast");
    *j = job;
    return lf__cpu_stream_run(context, now ? NULL : stream, run_cast, j);
}

static lf_status narrow(void *context, void *stream, int32_t now, const float *data, uint16_t *wire, int64_t count)
{
    return cast(context, stream, now, (cast_job){(float *)(uintptr_t)data, wire, count, 0});
}

static lf_status widen(void *context, void *stream, int32_t now, const uint16_t *wire, float *data, int64_t count, float factor)
{
    return cast(context, stream, now, (cast_job){data, (uint16_t *)(uintptr_t)wire, count, factor});
}

static const lf__nexus_kernels nexus_kernels = {sizeof nexus_kernels, "fake", scale, topk, narrow, widen};

static const void *fake_kernels(void *context, const char *crew)
{
    (void)context;
    return strcmp(crew, "nexus") == 0 ? &nexus_kernels : NULL;
}

static lf__device_ops table;

FAKE_API const lf__device_ops *lf_device_entry_v1(const lf__host_ops *from);
const lf__device_ops *lf_device_entry_v1(const lf__host_ops *from)
{
    host = from;
    table = lf__device_cpu;
    table.name = "cuda";
    table.kind = 2;
    table.open = fake_open;
    table.close = fake_close;
    table.info = fake_info;
    table.copy = fake_copy;
    table.fill = fake_fill;
    table.stream_open = fake_stream_open;
    table.stream_wrap = fake_stream_wrap;
    table.stream_close = fake_stream_close;
    table.stream_native = fake_stream_native;
    table.stream_sync = fake_stream_sync;
    table.stream_run = fake_stream_run;
    table.event_open = fake_event_open;
    table.event_close = fake_event_close;
    table.event_record = fake_event_record;
    table.event_mark = fake_event_mark;
    table.stream_wait = fake_stream_wait;
    table.event_query = fake_event_query;
    table.event_sync = fake_event_sync;
    table.event_elapsed = fake_event_elapsed;
    table.stream_capture = fake_stream_capture;
    table.enter = fake_enter;
    table.leave = fake_leave;
    table.kernels = fake_kernels;
    return &table;
}
