"""The rank process of an island: `python -P -m node.trainer`, started by torchrun.

Reads the settings file named by ATOLL_TRAINER_SETTINGS, trains on this island's share of the data and
meets the daemon inside `island.step`. A step whose gradient is not finite is skipped and counted, but it
is a step all the same. SIGTERM and SIGINT end the process at once, also while it waits for the daemon.
"""

from __future__ import annotations

import signal
import sys
from contextlib import closing
from pathlib import Path

import torch
from torch import nn

from node.attach import attach
from node.batches import Batches, held_out_batches
from node.gpt import Gpt
from node.inner import build_optimizer, lr_at, take_step
from node.settings import TrainerSettings, settings_from_environment
from node.text import Tokens, load_tokens, split_tokens
from protocol.errors import AtollError


def build_model(settings: TrainerSettings) -> Gpt:
    """The model in its start state, which depends on `seed` alone."""
    torch.manual_seed(settings.seed)
    return Gpt(settings.model)


def token_stream(settings: TrainerSettings) -> Tokens:
    return load_tokens(
        settings.data, settings.model.vocab_size, settings.tokenizer_path, Path(settings.cache_dir)
    )


@torch.no_grad()
def held_out_loss(model: nn.Module, held_out: Tokens, settings: TrainerSettings) -> float:
    """Mean over the evaluation sequences, the same ones at every call."""
    total, sequences = 0.0, 0
    context, count = settings.model.context, settings.data.eval_sequences
    for inputs, targets in held_out_batches(held_out, context, count, settings.inner.batch_size):
        total += model(inputs, targets).item() * len(inputs)
        sequences += len(inputs)
    return total / sequences


def train(settings: TrainerSettings) -> int:
    """Trains until the daemon says stop (alone: until the target). Returns the steps skipped."""
    inner = settings.inner
    model = build_model(settings)
    optimizer = build_optimizer(model, inner)
    training, held_out = split_tokens(
        token_stream(settings), settings.model.context, settings.data.held_out
    )
    batches = Batches(training, settings)
    skipped = 0
    with closing(attach(model, optimizer)) as island:
        while True:
            if island.evaluate_now:
                with island.anchor():
                    island.report_evaluation(held_out_loss(model, held_out, settings))
            alone_done = not island.attached and island.progress_tokens >= settings.target_tokens
            if island.should_stop or alone_done:
                return skipped
            lr = lr_at(island.progress_tokens, inner, settings.target_tokens)
            inputs, targets = batches.at(island.steps)
            loss = model(inputs, targets)
            loss.backward()
            skipped += not take_step(model.parameters(), optimizer, lr, inner.clip)
            island.step(tokens=inputs.numel(), loss=loss.detach())


def main() -> int:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    try:
        settings = settings_from_environment()
        torch.set_num_threads(settings.island.threads)
        skipped = train(settings)
    except AtollError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if skipped:
        print(f"trainer: skipped {skipped} steps whose gradient was not finite", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
