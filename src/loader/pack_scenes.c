/* SPDX-License-Identifier: Apache-2.0 */
/* Packing drawn scenes: chunks are drawn on all cores and written in order. */
#include <stdio.h>
#include <string.h>

#include "pack_int.h"

enum { CHUNK = 256, JPEG_MOST = 1 << 20, TEXT_MOST = 1 << 16 };

typedef struct drawn {
    lf__buf jpeg, text;
    lf__fault fault;
} drawn;

typedef struct job {
    const lf_pack_options *opts;
    int64_t first; /* number of the chunk's first scene */
    drawn *scenes; /* (CHUNK); memory is kept from chunk to chunk */
} job;

static lf_status draw(const lf_pack_options *opts, int64_t number, drawn *to)
{
    lf__scene scene;
    to->jpeg.used = to->text.used = 0;
    lf__scene_make(&scene, opts->seed, number);
    uint8_t *rgb = lf__alloc((size_t)scene.side * (size_t)scene.side * 3);
    if (!rgb) return LF_FAIL(LF_ERR_NOMEM, "scene of %d x %d pixels", scene.side, scene.side);
    lf__scene_draw(&scene, opts->seed, number, rgb);
    lf_status rc = lf__pack_encode(rgb, scene.side, scene.side, opts->quality, opts->chroma_420, &to->jpeg);
    lf__free(rgb);
    return rc == LF_OK ? lf__scene_text(&scene, opts->seed, number, &to->text) : rc;
}

static void draw_one(void *user, int64_t i)
{
    job *j = user;
    drawn *to = &j->scenes[i];
    to->fault = (lf__fault){0};
    lf__fault_keep(&to->fault, draw(j->opts, j->first + i, to));
}

static lf_status write_chunk(lf__pack_writer *w, const job *j, int64_t n)
{
    int64_t bytes = 0;
    for (int64_t i = 0; i < n; i++) {
        if (j->scenes[i].fault.status < 0) return lf__fault_raise(&j->scenes[i].fault);
        bytes += (int64_t)(j->scenes[i].jpeg.used + j->scenes[i].text.used);
    }
    lf_status rc = lf__pack_begin(w, bytes, n * 2);
    for (int64_t i = 0; i < n && rc == LF_OK; i++) {
        const drawn *d = &j->scenes[i];
        char id[32];
        bool taken;
        snprintf(id, sizeof id, "%010lld", (long long)(j->first + i));
        rc = lf__pack_put(w, id, "image", d->jpeg.data, d->jpeg.used, &taken);
        if (rc == LF_OK) rc = lf__pack_put(w, id, "text", d->text.data, d->text.used, &taken);
    }
    if (rc < 0) return rc;
    w->sum.samples += n;
    w->sum.images += n;
    return lf__pack_commit(w);
}

static lf_status pack_all(lf__pack_writer *w, job *j, lf_progress_fn progress, void *user)
{
    const lf_pack_options *o = j->opts;
    char source[128];
    for (int64_t done = 0; done < o->scenes;) {
        int64_t n = o->scenes - done < CHUNK ? o->scenes - done : CHUNK;
        j->first = o->first + done;
        lf__parallel(o->threads, n, draw_one, j);
        lf_status rc = write_chunk(w, j, n);
        done += n;
        if (rc == LF_OK) rc = lf__pack_progress(progress, user, done, o->scenes);
        if (rc < 0) return rc;
    }
    snprintf(source, sizeof source, "scenes seed=%lld first=%lld", (long long)o->seed, (long long)o->first);
    return lf__pack_finish(w, source, "bytes", 0);
}

lf_status lf_pack_scenes(const char *path, const lf_pack_options *opts, lf_progress_fn progress, void *user,
                         lf_pack_summary *summary)
{
    lf_status rc = LF_OK;
    lf_pack_options o;
    lf__pack_writer w = {0};
    drawn *scenes = NULL;
    LF_CHECK_ARG(path, "path is NULL");
    LF_CHECK_ARG(!summary || summary->size == sizeof *summary, "lf_pack_summary: size is %zu, expected %zu", summary->size,
                 sizeof *summary);
    LF_TRY(lf__options_take("pack", &o, sizeof o, opts));
    LF_CHECK_ARG(o.scenes >= 1, "scenes is %lld, expected 1 or more", (long long)o.scenes);
    scenes = lf__alloc_array(CHUNK, sizeof *scenes);
    if (!scenes) LF_THROW(LF_ERR_NOMEM, "%d scenes", CHUNK);
    for (int32_t i = 0; i < CHUNK; i++) scenes[i] = (drawn){.jpeg.max = JPEG_MOST, .text.max = TEXT_MOST};
    LF_TRY(lf__pack_open(&w, path, &o));
    job j = {.opts = &o, .scenes = scenes};
    LF_TRY(pack_all(&w, &j, progress, user));
    if (summary) {
        *summary = w.sum;
        summary->size = sizeof *summary;
    }
out:
    lf__pack_close(&w);
    for (int32_t i = 0; scenes && i < CHUNK; i++) {
        lf__buf_free(&scenes[i].jpeg);
        lf__buf_free(&scenes[i].text);
    }
    lf__free(scenes);
    return rc;
}
