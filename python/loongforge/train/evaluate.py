# SPDX-License-Identifier: Apache-2.0
"""Evaluation: held-out loss, the same with blanked images, and words that need the picture."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager

import torch

from ..loader import DataFusionLoader

NOT_EVALUATED = {"val_loss": None, "val_loss_blank_images": None, "attribute_accuracy": None, "attribute_chance": None}


class Evaluation:
    """Of a run's model on its held-out set. sync, ranks: the run's; all of them call `held_out` and `whole` together."""

    def __init__(self, model, dataset, options: dict, *, bf16: bool, sync, ranks):
        self.model, self.dataset, self.options = model, dataset, options
        self.bf16, self.sync, self.ranks = bf16, sync, ranks

    @contextmanager
    def _inference(self):
        """The trainer calls `train()` before each of its steps."""
        self.model.eval()
        device = next(self.model.parameters()).device
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=self.bf16):
            yield

    def held_out(self, blank: bool = False) -> float:
        with self._inference():
            return held_out_loss(
                self.model,
                self.dataset,
                self.options,
                blank=blank,
                reduce_stats=self.sync.reduce_stats,
                rank=self.ranks.rank,
                world=self.ranks.world,
            )

    def whole(self) -> dict:
        result = dict(NOT_EVALUATED, val_loss=self.held_out(), val_loss_blank_images=self.held_out(blank=True))
        if self.dataset.info["tokenizer"] == "bytes":
            words = self.ranks.from_first(self._attribute_words, "words that need the picture")
            result.update(
                attribute_accuracy=words["accuracy"],
                attribute_chance=words["chance"],
                attribute_words=words["words"],
                attribute_by_kind=words["by_kind"],
            )
        return result

    def _attribute_words(self) -> dict:
        """On rank 0 alone."""
        shared, self.model.reduce_stats = self.model.reduce_stats, lambda stats: stats
        try:
            with self._inference():
                return attribute_accuracy(self.model, self.dataset, self.options)
        finally:
            self.model.reduce_stats = shared


def held_out_loss(model, dataset, options: dict, *, blank: bool, reduce_stats, rank: int, world: int) -> float:
    """Cross-entropy a trained-on token over one pass of the set, shared over ranks."""
    total = torch.zeros(2, dtype=torch.float64)
    for batch in _pass(model, dataset, options, blank=blank, rank=rank, world=world):
        out = model(batch.images, batch.tokens, batch.labels, batch.attention_mask)
        total += torch.stack([out.loss_sum.double(), out.n_tokens.double()]).cpu()
    total = reduce_stats(total)
    return (total[0] / total[1].clamp(min=1)).item()


def _pass(model, dataset, options: dict, *, blank: bool, rank: int, world: int):
    """Batches of exactly one epoch; samples repeated to fill the last batch have no labels."""
    options = dict(options, shuffle=False, augment=False, drop_last=False, blank_images=blank, rank=rank, world=world)
    device = next(model.parameters()).device
    batch_size, depth = options.pop("batch_size"), options.pop("depth")
    with DataFusionLoader(dataset, batch_size, prefetch_pipeline_depth=depth, device=device, **options) as loader:
        yield from loader


def word_places(text: dict, tokens: list, marks: tuple) -> list:
    """Where a sample's attribute words lie among its tokens. -> [(kind, word, first, n)]

    text: the record; marks: ids of (human, gpt, eos). Each turn is a marker, its tokens, and EOS behind an answer
    (docs/format/records.md); words are given in bytes of a turn, so this holds for sets tokenised by bytes.
    """
    human, gpt, eos = marks
    turns = text.get("turns") or text.get("conversations") or []
    starts = [i + 1 for i, t in enumerate(tokens) if t in (human, gpt)]
    places = []
    for word in text.get("words", ()):
        turn, start, n = word["turn"], word["start"], word["bytes"]
        if turn < len(starts) and starts[turn] + start + n <= len(tokens):
            value = turns[turn]["value"].encode()[start : start + n].decode()
            places.append((word["kind"], value, starts[turn] + start, n))
    return places


def attribute_accuracy(model, dataset, options: dict, *, limit: int = 512) -> dict:
    """Share of colour and shape words whose every token is the most probable one after the true text before it.

    -> {"accuracy", "chance", "words", "by_kind": {kind: (accuracy, chance, words)}}; chance: always the commonest of its kind.
    """
    info, right, seen = dataset.info, Counter(), {}
    marks = (info["human_id"], info["gpt_id"], info["eos_id"])
    done = 0
    for batch in _pass(model, dataset, options, blank=False, rank=0, world=1):
        guess = model(batch.images, batch.tokens, batch.labels, batch.attention_mask, return_logits=True).logits.argmax(-1)
        hit = guess[:, :-1] == batch.tokens[:, 1:]
        for row in range(batch.tokens.shape[0]):
            if batch.weight[row] == 0:
                continue
            for kind, word, first, n in word_places(dataset[int(batch.index[row])]["text"], batch.tokens[row].tolist(), marks):
                seen.setdefault(kind, Counter())[word] += 1
                right[kind] += bool(hit[row, first - 1 : first - 1 + n].all())
        done += batch.tokens.shape[0]
        if done >= limit:
            break
    return _tally(seen, right)


def _tally(seen: dict, right: Counter) -> dict:
    """The headline counts colours and shapes; other kinds (size, texture, place, number) are told by kind."""
    by_kind = {k: (right[k] / c.total(), c.most_common(1)[0][1] / c.total(), c.total()) for k, c in seen.items()}
    told = [k for k in ("colour", "shape") if k in seen]
    words = sum(seen[k].total() for k in told)
    if not words:
        return {"accuracy": None, "chance": None, "words": 0, "by_kind": by_kind}
    commonest = sum(seen[k].most_common(1)[0][1] for k in told)
    return {
        "accuracy": sum(right[k] for k in told) / words,
        "chance": commonest / words,
        "words": words,
        "by_kind": by_kind,
    }
