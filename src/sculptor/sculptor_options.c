/* SPDX-License-Identifier: Apache-2.0 */
/* Options of the planner, section "sculptor". */
#include "sculptor_int.h"

extern const lf_options_section lf__sculptor_section;

static const lf_option rows[] = {
    LF_ROW_I64(lf_plan_options, align_bytes, "128", 1, 1073741824, "alignment of a tensor that names none of its own"),
    LF_ROW_I64(lf_plan_options, capacity_bytes, "0", 0, 4611686018427387904.0,
               "bytes there are: a plan that needs more is an error that names the pool's largest tensors; 0: unlimited"),
    LF_ROW_F64(lf_plan_options, time_limit_s, "0.5", 0, 86400,
               "search after the first plan, in seconds of an ordinary core; it counts work, so results repeat; 0: no search"),
    LF_ROW_I32(lf_plan_options, short_ops, "5", 1, 1000000000, "a tensor that lives fewer operators is of class short"),
    LF_ROW_I32(lf_plan_options, long_ops, "20", 1, 1000000000, "a tensor that lives more operators is of class long"),
    LF_ROW_TEXT(lf_plan_options, strategy, "moefusion", "moefusion|greedy",
                "moefusion: the best of several orders, then a search; greedy: one pass, largest tensor first"),
};

const lf_options_section lf__sculptor_section = {"sculptor", "MemSculptor: the plan of a step's memory", rows, LF_COUNT(rows),
                                                 sizeof(lf_plan_options)};
