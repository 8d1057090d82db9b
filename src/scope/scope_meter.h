/* SPDX-License-Identifier: Apache-2.0 */
/** @file scope_meter.h  What a stamp does, the same on every device: C for the CPU, CUDA C for the kernel. */
#ifndef LF_SCOPE_METER_H
#define LF_SCOPE_METER_H

#include <stdint.h>

#include "loongforge/scope.h"

#ifdef __CUDACC__
#define LF_METER_FN static __device__ __forceinline__
#else
#define LF_METER_FN static inline
#endif

enum { LF_STAMP_OPEN = 0, LF_STAMP_BEGIN = 1, LF_STAMP_END = 2, LF_STAMP_CLOSE = 3 };
enum { LF_METER_NEST = 8 };

/** One step as its stamps saw it; memory that host and device share. OPEN writes the first line, CLOSE the rest. */
typedef struct lf__meter_page {
    int64_t opened, begin_ns; /* the step's ticket; on the device's clock */
    int64_t closed, end_ns;
    int64_t part_ns[LF_N_PARTS];
    int32_t seen;  /* bit p: part p was begun */
    int32_t wrong; /* begins and ends out of order */
} lf__meter_page;

/** The open step, in the device's own memory. Nothing here is the host's to touch. */
typedef struct lf__meter {
    lf__meter_page *page;
    int64_t ticket, last_ns;
    int64_t part_ns[LF_N_PARTS];
    int32_t seen, wrong, n_open, open[LF_METER_NEST];
} lf__meter;

typedef struct lf__stamp {
    lf__meter *meter;
    lf__meter_page *page; /* OPEN alone */
    int64_t ticket;       /* OPEN and CLOSE */
    int32_t what, part;
} lf__stamp;

/** A device's kernels for crew "scope". */
typedef struct lf__scope_kernels {
    uint32_t size; /* sizeof(lf__scope_kernels) */
    const char *name;
    lf_status (*stamp)(void *context, void *stream, const lf__stamp *stamp); /* queue one; `stream` is the native handle */
} lf__scope_kernels;

LF_METER_FN void lf__meter_close_page(lf__meter *m, int64_t now_ns)
{
    lf__meter_page *page = m->page;
    for (int32_t i = 0; i < LF_N_PARTS; i++) page->part_ns[i] = m->part_ns[i];
    page->seen = m->seen;
    page->wrong = m->wrong + m->n_open;
    page->end_ns = now_ns;
    page->closed = m->ticket;
    m->page = 0;
}

/** The stream reached a stamp at now_ns: time since the last one is the innermost open part's. */
LF_METER_FN void lf__meter_stamp(const lf__stamp *s, int64_t now_ns)
{
    lf__meter *m = s->meter;
    if (s->what == LF_STAMP_OPEN) {
        for (int32_t i = 0; i < LF_N_PARTS; i++) m->part_ns[i] = 0;
        m->page = s->page;
        m->ticket = s->ticket;
        m->seen = m->wrong = m->n_open = 0;
        s->page->opened = s->ticket;
        s->page->begin_ns = now_ns;
    } else if (m->n_open > 0) {
        m->part_ns[m->open[m->n_open - 1]] += now_ns - m->last_ns;
    }
    m->last_ns = now_ns;
    if (s->what == LF_STAMP_BEGIN) {
        m->seen |= 1 << s->part;
        if (m->n_open < LF_METER_NEST) m->open[m->n_open++] = s->part;
        else m->wrong++;
    } else if (s->what == LF_STAMP_END) {
        if (m->n_open > 0 && m->open[m->n_open - 1] == s->part) m->n_open--;
        else m->wrong++;
    } else if (s->what == LF_STAMP_CLOSE && m->page && m->ticket == s->ticket) {
        lf__meter_close_page(m, now_ns);
    }
}

#endif
