/* SPDX-License-Identifier: Apache-2.0 */
/* Resizing weights and the eight orientations. */
#include <math.h>
#include <string.h>

#include "loader_int.h"

bool lf__filter_open(lf__filter *f, int32_t max_size)
{
    f->first = lf__alloc_array((size_t)max_size, sizeof *f->first);
    f->count = lf__alloc_array((size_t)max_size, sizeof *f->count);
    f->from = lf__alloc_array((size_t)max_size, sizeof *f->from);
    return f->first && f->count && f->from;
}

void lf__filter_close(lf__filter *f)
{
    lf__free(f->first);
    lf__free(f->count);
    lf__free(f->from);
    lf__free(f->weight);
    *f = (lf__filter){0};
}

/* A triangle of half-width 1, widened by the factor of shrinking; weights are cut at the picture's edge and sum to 1. */
bool lf__filter_set(lf__filter *f, int32_t size, int32_t n_in, double from, double to)
{
    double scale = (to - from) / size, support = scale > 1 ? scale : 1;
    size_t need = (size_t)size * ((size_t)ceil(support) * 2 + 2);
    if (need > f->room) {
        float *grown = lf__realloc(f->weight, need, sizeof *grown);
        if (!grown) return false;
        f->weight = grown;
        f->room = need;
    }
    int32_t used = 0;
    for (int32_t i = 0; i < size; i++) {
        double centre = from + (i + 0.5) * scale, sum = 0;
        int32_t first = (int32_t)fmax(floor(centre - support + 0.5), 0);
        int32_t end = (int32_t)fmin(floor(centre + support + 0.5), n_in);
        if (first > n_in - 1) first = n_in - 1; /* a box that ends at the picture's edge, after rounding */
        if (end <= first) end = first + 1;
        for (int32_t k = first; k < end; k++) {
            double w = 1 - fabs((k - centre + 0.5) / support);
            sum += w > 0 ? w : 0;
        }
        for (int32_t k = first; k < end; k++) {
            double w = 1 - fabs((k - centre + 0.5) / support);
            f->weight[used + k - first] = sum > 0 ? (float)((w > 0 ? w : 0) / sum) : 1.0f / (float)(end - first);
        }
        f->first[i] = first;
        f->count[i] = end - first;
        f->from[i] = used;
        used += end - first;
    }
    return true;
}

/* EXIF: which side of the upright picture the stored first row and first column are.
 * 1 top left, 2 top right, 3 bottom right, 4 bottom left, 5 left top, 6 right top, 7 right bottom, 8 left bottom. */
void lf__orient(int32_t orientation, int32_t size, int32_t y, int32_t x, int32_t *stored_y, int32_t *stored_x)
{
    int32_t last = size - 1;
    bool swap = orientation >= 5;
    int32_t row = swap ? x : y, column = swap ? y : x;
    bool flip_row = orientation == 3 || orientation == 4 || orientation == 6 || orientation == 7;
    bool flip_column = orientation == 2 || orientation == 3 || orientation == 7 || orientation == 8;
    *stored_y = flip_row ? last - row : row;
    *stored_x = flip_column ? last - column : column;
}
