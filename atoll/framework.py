"""What the hooks into other people's trainers have in common: steps that were none, and the end."""

from __future__ import annotations

from typing import Any

import torch

from node.attach import Island
from node.parameters import Models, trained_parameters


class SkipWatch:
    """Tells steps that a gradient scaler skipped by its scale, which falls then and never else.

    Whether `optimizer.step` was called tells nothing: a fused optimizer skips inside its kernel. Reading the
    scale waits for the device, once per step and only where there is a scaler.
    """

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler
        self._scale = self._read()

    def _read(self) -> float:
        return float(self._scaler.get_scale()) if self._scaler is not None else 1.0

    def skipped(self) -> bool:
        """Whether the step since the last call, or since the beginning, was skipped."""
        before, self._scale = self._scale, self._read()
        return self._scale < before


@torch.no_grad()
def leave_anchor(island: Island, model: Models) -> None:
    """Ends this trainer's part: the parameters become the run's anchor, for good.

    They may lie apart from it: a trainer that was late keeps the work it has not handed over.
    """
    if not island.attached:
        return
    with island.anchor():
        anchor = {name: p.detach().clone() for name, p in trained_parameters(model).items()}
    for name, parameter in trained_parameters(model).items():
        parameter.copy_(anchor[name])
    island.close()
