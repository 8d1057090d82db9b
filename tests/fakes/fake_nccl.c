/* SPDX-License-Identifier: Apache-2.0 */
#include "fake_nccl.h"

#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "fake_cuda.h"

enum { MOST = 8, TILE = 4096, GROUP_MOST = 512 };
enum { OK = 0, SYSTEM = 2, INTERNAL = 3, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, IN_PROGRESS = 7 };
enum { INT64 = 4, FLOAT32 = 7, FLOAT64 = 8, BFLOAT16 = 9, SUM = 0, AVG = 4 };
#define NCCL_API __attribute__((visibility("default")))

typedef struct unique_id {
    char internal[128];
} unique_id;

typedef struct config {
    size_t size;
    unsigned magic, version;
    int blocking, cga, min_ctas, max_ctas;
    const char *net_name;
} config;

/* What a rank is at: its tile, and what it thinks it is summing. */
typedef struct seat {
    _Atomic int64_t arrived, left; /* tiles */
    int64_t count, place, of;      /* elements; which operation of how many in its group */
    int32_t dtype, op, kind;
    _Alignas(16) unsigned char tile[TILE * 8];
} seat;

typedef struct room {
    _Atomic int32_t joined;
    seat seats[MOST];
} room;

typedef struct comm {
    room *room;
    int rank, world, blocking;
    int64_t tiles;
    _Atomic int async_error;
    _Atomic bool ready, aborted;
    _Atomic int busy; /* in-progress answers still to give */
    pthread_t starter;
    _Atomic int running, inside; /* operations queued and not done; calls of launch() */
} comm;

typedef struct operation {
    comm *comm;
    void *data, *stream;
    int64_t count, place, of;
    int32_t dtype, op, kind;
} operation;

enum { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER };
static size_t width_of(int32_t dtype) { return dtype == BFLOAT16 ? 2 : dtype == FLOAT32 ? 4 : 8; }

static _Atomic long rank_of_faults = -1, version = 22809, init_fault, async_fault, refuse, call_hangs, abort_hangs,
                    finalize_hangs, register_answer;
static _Atomic long aborts, destroys, registered, groups, calls, seen_max_ctas, seen_blocking;
static _Thread_local int depth, n_pending, group_error; /* an error inside a group is the group's */
static _Thread_local operation pending[GROUP_MOST];

static const struct {
    const char *name;
    _Atomic long *value;
} knobs[] = {{"rank", &rank_of_faults},     {"version", &version},         {"init", &init_fault},
             {"async_error", &async_fault}, {"refuse", &refuse},           {"call_hangs", &call_hangs},
             {"abort_hangs", &abort_hangs}, {"finalize", &finalize_hangs}, {"registered", &register_answer}},
  counters[] = {{"aborts", &aborts}, {"destroys", &destroys},      {"registered", &registered},
                {"groups", &groups}, {"max_ctas", &seen_max_ctas}, {"blocking", &seen_blocking},
                {"calls", &calls}};

int fake_nccl_plant(const char *name, long value)
{
    for (size_t i = 0; i < sizeof knobs / sizeof *knobs; i++)
        if (strcmp(knobs[i].name, name) == 0) {
            *knobs[i].value = value;
            return 0;
        }
    return -1;
}

long fake_nccl_count(const char *name)
{
    for (size_t i = 0; i < sizeof counters / sizeof *counters; i++)
        if (strcmp(counters[i].name, name) == 0) return *counters[i].value;
    return -1;
}

__attribute__((constructor)) static void read_environment(void)
{
    for (size_t i = 0; i < sizeof knobs / sizeof *knobs; i++) {
        char name[64] = "FAKE_NCCL_";
        for (size_t k = 0; knobs[i].name[k]; k++)
            name[10 + k] = knobs[i].name[k] == '_' ? '_' : (char)(knobs[i].name[k] - 'a' + 'A');
        if (getenv(name)) *knobs[i].value = strtol(getenv(name), NULL, 10);
    }
}

static bool hit(const comm *c, long planted) { return planted && (rank_of_faults < 0 || rank_of_faults == c->rank); }
static void nap(void) { nanosleep(&(struct timespec){0, 200000}, NULL); }

