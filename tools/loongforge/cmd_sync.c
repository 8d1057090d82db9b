/* SPDX-License-Identifier: Apache-2.0 */
/* `loongforge sync plan`: the schedule of gradient reductions for a list of parameters. Nothing is allocated for them. */
#include <jansson.h>
#include <string.h>

#include "sync.h"

static const char usage[] = "sync (plan LAYOUT.json | bench)";
static const char help[] =
    "LAYOUT.json is a list of parameters: {\"name\", \"shape\", \"dtype\" (f32, bf16, f16), \"layer\" (a number, -1 or \"embed\",\n"
    "\"tail\"), \"expert\" (optional), \"frozen\" (optional), \"tied_to\" (optional: an earlier name)}.\n"
    "plan prints the groups, and the chunks in the order in which every rank posts them.\n"
    "bench sums arrays of every size over ranks, as one operation and in chunks, checks each sum and times it. loopback: ranks are\n"
    "threads; nccl: processes, one a GPU, started by `torchrun --no-python --nproc-per-node N loongforge sync bench …`; mpi:\n"
    "processes started by `mpirun -n N loongforge sync bench …` or srun.";

/* Where the text of a bad entry goes: one line for the user. */
typedef struct entry {
    const char *path;
    size_t i;
    json_t *object;
} entry;

static int fail_entry(const entry *e, const char *key, const char *expected)
{
    const char *name = json_string_value(json_object_get(e->object, "name"));
    json_t *value = json_object_get(e->object, key);
    char *text = value ? json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT) : NULL;
    cmd_fail("%s: entry %zu (%s): %s is %.80s, expected %s", e->path, e->i, name ? name : "no name", key, text ? text : "missing",
             expected);
    free(text);
    return CMD_FAILED;
}

static int check_keys(const entry *e)
{
    static const char *const known[] = {"name", "shape", "dtype", "layer", "expert", "frozen", "tied_to"};
    const char *key;
    json_t *value;
    if (!json_is_object(e->object)) return cmd_fail("%s: entry %zu is not an object", e->path, e->i);
    json_object_foreach(e->object, key, value)
    {
        size_t k = 0;
        while (k < sizeof known / sizeof *known && strcmp(known[k], key) != 0) k++;
        if (k == sizeof known / sizeof *known)
            return cmd_fail("%s: entry %zu: unknown key '%s', expected name, shape, dtype, layer, expert, frozen or tied_to",
                            e->path, e->i, key);
    }
    return CMD_OK;
}

static int read_shape(const entry *e, int64_t *shape, int32_t *ndim)
{
    json_t *list = json_object_get(e->object, "shape");
    if (!json_is_array(list) || json_array_size(list) > LF_MAX_DIMS) return fail_entry(e, "shape", "a list of at most 8 sizes");
    *ndim = (int32_t)json_array_size(list);
    for (int32_t d = 0; d < *ndim; d++) {
        json_t *size = json_array_get(list, (size_t)d);
        if (!json_is_integer(size) || json_integer_value(size) < 0) return fail_entry(e, "shape", "whole numbers");
        shape[d] = json_integer_value(size);
    }
    return CMD_OK;
}

static int read_number(const entry *e, const char *key, int32_t otherwise, int32_t *out)
{
    json_t *value = json_object_get(e->object, key);
    *out = otherwise;
    if (!value) return CMD_OK;
    if (!json_is_integer(value) || json_integer_value(value) < -1 || json_integer_value(value) > INT32_MAX)
        return fail_entry(e, key, "a whole number from -1");
    *out = (int32_t)json_integer_value(value);
    return CMD_OK;
}

static int read_layer(const entry *e, int32_t *layer)
{
    const char *word = json_string_value(json_object_get(e->object, "layer"));
    if (!word) return read_number(e, "layer", 0, layer);
    *layer = strcmp(word, "tail") == 0 ? INT32_MAX : -1;
    return strcmp(word, "tail") == 0 || strcmp(word, "embed") == 0 ? CMD_OK
                                                                   : fail_entry(e, "layer", "a number, \"embed\" or \"tail\"");
}

