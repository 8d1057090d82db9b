/* SPDX-License-Identifier: Apache-2.0 */
/* `loongforge train`: checks the arguments against the options tables and the data set, then becomes `python3 -m
 * loongforge.train` with the same arguments. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cmd.h"

static int run_python(int argc, char **argv)
{
    static char module_flag[] = "-m", module[] = "loongforge.train";
    char python[4096];
    if (!cmd_find_python(python, sizeof python))
        return cmd_fail("there is no python3 beside this command or on the PATH; hint: `make build` sets one up in .venv");
    char **args = calloc((size_t)argc + 3, sizeof *args);
    if (!args) return cmd_fail("no memory for %d arguments", argc);
    args[0] = python;
    args[1] = module_flag;
    args[2] = module;
    for (int i = 1; i < argc; i++) args[i + 2] = argv[i];
    execv(python, args);
    int err = errno;
    free(args);
    return cmd_fail("cannot start %s: %s", python, strerror(err));
}

/* Opens and closes the set: a missing or damaged one is told before Python starts. */
static int check_data(const char *what, const char *path)
{
    lf_dataset *set = NULL;
    if (!path[0]) return CMD_GO;
    if (lf_dataset_open(&set, path) < 0) return cmd_fail_lf("--%s", what);
    lf_dataset_close(set);
    return CMD_GO;
}

int lf_cmd_train(int argc, char **argv)
{
    lf_train_options train;
    lf_loader_options loader;
    lf_map_options map;
    lf_plan_options sculptor;
    lf_nexus_options nexus;
    lf_vault_options vault;
    const char *config = NULL;
    if (lf_options_init("train", &train, sizeof train) < 0 || lf_options_init("loader", &loader, sizeof loader) < 0 ||
        lf_options_init("map", &map, sizeof map) < 0 || lf_options_init("sculptor", &sculptor, sizeof sculptor) < 0 ||
        lf_options_init("nexus", &nexus, sizeof nexus) < 0 || lf_options_init("vault", &vault, sizeof vault) < 0)
        return cmd_fail_lf(NULL);
    const cmd_section sections[] = {{"train", &train},       {"loader", &loader}, {"map", &map},
                                    {"sculptor", &sculptor}, {"nexus", &nexus},   {"vault", &vault}};
    const cmd_extra extras[] = {
        {"config", "FILE.toml", "options from a file; arguments win (`loongforge config --toml`)", &config, NULL}};
    cmd_spec spec = {.usage = "train --data DIR [--config FILE.toml] [--KEY VALUE] [--SECTION.KEY VALUE]",
                     .help = "Keys of [train] stand alone; those of other sections carry its name: --vault.diff_interval 20.",
                     .sections = sections,
                     .n_sections = 6,
                     .n_plain = 1,
                     .extras = extras,
                     .n_extras = 1};
    int code = cmd_parse(&spec, argc, argv);
    if (code != CMD_GO) return code;
    if (config && access(config, R_OK) != 0) return cmd_fail("--config: cannot read %s: %s", config, strerror(errno));
    if (!config && !train.data[0])
        return cmd_fail_usage(
            "--data is not set, expected an LMDB folder; `loongforge pack --scenes 4000 data/scenes` makes one");
    if ((code = check_data("data", train.data)) != CMD_GO) return code;
    if ((code = check_data("val_data", train.val_data)) != CMD_GO) return code;
    return run_python(argc, argv);
}
