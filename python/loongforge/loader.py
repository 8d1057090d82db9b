# SPDX-License-Identifier: Apache-2.0
"""DataFusionLoader and LMDataset: LMDB records to model-ready batches."""

from __future__ import annotations

import json
import os
import warnings

import torch

from . import _C
from .streams import borrow, device_of, stream_of


class LMDataset:
    """An LMDB set of samples, keys `{sample_id}_{modality}` (docs/format/records.md), read in place.

    `dataset[i]` gives the i-th sample in key order: {"id", "image": bytes or None, "text": parsed JSON or None}.
    """

    def __init__(self, lmdb_path):
        self.path = os.fspath(lmdb_path)
        self.handle = _C.dataset_open(self.path)
        self.info = _C.dataset_info(self.handle)

    def __len__(self) -> int:
        return self.info["n_samples"]

    def __getitem__(self, i: int) -> dict:
        if not -len(self) <= i < len(self):
            raise IndexError(f"sample {i}, expected 0 to {len(self) - 1}")
        sample = _C.dataset_get(self.handle, i % len(self))
        sample["text"] = json.loads(sample["text"]) if sample["text"] is not None else None
        return sample


class Batch:
    """What one step trains on. Tensors are views of a slot that is reused after the next batch is asked for: copy to keep.

    images (B,3,S,S) f32; tokens, labels (B,T) i64; attention_mask (B,T) bool; index (B) i64;
    weight (B) f32, 0 on repeated samples.
    """

    def __init__(self, raw: dict, tensors: dict):
        self.__dict__.update(tensors)
        self.raw = raw
        self.epoch, self.number, self.label_tokens = raw["epoch"], raw["number"], raw["label_tokens"]
        self.last_of_epoch = bool(raw["last_of_epoch"])

    def keys(self):
        return ("images", "tokens", "labels", "attention_mask")

    def __getitem__(self, name):
        return getattr(self, name)


class DataFusionLoader:
    """Batches of a set, decoded and assembled ahead of use in three overlapping stages.

    Iterating gives one epoch; the next iteration goes on with the next. `state_dict()` after a batch and `load_state_dict()`
    before the first one resume bit for bit at any depth, thread count and world size. num_workers and pin_memory are accepted as
    torch's DataLoader has them and do nothing here: threads of this process decode, and nothing is copied from pinned memory.
    Other options of section [loader] by name (`loongforge config loader`).
    """

    def __init__(
        self,
        dataset: LMDataset,
        batch_size: int,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch_pipeline_depth: int = 4,
        device="cpu",
        **options,
    ):
        if num_workers:
            warnings.warn(
                f"num_workers={num_workers} does nothing: threads of this process decode (option threads)", stacklevel=2
            )
        if pin_memory:
            warnings.warn("pin_memory=True does nothing: batches are made where they are used", stacklevel=2)
        self.dataset = dataset if isinstance(dataset, LMDataset) else LMDataset(dataset)
        self.device = torch.device(device)
        self._device = device_of(self.device)
        self.options = dict(options, batch_size=batch_size, depth=prefetch_pipeline_depth)
        self._held: dict | None = None
        self._started = False
        self._open()

    def _open(self) -> None:
        self.handle = _C.loader_open(self.dataset.handle, self._device, self.options)

    def __len__(self) -> int:
        return _C.loader_batches_per_epoch(self.handle)

    def next(self) -> Batch:
        """The next batch, over the ends of epochs; the one before is given back."""
        self._release()
        self._started = True
        raw = _C.loader_next(self.handle, stream_of(self.device))
        self._held = raw
        return Batch(raw, self._views(raw))

    def _views(self, raw: dict) -> dict:
        b, t, s = raw["n"], raw["seq"], raw["image_size"]
        view = lambda name, shape, dtype: borrow(self._device, raw[name], shape, dtype, self.handle)  # noqa: E731
        return {
            "images": view("images", (b, 3, s, s), torch.float32),
            "tokens": view("tokens", (b, t), torch.int64),
            "labels": view("labels", (b, t), torch.int64),
            "attention_mask": view("mask", (b, t), torch.uint8).bool(),
            "index": view("index", (b,), torch.int64),
            "weight": view("weight", (b,), torch.float32),
        }

    def _release(self) -> None:
        if self._held is not None:
            held, self._held = self._held, None
            _C.loader_release(self.handle, held, stream_of(self.device))

    def __iter__(self):
        while True:
            batch = self.next()
            last = batch.last_of_epoch
            yield batch
            if last:
                return

    def state_dict(self) -> dict:
        """After the batch delivered last; batches in flight are not counted."""
        return _C.loader_get_state(self.handle)

    def load_state_dict(self, state: dict) -> None:
        """Go on from a state. A loader that has delivered batches starts its pipeline anew."""
        if self._started:
            self._held = None
            self._open()  # the old pipeline goes when no tensor uses its memory any more
            self._started = False
        _C.loader_set_state(self.handle, state)

    def stats(self) -> dict:
        """Counts, busy seconds of each stage, latency from reading to ready (mean, deviation, p50, p95, p99), stall."""
        return _C.loader_stats(self.handle)

    def bad_samples(self) -> list:
        """ "key: reason" of samples that could not be used, newest last."""
        return [line for line in _C.loader_bad_samples(self.handle).splitlines() if line]

    def close(self) -> None:
        """Stop. Memory goes when no tensor uses it any more; a closed loader gives no more batches."""
        self._held = self.handle = None

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()