/* ---- the kernel ---- */

/* Wait for a counter of every rank. false: aborted. */
static bool await_all(comm *c, size_t offset, int64_t least)
{
    for (int r = 0; r < c->world; r++) {
        _Atomic int64_t *counter = (_Atomic int64_t *)((char *)&c->room->seats[r] + offset);
        while (atomic_load(counter) < least) {
            if (c->aborted) return false;
            nap();
        }
    }
    return true;
}

static float as_float(const void *data, int64_t i, int32_t dtype)
{
    uint32_t bits;
    float value;
    if (dtype == FLOAT32) return ((const float *)data)[i];
    bits = (uint32_t)((const uint16_t *)data)[i] << 16;
    memcpy(&value, &bits, 4);
    return value;
}

static void put_float(void *data, int64_t i, int32_t dtype, float value)
{
    uint32_t bits;
    if (dtype == FLOAT32) {
        ((float *)data)[i] = value;
        return;
    }
    memcpy(&bits, &value, 4);
    ((uint16_t *)data)[i] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static void sum_tile(const operation *o, int64_t at, int64_t n)
{
    const comm *c = o->comm;
    const int64_t part = o->count / c->world;
    const size_t width = width_of(o->dtype);
    for (int64_t i = 0; i < n; i++) {
        const int64_t owner = o->kind == ALL_REDUCE ? c->rank : (at + i) / part;
        if (o->kind == ALL_GATHER)
            memcpy((char *)o->data + (size_t)(at + i) * width, c->room->seats[owner].tile + (size_t)i * width, width);
        if (o->kind == ALL_GATHER) continue;
        if (owner != c->rank) { /* what others' parts hold does not matter: something useless */
            memset((char *)o->data + (size_t)(at + i) * width, 0x7f, width);
            continue;
        }
        if (o->dtype == INT64) {
            int64_t sum = 0;
            for (int r = 0; r < c->world; r++) sum += ((const int64_t *)(const void *)c->room->seats[r].tile)[i];
            ((int64_t *)o->data)[at + i] = sum;
            continue;
        }
        if (o->dtype == FLOAT64) {
            double sum = 0;
            for (int r = 0; r < c->world; r++) sum += ((const double *)(const void *)c->room->seats[r].tile)[i];
            ((double *)o->data)[at + i] = sum;
            continue;
        }
        float sum = 0;
        for (int r = 0; r < c->world; r++) {
            const float x = as_float(c->room->seats[r].tile, i, o->dtype);
            sum += o->op == AVG ? x / (float)c->world : x;
        }
        put_float(o->data, at + i, o->dtype, sum);
    }
}

static bool agree(const operation *o)
{
    for (int r = 0; r < o->comm->world; r++) {
        const seat *s = &o->comm->room->seats[r];
        if (s->count != o->count || s->dtype != o->dtype || s->op != o->op || s->place != o->place || s->of != o->of ||
            s->kind != o->kind)
            return false;
    }
    return true;
}

static int32_t run_operation(void *user)
{
    operation *o = user;
    comm *c = o->comm;
    seat *mine = &c->room->seats[c->rank];
    const size_t width = width_of(o->dtype);
    for (int64_t at = 0; at < o->count && !c->aborted; at += TILE) {
        const int64_t n = o->count - at < TILE ? o->count - at : TILE;
        if (!await_all(c, offsetof(seat, left), c->tiles)) break;
        memcpy(mine->tile, (char *)o->data + (size_t)at * width, (size_t)n * width);
        mine->count = o->count;
        mine->place = o->place;
        mine->of = o->of;
        mine->dtype = o->dtype;
        mine->op = o->op;
        mine->kind = o->kind;
        atomic_store(&mine->arrived, ++c->tiles);
        if (!await_all(c, offsetof(seat, arrived), c->tiles)) break;
        if (!agree(o)) { /* another operation, or another group: NCCL calls that undefined */
            c->async_error = INVALID_USAGE;
            while (!c->aborted) nap();
            break;
        }
        sum_tile(o, at, n);
        atomic_store(&mine->left, c->tiles);
    }
    c->running--;
    free(o);
    return 0;
}

/* ---- communicators ---- */

NCCL_API int ncclGetVersion(int *out);
NCCL_API int ncclGetUniqueId(unique_id *id);
NCCL_API int ncclCommInitRank(comm **out, int world, unique_id id, int rank);
NCCL_API int ncclCommInitRankConfig(comm **out, int world, unique_id id, int rank, config *given);
NCCL_API int ncclCommFinalize(comm *c);
NCCL_API int ncclCommDestroy(comm *c);
#ifndef FAKE_NCCL_WITHOUT_ABORT
NCCL_API int ncclCommAbort(comm *c);
#endif
NCCL_API int ncclCommGetAsyncError(comm *c, int *error);
NCCL_API const char *ncclGetErrorString(int result);
NCCL_API const char *ncclGetLastError(comm *c);
NCCL_API int ncclCommRegister(comm *c, void *data, size_t bytes, void **handle);
NCCL_API int ncclCommDeregister(comm *c, void *handle);
NCCL_API int ncclAllReduce(const void *from, void *to, size_t count, int dtype, int op, comm *c, void *stream);
NCCL_API int ncclReduceScatter(const void *from, void *to, size_t count, int dtype, int op, comm *c, void *stream);
NCCL_API int ncclAllGather(const void *from, void *to, size_t count, int dtype, comm *c, void *stream);
NCCL_API int ncclGroupStart(void);
NCCL_API int ncclGroupEnd(void);

int ncclGetVersion(int *out)
{
    *out = (int)version;
    return OK;
}

int ncclGetUniqueId(unique_id *id)
{
    const char *dir = getenv("TMPDIR");
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "%s/fake_nccl_XXXXXX", dir ? dir : "/tmp");
    const int file = mkstemp(id->internal);
    if (file < 0 || ftruncate(file, sizeof(room)) != 0) return SYSTEM;
    close(file);
    return OK;
}

