/* SPDX-License-Identifier: Apache-2.0 */
/* Top-k of one array through a device's kernels: checks, and the CPU's streams. */
#include "nexus_int.h"

int64_t lf_topk_scratch_bytes(int64_t count)
{
    const int64_t tiles = count > 0 ? (count + LF__TOPK_TILE - 1) / LF__TOPK_TILE : 1;
    return (tiles * (LF__TOPK_BINS + 16) + 64) * (int64_t)sizeof(uint32_t); /* CUDA: bins once, a number for 8192 entries */
}

/* A CPU stream's worker calls with nothing but the array. */
static lf_status run_fold(void *topk) { return lf__nexus_cpu_topk(NULL, NULL, 1, topk, LF__TOPK_FOLD); }
static lf_status run_select(void *topk) { return lf__nexus_cpu_topk(NULL, NULL, 1, topk, LF__TOPK_SELECT); }
static lf_status run_pack(void *topk) { return lf__nexus_cpu_topk(NULL, NULL, 1, topk, LF__TOPK_PACK); }
static lf_status run_scatter(void *topk) { return lf__nexus_cpu_topk(NULL, NULL, 1, topk, LF__TOPK_SCATTER); }
static lf_status run_flush(void *topk) { return lf__nexus_cpu_topk(NULL, NULL, 1, topk, LF__TOPK_FLUSH); }
static const lf_host_fn on_cpu[] = {run_fold, run_select, run_pack, run_scatter, run_flush};

lf_status lf__nexus_topk(lf_device *device, const lf__nexus_kernels *kernels, const lf_topk *t, int32_t part, lf_stream *stream)
{
    if (lf__device_is_cpu(device)) return lf_stream_run(stream, on_cpu[part], (void *)t);
    return kernels->topk(device->context, lf_stream_native(stream), stream == NULL, t, part);
}

static lf_status check(const lf_topk *t)
{
    LF_CHECK_ARG(t, "topk is NULL");
    LF_CHECK_ARG(t->size == sizeof *t, "lf_topk: size is %zu, expected %zu", t->size, sizeof *t);
    LF_CHECK_ARG(t->count >= 0 && t->count < 1ll << 32, "lf_topk: count is %lld, expected 0 to 2^32 - 1; hint: in parts",
                 (long long)t->count);
    LF_CHECK_ARG(t->k >= (t->count > 0) && t->k <= t->count, "lf_topk: k is %lld, expected 1 to %lld", (long long)t->k,
                 (long long)t->count);
    LF_CHECK_ARG(t->dtype == LF_DTYPE_F32 || t->dtype == LF_DTYPE_BF16, "lf_topk: dtype is %s, expected f32 or bf16",
                 lf_dtype_name(t->dtype));
    LF_CHECK_ARG(t->count == 0 || (t->data && t->out && t->residual && t->mask && t->values && t->scratch),
                 "lf_topk: a pointer is NULL");
    return LF_OK;
}

static lf_status run_part(lf_device *device, const lf_topk *t, int32_t part, lf_stream *stream)
{
    const lf__nexus_kernels *kernels = NULL;
    LF_CHECK_ARG(device, "device is NULL");
    lf_status rc = check(t);
    if (rc == LF_OK) rc = lf__nexus_find_kernels(device, &kernels);
    return rc == LF_OK ? lf__nexus_topk(device, kernels, t, part, stream) : rc;
}

lf_status lf_topk_fold(lf_device *device, const lf_topk *topk, lf_stream *stream)
{
    return run_part(device, topk, LF__TOPK_FOLD, stream);
}

lf_status lf_topk_select(lf_device *device, const lf_topk *topk, lf_stream *stream)
{
    return run_part(device, topk, LF__TOPK_SELECT, stream);
}

lf_status lf_topk_pack(lf_device *device, const lf_topk *topk, lf_stream *stream)
{
    return run_part(device, topk, LF__TOPK_PACK, stream);
}

lf_status lf_topk_scatter(lf_device *device, const lf_topk *topk, lf_stream *stream)
{
    return run_part(device, topk, LF__TOPK_SCATTER, stream);
}
