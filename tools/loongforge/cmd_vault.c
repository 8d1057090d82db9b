/* SPDX-License-Identifier: Apache-2.0 */
/* `loongforge vault`: checkpoints on disk. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cmd.h"

static const char usage[] = "vault (ls | verify | restore-check | gc) DIR, vault merge DIR TARGET, or vault diff DIR FROM TO";
static const char help[] =
    "ls lists checkpoints; verify reads and checks every record of all of them (exit code 1 when one is damaged);\n"
    "restore-check reads one checkpoint as a restore does; gc deletes what --keep-last, --keep-every and --after do not keep;\n"
    "merge writes base and diffs as one file that opens as base_model.bin; diff says how much of the state differs.";

typedef struct vault_args {
    const char *step, *keep_last, *keep_every, *after;
} vault_args;

/* A whole number of at least `least`; the default stays when the text is NULL. */
static int take_number(const char *key, const char *text, int64_t least, int64_t most, int64_t *value)
{
    char *end;
    if (!text) return CMD_GO;
    *value = strtoll(text, &end, 10);
    if (end == text || *end || *value < least || *value > most)
        return cmd_fail_usage("%s is '%s', expected a whole number from %lld to %lld", key, text, (long long)least,
                              (long long)most);
    return CMD_GO;
}

static int list(const char *dir)
{
    int32_t n = 0;
    if (lf_vault_list(dir, NULL, &n) < 0) return cmd_fail_lf(NULL);
    int32_t room = n + 8; /* some may be committed meanwhile */
    lf_checkpoint_info *infos = calloc((size_t)room, sizeof *infos);
    if (!infos) return cmd_fail("out of memory for %d checkpoints", n);
    if (lf_vault_list(dir, infos, &room) < 0) {
        free(infos);
        return cmd_fail_lf(NULL);
    }
    printf("%12s %12s %-19s %12s %12s %16s  %s\n", "step", "base", "time (UTC)", "bytes", "state", "slices written", "path");
    for (int32_t i = 0; i < room; i++) {
        char when[32] = "?", bytes[24], state[24], slices[40];
        time_t t = (time_t)infos[i].time_unix;
        struct tm parts;
        if (gmtime_r(&t, &parts)) strftime(when, sizeof when, "%Y-%m-%d %H:%M:%S", &parts);
        snprintf(slices, sizeof slices, "%d of %d", infos[i].n_changed, infos[i].n_slices);
        printf("%12lld %12lld %-19s %12s %12s %16s  %s\n", (long long)infos[i].step, (long long)infos[i].base_step, when,
               infos[i].step == infos[i].base_step ? "(base)" : cmd_bytes(bytes, sizeof bytes, infos[i].bytes),
               cmd_bytes(state, sizeof state, infos[i].raw_bytes), slices, infos[i].path);
    }
    free(infos);
    return CMD_OK;
}

static int diff(const char *dir, int64_t from, int64_t to)
{
    int32_t n = 0, room;
    int64_t bytes = 0, changed = 0;
    if (lf_vault_diff(dir, from, to, NULL, &n) < 0) return cmd_fail_lf(NULL);
    lf_plane_change *rows = calloc((size_t)n + 1, sizeof *rows);
    if (!rows) return cmd_fail("out of memory for %d rows", n);
    room = n;
    if (lf_vault_diff(dir, from, to, rows, &room) < 0) {
        free(rows);
        return cmd_fail_lf(NULL);
    }
    printf("%5s %-12s %10s %10s %12s %9s\n", "class", "role", "slices", "differ", "bytes", "share");
    for (int32_t i = 0; i < room; i++) {
        char text[24];
        bytes += rows[i].bytes;
        changed += rows[i].changed_bytes;
        printf("%5d %-12s %10d %10d %12s %8.2f%%\n", rows[i].klass, lf_role_name(rows[i].role), rows[i].n_slices,
               rows[i].n_changed, cmd_bytes(text, sizeof text, rows[i].changed_bytes),
               rows[i].bytes ? 100.0 * (double)rows[i].changed_bytes / (double)rows[i].bytes : 0);
    }
    char all[24], part[24];
    printf("steps %lld and %lld: slices with %s of %s differ\n", (long long)from, (long long)to,
           cmd_bytes(part, sizeof part, changed), cmd_bytes(all, sizeof all, bytes));
    free(rows);
    return CMD_OK;
}

