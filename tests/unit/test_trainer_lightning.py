"""`atoll.lightning` with the real Lightning Trainer, against a scripted daemon."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("lightning")

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch.utils.data import DataLoader

from atoll.lightning import AtollCallback
from node.edge_messages import Boundary, Evaluation, GoOn, Message, Stop
from tests.unit.scripted_daemon import Daemon

torch.set_num_threads(1)

pytestmark = [
    pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:GPU available but not used"),
    pytest.mark.filterwarnings(r"ignore:.isinstance\(treespec, LeafSpec\):FutureWarning"),
]


class Module(LightningModule):
    """Overflows in the batches named, where the Trainer scales gradients."""

    def __init__(
        self, overflow: tuple[int, ...] = (), fused: bool = False, lr: float = 0.01
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(3, 2)
        self._overflow, self._fused, self._lr = overflow, fused, lr

    def training_step(self, batch: Tensor, number: int) -> Tensor:
        loss = self.net(batch).square().mean()
        return loss * float("inf") if number in self._overflow else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self._lr, fused=self._fused)


class TwoOptimizers(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, number: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.net(batch).square().mean())
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:  # type: ignore[override]
        return [torch.optim.SGD([p], lr=0.01) for p in self.parameters()]


def fit(module: Module, callback: AtollCallback | None, **changes: Any) -> Trainer:
    settings: dict[str, Any] = {
        "max_epochs": -1,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": [callback] if callback else [],
    }
    trainer = Trainer(**(settings | changes))
    data = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
    trainer.fit(module, DataLoader(data, batch_size=2))
    return trainer


@pytest.fixture
def module() -> Module:
    return Module()


@pytest.fixture
def daemon(module: Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    monkeypatch.setenv("ATOLL_SOCKET", str(tmp_path / "s"))
    daemon = Daemon(tmp_path / "s", module)
    daemon.anchor(0)[:] = flat(module).numpy()
    yield daemon
    daemon.close()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def go_on(daemon: Daemon, boundary: Boundary) -> Message:
    return GoOn(boundary.sequence, boundary.step + 2, 0)


def stop(daemon: Daemon, boundary: Boundary) -> Message:
    return Stop("the run is cancelled")


def boundaries(daemon: Daemon) -> list[Boundary]:
    return [message for message in daemon.heard if isinstance(message, Boundary)]


def test_one_optimizer_step_is_one_step_and_the_run_says_when_to_stop(
    module: Module, daemon: Daemon
) -> None:
    daemon.answers = [go_on, go_on, stop]
    daemon.start()
    trainer = fit(module, AtollCallback(tokens=7))
    daemon.join()
    heard = boundaries(daemon)
    assert [(b.step, b.tokens) for b in heard] == [(2, 14), (4, 28), (6, 42)]
    assert all(b.loss is not None for b in heard)
    assert trainer.global_step == 6


def test_accumulated_batches_are_one_step_with_all_their_tokens_and_a_whole_loss(
    daemon: Daemon,
) -> None:
    module = Module(lr=0.0)
    daemon.answers = [go_on, stop]
    daemon.start()
    callback = AtollCallback(tokens=lambda batch: batch.numel())
    fit(module, callback, accumulate_grad_batches=4)
    daemon.join()
    heard = boundaries(daemon)
    assert [(b.step, b.tokens) for b in heard] == [(2, 2 * 4 * 6), (4, 4 * 4 * 6)]
    data = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
    loss = module.net(data[30:32]).square().mean()
    assert heard[1].loss == pytest.approx(loss.item())


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_the_scaler_skips_does_not_count(daemon: Daemon, fused: bool) -> None:
    daemon.answers = [go_on, stop]
    daemon.start()
    precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0))
    callback = AtollCallback(tokens=lambda batch: batch.numel())
    trainer = fit(Module(overflow=(1, 2), fused=fused), callback, plugins=[precision])
    daemon.join()
    heard = boundaries(daemon)
    assert [(b.step, b.tokens, b.skipped) for b in heard] == [(2, 12, 2), (4, 24, 2)]
    assert trainer.global_step == 6


def test_several_optimizers_in_one_batch_are_one_step(daemon: Daemon) -> None:
    daemon.answers = [go_on, stop]
    daemon.start()
    fit(TwoOptimizers(), AtollCallback(tokens=7))
    daemon.join()
    assert [b.step for b in boundaries(daemon)] == [2, 4]


def test_the_run_ends_with_the_anchor_in_the_module_though_it_was_late(
    module: Module, daemon: Daemon
) -> None:
    def last(daemon: Daemon, boundary: Boundary) -> Message:
        daemon.anchor(1)[:] = 0.5
        return daemon.apply(boundary, ref="anchor", last=True)

    daemon.answers = [last]
    daemon.start()
    fit(module, AtollCallback(tokens=7))
    daemon.join()
    assert torch.equal(flat(module), torch.full((8,), 0.5))


def test_the_anchor_is_evaluated_when_asked_for_and_training_goes_on_where_it_was(
    module: Module, daemon: Daemon
) -> None:
    def ask(daemon: Daemon, boundary: Boundary) -> Message:
        daemon.anchor(1)[:] = 0.25
        return daemon.apply(boundary, ref="anchor", evaluate=True)

    snapshots: list[np.ndarray] = []

    def keep(daemon: Daemon, boundary: Boundary) -> Message:
        snapshots.append(daemon.snapshot.copy())
        return Stop("enough")

    daemon.greeting = daemon.welcome(evaluate=True)
    daemon.answers = [ask, keep]
    start = flat(module).sum().item()
    daemon.start()
    fit(module, AtollCallback(tokens=7, evaluate=lambda module: flat(module).sum().item()))
    daemon.join()
    evaluations = [m for m in daemon.heard if isinstance(m, Evaluation)]
    assert evaluations == [Evaluation(0, pytest.approx(start)), Evaluation(1, 2.0)]
    assert np.abs(snapshots[0] - 0.25).max() > 0.01


def test_without_a_daemon_the_trainer_computes_what_it_always_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ATOLL_SOCKET", raising=False)
    results = []
    for callback in (None, AtollCallback(tokens=7)):
        module = Module()
        fit(module, callback, max_epochs=1)
        results.append(flat(module))
    assert torch.equal(*results)


def test_a_missing_package_is_named() -> None:
    code = "import sys; sys.modules['lightning'] = None; import atoll.lightning"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert "ConfigError: atoll.lightning needs lightning" in done.stderr.splitlines()[-1]
