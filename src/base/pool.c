/* SPDX-License-Identifier: Apache-2.0 */
/* The parallel for, over threads that stay.
 *
 * One job at a time: its caller works too, and threads that are awake take seats at it. A caller that finds the pool taken
 * (another thread's loop, or a loop inside a loop) runs its loop alone, which is always right. Threads are started when a
 * loop first wants them. fork() leaves the child an empty pool; unloading the library stops the threads. */
#include <pthread.h>
#include <stdatomic.h>

#include "base.h"

enum { MOST = 63 }; /* threads besides the caller */

typedef struct for_job {
    lf__for_fn fn;
    void *user;
    int64_t n;
    _Atomic int64_t next;
} for_job;

static struct {
    pthread_mutex_t mutex;
    pthread_cond_t work, idle;
    for_job *job;
    int32_t seats;  /* threads that may still join the job */
    int32_t active; /* threads inside it */
    int32_t n_threads;
    bool taken, stop, hooked;
    lf__thread *thread[MOST];
} pool = {.mutex = PTHREAD_MUTEX_INITIALIZER, .work = PTHREAD_COND_INITIALIZER, .idle = PTHREAD_COND_INITIALIZER};

static void run_share(for_job *job)
{
    for (;;) {
        int64_t i = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
        if (i >= job->n) return;
        job->fn(job->user, i);
    }
}

static void pool_work(void *unused)
{
    (void)unused;
    pthread_mutex_lock(&pool.mutex);
    for (;;) {
        while (!pool.stop && pool.seats == 0) pthread_cond_wait(&pool.work, &pool.mutex);
        if (pool.stop) break;
        pool.seats--;
        pool.active++;
        for_job *job = pool.job;
        pthread_mutex_unlock(&pool.mutex);
        run_share(job);
        pthread_mutex_lock(&pool.mutex);
        if (--pool.active == 0) pthread_cond_signal(&pool.idle);
    }
    pthread_mutex_unlock(&pool.mutex);
}

/* ---- fork and unloading ---------------------------------------------------------------------------------------------- */

static void before_fork(void) { pthread_mutex_lock(&pool.mutex); }
static void after_fork_in_parent(void) { pthread_mutex_unlock(&pool.mutex); }

/* The threads exist in the parent only; their handles are left behind, a few hundred bytes. */
static void after_fork_in_child(void)
{
    pool.job = NULL;
    pool.seats = pool.active = pool.n_threads = 0;
    pool.taken = false;
    pool.work = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    pool.idle = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    pthread_mutex_unlock(&pool.mutex);
}

static void __attribute__((destructor)) stop_pool(void)
{
    pthread_mutex_lock(&pool.mutex);
    int32_t n = pool.n_threads;
    pool.n_threads = 0;
    pool.stop = true;
    pthread_cond_broadcast(&pool.work);
    pthread_mutex_unlock(&pool.mutex);
    for (int32_t i = 0; i < n; i++) lf__thread_join(pool.thread[i]);
    pthread_mutex_lock(&pool.mutex);
    pool.stop = false;
    pthread_mutex_unlock(&pool.mutex);
}

/* ---- the loop -------------------------------------------------------------------------------------------------------- */

/* Offer the job to up to `helpers` threads; false when the pool is taken. A thread that cannot be started leaves its share
 * to the others. */
static bool offer(for_job *job, int32_t helpers)
{
    pthread_mutex_lock(&pool.mutex);
    bool mine = !pool.taken && !pool.stop;
    if (mine) {
        if (!pool.hooked) pool.hooked = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child) == 0;
        while (pool.hooked && pool.n_threads < helpers &&
               lf__thread_start(&pool.thread[pool.n_threads], "lf-pool", pool_work, NULL) == LF_OK)
            pool.n_threads++;
        pool.taken = true;
        pool.job = job;
        pool.seats = helpers < pool.n_threads ? helpers : pool.n_threads;
        if (pool.seats == 1) pthread_cond_signal(&pool.work);
        else if (pool.seats > 1) pthread_cond_broadcast(&pool.work);
    }
    pthread_mutex_unlock(&pool.mutex);
    return mine;
}

/* Nobody may join any more; wait for those inside. */
static void take_back(void)
{
    pthread_mutex_lock(&pool.mutex);
    pool.seats = 0;
    while (pool.active > 0) pthread_cond_wait(&pool.idle, &pool.mutex);
    pool.job = NULL;
    pool.taken = false;
    pthread_mutex_unlock(&pool.mutex);
}

void lf__parallel(int32_t threads, int64_t n, lf__for_fn fn, void *user)
{
    for_job job = {fn, user, n, 0};
    int64_t helpers = (threads > 0 ? threads : lf__n_cores()) - 1;
    if (helpers > n - 1) helpers = n - 1;
    if (helpers > MOST) helpers = MOST;
    bool shared = helpers > 0 && offer(&job, (int32_t)helpers);
    run_share(&job);
    if (shared) take_back();
}
