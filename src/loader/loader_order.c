/* SPDX-License-Identifier: Apache-2.0 */
/* Which samples a batch holds and how they are varied: functions of (seed, epoch, sample) and nothing else. */
#include <math.h>

#include "loader_int.h"

enum { TAG_AUGMENT = 0x61756721 };

static uint64_t key_of(int64_t seed, int64_t epoch, int64_t what)
{
    const int64_t words[3] = {seed, epoch, what};
    return lf__hash(words, sizeof words, 0).lo;
}

/* Is an epoch over when `done` of its samples are? */
static bool is_over(const lf__order *o, int64_t done)
{
    int64_t global = (int64_t)o->batch * o->world;
    return o->drop_last ? o->n_samples - done < global : done >= o->n_samples;
}

void lf__order_next(const lf__order *o, lf__cursor *at, int64_t *epoch, int64_t *number, int64_t *position)
{
    int64_t global = (int64_t)o->batch * o->world;
    if (is_over(o, at->done)) *at = (lf__cursor){at->epoch + 1, 0}; /* a state saved with another batch size */
    *epoch = at->epoch;
    *number = at->done / global;
    *position = at->done + (int64_t)o->rank * o->batch;
    at->done += global;
    if (is_over(o, at->done)) *at = (lf__cursor){at->epoch + 1, 0};
}

int64_t lf__order_sample(const lf__order *o, int64_t epoch, int64_t position, bool *repeated)
{
    *repeated = position >= o->n_samples;
    position %= o->n_samples;
    return o->shuffle ? lf__permute(key_of(o->seed, epoch, -1), o->n_samples, position) : position;
}

int64_t lf__order_substitute(const lf__order *o, int64_t epoch, int64_t sample, int32_t attempt)
{
    uint64_t key = key_of(o->seed, epoch, sample);
    int64_t at = attempt % o->n_samples, other = lf__permute(key, o->n_samples, at);
    if (other != sample) return other;
    /* The sample itself is skipped: what comes last in its permutation takes its place. */
    return lf__permute(key, o->n_samples, o->n_samples - 1);
}

/* A box of 50 to 100 % of the picture's area whose sides are stretched by at most 4/3, anywhere in it; mirrored half the
 * time. The seed is the run's, the counter the sample's, so no two ranks cut the same box twice. */
void lf__order_augment(const lf__order *o, int64_t epoch, int64_t sample, lf__decode_want *want)
{
    lf__rng r;
    lf__rng_init(&r, key_of(o->seed, epoch, TAG_AUGMENT), (uint32_t)sample, (uint32_t)(sample >> 32), TAG_AUGMENT);
    double area = 0.5 + 0.5 * lf__rng_unit(&r), stretch = sqrt(0.75 + (4.0 / 3.0 - 0.75) * lf__rng_unit(&r));
    double width = fmin(sqrt(area) * stretch, 1), height = fmin(sqrt(area) / stretch, 1);
    want->left = (1 - width) * lf__rng_unit(&r);
    want->top = (1 - height) * lf__rng_unit(&r);
    want->right = fmin(want->left + width, 1);
    want->bottom = fmin(want->top + height, 1);
    want->mirror = lf__rng_u32(&r) & 1u;
}
