/* SPDX-License-Identifier: Apache-2.0 */
/* Top-k with error feedback on the CPU: which entries of a chunk are largest, and moving them.
 *
 * The k-th largest magnitude is found digit by digit of its bits, from the top (radix select): three sweeps that count, and no sort.
 * Tiles count for themselves, so what comes out does not depend on how many threads there are. */
#include <string.h>

#include "nexus_int.h"

enum {
    TILE_WORDS = LF__TOPK_TILE / 64,
    BINS = LF__TOPK_BINS,
    NAN_KEY = 0x7fffffff, /* above infinity */
};

/* Digits of a magnitude's 31 bits. */
static const struct {
    int32_t shift;
    uint32_t mask;
} digits[] = {{20, 0x7ff}, {10, 0x3ff}, {0, 0x3ff}};

/* What tiles work on. */
typedef struct sweep {
    const lf_topk *t;
    uint32_t *bins; /* (tiles, BINS) */
    uint32_t *at;   /* (tiles): ties left for a tile, or how many entries are taken before it */
    uint32_t above; /* digits of the k-th magnitude that are known, in place */
    int32_t digit;  /* that is being counted */
} sweep;

static int64_t n_tiles(int64_t count) { return (count + LF__TOPK_TILE - 1) / LF__TOPK_TILE; }

static sweep sweep_of(const lf_topk *t)
{
    uint32_t *scratch = t->scratch;
    return (sweep){.t = t, .bins = scratch, .at = scratch + n_tiles(t->count) * BINS};
}

static void over_tiles(sweep *s, lf__for_fn fn)
{
    lf__parallel(s->t->count < 4 * LF__TOPK_TILE ? 1 : 0, n_tiles(s->t->count), fn, s);
}

static int64_t tile_end(const sweep *s, int64_t tile)
{
    const int64_t end = (tile + 1) * LF__TOPK_TILE;
    return end < s->t->count ? end : s->t->count;
}

/* ---- gradient and residual ------------------------------------------------------------------------------------------- */

static uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* Every NaN is the same one, so that results are the same bits on every device. */
static float one_nan(float x) { return x == x ? x : __builtin_nanf(""); }

/* What of v is not sent when it goes out as bf16: exact. Nothing is kept of what is not finite: it was sent. */
static float rest_of(float v, uint16_t sent)
{
    const float s = lf__f32_from_bf16(sent);
    return (bits_of(s) & 0x7fffffffu) < 0x7f800000u ? v - s : 0;
}

static void fold_tile(void *user, int64_t tile)
{
    const sweep *s = user;
    const lf_topk *t = s->t;
    const bool wide = t->dtype == LF_DTYPE_F32;
    for (int64_t i = tile * LF__TOPK_TILE, end = tile_end(s, tile); i < end; i++) {
        const float g = wide ? ((const float *)t->data)[i] : lf__f32_from_bf16(((const uint16_t *)t->data)[i]);
        t->residual[i] = one_nan(t->keep ? g + t->residual[i] : g);
    }
}

static void flush_tile(void *user, int64_t tile)
{
    const sweep *s = user;
    const lf_topk *t = s->t;
    for (int64_t i = tile * LF__TOPK_TILE, end = tile_end(s, tile); i < end; i++) {
        if (t->dtype == LF_DTYPE_F32) {
            ((float *)t->out)[i] = one_nan(((const float *)t->data)[i] + t->residual[i]);
            t->residual[i] = 0;
        } else {
            const float v = one_nan(lf__f32_from_bf16(((const uint16_t *)t->data)[i]) + t->residual[i]);
            const uint16_t sent = lf__bf16_from_f32(v);
            ((uint16_t *)t->out)[i] = sent;
            t->residual[i] = rest_of(v, sent);
        }
    }
}

/* ---- selecting ------------------------------------------------------------------------------------------------------- */

static uint32_t key_of(float x)
{
    const uint32_t key = bits_of(x) & 0x7fffffffu;
    return key > 0x7f800000u ? NAN_KEY : key;
}

/* Of entries that agree with the digits known so far, how many have which next digit. */
static void count_tile(void *user, int64_t tile)
{
    const sweep *s = user;
    uint32_t *bins = s->bins + tile * BINS;
    const int32_t shift = digits[s->digit].shift;
    const uint32_t mask = digits[s->digit].mask, known = s->digit ? ~0u << digits[s->digit - 1].shift : 0;
    memset(bins, 0, BINS * sizeof *bins);
    for (int64_t i = tile * LF__TOPK_TILE, end = tile_end(s, tile); i < end; i++) {
        const uint32_t key = key_of(s->t->residual[i]);
        if (((key ^ s->above) & known) == 0) bins[key >> shift & mask]++;
    }
}

/* The digit in which the `left`-th largest lies; `left` then counts within it. */
static void take_digit(sweep *s, int64_t *left)
{
    const int64_t tiles = n_tiles(s->t->count);
    for (uint32_t bin = digits[s->digit].mask;; bin--) {
        int64_t n = 0;
        for (int64_t tile = 0; tile < tiles; tile++) n += s->bins[tile * BINS + bin];
        if (n >= *left || bin == 0) {
            s->above |= bin << digits[s->digit].shift;
            return;
        }
        *left -= n;
    }
}

