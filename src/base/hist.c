/* SPDX-License-Identifier: Apache-2.0 */
/* Histogram of durations: 64 powers of two with 32 linear steps each. */
#include <math.h>

#include "base.h"

static int32_t bin_of(uint64_t ns)
{
    if (ns < 32) return (int32_t)ns;
    int32_t exponent = 63 - __builtin_clzll(ns);
    return (exponent - 4) * 32 + (int32_t)((ns >> (exponent - 5)) & 31u);
}

/* Middle of a bin, ns. */
static double bin_value(int32_t bin)
{
    if (bin < 32) return bin;
    int32_t exponent = bin / 32 + 4;
    double step = ldexp(1.0, exponent - 5);
    return ldexp(1.0, exponent) + (bin % 32 + 0.5) * step;
}

void lf__hist_add(lf__hist *h, int64_t ns)
{
    if (ns < 0) ns = 0;
    double s = (double)ns * 1e-9;
    h->count++;
    h->sum_s += s;
    h->sum_sq += s * s;
    if (ns > h->max_ns) h->max_ns = ns;
    h->bin[bin_of((uint64_t)ns)]++;
}

double lf__hist_percentile(const lf__hist *h, double percent)
{
    if (h->count == 0) return 0;
    int64_t rank = (int64_t)ceil(percent / 100.0 * (double)h->count), seen = 0;
    if (rank < 1) rank = 1;
    for (int32_t i = 0; i < (int32_t)LF_COUNT(h->bin); i++) {
        seen += h->bin[i];
        if (seen >= rank) return fmin(bin_value(i), (double)h->max_ns) * 1e-9;
    }
    return (double)h->max_ns * 1e-9;
}

double lf__hist_mean(const lf__hist *h) { return h->count ? h->sum_s / (double)h->count : 0; }

double lf__hist_std(const lf__hist *h)
{
    if (h->count < 2) return 0;
    double mean = lf__hist_mean(h), var = h->sum_sq / (double)h->count - mean * mean;
    return var > 0 ? sqrt(var) : 0;
}
