/* SPDX-License-Identifier: Apache-2.0 */
/** @file nexus_nccl_fixture.h  A fake NCCL on a fake CUDA device (tests/fakes), found as the library finds them, and ranks on it. */
#ifndef LF_NEXUS_NCCL_FIXTURE_H
#define LF_NEXUS_NCCL_FIXTURE_H

#include <dlfcn.h>

#include "fakes/fake_cuda.h"
#include "fakes/fake_nccl.h"
#include "nexus_ranks.h"

static struct {
    int (*plant)(const char *, long);
    long (*count)(const char *);
    void (*capture)(uint64_t);
    int32_t (*last_priority)(void);
} fake;

#define FIND(field, library, name)                       \
    do {                                                 \
        void *found_ = dlsym(library, name);             \
        if (!found_) FAIL_("%s: %s", name, dlerror());   \
        memcpy(&fake.field, &found_, sizeof fake.field); \
    } while (0)

static inline void plant(const char *name, long value)
{
    if (fake.plant(name, value) != 0) FAIL_("no fault '%s' to plant", name);
}

static inline void set_up_fakes(void)
{
    if (!fake.plant) {
        setenv("TMPDIR", lf_test_dir, 1); /* where the fake leaves rooms that nobody came to */
        void *nccl = dlopen("libnccl.so.2", RTLD_NOW), *cuda = dlopen("libloongforge_cuda.so", RTLD_NOW);
        if (!nccl || !cuda) FAIL_("%s", dlerror());
        FIND(plant, nccl, "fake_nccl_plant");
        FIND(count, nccl, "fake_nccl_count");
        FIND(capture, cuda, "fake_cuda_capture");
        FIND(last_priority, cuda, "fake_cuda_last_priority");
    }
    static const char *const faults[] = {"init", "async_error", "refuse", "call_hangs", "abort_hangs", "finalize", "registered"};
    for (size_t i = 0; i < LF_COUNT(faults); i++) plant(faults[i], 0);
    plant("rank", -1);
    plant("version", 22809);
    fake.capture(0);
    if (!device) CHECK_OK(lf_device_open(&device, "cuda:0"));
}

static uint8_t nccl_id[LF_NCCL_ID_BYTES]; /* by which ranks meet */

static inline void nccl_options(lf_nexus_options *o)
{
    MUST(lf_options_init("nexus", o, sizeof *o));
    o->timeout_s = 20;
    snprintf(o->reduce, sizeof o->reduce, "sum");
    snprintf(o->fail, sizeof o->fail, "error");
}

static inline lf_status open_nccl(rank *r) { return lf_nccl_open(&r->opts, device, r->t.rank, r->t.world, nccl_id, &r->t); }

/* All with a stream; on the wire without NexusSync where there is no map to make. */
static inline void prepare_nccl(int32_t world, lf_map *(*make_map)(const rank *), void (*run)(rank *))
{
    set_up_fakes();
    CHECK_OK(lf_nccl_id(NULL, nccl_id));
    for (int32_t i = 0; i < world; i++) {
        ranks[i] = (rank){.t = {.rank = i, .world = world},
                          .open_end = open_nccl,
                          .make_map = make_map,
                          .run = run,
                          .grad_f32 = 1,
                          .on_stream = true};
        nccl_options(&ranks[i].opts);
    }
}

#endif
