/* SPDX-License-Identifier: Apache-2.0 */
/* CUDA's kernels of the bf16 wire: the same bits as a scalar computation, whatever the alignment; and steps under NexusSync, eager ones
 * and captured ones that are replayed. LOONGFORGE_TEST_DEVICE=cpu tries the kernels' part on the CPU. */
#include "base/base.h"
#include "cuda_graph.h"
#include "lf_test.h"
#include "nexus/nexus_int.h"
#include "wire_cases.h"

static const lf__nexus_kernels *kernels;

enum { ROOM = 1 << 25, PAD = 64 };

static struct {
    float *data;    /* (ROOM) on the host */
    uint16_t *wire; /* (ROOM) */
    float *gpu_data;
    uint16_t *gpu_wire;
} room;

static void open_room(void)
{
    set_up();
    if (room.data) return;
    CHECK_OK(lf__nexus_find_kernels(gpu, &kernels));
    room.data = malloc(ROOM * sizeof *room.data);
    room.wire = malloc(ROOM * sizeof *room.wire);
    CHECK(room.data && room.wire);
    CHECK_OK(lf_device_alloc(gpu, ROOM * sizeof *room.data, (void **)&room.gpu_data));
    CHECK_OK(lf_device_alloc(gpu, ROOM * sizeof *room.wire, (void **)&room.gpu_wire));
}

/* Every second time on a stream. */
static void narrow(const float *data, uint16_t *wire, int64_t n, int32_t odd)
{
    lf_stream *s = odd % 2 ? stream : NULL;
    CHECK_OK(kernels->narrow(gpu->context, lf_stream_native(s), !s, data, wire, n));
    CHECK_OK(lf_stream_sync(s));
}

static void widen(const uint16_t *wire, float *data, int64_t n, float factor, int32_t odd)
{
    lf_stream *s = odd % 2 ? stream : NULL;
    CHECK_OK(kernels->widen(gpu->context, lf_stream_native(s), !s, wire, data, n, factor));
    CHECK_OK(lf_stream_sync(s));
}

/* The arrays begin `from` and `to` elements behind an aligned place; what lies around them must stay. */
static void try_narrow(int64_t n, int32_t from, int32_t to, int32_t odd)
{
    wire_fill(room.data, n, (uint32_t)(n + odd));
    CHECK_OK(lf_copy(gpu, room.gpu_data + PAD + from, room.data, (size_t)n * 4, NULL));
    CHECK_OK(lf_fill(gpu, room.gpu_wire, 0xab, (size_t)(n + 3 * PAD) * 2, NULL));
    narrow(room.gpu_data + PAD + from, room.gpu_wire + PAD + to, n, odd);
    CHECK_OK(lf_copy(gpu, room.wire, room.gpu_wire, (size_t)(n + 3 * PAD) * 2, NULL));
    const uint16_t *got = room.wire + PAD + to;
    for (int64_t i = 0; i < n; i++)
        if (isnan(room.data[i]) ? !isnan(wire_widen(got[i], 1)) : got[i] != wire_narrow(room.data[i]))
            FAIL_("%lld elements at %d, %d: 0x%08x [%lld] becomes 0x%04x, expected 0x%04x", (long long)n, from, to,
                  wire_bits(room.data[i]), (long long)i, got[i], wire_narrow(room.data[i]));
    for (int64_t i = 0; i < PAD; i++) CHECK(got[-1 - i] == 0xabab && got[n + i] == 0xabab);
}

static void try_widen(int64_t n, int32_t from, int32_t to, float factor, int32_t odd)
{
    lf__rng bits;
    lf__rng_init(&bits, 3, (uint32_t)n, (uint32_t)odd, 0);
    for (int64_t i = 0; i < n; i++) room.wire[i] = (uint16_t)lf__rng_u32(&bits);
    CHECK_OK(lf_copy(gpu, room.gpu_wire + PAD + from, room.wire, (size_t)n * 2, NULL));
    CHECK_OK(lf_fill(gpu, room.gpu_data, 0xab, (size_t)(n + 3 * PAD) * 4, NULL));
    widen(room.gpu_wire + PAD + from, room.gpu_data + PAD + to, n, factor, odd);
    CHECK_OK(lf_copy(gpu, room.data, room.gpu_data, (size_t)(n + 3 * PAD) * 4, NULL));
    const float *got = room.data + PAD + to;
    for (int64_t i = 0; i < n; i++)
        if (!wire_same(got[i], wire_widen(room.wire[i], factor)))
            FAIL_("%lld elements at %d, %d: 0x%04x [%lld] times %g becomes %.9g", (long long)n, from, to, room.wire[i],
                  (long long)i, (double)factor, (double)got[i]);
    for (int64_t i = 0; i < PAD; i++) CHECK(wire_bits(got[-1 - i]) == 0xabababab && wire_bits(got[n + i]) == 0xabababab);
}

