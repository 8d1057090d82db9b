/* SPDX-License-Identifier: Apache-2.0 */
/* The command `loongforge`: finds the command by name and runs it. */
#include <string.h>

#include "cmd.h"

static const struct command {
    const char *name, *help;
    int (*run)(int argc, char **argv);
} commands[] = {
#define ROW(name, help) {#name, help, lf_cmd_##name},
    LF_COMMANDS(ROW)
#undef ROW
};
const char *cmd_program = "loongforge";
enum { N_COMMANDS = sizeof commands / sizeof commands[0] };

static void print_commands(FILE *to)
{
    fprintf(to, "usage: loongforge [--verbose | --quiet] COMMAND [ARGUMENTS]\n\n");
    for (int i = 0; i < N_COMMANDS; i++) fprintf(to, "  %-8s  %s\n", commands[i].name, commands[i].help);
    fprintf(to, "\n`loongforge COMMAND --help` lists a command's arguments.\n");
}

int lf_cmd_help(int argc, char **argv)
{
    if (argc > 1) {
        char help[] = "--help";
        char *args[] = {argv[1], help, NULL};
        for (int i = 0; i < N_COMMANDS; i++)
            if (strcmp(commands[i].name, argv[1]) == 0 && commands[i].run != lf_cmd_help) return commands[i].run(2, args);
    }
    print_commands(stdout);
    return CMD_OK;
}

int lf_cmd_version(int argc, char **argv)
{
    cmd_spec spec = {.usage = "version"};
    int code = cmd_parse(&spec, argc, argv);
    if (code != CMD_GO) return code;
    printf("loongforge %s (ABI %d)\n", lf_version_string(), (int)lf_abi_version());
    return CMD_OK;
}

int main(int argc, char **argv)
{
    int32_t level = LF_LOG_WARN;
    int at = 1;
    if (argc > 0) cmd_program = argv[0];
    for (; at < argc && argv[at][0] == '-'; at++) {
        if (strcmp(argv[at], "--verbose") == 0 || strcmp(argv[at], "-v") == 0) level = LF_LOG_DEBUG;
        else if (strcmp(argv[at], "--quiet") == 0 || strcmp(argv[at], "-q") == 0) level = LF_LOG_ERROR;
        else if (strcmp(argv[at], "--version") == 0) return lf_cmd_version(1, argv);
        else if (strcmp(argv[at], "--help") == 0 || strcmp(argv[at], "-h") == 0) return lf_cmd_help(1, argv);
        else return cmd_fail_usage("unknown argument '%s'", argv[at]);
    }
    if (at >= argc) {
        print_commands(stderr);
        return CMD_USAGE;
    }
    cmd_log_to_stderr(level);
    for (int i = 0; i < N_COMMANDS; i++)
        if (strcmp(commands[i].name, argv[at]) == 0) {
            int code = commands[i].run(argc - at, argv + at);
            if (fflush(stdout) != 0 && code == CMD_OK) return cmd_fail("cannot write to standard output");
            return code;
        }
    return cmd_fail_usage("unknown command '%s', expected one of those that `loongforge help` lists", argv[at]);
}
