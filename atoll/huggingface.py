"""`AtollCallback`: makes a transformers.Trainer an island's trainer.

    trainer = Trainer(model, args, train_dataset=..., callbacks=[AtollCallback()])
    trainer.train()

The run, not the Trainer, says when training ends: let `max_steps` be more than it can need. Without a daemon
the Trainer trains as it always did.

Invariants: one optimizer step is one step of the island, however many batches are accumulated; a step that
the gradient scaler skips is none, and its tokens do not count.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from atoll.framework import SkipWatch
from node.attach import Island, attach
from protocol.errors import ConfigError

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ConfigError(
        f"atoll.huggingface needs transformers: {error}: pip install transformers accelerate"
    ) from None


class AtollCallback(TrainerCallback):
    """Joins when training begins, and leaves the run's anchor in the model when it ends.

    The loss reported at an edge is the one last logged: let `logging_steps` be at most the run's
    `outer.inner_steps`.

    Args:
        tokens_per_step: what one optimizer step trains on, all ranks of the island together. Left out, the
            Trainer's own count is taken (`include_num_input_tokens_seen`, set to "all" if it is off), at
            the cost of one small gather per batch.
        evaluate: the metric, as in "eval_loss", that is reported when the run asks for the held-out loss:
            the Trainer then evaluates its `eval_dataset` on the anchor. Left out, the run gets none.
        use_run_schedule: the learning rate is the optimizer's own times `island.lr_factor`, in place of the
            Trainer's schedule; only while attached.

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
        self._watch = SkipWatch(None)
        self._loss: float | None = None
        self._at_anchor = ExitStack()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        optimizer = kwargs["optimizer"]
        self.island = attach(kwargs["model"], getattr(optimizer, "optimizer", optimizer))
        if not self.island.attached:
            return
        _check_ranks(args)
        if self._tokens_per_step is None:
            _let_it_count(args, kwargs["model"])
        if self._use_run_schedule:
            _follow_run(self.island, kwargs["lr_scheduler"])
        self._tokens_seen = state.num_input_tokens_seen
        self._watch = SkipWatch(getattr(optimizer, "scaler", None))

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._at_anchor.close()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not self.island.attached:
            return
        tokens = self._tokens_per_step or state.num_input_tokens_seen - self._tokens_seen
        self._tokens_seen = state.num_input_tokens_seen
        if self._watch.skipped():  # the Trainer's `global_step` counts it
            self.island.skipped += 1
            return
        if not tokens:
            raise ConfigError(
                "the Trainer finds no tokens in its batches: give AtollCallback(tokens_per_step=...)"
            )
        self.island.step(tokens=tokens, loss=self._loss)
        if self.island.evaluate_now and self._metric is not None:
            self._at_anchor.enter_context(self.island.anchor())
            control.should_evaluate = True
        if self.island.should_stop:
            control.should_training_stop = True

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._loss = kwargs["logs"].get("loss", self._loss)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        loss = kwargs["metrics"].get(self._metric)
        if self.island.evaluate_now and loss is not None:
            self.island.report_evaluation(loss)
            self._at_anchor.close()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._at_anchor.close()
        self.island.take_anchor()
        self.island.close()


def _check_ranks(args: TrainingArguments) -> None:
    """Raises ConfigError if the ranks would train apart: without a GPU the Trainer leaves them so."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks != args.world_size:
        raise ConfigError(
            f"this island has {ranks} ranks and the Trainer knows {args.world_size}, so each would train "
            "a model of its own: on CPUs set TrainingArguments(use_cpu=True)"
        )


def _let_it_count(args: TrainingArguments, model: nn.Module) -> None:
    """Raises ConfigError where several ranks share a batch, for each would count its tokens."""
    axes = getattr(args, "parallelism_config", None)
    sharing = (getattr(model, "_tp_size", None) or 1) > 1 or any(
        getattr(axes, size, 1) > 1 for size in ("tp_size", "cp_size", "sp_size")
    )
    if sharing:
        raise ConfigError(
            "tensor or context parallel ranks share a batch, and the Trainer counts its tokens for "
            "each: give AtollCallback(tokens_per_step=...)"
        )
    if args.include_num_input_tokens_seen == "no":
        args.include_num_input_tokens_seen = "all"


def _follow_run(island: Island, scheduler: Any) -> None:
    """Raises ConfigError for a schedule that is not a function of the step alone."""
    scheduler = getattr(scheduler, "scheduler", scheduler)  # out of accelerate's wrapper
    if not isinstance(scheduler, LambdaLR):
        raise ConfigError(
            f"use_run_schedule does not go with {type(scheduler).__name__}: "
            'take lr_scheduler_type="constant"'
        )
    scheduler.lr_lambdas = [lambda _: island.lr_factor for _ in scheduler.lr_lambdas]
    for group, lr in zip(scheduler.optimizer.param_groups, scheduler.base_lrs, strict=True):
        group["lr"] = lr * island.lr_factor  # of the first step
