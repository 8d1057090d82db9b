/* SPDX-License-Identifier: Apache-2.0 */
/* CheckpointVault when the power goes: every state that may then be on disk. */
#include "crash/crash_io.h"
#include "crash/vault_fixture.h"
#include "vault/vault_int.h"

static lf_vault_options options(int keep_last, int rebase_every)
{
    lf_vault_options o = fixture_options(1);
    o.keep_last = keep_last;
    o.rebase_every = rebase_every;
    return o;
}

static lf_status save_and_wait(lf_vault *v, lf_map *map, int64_t step)
{
    fixture_fill(map, step);
    lf_blob blob = {"step", &step, sizeof step};
    lf_status rc = lf_vault_save(v, step, &blob, 1, NULL);
    return rc < 0 ? rc : lf_vault_wait(v);
}

/* Saves at 10, 20, … with a promise after each, two sessions, bases and deletions on the way. */
static void record_run(crash_io *c, lf_map *map, uint32_t plant, int n_saves)
{
    lf_vault_options o = options(2, 2);
    lf_vault *v;
    for (int session = 0, s = 0; session < 2; session++) {
        CHECK_OK(lf__vault_open_io(&v, "/v", map, &o, &c->io));
        if (session == 1) CHECK_OK(lf_vault_restore(v, -1, NULL));
        lf__vault_plant(v, plant);
        for (; s < (session + 1) * n_saves / 2; s++) {
            CHECK_OK(save_and_wait(v, map, (s + 1) * 10));
            crash_ack(c, (s + 1) * 10);
        }
        CHECK_OK(lf_vault_close(v));
    }
}

typedef struct sweep {
    lf_map *map;
    int64_t states, failures, restored;
    char first[256];
} sweep;

static void fail_state(sweep *s, const char *what, const char *why)
{
    if (s->failures++ == 0) snprintf(s->first, sizeof s->first, "%s: %s", what, why);
}

/* The one invariant: a restore gives exactly some snapshot that is not older than the last promise. */
static void check_state(void *user, crash_io *state, int at, int64_t acknowledged, const char *what)
{
    (void)at;
    sweep *s = user;
    lf_vault_options o = options(2, 2);
    lf_vault *v = NULL;
    lf_checkpoint_info info = {.size = sizeof info};
    const void *blob;
    int64_t bytes, inside;
    s->states++;
    lf_status rc = lf__vault_open_io(&v, "/v", s->map, &o, &state->io);
    if (rc == LF_OK) rc = lf_vault_restore(v, -1, &info);
    if (rc == LF_ERR_NOTFOUND && acknowledged < 0) {
        CHECK_OK(lf_vault_close(v));
        return;
    }
    if (rc < 0) {
        fail_state(s, what, lf_error_text());
    } else if (info.step < acknowledged) {
        fail_state(s, what, "an acknowledged checkpoint is gone");
    } else if (!fixture_is(s->map, info.step)) {
        fail_state(s, what, "the restored state is not that of its step");
    } else if (lf_vault_blob(v, "step", &blob, &bytes) != LF_OK || bytes != 8 ||
               (memcpy(&inside, blob, 8), inside != info.step)) {
        fail_state(s, what, "the blob is not that of its step");
    } else {
        s->restored++;
        if (crash_count(state, "/v", ".tmp") != 0) fail_state(s, what, "temporary files are left after opening");
        if (s->states % 29 == 0 && save_and_wait(v, s->map, 1000) != LF_OK) fail_state(s, what, lf_error_text());
        else if (s->states % 29 == 0) { /* life goes on */ fixture_clear(s->map);
            if (lf_vault_restore(v, -1, NULL) != LF_OK || !fixture_is(s->map, 1000))
                fail_state(s, what, "a save after the crash is not restored");
        }
    }
    lf_vault_close(v);
    if (state->n_open != 0) fail_state(s, what, "files are left open");
}

static sweep run_sweep(uint32_t plant, int n_saves, int more, bool all)
{
    crash_io *c = crash_new();
    sweep s = {.map = fixture_map()};
    record_run(c, s.map, plant, n_saves);
    for (int at = 0; at <= c->n_ops && (all || s.failures == 0); at++)
        if (crash_matters(c, at)) crash_states(c, at, more, check_state, &s);
    printf("  %d operations, %lld crash states, %lld restored, %lld failures\n", c->n_ops, (long long)s.states,
           (long long)s.restored, (long long)s.failures);
    crash_free(c);
    lf_map_unref(s.map);
    return s;
}

TEST(every_crash_state_restores_a_promised_snapshot)
{
    sweep s = run_sweep(0, 8, 24, true);
    if (s.failures) FAIL_("%lld of %lld states fail, first: %s", (long long)s.failures, (long long)s.states, s.first);
    CHECK(s.states > 2000);
    CHECK(s.restored > s.states / 2);
}

/* The sweep itself is tested: each missing sync must show. */
TEST(planted_ordering_bugs_are_found)
{
    static const uint32_t plants[] = {LF__VAULT_PLANT_NO_DATA_SYNC, LF__VAULT_PLANT_NO_META_SYNC, LF__VAULT_PLANT_NO_FOLDER_SYNC,
                                      LF__VAULT_PLANT_NO_DIR_SYNC};
    for (size_t i = 0; i < LF_COUNT(plants); i++) {
        sweep s = run_sweep(plants[i], 4, 4, false);
        if (s.failures == 0) FAIL_("plant %u was not found in %lld states", plants[i], (long long)s.states);
    }
}

/* A sync that failed once must not be believed the second time: the crash after a failed save of 30. */
TEST(a_failed_sync_is_final)
{
    lf_map *map = fixture_map();
    int64_t n_failed = 0, n_syncs = 0;
    for (int64_t n = 1; n < 200; n++) {
        crash_io *c = crash_new();
        lf_vault_options o = options(0, 0);
        lf_vault *v;
        CHECK_OK(lf__vault_open_io(&v, "/v", map, &o, &c->io));
        CHECK_OK(save_and_wait(v, map, 10));
        crash_ack(c, 10);
        crash_fail(c, n, CRASH_EIO, 1);
        lf_status rc = save_and_wait(v, map, 20);
        bool reached = crash_fail(c, 0, 0, 0) >= n;
        if (rc == LF_OK) crash_ack(c, 20);
        CHECK_OK(save_and_wait(v, map, 30));
        crash_ack(c, 30);
        CHECK_OK(lf_vault_close(v));
        bool was_sync = false;
        for (int i = 0; i < c->n_ops; i++) was_sync |= c->ops[i].kind == OP_SYNC_FAILED;
        n_syncs += was_sync;
        n_failed += rc < 0;
        sweep s = {.map = map};
        for (int at = 0; was_sync && at <= c->n_ops; at++)
            if (crash_matters(c, at)) crash_states(c, at, 4, check_state, &s);
        if (s.failures) FAIL_("fault %lld: %s", (long long)n, s.first);
        crash_free(c);
        if (!reached) break;
    }
    CHECK(n_failed > 20);
    CHECK(n_syncs >= 2);
    lf_map_unref(map);
}

LF_TEST_MAIN
