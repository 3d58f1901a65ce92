"""`atoll.huggingface` with the real transformers.Trainer, against a scripted daemon."""

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

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import Trainer, TrainingArguments

from atoll.huggingface import AtollCallback
from node.edge_messages import Boundary, Evaluation, GoOn, Message, Stop
from protocol.errors import ConfigError
from tests.unit.scripted_daemon import Daemon

torch.set_num_threads(1)

CONTEXT = 6


class Model(nn.Module):
    """What the Trainer needs of one: `input_ids` in, a loss out."""

    main_input_name = "input_ids"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.embed(input_ids))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


def samples(count: int) -> list[dict[str, Tensor]]:
    ids = torch.randint(8, (count, CONTEXT), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


@pytest.fixture
def model() -> nn.Module:
    return Model()


@pytest.fixture
def daemon(model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    monkeypatch.setenv("ATOLL_SOCKET", str(tmp_path / "s"))
    daemon = Daemon(tmp_path / "s", model)
    daemon.anchor(0)[:] = flat(model).numpy()
    yield daemon
    daemon.close()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def trainer_of(model: nn.Module, folder: Path, callback: AtollCallback, **changes: Any) -> Trainer:
    settings: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "max_steps": 100,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return Trainer(
        model,
        TrainingArguments(**(settings | changes)),
        train_dataset=samples(64),
        eval_dataset=samples(4),
        callbacks=[callback],
    )


def go_on(daemon: Daemon, boundary: Boundary) -> Message:
    return GoOn(boundary.sequence, boundary.step + 2, 0)


def stop(daemon: Daemon, boundary: Boundary) -> Message:
    return Stop("the run is cancelled")


def boundaries(daemon: Daemon) -> list[Boundary]:
    return [message for message in daemon.heard if isinstance(message, Boundary)]


def test_one_optimizer_step_is_one_step_and_the_run_says_when_to_stop(
    model: nn.Module, daemon: Daemon, tmp_path: Path
) -> None:
    daemon.answers = [go_on, go_on, stop]
    daemon.start()
    trainer = trainer_of(model, tmp_path, AtollCallback())
    trainer.train()
    daemon.join()
    heard = boundaries(daemon)
    assert [b.step for b in heard] == [2, 4, 6]
    assert [b.tokens for b in heard] == [n * 2 * CONTEXT for n in (2, 4, 6)]
    assert trainer.state.global_step == 6
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert [b.loss for b in heard] == [logged[0], logged[2], logged[4]]


def test_accumulated_batches_are_one_step(model: nn.Module, daemon: Daemon, tmp_path: Path) -> None:
    daemon.answers = [go_on, stop]
    daemon.start()
    trainer = trainer_of(model, tmp_path, AtollCallback(), gradient_accumulation_steps=4)
    trainer.train()
    daemon.join()
    heard = boundaries(daemon)
    assert [b.step for b in heard] == [2, 4]
    assert [b.tokens for b in heard] == [n * 4 * 2 * CONTEXT for n in (2, 4)]


class Overflowing(Trainer):
    """Trains with a gradient scaler, whose second and third step overflow."""

    def create_optimizer(self, *arguments: Any) -> torch.optim.Optimizer:
        self.accelerator.scaler = torch.amp.GradScaler("cpu")
        return super().create_optimizer(*arguments)

    def compute_loss(self, *arguments: Any, **named: Any) -> Any:
        loss = super().compute_loss(*arguments, **named)
        return loss * float("inf") if self.state.global_step in (1, 2) else loss


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_a_step_the_scaler_skips_does_not_count(
    model: nn.Module, daemon: Daemon, tmp_path: Path, optim: str
) -> None:
    daemon.answers = [go_on, stop]
    daemon.start()
    trainer = trainer_of(model, tmp_path, AtollCallback(), max_grad_norm=0.0, optim=optim)
    trainer.__class__ = Overflowing
    trainer.train()
    daemon.join()
    heard = boundaries(daemon)
    assert [b.step for b in heard] == [2, 4]
    assert [b.tokens for b in heard] == [n * 2 * CONTEXT for n in (2, 4)]
    assert trainer.state.global_step == 6
    assert [b.skipped for b in heard] == [2, 2]


def test_given_tokens_are_taken_and_nothing_is_counted(
    model: nn.Module, daemon: Daemon, tmp_path: Path
) -> None:
    daemon.answers = [stop]
    daemon.start()
    trainer = trainer_of(model, tmp_path, AtollCallback(tokens_per_step=1_000))
    trainer.train()
    daemon.join()
    assert boundaries(daemon)[0].tokens == 2_000
    assert trainer.state.num_input_tokens_seen == 0


def test_the_run_ends_with_the_anchor_in_the_model_though_it_was_late(
    model: nn.Module, daemon: Daemon, tmp_path: Path
) -> None:
    """The carried work of a late island lies on top of the anchor until the very end."""

    def last(daemon: Daemon, boundary: Boundary) -> Message:
        daemon.anchor(1)[:] = 0.5
        return daemon.apply(boundary, ref="anchor", last=True)

    daemon.answers = [last]
    daemon.start()
    trainer_of(model, tmp_path, AtollCallback()).train()
    daemon.join()
    assert torch.equal(flat(model), torch.full_like(flat(model), 0.5))


def test_the_trainer_evaluates_the_anchor_when_asked_and_goes_on_where_it_was(
    model: nn.Module, daemon: Daemon, tmp_path: Path
) -> None:
    def ask(daemon: Daemon, boundary: Boundary) -> Message:
        daemon.anchor(1)[:] = 0.0
        return daemon.apply(boundary, ref="anchor", evaluate=True)

    snapshots: list[np.ndarray] = []

    def keep(daemon: Daemon, boundary: Boundary) -> Message:
        snapshots.append(daemon.snapshot.copy())
        return Stop("enough")

    daemon.answers = [ask, keep]
    daemon.start()
    callback = AtollCallback(evaluate="eval_loss")
    trainer_of(model, tmp_path, callback).train()
    daemon.join()
    evaluations = [m for m in daemon.heard if isinstance(m, Evaluation)]
    assert [e.round for e in evaluations] == [1]
    assert evaluations[0].loss == pytest.approx(np.log(8))  # zeros: all eight alike
    assert np.abs(snapshots[0]).max() > 0.01  # carried work, and two more steps


def test_the_run_schedule_rules_the_learning_rate_from_the_first_step(
    model: nn.Module, daemon: Daemon, tmp_path: Path
) -> None:
    daemon.greeting = daemon.welcome(warmup_tokens=400, islands=1)
    daemon.answers = [go_on, stop]
    daemon.start()
    callback = AtollCallback(use_run_schedule=True)
    trainer = trainer_of(model, tmp_path, callback)
    factors: list[float] = []
    step = torch.optim.AdamW.step

    def noting(self: torch.optim.Optimizer, *arguments: Any) -> Any:
        factors.append(self.param_groups[0]["lr"] / 0.01)
        return step(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", noting)
        trainer.train()
    daemon.join()
    assert factors[0] == pytest.approx(0.1)
    assert factors[0] < factors[2] < factors[3] < 1


def test_a_schedule_that_is_no_function_of_the_step_is_refused(
    model: nn.Module, daemon: Daemon, tmp_path: Path
) -> None:
    daemon.start()
    callback = AtollCallback(use_run_schedule=True)
    trainer = trainer_of(
        model, tmp_path, callback, lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="epoch"
    )
    with pytest.raises(ConfigError, match="ReduceLROnPlateau"):
        trainer.train()
    callback.island.close()
    daemon.join()


def test_a_model_whose_batches_hold_no_tokens_is_refused(
    model: nn.Module, daemon: Daemon, tmp_path: Path
) -> None:
    daemon.start()
    model.main_input_name = "pixels"
    callback = AtollCallback()
    with pytest.raises(ConfigError, match="tokens_per_step"):
        trainer_of(model, tmp_path, callback).train()
    callback.island.close()
    daemon.join()


def test_ranks_that_would_train_apart_are_refused(
    model: nn.Module, daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.start()
    callback = AtollCallback()
    trainer = trainer_of(model, tmp_path, callback)
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    with pytest.raises(ConfigError, match="1 ranks and the Trainer knows 2"):
        trainer.train()
    callback.island.close()
    daemon.join()


def test_without_a_daemon_the_trainer_computes_what_it_always_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ATOLL_SOCKET", raising=False)
    results = []
    for with_callback in (False, True):
        model = Model()
        trainer = trainer_of(model, tmp_path, AtollCallback(evaluate="eval_loss"), max_steps=5)
        if not with_callback:
            trainer.remove_callback(AtollCallback)
        trainer.train()
        results.append(flat(model))
    assert torch.equal(*results)


def test_a_missing_package_is_named() -> None:
    code = "import sys; sys.modules['transformers'] = None; import atoll.huggingface"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert "ConfigError: atoll.huggingface needs transformers" in done.stderr.splitlines()[-1]