static void *join(void *user)
{
    comm *c = user;
    atomic_fetch_add(&c->room->joined, 1);
    while (c->room->joined < c->world && !c->aborted) nap();
    while (hit(c, init_fault == 1) && !c->aborted) nap();
    c->ready = true;
    return NULL;
}

int ncclCommInitRankConfig(comm **out, int world, unique_id id, int rank, config *given)
{
    if (given && given->magic != 0xcafebeefu) return INVALID_ARGUMENT;
    if (fake_cuda_current() == 0 || world > MOST) return INVALID_USAGE;
    comm *c = calloc(1, sizeof *c);
    const int file = open(id.internal, O_RDWR | O_CLOEXEC);
    if (!c || file < 0) {
        free(c);
        return SYSTEM;
    }
    c->room = mmap(NULL, sizeof(room), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    c->rank = rank;
    c->world = world;
    c->blocking = !given || given->blocking != 0;
    seen_blocking = c->blocking;
    seen_max_ctas = given && given->max_ctas != INT_MIN ? given->max_ctas : 0;
    while (hit(c, init_fault == 2)) nap();
    *out = c;
    if (!c->blocking) return pthread_create(&c->starter, NULL, join, c) ? SYSTEM : IN_PROGRESS;
    join(c);
    if (rank == 0) unlink(id.internal);
    return c->aborted ? INTERNAL : OK;
}

int ncclCommInitRank(comm **out, int world, unique_id id, int rank) { return ncclCommInitRankConfig(out, world, id, rank, NULL); }

static void free_comm(comm *c)
{
    if (!c->blocking) pthread_join(c->starter, NULL);
    while (c->running > 0 || c->inside > 0) nap();
    munmap(c->room, sizeof(room));
    free(c);
}

int ncclCommFinalize(comm *c)
{
    while (hit(c, finalize_hangs)) nap();
    return OK;
}

int ncclCommDestroy(comm *c)
{
    destroys++;
    free_comm(c);
    return OK;
}

#ifndef FAKE_NCCL_WITHOUT_ABORT
int ncclCommAbort(comm *c)
{
    while (hit(c, abort_hangs)) nap();
    aborts++;
    c->aborted = true;
    free_comm(c);
    return OK;
}
#endif

int ncclCommGetAsyncError(comm *c, int *error)
{
    *error = hit(c, async_fault) ? (int)async_fault : c->async_error;
    if (*error == OK && (!c->ready || c->busy > 0)) *error = IN_PROGRESS;
    if (c->busy > 0) c->busy--;
    return OK;
}

const char *ncclGetErrorString(int result)
{
    static const char *const words[] = {"no error",         "unhandled cuda error", "unhandled system error", "internal error",
                                        "invalid argument", "invalid usage",        "remote process exited",  "in progress"};
    return result >= 0 && result < 8 ? words[result] : "unknown";
}

const char *ncclGetLastError(comm *c)
{
    (void)c;
    return "fake: planted";
}

int ncclCommRegister(comm *c, void *data, size_t bytes, void **handle)
{
    if (hit(c, register_answer)) return (int)register_answer;
    (void)bytes;
    registered++;
    *handle = data;
    return OK;
}

int ncclCommDeregister(comm *c, void *handle)
{
    (void)c, (void)handle;
    registered--;
    return OK;
}

/* ---- launching ---- */

static int queue(comm *c, const operation *what, int place, int of)
{
    while (hit(c, call_hangs) && !c->aborted) nap();
    if (c->aborted) return INTERNAL;
    if (fake_cuda_capturing()) return c->blocking ? OK : IN_PROGRESS; /* nothing runs; one rank's sum is what is there */
    operation *o = malloc(sizeof *o);
    if (!o) return SYSTEM;
    *o = *what;
    o->place = place;
    o->of = of;
    c->running++;
    if (fake_cuda_run(o->stream, run_operation, o) != 0) return SYSTEM;
    if (c->blocking) return OK;
    c->busy = 3;
    return IN_PROGRESS;
}

static int launch(void)
{
    int answer = OK;
    const int n = n_pending;
    n_pending = 0;
    if (n > 1) groups++;
    for (int i = 0; i < n && (answer == OK || answer == IN_PROGRESS); i++) {
        comm *c = pending[i].comm;
        c->inside++;
        answer = queue(c, &pending[i], i, n);
        c->inside--;
    }
    return answer;
}

static int add(const operation *o)
{
    comm *c = o->comm;
    if (!o->stream || n_pending == GROUP_MOST || fake_cuda_current() == 0) return INVALID_ARGUMENT;
    if (hit(c, refuse) && --refuse == 0) return group_error = INVALID_USAGE;
    pending[n_pending++] = *o;
    calls++;
    return depth ? OK : launch();
}

int ncclAllReduce(const void *from, void *to, size_t count, int dtype, int op, comm *c, void *stream)
{
    if (!c || from != to) return INVALID_ARGUMENT;
    return add(&(operation){c, to, stream, (int64_t)count, 0, 0, dtype, op, ALL_REDUCE});
}

/* In place, as NCCL defines it: the part of this rank lies in the whole. */
static bool in_place(const void *whole, const void *part, size_t count, int dtype, const comm *c)
{
    return (const char *)part == (const char *)whole + (size_t)c->rank * count * width_of(dtype);
}

int ncclReduceScatter(const void *from, void *to, size_t count, int dtype, int op, comm *c, void *stream)
{
    if (!c || !in_place(from, to, count, dtype, c)) return INVALID_ARGUMENT;
    char *whole = (char *)to - (size_t)c->rank * count * width_of(dtype);
    return add(&(operation){c, whole, stream, (int64_t)count * c->world, 0, 0, dtype, op, REDUCE_SCATTER});
}

int ncclAllGather(const void *from, void *to, size_t count, int dtype, comm *c, void *stream)
{
    if (!c || !in_place(to, from, count, dtype, c)) return INVALID_ARGUMENT;
    return add(&(operation){c, to, stream, (int64_t)count * c->world, 0, 0, dtype, SUM, ALL_GATHER});
}

int ncclGroupStart(void)
{
    depth++;
    return OK;
}

int ncclGroupEnd(void)
{
    if (depth == 0) return INVALID_USAGE;
    const int error = group_error;
    if (--depth) return OK;
    group_error = OK;
    if (error) n_pending = 0;
    return error ? error : launch();
}
