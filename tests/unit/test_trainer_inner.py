from __future__ import annotations

import pytest
import torch
from torch import nn

from node.inner import build_optimizer, lr_at, take_step
from protocol.spec import Inner

torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("progress_tokens", "lr"),
    [(0, 0.1), (50, 0.55), (100, 1.0), (600, 0.55), (1_100, 0.1), (9_999, 0.1)],
)
def test_lr_rises_linearly_and_falls_as_half_a_cosine(progress_tokens: int, lr: float) -> None:
    inner = Inner(lr=1.0, warmup_tokens=100, min_lr_ratio=0.1)
    assert lr_at(progress_tokens, inner, 1_100) == pytest.approx(lr)


def test_without_warm_up_it_starts_at_the_top() -> None:
    assert lr_at(0, Inner(lr=0.5), 1_000) == 0.5


def test_only_matrices_decay() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    decayed, kept = build_optimizer(model, Inner(weight_decay=0.2)).param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.2, 0.0)
    assert [p.dim() for p in decayed["params"]] == [2]
    assert len(kept["params"]) == 3


def plain() -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    inner = Inner(optimizer="sgd", momentum=0.0, weight_decay=0.0)
    return model, build_optimizer(model, inner)


@pytest.mark.parametrize(("clip", "moved"), [(0.0, [-3.0, -4.0]), (1.0, [-0.6, -0.8])])
def test_clip_bounds_the_gradients_norm_and_zero_is_off(clip: float, moved: list[float]) -> None:
    model, optimizer = plain()
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    assert take_step(model.parameters(), optimizer, 1.0, clip)
    assert model.weight.flatten().tolist() == pytest.approx(moved)
    assert model.weight.grad is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    model, optimizer = plain()
    model.weight.grad = torch.tensor([[1.0, bad]])
    assert not take_step(model.parameters(), optimizer, 1.0, 1.0)
    assert model.weight.flatten().tolist() == [0.0, 0.0]
    assert model.weight.grad is None
