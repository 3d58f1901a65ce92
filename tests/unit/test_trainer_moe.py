"""The mixture of experts on one rank; its meshes are tested in system/test_parallel_parity.py."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional

from node.gpt import cross_entropy
from node.inner import build_optimizers
from node.inner_step import InnerStep
from node.model import build_model
from node.moe import MixtureOfExperts
from node.parallel import Part
from protocol.spec import Inner, MoeModel

torch.set_num_threads(1)

SHAPE = MoeModel(
    width=8,
    depth=1,
    heads=2,
    context=8,
    experts=4,
    experts_per_token=2,
    expert_width=8,
    balance=0.5,
)


def layer() -> MixtureOfExperts:
    torch.manual_seed(0)
    made = MixtureOfExperts(SHAPE)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made


def by_hand(made: MixtureOfExperts, token: torch.Tensor) -> torch.Tensor:
    probabilities = made.router(token).softmax(-1)
    weights, chosen = probabilities.topk(SHAPE.experts_per_token)
    out = torch.zeros_like(token)
    for weight, expert in zip(weights / weights.sum(), chosen, strict=True):
        hidden = functional.relu(token @ made.experts.up[expert]).square()
        out = out + weight * (hidden @ made.experts.down[expert])
    return out


def test_every_token_gets_the_weighted_answers_of_its_best_experts() -> None:
    made, x = layer(), torch.randn(2, 5, 8)
    expected = torch.stack([by_hand(made, token) for token in x.flatten(0, 1)]).view_as(x)
    torch.testing.assert_close(made(x), expected)


def test_no_token_is_dropped_when_all_choose_the_same_experts() -> None:
    made = layer()
    x = torch.randn(1, 1, 8).expand(1, 7, 8)
    out = made(x)
    torch.testing.assert_close(out, out[:, :1].expand_as(out))


def test_the_balance_loss_is_one_when_experts_share_alike_and_its_gradient_reaches_the_router() -> (
    None
):
    made = layer()
    torch.nn.init.zeros_(made.router.weight)
    made(torch.randn(2, 5, 8))
    assert made.balance.item() == pytest.approx(1.0)
    made = layer()
    made(torch.randn(2, 5, 8)).mul(0.0).sum().backward()
    assert made.router.weight.grad is not None
    assert made.router.weight.grad.abs().sum() > 0


def test_the_balance_loss_is_weighted_as_the_spec_says() -> None:
    gradients = []
    for balance in (0.25, 0.5):
        torch.manual_seed(1)
        made = layer()
        made.shape = SHAPE.model_copy(update={"balance": balance})
        made(torch.randn(2, 5, 8)).mul(0.0).sum().backward()
        gradients.append(made.router.weight.grad)
    torch.testing.assert_close(gradients[1], 2 * gradients[0])


@pytest.mark.parametrize(("microbatch", "share"), [(2, 1.0), (None, 0.5), (2, 0.5)])
def test_the_balance_loss_counts_once_however_the_step_is_cut(
    microbatch: int | None, share: float
) -> None:
    """Both microbatches hold the same samples: then the fractions of the choices are the batch's."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(256, (2, 9), generator=generator).repeat(2, 1)
    found = []
    for pieces, part in ((None, 1.0), (microbatch, share)):
        model = build_model(SHAPE, 0)
        optimizers = build_optimizers(model, Inner())
        step = InnerStep(Part(model, None, "fp32"), optimizers, 0.0, pieces, torch.device("cpu"))
        for _ in range(round(1 / part)):
            step.gradients(tokens[:, :-1], tokens[:, 1:], share=part)
        found.append([parameter.grad for parameter in model.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_one_seed_makes_one_model_and_it_learns() -> None:
    model = build_model(SHAPE, 1)
    again = build_model(SHAPE, 1)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    tokens = torch.randint(256, (4, 9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses = []
    for _ in range(20):
        loss = cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
