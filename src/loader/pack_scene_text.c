/* SPDX-License-Identifier: Apache-2.0 */
/* A scene in words: questions and answers as turns, and where in the answers the words stand that name an attribute. */
#include <stdio.h>
#include <string.h>

#include "pack_int.h"

enum { TAG_TEXT = 0x74657874 };

typedef struct writer {
    lf__buf turns, words; /* JSON, without the brackets around */
    lf__buf answer;       /* the turn being written */
    int32_t n_turns;
    lf_status rc; /* the first error; later calls do nothing */
} writer;

static void keep(writer *w, lf_status rc)
{
    if (w->rc == LF_OK) w->rc = rc;
}

/* Texts hold no character that JSON escapes, but for the newline behind the first "<image>". */
static void ask(writer *w, const char *before, const char *word, const char *after)
{
    if (w->rc < 0) return;
    keep(w, lf__buf_printf(&w->turns, "%s{\"from\":\"human\",\"value\":\"%s%s%s%s\"}", w->n_turns ? "," : "",
                           w->n_turns ? "" : "<image>\\n", before, word, after));
    w->n_turns++;
}

static void say(writer *w, const char *text)
{
    if (w->rc == LF_OK) keep(w, lf__buf_add(&w->answer, text, strlen(text)));
}

/* A word of the answer that names an attribute. */
static void name(writer *w, const char *kind, const char *word)
{
    if (w->rc == LF_OK)
        keep(w, lf__buf_printf(&w->words, "%s{\"turn\":%d,\"start\":%zu,\"bytes\":%zu,\"kind\":\"%s\"}", w->words.used ? "," : "",
                               w->n_turns, w->answer.used, strlen(word), kind));
    say(w, word);
}

static void end_answer(writer *w)
{
    say(w, ".");
    if (w->rc == LF_OK) keep(w, lf__buf_printf(&w->turns, ",{\"from\":\"gpt\",\"value\":\"%s\"}", w->answer.data));
    w->n_turns++;
    w->answer.used = 0;
}

static void describe(writer *w, const lf__scene *s)
{
    ask(w, "Describe the picture.", "", "");
    for (int32_t i = 0; i < s->n; i++) {
        const lf__scene_object *o = &s->object[i];
        if (i > 0) say(w, ", ");
        name(w, "place", lf__quadrant_names[o->quadrant]);
        say(w, " a ");
        name(w, "size", o->large ? "large" : "small");
        say(w, " ");
        if (o->texture > 0) {
            name(w, "texture", lf__texture_names[o->texture]);
            say(w, " ");
        }
        name(w, "colour", lf__colour_names[o->colour]);
        say(w, " ");
        name(w, "shape", lf__shape_names[o->shape]);
    }
    end_answer(w);
}

static void count(writer *w, int32_t n)
{
    static const char *const numbers[] = {"one", "two", "three"};
    ask(w, "How many shapes?", "", "");
    name(w, "count", numbers[n - 1]);
    end_answer(w);
}

/* choice: from 0 to 1 */
static void question(writer *w, const lf__scene_object *o, double choice)
{
    const lf__scene_recipe *k = &lf__recipe;
    char both[64];
    if (choice < k->ask_place) {
        ask(w, "What is ", lf__quadrant_names[o->quadrant], "?");
        say(w, "a ");
        name(w, "colour", lf__colour_names[o->colour]);
        say(w, " ");
        name(w, "shape", lf__shape_names[o->shape]);
    } else if (choice < k->ask_place + k->ask_colour) {
        ask(w, "What colour is the ", lf__shape_names[o->shape], "?");
        name(w, "colour", lf__colour_names[o->colour]);
    } else if (choice < k->ask_place + k->ask_colour + k->ask_shape) {
        ask(w, "What shape is ", lf__colour_names[o->colour], "?");
        say(w, "a ");
        name(w, "shape", lf__shape_names[o->shape]);
    } else {
        snprintf(both, sizeof both, "%s %s", lf__colour_names[o->colour], lf__shape_names[o->shape]);
        ask(w, "Where is the ", both, "?");
        name(w, "place", lf__quadrant_names[o->quadrant]);
    }
    end_answer(w);
}

/* One question for each object, in a random order: no question's text gives another one's answer away. */
static void questions(writer *w, const lf__scene *s, lf__rng *r)
{
    int32_t order[LF__MOST_OBJECTS];
    for (int32_t i = 0; i < s->n; i++) order[i] = i;
    for (int32_t i = 0; i < s->n; i++) {
        int32_t k = i + lf__rng_below(r, s->n - i), t = order[k];
        order[k] = order[i];
        order[i] = t;
        question(w, &s->object[t], lf__rng_unit(r));
    }
}

lf_status lf__scene_text(const lf__scene *s, int64_t seed, int64_t number, lf__buf *json)
{
    lf__rng r;
    writer w = {.turns.max = 1 << 16, .words.max = 1 << 16, .answer.max = 1 << 12};
    lf__rng_init(&r, (uint64_t)seed, (uint32_t)number, (uint32_t)(number >> 32), TAG_TEXT);
    double form = lf__rng_unit(&r);
    if (s->n <= 2 && form < lf__recipe.describe) {
        describe(&w, s);
    } else {
        if (s->n <= 2 && lf__rng_unit(&r) < lf__recipe.count) count(&w, s->n);
        questions(&w, s, &r);
    }
    if (w.rc == LF_OK) w.rc = lf__buf_printf(json, "{\"turns\":[%s],\"words\":[%s]}", w.turns.data, w.words.data);
    lf__buf_free(&w.turns);
    lf__buf_free(&w.words);
    lf__buf_free(&w.answer);
    return w.rc;
}
