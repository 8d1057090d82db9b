/* SPDX-License-Identifier: Apache-2.0 */
#include "nexus_int.h"

#define S lf_nexus_options
static const lf_option rows[] = {
    LF_ROW_TEXT(
        S, comm_strategy, "hybrid", "hybrid|dense|sparse",
        "How gradients are summed over ranks. sparse: of experts with little load (of everything, where there are no experts) "
        "only the largest entries, and the rest later; hybrid chooses sparse for groups where a slow link (probe, link_mb_s) makes it "
        "pay, and dense where none is known."),
    LF_ROW_TEXT(
        S, wire_dtype, "grad", "grad|bf16",
        "bf16: f32 gradients that are summed densely travel rounded to bf16, half the bytes, where they move as a whole; with hybrid and a "
        "known link only groups where it pays. grad: as they are."),
    LF_ROW_F64(S, k_ratio, "0.15", 1e-6, 1, "sparse: share of a chunk's entries that one step sends."),
    LF_ROW_I64(S, sparse_warmup_steps, "0", 0, 0x1p40, "sparse: so many first steps are dense."),
    LF_ROW_BOOL(S, error_feedback, "true",
                "sparse: what is not sent is added to the next step's gradient; false loses it, for comparisons."),
    LF_ROW_I64(
        S, chunk_bytes, "16MiB", 4096, 0x1p40,
        "Bytes of one collective: smaller ones start earlier, larger ones use the link better. With chunk_tune the first size."),
    LF_ROW_BOOL(
        S, chunk_tune, "false",
        "Try sizes between chunk_least and chunk_most on the first steps, and keep the quickest; which one it is then depends "
        "on times, and with it the order of sums over more than two ranks."),
    LF_ROW_I64(S, chunk_least, "4MiB", 4096, 0x1p40, "chunk_tune: smallest size to try; each next one is four times as large."),
    LF_ROW_I64(S, chunk_most, "256MiB", 4096, 0x1p40,
               "chunk_tune: largest size to try; with one above every range they are also tried in one piece."),
    LF_ROW_I32(S, priority, "0", -16, 16, "Priority of the stream of a transport that opens one of its own."),
    LF_ROW_F64(S, timeout_s, "60", 0.001, 86400, "Seconds that one collective may take before the step fails."),
    LF_ROW_BOOL(
        S, debug, "false",
        "Before each collective ranks compare what they are about to do, which waits for all of them: finds ranks that differ."),
    LF_ROW_F64(S, launch_busy_pct, "0", 0, 100,
               "Hold a run of collectives back while the GPU's sampled utilisation is above this, in %; 0: never."),
    LF_ROW_F64(S, launch_wait_ms, "2", 0, 60000, "Longest time that a run is held back for launch_busy_pct."),
    LF_ROW_TEXT(S, reduce, "mean", "mean|sum", "Divide the summed gradients by the number of ranks, or leave the sum."),
    LF_ROW_I64(
        S, run_bytes, "128MiB", 4096, 0x1p40,
        "Bytes of chunks of one layer that are launched together, where the transport can: they start when all are ready."),
    LF_ROW_I32(S, max_ctas, "0", 0, 64, "NCCL: most multiprocessors that it may take from the model; 0: its own choice."),
    LF_ROW_BOOL(S, nccl_blocking, "true",
                "NCCL: calls return when the work is queued; false: threads of NCCL's queue it, which costs one a launch."),
    LF_ROW_BOOL(S, register_buffers, "true", "NCCL: register gradients, so that it needs no copies of its own where it can."),
    LF_ROW_TEXT(S, fail, "exit", "error|exit",
                "NCCL: a failed collective is an error at the next call; exit: it also ends a process that does not handle it."),
    LF_ROW_F64(S, grace_s, "10", 0.1, 3600, "NCCL: seconds between a failure and the end of the process, with fail = exit."),
    LF_ROW_TEXT(S, nccl_library, "", NULL, "NCCL: path of libnccl.so.2; empty: the one PyTorch has loaded, or the loader's."),
    LF_ROW_BOOL(
        S, probe, "false",
        "hybrid: measure the link at the start; which groups are sparse then depends on what is measured, so note it down."),
    LF_ROW_F64(S, link_latency_us, "0", 0, 1e7, "hybrid: microseconds of a small sum over all ranks, where link_mb_s is told."),
    LF_ROW_F64(S, link_mb_s, "0", 0, 1e9,
               "hybrid: MB/s of an array that is summed over all ranks (sync bench: GB/s); 0: not told."),
    LF_ROW_F64(S, topk_mb_s, "0", 0, 1e9,
               "hybrid: MB/s of gradients through top-k; 0: measured together with the link, else taken as 500."),
    LF_ROW_F64(
        S, cast_mb_s, "0", 0, 1e9,
        "hybrid: MB/s of f32 gradients rounded to bf16 and widened again; 0: measured together with the link, else taken as 4000."),
    LF_ROW_TEXT(S, mpi_library, "", NULL,
                "MPI: path or name of libmpi; empty: the one that is loaded already, else Open MPI's or MPICH's usual names."),
    LF_ROW_BOOL(
        S, skip_empty, "false",
        "Do not move gradients of experts without a token on any rank, where the library computes the experts (CUDA); the host then "
        "waits for token counts in each step."),
    LF_ROW_BOOL(
        S, shard_optimizer, "false",
        "Each rank updates a share of every chunk and gives the weights to the others: less work in a step. Over NCCL it moves no "
        "more bytes, fewer where gradients are wider than weights; over gloo and MPI more."),
    LF_ROW_BOOL(
        S, every_micro_step, "false",
        "Reduce gradients in every micro-step, not in the last alone: as many times the bytes. Wants reduce mean, which keeps what earlier "
        "micro-steps left as it is; dense; not with shard_optimizer or skip_empty."),
};
#undef S

const lf_options_section lf__nexus_section = {"nexus", "Gradient reduction over ranks.", rows, LF_COUNT(rows),
                                              sizeof(lf_nexus_options)};