static int verify(const char *dir)
{
    double from = cmd_now();
    char text[24];
    int32_t n = 0;
    if (lf_vault_verify(dir) < 0 || lf_vault_list(dir, NULL, &n) < 0) return cmd_fail_lf(NULL);
    printf("%d checkpoint%s, every record good (%s)\n", n, n == 1 ? "" : "s", cmd_seconds(text, sizeof text, cmd_now() - from));
    return CMD_OK;
}

static int check(const char *dir, int64_t step)
{
    lf_checkpoint_info info = {.size = sizeof info};
    char text[24];
    if (lf_vault_check(dir, step, &info) < 0) return cmd_fail_lf(NULL);
    printf("step %lld restores: %d slices, %s, all read and checked\n", (long long)info.step, info.n_slices,
           cmd_bytes(text, sizeof text, info.raw_bytes));
    return CMD_OK;
}

static int merge(const char *dir, int64_t step, const char *target)
{
    double from = cmd_now();
    char text[24];
    if (lf_vault_merge(dir, step, target) < 0) return cmd_fail_lf(NULL);
    printf("%s written (%s)\n", target, cmd_seconds(text, sizeof text, cmd_now() - from));
    return CMD_OK;
}

static int collect(const char *dir, const vault_args *a)
{
    int64_t keep_last = 0, keep_every = 0, after = -1;
    int32_t removed;
    int code = take_number("--keep-last", a->keep_last, 1, INT32_MAX, &keep_last);
    if (code == CMD_GO) code = take_number("--keep-every", a->keep_every, 1, INT32_MAX, &keep_every);
    if (code == CMD_GO) code = take_number("--after", a->after, 0, INT64_MAX, &after);
    if (code != CMD_GO) return code;
    if (keep_last == 0 && after < 0) return cmd_fail_usage("gc deletes nothing without --keep-last N or --after STEP");
    if (lf_vault_gc(dir, (int32_t)keep_last, (int32_t)keep_every, after, &removed) < 0) return cmd_fail_lf(NULL);
    printf("%d checkpoint%s deleted\n", removed, removed == 1 ? "" : "s");
    return CMD_OK;
}

static int run(const cmd_spec *spec, const vault_args *a)
{
    const char *what = spec->words[0], *dir = spec->words[1];
    int wanted = strcmp(what, "diff") == 0 ? 4 : strcmp(what, "merge") == 0 ? 3 : 2;
    int64_t step = -1, from = 0, to = 0;
    int code = take_number("--step", a->step, 0, INT64_MAX, &step);
    if (code != CMD_GO) return code;
    if (spec->n_words != wanted)
        return cmd_fail_usage("vault %s takes %d argument%s, got %d", what, wanted - 1, wanted == 2 ? "" : "s",
                              spec->n_words - 1);
    if (strcmp(what, "ls") == 0) return list(dir);
    if (strcmp(what, "verify") == 0) return verify(dir);
    if (strcmp(what, "restore-check") == 0) return check(dir, step);
    if (strcmp(what, "merge") == 0) return merge(dir, step, spec->words[2]);
    if (strcmp(what, "gc") == 0) return collect(dir, a);
    if (strcmp(what, "diff") != 0)
        return cmd_fail_usage("vault '%s' is unknown, expected ls, verify, diff, merge, restore-check or gc", what);
    code = take_number("FROM", spec->words[2], 0, INT64_MAX, &from);
    if (code == CMD_GO) code = take_number("TO", spec->words[3], 0, INT64_MAX, &to);
    return code == CMD_GO ? diff(dir, from, to) : code;
}

int lf_cmd_vault(int argc, char **argv)
{
    vault_args a = {0};
    const cmd_extra extras[] = {
        {"step", "STEP", "merge, restore-check: the newest checkpoint of at most this step [newest]", &a.step, NULL},
        {"keep-last", "N", "gc: keep the newest N", &a.keep_last, NULL},
        {"keep-every", "N", "gc: also keep steps that are multiples of N", &a.keep_every, NULL},
        {"after", "STEP", "gc: delete checkpoints of later steps", &a.after, NULL},
    };
    cmd_spec spec = {.usage = usage, .help = help, .extras = extras, .n_extras = 4, .min_words = 2, .max_words = 4};
    int code = cmd_parse(&spec, argc, argv);
    return code == CMD_GO ? run(&spec, &a) : code;
}
