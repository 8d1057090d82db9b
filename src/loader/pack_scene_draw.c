/* SPDX-License-Identifier: Apache-2.0 */
/* Drawing a scene: signed distances with a pixel of antialiasing. Only +, -, *, / and square roots, which IEEE 754 fixes to
 * the last bit, so that a scene has the same pixels on every machine. */
#include <math.h>

#include "pack_int.h"

enum { TAG_NOISE = 0x6e6f6973 };

static double length(double x, double y) { return sqrt(x * x + y * y); }
static double bar(double x, double y, double half_x, double half_y) { return fmax(fabs(x) - half_x, fabs(y) - half_y); }

/* Five points, one up. The plane is folded into half a point by mirrors; its tip lies on the positive first axis. */
static double star(double x, double y, double r)
{
    /* normals of the mirrors: (cos 36°, ∓ sin 36°); the inner radius is 0.45 of the outer one */
    static const double c36 = 0.80901699437494742, s36 = 0.58778525229247313;
    double outer = 1.1 * r, inner = 0.45 * outer, tip = -y, across = fabs(x);
    double d = fmax(c36 * across - s36 * tip, 0) * 2;
    across -= d * c36;
    tip += d * s36;
    d = fmax(-c36 * across - s36 * tip, 0) * 2;
    across += d * c36;
    tip += d * s36;
    across = fabs(across);
    double dx = inner * c36 - outer, dy = inner * s36; /* from the tip to the notch */
    return ((tip - outer) * dy - across * dx) / length(dx, dy);
}

/* Distance to the edge, negative inside; x, y from the centre, in shares of the picture's side. */
static double distance(int32_t shape, double x, double y, double r)
{
    switch (shape) {
    case 0: return length(x, y) - r;
    case 1: return bar(x, y, 0.84 * r, 0.84 * r);
    case 2: {
        double t = y - 0.15 * r;
        return fmax(t - 0.55 * r, 0.8660254 * fabs(x) - 0.5 * t - 0.55 * r);
    }
    case 3: return fabs(length(x, y) - 0.74 * r) - 0.26 * r;
    case 4: return fmin(bar(x, y, 0.32 * r, r), bar(x, y, r, 0.32 * r));
    default: return star(x, y, r);
    }
}

static bool is_odd(double cells) { return ((int64_t)floor(cells) & 1) != 0; }

static double shade(int32_t texture, double x, double y)
{
    double tile = lf__recipe.tile;
    if (texture == 1) return is_odd((x + y) / tile) ? lf__recipe.dark : 1;
    if (texture == 2) return is_odd(floor(x / tile) + floor(y / tile)) ? lf__recipe.dark : 1;
    return 1;
}

static void add_object(const lf__scene_object *o, int32_t side, double u, double v, double rgb[3])
{
    double x = u - o->x, y = v - o->y, cover = fmin(fmax(0.5 - distance(o->shape, x, y, o->r) * side, 0), 1);
    if (cover == 0) return;
    double k = cover * shade(o->texture, x, y);
    for (int32_t c = 0; c < 3; c++) rgb[c] = rgb[c] * (1 - cover) + k * o->rgb[c];
}

void lf__scene_draw(const lf__scene *s, int64_t seed, int64_t number, uint8_t *rgb)
{
    lf__rng r;
    lf__rng_init(&r, (uint64_t)seed, (uint32_t)number, (uint32_t)(number >> 32), TAG_NOISE);
    for (int32_t i = 0; i < s->side * s->side; i++, rgb += 3) {
        double u = (i % s->side + 0.5) / s->side, v = (i / s->side + 0.5) / s->side, p[3];
        double light = s->slope[0] * (u - 0.5) + s->slope[1] * (v - 0.5);
        if (s->noise > 0) light += s->noise * (2 * lf__rng_unit(&r) - 1);
        for (int32_t c = 0; c < 3; c++) p[c] = s->ground[c] + light;
        for (int32_t k = 0; k < s->n; k++) add_object(&s->object[k], s->side, u, v, p);
        for (int32_t c = 0; c < 3; c++) rgb[c] = (uint8_t)floor(fmin(fmax(p[c], 0), 255) + 0.5);
    }
}
