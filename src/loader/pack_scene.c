/* SPDX-License-Identifier: Apache-2.0 */
/* What is in a scene: draws that depend on (seed, number) alone. */
#include <math.h>

#include "pack_int.h"

enum { TAG_SCENE = 0x7363656e };

const char *const lf__shape_names[LF__SHAPES] = {"circle", "square", "triangle", "ring", "cross", "star"};
const char *const lf__colour_names[LF__COLOURS] = {"red", "green", "blue", "yellow", "purple", "orange", "white", "cyan"};
const char *const lf__texture_names[LF__TEXTURES] = {"", "striped", "checked"}; /* plain is not spoken of */
const char *const lf__quadrant_names[4] = {"top left", "top right", "bottom left", "bottom right"};

static const double colour_rgb[LF__COLOURS][3] = {{214, 40, 40},  {48, 168, 64},  {48, 84, 224},   {236, 212, 48},
                                                  {150, 56, 196}, {244, 140, 36}, {236, 236, 236}, {56, 204, 216}};

const lf__scene_recipe lf__recipe = {
    .side = {64, 96, 128, LF__SCENE_SIDE_MOST},
    .one = 0.50,
    .two = 0.40,
    .large = {0.19, 0.215},
    .small = {0.13, 0.15},
    .shift = 0.03,
    .tone = 14,
    .striped = 0.25,
    .checked = 0.25,
    .tile = 0.0625,
    .dark = 0.62,
    .grey = {20, 80},
    .tint = 12,
    .uneven = 0.5,
    .slope = {8, 24},
    .noise = 10,
    .describe = 0.5,
    .count = 0.15,
    .ask_place = 0.40,
    .ask_colour = 0.25,
    .ask_shape = 0.25,
};

static double between(lf__rng *r, double low, double high) { return low + (high - low) * lf__rng_unit(r); }

/* The first n of a random order of [0, most). */
static void draw_distinct(lf__rng *r, int32_t most, int32_t n, int32_t *out)
{
    int32_t all[LF__COLOURS];
    for (int32_t i = 0; i < most; i++) all[i] = i;
    for (int32_t i = 0; i < n; i++) {
        int32_t k = i + lf__rng_below(r, most - i);
        out[i] = all[k];
        all[k] = all[i];
    }
}

static void sort_small(int32_t *a, int32_t n)
{
    for (int32_t i = 1; i < n; i++)
        for (int32_t k = i; k > 0 && a[k - 1] > a[k]; k--) {
            int32_t t = a[k];
            a[k] = a[k - 1];
            a[k - 1] = t;
        }
}

static void make_object(lf__scene_object *o, lf__rng *r)
{
    const lf__scene_recipe *k = &lf__recipe;
    o->large = lf__rng_below(r, 2) == 0;
    o->r = o->large ? between(r, k->large[0], k->large[1]) : between(r, k->small[0], k->small[1]);
    o->x = 0.25 + 0.5 * (o->quadrant % 2) + between(r, -k->shift, k->shift);
    o->y = 0.25 + 0.5 * (o->quadrant / 2) + between(r, -k->shift, k->shift);
    for (int32_t c = 0; c < 3; c++) o->rgb[c] = colour_rgb[o->colour][c] + between(r, -k->tone, k->tone);
    double texture = lf__rng_unit(r);
    o->texture = texture < k->striped ? 1 : texture < k->striped + k->checked ? 2 : 0;
}

/* A random direction without sine and cosine, whose last bit depends on the C library: a point of the disc, normalised. */
static void draw_direction(lf__rng *r, double d[2])
{
    double n2;
    do {
        d[0] = between(r, -1, 1);
        d[1] = between(r, -1, 1);
        n2 = d[0] * d[0] + d[1] * d[1];
    } while (n2 > 1 || n2 < 0.01);
    double n = sqrt(n2);
    d[0] /= n;
    d[1] /= n;
}

static void make_ground(lf__scene *s, lf__rng *r)
{
    const lf__scene_recipe *k = &lf__recipe;
    double grey = between(r, k->grey[0], k->grey[1]);
    for (int32_t c = 0; c < 3; c++) s->ground[c] = grey + between(r, -k->tint, k->tint);
    s->slope[0] = s->slope[1] = s->noise = 0;
    if (lf__rng_unit(r) >= k->uneven) return;
    double amplitude = between(r, k->slope[0], k->slope[1]);
    draw_direction(r, s->slope);
    s->slope[0] *= 2 * amplitude;
    s->slope[1] *= 2 * amplitude;
    s->noise = k->noise;
}

void lf__scene_make(lf__scene *s, int64_t seed, int64_t number)
{
    lf__rng r;
    int32_t colour[LF__MOST_OBJECTS], shape[LF__MOST_OBJECTS], quadrant[LF__MOST_OBJECTS];
    lf__rng_init(&r, (uint64_t)seed, (uint32_t)number, (uint32_t)(number >> 32), TAG_SCENE);
    s->side = lf__recipe.side[lf__rng_below(&r, 4)];
    double n = lf__rng_unit(&r);
    s->n = n < lf__recipe.one ? 1 : n < lf__recipe.one + lf__recipe.two ? 2 : 3;
    draw_distinct(&r, LF__COLOURS, s->n, colour);
    draw_distinct(&r, LF__SHAPES, s->n, shape);
    draw_distinct(&r, 4, s->n, quadrant);
    sort_small(quadrant, s->n);
    for (int32_t i = 0; i < s->n; i++) {
        s->object[i] = (lf__scene_object){.colour = colour[i], .shape = shape[i], .quadrant = quadrant[i]};
        make_object(&s->object[i], &r);
    }
    make_ground(s, &r);
}
