/* SPDX-License-Identifier: Apache-2.0 */
/* Many slices at once: batches in parallel, then the rest of the work in order. */
#include "vault_int.h"

enum { A_THREAD = 2, MOST = 64 };

lf_status lf__vault_crew_open(lf__vault_crew *crew, int32_t threads, size_t slice_bytes)
{
    *crew = (lf__vault_crew){.threads = threads > 0 ? threads : lf__n_cores()};
    int32_t n = crew->threads * A_THREAD < MOST ? crew->threads * A_THREAD : MOST;
    crew->work = lf__alloc_array((size_t)n, sizeof *crew->work);
    if (!crew->work) return LF_FAIL(LF_ERR_NOMEM, "%d encoders", n);
    for (; crew->n < n; crew->n++) {
        lf_status rc = lf__vault_work_open(&crew->work[crew->n], slice_bytes);
        if (rc < 0) {
            lf__vault_crew_close(crew);
            return rc;
        }
    }
    return LF_OK;
}

void lf__vault_crew_close(lf__vault_crew *crew)
{
    for (int32_t i = 0; i < crew->n; i++) lf__vault_work_close(&crew->work[i]);
    lf__free(crew->work);
    *crew = (lf__vault_crew){0};
}

typedef struct batch {
    lf__vault_crew *crew;
    const int64_t *items;
    int64_t first;
    lf__vault_item_fn each;
    void *user;
} batch;

static int64_t item_of(const batch *b, int64_t i) { return b->items ? b->items[b->first + i] : b->first + i; }

static void run_one(void *user, int64_t i)
{
    batch *b = user;
    lf__vault_work *w = &b->crew->work[i];
    w->fault = (lf__fault){0};
    lf__fault_keep(&w->fault, b->each(b->user, w, item_of(b, i)));
}

lf_status lf__vault_crew_run(lf__vault_crew *crew, const int64_t *items, int64_t n, lf__vault_item_fn each,
                             lf__vault_item_fn then, lf__vault_source *trim, void *user)
{
    batch b = {crew, items, 0, each, user};
    for (; b.first < n; b.first += crew->n) {
        int64_t m = n - b.first < crew->n ? n - b.first : crew->n;
        lf__parallel(crew->threads, m, run_one, &b);
        for (int64_t i = 0; i < m; i++) {
            lf_status rc = lf__fault_raise(&crew->work[i].fault);
            if (rc == LF_OK && then) rc = then(user, &crew->work[i], item_of(&b, i));
            if (rc < 0) return rc;
        }
        if (trim) lf__vault_source_trim(trim);
    }
    return LF_OK;
}
