"""`AtollCallback`: makes a lightning.pytorch Trainer an island's trainer.

    trainer = Trainer(max_epochs=-1, callbacks=[AtollCallback(tokens=count)])
    trainer.fit(module, loader)

The run, not the Trainer, says when training ends: set no limit that it would reach before. Parameters have
the LightningModule's names, and the start state must have them too. Without a daemon the Trainer trains as
it always did.

Invariants: a batch with optimizer steps ends one step of the island, however many batches are accumulated
before it and however many optimizers step; one that the precision plugin's gradient scaler skips is none,
though `trainer.global_step` counts it, and its tokens do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from atoll.framework import SkipWatch
from node.attach import Island, attach
from protocol.errors import ConfigError

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ConfigError(f"atoll.lightning needs lightning: {error}: pip install lightning") from None


class AtollCallback(Callback):
    """Joins when training begins, and leaves the run's anchor in the module when it ends.

    Args:
        tokens: what one optimizer step trains on, all ranks of the island together; or a function that
            counts the tokens of one batch of this rank, as in `lambda batch: batch["input_ids"].numel()`.
        evaluate: called with the module on the anchor when the run asks for the held-out loss; returns
            it. Left out, the run gets none.

    Attributes:
        island: not attached until training begins. For the run's learning rate give a scheduler
            `LambdaLR(optimizer, lambda _: callback.island.lr_factor)` with interval "step".
    """

    def __init__(
        self,
        *,
        tokens: int | Callable[[Any], int],
        evaluate: Callable[[LightningModule], float] | None = None,
    ) -> None:
        self.island = Island(None)
        self._tokens, self._evaluate = tokens, evaluate
        self._global_step = self._counted = 0
        self._watch = SkipWatch(None)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.island = attach(pl_module, trainer.optimizers)
        self._global_step, self._counted = trainer.global_step, 0
        self._watch = SkipWatch(getattr(trainer.precision_plugin, "scaler", None))
        self._report_if_asked(pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self.island.attached:
            return
        if not isinstance(self._tokens, int):
            self._counted += self._tokens(batch)
        if trainer.global_step == self._global_step:
            return  # accumulating
        tokens = self._tokens if isinstance(self._tokens, int) else self._everywhere(trainer)
        self._global_step, self._counted = trainer.global_step, 0
        if self._watch.skipped():
            self.island.skipped += 1
            return
        self.island.step(tokens=tokens, loss=_loss_in(outputs, trainer.accumulate_grad_batches))
        self._report_if_asked(pl_module)
        if self.island.should_stop:
            trainer.should_stop = True

    def _everywhere(self, trainer: Trainer) -> int:
        """Tokens of this step on all ranks, the same number on each; ranks that share a batch count once."""
        own = torch.tensor(self._counted, device=trainer.strategy.root_device)
        total = int(trainer.strategy.reduce(own, reduce_op="sum"))
        return total * _data_parallel_ranks(trainer) // trainer.world_size

    def _report_if_asked(self, pl_module: LightningModule) -> None:
        if self.island.evaluate_now and self._evaluate is not None:
            with self.island.anchor():
                self.island.report_evaluation(self._evaluate(pl_module))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.island.take_anchor()
        self.island.close()


def _data_parallel_ranks(trainer: Trainer) -> int:
    """Ranks with batches of their own; tensor parallel ones share theirs."""
    sampler = trainer.distributed_sampler_kwargs
    return int(sampler["num_replicas"]) if sampler else 1


def _loss_in(outputs: Any, accumulated: int) -> Tensor | None:
    """Lightning has divided it by the number of batches it accumulates."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    return loss * accumulated if isinstance(loss, Tensor) else None
