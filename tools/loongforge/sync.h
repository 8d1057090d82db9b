/* SPDX-License-Identifier: Apache-2.0 */
/** @file sync.h  `loongforge sync`: what its files share. */
#ifndef LF_SYNC_H
#define LF_SYNC_H

#include "cmd.h"

/** Arguments of `sync bench` as given; NULL or 0: the default. */
typedef struct sync_bench_args {
    const char *transport, *sizes, *chunks, *dtype, *ranks, *iterations, *meet;
    int json;
} sync_bench_args;

/** Time sums of every size in chunks of every size over a transport, and check them. Returns an exit code. */
int cmd_sync_bench(const sync_bench_args *args, const lf_nexus_options *options);

#endif
