/* SPDX-License-Identifier: Apache-2.0 */
/* `loongforge sync bench`: sums over ranks, sizes by chunk sizes, each checked and timed. Inputs are small whole numbers chosen so that
 * every sum is exact in any order, as nccl-tests does it: a wrong element is then wrong by a whole number, not by rounding. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "sync.h"

enum { LIST_MOST = 32, RANKS_MOST = 64, ITERATIONS_MOST = 10000, WARMUP = 5 };
/* Elements that are looked at in one go: a multiple of the values' period, so that all windows hold the same. */
enum { PERIOD = 5, WINDOW = PERIOD << 18 };

typedef struct bench {
    lf_nexus_options options;
    int64_t sizes[LIST_MOST], chunks[LIST_MOST];
    int32_t n_sizes, n_chunks, iterations, dtype, json;
} bench;

/* One rank at work. */
typedef struct end {
    const bench *b;
    lf_transport t;
    lf_device *device;
    lf_stream *stream; /* NULL: the calling thread */
    lf_event *from, *to;
    char *data;
    void *start, *sums, *window; /* (WINDOW) on the host: what this rank puts in, what must come out, what does */
    double *seconds;
    int64_t wrong;
    int code;
    pthread_t thread;
} end;

/* ---- arguments ------------------------------------------------------------------------------------------------------- */

/* "16MiB" */
static int64_t parse_bytes(const char *text, char **behind)
{
    static const char units[] = "KMG";
    double value = strtod(text, behind);
    const char *unit = **behind ? strchr(units, **behind) : NULL;
    if (*behind == text) return -1;
    if (unit) {
        for (const char *u = units; u <= unit; u++) value *= 1024;
        ++*behind;
        if (**behind == 'i') ++*behind;
    }
    if (**behind == 'B') ++*behind;
    return value >= 0 && value < 0x1p50 ? (int64_t)value : -1;
}

static int parse_list(const char *what, const char *text, int64_t *list, int32_t *n)
{
    *n = 0;
    for (const char *at = text;; at++) {
        char *behind;
        const int64_t bytes = parse_bytes(at, &behind);
        if (bytes < 1 || (*behind && *behind != ',') || *n == LIST_MOST)
            return cmd_fail_usage("--%s '%s', expected up to %d byte counts such as 1MiB,16MiB", what, text, LIST_MOST);
        list[(*n)++] = bytes;
        at = behind;
        if (!*at) return CMD_GO;
    }
}

static int parse_number(const char *what, const char *text, int32_t least, int32_t most, int32_t *out)
{
    char *behind;
    const long value = strtol(text, &behind, 10);
    if (behind == text || *behind || value < least || value > most)
        return cmd_fail_usage("--%s '%s', expected a whole number from %d to %d", what, text, least, most);
    *out = (int32_t)value;
    return CMD_GO;
}

/* ---- data ------------------------------------------------------------------------------------------------------------ */

static float start_value(int32_t rank, int64_t i) { return (float)((i * 7 + rank * 3) % PERIOD - 1); }

static void put(void *data, int64_t k, int32_t dtype, float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (dtype == LF_DTYPE_F32) ((float *)data)[k] = value;
    else ((uint16_t *)data)[k] = (uint16_t)(bits >> 16); /* whole numbers below 256, and halves and quarters: nothing is lost */
}

static int make_windows(end *e)
{
    const size_t bytes = (size_t)WINDOW * sizeof(float);
    e->start = malloc(bytes);
    e->sums = malloc(bytes);
    e->window = malloc(bytes);
    if (!e->start || !e->sums || !e->window) return cmd_fail("out of memory");
    for (int64_t i = 0; i < WINDOW; i++) {
        float sum = 0;
        for (int32_t r = 0; r < e->t.world; r++) sum += start_value(r, i);
        put(e->start, i, e->b->dtype, start_value(e->t.rank, i));
        put(e->sums, i, e->b->dtype, e->t.mean ? sum / (float)e->t.world : sum);
    }
    return CMD_OK;
}

static int64_t count_wrong(const char *got, const char *want, int64_t n, size_t width)
{
    int64_t wrong = 0;
    if (memcmp(got, want, (size_t)n * width) == 0) return 0;
    for (int64_t i = 0; i < n; i++) wrong += memcmp(got + (size_t)i * width, want + (size_t)i * width, width) != 0;
    return wrong;
}

/* Put this rank's numbers in place (check 0), or look at all sums (check 1), window by window. */
static lf_status over_all(end *e, int64_t count, int check)
{
    const size_t width = lf_dtype_bytes(e->b->dtype);
    lf_status rc = LF_OK;
    for (int64_t at = 0; at < count && rc == LF_OK; at += WINDOW) {
        const int64_t n = count - at < WINDOW ? count - at : WINDOW;
        char *place = e->data + (size_t)at * width;
        rc = check ? lf_copy(e->device, e->window, place, (size_t)n * width, NULL)
                   : lf_copy(e->device, place, e->start, (size_t)n * width, NULL);
        if (rc == LF_OK && check) e->wrong += count_wrong(e->window, e->sums, n, width);
    }
    return rc;
}