static int read_dtype(const entry *e, int32_t *dtype)
{
    const char *word = json_string_value(json_object_get(e->object, "dtype"));
    for (*dtype = LF_DTYPE_F32; word && *dtype <= LF_DTYPE_F16; ++*dtype)
        if (strcmp(word, lf_dtype_name(*dtype)) == 0) return CMD_OK;
    return fail_entry(e, "dtype", "\"f32\", \"bf16\" or \"f16\"");
}

static int add_entry(lf_map *map, const entry *e)
{
    int64_t shape[LF_MAX_DIMS];
    lf_param p = {.size = sizeof p, .shape = shape, .tied_to = -1};
    int code = check_keys(e);
    if (code == CMD_OK && !(p.name = json_string_value(json_object_get(e->object, "name"))))
        code = fail_entry(e, "name", "a text");
    if (code == CMD_OK) code = read_shape(e, shape, &p.ndim);
    if (code == CMD_OK) code = read_dtype(e, &p.dtype);
    if (code == CMD_OK) code = read_layer(e, &p.layer);
    if (code == CMD_OK) code = read_number(e, "expert", -1, &p.expert);
    if (code != CMD_OK) return code;
    json_t *frozen = json_object_get(e->object, "frozen"), *tied = json_object_get(e->object, "tied_to");
    if (frozen && !json_is_boolean(frozen)) return fail_entry(e, "frozen", "true or false");
    if (json_is_true(frozen)) p.flags |= LF_PARAM_FROZEN;
    if (tied && !json_is_string(tied)) return fail_entry(e, "tied_to", "the name of an earlier parameter");
    if (tied && lf_map_find(map, json_string_value(tied), &p.tied_to) < 0) return cmd_fail_lf("%s: entry %zu", e->path, e->i);
    return lf_map_add(map, &p, NULL) < 0 ? cmd_fail_lf("%s: entry %zu", e->path, e->i) : CMD_OK;
}

static int read_layout(lf_map *map, const char *path)
{
    json_error_t error;
    json_t *list = json_load_file(path, JSON_REJECT_DUPLICATES, &error);
    if (!list && error.line < 0) return cmd_fail("%s", error.text);
    if (!list) return cmd_fail("%s, line %d: %s", path, error.line, error.text);
    int code = json_is_array(list) && json_array_size(list) > 0 ? CMD_OK : cmd_fail("%s: expected a list of parameters", path);
    for (size_t i = 0; code == CMD_OK && i < json_array_size(list); i++) {
        const entry e = {path, i, json_array_get(list, i)};
        code = add_entry(map, &e);
    }
    json_decref(list);
    return code;
}

/* ---- printing */

typedef struct total {
    int32_t n_chunks;
    int64_t bytes, largest;
} total;

static int print_groups(const lf_map *map, const lf_nexus *nexus)
{
    printf("%-8s %8s %8s %18s %12s %18s  %-6s %s\n", "group", "ranges", "chunks", "bytes", "", "largest chunk", "form", "why");
    for (int32_t g = 0; g < lf_map_n_groups(map); g++) {
        const char *name, *form = "-", *why = "nothing to sum";
        const lf_range *ranges;
        int32_t n_ranges;
        total t = {0};
        char text[24];
        if (lf_map_get_group(map, g, &name, &ranges, &n_ranges) < 0) return cmd_fail_lf(NULL);
        for (int32_t i = 0; i < lf_nexus_n_chunks(nexus); i++) {
            lf_chunk_info c = {.size = sizeof c};
            if (lf_nexus_get_chunk(nexus, i, &c) < 0) return cmd_fail_lf(NULL);
            if (c.group != g) continue;
            t.n_chunks++;
            t.bytes += c.bytes;
            t.largest = c.bytes > t.largest ? c.bytes : t.largest;
            form = strcmp(form, "-") != 0 && strcmp(form, c.form) != 0 ? "mixed" : c.form; /* f32 and bf16 gradients */
            why = c.why;
        }
        printf("%-8s %8d %8d %18lld %12s %18lld  %-6s %s\n", name, n_ranges, t.n_chunks, (long long)t.bytes,
               cmd_bytes(text, sizeof text, t.bytes), (long long)t.largest, form, why);
    }
    return CMD_OK;
}

