"""`attach`, alone and against a scripted daemon at the other end of a real socket and real shared memory."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from node.attach import Island, attach
from node.baseline import run_arm
from node.edge_link import DaemonLost
from node.edge_messages import (
    Applied,
    Apply,
    Boundary,
    Evaluation,
    FragmentLayout,
    GoOn,
    Hello,
    Message,
    Refused,
    Stop,
    TensorSlot,
    Welcome,
    decode,
    encode,
)
from node.parameters import layout_of, trained_parameters
from node.settings import TrainerSettings
from node.shared_buffer import SharedBuffer
from node.trainer import build_model, token_stream, train
from protocol.errors import ConfigError, RunMismatch

torch.set_num_threads(1)

Answer = Callable[["Daemon", Boundary], Message | None]


class Daemon:
    """One fragment, one trainer; answers each boundary with the next of `answers`.

    An answer of None closes the connection. `heard` is complete after `join`.
    """

    def __init__(self, path: Path, model: nn.Module) -> None:
        self.heard: list[Message] = []
        self.answers: list[Answer] = []
        self.greeting: Message | None = None
        tensors, offset = [], 0
        for name, parameter in trained_parameters(model).items():
            tensors.append(TensorSlot(name, offset, parameter.numel()))
            offset += parameter.numel()
        self.fragment = FragmentLayout(offset, tuple(tensors))
        self.buffers = [SharedBuffer.create("test", offset) for _ in range(3)]
        self.slot = 0
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(1)
        self._thread = threading.Thread(target=self._serve, daemon=True)

    @property
    def snapshot(self) -> np.ndarray:
        return self.buffers[0].values

    def anchor(self, slot: int) -> np.ndarray:
        return self.buffers[1 + slot].values

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join(10)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self._listener.close()
        for buffer in self.buffers:
            buffer.close()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        with connection, connection.makefile("rb") as lines:
            self.heard.append(decode(lines.readline()))
            greeting = self.greeting or self.welcome()
            fds = [buffer.fd for buffer in self.buffers] if isinstance(greeting, Welcome) else []
            line = encode(greeting)
            socket.send_fds(connection, [line[:1]], fds)
            connection.sendall(line[1:])
            for line in lines:
                self.heard.append(decode(line))
                if not isinstance(self.heard[-1], Boundary):
                    continue
                answer = self.answers.pop(0)(self, self.heard[-1])
                if answer is None:
                    return
                connection.sendall(encode(answer))

    def welcome(self, **changes: object) -> Welcome:
        fields = {
            "fragments": (self.fragment,),
            "anchor_slot": (self.slot,),
            "round": 0,
            "first_step": 0,
            "next_edge_step": 2,
            "next_fragment": 0,
            "committed_tokens": 0,
            "islands": 4,
            "index": 1,
            "evaluate": False,
            "warmup_tokens": 0,
            "target_tokens": 1_000,
            "min_lr_ratio": 0.1,
        }
        return Welcome(**(fields | changes))  # type: ignore[arg-type]

    def apply(self, boundary: Boundary, **changes: object) -> Apply:
        fields = {
            "sequence": boundary.sequence,
            "fragment": 0,
            "round": 1,
            "ref": "snapshot",
            "anchor_slot": 1 - self.slot,
            "next_edge_step": boundary.step + 2,
            "next_fragment": 0,
            "committed_tokens": 100,
            "islands": 4,
            "evaluate": False,
            "last": False,
        }
        self.slot = 1 - self.slot
        return Apply(**(fields | changes))  # type: ignore[arg-type]


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
    model = build_model(settings)
    alone = run_arm("solo", settings, build_model(settings), token_stream(settings))

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
    assert train(settings) == 0
    daemon.join()
    daemon.close()
    assert daemon.heard[-1] == Evaluation(round=1, loss=alone.final)
