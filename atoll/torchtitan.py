"""`attach(trainer, tokens_per_step=...)`: makes a torchtitan Trainer an island's trainer.

    trainer = config.build()
    atoll.torchtitan.attach(trainer, tokens_per_step=batch * seq_len)
    trainer.train()

The run, not the Trainer, says when training ends: let `training.steps` be more than it can need. Nothing of
torchtitan is imported; the Trainer's own attributes are used, which have had these names from release to
release: `model_parts`, `optimizers`, `train_step`, `should_continue_training`, `metrics_processor.log`.

Invariants: joins at the first `train_step`, for `train` loads a checkpoint before it, which would undo the
anchor; a `train_step` that raises, as when the data end, is no step of the island. Without a daemon the
Trainer trains as it always did.
"""

from __future__ import annotations

from typing import Any

from node.attach import Island
from node.attach import attach as attach_models
from protocol.errors import ConfigError

NEEDED = (
    "model_parts",
    "optimizers",
    "train_step",
    "should_continue_training",
    "metrics_processor",
)


def attach(trainer: Any, *, tokens_per_step: int) -> TorchtitanHook:
    """To be called on every rank, after the Trainer is built and before `train`.

    Args:
        tokens_per_step: of one optimizer step, all ranks of the island together: the global batch.

    Raises:
        ConfigError: this is no Trainer of torchtitan, or one whose attributes have other names.
    """
    missing = [name for name in NEEDED if not hasattr(trainer, name)]
    if missing:
        raise ConfigError(
            f"{type(trainer).__name__} has no {missing[0]}: atoll.torchtitan needs a Trainer of "
            "torchtitan, of a release that has it"
        )
    return TorchtitanHook(trainer, tokens_per_step)


class TorchtitanHook:
    """Stands around `train_step` and `should_continue_training` of one Trainer.

    The loss reported at an edge is the one last logged: let `metrics.log_freq` be at most the run's
    `outer.inner_steps`.

    Attributes:
        island: not attached until the first `train_step`.
    """

    def __init__(self, trainer: Any, tokens_per_step: int) -> None:
        self.island = Island(None)
        self._trainer, self._tokens = trainer, tokens_per_step
        self._joined = False
        self._loss: float | None = None
        self._train_step = trainer.train_step
        self._should_continue = trainer.should_continue_training
        self._log = trainer.metrics_processor.log
        trainer.train_step = self.train_step
        trainer.should_continue_training = self.should_continue_training
        trainer.metrics_processor.log = self.log

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        trainer = self._trainer
        if not self._joined:
            self.island = attach_models(list(trainer.model_parts), list(trainer.optimizers))
            self._joined = True
        result = self._train_step(*args, **kwargs)
        self.island.step(tokens=self._tokens, loss=self._loss)
        return result

    def log(self, step: int, global_avg_loss: float, *args: Any, **kwargs: Any) -> Any:
        if getattr(self._trainer, "pp_has_last_stage", True):  # others have no loss
            self._loss = float(global_avg_loss)
        return self._log(step, global_avg_loss, *args, **kwargs)

    def should_continue_training(self) -> bool:
        goes_on = bool(self._should_continue()) and not self.island.should_stop
        if not goes_on:
            self.island.take_anchor()
            self.island.close()
        return goes_on
