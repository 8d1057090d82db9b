/* SPDX-License-Identifier: Apache-2.0 */
/** @file cpu_int.h  Entries of the CPU's table that live in cpu_stream.c. A NULL stream is the calling thread. */
#ifndef LF_CPU_INT_H
#define LF_CPU_INT_H

#include "device/device_int.h"

lf_status lf__cpu_copy(void *context, void *dst, const void *src, size_t bytes, void *stream);
lf_status lf__cpu_fill(void *context, void *dst, int32_t byte, size_t bytes, void *stream);
lf_status lf__cpu_stream_open(void *context, int32_t priority, void **stream);
lf_status lf__cpu_stream_wrap(void *context, void *native, void **stream);
void lf__cpu_stream_close(void *context, void *stream);
void *lf__cpu_stream_native(void *context, void *stream);
lf_status lf__cpu_stream_sync(void *context, void *stream);
lf_status lf__cpu_stream_run(void *context, void *stream, lf_host_fn fn, void *user);
lf_status lf__cpu_event_open(void *context, void **event);
void lf__cpu_event_close(void *context, void *event);
lf_status lf__cpu_event_record(void *context, void *event, void *stream);
lf_status lf__cpu_stream_wait(void *context, void *stream, void *event);
lf_status lf__cpu_event_query(void *context, void *event);
lf_status lf__cpu_event_sync(void *context, void *event);
lf_status lf__cpu_event_elapsed(void *context, void *from, void *to, double *seconds);

#endif
