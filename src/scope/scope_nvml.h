/* SPDX-License-Identifier: Apache-2.0 */
/** @file scope_nvml.h  What is used of NVML, found at run time. Numbers and layouts are those of its public interface, which keeps them. */
#ifndef LF_SCOPE_NVML_H
#define LF_SCOPE_NVML_H

#include "base/base.h"
#include "loongforge/scope.h"

typedef struct lf__nvml {
    void *library, *gpu;
    int64_t link_kib[2], link_ns; /* NVLink's counters at the sample before; link_ns 0: none */
    bool running;
    int (*init)(void);
    int (*shutdown)(void);
    int (*by_uuid)(const char *, void **);
    int (*by_index)(unsigned, void **);
    const char *(*error_string)(int);
    int (*utilization)(void *, unsigned[2]);
    int (*memory)(void *, unsigned long long[3]);
    int (*clock)(void *, unsigned, unsigned *);
    int (*power)(void *, unsigned *);
    int (*pcie)(void *, unsigned, unsigned *);
    int (*fields)(void *, int, void *);
} lf__nvml;

/** Errors as lf_monitor_open. */
lf_status lf__nvml_open(lf__nvml *nvml, const char *gpu, const char *library);
void lf__nvml_close(lf__nvml *nvml);
/** Whatever the driver tells; the rest is -1. */
void lf__nvml_sample(lf__nvml *nvml, lf_monitor_sample *sample);

#endif
