/* SPDX-License-Identifier: Apache-2.0 */
/* Capturing a stream's work as a graph, for tests that do not link against CUDA. */
#ifndef LF_CUDA_GRAPH_H
#define LF_CUDA_GRAPH_H

#include <dlfcn.h>

#include "loom_cuda_fixture.h"

/* The driver's calls that capture: through the loader, so that nothing here links against CUDA. */
static struct {
    int (*begin)(void *stream, int mode);
    int (*end)(void *stream, void **graph);
    int (*instantiate)(void **exec, void *graph, unsigned long long flags);
    int (*launch)(void *exec, void *stream);
    int (*free_exec)(void *exec);
    int (*free_graph)(void *graph);
} driver;

static inline void find_driver(void)
{
    lf_device_info info = {.size = sizeof info};
    CHECK_OK(lf_device_get_info(gpu, &info));
    if (info.kind != 2) SKIP("graphs are CUDA's");
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    CHECK(library != NULL);
    *(void **)&driver.begin = dlsym(library, "cuStreamBeginCapture_v2");
    *(void **)&driver.end = dlsym(library, "cuStreamEndCapture");
    *(void **)&driver.instantiate = dlsym(library, "cuGraphInstantiateWithFlags");
    *(void **)&driver.launch = dlsym(library, "cuGraphLaunch");
    *(void **)&driver.free_exec = dlsym(library, "cuGraphExecDestroy");
    *(void **)&driver.free_graph = dlsym(library, "cuGraphDestroy");
    CHECK(driver.begin && driver.end && driver.instantiate && driver.launch && driver.free_exec && driver.free_graph);
}

static inline void begin_capture(lf_stream *on) { CHECK_EQ(driver.begin(lf_stream_native(on), 0), 0); } /* global: strictest */

/* The graph of what was queued since, ready to launch; `rc` is what queueing it returned. */
static inline void *end_capture(lf_stream *on, lf_status rc)
{
    void *graph = NULL, *exec = NULL;
    int ended = driver.end(lf_stream_native(on), &graph);
    CHECK_OK(rc);
    CHECK_EQ(ended, 0);
    CHECK_EQ(driver.instantiate(&exec, graph, 0), 0);
    CHECK_EQ(driver.free_graph(graph), 0);
    return exec;
}

#endif
