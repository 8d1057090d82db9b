/* SPDX-License-Identifier: Apache-2.0 */
/* Bad samples: each is noted once, and counted against the budget. */
#include <string.h>

#include "loader_int.h"

lf_status lf__bad_open(lf__bad_list *list, int64_t n_samples, double budget)
{
    *list = (lf__bad_list){.n_samples = n_samples, .budget = budget};
    list->seen = lf__alloc((size_t)(n_samples + 7) / 8);
    list->text = lf__alloc(LF__BAD_TEXT_BYTES);
    return list->seen && list->text ? LF_OK : LF_FAIL(LF_ERR_NOMEM, "list of bad samples");
}

void lf__bad_close(lf__bad_list *list)
{
    lf__free(list->seen);
    lf__free(list->text);
    *list = (lf__bad_list){0};
}

/* Lines are shorter than the room, so dropping whole old lines always makes enough. */
static void make_room(lf__bad_list *list, size_t bytes)
{
    size_t drop = 0;
    while (list->used - drop + bytes > LF__BAD_TEXT_BYTES) {
        const char *end = memchr(list->text + drop, '\n', list->used - drop);
        drop = end ? (size_t)(end - list->text) + 1 : list->used;
    }
    memmove(list->text, list->text + drop, list->used - drop);
    list->used -= drop;
}

bool lf__bad_add(lf__bad_list *list, int64_t sample, const char *line)
{
    uint8_t bit = (uint8_t)(1u << (sample & 7));
    if (list->seen[sample >> 3] & bit) return false;
    list->seen[sample >> 3] |= bit;
    list->count++;
    size_t n = strlen(line);
    make_room(list, n + 1);
    memcpy(list->text + list->used, line, n);
    list->text[list->used + n] = '\n';
    list->used += n + 1;
    return true;
}

lf_status lf__bad_check_budget(const lf__bad_list *list)
{
    if ((double)list->count <= list->budget * (double)list->n_samples) return LF_OK;
    return LF_FAIL(LF_ERR_BUDGET,
                   "%lld of %lld samples are bad (%.3g %%), more than bad_budget = %g; hint: `loongforge data verify` lists them",
                   (long long)list->count, (long long)list->n_samples, 100.0 * (double)list->count / (double)list->n_samples,
                   list->budget);
}
