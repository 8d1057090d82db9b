/* SPDX-License-Identifier: Apache-2.0 */
/** @file fake_nccl.h  A libnccl.so.2 without GPUs: ranks are threads or processes of one machine that sum in rank order through
 *  shared memory, on the fake device's streams. What goes wrong is planted.
 *
 *  Planted by fake_nccl_plant(name, value), or before loading by the environment (FAKE_NCCL_<NAME>):
 *    rank          the faults below are this rank's only; -1 (default): everyone's
 *    version       what ncclGetVersion says (default 22809)
 *    init          1: the communicator is never ready; 2: the call itself hangs
 *    async_error   what ncclCommGetAsyncError answers from now on
 *    refuse        the n-th ncclAllReduce from now on, counted from 1, answers ncclInvalidUsage
 *    call_hangs    1: ncclGroupEnd does not come back before the communicator is aborted
 *    abort_hangs   1: ncclCommAbort never comes back, and nothing is aborted
 *    finalize      1: ncclCommFinalize does not come back
 *    registered    what ncclCommRegister answers */
#ifndef FAKE_NCCL_H
#define FAKE_NCCL_H

#include <stdint.h>

/** -1: no such name. */
__attribute__((visibility("default"))) int fake_nccl_plant(const char *name, long value);
/** Counters: "aborts", "destroys", "registered" (buffers now), "groups" of several, "calls" of collectives by all ranks, "max_ctas", "blocking" (of the last init). */
__attribute__((visibility("default"))) long fake_nccl_count(const char *name);

#endif
