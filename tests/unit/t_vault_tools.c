/* SPDX-License-Identifier: Apache-2.0 */
/* The command `loongforge vault`. */
#include <sys/wait.h>

#include "vault_life.h"

/* Output of `loongforge vault ARGUMENTS`, errors included; *code is its exit status. */
static const char *run_command(const char *arguments, int *code)
{
    static char text[1 << 14];
    char command[2048];
    snprintf(command, sizeof command, "'%s' vault %s 2>&1", getenv("LOONGFORGE_BIN"), arguments);
    FILE *f = popen(command, "r");
    CHECK(f);
    size_t n = fread(text, 1, sizeof text - 1, f);
    text[n] = 0;
    int how = pclose(f);
    CHECK(WIFEXITED(how));
    *code = WEXITSTATUS(how);
    return text;
}

TEST(the_command_shows_checks_merges_and_deletes)
{
    if (!getenv("LOONGFORGE_BIN")) SKIP("LOONGFORGE_BIN is not set");
    char dir[512], other[512], arguments[2048];
    int code;
    snprintf(dir, sizeof dir, "%s", lf_test_path("command"));
    snprintf(other, sizeof other, "%s", lf_test_path("command_merged"));
    lf_map *map = fixture_map();
    make_vault(dir, map);
    static const struct {
        const char *form, *says;
        int code;
    } rows[] = {
        {"ls %s", "checkpoint_40", 0},
        {"verify %s", "4 checkpoints, every record good", 0},
        {"diff %s 10 40", "steps 10 and 40: slices with", 0},
        {"diff %s 10 41", "no checkpoint of step 41", 1},
        {"diff %s 10 x", "TO is 'x', expected a whole number", 2},
        {"restore-check %s", "step 40 restores", 0},
        {"restore-check %s --step 25", "step 20 restores", 0},
        {"merge %s %s --step=30", "base_model.bin written", 0},
        {"merge %s %s --step=30", "is there already", 1},
        {"gc %s", "gc deletes nothing without", 2},
        {"gc %s --after 30", "1 checkpoint deleted", 0},
        {"gc %s --keep-last 1", "0 checkpoints deleted", 0}, /* 30 needs both */
        {"ls %s", "checkpoint_30", 0},
        {"ls %s extra", "takes 1 argument, got 2", 2},
        {"nonsense %s", "expected ls, verify", 2},
        {"ls %s/none", "No such file", 1},
    };
    CHECK(mkdir(other, 0777) == 0);
    for (size_t i = 0; i < LF_COUNT(rows); i++) {
        char target[600];
        snprintf(target, sizeof target, "%s/base_model.bin", other);
        snprintf(arguments, sizeof arguments, rows[i].form, dir, target);
        const char *text = run_command(arguments, &code);
        if (code != rows[i].code || !strstr(text, rows[i].says)) FAIL_("vault %s: exit status %d: %s", arguments, code, text);
    }
    snprintf(arguments, sizeof arguments, "ls %s", other);
    CHECK_HAS(run_command(arguments, &code), "base_model.bin");
    char path[600];
    snprintf(path, sizeof path, "%s/checkpoint_30/diff_001.bin", dir);
    FILE *f = fopen(path, "r+b");
    CHECK(f && fseek(f, 500, SEEK_SET) == 0 && fputc('x', f) == 'x' && fclose(f) == 0);
    snprintf(arguments, sizeof arguments, "verify %s", dir);
    const char *text = run_command(arguments, &code);
    CHECK_EQ(code, 1);
    CHECK_HAS(text, "checkpoint_30/diff_001.bin, record at ");
    lf_map_unref(map);
}

LF_TEST_MAIN
