"""One inner step of an island, whatever its mesh: gradients of a batch, then clip and optimizer.

A batch may be cut into microbatches whose gradients add up; FSDP2 then exchanges them with the last one. The
gradient's norm counts every element of the whole model once: each rank sums over the pieces that are its to
write at an edge, and the sums are added up. All ranks see the same norm, so all skip a step that is not finite.

One rank without a mesh computes the plain loop's bits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from node.crew import muster
from node.gpt import Gpt, cross_entropy
from node.host_group import HostGroup
from node.moe import MixtureOfExperts
from node.parallel import Part
from node.parameters import hold
from node.pipeline import Pipeline
from node.shards import local_of

_FORWARD, _BACKWARD, _OPTIMIZER = "forward", "backward", "optimizer"


class InnerStep:
    """`norm` is the last gradient's before the clip; `seconds` is where time goes, on the host's clock."""

    def __init__(
        self,
        part: Part,
        optimizers: Sequence[torch.optim.Optimizer],
        clip: float,
        microbatch: int | None,
        device: torch.device,
    ) -> None:
        self._part, self._optimizers = part, optimizers
        self._clip, self._microbatch = clip or math.inf, microbatch
        self._parameters = [p for p in part.module.parameters() if p.requires_grad]
        self._routed = [m for m in part.module.modules() if isinstance(m, MixtureOfExperts)]
        self._device = device
        self._pipeline = None
        if part.size("pipeline") > 1:
            self._pipeline = Pipeline(part, cross_entropy, device)
        self._counted = _counted_here(part, optimizers) if part.mesh is not None else []
        self.norm = 0.0
        self.seconds = {_FORWARD: 0.0, _BACKWARD: 0.0, _OPTIMIZER: 0.0}

    def gradients(self, inputs: Tensor, targets: Tensor, share: float = 1.0) -> Tensor | None:
        """Adds `share` times the gradients of one batch of this rank, (B, T) int64 each.

        Returns this rank's mean loss, detached; None where another pipeline stage has it.
        """
        with self._split_loss():
            if self._pipeline is not None:
                with self._timed(_FORWARD):
                    return self._pipeline.gradients(inputs, targets, self._microbatch)
            return self._accumulate(inputs, targets, share)

    def _accumulate(self, inputs: Tensor, targets: Tensor, share: float) -> Tensor:
        size = self._microbatch or len(inputs)
        pieces = list(zip(inputs.split(size), targets.split(size), strict=True))
        total: Tensor | None = None
        for number, (x, y) in enumerate(pieces):
            self._exchange_gradients(number == len(pieces) - 1)
            weight = len(x) / len(inputs)
            for layer in self._routed:
                layer.share = weight * share
            with self._timed(_FORWARD):
                loss = cross_entropy(logits_of(self._part.module(x)), y)
            with self._timed(_BACKWARD):
                (loss * (weight * share)).backward()
            mine = local_of(loss.detach()) * weight
            total = mine if total is None else total + mine
        assert total is not None
        return total

    def _exchange_gradients(self, now: bool) -> None:
        if isinstance(self._part.module, FSDPModule):
            self._part.module.set_requires_gradient_sync(now)

    def apply(self, lr: float) -> bool:
        """Clips and steps on the gradients at hand; False = not finite, nothing changed."""
        with self._timed(_OPTIMIZER):
            finite = self._clip_gradients()
            if finite:
                for optimizer in self._optimizers:
                    for group in optimizer.param_groups:
                        group["lr"] = lr
                    optimizer.step()
            for optimizer in self._optimizers:
                optimizer.zero_grad()
        return finite

    def _clip_gradients(self) -> bool:
        if self._part.mesh is None:
            self.norm = nn.utils.clip_grad_norm_(self._parameters, self._clip).item()
            return math.isfinite(self.norm)
        self._place_gradients()
        squares = torch.zeros((), dtype=torch.float32, device=self._device)
        for parameter in self._counted:
            if parameter.grad is not None:
                squares += local_of(parameter.grad).float().square().sum().to(self._device)
        if dist.get_world_size() > 1:
            dist.all_reduce(squares)
        self.norm = math.sqrt(squares.item())
        if not math.isfinite(self.norm):
            return False
        scale = self._clip / (self.norm + 1e-6)
        if scale < 1:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    local_of(parameter.grad).mul_(scale)
        return True

    def _place_gradients(self) -> None:
        """Under tensor parallelism alone a gradient may be a partial sum, or whole where its parameter is a
        slice: it is brought to where its parameter lies."""
        for parameter in self._parameters:
            gradient = parameter.grad
            if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
                continue
            if gradient.placements != parameter.placements:
                parameter.grad = gradient.redistribute(placements=parameter.placements)

    # --- evaluation ----------------------------------------------------------------------------

    @torch.no_grad()
    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Mean loss of a batch, without gradients; None where another pipeline stage has it."""
        with self._split_loss():
            if self._pipeline is None:
                logits = logits_of(self._part.module(inputs))
            else:
                walked = self._pipeline.logits(inputs, self._hidden(inputs))
                if walked is None:
                    return None
                logits = walked
            return local_of(cross_entropy(logits, targets))

    def _hidden(self, inputs: Tensor) -> Tensor:
        """As many tokens and as wide as what stages exchange for `inputs`."""
        module = self._part.module
        assert isinstance(module, Gpt)
        tokens = inputs.shape[1] // self._part.size("tensor")
        dtype = torch.bfloat16 if self._computes_in_bf16 else torch.float32
        return torch.empty(
            len(inputs), tokens, module.shape.width, dtype=dtype, device=self._device
        )

    @property
    def _computes_in_bf16(self) -> bool:
        return isinstance(self._part.module, FSDPModule) and self._part.compute == "bf16"

    def _split_loss(self) -> Any:
        """Under tensor parallelism logits are split by vocabulary, and so is the loss."""
        splits = self._part.size("tensor") > 1 and isinstance(self._part.module, Gpt)
        return loss_parallel() if splits else nullcontext()

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        began_s = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - began_s


def logits_of(output: Any) -> Tensor:
    """Of a model's output: the recipes return logits, transformers an object that holds them."""
    return output if isinstance(output, Tensor) else output.logits


def _counted_here(part: Part, optimizers: Sequence[torch.optim.Optimizer]) -> list[nn.Parameter]:
    """Parameters whose piece this rank counts in the norm: those it would write at an edge."""
    host = HostGroup()
    held = hold(part.module, optimizers)
    mine = muster(held.pieces, True, host).writes[host.rank]
    parameters = [p for p in part.module.parameters() if p.requires_grad]
    return [p for p, piece in zip(parameters, held.pieces, strict=True) if piece.name in mine]
