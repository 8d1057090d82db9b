/* SPDX-License-Identifier: Apache-2.0 */
/* NCCL between processes, over the fakes: this program starts itself as both ranks and kills one; the other ends, with words. */
#include <signal.h>
#include <sys/wait.h>

#include "nexus_nccl_fixture.h"

/* This program again, as rank `index` of `world` with role `role`; its output goes to `log`. */
static pid_t spawn(const char *role, int32_t index, int32_t world, const char *meet, const char *log, const char *fault)
{
    const pid_t pid = fork();
    if (pid != 0) return pid;
    char number[2][16], self[4096] = "";
    snprintf(number[0], sizeof number[0], "%d", index);
    snprintf(number[1], sizeof number[1], "%d", world);
    setenv("NCCL_TEST_ROLE", role, 1);
    setenv("NCCL_TEST_RANK", number[0], 1);
    setenv("NCCL_TEST_WORLD", number[1], 1);
    setenv("NCCL_TEST_MEET", meet, 1);
    if (*fault) setenv(fault, "1", 1);
    if (!freopen(log, "w", stderr)) _exit(99);
    if (readlink("/proc/self/exe", self, sizeof self - 1) > 0) execl(self, self, (char *)NULL);
    _exit(98);
}

static int32_t env_number(const char *name) { return (int32_t)strtol(getenv(name), NULL, 10); }

static void stop(lf_status rc)
{
    fprintf(stderr, "%s: %s\n", lf_status_name(rc), lf_error_text());
    fflush(stderr);
    _exit(rc == LF_OK ? 0 : 10 - rc); /* LF_ERR_TIMEOUT 23, LF_ERR_PEER 24 */
}

/* What a child process does; never returns. */
static void play(const char *role)
{
    static float x[4];
    rank me = {.t = {.rank = env_number("NCCL_TEST_RANK"), .world = env_number("NCCL_TEST_WORLD")}}, *r = &me;
    nccl_options(&r->opts);
    r->opts.timeout_s = 1;
    r->opts.grace_s = 0.3;
    if (strncmp(role, "exit", 4) == 0) snprintf(r->opts.fail, LF_TEXT_MAX, "exit");
    lf_status rc = lf_nccl_id_by_file(&r->opts, getenv("NCCL_TEST_MEET"), r->t.rank, nccl_id);
    if (rc == LF_OK) rc = lf_device_open(&device, "cuda:0");
    if (rc == LF_OK) rc = lf_stream_open(device, 0, &r->stream);
    if (rc == LF_OK) rc = open_nccl(r);
    for (int32_t step = 0; rc == LF_OK && step < 100000; step++) { /* until somebody is killed */
        int64_t ticket;
        rc = r->t.post(r->t.user, x, 4, LF_DTYPE_F32, r->stream, &ticket);
        if (rc == LF_OK) rc = r->t.wait(r->t.user, ticket, r->stream, 10);
        if (step == 3) fprintf(stderr, "running\n"), fflush(stderr);
        const bool sits = strcmp(role, "exit-stuck") != 0; /* where a host is when a peer has died */
        if (rc == LF_OK && step > 3) rc = sits ? lf_stream_sync(r->stream) : r->t.settle(r->t.user, 10);
    }
    if (strcmp(role, "exit-deaf") == 0) lf__sleep_ns(60000000000); /* a caller that does nothing about the error */
    if (r->t.close) r->t.close(r->t.user);
    if (strcmp(role, "exit-stuck") == 0) lf__sleep_ns(60000000000); /* the end of the process hangs in the driver */
    stop(rc);
}

static bool log_has(const char *path, const char *words, char *text, size_t size)
{
    FILE *file = fopen(path, "r");
    const size_t n = file ? fread(text, 1, size - 1, file) : 0;
    text[n] = 0;
    if (file) fclose(file);
    return strstr(text, words) != NULL;
}

/* Two processes, rank 1 is killed once both run. -> exit code of rank 0 */
static int32_t kill_drill(const char *role, const char *fault, char *text, size_t size)
{
    static int32_t n;
    char meet[64], logs[2][300];
    int status = 0;
    pid_t pids[2];
    set_up_fakes();
    snprintf(meet, sizeof meet, "meet%d", ++n);
    for (int32_t i = 0; i < 2; i++) {
        char name[64], path[300];
        snprintf(name, sizeof name, "log%d.%d", n, i);
        snprintf(logs[i], sizeof logs[i], "%s", lf_test_path(name));
        snprintf(path, sizeof path, "%s", lf_test_path(meet));
        pids[i] = spawn(i ? "error" : role, i, 2, path, logs[i], i ? "" : fault);
        CHECK(pids[i] > 0);
    }
    for (int32_t i = 0; i < 2; i++)
        for (int32_t ms = 0; !log_has(logs[i], "running", text, size) && ms < 20000; ms += 5) lf__sleep_ns(5000000);
    CHECK_EQ(kill(pids[1], SIGKILL), 0);
    CHECK_EQ(waitpid(pids[1], &status, 0), pids[1]);
    for (int32_t ms = 0; waitpid(pids[0], &status, WNOHANG) == 0; ms += 5) { /* never a hang */
        if (ms > 30000) {
            kill(pids[0], SIGKILL);
            waitpid(pids[0], &status, 0);
            FAIL_("the survivor hangs");
        }
        lf__sleep_ns(5000000);
    }
    log_has(logs[0], "", text, size);
    CHECK(WIFEXITED(status));
    return WEXITSTATUS(status);
}

TEST(nccl_survives_a_killed_peer)
{
    char text[2000];
    for (int32_t i = 0; i < 3; i++) {
        const int32_t code = kill_drill("error", "", text, sizeof text);
        if (code != 10 - LF_ERR_TIMEOUT) FAIL_("exit code %d: %s", code, text);
        CHECK_HAS(text, "rank 0 of 2: a collective by itself is not done after");
    }
}

/* The abort hangs, so the host stays in its wait for the device: the guard ends the process. */
TEST(nccl_ends_a_process_that_is_stuck)
{
    char text[2000];
    CHECK_EQ(kill_drill("exit", "FAKE_NCCL_ABORT_HANGS", text, sizeof text), LF_NCCL_EXIT_CODE);
    CHECK_HAS(text, "loongforge: NCCL: rank 0 of 2: a collective by itself is not done after");
    CHECK_HAS(text, "exit with code 75 after 0.3 s of grace (fail = exit)");
    CHECK_EQ(kill_drill("exit-deaf", "", text, sizeof text), LF_NCCL_EXIT_CODE);
    CHECK_EQ(kill_drill("exit-stuck", "FAKE_NCCL_ABORT_HANGS", text, sizeof text), LF_NCCL_EXIT_CODE);
    CHECK_EQ(kill_drill("exit", "", text, sizeof text), 10 - LF_ERR_TIMEOUT); /* it was told and closed in time */
}

int main(int argc, char **argv)
{
    const char *role = getenv("NCCL_TEST_ROLE");
    if (role) play(role);
    return lf_test_main(argc, argv);
}