/* ---- one measurement ------------------------------------------------------------------------------------------------- */

/* Sum `bytes` in chunks, as a step of NexusSync posts them: runs of up to run_bytes. */
static lf_status sum_once(end *e, int64_t bytes, int64_t chunk, double *seconds)
{
    const int64_t width = (int64_t)lf_dtype_bytes(e->b->dtype), run_bytes = e->b->options.run_bytes;
    const double began = cmd_now();
    int64_t in_run = 0, ticket = 0;
    lf_status rc = e->stream ? lf_event_record(e->from, e->stream) : LF_OK;
    for (int64_t at = 0, n; at < bytes && rc == LF_OK; at += n) {
        n = bytes - at < chunk ? bytes - at : chunk;
        const int first = in_run == 0, last = at + n >= bytes || in_run + n + chunk > run_bytes;
        if (e->t.run && first) rc = e->t.run(e->t.user, 1, "a benchmark's run (chunks of one size)");
        if (rc == LF_OK) rc = e->t.post(e->t.user, e->data + at, n / width, e->b->dtype, e->stream, &ticket);
        if (rc == LF_OK && e->t.run && last) rc = e->t.run(e->t.user, 0, "a benchmark's run (chunks of one size)");
        if (rc == LF_OK && (!e->t.run || last)) rc = e->t.wait(e->t.user, ticket, e->stream, e->b->options.timeout_s);
        in_run = last ? 0 : in_run + n;
    }
    if (rc == LF_OK && e->stream) rc = lf_event_record(e->to, e->stream);
    if (rc == LF_OK && e->t.settle) rc = e->t.settle(e->t.user, e->b->options.timeout_s); /* has a deadline, unlike the next */
    if (rc == LF_OK) rc = lf_stream_sync(e->stream);
    *seconds = cmd_now() - began;
    return rc == LF_OK && e->stream ? lf_event_elapsed(e->from, e->to, seconds) : rc;
}

