# SPDX-License-Identifier: Apache-2.0
"""CheckpointVault: a base, diffs, and always a good checkpoint on disk."""

from __future__ import annotations

import json
import os
import shutil
import warnings

import torch
from torch import nn

from . import _C, peers
from .mapping import ParameterMap, current, map_of
from .optim import AdamW
from .streams import stream_of

_BASE = "base_model.bin"
_STEPS = "loongforge.optimizer"  # blob: step count of each parameter


class CheckpointVault:
    """Checkpoints of a model on the map (docs/format/vault.md).

    save_dir: the vault's folder. base_model_path: a base file outside it: when it exists and the vault is empty, its weights are
    loaded as the start; when it does not, the first base is copied there. model: its map (default: the current one).
    optimizer: default the AdamW over the map. Only `loongforge.AdamW` keeps its moments on the map; with another one weights
    alone are saved, and a warning says so. Other options of section [vault] by name.

    Under torch.distributed every rank makes one and calls it alike: rank 0 writes; `restore` and `blob` bring rank 0's to all.
    """

    def __init__(
        self,
        save_dir,
        base_model_path=None,
        diff_interval: int = 50,
        *,
        model: nn.Module | None = None,
        optimizer=None,
        group=None,
        **options,
    ):
        self.map = self._find_map(model, optimizer)
        self.optimizer = optimizer if optimizer is not None else self.map.optimizer
        if not isinstance(self.optimizer, AdamW):
            name = type(optimizer).__name__ if optimizer is not None else "no optimizer"
            warnings.warn(f"{name}: checkpoints hold weights, no optimizer state; hint: loongforge.AdamW", stacklevel=2)
            self.optimizer = None
        self.group = group
        self.world = peers.world_of(group)
        self.writes = self.world == 1 or peers.of(group).rank == 0
        self.save_dir, self.base_model_path = os.fspath(save_dir), base_model_path and os.fspath(base_model_path)
        self.options = _C.options_check("vault", dict(options, diff_interval=diff_interval))
        self.handle = None
        if self._from_writer(self._prepare, "opening the vault"):
            self.restore()
        self.map.on_replan(self._reopen, guard=self._refuse_replan)

    @staticmethod
    def _find_map(model, optimizer) -> ParameterMap:
        if model is None:
            return current()
        return map_of(model) or ParameterMap(model, optimizer_state=optimizer is None or isinstance(optimizer, AdamW))

    def _base(self) -> str:
        return os.path.join(self.save_dir, _BASE)

    def _prepare(self) -> bool:
        """Make and open the folder; take a base file from outside into an empty one. -> was one taken?"""
        os.makedirs(self.save_dir, exist_ok=True)
        adopt = self.base_model_path and os.path.exists(self.base_model_path) and not os.path.exists(self._base())
        if adopt:
            _copy(self.base_model_path, self._base())
        self._open()
        return bool(adopt)

    def _open(self) -> None:
        self.handle = _C.vault_open(self.save_dir, self.map.handle, self.options)

    def _refuse_replan(self) -> None:
        """Checkpoints are laid out as the map is: another layout would not go on with them."""
        self.wait()
        if self.steps():
            raise RuntimeError(
                f"{self.save_dir} has checkpoints of the map as it is, so it cannot be planned anew; hint: set pool sizes before "
                "the first save, or open another folder"
            )

    def _reopen(self) -> None:
        if self.writes:
            self.handle.close()
            self._open()

    def _from_writer(self, work, what: str):
        """work() on rank 0, its result on every rank."""
        return work() if self.world == 1 else peers.of(self.group).from_first(work, what)

    def due(self, step: int) -> bool:
        """True when diff_interval asks for a save after this step."""
        return step > 0 and step % self.options["diff_interval"] == 0

    def save(self, step: int, state: dict | None = None) -> bool:
        """Snapshot now, write in the background. state: JSON-able values by name that travel along (loader, scheduler, counters).

        -> False when the disk does not keep up: nothing was taken, the next due step tries again. An error of an earlier save is
        raised here. Ranks other than 0 do nothing, but give their shares of a sharded optimizer (`shard_optimizer`).
        """
        if self.map.sync is not None:
            self.map.sync.gather_state()
        self.map.require_whole("a checkpoint")
        if not self.writes:
            return True
        self.map.take_edits()
        blobs = {name: json.dumps(value).encode() for name, value in (state or {}).items()}
        blobs[_STEPS] = json.dumps(self._optimizer_steps()).encode()
        return _C.vault_save(self.handle, step, blobs, stream_of(self.map.torch_device)) == "saved"

    def _optimizer_steps(self) -> dict:
        if self.optimizer is None:
            return {}
        return {b.name: float(self.optimizer.state[b.param]["step"]) for b in self.map.blocks if b.param in self.optimizer.state}

    def wait(self) -> None:
        """Until every save is on disk or has failed; a failure is raised."""
        if not self.writes:
            return
        _C.vault_wait(self.handle)
        if self.base_model_path and not os.path.exists(self.base_model_path) and os.path.exists(self._base()):
            os.makedirs(os.path.dirname(self.base_model_path) or ".", exist_ok=True)
            _copy(self._base(), self.base_model_path)

    def steps(self, settled: bool = False) -> list:
        """Steps of the committed checkpoints, ascending, on every rank. settled: once every save is on disk or has failed."""

        def look():
            if settled:
                self.wait()
            return [c["step"] for c in _C.vault_list(self.save_dir)]

        return self._from_writer(look, "saves under way" if settled else "which checkpoints there are")

    def restore(self, step: int = -1) -> dict:
        """Load the newest checkpoint that verifies, at most `step`. -> {"step", "path", …}; `blob(name)` has its state"""
        info = self._from_writer(lambda: _C.vault_restore(self.handle, step), "restoring a checkpoint")
        if self.world > 1:
            self.map.broadcast(self.group)
        self.map.stale = False
        self.map.weights_written(self.map.blocks)
        steps = self.blob(_STEPS) or {}
        if self.optimizer is not None:
            for b in self.map.blocks:
                if b.name in steps:
                    self.optimizer.state[b.param]["step"] = torch.tensor(steps[b.name], dtype=torch.float32)
            self.optimizer.rebind()
        return info

    def blob(self, name: str):
        """A state value of the restored checkpoint; None when it has none of that name."""
        return self._from_writer(lambda: self._read_blob(name), "the state of a checkpoint")

    def _read_blob(self, name: str):
        try:
            return json.loads(_C.vault_blob(self.handle, name))
        except _C.Error as error:
            if error.args[1] == "ERR_NOTFOUND":
                return None
            raise

    def merge_final_checkpoint(self, path, step: int = -1) -> None:
        """Base and diffs up to `step` (-1: newest) in one file, which opens as a base. Waits for saves in flight first."""
        self.wait()
        if self.writes:
            _C.vault_merge(self.save_dir, step, os.fspath(path))

    def stats(self) -> dict | None:
        """Counts, bytes and seconds; None on ranks that do not write."""
        return _C.vault_stats(self.handle) if self.writes else None

    def close(self) -> None:
        """Wait for the writer and give the folder free; an error of a save in flight is raised, never swallowed."""
        self.map.off_replan(self._reopen, guard=self._refuse_replan)
        try:
            self.wait()
        finally:
            if self.handle is not None:
                self.handle.close()

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        if kind is None:
            self.close()
        elif self.handle is not None:
            self.handle.close()


def _copy(source: str, target: str) -> None:
    """The target appears whole or not at all."""
    shutil.copyfile(source, target + ".tmp")
    os.replace(target + ".tmp", target)
