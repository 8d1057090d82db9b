# SPDX-License-Identifier: Apache-2.0
"""CheckpointVault: a base, diffs, and always a good checkpoint on disk."""

from __future__ import annotations

import json
import os
import shutil

import torch
from torch import nn

from . import _C
from .mapping import ParameterMap, current, map_of
from .streams import stream_of

_BASE = "base_model.bin"


class CheckpointVault:
    """Checkpoints of a model on the map (docs/format/vault.md).

    save_dir: the vault's folder. base_model_path: a base file outside it: when it exists and the vault is empty, its weights are
    loaded as the start; when it does not, the first base is copied there. model: its map (default: the current one).
    optimizer: its step counts travel with each checkpoint. Other options of section [vault] by name.
    """

    def __init__(
        self,
        save_dir,
        base_model_path=None,
        diff_interval: int = 50,
        *,
        model: nn.Module | None = None,
        optimizer=None,
        **options,
    ):
        held = map_of(model) if model is not None else current()
        if held is None:
            held = ParameterMap(model)
        self.map, self.optimizer = held, optimizer
        self.save_dir, self.base_model_path = os.fspath(save_dir), base_model_path and os.fspath(base_model_path)
        self.options = dict(options, diff_interval=diff_interval)
        os.makedirs(self.save_dir, exist_ok=True)
        adopt = self.base_model_path and os.path.exists(self.base_model_path) and not os.path.exists(self._base())
        if adopt:
            shutil.copyfile(self.base_model_path, self._base() + ".tmp")
            os.replace(self._base() + ".tmp", self._base())
        self._open()
        if adopt:
            self.restore()
        held.on_replan(self._reopen)

    def _base(self) -> str:
        return os.path.join(self.save_dir, _BASE)

    def _open(self) -> None:
        self.handle = _C.vault_open(self.save_dir, self.map.handle, self.options)

    def _reopen(self) -> None:
        self.handle.close()
        self._open()

    def due(self, step: int) -> bool:
        """True when diff_interval asks for a save after this step."""
        return bool(_C.vault_due(self.handle, step))

    def save(self, step: int, state: dict | None = None) -> bool:
        """Snapshot now, write in the background. state: JSON-able values by name that travel along (loader, scheduler, counters).

        -> False when the disk does not keep up: nothing was taken, the next due step tries again. An error of an earlier save is
        raised here.
        """
        self.map.take_edits()
        blobs = {name: json.dumps(value).encode() for name, value in (state or {}).items()}
        blobs["loongforge.optimizer"] = json.dumps(self._optimizer_state()).encode()
        return _C.vault_save(self.handle, step, blobs, stream_of(self.map.torch_device)) == "saved"

    def _optimizer_state(self) -> dict:
        """Step count of each parameter by name; moments are on the map."""
        if self.optimizer is None:
            return {}
        return {b.name: float(self.optimizer.state[b.param]["step"]) for b in self.map.blocks if b.param in self.optimizer.state}

    def wait(self) -> None:
        """Until every save is on disk or has failed; a failure is raised."""
        _C.vault_wait(self.handle)
        if self.base_model_path and not os.path.exists(self.base_model_path) and os.path.exists(self._base()):
            os.makedirs(os.path.dirname(self.base_model_path) or ".", exist_ok=True)
            shutil.copyfile(self._base(), self.base_model_path + ".tmp")
            os.replace(self.base_model_path + ".tmp", self.base_model_path)

    def restore(self, step: int = -1) -> dict:
        """Load the newest checkpoint that verifies, at most `step`. -> {"step", "path", …}; `blob(name)` has its state"""
        info = _C.vault_restore(self.handle, step)
        self.map.weights_written(self.map.blocks)
        steps = self.blob("loongforge.optimizer") or {}
        if self.optimizer is not None:
            for b in self.map.blocks:
                if b.name in steps:
                    self.optimizer.state[b.param]["step"] = torch.tensor(steps[b.name], dtype=torch.float32)
        return info

    def blob(self, name: str):
        """A state value of the restored checkpoint; None when it has none of that name."""
        try:
            return json.loads(_C.vault_blob(self.handle, name))
        except _C.Error as error:
            if error.args[1] == "ERR_NOTFOUND":
                return None
            raise

    def merge_final_checkpoint(self, path, step: int = -1) -> None:
        """Base and diffs up to `step` (-1: newest) in one file, which opens as a base. Waits for saves in flight first."""
        self.wait()
        _C.vault_merge(self.save_dir, step, os.fspath(path))

    def stats(self) -> dict:
        return _C.vault_stats(self.handle)

    def close(self) -> None:
        """Wait for the writer and give the folder free; an error of a save in flight is raised, never swallowed."""
        self.wait()
        self.handle.close()

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        if kind is None:
            self.close()
        else:
            self.handle.close()