static int compare_doubles(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* Nearest rank, as nccl-tests has it. */
static double percentile(const double *sorted, int32_t n, int32_t percent)
{
    const int32_t rank = (n * percent + 99) / 100;
    return sorted[rank > 0 ? rank - 1 : 0];
}

static lf_status measure(end *e, int64_t bytes, int64_t chunk)
{
    const int64_t count = bytes / (int64_t)lf_dtype_bytes(e->b->dtype);
    double ignored;
    e->wrong = 0;
    lf_status rc = over_all(e, count, 0);
    if (rc == LF_OK) rc = sum_once(e, bytes, chunk, &ignored);
    if (rc == LF_OK) rc = over_all(e, count, 1);
    if (rc == LF_OK) rc = lf_fill(e->device, e->data, 0, (size_t)bytes, NULL); /* zeros stay zeros */
    for (int32_t i = -WARMUP; i < e->b->iterations && rc == LF_OK; i++)
        rc = sum_once(e, bytes, chunk, i < 0 ? &ignored : &e->seconds[i]);
    if (rc == LF_OK) qsort(e->seconds, (size_t)e->b->iterations, sizeof *e->seconds, compare_doubles);
    return rc;
}

static void print_measurement(const end *e, int64_t bytes, int64_t chunk, double *plain)
{
    const int32_t n = e->b->iterations, world = e->t.world;
    const double p50 = percentile(e->seconds, n, 50), p95 = percentile(e->seconds, n, 95);
    const double rate = p50 > 0 ? (double)bytes / p50 : 0, bus = rate * 2 * (world - 1) / world;
    if (chunk >= bytes) *plain = bus;
    if (e->b->json) {
        printf(
            "{\"name\": \"nexus.busbw\", \"value\": %.3f, \"unit\": \"GB/s\", \"peer\": \"one operation\", \"peer_value\": %.3f, "
            "\"ratio\": %.4f, \"transport\": \"%s\", \"world\": %d, \"dtype\": \"%s\", \"bytes\": %lld, \"chunk_bytes\": %lld, "
            "\"p50_us\": %.2f, \"p95_us\": %.2f, \"wrong\": %lld}\n",
            bus * 1e-9, *plain * 1e-9, *plain > 0 ? bus / *plain : 0, e->t.name, world, lf_dtype_name(e->b->dtype),
            (long long)bytes, (long long)chunk, p50 * 1e6, p95 * 1e6, (long long)e->wrong);
    } else {
        char size[24], part[24];
        printf("%12s %12s %5s %7lld %12.1f %12.1f %10.2f %10.2f %8.3f\n", cmd_bytes(size, sizeof size, bytes),
               chunk >= bytes ? "one" : cmd_bytes(part, sizeof part, chunk), lf_dtype_name(e->b->dtype), (long long)e->wrong,
               p50 * 1e6, p95 * 1e6, rate * 1e-9, bus * 1e-9, *plain > 0 ? bus / *plain : 0);
    }
    fflush(stdout);
}

/* Every size: first as one operation, then in chunks of every smaller size. */
static int measure_all(end *e)
{
    int64_t wrong = 0;
    if (make_windows(e) != CMD_OK) return CMD_FAILED;
    for (int32_t s = 0; s < e->b->n_sizes; s++) {
        const int64_t bytes = e->b->sizes[s] / 64 * 64;
        double plain = 0;
        for (int32_t c = -1; c < e->b->n_chunks; c++) {
            const int64_t chunk = c < 0 ? bytes : e->b->chunks[c] / 64 * 64;
            if (bytes == 0 || chunk == 0 || (c >= 0 && chunk >= bytes)) continue;
            if (measure(e, bytes, chunk) < 0)
                return cmd_fail_lf("rank %d, %lld bytes in chunks of %lld", e->t.rank, (long long)bytes, (long long)chunk);
            wrong += e->wrong;
            if (e->t.rank == 0) print_measurement(e, bytes, chunk, &plain);
        }
    }
    return wrong ? cmd_fail("rank %d: %lld elements are wrong", e->t.rank, (long long)wrong) : CMD_OK;
}

static void close_end(end *e)
{
    if (e->t.close) e->t.close(e->t.user);
    lf_event_close(e->from);
    lf_event_close(e->to);
    lf_stream_close(e->stream);
    lf_device_free(e->device, e->data);
    lf_device_close(e->device);
    free(e->start);
    free(e->sums);
    free(e->window);
    free(e->seconds);
}

static int prepare_end(end *e, const char *device)
{
    int64_t most = 0;
    for (int32_t s = 0; s < e->b->n_sizes; s++) most = e->b->sizes[s] > most ? e->b->sizes[s] : most;
    e->seconds = malloc((size_t)e->b->iterations * sizeof *e->seconds);
    if (!e->seconds) return cmd_fail("out of memory");
    if (lf_device_open(&e->device, device) < 0 || lf_device_alloc(e->device, (size_t)most, (void **)&e->data) < 0)
        return cmd_fail_lf(NULL);
    if (strcmp(device, "cpu") == 0) return CMD_OK;
    return lf_stream_open(e->device, 0, &e->stream) < 0 || lf_event_open(e->device, &e->from) < 0 ||
                   lf_event_open(e->device, &e->to) < 0
               ? cmd_fail_lf(NULL)
               : CMD_OK;
}

static void print_head(const bench *b)
{
    if (!b->json)
        printf("%12s %12s %5s %7s %12s %12s %10s %10s %8s\n", "bytes", "chunk", "dtype", "wrong", "p50 us", "p95 us", "GB/s",
               "bus GB/s", "of one");
}

/* ---- transports ------------------------------------------------------------------------------------------------------ */

static void *enter(void *user)
{
    end *e = user;
    e->code = prepare_end(e, "cpu");
    if (e->code == CMD_OK) e->code = measure_all(e);
    return NULL;
}

static int bench_loopback(const bench *b, int32_t ranks)
{
    static end ends[RANKS_MOST];
    static lf_transport tables[RANKS_MOST];
    int code = CMD_OK;
    if (lf_loopback_open(ranks, tables) < 0) return cmd_fail_lf(NULL);
    print_head(b);
    for (int32_t r = 0; r < ranks; r++) {
        ends[r] = (end){.b = b, .t = tables[r]};
        if (pthread_create(&ends[r].thread, NULL, enter, &ends[r]) != 0) {
            cmd_fail("cannot start a thread for rank %d", r); /* the others would wait for it for ever */
            exit(CMD_FAILED);
        }
    }
    for (int32_t r = 0; r < ranks; r++) pthread_join(ends[r].thread, NULL);
    for (int32_t r = 0; r < ranks; r++) {
        if (ends[r].code != CMD_OK) code = ends[r].code;
        close_end(&ends[r]);
    }
    return code;
}

static int32_t environment(const char *name, int32_t otherwise)
{
    const char *text = getenv(name);
    return text ? (int32_t)strtol(text, NULL, 10) : otherwise;
}

static const char *words(const char *name, const char *otherwise) { return getenv(name) ? getenv(name) : otherwise; }

/* A file name that this launch alone has: torchrun gives every launch a port, an id and a count of restarts. */
static void name_meeting(char *path, size_t size)
{
    snprintf(path, size, "%s/loongforge-meet-%ld-%s-%s-%s-%s", words("TMPDIR", "/tmp"), (long)getuid(),
             words("MASTER_ADDR", "here"), words("MASTER_PORT", "0"), words("TORCHELASTIC_RUN_ID", "none"),
             words("TORCHELASTIC_RESTART_COUNT", "0"));
}

static int bench_nccl(const bench *b, const char *meet)
{
    uint8_t id[LF_NCCL_ID_BYTES];
    char path[512], device[32], text[400];
    const int32_t rank = environment("RANK", 0), world = environment("WORLD_SIZE", 1);
    end e = {.b = b};
    snprintf(device, sizeof device, "cuda:%d", environment("LOCAL_RANK", 0));
    if (meet) snprintf(path, sizeof path, "%s", meet);
    else name_meeting(path, sizeof path);
    int code = prepare_end(&e, device);
    if (code == CMD_OK && lf_nccl_id_by_file(&b->options, path, rank, id) < 0) code = cmd_fail_lf(NULL);
    if (code == CMD_OK && lf_nccl_open(&b->options, e.device, rank, world, id, &e.t) < 0) code = cmd_fail_lf(NULL);
    if (rank == 0) unlink(path);
    if (code == CMD_OK && e.t.memory && e.t.memory(e.t.user, e.data, b->sizes[0]) < 0) code = cmd_fail_lf(NULL);
    if (code == CMD_OK && rank == 0) {
        e.t.describe(e.t.user, text, sizeof text);
        if (!b->json) printf("%s\n", text);
        print_head(b);
    }
    if (code == CMD_OK) code = measure_all(&e);
    close_end(&e);
    return code;
}

/* What a launcher says of the ranks it started, by the environment: Open MPI, MPICH's hydra, Slurm. Two kinds of MPI do not find one
 * another, and then every process believes to be alone. */
static int check_world(int32_t world)
{
    static const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const int32_t said = environment(names[i], world);
        if (said != world)
            return cmd_fail(
                "MPI has %d rank(s), and %s is %d; hint: --mpi_library of the MPI that this launcher belongs to, or srun "
                "--mpi=pmix",
                world, names[i], said);
    }
    return CMD_OK;
}

