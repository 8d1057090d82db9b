/* SPDX-License-Identifier: Apache-2.0 */
/* The CPU's kernels that round f32 to bf16 and widen it: a scalar computation's bits, of any count, from anywhere. */
#include "lf_test.h"
#include "nexus/nexus_int.h"
#include "wire_cases.h"

static void check_narrow(const float *data, int64_t n, int32_t start)
{
    static uint16_t room[300100];
    uint16_t *wire = room + start;
    wire[n] = 0xabcd;
    CHECK_OK(lf__nexus_cpu.narrow(NULL, NULL, 1, data, wire, n));
    for (int64_t i = 0; i < n; i++) {
        const bool same = isnan(data[i]) ? isnan(wire_widen(wire[i], 1)) : wire[i] == wire_narrow(data[i]);
        if (!same)
            FAIL_("%.9g [%lld] becomes 0x%04x, expected 0x%04x", (double)data[i], (long long)i, wire[i], wire_narrow(data[i]));
    }
    CHECK_EQ(wire[n], 0xabcd);
}

static void check_widen(const uint16_t *wire, int64_t n, int32_t start, float factor)
{
    static float room[300100];
    float *data = room + start;
    data[n] = 42;
    CHECK_OK(lf__nexus_cpu.widen(NULL, NULL, 1, wire, data, n, factor));
    for (int64_t i = 0; i < n; i++)
        if (!wire_same(data[i], wire_widen(wire[i], factor)))
            FAIL_("0x%04x [%lld] times %g becomes %.9g", wire[i], (long long)i, (double)factor, (double)data[i]);
    CHECK_EQ(data[n], 42);
}

TEST(wire_kernels_are_a_scalar_computation)
{
    static float data[300100];
    static uint16_t wire[300100];
    for (size_t s = 0; s < LF_COUNT(wire_sizes); s++)
        for (size_t k = 0; k < LF_COUNT(wire_starts); k++) {
            const int64_t n = wire_sizes[s];
            wire_fill(data + wire_starts[k][0], n, (uint32_t)k);
            check_narrow(data + wire_starts[k][0], n, wire_starts[k][1]);
            for (int64_t i = 0; i < n; i++)
                wire[wire_starts[k][1] + i] = (uint16_t)(wire_bits(data[wire_starts[k][0] + i]) >> 16);
            check_widen(wire + wire_starts[k][1], n, wire_starts[k][0], wire_factors[k % LF_COUNT(wire_factors)]);
        }
}

/* All numbers of bf16, and all neighbours of every tie between two of them. */
TEST(wire_rounds_everything)
{
    float data[4];
    uint16_t wire[4], back;
    for (uint32_t bits = 0; bits < 65536; bits++) {
        for (uint32_t i = 0; i < 4; i++) data[i] = wire_float(bits << 16 | (i ? 0x7ffeu + i : 0));
        CHECK_OK(lf__nexus_cpu.narrow(NULL, NULL, 1, data, wire, 4));
        for (int32_t i = 0; i < 4; i++)
            if (isnan(data[i]) ? !isnan(wire_widen(wire[i], 1)) : wire[i] != wire_narrow(data[i]))
                FAIL_("0x%08x becomes 0x%04x, expected 0x%04x", wire_bits(data[i]), wire[i], wire_narrow(data[i]));
        CHECK_OK(lf__nexus_cpu.widen(NULL, NULL, 1, wire, data, 1, 1));
        CHECK_OK(lf__nexus_cpu.narrow(NULL, NULL, 1, data, &back, 1));
        if (!isnan(data[0])) CHECK_EQ(back, wire[0]);
    }
}

LF_TEST_MAIN
