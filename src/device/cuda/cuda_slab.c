/* SPDX-License-Identifier: Apache-2.0 */
/* CUDA virtual memory. The driver's functions are asked from the runtime, so nothing links against libcuda. */
#include <cuda.h>

#include "cuda_int.h"
#include "cuda_slab.h"

/* The few driver calls in use: name, member. */
/* clang-format off */
#define DRIVER_CALLS(X) \
    X(cuMemGetAllocationGranularity, granularity) \
    X(cuMemAddressReserve, reserve) \
    X(cuMemAddressFree, address_free) \
    X(cuMemCreate, create) \
    X(cuMemRelease, release) \
    X(cuMemMap, map) \
    X(cuMemUnmap, unmap) \
    X(cuMemSetAccess, set_access) \
    X(cuGetErrorString, error_string)
/* clang-format on */

#define MEMBER(name, member) __typeof__(&name) member;
static struct {
    DRIVER_CALLS(MEMBER)
    bool found;
} driver;
#undef MEMBER

/* Filled before the first device is handed out; filling it twice writes the same values. */
static lf_status find_driver(void)
{
    if (driver.found) return LF_OK;
    enum cudaDriverEntryPointQueryResult result;
#define FIND(name, member)                                                                                                    \
    if (cudaGetDriverEntryPointByVersion(#name, (void **)&driver.member, 12000, cudaEnableDefault, &result) != cudaSuccess || \
        result != cudaDriverEntryPointSuccess) {                                                                              \
        cudaGetLastError();                                                                                                   \
        return lf__fail(LF_ERR_UNSUPPORTED, "the CUDA driver has no " #name "; hint: driver 525 or newer");                   \
    }
    DRIVER_CALLS(FIND)
#undef FIND
    driver.found = true;
    return LF_OK;
}

static lf_status driver_fail(CUresult error, const char *what)
{
    const char *text = NULL;
    driver.error_string(error, &text);
    return lf__fail(error == CUDA_ERROR_OUT_OF_MEMORY ? LF_ERR_NOMEM : LF_ERR_DEVICE, "%s: %s", what,
                    text ? text : "unknown driver error");
}

static CUmemAllocationProp properties(int32_t index, bool rdma)
{
    CUmemAllocationProp p = {0};
    p.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    p.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    p.location.id = index;
    p.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    p.allocFlags.gpuDirectRDMACapable = rdma;
    return p;
}

lf_status lf__cuda_slab_page(int32_t index, size_t *page)
{
    lf_status rc = find_driver();
    if (rc < 0) return rc;
    CUmemAllocationProp p = properties(index, false);
    CUresult error = driver.granularity(page, &p, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
    return error == CUDA_SUCCESS ? LF_OK : driver_fail(error, "granularity of device memory");
}

lf_status lf__cuda_slab_reserve(void *context, size_t bytes, void **base)
{
    const cuda_context *c = context;
    CUdeviceptr address = 0;
    CUresult error = driver.reserve(&address, bytes, c->page, 0, 0);
    if (error != CUDA_SUCCESS) return driver_fail(error, "reserving device addresses");
    *base = (void *)(uintptr_t)address;
    return LF_OK;
}

static CUresult create_memory(CUmemGenericAllocationHandle *handle, size_t bytes, int32_t index)
{
    CUmemAllocationProp p = properties(index, true);
    CUresult error = driver.create(handle, bytes, &p, 0);
    if (error == CUDA_SUCCESS || error == CUDA_ERROR_OUT_OF_MEMORY) return error;
    p = properties(index, false); /* no RDMA on this machine */
    return driver.create(handle, bytes, &p, 0);
}

/* The slab's device is current. */
static lf_status commit_here(const cuda_context *c, void *base, size_t from, size_t to)
{
    CUdeviceptr at = (CUdeviceptr)(uintptr_t)base + from;
    size_t bytes = to - from;
    CUmemGenericAllocationHandle handle;
    CUresult error = create_memory(&handle, bytes, c->index);
    if (error != CUDA_SUCCESS) return driver_fail(error, "committing device memory");
    error = driver.map(at, bytes, 0, handle, 0);
    driver.release(handle); /* the mapping keeps it */
    if (error != CUDA_SUCCESS) return driver_fail(error, "mapping device memory");
    CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = c->index},
                              .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    error = driver.set_access(at, bytes, &access, 1);
    if (error == CUDA_SUCCESS && cudaMemset((void *)(uintptr_t)at, 0, bytes) == cudaSuccess &&
        cudaDeviceSynchronize() == cudaSuccess)
        return LF_OK;
    driver.unmap(at, bytes); /* all or nothing */
    cudaGetLastError();
    return error == CUDA_SUCCESS ? lf__fail(LF_ERR_DEVICE, "clearing %zu bytes of device memory", bytes)
                                 : driver_fail(error, "opening device memory");
}

lf_status lf__cuda_slab_commit(void *context, void *base, size_t from, size_t to)
{
    const cuda_context *c = context;
    int before = c->index;
    cudaGetDevice(&before);
    if (before != c->index) cudaSetDevice(c->index);
    lf_status rc = commit_here(c, base, from, to);
    if (before != c->index) cudaSetDevice(before);
    return rc;
}

void lf__cuda_slab_release(void *context, void *base, size_t reserved, size_t committed)
{
    (void)context;
    cudaDeviceSynchronize(); /* nothing may still read it */
    if (committed) driver.unmap((CUdeviceptr)(uintptr_t)base, committed);
    driver.address_free((CUdeviceptr)(uintptr_t)base, reserved);
}
