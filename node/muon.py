"""Muon for matrices of which a rank may hold a slice: momentum, made orthogonal, added to the weights.

The orthogonalisation needs the whole matrix, so each rank gathers it, computes the same answer and keeps its
own box of it; momentum stays sharded as the parameter is. On whole matrices the steps are those of
torch.optim.Muon with `adjust_lr_fn="match_rms_adamw"`, which cannot take slices.

Shapes: matrices (rows, columns); the iteration works on the wide form, rows <= columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from node.shards import shard_of, view_of

COEFFICIENTS = (
    3.4445,
    -4.7750,
    2.0315,
)  # of the quintic Newton-Schulz iteration (Jordan et al. 2024)
ITERATIONS = 5
EPSILON = 1e-7
RMS_OF_ADAMW = 0.2


class Muon(torch.optim.Optimizer):
    """With Nesterov momentum and decoupled weight decay."""

    def __init__(
        self, matrices: Iterable[nn.Parameter], lr: float, momentum: float, weight_decay: float
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group)

    def _move(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        gradient, buffer = parameter.grad, state["momentum_buffer"]
        assert gradient is not None
        buffer.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(buffer, group["momentum"])
        direction = _orthogonal(_whole(update))
        shard = shard_of("", parameter)
        mine = view_of(direction.reshape(-1), shard.shape, shard.box)
        shard.local.mul_(1 - group["lr"] * group["weight_decay"])
        size = RMS_OF_ADAMW * math.sqrt(max(parameter.shape))
        shard.local.add_(mine, alpha=-group["lr"] * size)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _orthogonal(matrix: Tensor) -> Tensor:
    """About U V^T of the matrix's singular value decomposition: all singular values near 1.

    In bf16 where that is fast; what bf16 loses does not matter to the training.
    """
    a, b, c = COEFFICIENTS
    tall = matrix.size(0) > matrix.size(1)
    x = (matrix.T if tall else matrix).to(torch.bfloat16 if matrix.is_cuda else torch.float32)
    x = x / x.norm().clamp(min=EPSILON)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
