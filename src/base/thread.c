/* SPDX-License-Identifier: Apache-2.0 */
/* Threads, a mutex with its condition variable, clocks. */
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base.h"

struct lf__mutex {
    pthread_mutex_t mutex;
    pthread_cond_t cond;
};

struct lf__thread {
    pthread_t id;
    lf__thread_fn fn;
    void *user;
    char name[16];
    _Atomic bool begun; /* the thread has read all of the above */
};

int64_t lf__now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

int64_t lf__unix_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

void lf__sleep_ns(int64_t ns)
{
    struct timespec t = {ns / 1000000000, ns % 1000000000};
    while (nanosleep(&t, &t) != 0 && errno == EINTR) {}
}

lf__mutex *lf__mutex_open(void)
{
    lf__mutex *m = lf__alloc(sizeof *m);
    if (!m) return NULL;
    pthread_condattr_t attr;
    if (pthread_condattr_init(&attr) != 0) {
        lf__free(m);
        return NULL;
    }
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    int bad = pthread_mutex_init(&m->mutex, NULL);
    if (!bad && (bad = pthread_cond_init(&m->cond, &attr)) != 0) pthread_mutex_destroy(&m->mutex);
    pthread_condattr_destroy(&attr);
    if (bad) {
        lf__free(m);
        return NULL;
    }
    return m;
}

void lf__mutex_close(lf__mutex *m)
{
    if (!m) return;
    pthread_cond_destroy(&m->cond);
    pthread_mutex_destroy(&m->mutex);
    lf__free(m);
}

void lf__lock(lf__mutex *m) { pthread_mutex_lock(&m->mutex); }
void lf__unlock(lf__mutex *m) { pthread_mutex_unlock(&m->mutex); }
void lf__wait(lf__mutex *m) { pthread_cond_wait(&m->cond, &m->mutex); }
void lf__wake(lf__mutex *m) { pthread_cond_broadcast(&m->cond); }

bool lf__wait_ns(lf__mutex *m, int64_t timeout_ns)
{
    int64_t at = lf__now_ns() + timeout_ns;
    struct timespec t = {at / 1000000000, at % 1000000000};
    return pthread_cond_timedwait(&m->cond, &m->mutex, &t) != ETIMEDOUT;
}

static void *enter(void *arg)
{
    lf__thread *t = arg;
    const lf__thread_fn fn = t->fn;
    void *user = t->user;
    pthread_setname_np(pthread_self(), t->name);
    t->begun = true;
    fn(user);
    return NULL;
}

lf_status lf__thread_start(lf__thread **out, const char *name, lf__thread_fn fn, void *user)
{
    *out = NULL;
    lf__thread *t = lf__alloc(sizeof *t);
    if (!t) return LF_FAIL(LF_ERR_NOMEM, "thread %s", name);
    t->fn = fn;
    t->user = user;
    strncpy(t->name, name, sizeof t->name - 1);
    int err = pthread_create(&t->id, NULL, enter, t);
    if (err) {
        lf__free(t);
        return lf__fail_errno(err, "cannot start thread %s; hint: the limit of processes (ulimit -u)", name);
    }
    *out = t;
    return LF_OK;
}

void lf__thread_join(lf__thread *thread)
{
    if (!thread) return;
    pthread_join(thread->id, NULL);
    lf__free(thread);
}

void lf__thread_forget(lf__thread *thread)
{
    while (!thread->begun) lf__sleep_ns(100000);
    pthread_detach(thread->id);
    lf__free(thread);
}

int32_t lf__n_cores(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 ? (int32_t)n : 1;
}
