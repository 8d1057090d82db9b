/* SPDX-License-Identifier: Apache-2.0 */
/** @file nexus_parts.h  What NexusSync's kernels and their callers name alike, for C and CUDA. */
#ifndef LF_NEXUS_PARTS_H
#define LF_NEXUS_PARTS_H

/** Parts of top-k: lf_topk_fold and so on. FLUSH: out = data + residual in the data's dtype, residual = what that rounds away. */
enum { LF__TOPK_FOLD, LF__TOPK_SELECT, LF__TOPK_PACK, LF__TOPK_SCATTER, LF__TOPK_FLUSH };
/** On the CPU a tile of entries has scratch for the bins of a digit of its magnitudes, and one more number. */
enum { LF__TOPK_TILE = 65536, LF__TOPK_BINS = 2048 };

#endif
