/* SPDX-License-Identifier: Apache-2.0 */
/** @file dlpack_abi.h  The published layout of DLPack 0.x/1.x (dmlc.github.io/dlpack), written for this project: what a
 *  "dltensor" capsule holds. Checked against numpy and torch by tests/python/test_map.py. */
#ifndef LF_DLPACK_ABI_H
#define LF_DLPACK_ABI_H

#include <stddef.h>
#include <stdint.h>

typedef struct dlpack_tensor {
    void *data;
    int32_t device_type; /* 1 CPU, 2 CUDA */
    int32_t device_id;
    int32_t ndim;
    uint8_t code; /* 0 int, 1 uint, 2 float, 4 bfloat, 6 bool */
    uint8_t bits;
    uint16_t lanes;
    int64_t *shape;
    int64_t *strides; /* NULL: dense, last dimension fastest */
    uint64_t byte_offset;
} dlpack_tensor;

typedef struct dlpack_managed {
    dlpack_tensor tensor;
    void *context;
    void (*deleter)(struct dlpack_managed *self); /* called once, without the GIL's being held for sure */
} dlpack_managed;

_Static_assert(sizeof(dlpack_tensor) == 48 && offsetof(dlpack_tensor, shape) == 24, "layout of DLTensor");
_Static_assert(offsetof(dlpack_managed, deleter) == 56, "layout of DLManagedTensor");

#endif
