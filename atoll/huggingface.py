"""`AtollCallback`: makes a transformers.Trainer an island's trainer.

    trainer = Trainer(model, args, train_dataset=..., callbacks=[AtollCallback()])
    trainer.train()

The run, not the Trainer, says when training ends: let `max_steps` be more than it can need. Without a daemon
the Trainer trains as it always did.

Invariants: one optimizer step is one step of the island, however many batches are accumulated; a step that
the gradient scaler skips is none, nor are its tokens counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from atoll.framework import leave_anchor, require
from node.attach import Island, attach
from protocol.errors import ConfigError

require("transformers", "atoll.huggingface")
require("accelerate", "atoll.huggingface")

from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402
from transformers import (  # noqa: E402
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)


class AtollCallback(TrainerCallback):
    """Joins when training begins, and leaves the run's anchor in the model when it ends.

    The loss reported at an edge is the one last logged: let `logging_steps` be at most the run's
    `outer.inner_steps`.

    Args:
        tokens_per_step: what one optimizer step trains on, all ranks of the island together. Left out, the
            Trainer's own count is taken (`include_num_input_tokens_seen`, set to "all" if it is off), at
            the cost of one small gather per batch. Where ranks share a batch (tensor or context parallel)
            it must be given, for there the Trainer counts each token several times.
        evaluate: the metric, as in "eval_loss", that is reported when the run asks for the held-out loss:
            the Trainer then evaluates its `eval_dataset` on the anchor. Left out, such requests are ignored.
        use_run_schedule: the learning rate is the optimizer's times `island.lr_factor`, in place of the
            Trainer's schedule. Only while attached.

    Attributes:
        island: not attached until training begins.
    """

    def __init__(
        self,
        *,
        tokens_per_step: int | None = None,
        evaluate: str | None = None,
        use_run_schedule: bool = False,
    ) -> None:
        self.island = Island(None)
        self._tokens_per_step, self._metric = tokens_per_step, evaluate
        self._use_run_schedule = use_run_schedule
        self._tokens_seen = 0
        self._loss: float | None = None
        self._anchor = ExitStack()

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        self.island = attach(model, _unwrapped(optimizer))
        if not self.island.attached:
            return
        if self._tokens_per_step is None:
            _let_it_count(args, model)
        if self._use_run_schedule:
            _follow_run(kwargs["lr_scheduler"], self.island)
        self._tokens_seen = state.num_input_tokens_seen

    def on_step_begin(self, *_: Any, **kwargs: Any) -> None:
        self._anchor.close()

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Called after skipped steps too, with the same `global_step`s: only the optimizer knows."""
        tokens = self._tokens_per_step or state.num_input_tokens_seen - self._tokens_seen
        self._tokens_seen = state.num_input_tokens_seen
        if getattr(kwargs["optimizer"], "step_was_skipped", False):
            self.island.skipped += 1
            return
        if self.island.attached and tokens <= 0:
            raise ConfigError(
                "the Trainer has counted no tokens in the batches of this step: "
                "give AtollCallback(tokens_per_step=...)"
            )
        self.island.step(tokens=tokens, loss=self._loss)
        if self.island.evaluate_now and self._metric is not None:
            self._anchor.enter_context(self.island.anchor())
            control.should_evaluate = True
        if self.island.should_stop:
            control.should_training_stop = True

    def on_log(self, *_: Any, logs: Mapping[str, Any], **kwargs: Any) -> None:
        self._loss = logs.get("loss", self._loss)

    def on_evaluate(self, *_: Any, metrics: Mapping[str, float], **kwargs: Any) -> None:
        if self.island.evaluate_now and self._metric in metrics:
            self.island.report_evaluation(metrics[self._metric])
            self._anchor.close()

    def on_train_end(self, *_: Any, model: nn.Module, **kwargs: Any) -> None:
        self._anchor.close()
        leave_anchor(self.island, model)


def _unwrapped(optimizer: Optimizer) -> Optimizer:
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer
