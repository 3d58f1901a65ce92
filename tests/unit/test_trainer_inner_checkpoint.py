"""Inner checkpoints of one rank: what is taken up, what is kept, and what a bad one costs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from node.inner_checkpoint import InnerCheckpoint

torch.set_num_threads(1)


def trainer(
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    return model, kind(model.parameters(), lr=0.1, foreach=False)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.rand(4, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> InnerCheckpoint:
    return InnerCheckpoint(folder, model, [optimizer])


def test_training_goes_on_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    model, optimizer = trainer()
    train(model, optimizer, 3)
    checkpoint(tmp_path, model, optimizer).save(3)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, optimizer, 2)
    again, fresh = trainer()
    torch.manual_seed(99)
    assert checkpoint(tmp_path, again, fresh).load() == 3
    again.load_state_dict(weights)
    train(again, fresh, 2)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_newest_two_are_kept(tmp_path: Path) -> None:
    model, optimizer = trainer()
    train(model, optimizer, 1)
    for steps in (10, 20, 30):
        checkpoint(tmp_path, model, optimizer).save(steps)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000020", "step-00000030"]


def test_a_save_that_was_cut_off_is_not_seen(tmp_path: Path) -> None:
    model, optimizer = trainer()
    train(model, optimizer, 1)
    checkpoint(tmp_path, model, optimizer).save(10)
    (tmp_path / "step-00000010").rename(tmp_path / "writing")
    assert checkpoint(tmp_path, *trainer()).load() is None


@pytest.mark.parametrize("damage", ["cut", "empty", "no file"])
def test_a_damaged_one_is_passed_over_for_the_one_before(tmp_path: Path, damage: str) -> None:
    model, optimizer = trainer()
    train(model, optimizer, 1)
    for steps in (10, 20):
        checkpoint(tmp_path, model, optimizer).save(steps)
    for file in (tmp_path / "step-00000020").iterdir():
        data = file.read_bytes()
        if damage == "no file":
            file.unlink()
        else:
            file.write_bytes(data[: len(data) // 2] if damage == "cut" else b"")
    assert checkpoint(tmp_path, *trainer()).load() == 10


def test_that_of_another_optimizer_leaves_this_one_fresh(tmp_path: Path) -> None:
    model, optimizer = trainer(torch.optim.SGD)
    optimizer.param_groups[0]["momentum"] = 0.9
    train(model, optimizer, 1)
    checkpoint(tmp_path, model, optimizer).save(10)
    model, adam = trainer()
    assert checkpoint(tmp_path, model, adam).load() is None
    assert not adam.state


def test_without_any_there_is_nothing_to_take_up(tmp_path: Path) -> None:
    assert checkpoint(tmp_path / "none", *trainer()).load() is None


def test_steps_that_were_not_all_counted_do_not_hide_the_newer_state(tmp_path: Path) -> None:
    model, optimizer = trainer()
    train(model, optimizer, 1)
    for steps in (120, 160, 80):
        checkpoint(tmp_path, model, optimizer).save(steps)
    assert checkpoint(tmp_path, *trainer()).load() == 80


def test_a_parameter_that_never_had_a_gradient_costs_the_others_nothing(tmp_path: Path) -> None:
    def with_an_idle_part() -> tuple[nn.Module, torch.optim.Optimizer]:
        model, _ = trainer()
        model.idle = nn.Linear(2, 2)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)

    model, optimizer = with_an_idle_part()
    train(model, optimizer, 2)
    checkpoint(tmp_path, model, optimizer).save(2)
    again, fresh = with_an_idle_part()
    assert checkpoint(tmp_path, again, fresh).load() == 2
    for a, b in zip(model[:3].parameters(), again[:3].parameters(), strict=True):
        assert torch.equal(optimizer.state[a]["exp_avg"], fresh.state[b]["exp_avg"])


def test_a_save_that_fails_costs_neither_the_training_nor_the_one_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = trainer()
    train(model, optimizer, 1)
    kept = checkpoint(tmp_path, model, optimizer)
    kept.save(10)
    (tmp_path / "writing").write_text("a file where the folder should be")
    kept.save(20)
    assert "inner_checkpoint_failed" in capsys.readouterr().out
    assert checkpoint(tmp_path, *trainer()).load() == 10
