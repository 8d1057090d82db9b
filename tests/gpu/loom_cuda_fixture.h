/* SPDX-License-Identifier: Apache-2.0 */
/* What the tests of ExpertLoom's CUDA kernels share: two devices, and memory of a case with guards behind it.
 * LOONGFORGE_TEST_DEVICE=cpu compares the CPU with itself: it tests the test. */
#ifndef LF_LOOM_CUDA_FIXTURE_H
#define LF_LOOM_CUDA_FIXTURE_H

#include "base/base.h"
#include "lf_test.h"
#include "loom/loom_int.h"

static lf_device *cpu, *gpu;
static lf_stream *stream;
static lf__rng rng;
static uint32_t turn; /* every other call takes the NULL stream */

/* ---- memory of a case ------------------------------------------------------------------------------------------------ */

enum { GUARD = 256, GUARD_BYTE = 0x5c };
static struct {
    char *device[512], *host[1024];
    size_t bytes[512];
    int32_t n_device, n_host;
} held;

static inline void *host(size_t bytes)
{
    CHECK(held.n_host < (int32_t)LF_COUNT(held.host));
    char *p = calloc(bytes + 1, 1);
    CHECK(p != NULL);
    return held.host[held.n_host++] = p;
}

/* Device memory full of `byte`, with a guard behind it. */
static inline void *device(size_t bytes, int32_t byte)
{
    CHECK(held.n_device < (int32_t)LF_COUNT(held.device));
    void *p;
    CHECK_OK(lf_device_alloc(gpu, bytes + GUARD, &p));
    held.device[held.n_device] = p;
    held.bytes[held.n_device++] = bytes;
    CHECK_OK(lf_fill(gpu, p, byte, bytes, NULL));
    CHECK_OK(lf_fill(gpu, (char *)p + bytes, GUARD_BYTE, GUARD, NULL));
    return p;
}

static inline void *up(const void *from, size_t bytes)
{
    if (!from) return NULL;
    void *p = device(bytes, 0);
    CHECK_OK(lf_copy(gpu, p, from, bytes, NULL));
    return p;
}

static inline void *down(const void *from, size_t bytes)
{
    void *p = host(bytes);
    CHECK_OK(lf_copy(gpu, p, from, bytes, NULL));
    return p;
}

static inline void forget(void)
{
    while (held.n_device > 0) lf_device_free(gpu, held.device[--held.n_device]);
    while (held.n_host > 0) free(held.host[--held.n_host]);
}

/* The end of a problem: nothing was written behind any array. */
static inline void release(void)
{
    for (int32_t i = 0; i < held.n_device; i++) {
        uint8_t guard[GUARD];
        CHECK_OK(lf_copy(gpu, guard, held.device[i] + held.bytes[i], GUARD, NULL));
        for (int32_t j = 0; j < GUARD; j++) CHECK_EQ(guard[j], GUARD_BYTE);
    }
    forget();
}

static inline void set_up(void)
{
    const char *name = getenv("LOONGFORGE_TEST_DEVICE");
    if (!cpu) CHECK_OK(lf_device_open(&cpu, "cpu"));
    if (!gpu && lf_device_open(&gpu, name ? name : "cuda") < 0) SKIP("%s", lf_error_text());
    if (!stream) CHECK_OK(lf_stream_open(gpu, 0, &stream));
    forget();
    lf__rng_init(&rng, 7, 1, 2, 3);
    CHECK_OK(lf_loom_set_threads(0));
}

static inline lf_stream *next_stream(void) { return turn++ % 2 ? stream : NULL; }
static inline float uniform(float low, float high) { return low + (high - low) * (float)lf__rng_unit(&rng); }

static inline void check_bytes(const char *what, const void *from_device, const void *want, size_t bytes)
{
    CHECK_OK(lf_stream_sync(stream));
    const uint8_t *got = down(from_device, bytes), *expected = want;
    for (size_t i = 0; i < bytes; i++)
        if (got[i] != expected[i]) FAIL_("%s: byte %zu of %zu is %02x, expected %02x", what, i, bytes, got[i], expected[i]);
}

static inline size_t width(int32_t dtype) { return lf_dtype_bytes(dtype); }
static inline float get(const void *base, int64_t i, int32_t dtype)
{
    return dtype == LF_DTYPE_F32 ? ((const float *)base)[i] : lf__f32_from_bf16(((const uint16_t *)base)[i]);
}
static inline void put(void *base, int64_t i, int32_t dtype, float v)
{
    if (dtype == LF_DTYPE_F32) ((float *)base)[i] = v;
    else ((uint16_t *)base)[i] = lf__bf16_from_f32(v);
}

#endif
