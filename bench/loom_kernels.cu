/* SPDX-License-Identifier: Apache-2.0 */
/* ExpertLoom's memory-bound kernels at the shapes of n16, each against a device copy that moves as many bytes, in one run.
 *
 * 32768 tokens of 1024 features, 16 experts, top-2, vocabulary 50304 (8192 rows at once), 4e8 parameters. Both sides are captured
 * graphs of several calls, replayed in turns; times are medians. One JSON object a line: value and peer_value are TB/s of bytes
 * read and written, for small work microseconds; ratio is the part of the copy's rate. The peer is the faster of cudaMemcpyAsync and a
 * kernel of 16-byte loads and stores.
 *
 *   nvcc -O3 -std=c++17 -DLF_COMMIT=$(git rev-parse --short HEAD) -Iinclude -o build/loom_kernels bench/loom_kernels.cu \
 *        -Lbuild/cuda -lloongforge
 *   LD_LIBRARY_PATH=build/cuda build/loom_kernels [rounds] [part of a name] */
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "check.cuh"
#include "loongforge/loongforge.h"

#ifndef LF_COMMIT
#define LF_COMMIT unknown
#endif
#define LF_TEXT_(x) #x
#define LF_TEXT(x) LF_TEXT_(x)

constexpr int64_t kTokens = 32768, kD = 1024, kVocabulary = 50304, kRows = 8192, kParams = 400000000;
constexpr int32_t kExperts = 16, kTopK = 2, kBf16 = LF_DTYPE_BF16;
constexpr double kEps = 1e-6;

struct Bench {
    lf_device *device;
    lf_stream *stream;
    cudaStream_t native;
    cudaEvent_t from, to;
    char *copy[2]; /* of the peer */
    size_t copy_bytes;
    int rounds;
    std::string only, machine, command;
};

/* ---- memory ---- */

template <class T> __global__ void fill_kernel(T *to, int64_t n, uint32_t seed, float scale)
{
    for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x) {
        uint32_t x = uint32_t(i) * 2654435761u ^ uint32_t(i >> 32) ^ seed * 0x9E3779B9u;
        x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15, x *= 0x846ca68bu, x ^= x >> 16;
        const float f = (float(x >> 8) * 0x1p-23f - 1.0f) * scale;
        if constexpr (sizeof(T) == 2) to[i] = T(__float_as_uint(f) >> 16); /* bf16, cut */
        else to[i] = T(f);
    }
}

template <class T> static T *alloc(const Bench &b, int64_t n)
{
    void *p;
    OK(lf_device_alloc(b.device, size_t(n) * sizeof(T), &p));
    OK(lf_fill(b.device, p, 0, size_t(n) * sizeof(T), nullptr));
    return static_cast<T *>(p);
}

template <class T> static T *random_values(const Bench &b, int64_t n, float scale = 1)
{
    static uint32_t seed = 0;
    T *p = alloc<T>(b, n);
    fill_kernel<<<2048, 256>>>(p, n, ++seed, scale);
    CUDA(cudaDeviceSynchronize());
    return p;
}

/* ---- timing ---- */