TEST(wire_on_cuda_is_a_scalar_computation)
{
    open_room();
    for (size_t s = 0; s < LF_COUNT(wire_sizes); s++)
        for (size_t k = 0; k < LF_COUNT(wire_starts); k++) {
            try_narrow(wire_sizes[s], wire_starts[k][0], wire_starts[k][1], (int32_t)k);
            try_widen(wire_sizes[s], wire_starts[k][1], wire_starts[k][0], wire_factors[k % LF_COUNT(wire_factors)], (int32_t)k);
        }
}

/* More than a thread of the largest grid does at once. */
TEST(wire_on_cuda_takes_large_chunks)
{
    open_room();
    for (int32_t odd = 0; odd < 2; odd++) {
        try_narrow(20000003, odd, 0, odd);
        try_widen(20000003, 0, odd, 0.5f, odd);
    }
}

/* ---- steps ---- */

typedef struct model {
    lf_map *map;
    lf_nexus *nexus;
    int64_t count;
    float *grad; /* of the only block, on the device */
} model;

/* Sums of one rank are what they were: what is left of a step is the rounding. */
static lf_status keep_post(void *user, void *data, int64_t count, int32_t dtype, lf_stream *s, int64_t *ticket)
{
    (void)data, (void)s;
    if (dtype == LF_DTYPE_BF16) *(int64_t *)user += count;
    *ticket = 0;
    return LF_OK;
}

static lf_status keep_wait(void *user, int64_t ticket, lf_stream *s, double timeout_s)
{
    (void)user, (void)ticket, (void)s, (void)timeout_s;
    return LF_OK;
}

static int64_t n_moved;

static void open_model(model *m)
{
    const lf_transport t = {.size = sizeof t, .name = "kept", .user = &n_moved, .world = 1, .post = keep_post, .wait = keep_wait};
    lf_nexus_options opts;
    lf_block_info block = {.size = sizeof block};
    m->count = 100001;
    const lf_param p = {
        .size = sizeof p, .name = "p", .shape = &m->count, .ndim = 1, .dtype = LF_DTYPE_F32, .expert = -1, .tied_to = -1};
    CHECK_OK(lf_map_open(&m->map, NULL));
    CHECK_OK(lf_map_add(m->map, &p, NULL));
    CHECK_OK(lf_map_plan(m->map));
    CHECK_OK(lf_map_allocate(m->map, gpu));
    CHECK_OK(lf_options_init("nexus", &opts, sizeof opts));
    CHECK_OK(lf_options_set("nexus", &opts, "wire_dtype", "bf16"));
    opts.chunk_bytes = 65536;
    CHECK_OK(lf_nexus_open(&m->nexus, m->map, &t, &opts));
    CHECK_OK(lf_map_get_block(m->map, 0, &block));
    m->grad = lf_map_address(m->map, &block.range, LF_ROLE_GRAD);
}

static void close_model(const model *m)
{
    lf_nexus_close(m->nexus);
    lf_map_unref(m->map);
}

static void step(const model *m)
{
    CHECK_OK(lf_nexus_begin(m->nexus));
    CHECK_OK(lf_nexus_mark(m->nexus, 0, stream));
    CHECK_OK(lf_nexus_finish(m->nexus, stream));
}

static void give(const model *m, uint32_t seed)
{
    wire_fill(room.data, m->count, seed);
    CHECK_OK(lf_copy(gpu, m->grad, room.data, (size_t)m->count * 4, NULL));
}

static void check_rounded(const model *m)
{
    float *got = malloc((size_t)m->count * 4);
    CHECK_OK(lf_stream_sync(stream));
    CHECK_OK(lf_copy(gpu, got, m->grad, (size_t)m->count * 4, NULL));
    for (int64_t i = 0; i < m->count; i++)
        if (!wire_same(got[i], wire_widen(wire_narrow(room.data[i]), 1)))
            FAIL_("[%lld] 0x%08x became 0x%08x", (long long)i, wire_bits(room.data[i]), wire_bits(got[i]));
    free(got);
}

TEST(wire_on_cuda_under_nexus)
{
    open_room();
    model m;
    open_model(&m);
    for (uint32_t i = 0; i < 3; i++) {
        give(&m, i);
        step(&m);
        check_rounded(&m);
    }
    CHECK(n_moved >= 3 * m.count);
    close_model(&m);
}

/* Each replay rounds and widens what is there then. */
TEST(wire_on_cuda_is_captured)
{
    open_room();
    find_driver();
    model m;
    open_model(&m);
    give(&m, 9);
    step(&m);
    check_rounded(&m);
    CHECK_OK(lf_nexus_settle(m.nexus));
    begin_capture(stream);
    lf_status rc = lf_nexus_begin(m.nexus);
    if (rc == LF_OK) rc = lf_nexus_mark(m.nexus, 0, stream);
    if (rc == LF_OK) rc = lf_nexus_finish(m.nexus, stream);
    void *graph = end_capture(stream, rc);
    for (uint32_t i = 10; i < 15; i++) {
        give(&m, i);
        CHECK_EQ(driver.launch(graph, lf_stream_native(stream)), 0);
        CHECK_OK(lf_nexus_replayed(m.nexus, stream));
        check_rounded(&m);
    }
    CHECK_EQ(driver.free_exec(graph), 0);
    close_model(&m);
}

LF_TEST_MAIN
