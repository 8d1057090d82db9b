/* SPDX-License-Identifier: Apache-2.0 */
/* CPU: scaling a chunk, rounding it to bf16 and widening it, and the table; top-k is in nexus_select.c. */
#include "nexus_int.h"

enum { BLOCK = 65536 };

typedef struct scale_job {
    void *data;
    int64_t count;
    int32_t dtype;
    float factor;
} scale_job;

static void scale_block(void *user, int64_t block)
{
    const scale_job *j = user;
    const int64_t from = block * BLOCK, to = from + BLOCK < j->count ? from + BLOCK : j->count;
    if (j->dtype == LF_DTYPE_F32) {
        float *x = j->data;
        for (int64_t i = from; i < to; i++) x[i] *= j->factor;
    } else {
        uint16_t *x = j->data;
        for (int64_t i = from; i < to; i++) x[i] = lf__bf16_from_f32(lf__f32_from_bf16(x[i]) * j->factor);
    }
}

static void in_blocks(int64_t count, void (*block)(void *user, int64_t block), void *job)
{
    lf__parallel(count < 4 * BLOCK ? 1 : 0, (count + BLOCK - 1) / BLOCK, block, job);
}

static lf_status scale(void *context, void *stream, int32_t now, void *data, int64_t count, int32_t dtype, float factor)
{
    (void)context, (void)stream, (void)now;
    scale_job job = {data, count, dtype, factor};
    in_blocks(count, scale_block, &job);
    return LF_OK;
}

typedef struct narrow_job {
    const float *data;
    uint16_t *wire;
    int64_t count;
} narrow_job;

static void narrow_block(void *user, int64_t block)
{
    const narrow_job *j = user;
    const int64_t from = block * BLOCK, to = from + BLOCK < j->count ? from + BLOCK : j->count;
    for (int64_t i = from; i < to; i++) j->wire[i] = lf__bf16_from_f32(j->data[i]);
}

static lf_status narrow(void *context, void *stream, int32_t now, const float *data, uint16_t *wire, int64_t count)
{
    (void)context, (void)stream, (void)now;
    narrow_job job = {data, wire, count};
    in_blocks(count, narrow_block, &job);
    return LF_OK;
}

typedef struct widen_job {
    const uint16_t *wire;
    float *data;
    int64_t count;
    float factor;
} widen_job;

static void widen_block(void *user, int64_t block)
{
    const widen_job *j = user;
    const int64_t from = block * BLOCK, to = from + BLOCK < j->count ? from + BLOCK : j->count;
    for (int64_t i = from; i < to; i++) j->data[i] = lf__f32_from_bf16(j->wire[i]) * j->factor;
}

static lf_status widen(void *context, void *stream, int32_t now, const uint16_t *wire, float *data, int64_t count, float factor)
{
    (void)context, (void)stream, (void)now;
    widen_job job = {wire, data, count, factor};
    in_blocks(count, widen_block, &job);
    return LF_OK;
}

const lf__nexus_kernels lf__nexus_cpu = {sizeof(lf__nexus_kernels), "cpu", scale, lf__nexus_cpu_topk, narrow, widen};
