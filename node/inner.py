"""The inner optimizer: what one island does between boundaries.

The learning rate is a pure function of the run's tokens, so islands of any speed agree on it. Weight
decay acts on matrices only. A step whose gradient is not finite leaves the parameters alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from protocol.spec import Inner


def build_optimizer(model: nn.Module, inner: Inner) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": inner.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    if inner.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=inner.lr, momentum=inner.momentum, foreach=False)
    return torch.optim.AdamW(groups, lr=inner.lr, betas=(inner.beta1, inner.beta2), foreach=False)


def lr_at(progress_tokens: int, inner: Inner, target_tokens: int) -> float:
    """Linear rise over `warmup_tokens`, then half a cosine down to the end of the run.

    Both start from and end at `min_lr_ratio`; past `target_tokens` it stays there.
    """
    if progress_tokens < inner.warmup_tokens:
        height = progress_tokens / inner.warmup_tokens
    else:
        done = (progress_tokens - inner.warmup_tokens) / (target_tokens - inner.warmup_tokens)
        height = 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    return inner.lr * (inner.min_lr_ratio + (1 - inner.min_lr_ratio) * height)


def take_step(
    parameters: Iterable[Tensor], optimizer: torch.optim.Optimizer, lr: float, clip: float
) -> bool:
    """Clips (0 = off) and steps on the gradients at hand; False = not finite, nothing changed."""
    norm = nn.utils.clip_grad_norm_(parameters, clip or math.inf)
    finite = math.isfinite(norm.item())
    if finite:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    optimizer.zero_grad()
    return finite
