/* SPDX-License-Identifier: Apache-2.0 */
/* `loongforge pack`: drawn scenes or a folder of files to an LMDB set. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cmd.h"

static const char usage[] = "pack (--scenes N | --from DIR [DIR …] [--list FILE] [--tokenizer PATH]) OUT";
static const char help[] =
    "--scenes draws N scenes of coloured shapes with questions and answers; same seed and number, same bytes.\n"
    "--from packs the images and texts that DIR/instruct.jsonl or DIR/captions.jsonl lists. A broken record is told and\n"
    "skipped. --tokenizer takes a folder with vocab.json and merges.txt or a tokenizer.json, and needs Python's tokenizers;\n"
    "without it a text's tokens are its bytes. OUT is built in OUT.tmp and renamed when it is complete.";

/* `python3 -m loongforge.pack` with the same arguments tokenises and calls the same library. */
static int run_python(int argc, char **argv)
{
    static char module_flag[] = "-m", module[] = "loongforge.pack";
    char python[4096];
    if (!cmd_find_python(python, sizeof python))
        return cmd_fail("--tokenizer needs python3 beside this command or on the PATH; hint: `make build` sets one up in .venv");
    char **args = calloc((size_t)argc + 3, sizeof *args);
    if (!args) return cmd_fail("no memory for %d arguments", argc);
    args[0] = python;
    args[1] = module_flag;
    args[2] = module;
    for (int i = 1; i < argc; i++) args[i + 2] = argv[i];
    fflush(NULL);
    execv(python, args);
    int err = errno;
    free(args);
    return cmd_fail("cannot start %s: %s", python, strerror(err));
}

static void print_summary(const char *out, const lf_pack_summary *s, double seconds)
{
    char bytes[24], time[24];
    printf("%s: %lld samples, %lld images, %s, %lld skipped, %s\n", out, (long long)s->samples, (long long)s->images,
           cmd_bytes(bytes, sizeof bytes, s->bytes), (long long)s->skipped, cmd_seconds(time, sizeof time, seconds));
}

/* from: folders, n of them; none: scenes. */
static int run_pack(const char *out, const char *const *from, int n, const char *list, const lf_pack_options *o)
{
    lf_pack_summary sum = {.size = sizeof sum};
    cmd_progress bar;
    double started = cmd_now();
    cmd_progress_begin(&bar, n ? "packing" : "drawing", n ? "records" : "scenes");
    lf_status rc = n ? lf_pack_folders(out, from, n, list, NULL, 0, o, cmd_progress_update, &bar, &sum)
                     : lf_pack_scenes(out, o, cmd_progress_update, &bar, &sum);
    cmd_progress_end(&bar);
    if (rc < 0) return cmd_fail_lf(NULL);
    print_summary(out, &sum, cmd_now() - started);
    return CMD_OK;
}

int lf_cmd_pack(int argc, char **argv)
{
    const char *from = NULL, *list = NULL, *tokenizer = NULL;
    lf_pack_options o;
    if (lf_options_init("pack", &o, sizeof o) < 0) return cmd_fail_lf(NULL);
    const cmd_section sections[] = {{"pack", &o}};
    const cmd_extra extras[] = {
        {"from", "DIR", "a folder with instruct.jsonl or captions.jsonl", &from, NULL},
        {"list", "FILE", "another list than those: a name in DIR, or a path with a '/'", &list, NULL},
        {"tokenizer", "PATH", "tokenise texts with this vocabulary instead of by bytes", &tokenizer, NULL},
    };
    cmd_spec spec = {.usage = usage,
                     .help = help,
                     .sections = sections,
                     .n_sections = 1,
                     .extras = extras,
                     .n_extras = 3,
                     .min_words = 1,
                     .max_words = CMD_MAX_WORDS};
    int code = cmd_parse(&spec, argc, argv);
    if (code != CMD_GO) return code;
    if ((o.scenes > 0) == (from != NULL)) return cmd_fail_usage("expected one of --scenes N and --from DIR");
    if (!from && (list || tokenizer)) return cmd_fail_usage("--%s goes with --from DIR", list ? "list" : "tokenizer");
    if (!from && spec.n_words > 1) return cmd_fail_usage("expected one OUT, got %d words", spec.n_words);
    if (tokenizer) return spec.n_words == 1 ? run_python(argc, argv) : cmd_fail_usage("--tokenizer takes one folder at a time");
    const char *folders[CMD_MAX_WORDS + 1] = {from}; /* the words but the last are more folders */
    for (int i = 0; i + 1 < spec.n_words; i++) folders[i + 1] = spec.words[i];
    return run_pack(spec.words[spec.n_words - 1], folders, from ? spec.n_words : 0, list, &o);
}
