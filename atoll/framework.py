"""What the hooks into other people's trainers have in common: telling steps from skipped ones."""

from __future__ import annotations

from typing import Any


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
