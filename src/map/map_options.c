/* SPDX-License-Identifier: Apache-2.0 */
#include "map_int.h"

#define S lf_map_options
static const lf_option rows[] = {
    LF_ROW_I32(S, align_elements, "64", 1, 65536, "Blocks start at a multiple of this many elements; a power of two."),
    LF_ROW_I32(S, high_load_experts, "4", 0, LF_MAP_MAX_PARAMS,
               "How many of the largest experts form the group 'high'; the others form 'low'."),
    LF_ROW_I32(S, plane_align_bytes, "4096", 256, 1 << 30, "Alignment of a role's plane in the slab, bytes; a power of two."),
    LF_ROW_BOOL(S, grad_f32, "true", "Accumulate gradients in f32 whatever the weight's dtype."),
    LF_ROW_BOOL(S, optimizer_state, "true",
                "Hold master copies and moments too; off for a crew that works alone beside another optimizer."),
    LF_ROW_BOOL(
        S, moments_bf16, "false",
        "Hold AdamW's moments in bf16, rounded stochastically: 4 bytes a parameter less, and another course of training than f32's. "
        "A run and its checkpoints cannot change it."),
};
#undef S

const lf_options_section lf__map_section = {"map", "Layout of weights, gradients and optimizer state.", rows, LF_COUNT(rows),
                                            sizeof(lf_map_options)};
