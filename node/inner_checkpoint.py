"""The island's own memory of its inner training: optimizer state and each rank's random state.

The parameters need none: a trainer that starts takes the anchor, and the chain says how many steps it has
done. Written by distributed checkpointing as safetensors, so a checkpoint is read on any mesh, larger or
smaller, and holds nothing that could run code.

    FOLDER/step-00000120/...     complete: it was renamed when every rank had written
    FOLDER/writing/              in the making, or left by a crash

Invariants: called on all ranks alike; what is there under its final name is complete; the last `KEPT` stay.
A checkpoint that cannot be used costs the moments, never the run.
"""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Collection, Container, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

log = structlog.get_logger()

KEPT = 2
_NAME = re.compile(r"step-\d{8,}")


# CheckpointException is what all ranks get when any of them fails.
_FAULTS = (OSError, ValueError, RuntimeError, SafetensorError, CheckpointException)


def _one_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[-1][:300]


def _steps_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def _missing(wanted: Collection[str], there: Container[str]) -> list[str]:
    """Keys KIND.PARAMETER that are not there. A parameter of which nothing is there had no gradient yet and
    lacks nothing, unless that is so of all."""
    known = {key.partition(".")[2] for key in wanted if key in there}
    lacking = [key for key in wanted if key not in there]
    return sorted(key for key in lacking if not known or key.partition(".")[2] in known)


class InnerCheckpoint:
    """Of one rank's `model` and its `optimizers`; `folder` is one that all ranks see."""

    def __init__(
        self, folder: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        self._folder, self._model, self._optimizers = folder, model, tuple(optimizers)
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self._rank = dist.get_rank() if several else 0
        self._group: Any = dist.new_group(backend="gloo") if several else None

    def save(self, steps: int) -> None:
        """Keeps the state after `steps` inner steps of this island; one that fails is logged and left."""
        writing = self._folder / "writing"
        for stage in (self._prepare, self._write):
            fault = stage(writing)
            if not self._agreed(fault is None):
                log.warning("inner_checkpoint_failed", steps=steps, reason=fault or "elsewhere")
                return
        if self._rank == 0:
            self._keep(writing, steps)

    def _prepare(self, writing: Path) -> str | None:
        """Returns what is wrong, as `_write` does."""
        if self._rank:
            return None
        try:
            shutil.rmtree(writing, ignore_errors=True)
            writing.mkdir(parents=True)
        except OSError as error:
            return _one_line(error)
        return None

    def _write(self, writing: Path) -> str | None:
        values, _ = self._state()
        values[f"random.{self._rank}"] = torch.get_rng_state()
        try:
            writer = HuggingFaceStorageWriter(str(writing), save_distributed=True)
            with self._alone_or_together() as how:
                save_distributed(values, storage_writer=writer, **how)
        except _FAULTS as error:
            return _one_line(error)
        return None

    def _keep(self, writing: Path, steps: int) -> None:
        final = self._folder / f"step-{steps:08d}"
        shutil.rmtree(final, ignore_errors=True)
        for later in self._complete():  # of a life whose steps were not all counted
            if _steps_of(later) > steps:
                shutil.rmtree(later, ignore_errors=True)
        try:
            writing.rename(final)
        except OSError as error:
            log.warning("inner_checkpoint_failed", steps=steps, reason=_one_line(error))
        for old in self._complete()[KEPT:]:
            shutil.rmtree(old, ignore_errors=True)

    def load(self) -> int | None:
        """Takes up the newest state that can be used; returns its steps, or None."""
        self._meet()  # nobody looks while rank 0 of an earlier save may still rename
        for folder in self._complete():
            fault = self._try(folder)
            if self._agreed(fault is None):
                steps = _steps_of(folder)
                log.info("inner_checkpoint_taken_up", steps=steps)
                return steps
            log.warning(
                "inner_checkpoint_unusable", folder=str(folder), reason=fault or "elsewhere"
            )
            for optimizer in self._optimizers:
                optimizer.state.clear()
        return None

    def _try(self, folder: Path) -> str | None:
        """Reads into fresh tensors first; takes them up only if all is there. Returns what is wrong."""
        values, state = self._state()
        reader = HuggingFaceStorageReader(str(folder))
        try:
            there = reader.read_metadata().state_dict_metadata
            if missing := _missing(values, there):
                return f"it lacks {missing[0]}"
            values = {key: value for key, value in values.items() if key in there}
            random = f"random.{self._rank}"
            if random in there:
                values[random] = torch.get_rng_state()
            with self._alone_or_together() as how:
                load_distributed(values, storage_reader=reader, **how)
        except _FAULTS as error:
            return _one_line(error)
        set_optimizer_state_dict(self._model, self._optimizers, state)
        if random in values:
            torch.set_rng_state(values[random])
        return None

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(its tensors by name, the optimizer state dict that holds the same tensors)."""
        state: dict[str, Any] = {**get_optimizer_state_dict(self._model, self._optimizers)}
        return {
            f"{key}.{parameter}": value
            for parameter, values in state["state"].items()
            for key, value in values.items()
            if isinstance(value, Tensor)
        }, state

    @contextmanager
    def _alone_or_together(self) -> Iterator[dict[str, Any]]:
        """One rank alone needs no process group: the library warns of it, and of nothing else."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            yield {"process_group": self._group, "no_dist": self._group is None}

    def _complete(self) -> list[Path]:
        """Newest first."""
        if not self._folder.is_dir():
            return []
        return sorted(
            (path for path in self._folder.iterdir() if _NAME.fullmatch(path.name)),
            key=_steps_of,
            reverse=True,
        )

    def _meet(self) -> None:
        if self._group is not None:
            dist.barrier(group=self._group)

    def _agreed(self, mine: bool) -> bool:
        """Whether all ranks say yes."""
        yes = torch.tensor([int(mine)])
        if self._group is not None:
            dist.all_reduce(yes, dist.ReduceOp.MIN, group=self._group)
        return bool(yes.item())