static void mark_tile(void *user, int64_t tile)
{
    const sweep *s = user;
    uint32_t ties = s->at[tile];
    for (int64_t i = tile * LF__TOPK_TILE, end = tile_end(s, tile); i < end; i += 64) {
        uint64_t word = 0;
        for (int64_t j = i; j < i + 64 && j < end; j++) {
            const uint32_t key = key_of(s->t->residual[j]);
            bool taken = key > s->above;
            if (key == s->above && ties) {
                ties--;
                taken = true;
            }
            word |= (uint64_t)taken << (j - i);
        }
        s->t->mask[i / 64] = (int64_t)word;
    }
}

static void select_largest(sweep *s)
{
    int64_t left = s->t->k;
    for (s->digit = 0; s->digit < (int32_t)LF_COUNT(digits); s->digit++) {
        over_tiles(s, count_tile);
        take_digit(s, &left);
    }
    for (int64_t tile = 0; tile < n_tiles(s->t->count); tile++) { /* ties from the front: the last sweep has counted them */
        const int64_t ties = s->bins[tile * BINS + (s->above & digits[2].mask)];
        s->at[tile] = (uint32_t)(ties < left ? ties : left);
        left -= s->at[tile];
    }
    over_tiles(s, mark_tile);
}

/* ---- packing and unpacking ------------------------------------------------------------------------------------------- */

/* A word of the mask, without bits behind the last entry. */
static uint64_t word_at(const lf_topk *t, int64_t word)
{
    const int64_t left = t->count - word * 64;
    const uint64_t bits = (uint64_t)t->mask[word];
    return left >= 64 ? bits : bits & ((1ull << left) - 1);
}

static int64_t word_end(const sweep *s, int64_t tile) { return (tile_end(s, tile) + 63) / 64; }

static void weigh_tile(void *user, int64_t tile)
{
    const sweep *s = user;
    uint32_t n = 0;
    for (int64_t w = tile * TILE_WORDS, end = word_end(s, tile); w < end; w++)
        n += (uint32_t)__builtin_popcountll(word_at(s->t, w));
    s->at[tile] = n;
}

/* How many entries are taken before each tile. */
static lf_status place_tiles(sweep *s)
{
    int64_t sum = 0;
    over_tiles(s, weigh_tile);
    for (int64_t tile = 0; tile < n_tiles(s->t->count); tile++) {
        const uint32_t n = s->at[tile];
        s->at[tile] = (uint32_t)sum;
        sum += n;
    }
    if (sum != s->t->k)
        return LF_FAIL(LF_ERR_PEER, "the mask has %lld of %lld entries, expected %lld: the ranks do not agree on it",
                       (long long)sum, (long long)s->t->count, (long long)s->t->k);
    return LF_OK;
}

static void pack_tile(void *user, int64_t tile)
{
    const sweep *s = user;
    const lf_topk *t = s->t;
    int64_t to = s->at[tile];
    for (int64_t w = tile * TILE_WORDS, end = word_end(s, tile); w < end; w++)
        for (uint64_t bits = word_at(t, w); bits; bits &= bits - 1, to++) {
            float *v = &t->residual[w * 64 + __builtin_ctzll(bits)];
            if (t->dtype == LF_DTYPE_F32) {
                ((float *)t->values)[to] = *v;
                *v = 0;
            } else {
                const uint16_t sent = lf__bf16_from_f32(*v);
                ((uint16_t *)t->values)[to] = sent;
                *v = rest_of(*v, sent);
            }
        }
}

static void scatter_tile(void *user, int64_t tile)
{
    const sweep *s = user;
    const lf_topk *t = s->t;
    const size_t width = t->dtype == LF_DTYPE_F32 ? sizeof(float) : sizeof(uint16_t);
    const int64_t begin = tile * LF__TOPK_TILE;
    int64_t from = s->at[tile];
    memset((char *)t->out + (size_t)begin * width, 0, (size_t)(tile_end(s, tile) - begin) * width);
    for (int64_t w = tile * TILE_WORDS, end = word_end(s, tile); w < end; w++)
        for (uint64_t bits = word_at(t, w); bits; bits &= bits - 1, from++) {
            const int64_t i = w * 64 + __builtin_ctzll(bits);
            if (t->dtype == LF_DTYPE_F32) ((float *)t->out)[i] = ((const float *)t->values)[from] * t->factor;
            else if (t->factor == 1) ((uint16_t *)t->out)[i] = ((const uint16_t *)t->values)[from];
            else ((uint16_t *)t->out)[i] = lf__bf16_from_f32(lf__f32_from_bf16(((const uint16_t *)t->values)[from]) * t->factor);
        }
}

static lf_status move(sweep *s, lf__for_fn fn)
{
    lf_status rc = place_tiles(s);
    if (rc == LF_OK) over_tiles(s, fn);
    return rc;
}

lf_status lf__nexus_cpu_topk(void *context, void *stream, int32_t now, const lf_topk *t, int32_t part)
{
    (void)context, (void)stream, (void)now;
    sweep s = sweep_of(t);
    if (t->count == 0) return LF_OK;
    switch (part) {
    case LF__TOPK_FOLD: over_tiles(&s, fold_tile); return LF_OK;
    case LF__TOPK_SELECT: select_largest(&s); return LF_OK;
    case LF__TOPK_PACK: return move(&s, pack_tile);
    case LF__TOPK_SCATTER: return move(&s, scatter_tile);
    default: over_tiles(&s, flush_tile); return LF_OK;
    }
}
