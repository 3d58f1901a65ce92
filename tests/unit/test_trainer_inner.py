from __future__ import annotations

import pytest
import torch
from torch import nn

from node.inner import build_optimizers, lr_at
from node.inner_step import InnerStep
from node.model import build_model
from node.muon import Muon
from node.parallel import Part
from protocol.spec import GptModel, Inner

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
    [optimizer] = build_optimizers(model, Inner(weight_decay=0.2))
    decayed, kept = optimizer.param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.2, 0.0)
    assert [p.dim() for p in decayed["params"]] == [2]
    assert len(kept["params"]) == 3


def plain(clip: float) -> tuple[nn.Linear, InnerStep]:
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    inner = Inner(optimizer="sgd", momentum=0.0, weight_decay=0.0)
    part = Part(model, None, "fp32")
    return model, InnerStep(part, build_optimizers(model, inner), clip, None, torch.device("cpu"))


@pytest.mark.parametrize(("clip", "moved"), [(0.0, [-3.0, -4.0]), (1.0, [-0.6, -0.8])])
def test_clip_bounds_the_gradients_norm_and_zero_is_off(clip: float, moved: list[float]) -> None:
    model, inner_step = plain(clip)
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    assert inner_step.apply(1.0)
    assert inner_step.norm == pytest.approx(5.0)
    assert model.weight.flatten().tolist() == pytest.approx(moved)
    assert model.weight.grad is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    model, inner_step = plain(1.0)
    model.weight.grad = torch.tensor([[1.0, bad]])
    assert not inner_step.apply(1.0)
    assert model.weight.flatten().tolist() == [0.0, 0.0]
    assert model.weight.grad is None


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_one_rank_computes_the_bits_of_a_plain_loop(clip: float) -> None:
    shape, inner = GptModel(width=16, depth=1, heads=2, context=8), Inner(clip=clip)
    tokens = torch.randint(256, (5, 4, 9), generator=torch.Generator().manual_seed(0))
    ours, plain = build_model(shape, 0), build_model(shape, 0)
    step = InnerStep(
        Part(ours, None, "fp32"), build_optimizers(ours, inner), clip, None, torch.device("cpu")
    )
    [optimizer] = build_optimizers(plain, inner)
    for batch in tokens:
        loss = step.gradients(batch[:, :-1], batch[:, 1:])
        assert step.apply(inner.lr)
        logits = plain(batch[:, :-1])
        expected = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        expected.backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), clip or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        assert loss is not None
        assert torch.equal(loss, expected.detach())
        assert step.norm == norm.item()
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)


def test_microbatches_add_up_to_the_gradient_of_the_batch() -> None:
    shape = GptModel(width=16, depth=1, heads=2, context=8)
    tokens = torch.randint(256, (6, 9), generator=torch.Generator().manual_seed(0))
    found = []
    for microbatch in (None, 2, 4):
        model = build_model(shape, 0)
        optimizers = build_optimizers(model, Inner())
        step = InnerStep(
            Part(model, None, "fp32"), optimizers, 0.0, microbatch, torch.device("cpu")
        )
        loss = step.gradients(tokens[:, :-1], tokens[:, 1:])
        assert loss is not None
        found.append((loss, [p.grad for p in model.parameters()]))
    for loss, gradients in found[1:]:
        torch.testing.assert_close(loss, found[0][0])
        for a, b in zip(gradients, found[0][1], strict=True):
            torch.testing.assert_close(a, b)


def test_muon_on_whole_matrices_is_torchs() -> None:
    torch.manual_seed(0)
    ours, theirs = nn.Linear(6, 4, bias=False), nn.Linear(6, 4, bias=False)
    theirs.load_state_dict(ours.state_dict())
    muon = Muon([ours.weight], 0.1, 0.9, 0.01)
    reference = torch.optim.Muon(
        [theirs.weight], lr=0.1, momentum=0.9, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
    )
    for _ in range(5):
        x = torch.randn(3, 6)
        for model, optimizer in ((ours, muon), (theirs, reference)):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(ours.weight, theirs.weight, atol=5e-3, rtol=0)  # theirs is in bf16


def test_muon_leaves_embedding_head_and_vectors_to_adamw() -> None:
    model = build_model(GptModel(width=16, depth=1, heads=2, context=8), 0)
    muon, adamw = build_optimizers(model, Inner(optimizer="muon"))
    names = {id(p): name for name, p in model.named_parameters()}
    moved = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    assert moved == {n for n in names.values() if n.startswith("blocks") and "norm" not in n}
    assert {names[id(p)] for group in adamw.param_groups for p in group["params"]} == set(
        names.values()
    ) - moved
