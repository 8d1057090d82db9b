/* SPDX-License-Identifier: Apache-2.0 */
/** @file fake_cuda.h  What tests and fake_nccl.c may ask of the fake CUDA device. */
#ifndef FAKE_CUDA_H
#define FAKE_CUDA_H

#include <stdint.h>

#define FAKE_API __attribute__((visibility("default")))

/** From now on every stream is part of this capture; 0: of none; UINT64_MAX: the capture is broken. Work runs. */
FAKE_API void fake_cuda_capture(uint64_t id);
FAKE_API uint64_t fake_cuda_capturing(void);
/** Of the newest stream. */
FAKE_API int32_t fake_cuda_last_priority(void);
/** Index + 1 of the calling thread's device; 0: none was entered. */
FAKE_API int32_t fake_cuda_current(void);
/** Queue a host function on a native stream. */
FAKE_API int32_t fake_cuda_run(void *native, int32_t (*fn)(void *), void *user);

#endif
