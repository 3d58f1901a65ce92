"""A rank of an island: `python -P -m node.trainer`, started by torchrun.

Reads the settings file named by ATOLL_TRAINER_SETTINGS, makes its part of the model, trains on its share of the
island's data and meets the daemon inside `island.step`. A step whose gradient is not finite is skipped and
counted, but it is a step all the same. SIGTERM ends the process at once, also inside a collective.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from node.accounting import figures_of
from node.attach import VARIABLE, Island, attach
from node.batches import Batches, Slice, held_out_batches
from node.hf import ties_embedding
from node.inner import build_optimizers, lr_at
from node.inner_checkpoint import InnerCheckpoint
from node.inner_step import InnerStep
from node.mesh import check_microbatch
from node.model import build_model, build_without_values
from node.parallel import part_of
from node.parameters import trained_parameters
from node.settings import TrainerSettings, settings_from_environment
from node.shards import load_whole
from node.text import Tokens, load_tokens, split_tokens
from protocol.errors import AtollError, ConfigError

CPU = torch.device("cpu")
_SEED_STEP = 1_000_003


def token_stream(settings: TrainerSettings) -> Tokens:
    return load_tokens(
        settings.data, settings.model.vocab_size, settings.tokenizer_path, Path(settings.cache_dir)
    )


class Trainer:
    """One rank's part of the model and all it needs for an inner step."""

    def __init__(self, settings: TrainerSettings, device: torch.device) -> None:
        self.settings, self.device = settings, device
        model, island = settings.model, settings.island
        check_microbatch(island.mesh, settings.inner, island.microbatch)
        whole = build_without_values(model)
        self.values = sum(p.numel() for p in trained_parameters(whole).values())
        self.tied = ties_embedding(whole)
        self.part = part_of(whole, island, device)
        self.optimizers = build_optimizers(self.part.module, settings.inner)
        self.inner_step = InnerStep(
            self.part, self.optimizers, settings.inner.clip, island.microbatch, device
        )
        # Dropout: other masks on ranks with other samples, the same where ranks share them.
        own = settings.index * island.mesh.batch_shards + self.part.batch_shard
        torch.manual_seed(settings.seed + _SEED_STEP * own)
        self.mine = Slice(
            self.part.batch_shard,
            island.mesh.batch_shards,
            self.part.rank("context"),
            self.part.size("context"),
        )

    def start_from_seed(self) -> None:
        """The start state without a daemon; every rank makes the whole model for a moment."""
        whole = build_model(self.settings.model, self.settings.seed)
        self.start_from({n: p.detach() for n, p in trained_parameters(whole).items()})

    def start_from(self, whole: Mapping[str, Tensor]) -> None:
        """Takes this rank's pieces of the whole model's parameters."""
        for name, parameter in trained_parameters(self.part.module).items():
            load_whole(name, parameter, whole[name])

    def held_out_loss(self, held_out: Tokens) -> float:
        """Mean over the evaluation sequences, the same ones at every call; on every rank."""
        settings, totals = self.settings, torch.zeros(2, dtype=torch.float64)
        batches = held_out_batches(
            held_out,
            settings.model.context,
            settings.data.eval_sequences,
            max(1, settings.inner.batch_size // self.mine.batch_shards),
            self.mine,
        )
        self.part.module.eval()  # a Hugging Face model may have dropout
        for inputs, targets, counted in batches:
            loss = self.inner_step.loss(self._here(inputs), self._here(targets))
            if loss is not None:
                totals += torch.tensor([loss.item() * counted, counted])
        self.part.module.train()
        if dist.is_initialized() and dist.get_world_size() > 1:
            everywhere = totals.float().to(self.device)
            dist.all_reduce(everywhere)
            totals = everywhere.double().cpu()
        return float(totals[0] / totals[1])

    def gradients(self, inputs: Tensor, targets: Tensor) -> Tensor | None:
        return self.inner_step.gradients(self._here(inputs), self._here(targets))

    def _here(self, batch: Tensor) -> Tensor:
        return batch.to(self.device, non_blocking=True)


def train(settings: TrainerSettings, device: torch.device = CPU) -> Trainer:
    """Trains until the daemon says stop (alone: until the target)."""
    trainer = Trainer(settings, device)
    training, held_out = split_tokens(
        token_stream(settings), settings.model.context, settings.data.held_out
    )
    batches = Batches(training, settings, trainer.mine)
    if VARIABLE not in os.environ:
        trainer.start_from_seed()
    checkpoint = _checkpoint(trainer)
    figures = figures_of(settings.model, trainer.values, trainer.tied, settings.island, device)
    with closing(attach(trainer.part.module, trainer.optimizers, figures=figures)) as island:
        if checkpoint is not None and island.first_step:
            checkpoint.load()
        while True:
            if island.evaluate_now:
                with island.anchor():
                    island.report_evaluation(trainer.held_out_loss(held_out))
            alone_done = not island.attached and island.progress_tokens >= settings.target_tokens
            if island.should_stop or alone_done:
                return trainer
            _take_step(trainer, island, batches, checkpoint)


def _take_step(
    trainer: Trainer, island: Island, batches: Batches, checkpoint: InnerCheckpoint | None
) -> None:
    settings, step, round_ = trainer.settings, island.steps, island.round
    lr = lr_at(island.progress_tokens, settings.inner, settings.target_tokens)
    began_s = time.perf_counter()
    inputs, targets = batches.at(step)
    data_s = island.seconds.get("data", 0.0) + time.perf_counter() - began_s
    loss = trainer.gradients(inputs, targets)
    island.skipped += not trainer.inner_step.apply(lr)
    island.seconds |= {"data": data_s, **trainer.inner_step.seconds}
    island.step(tokens=batches.tokens_at(step), loss=loss)
    every = settings.island.checkpoint_rounds
    if checkpoint is not None and island.round // every > round_ // every:
        checkpoint.save(island.steps)


def _checkpoint(trainer: Trainer) -> InnerCheckpoint | None:
    settings = trainer.settings
    if settings.checkpoint_dir is None or not settings.island.checkpoint_rounds:
        return None
    return InnerCheckpoint(Path(settings.checkpoint_dir), trainer.part.module, trainer.optimizers)


@contextmanager
def process_group(settings: TrainerSettings) -> Iterator[torch.device]:
    """Joins the ranks that torchrun started; yields this rank's device.

    Raises ConfigError if torchrun started another number of ranks than the mesh has.
    """
    island, ranks = settings.island, int(os.environ.get("WORLD_SIZE", "1"))
    if ranks != island.mesh.ranks:
        raise ConfigError(
            f"island.mesh: {island.mesh} is {island.mesh.ranks} ranks, and {ranks} were started: "
            f"make --nproc-per-node and the mesh agree"
        )
    cuda = island.device == "cuda" or (island.device == "auto" and torch.cuda.is_available())
    device = CPU
    if cuda:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"  # offloaded tensors meet on the host
    if ranks > 1:
        dist.init_process_group(backend)
    elif island.wraps_one_rank:
        dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
    try:
        yield device
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def main() -> int:
    try:
        settings = settings_from_environment()
        torch.set_num_threads(settings.island.threads)
        with process_group(settings) as device:
            train(settings, device)
    except AtollError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
