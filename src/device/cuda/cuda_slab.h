/* SPDX-License-Identifier: Apache-2.0 */
/** @file cuda_slab.h  Slabs of CUDA virtual memory: addresses reserved once, backed as far as committed. */
#ifndef LF_CUDA_SLAB_H
#define LF_CUDA_SLAB_H

#include "base/base.h"

/** Granularity of the device's virtual memory, and a check that the driver has it. LF_ERR_UNSUPPORTED. */
lf_status lf__cuda_slab_page(int32_t index, size_t *page);
lf_status lf__cuda_slab_reserve(void *context, size_t bytes, void **base);
/** One physical allocation for [from, to): exportable as a file descriptor, RDMA-capable where the machine allows it, zeroed. */
lf_status lf__cuda_slab_commit(void *context, void *base, size_t from, size_t to);
void lf__cuda_slab_release(void *context, void *base, size_t reserved, size_t committed);

#endif
