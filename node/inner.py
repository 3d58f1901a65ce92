"""The inner optimizer: what one island does between boundaries.

The learning rate is a pure function of the run's tokens, so islands of any speed agree on it. Weight
decay acts on matrices only. "muon" moves the matrices inside the blocks by orthogonalised momentum (Jordan
et al. 2024) and everything else by AdamW; its steps are scaled to AdamW's size (Moonlight, section 2.2), so one
learning rate serves both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from node.muon import Muon
from protocol.spec import Inner

_NOT_MUON = ("embedding", "embed_tokens", "wte", "wpe", "head", "lm_head")


def build_optimizers(model: nn.Module, inner: Inner) -> list[torch.optim.Optimizer]:
    """One or two, of the parameters of `model` as they are now: shards, if it is sharded."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if inner.optimizer == "sgd":
        groups = _groups((p for _, p in trained), inner.weight_decay)
        return [torch.optim.SGD(groups, lr=inner.lr, momentum=inner.momentum, foreach=False)]
    if inner.optimizer == "adamw":
        return [_adamw((p for _, p in trained), inner)]
    matrices = [p for name, p in trained if _for_muon(name, p)]
    others = [p for name, p in trained if not _for_muon(name, p)]
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        optimizers.append(Muon(matrices, inner.lr, inner.momentum, inner.weight_decay))
    if others:
        optimizers.append(_adamw(others, inner))
    return optimizers


def _for_muon(name: str, parameter: nn.Parameter) -> bool:
    return parameter.dim() == 2 and not any(part in _NOT_MUON for part in name.split("."))


def _adamw(parameters: Iterable[nn.Parameter], inner: Inner) -> torch.optim.Optimizer:
    groups = _groups(parameters, inner.weight_decay)
    return torch.optim.AdamW(groups, lr=inner.lr, betas=(inner.beta1, inner.beta2), foreach=False)


def _groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, object]]:
    trained = list(parameters)
    return [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]


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
