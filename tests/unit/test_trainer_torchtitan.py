"""`atoll.torchtitan` with a stand-in for its Trainer, against a scripted daemon."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import atoll.torchtitan
from node.edge_messages import Boundary, GoOn, Message, Stop
from protocol.errors import ConfigError
from tests.unit.scripted_daemon import Daemon

torch.set_num_threads(1)

STEPS = 20


class DataEnd(Exception):
    pass


class Optimizers:
    """A container, as torchtitan's: one optimizer per part of the model."""

    def __init__(self, parts: list[nn.Module]) -> None:
        self._optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self._optimizers)

    def step(self) -> None:
        for optimizer in self:
            optimizer.step()


class Metrics:
    def __init__(self) -> None:
        self.logged: list[int] = []

    def log(self, step: int, global_avg_loss: float, global_max_loss: float, norm: float) -> None:
        self.logged.append(step)


class Trainer:
    """The names and the order of calls of torchtitan's Trainer, and nothing else of it."""

    def __init__(self, parts: list[nn.Module], checkpoint: float | None = None) -> None:
        self.model_parts = parts
        self.optimizers = Optimizers(parts)
        self.metrics_processor = Metrics()
        self.step = 0
        self.samples = 1_000
        self._checkpoint = checkpoint

    def train_step(self, data_iterator: Iterator[Tensor]) -> None:
        batch = next(data_iterator, None)
        if batch is None:
            raise DataEnd
        for part in self.model_parts:
            batch = part(batch)
        batch.square().mean().backward()
        self.optimizers.step()
        if self.step % 2 == 1:
            self.metrics_processor.log(self.step, 10.0 + self.step, 99.0, 1.0)

    def train(self) -> None:
        if self._checkpoint is not None:
            fill(self.model_parts, self._checkpoint)
        data = iter(torch.ones(self.samples, 1, 3))
        while self.should_continue_training():
            self.step += 1
            try:
                self.train_step(data)
            except DataEnd:
                break

    def should_continue_training(self) -> bool:
        return self.step < STEPS


def fill(parts: list[nn.Module], value: float) -> None:
    with torch.no_grad():
        for part in parts:
            for parameter in part.parameters():
                parameter.fill_(value)


def flat(parts: list[nn.Module]) -> Tensor:
    return torch.cat([p.detach().flatten() for part in parts for p in part.parameters()])


@pytest.fixture
def parts() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(3, 3)), nn.Linear(3, 2)]


@pytest.fixture
def daemon(
    parts: list[nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Daemon]:
    monkeypatch.setenv("ATOLL_SOCKET", str(tmp_path / "s"))
    daemon = Daemon(tmp_path / "s", parts)
    daemon.anchor(0)[:] = 0.25
    yield daemon
    daemon.close()


def go_on(daemon: Daemon, boundary: Boundary) -> Message:
    return GoOn(boundary.sequence, boundary.step + 2, 0)


def boundaries(daemon: Daemon) -> list[Boundary]:
    return [message for message in daemon.heard if isinstance(message, Boundary)]


def test_a_train_step_is_one_step_and_the_run_says_when_to_stop(
    parts: list[nn.Module], daemon: Daemon
) -> None:
    daemon.answers = [go_on, lambda daemon, boundary: Stop("the run is cancelled")]
    daemon.start()
    trainer = Trainer(parts)
    atoll.torchtitan.attach(trainer, tokens_per_step=7)
    trainer.train()
    daemon.join()
    heard = boundaries(daemon)
    assert [(b.step, b.tokens, b.loss) for b in heard] == [(2, 14, 11.0), (4, 28, 13.0)]
    assert trainer.step == 4
    assert trainer.metrics_processor.logged == [1, 3]


def test_a_checkpoint_loaded_before_the_first_step_does_not_undo_the_anchor(
    parts: list[nn.Module], daemon: Daemon
) -> None:
    def stop(daemon: Daemon, boundary: Boundary) -> Message:
        assert abs(daemon.snapshot - 0.25).max() < 1  # two steps from the anchor, not from 100
        return Stop("enough")

    daemon.answers = [stop]
    daemon.start()
    trainer = Trainer(parts, checkpoint=100.0)
    atoll.torchtitan.attach(trainer, tokens_per_step=7)
    trainer.train()
    daemon.join()
    assert len(boundaries(daemon)) == 1


def test_a_step_without_data_is_none(parts: list[nn.Module], daemon: Daemon) -> None:
    daemon.answers = [go_on]
    daemon.start()
    trainer = Trainer(parts)
    trainer.samples = 3
    hook = atoll.torchtitan.attach(trainer, tokens_per_step=7)
    trainer.train()
    assert trainer.step == 4
    assert hook.island.steps == 3
    hook.island.close()
    daemon.join()


def test_the_run_ends_with_the_anchor_in_the_parts_though_it_was_late(
    parts: list[nn.Module], daemon: Daemon
) -> None:
    def last(daemon: Daemon, boundary: Boundary) -> Message:
        daemon.anchor(1)[:] = 0.5
        return daemon.apply(boundary, ref="anchor", last=True)

    daemon.answers = [last]
    daemon.start()
    trainer = Trainer(parts)
    atoll.torchtitan.attach(trainer, tokens_per_step=7)
    trainer.train()
    daemon.join()
    assert torch.equal(flat(parts), torch.full_like(flat(parts), 0.5))


def test_without_a_daemon_the_trainer_trains_to_its_own_end(
    parts: list[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ATOLL_SOCKET", raising=False)
    trainer = Trainer(parts)
    atoll.torchtitan.attach(trainer, tokens_per_step=7)
    trainer.train()
    assert trainer.step == STEPS


def test_something_else_is_refused() -> None:
    with pytest.raises(ConfigError, match="Linear has no model_parts"):
        atoll.torchtitan.attach(nn.Linear(1, 1), tokens_per_step=7)
