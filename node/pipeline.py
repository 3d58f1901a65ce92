"""Pipeline parallelism: one forward, one backward (1F1B), by PyTorch's own schedule.

A microbatch walks through the stages; only the last stage has targets and losses. Evaluation walks the stages
forward only, one batch at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from node.mesh import microbatches
from node.parallel import Part
from node.shards import local_of

Loss = Callable[[Tensor, Tensor], Tensor]


class Pipeline:
    """This rank's stage."""

    def __init__(self, part: Part, loss: Loss, device: torch.device) -> None:
        assert part.mesh is not None
        axis = part.mesh["pipeline"]
        self._part, self._loss, self._device = part, loss, device
        self._group: Any = axis.get_group()
        self._stages, self._stage = axis.size(), axis.get_local_rank()
        self._schedules: dict[int, Schedule1F1B] = {}

    @property
    def _first(self) -> bool:
        return self._stage == 0

    @property
    def _last(self) -> bool:
        return self._stage == self._stages - 1

    def gradients(self, inputs: Tensor, targets: Tensor, microbatch: int | None) -> Tensor | None:
        """Adds this batch's mean gradient to the stage's; returns the mean loss, on the last stage.

        Raises ConfigError as `microbatches` does.
        """
        samples = len(inputs)
        count = microbatches(samples, microbatch, self._stages)
        losses: list[Tensor] = []
        self._schedule(samples, count).step(
            *((inputs,) if self._first else ()),
            target=targets if self._last else None,
            losses=losses if self._last else None,
            return_outputs=False,
        )
        return torch.stack([local_of(loss.detach()) for loss in losses]).mean() if losses else None

    def _schedule(self, samples: int, count: int) -> Schedule1F1B:
        """One per batch size, as stages fix the shapes they exchange; a ramp has a few."""
        if samples not in self._schedules:
            stage = PipelineStage(
                self._part.module, self._stage, self._stages, self._device, group=self._group
            )
            self._schedules[samples] = Schedule1F1B(stage, count, loss_fn=self._loss)
        return self._schedules[samples]

    @torch.no_grad()
    def logits(self, inputs: Tensor, hidden: Tensor) -> Tensor | None:
        """Walks one batch through; the last stage has the logits. `hidden` gives shape and dtype between."""
        x = inputs
        if not self._first:
            x = torch.empty_like(hidden)
            dist.recv(x, group=self._group, group_src=self._stage - 1)
        y: Tensor = self._part.module(x)
        if self._last:
            return y
        dist.send(y.contiguous(), group=self._group, group_dst=self._stage + 1)
        return None