static int bench_mpi(const bench *b)
{
    char text[400];
    end e = {.b = b};
    int code = prepare_end(&e, "cpu");
    if (code == CMD_OK && lf_mpi_open(&b->options, e.device, &e.t) < 0) code = cmd_fail_lf(NULL);
    if (code == CMD_OK) code = check_world(e.t.world);
    if (code == CMD_OK && e.t.rank == 0) {
        e.t.describe(e.t.user, text, sizeof text);
        if (!b->json) printf("%s\n", text);
        print_head(b);
    }
    if (code == CMD_OK) code = measure_all(&e);
    close_end(&e);
    return code;
}

int cmd_sync_bench(const sync_bench_args *args, const lf_nexus_options *options)
{
    bench b = {.options = *options, .iterations = 20, .dtype = LF_DTYPE_F32, .json = args->json};
    int32_t ranks = 2;
    int code = parse_list("sizes", args->sizes ? args->sizes : "1MiB,16MiB,64MiB", b.sizes, &b.n_sizes);
    if (code == CMD_GO) code = parse_list("chunks", args->chunks ? args->chunks : "1MiB,16MiB", b.chunks, &b.n_chunks);
    if (code == CMD_GO && args->ranks) code = parse_number("ranks", args->ranks, 1, RANKS_MOST, &ranks);
    if (code == CMD_GO && args->iterations)
        code = parse_number("iterations", args->iterations, 1, ITERATIONS_MOST, &b.iterations);
    if (code != CMD_GO) return code;
    if (args->dtype && strcmp(args->dtype, "f32") != 0) {
        if (strcmp(args->dtype, "bf16") != 0) return cmd_fail_usage("--dtype '%s', expected f32 or bf16", args->dtype);
        b.dtype = LF_DTYPE_BF16;
    }
    for (int32_t s = 1; s < b.n_sizes; s++) /* the largest first: it is what is allocated and registered */
        for (int32_t k = s; k > 0 && b.sizes[k] > b.sizes[k - 1]; k--) {
            const int64_t was = b.sizes[k];
            b.sizes[k] = b.sizes[k - 1];
            b.sizes[k - 1] = was;
        }
    const char *transport = args->transport ? args->transport : "loopback";
    if (strcmp(transport, "loopback") == 0) return bench_loopback(&b, ranks);
    if (strcmp(transport, "nccl") == 0) return bench_nccl(&b, args->meet);
    if (strcmp(transport, "mpi") == 0) return bench_mpi(&b);
    return cmd_fail_usage("--transport '%s', expected loopback, nccl or mpi", transport);
}
