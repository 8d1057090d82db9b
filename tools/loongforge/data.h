/* SPDX-License-Identifier: Apache-2.0 */
/** @file data.h  What the files of `loongforge data` share. */
#ifndef LF_DATA_H
#define LF_DATA_H

#include "loongforge/loongforge.h"

/** Samples [first, end) of a set of n. */
typedef struct data_range {
    int64_t first, end, n;
} data_range;

/** Write a contact sheet of the samples as a JPEG, and their texts into a file of the same name with the ending .txt.
 *  A sample that cannot be decoded is a red cell, and the text says why. Returns an exit code. */
int data_show(const lf_dataset *set, const data_range *range, const char *out, int32_t image_size, int64_t max_pixels);

#endif
