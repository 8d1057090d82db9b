/* SPDX-License-Identifier: Apache-2.0 */
/* Text records: JSON turns to tokens. The form is in docs/format/records.md. */
#include <jansson.h>
#include <string.h>

#include "loader_int.h"

void lf__vocabulary_set(lf__vocabulary *v, int32_t tokenizer_ids)
{
    int32_t n = tokenizer_ids > 0 ? tokenizer_ids : LF__BYTES_VOCABULARY;
    *v = (lf__vocabulary){.n = n,
                          .is_bytes = tokenizer_ids <= 0,
                          .pad = n,
                          .bos = n + 1,
                          .eos = n + 2,
                          .image = n + 3,
                          .human = n + 4,
                          .gpt = n + 5,
                          .size = (int32_t)lf__round_up(n + 6, 8)};
}

static void put(lf__tokens *out, int32_t id, bool trained)
{
    if (out->n == out->room) {
        out->cut = true;
        return;
    }
    out->id[out->n] = id;
    out->trained[out->n++] = trained;
}

static lf_status put_ids(const json_t *ids, size_t turn, const lf__vocabulary *v, bool trained, lf__tokens *out)
{
    if (!json_is_array(ids)) return LF_FAIL(LF_ERR_FORMAT, "tokens[%zu] is no list of ids", turn);
    size_t n = json_array_size(ids);
    for (size_t i = 0; i < n; i++) {
        const json_t *id = json_array_get(ids, i);
        json_int_t value = json_integer_value(id);
        if (!json_is_integer(id) || value < 0 || value >= v->n)
            return LF_FAIL(LF_ERR_FORMAT, "tokens[%zu][%zu] is %lld, expected a number from 0 to %d", turn, i, (long long)value,
                           v->n - 1);
        put(out, (int32_t)value, trained);
    }
    return LF_OK;
}

typedef struct turn_text {
    bool is_human, has_image; /* has_image: it began with "<image>", which is left out of `text` with its newline */
    const char *text;
    size_t n;
} turn_text;

static lf_status read_turn(const json_t *turn, size_t i, turn_text *t)
{
    static const char image[] = "<image>";
    const char *from = json_string_value(json_object_get(turn, "from"));
    const json_t *value = json_object_get(turn, "value");
    if (!from || (strcmp(from, "human") != 0 && strcmp(from, "gpt") != 0))
        return LF_FAIL(LF_ERR_FORMAT, "turn %zu is from '%.32s', expected human or gpt", i, from ? from : "(nobody)");
    if (!json_is_string(value)) return LF_FAIL(LF_ERR_FORMAT, "turn %zu has no text in 'value'", i);
    *t = (turn_text){.is_human = from[0] == 'h', .text = json_string_value(value), .n = json_string_length(value)};
    t->has_image = t->is_human && t->n >= sizeof image - 1 && memcmp(t->text, image, sizeof image - 1) == 0;
    if (t->has_image) {
        size_t skip = sizeof image - 1;
        if (t->n > skip && t->text[skip] == '\n') skip++;
        t->text += skip;
        t->n -= skip;
    }
    return LF_OK;
}

/* Marker, image marker, text; the end marker closes an answer. Trained on: an answer and its end marker. */
static lf_status put_turn(const json_t *turn, const json_t *tokens, size_t i, const lf__vocabulary *v, lf__tokens *out)
{
    turn_text t = {0};
    lf_status rc = read_turn(turn, i, &t);
    if (rc < 0) return rc;
    put(out, t.is_human ? v->human : v->gpt, false);
    if (t.has_image) put(out, v->image, false);
    if (v->is_bytes) {
        for (size_t k = 0; k < t.n; k++) put(out, (uint8_t)t.text[k], !t.is_human);
    } else {
        rc = put_ids(json_array_get(tokens, i), i, v, !t.is_human, out);
    }
    if (!t.is_human) put(out, v->eos, true);
    return rc;
}

static lf_status put_turns(const json_t *root, const lf__vocabulary *v, lf__tokens *out)
{
    const json_t *turns = json_object_get(root, "turns"), *tokens = json_object_get(root, "tokens");
    if (!turns) turns = json_object_get(root, "conversations");
    size_t n = json_array_size(turns);
    if (!json_is_object(root) || !json_is_array(turns))
        return LF_FAIL(LF_ERR_FORMAT, "text record has no list 'turns' or 'conversations'");
    if (n < 1 || n > LF__MOST_TURNS)
        return LF_FAIL(LF_ERR_FORMAT, "text record has %zu turns, expected 1 to %d", n, LF__MOST_TURNS);
    if (v->is_bytes && tokens)
        return LF_FAIL(LF_ERR_FORMAT, "text record has 'tokens', but the set's texts are tokenised by bytes");
    if (!v->is_bytes && (!json_is_array(tokens) || json_array_size(tokens) != n))
        return LF_FAIL(LF_ERR_FORMAT, "text record has %zu lists of 'tokens', expected one for each of %zu turns",
                       json_array_size(tokens), n);
    for (size_t i = 0; i < n; i++) {
        lf_status rc = put_turn(json_array_get(turns, i), tokens, i, v, out);
        if (rc < 0) return rc;
    }
    return LF_OK;
}

lf_status lf__record_tokens(const void *json, size_t n_bytes, const lf__vocabulary *v, lf__tokens *out)
{
    out->n = 0;
    out->cut = false;
    put(out, v->bos, false);
    if (!json) return LF_OK;
    json_error_t error;
    json_t *root = json_loadb(json, n_bytes, JSON_REJECT_DUPLICATES, &error);
    if (!root) {
        bool no_memory = json_error_code(&error) == json_error_out_of_memory;
        return LF_FAIL(no_memory ? LF_ERR_NOMEM : LF_ERR_FORMAT, "text record is no JSON: %s at byte %d", error.text,
                       error.position);
    }
    lf_status rc = put_turns(root, v, out);
    json_decref(root);
    return rc;
}
