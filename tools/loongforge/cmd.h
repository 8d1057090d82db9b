/* SPDX-License-Identifier: Apache-2.0 */
/** @file cmd.h  What the commands of `loongforge` share: the table, arguments, messages, progress.
 *
 *  A command is `int lf_cmd_<name>(int argc, char **argv)` in cmd_<name>.c; argv[0] is its name. Exit codes: 0 fine,
 *  CMD_FAILED with one line on stderr ("loongforge: what, which value, what was expected, hint"), CMD_USAGE for arguments
 *  that make no sense. Results go to stdout, messages and progress to stderr. Commands see public headers only. */
#ifndef LF_CMD_H
#define LF_CMD_H

#include <stdint.h>
#include <stdio.h>

#include "loongforge/loongforge.h"

/* name, help; one row a command, in the order in which `loongforge help` lists them */
#define LF_COMMANDS(X)                                                                      \
    X(pack, "make a data set: drawn scenes (--scenes N) or a folder of files (--from DIR)") \
    X(data, "look into a data set: ls, stat, verify, show")                                 \
    X(train, "train a model; --resume goes on where a run stopped")                         \
    X(vault, "checkpoints: list, verify, merge")                                            \
    X(mem, "lifetime tables: plan, table")                                                  \
    X(sync, "gradient reduction: the schedule of a layout, a benchmark")                    \
    X(config, "every option with its default, range and meaning; --toml makes a file")      \
    X(doctor, "what this machine has, what is missing and what that means")                 \
    X(version, "versions of the library and its interface")                                 \
    X(help, "this list")

#define LF_COMMAND_DECLARE(name, help) int lf_cmd_##name(int argc, char **argv);
LF_COMMANDS(LF_COMMAND_DECLARE)
#undef LF_COMMAND_DECLARE

enum { CMD_GO = -1, CMD_OK = 0, CMD_FAILED = 1, CMD_USAGE = 2, CMD_MAX_WORDS = 16 };

/* ---- arguments ------------------------------------------------------------------------------------------------------- */

/** An options struct that `--key value` fills by the rows of its section's table. */
typedef struct cmd_section {
    const char *name;
    void *options; /* initialised by the caller with lf_options_init */
} cmd_section;

/** An argument outside the options tables: with a value (`text` set) or a switch (`flag` set to 1 when given). */
typedef struct cmd_extra {
    const char *name;    /* without the dashes: "from", "json" */
    const char *metavar; /* "DIR"; NULL for a switch */
    const char *help;
    const char **text;
    int *flag;
} cmd_extra;

/** What a command takes, and after cmd_parse the words it was given. */
typedef struct cmd_spec {
    const char *usage;           /* "pack (--scenes N | --from DIR) OUT" */
    const char *help;            /* one or more lines, may be NULL */
    const cmd_section *sections; /* searched in this order for a key without a section's name */
    int n_sections;
    int n_plain; /* keys of the first n_plain sections may stand without their section's name; 0: of all */
    const cmd_extra *extras;
    int n_extras;
    int min_words, max_words; /* arguments without dashes; at most CMD_MAX_WORDS */
    int n_words;
    const char *words[CMD_MAX_WORDS];
} cmd_spec;

/** Read the arguments behind argv[0]: `--key value`, `--key=value`, `--section.key value`, a BOOL option or switch alone,
 *  words, `--` before words that start with a dash, `--help`. `-` and `_` in keys mean the same. A TEXT value or word is kept
 *  as a pointer into argv.
 *  @return CMD_GO: carry on; CMD_OK: --help was printed; CMD_USAGE: an error was printed. Return the other two as they are. */
int cmd_parse(cmd_spec *spec, int argc, char **argv);

/** Print usage, extras and the rows of each section. */
void cmd_print_help(FILE *to, const cmd_spec *spec);

/* ---- messages -------------------------------------------------------------------------------------------------------- */

/** "loongforge: …" on stderr; returns CMD_FAILED. */
int cmd_fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
/** The same, returning CMD_USAGE, with a hint at --help. */
int cmd_fail_usage(const char *format, ...) __attribute__((format(printf, 1, 2)));
/** "loongforge: …: <lf_error_text()>" on stderr; returns CMD_FAILED. The words may be NULL: the text alone. */
int cmd_fail_lf(const char *format, ...) __attribute__((format(printf, 1, 2)));
/** Send log lines of the library, up to a level, to stderr. */
void cmd_log_to_stderr(int32_t level);

/** "1.5 GiB" in a caller's text of at least 24 bytes; returns it. */
const char *cmd_bytes(char *text, size_t size, int64_t bytes);
/** "1m 05s", likewise. */
const char *cmd_seconds(char *text, size_t size, double seconds);
/** Monotonic seconds. */
double cmd_now(void);

/** argv[0] of the process; set by main. */
extern const char *cmd_program;
/** The Python that the package belongs to: beside the command as it was called, else beside its file, else on the PATH.
 *  Returns path (size bytes), NULL when there is none. */
const char *cmd_find_python(char *path, size_t size);

/* ---- progress -------------------------------------------------------------------------------------------------------- */

/** A bar on stderr: redrawn in place on a terminal, elsewhere a line every ten seconds. */
typedef struct cmd_progress {
    const char *what, *unit; /* "packing", "samples" */
    double started, printed;
    int terminal;
    int width; /* of the line on the screen */
} cmd_progress;

/** While a bar is up, Ctrl-C asks the call to stop instead of ending the process. */
void cmd_progress_begin(cmd_progress *bar, const char *what, const char *unit);
/** An lf_progress_fn; `user` is the bar. Returns 1 after Ctrl-C. */
int32_t cmd_progress_update(void *user, int64_t done, int64_t total);
/** Take the bar away. Returns 1 when Ctrl-C was pressed. */
int cmd_progress_end(cmd_progress *bar);

#endif
