/* SPDX-License-Identifier: Apache-2.0 */
/* Counter-based random numbers (Philox4x32-10; Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3",
 * SC'11) and permutations without state. */
#include "base.h"

void lf__philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4])
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3], k0 = key[0], k1 = key[1];
    for (int32_t round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xD2511F53u * c0, b = (uint64_t)0xCD9E8D57u * c2;
        uint32_t n0 = (uint32_t)(b >> 32) ^ c1 ^ k0, n2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)b;
        c3 = (uint32_t)a;
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

void lf__rng_init(lf__rng *r, uint64_t seed, uint32_t a, uint32_t b, uint32_t c)
{
    *r = (lf__rng){.key = {(uint32_t)seed, (uint32_t)(seed >> 32)}, .counter = {0, a, b, c}};
}

uint32_t lf__rng_u32(lf__rng *r)
{
    if (r->left == 0) {
        lf__philox(r->counter, r->key, r->word);
        r->counter[0]++;
        r->left = 4;
    }
    return r->word[4 - r->left--];
}

double lf__rng_unit(lf__rng *r) { return (double)lf__rng_u32(r) * 0x1p-32; }

int32_t lf__rng_below(lf__rng *r, int32_t n) { return (int32_t)((uint64_t)lf__rng_u32(r) * (uint64_t)n >> 32); }

/* A four-round Feistel network over the smallest even number of bits that holds n; values outside [0, n) are walked on. */
int64_t lf__permute(uint64_t key, int64_t n, int64_t i)
{
    int32_t bits = 1;
    while (bits < 31 && ((int64_t)1 << (2 * bits)) < n) bits++;
    uint32_t mask = bits == 32 ? 0xffffffffu : ((uint32_t)1 << bits) - 1;
    const uint32_t k[2] = {(uint32_t)key, (uint32_t)(key >> 32)};
    do {
        uint32_t left = (uint32_t)(i >> bits) & mask, right = (uint32_t)i & mask;
        for (uint32_t round = 0; round < 4; round++) {
            const uint32_t counter[4] = {right, round, (uint32_t)bits, 0x7065726du};
            uint32_t word[4];
            lf__philox(counter, k, word);
            uint32_t next = left ^ (word[0] & mask);
            left = right;
            right = next;
        }
        i = (int64_t)left << bits | right;
    } while (i >= n);
    return i;
}
