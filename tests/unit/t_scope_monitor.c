/* SPDX-License-Identifier: Apache-2.0 */
/* The monitor over an NVML that is not there: tests/fakes/fake_nvml.c. */
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "base/base.h"
#include "lf_test.h"
#include "loongforge/scope.h"

static const char *fake(void) { return getenv("LF_FAKE_NVML"); }

static lf_monitor_summary summary_of(lf_monitor *m)
{
    lf_monitor_summary s = {.size = sizeof s};
    CHECK_OK(lf_monitor_get(m, &s));
    return s;
}

static void wait_for(lf_monitor *m, int64_t samples)
{
    while (summary_of(m).samples < samples) lf__sleep_ns(200000);
}

TEST(monitor_samples_and_sums_up)
{
    lf_monitor *m;
    lf_monitor_sample s = {.size = sizeof s};
    CHECK_OK(lf_monitor_open(&m, "GPU-0", 1, fake()));
    wait_for(m, 6);
    lf_monitor_summary sum = summary_of(m);
    CHECK(sum.most.sm_pct == 90 && sum.mean.sm_pct > 30 && sum.mean.sm_pct < 90);
    CHECK(sum.mean.memory_pct == 40 && sum.mean.memory_used_bytes == 700);
    CHECK(sum.mean.sm_mhz == 1980 && sum.mean.memory_mhz == 2619 && sum.mean.power_w == 512.5);
    CHECK(sum.mean.pcie_tx_bytes_s == 3 * 1024 && sum.mean.pcie_rx_bytes_s == 7 * 1024);
    CHECK(sum.mean.nvlink_tx_bytes_s > 0 && sum.most.t_ns > sum.mean.t_ns);
    CHECK_OK(lf_monitor_latest(m, 0, &s));
    CHECK(s.nvlink_tx_bytes_s > 0 && s.nvlink_rx_bytes_s > 1.99 * s.nvlink_tx_bytes_s);
    const int64_t newest = s.t_ns;
    CHECK_OK(lf_monitor_latest(m, 3, &s));
    CHECK(s.t_ns < newest);
    CHECK_STATUS(lf_monitor_latest(m, LF_MONITOR_KEPT, &s), LF_END);
    CHECK_STATUS(lf_monitor_latest(m, -1, &s), LF_ERR_INVALID);
    s.size = 3;
    CHECK_STATUS(lf_monitor_latest(m, 0, &s), LF_ERR_INVALID);
    lf_monitor_close(m);
}

TEST(monitor_lives_with_what_a_gpu_tells)
{
    lf_monitor *m;
    lf_monitor_sample s = {.size = sizeof s};
    CHECK_OK(lf_monitor_open(&m, "1", 1, fake())); /* each sample takes several intervals */
    wait_for(m, 4);
    lf_monitor_summary sum = summary_of(m);
    CHECK(sum.missed >= sum.samples); /* the newest one's may be still to come */
    CHECK(sum.mean.power_w == -1 && sum.most.nvlink_rx_bytes_s == -1 && sum.mean.sm_mhz == 1980);
    CHECK_OK(lf_monitor_latest(m, 0, &s));
    CHECK(s.power_w == -1 && s.nvlink_tx_bytes_s == -1 && s.memory_used_bytes == 700);
    lf_monitor_close(m);
}

TEST(monitor_says_why_not)
{
    lf_monitor *m = (lf_monitor *)&m;
    CHECK_STATUS(lf_monitor_open(&m, "GPU-9", 0, fake()), LF_ERR_NOTFOUND);
    CHECK_HAS(lf_error_text(), "GPU-9: Not Found");
    CHECK(m == NULL);
    CHECK_STATUS(lf_monitor_open(&m, "first", 0, fake()), LF_ERR_INVALID);
    CHECK_HAS(lf_error_text(), "gpu is 'first', expected GPU-");
    CHECK_STATUS(lf_monitor_open(&m, "0", -1, fake()), LF_ERR_INVALID);
    CHECK_STATUS(lf_monitor_open(&m, "0", 0, "/nowhere/libnvidia-ml.so.1"), LF_ERR_UNSUPPORTED);
    CHECK_HAS(lf_error_text(), "no NVML: /nowhere");
    lf_monitor_close(NULL);
    void *library = dlopen(fake(), RTLD_NOW);
    void *symbol = library ? dlsym(library, "fake_nvml_started") : NULL;
    int (*started)(void) = NULL;
    memcpy(&started, &symbol, sizeof symbol);
    CHECK(started && started() == 0); /* every start was ended */
}

LF_TEST_MAIN
