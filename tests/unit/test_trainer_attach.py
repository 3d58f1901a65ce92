"""`attach`, alone and against a scripted daemon."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from node.attach import Island, attach
from node.baseline import run_arm
from node.edge_link import DaemonLost
from node.edge_messages import (
    Applied,
    Boundary,
    Evaluation,
    GoOn,
    Hello,
    Message,
    Refused,
    Stop,
)
from node.model import build_model
from node.parameters import layout_of, trained_parameters
from node.settings import TrainerSettings
from node.trainer import Trainer, token_stream, train
from protocol.errors import ConfigError, RunMismatch
from tests.unit.scripted_daemon import Daemon

torch.set_num_threads(1)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


@pytest.fixture
def daemon(model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    monkeypatch.setenv("ATOLL_SOCKET", str(tmp_path / "s"))
    daemon = Daemon(tmp_path / "s", model)
    daemon.anchor(0)[:] = np.arange(8)
    yield daemon
    daemon.close()


def joined(model: nn.Module, daemon: Daemon) -> Island:
    daemon.start()
    return attach(model, torch.optim.SGD(model.parameters(), lr=0.1))


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def shift(model: nn.Module, by: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += by


def values(vector: np.ndarray) -> Tensor:
    return torch.from_numpy(vector.copy())


# --- without a daemon --------------------------------------------------------------------------


def plain_loop(with_island: bool) -> tuple[Tensor, Island | None]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    island = attach(model, optimizer) if with_island else None
    for _ in range(20):
        loss = model(torch.randn(16, 4)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if island is not None:
            island.step(tokens=16, loss=loss)
    return flat(model), island


def test_without_a_daemon_the_loop_is_the_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATOLL_SOCKET", raising=False)
    alone, _ = plain_loop(with_island=False)
    attached, island = plain_loop(with_island=True)
    assert torch.equal(alone, attached)
    assert island is not None
    assert not island.attached
    assert not island.should_stop
    assert island.progress_tokens == 20 * 16


# --- joining -----------------------------------------------------------------------------------


def test_parameters_become_the_anchor_in_place(model: nn.Module, daemon: Daemon) -> None:
    before = list(model.parameters())
    joined(model, daemon).close()
    daemon.join()
    assert torch.equal(flat(model), torch.arange(8.0))
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    hello = daemon.heard[0]
    assert isinstance(hello, Hello)
    assert hello.pid == os.getpid()
    assert hello.layout == layout_of(trained_parameters(model))
    assert hello.ranks == 1


def test_tied_parameters_count_once_and_frozen_ones_not_at_all() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    model[2].requires_grad_(False)
    assert list(trained_parameters(model)) == ["0.weight", "0.bias", "1.bias"]


def test_refused_raises_with_the_reason(model: nn.Module, daemon: Daemon) -> None:
    daemon.greeting = Refused("parameter 0 differs")
    with pytest.raises(RunMismatch, match="parameter 0 differs"):
        joined(model, daemon)
    daemon.join()


def test_nobody_at_the_socket_raises(model: nn.Module, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATOLL_SOCKET", str(tmp_path / "nobody"))
        with pytest.raises(DaemonLost, match="nobody: the daemon cannot be reached"):
            attach(model, torch.optim.SGD(model.parameters()))


def test_an_optimizer_with_tensors_of_its_own_is_refused(model: nn.Module, daemon: Daemon) -> None:
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    with pytest.raises(ConfigError, match="2 tensors"):
        attach(model, torch.optim.SGD(masters))


class Fsdp1(FullyShardedDataParallel):
    """What `isinstance` sees; a real one wants a process group."""

    def __init__(self) -> None:
        nn.Module.__init__(self)


class DeepSpeedEngine(nn.Module):
    """Known by its name: the package need not be installed."""


@pytest.mark.parametrize(
    ("wrapper", "advice"),
    [
        (nn.Sequential(Fsdp1()), "FullyShardedDataParallel hides .*: use FSDP2"),
        (DeepSpeedEngine(), "DeepSpeedEngine is not supported: attach the nn.Module itself"),
    ],
    ids=["FSDP1 inside", "DeepSpeed"],
)
def test_a_wrapper_that_hides_parameters_is_refused_with_advice(
    wrapper: nn.Module, advice: str, model: nn.Module, daemon: Daemon
) -> None:
    with pytest.raises(ConfigError, match=advice):
        attach(wrapper, torch.optim.SGD(model.parameters()))


def test_parameters_without_values_are_refused_by_name(daemon: Daemon) -> None:
    model = nn.Linear(3, 2, device="meta")
    with pytest.raises(ConfigError, match=r"^weight: has no values yet: call model.to_empty\("):
        attach(model, torch.optim.SGD(model.parameters()))


def test_lists_of_models_and_optimizers_are_one_model(tmp_path: Path) -> None:
    stages = [nn.ModuleDict({name: nn.Linear(3, 2)}) for name in "ab"]
    optimizers = [torch.optim.SGD(stage.parameters()) for stage in stages]
    daemon = Daemon(tmp_path / "s", stages)
    daemon.anchor(0)[:] = np.arange(16)
    daemon.greeting = daemon.welcome(next_edge_step=1)
    daemon.answers = [lambda daemon, boundary: Stop("enough")]
    daemon.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATOLL_SOCKET", str(tmp_path / "s"))
        island = attach(stages, optimizers)
    for number, stage in enumerate(stages):
        assert torch.equal(flat(stage), torch.arange(8.0) + 8 * number)
        shift(stage, 1.0)
    island.step(tokens=1)
    island.close()
    daemon.join()
    hello = daemon.heard[0]
    assert isinstance(hello, Hello)
    assert [t.name for t in hello.layout] == ["a.weight", "a.bias", "b.weight", "b.bias"]
    assert torch.equal(values(daemon.snapshot), torch.arange(16.0) + 1)
    daemon.close()


# --- masters -----------------------------------------------------------------------------------


def mastered(model: nn.Module) -> dict[str, Tensor]:
    """fp32 masters; the model itself becomes bf16."""
    masters = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.bfloat16()
    return masters


@pytest.mark.parametrize("ref", ["snapshot", "anchor", "reset"])
def test_masters_move_and_the_models_copies_follow(
    ref: str, model: nn.Module, daemon: Daemon
) -> None:
    masters = mastered(model)

    def all_of() -> Tensor:
        return torch.cat([master.flatten() for master in masters.values()])

    def answer(daemon: Daemon, boundary: Boundary) -> Message:
        daemon.anchor(1)[:] = np.arange(8) / 3
        return daemon.apply(boundary, ref=ref)

    daemon.anchor(0)[:] = np.arange(8) / 7
    daemon.greeting = daemon.welcome(next_edge_step=1)
    daemon.answers = [answer]
    daemon.start()
    island = attach(model, torch.optim.SGD(masters.values(), lr=0.1), masters=masters)
    old, new = (torch.from_numpy(anchor) for anchor in (daemon.anchor(0), daemon.anchor(1)))
    assert torch.equal(all_of(), old)
    assert torch.equal(flat(model), old.bfloat16())
    for master in masters.values():
        master += 0.01
    before = all_of()
    island.step(tokens=1)
    island.close()
    daemon.join()
    hello = daemon.heard[0]
    assert isinstance(hello, Hello)
    assert [tensor.dtype for tensor in hello.layout] == ["float32", "float32"]
    assert torch.equal(values(daemon.snapshot), before)
    assert torch.equal(all_of(), before + (new - old) if ref == "anchor" else new)
    assert torch.equal(flat(model), all_of().bfloat16())


def test_a_master_of_no_parameter_is_refused_by_name(model: nn.Module, daemon: Daemon) -> None:
    masters = {**mastered(model), "stranger": torch.zeros(2)}
    with pytest.raises(ConfigError, match="masters: the model trains no parameter 'stranger'"):
        attach(model, torch.optim.SGD(masters.values()), masters=masters)


def test_masters_that_are_not_named_are_refused(model: nn.Module, daemon: Daemon) -> None:
    masters = mastered(model)
    with pytest.raises(ConfigError, match="1 tensors that are not trainable parameters"):
        attach(model, torch.optim.SGD(masters.values()), masters={"weight": masters["weight"]})


# --- what the loop sees ------------------------------------------------------------------------


def test_the_learning_rate_factor_follows_the_runs_schedule(
    model: nn.Module, daemon: Daemon
) -> None:
    daemon.greeting = daemon.welcome(
        warmup_tokens=100, target_tokens=1_100, min_lr_ratio=0.1, next_edge_step=1_000
    )
    island = joined(model, daemon)  # one of four islands
    factors = [island.lr_factor]
    for tokens in (5, 20, 125, 200):
        island.step(tokens=tokens)
        factors.append(island.lr_factor)
    assert factors == pytest.approx([0.1, 0.1 + 0.9 * 0.2, 1.0, 0.55, 0.1])
    island.close()
    daemon.join()


def test_an_island_takes_its_own_samples(model: nn.Module, daemon: Daemon) -> None:
    daemon.greeting = daemon.welcome(index=2, islands=3)
    island = joined(model, daemon)
    assert island.data_shard == (2, 3)
    island.close()
    daemon.join()


def test_state_dict_says_where_the_island_is(model: nn.Module, daemon: Daemon) -> None:
    daemon.greeting = daemon.welcome(first_step=10, next_edge_step=12)
    daemon.answers = [lambda daemon, boundary: daemon.apply(boundary, committed_tokens=300)]
    island = joined(model, daemon)
    for _ in range(3):
        island.step(tokens=5)
    assert island.state_dict() == {"round": 1, "steps": 13, "tokens": 15, "progress_tokens": 320}
    island.close()
    daemon.join()


def test_without_a_daemon_an_island_has_all_samples_and_its_own_schedule(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ATOLL_SOCKET", raising=False)
    island = attach(model, torch.optim.SGD(model.parameters()))
    island.step(tokens=7)
    assert (island.data_shard, island.lr_factor) == ((0, 1), 1.0)
    assert island.state_dict() == {"round": 0, "steps": 1, "tokens": 7, "progress_tokens": 7}


# --- between edges and at one ------------------------------------------------------------------


class Untouchable:
    def __float__(self) -> float:
        raise AssertionError("a loss was read away from an edge")


def test_away_from_an_edge_nothing_is_sent_and_no_loss_is_read(
    model: nn.Module, daemon: Daemon
) -> None:
    daemon.greeting = daemon.welcome(next_edge_step=1_000, first_step=10, committed_tokens=70)
    island = joined(model, daemon)
    for _ in range(5):
        island.step(tokens=3, loss=Untouchable())  # type: ignore[arg-type]
    assert island.steps == 15
    assert island.progress_tokens == 70 + 4 * 15
    island.close()
    daemon.join()
    assert len(daemon.heard) == 1


def test_a_boundary_tells_totals_and_the_snapshot_is_the_parameters(
    model: nn.Module, daemon: Daemon
) -> None:
    seen: list[Tensor] = []

    def answer(daemon: Daemon, boundary: Boundary) -> Message:
        seen.append(values(daemon.snapshot))
        return GoOn(boundary.sequence, boundary.step + 1, 0)

    daemon.greeting = daemon.welcome(first_step=10, next_edge_step=12)
    daemon.answers = [answer, answer]
    island = joined(model, daemon)
    for _ in range(3):
        shift(model, 0.5)
        island.step(tokens=3, loss=torch.tensor(1.5))
    island.close()
    daemon.join()
    first, second = daemon.heard[1:]
    assert isinstance(first, Boundary)
    assert isinstance(second, Boundary)
    assert (first.step, first.steps, first.tokens, first.loss) == (12, 2, 6, 1.5)
    assert (second.step, second.steps, second.tokens) == (13, 3, 9)
    assert second.sequence == first.sequence + 1
    assert second.compute_s > first.compute_s > 0
    assert second.wait_s > first.wait_s == 0
    assert torch.equal(seen[0], torch.arange(8.0) + 1.0)
    assert torch.equal(flat(model), torch.arange(8.0) + 1.5)


def meet_twice(model: nn.Module, daemon: Daemon, ref: str) -> tuple[Tensor, Tensor]:
    """(parameters before, parameters after) an apply of anchor 10 * (0..7) by `ref`."""

    def answer(daemon: Daemon, boundary: Boundary) -> Message:
        daemon.anchor(1)[:] = 10 * np.arange(8)
        return daemon.apply(boundary, ref=ref)

    daemon.answers = [answer]
    island = joined(model, daemon)
    island.step(tokens=3)
    shift(model, 0.25)
    before = flat(model)
    island.step(tokens=3)
    island.close()
    daemon.join()
    assert daemon.heard[-1] == Applied(fragment=0, round=1, sequence=1)
    assert island.round == 1
    return before, flat(model)


@pytest.mark.parametrize("ref", ["snapshot", "reset"])
def test_snapshot_and_reset_make_the_parameters_the_new_anchor(
    model: nn.Module, daemon: Daemon, ref: str
) -> None:
    _, after = meet_twice(model, daemon, ref)
    assert torch.equal(after, 10 * torch.arange(8.0))


def test_anchor_moves_the_parameters_with_the_anchor(model: nn.Module, daemon: Daemon) -> None:
    before, after = meet_twice(model, daemon, "anchor")
    assert torch.equal(after, before + 9 * torch.arange(8.0))


def test_anchor_shows_the_anchor_and_gives_the_parameters_back(
    model: nn.Module, daemon: Daemon
) -> None:
    island = joined(model, daemon)
    shift(model, 1.0)
    with island.anchor():
        assert torch.equal(flat(model), torch.arange(8.0))
    assert torch.equal(flat(model), torch.arange(8.0) + 1)
    island.close()
    daemon.join()


def test_progress_follows_the_commits_and_never_goes_back(model: nn.Module, daemon: Daemon) -> None:
    daemon.answers = [
        lambda daemon, boundary: daemon.apply(boundary, committed_tokens=20),
        lambda daemon, boundary: daemon.apply(boundary, committed_tokens=500, islands=2),
    ]
    island = joined(model, daemon)
    progress = []
    for _ in range(5):
        island.step(tokens=10)
        progress.append(island.progress_tokens)
    assert progress == [40, 80, 80, 500, 520]
    island.close()
    daemon.join()


# --- the end -----------------------------------------------------------------------------------


def test_stop_ends_the_loop_without_touching_the_parameters(
    model: nn.Module, daemon: Daemon
) -> None:
    daemon.answers = [lambda daemon, boundary: Stop("the run is cancelled")]
    island = joined(model, daemon)
    shift(model, 1.0)
    for _ in range(5):
        island.step(tokens=1)
    assert island.should_stop
    assert torch.equal(flat(model), torch.arange(8.0) + 1)
    island.close()
    daemon.join()
    assert len(daemon.heard) == 2


def test_last_stops_after_applying_and_may_still_be_evaluated(
    model: nn.Module, daemon: Daemon
) -> None:
    daemon.answers = [lambda daemon, boundary: daemon.apply(boundary, last=True, evaluate=True)]
    island = joined(model, daemon)
    island.step(tokens=1)
    island.step(tokens=1)
    assert island.should_stop
    assert island.evaluate_now
    assert torch.equal(flat(model), torch.zeros(8))
    island.report_evaluation(2.5)
    assert not island.evaluate_now
    island.close()
    daemon.join()
    assert daemon.heard[-1] == Evaluation(round=1, loss=2.5)


def test_a_lost_daemon_raises(model: nn.Module, daemon: Daemon) -> None:
    daemon.answers = [lambda daemon, boundary: None]
    island = joined(model, daemon)
    island.step(tokens=1)
    with pytest.raises(DaemonLost, match="the daemon closed the connection"):
        island.step(tokens=1)
    island.close()
    daemon.join()


def test_ctrl_c_breaks_the_wait_for_a_silent_daemon(model: nn.Module, daemon: Daemon) -> None:
    released = threading.Event()

    def interrupt(daemon: Daemon, boundary: Boundary) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        released.wait(10)

    daemon.answers = [interrupt]
    island = joined(model, daemon)
    island.step(tokens=1)
    with pytest.raises(KeyboardInterrupt):
        island.step(tokens=1)
    released.set()
    island.close()
    daemon.join()


def test_an_evaluation_that_is_not_finite_is_not_reported_and_a_tensor_is(
    model: nn.Module, daemon: Daemon
) -> None:
    daemon.greeting = daemon.welcome(evaluate=True)
    island = joined(model, daemon)
    island.report_evaluation(float("nan"))
    island.report_evaluation(torch.tensor(1.5))
    island.close()
    daemon.join()
    assert daemon.heard[1:] == [Evaluation(round=0, loss=1.5)]


# --- the trainer's own loop --------------------------------------------------------------------


def test_the_trainer_of_a_lone_island_whose_snapshots_are_the_anchors_is_the_solo_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").write_bytes(bytes(range(97, 123)) * 100)
    settings = TrainerSettings.model_validate(
        {
            "seed": 3,
            "target_tokens": 6 * 2 * 8,
            "model": {"width": 16, "depth": 1, "heads": 2, "context": 8},
            "data": {"text": [str(tmp_path / "text")], "eval_sequences": 4},
            "inner": {"batch_size": 2, "lr": 0.01},
            "cache_dir": str(tmp_path / "cache"),
            "index": 0,
            "islands": 1,
        }
    )
    model = build_model(settings.model, settings.seed)
    trainer = Trainer(settings, torch.device("cpu"))
    trainer.start_from_seed()
    alone = run_arm("solo", trainer, token_stream(settings))

    def keep(daemon: Daemon, boundary: Boundary) -> Message:
        daemon.anchor(1 - daemon.slot)[:] = daemon.snapshot
        last = boundary.step == 6
        return daemon.apply(
            boundary, committed_tokens=boundary.tokens, islands=1, last=last, evaluate=last
        )

    monkeypatch.setenv("ATOLL_SOCKET", str(tmp_path / "s"))
    daemon = Daemon(tmp_path / "s", model)
    daemon.anchor(0)[:] = flat(model).numpy()
    daemon.greeting = daemon.welcome(islands=1)
    daemon.answers = [keep] * 3
    daemon.start()
    train(settings)
    daemon.join()
    daemon.close()
    assert daemon.heard[-1] == Evaluation(round=1, loss=alone.final)