static int print_chunks(const lf_map *map, const lf_nexus *nexus, int every_micro_step)
{
    int64_t sent = 0;
    char text[24];
    printf("\n%6s %5s  %-6s %5s %-5s %16s %14s %16s  %s\n", "order", "run", "group", "class", "dtype", "offset", "elements",
           "bytes", "form");
    int32_t runs = 0, sums = 0;
    for (int32_t i = 0; i < lf_nexus_n_chunks(nexus); i++) {
        const char *group;
        const lf_range *ranges;
        int32_t n_ranges;
        lf_chunk_info c = {.size = sizeof c};
        if (lf_nexus_get_chunk(nexus, i, &c) < 0 || lf_map_get_group(map, c.group, &group, &ranges, &n_ranges) < 0)
            return cmd_fail_lf(NULL);
        runs = c.run + 1;
        printf("%6d %5d  %-6s %5d %-5s %16lld %14lld %16lld  %s\n", i, c.run, group, c.range.klass, lf_dtype_name(c.dtype),
               (long long)c.range.offset, (long long)c.range.count, (long long)c.bytes, c.form);
        sums += strcmp(c.form, "sparse") == 0 ? 2 : 1;
        sent += c.sent_bytes;
    }
    printf("\n%d collectives in %d runs, %lld bytes (%s) a %s and rank, before the sum's own traffic\n", sums, runs,
           (long long)sent, cmd_bytes(text, sizeof text, sent), every_micro_step ? "micro-step" : "step");
    return CMD_OK;
}

static int plan(const char *path, const lf_map_options *map_options, const lf_nexus_options *nexus_options)
{
    lf_map *map = NULL;
    lf_nexus *nexus = NULL;
    if (lf_map_open(&map, map_options) < 0) return cmd_fail_lf(NULL);
    int code = read_layout(map, path);
    if (code == CMD_OK && (lf_map_plan(map) < 0 || lf_nexus_open(&nexus, map, NULL, nexus_options) < 0))
        code = cmd_fail_lf("%s", path);
    if (code == CMD_OK) code = print_groups(map, nexus);
    if (code == CMD_OK) code = print_chunks(map, nexus, nexus_options->every_micro_step);
    lf_nexus_close(nexus);
    lf_map_unref(map);
    return code;
}

int lf_cmd_sync(int argc, char **argv)
{
    lf_map_options map;
    lf_nexus_options nexus;
    if (lf_options_init("map", &map, sizeof map) < 0 || lf_options_init("nexus", &nexus, sizeof nexus) < 0)
        return cmd_fail_lf(NULL);
    const cmd_section sections[] = {{"nexus", &nexus}, {"map", &map}};
    sync_bench_args bench = {0};
    const cmd_extra extras[] = {
        {"transport", "NAME", "bench: loopback (default), nccl or mpi", &bench.transport, NULL},
        {"sizes", "LIST", "bench: bytes of the arrays (1MiB,16MiB,64MiB)", &bench.sizes, NULL},
        {"chunks", "LIST", "bench: bytes of one operation (1MiB,16MiB), launched in runs of run_bytes", &bench.chunks, NULL},
        {"dtype", "NAME", "bench: f32 (default) or bf16", &bench.dtype, NULL},
        {"ranks", "N", "bench, loopback: threads that take part (2)", &bench.ranks, NULL},
        {"iterations", "N", "bench: timed sums of each kind (20)", &bench.iterations, NULL},
        {"meet", "FILE", "bench, nccl: file by which ranks meet; a new name for every run, in a folder that all see", &bench.meet,
         NULL},
        {"json", NULL, "bench: one object a line", NULL, &bench.json},
    };
    cmd_spec spec = {.usage = usage,
                     .help = help,
                     .sections = sections,
                     .n_sections = 2,
                     .extras = extras,
                     .n_extras = sizeof extras / sizeof *extras,
                     .min_words = 1,
                     .max_words = 2};
    int code = cmd_parse(&spec, argc, argv);
    if (code != CMD_GO) return code;
    if (strcmp(spec.words[0], "bench") == 0)
        return spec.n_words == 1 ? cmd_sync_bench(&bench, &nexus)
                                 : cmd_fail_usage("argument '%s' is one too many", spec.words[1]);
    if (strcmp(spec.words[0], "plan") != 0) return cmd_fail_usage("sync '%s', expected plan or bench", spec.words[0]);
    if (spec.n_words < 2) return cmd_fail_usage("sync plan wants a layout");
    return plan(spec.words[1], &map, &nexus);
}