static cudaGraphExec_t capture(const Bench &b, int repeat, const std::function<void()> &work)
{
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    work(); /* kernels are loaded when first used */
    CUDA(cudaStreamSynchronize(b.native));
    CUDA(cudaStreamBeginCapture(b.native, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < repeat; i++) work();
    CUDA(cudaStreamEndCapture(b.native, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    CUDA(cudaGraphDestroy(graph));
    return exec;
}

static double seconds(const Bench &b, cudaGraphExec_t exec, int repeat)
{
    float ms;
    CUDA(cudaEventRecord(b.from, b.native));
    CUDA(cudaGraphLaunch(exec, b.native));
    CUDA(cudaEventRecord(b.to, b.native));
    CUDA(cudaEventSynchronize(b.to));
    CUDA(cudaEventElapsedTime(&ms, b.from, b.to));
    return ms * 1e-3 / repeat;
}

static double median(std::vector<double> v)
{
    std::sort(v.begin(), v.end());
    return v[v.size() / 2];
}

/* Four packs of 16 bytes a thread. The driver's own copy was seen at two thirds of this rate. */
__global__ void __launch_bounds__(256) copy_kernel(uint4 *to, const uint4 *from, int64_t n)
{
    const int64_t i = blockIdx.x * int64_t(1024) + threadIdx.x;
    uint4 v[4];
#pragma unroll
    for (int u = 0; u < 4; u++)
        if (i + 256 * u < n) v[u] = __ldcs(from + i + 256 * u);
#pragma unroll
    for (int u = 0; u < 4; u++)
        if (i + 256 * u < n) __stcs(to + i + 256 * u, v[u]);
}

/* `bytes` read and written by one call. Small work is told in microseconds. */
static void measure(const Bench &b, const char *name, double bytes, const std::function<void()> &work)
{
    if (std::string(name).find(b.only) == std::string::npos) return;
    const size_t half = std::min(size_t(bytes / 2), b.copy_bytes);
    const int repeat = bytes > 2e9 ? 2 : 10;
    const int64_t packs = int64_t(half / 16);
    cudaGraphExec_t graphs[3];
    graphs[0] = capture(b, repeat, work);
    graphs[1] =
        capture(b, repeat, [&] { CUDA(cudaMemcpyAsync(b.copy[1], b.copy[0], half, cudaMemcpyDeviceToDevice, b.native)); });
    graphs[2] = capture(b, repeat, [&] {
        copy_kernel<<<unsigned((packs + 1023) / 1024), 256, 0, b.native>>>((uint4 *)b.copy[1], (const uint4 *)b.copy[0], packs);
    });
    std::vector<double> t[3];
    for (int i = 0; i < b.rounds + 2; i++)
        for (int g = 0; g < 3; g++) {
            const double once = seconds(b, graphs[g], repeat) * (g ? bytes / 2 / double(half) : 1);
            if (i > 1) t[g].push_back(once);
        }
    for (cudaGraphExec_t g : graphs) CUDA(cudaGraphExecDestroy(g));
    const double s = median(t[0]), s_peer = std::min(median(t[1]), median(t[2]));
    const bool small = bytes < 3e7;
    printf(
        "{\"name\": \"loom.%s\", \"value\": %.4g, \"unit\": \"%s\", \"peer\": \"device copy\", \"peer_value\": %.4g, \"ratio\": %.3f, "
        "\"us\": %.1f, \"machine\": \"%s\", \"commit\": \"%s\", \"command\": \"%s\"}\n",
        name, small ? s * 1e6 : bytes / s * 1e-12, small ? "us" : "TB/s", small ? s_peer * 1e6 : bytes / s_peer * 1e-12,
        s_peer / s, s * 1e6, b.machine.c_str(), LF_TEXT(LF_COMMIT), b.command.c_str());
    fflush(stdout);
}

/* ---- routing and rows ---- */

/* Top-2 of 16 experts of unequal popularity; the arrays that the kernels of rows read are filled. */
static lf_routing make_routing(const Bench &b)
{
    const int64_t slots = kTokens * kTopK;
    std::vector<int32_t> chosen(slots);
    for (int64_t t = 0; t < kTokens; t++) {
        const uint32_t x = uint32_t(t) * 2654435761u;
        chosen[2 * t] = int32_t((x >> 24) * (x >> 24) * kExperts >> 16);
        chosen[2 * t + 1] = (chosen[2 * t] + 1 + int32_t((x >> 8 & 0xffff) * (kExperts - 1) >> 16)) % kExperts;
    }
    lf_routing r = {sizeof r,
                    alloc<int32_t>(b, slots),
                    random_values<float>(b, slots),
                    alloc<float>(b, kTokens * kExperts),
                    alloc<int32_t>(b, kExperts),
                    alloc<int32_t>(b, kExperts + 1),
                    alloc<int32_t>(b, slots),
                    alloc<int32_t>(b, slots)};
    OK(lf_copy(b.device, r.expert, chosen.data(), chosen.size() * 4, nullptr));
    OK(lf_loom_sort(b.device, nullptr, r.expert, kTokens, kExperts, kTopK, &r));
    return r;
}

static void bench_route(const Bench &b, const lf_routing &r)
{
    const int64_t slots = kTokens * kTopK;
    float *logits = random_values<float>(b, kTokens * kExperts), *prob_sum = alloc<float>(b, kExperts);
    float *dlogits = alloc<float>(b, kTokens * kExperts), *dweight = random_values<float>(b, slots);
    int64_t *token = alloc<int64_t>(b, kTokens);
    const double ne = double(kTokens) * kExperts * 4, nk = double(slots) * 4;
    const lf_route_schedule now = {1, 1.0f, 0.7f};
    lf_route_schedule *schedule = alloc<lf_route_schedule>(b, 1);
    OK(lf_copy(b.device, schedule, &now, sizeof now, nullptr));
    lf_route_args args = {};
    args.size = sizeof args, args.logits = logits, args.token = token, args.schedule = schedule;
    args.n = kTokens, args.e = kExperts, args.k = kTopK;
    measure(b, "sort", 4 * nk, [&] { OK(lf_loom_sort(b.device, b.stream, r.expert, kTokens, kExperts, kTopK, &r)); });
    const auto route = [&] { OK(lf_loom_route(b.device, b.stream, &args, &r, prob_sum)); };
    measure(b, "route", 2 * ne + 4 * nk + double(kTokens) * 8, route);
    route();
    OK(lf_stream_sync(b.stream));
    measure(b, "route_backward", 2 * ne + 3 * nk, [&] {
        OK(lf_loom_route_backward(b.device, b.stream, &r, nullptr, dweight, prob_sum, kTokens, kExperts, kTopK, schedule,
                                  dlogits));
    });
    float *router = random_values<float>(b, kExperts * kD), *drouter = alloc<float>(b, kExperts * kD);
    uint16_t *x = random_values<uint16_t>(b, kTokens * kD);
    void *workspace = alloc<char>(b, lf_loom_router_workspace(kTokens, kExperts, kD));
    const double row = double(kTokens) * kD * 2;
    measure(b, "router", row + ne,
            [&] { OK(lf_loom_router(b.device, b.stream, x, router, kTokens, kExperts, kD, kBf16, logits)); });
    measure(b, "router_backward", row + ne, [&] {
        OK(lf_loom_router_backward(b.device, b.stream, dlogits, x, kTokens, kExperts, kD, kBf16, drouter, 0, workspace));
    });
    uint16_t *dxs = random_values<uint16_t>(b, kTokens * kTopK * kD);
    measure(b, "permute_router_backward", 3 * row + ne, [&] {
        OK(lf_loom_permute_backward(b.device, b.stream, &r, dxs, kTokens, kExperts, kTopK, kD, kBf16, dlogits, router, x));
    });
    for (void *p : {(void *)x, (void *)dxs}) lf_device_free(b.device, p);
}

static void bench_rows(const Bench &b, const lf_routing &r)
{
    const double row = double(kTokens) * kD * 2;
    uint16_t *x = random_values<uint16_t>(b, kTokens * kD), *y = alloc<uint16_t>(b, kTokens * kD);
    uint16_t *xs = random_values<uint16_t>(b, kTokens * kTopK * kD), *ys = alloc<uint16_t>(b, kTokens * kTopK * kD);
    uint16_t *sum = alloc<uint16_t>(b, kTokens * kD);
    float *dweight = alloc<float>(b, kTokens * kTopK), *weight = random_values<float>(b, kD), *rstd = alloc<float>(b, kTokens);
    float *dw = alloc<float>(b, kD);
    void *workspace = alloc<char>(b, lf_loom_add_norm_workspace(kTokens, kD));
#define ROUTED kTokens, kExperts, kTopK, kD, kBf16
    measure(b, "permute", 3 * row, [&] { OK(lf_loom_permute(b.device, b.stream, &r, x, ROUTED, ys)); });
    measure(b, "permute_backward", 3 * row,
            [&] { OK(lf_loom_permute_backward(b.device, b.stream, &r, xs, ROUTED, nullptr, nullptr, y)); });
    measure(b, "combine", 3 * row, [&] { OK(lf_loom_combine(b.device, b.stream, &r, xs, ROUTED, y)); });
    measure(b, "combine_backward", 5 * row,
            [&] { OK(lf_loom_combine_backward(b.device, b.stream, &r, xs, x, ROUTED, ys, dweight)); });
    measure(b, "norm", 2 * row, [&] {
        OK(lf_loom_add_norm(b.device, b.stream, x, nullptr, weight, float(kEps), kTokens, kD, kBf16, nullptr, y, rstd));
    });
    measure(b, "add_norm", 4 * row,
            [&] { OK(lf_loom_add_norm(b.device, b.stream, x, xs, weight, float(kEps), kTokens, kD, kBf16, sum, y, rstd)); });
    measure(b, "combine_add_norm", 5 * row,
            [&] { OK(lf_loom_combine_add_norm(b.device, b.stream, &r, xs, ROUTED, x, weight, float(kEps), sum, y, rstd)); });
    measure(b, "add_norm_backward", 4 * row, [&] {
        OK(lf_loom_add_norm_backward(b.device, b.stream, sum, weight, rstd, x, xs, kTokens, kD, kBf16, y, dw, 1, workspace));
    });
    measure(b, "norm_backward", 3 * row, [&] {
        OK(lf_loom_add_norm_backward(b.device, b.stream, sum, weight, rstd, nullptr, xs, kTokens, kD, kBf16, y, dw, 0,
                                     workspace));
    });
    for (void *p : {(void *)x, (void *)y, (void *)xs, (void *)ys, (void *)sum}) lf_device_free(b.device, p);
}

/* ---- loss ---- */

static void bench_loss(const Bench &b)
{
    uint16_t *logits = random_values<uint16_t>(b, kRows * kVocabulary, 4);
    std::vector<int64_t> targets(kRows);
    for (int64_t i = 0; i < kRows; i++) targets[i] = i * 7919 % kVocabulary;
    int64_t *target = alloc<int64_t>(b, kRows);
    float *row_loss = alloc<float>(b, kRows);
    double *sum = alloc<double>(b, 1);
    OK(lf_copy(b.device, target, targets.data(), targets.size() * 8, nullptr));
    for (int32_t backward = 0; backward < 2; backward++)
        measure(b, backward ? "cross_entropy_backward" : "cross_entropy", double(kRows) * kVocabulary * 2 * (1 + backward), [&] {
            OK(lf_loom_cross_entropy(b.device, b.stream, logits, target, kRows, kVocabulary, kVocabulary, kBf16, row_loss, sum, 1,
                                     backward));
        });
    lf_device_free(b.device, logits);
}

/* ---- optimizer ---- */

static lf_map *open_map(const Bench &b, int32_t grad_f32, int32_t moments_bf16)
{
    lf_map *map;
    lf_map_options options;
    OK(lf_options_init("map", &options, sizeof options));
    options.grad_f32 = grad_f32;
    options.moments_bf16 = moments_bf16;
    OK(lf_map_open(&map, &options));
    lf_param p = {};
    p.size = sizeof p, p.name = "p", p.shape = &kParams, p.ndim = 1, p.dtype = kBf16, p.expert = -1, p.tied_to = -1;
    OK(lf_map_add(map, &p, nullptr));
    OK(lf_map_plan(map));
    OK(lf_map_allocate(map, b.device));
    return map;
}

static lf_adamw *adamw_numbers(const Bench &b)
{
    lf_adamw host, *hyper = alloc<lf_adamw>(b, 1);
    OK(lf_adamw_init(&host, 1e-4, 0.9, 0.95, 1e-8, 0.1, 100, 1));
    OK(lf_copy(b.device, hyper, &host, sizeof host, nullptr));
    return hyper;
}

static void bench_bf16_moments(const Bench &b)
{
    lf_map *map = open_map(b, 0, 1);
    const lf_range all = {0, 0, 0, kParams};
    lf_adamw *hyper = adamw_numbers(b);
    measure(b, "adamw_moments_bf16", double(kParams) * 20, [&] { OK(lf_loom_adamw(map, b.stream, &all, 1, hyper)); });
    lf_map_unref(map);
}

static void bench_sweep(const Bench &b, int32_t grad_f32)
{
    lf_map *map = open_map(b, grad_f32, 0);
    const lf_range all = {0, 0, 0, kParams};
    lf_adamw *hyper = adamw_numbers(b);
    double *sum = alloc<double>(b, 1), n = double(kParams);
    measure(b, grad_f32 ? "adamw_grad_f32" : "adamw", n * (grad_f32 ? 30 : 28),
            [&] { OK(lf_loom_adamw(map, b.stream, &all, 1, hyper)); });
    float *norm = alloc<float>(b, 1);
    if (!grad_f32) measure(b, "clip", 64, [&] { OK(lf_loom_clip(b.device, b.stream, sum, 1, hyper, 1, norm)); });
    measure(b, grad_f32 ? "sumsq_f32" : "sumsq", n * (grad_f32 ? 4 : 2),
            [&] { OK(lf_loom_sumsq(map, b.stream, &all, 1, LF_ROLE_GRAD, sum)); });
    const float *one = random_values<float>(b, 1);
    void *grad = lf_map_address(map, &all, LF_ROLE_GRAD), *other = lf_map_address(map, &all, LF_ROLE_EXP_AVG);
    const int32_t dtype = grad_f32 ? LF_DTYPE_F32 : kBf16;
    measure(b, grad_f32 ? "add_scaled_f32" : "add_scaled", n * (grad_f32 ? 10 : 6),
            [&] { OK(lf_loom_add(b.device, b.stream, grad, dtype, other, kBf16, kParams, one, 1)); });
    lf_map_unref(map);
}

int main(int argc, char **argv)
{
    Bench b = {};
    b.rounds = argc > 1 ? atoi(argv[1]) : 15;
    b.only = argc > 2 ? argv[2] : "";
    for (int i = 0; i < argc; i++) b.command += (i ? " " : "") + std::string(argv[i]);
    lf_device_info info = {};
    info.size = sizeof info;
    OK(lf_device_open(&b.device, "cuda"));
    OK(lf_device_get_info(b.device, &info));
    OK(lf_stream_open(b.device, 0, &b.stream));
    b.machine = info.name;
    b.native = cudaStream_t(lf_stream_native(b.stream));
    CUDA(cudaEventCreate(&b.from));
    CUDA(cudaEventCreate(&b.to));
    b.copy_bytes = size_t(6) << 30;
    for (char *&p : b.copy) p = alloc<char>(b, int64_t(b.copy_bytes));
    const lf_routing routing = make_routing(b);
    bench_rows(b, routing);
    bench_loss(b);
    bench_sweep(b, 0);
    bench_sweep(b, 1);
    bench_bf16_moments(b);
    bench_route(b, routing);
    return 0;
}
