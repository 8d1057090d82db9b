/* SPDX-License-Identifier: Apache-2.0 */
/* XXH3 through xxHash's library. */
#include <stdio.h>
#include <xxhash.h>

#include "base.h"

lf__hash128 lf__hash(const void *data, size_t bytes, uint64_t seed)
{
    XXH128_hash_t h = XXH3_128bits_withSeed(data, bytes, seed);
    return (lf__hash128){h.low64, h.high64};
}

void lf__hash_hex(lf__hash128 h, char text[33])
{
    snprintf(text, 33, "%016llx%016llx", (unsigned long long)h.hi, (unsigned long long)h.lo);
}

bool lf__hash_parse(const char *hex, lf__hash128 *h)
{
    uint64_t word[2] = {0, 0};
    for (int32_t i = 0; i < 32; i++) {
        char c = hex[i];
        uint64_t digit;
        if (c >= '0' && c <= '9') digit = (uint64_t)(c - '0');
        else if (c >= 'a' && c <= 'f') digit = (uint64_t)(c - 'a' + 10);
        else return false;
        word[i / 16] = word[i / 16] << 4 | digit;
    }
    *h = (lf__hash128){.lo = word[1], .hi = word[0]};
    return hex[32] == 0;
}
