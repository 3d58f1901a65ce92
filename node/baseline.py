"""Plain training to compare a run with, in one process and without Atoll.

    python -P -m node.baseline data_parallel|solo SETTINGS.json OUT.json [--start FILE] [--lr LR]

`data_parallel` takes every step on the mean gradient over all islands' batches of that step; `solo` is
island 0 left alone with its own share. Both make target_tokens // (islands * batch_size * context) steps
and follow the learning rate of the run's tokens, so they differ from the run in nothing but the exchange.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from safetensors.torch import load_file

from node.batches import Batches
from node.inner import lr_at
from node.settings import TrainerSettings, load_settings
from node.text import Tokens, split_tokens
from node.trainer import Trainer, token_stream
from protocol.errors import AtollError
from protocol.state_dir import write_atomically

Arm = Literal["data_parallel", "solo"]
Report = Callable[[str], None]

PROGRESS_EVERY_S = 1.0


@dataclass(frozen=True)
class Result:
    """`curve` holds [tokens this arm trained on, held-out loss]; its last entry is `final`."""

    arm: str
    lr: float
    final: float
    curve: list[tuple[int, float]]
    tokens: int
    steps: int
    wall_s: float


def batches_of(islands: int, training: Tokens, settings: TrainerSettings) -> list[Batches]:
    """One per island, in index order."""
    return [
        Batches(training, settings.model_copy(update={"index": index})) for index in range(islands)
    ]


def run_arm(
    arm: Arm,
    trainer: Trainer,
    tokens: Tokens,
    evaluations: int = 10,
    report: Report = print,
) -> Result:
    """Trains the trainer's model in place on `tokens`; about `evaluations` points make the curve."""
    started_s = reported_s = time.perf_counter()
    settings = trainer.settings
    inner, target = settings.inner, settings.target_tokens
    training, held_out = split_tokens(tokens, settings.model.context, settings.data.held_out)
    islands = batches_of(settings.islands if arm == "data_parallel" else 1, training, settings)
    curve: list[tuple[int, float]] = []
    step = seen = trained = 0  # tokens: of the run whose schedule this arm follows; of this arm
    while seen + (now := islands[0].tokens_at(step) * settings.islands) <= target:
        mean = 0.0
        for batches in islands:
            loss = trainer.inner_step.gradients(*batches.at(step), share=1 / len(islands))
            mean += loss.item() / len(islands) if loss is not None else 0.0
        trainer.inner_step.apply(lr_at(seen, inner, target))
        step, seen = step + 1, seen + now
        trained = seen * len(islands) // settings.islands
        if time.perf_counter() - reported_s >= PROGRESS_EVERY_S:
            reported_s = time.perf_counter()
            report(f"step {step}, {seen / target:.0%}, loss {mean:.4f}")
        if seen * evaluations // target > len(curve):
            curve.append((trained, trainer.held_out_loss(held_out)))
    if not curve or curve[-1][0] != trained:
        curve.append((trained, trainer.held_out_loss(held_out)))
    return Result(
        arm=arm,
        lr=inner.lr,
        final=curve[-1][1],
        curve=curve,
        tokens=curve[-1][0],
        steps=step,
        wall_s=time.perf_counter() - started_s,
    )


def with_lr(settings: TrainerSettings, lr: float) -> TrainerSettings:
    return settings.model_copy(update={"inner": settings.inner.model_copy(update={"lr": lr})})


def main() -> int:
    parser = argparse.ArgumentParser(prog="node.baseline", description=__doc__)
    parser.add_argument("arm", choices=get_args(Arm))
    parser.add_argument("settings", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--start", type=Path, help="start state; without it, made from the seed")
    parser.add_argument("--lr", type=float, help="in place of inner.lr")
    arguments = parser.parse_args()
    try:
        settings = load_settings(arguments.settings)
        if arguments.lr is not None:
            settings = with_lr(settings, arguments.lr)
        torch.set_num_threads(settings.island.threads)
        trainer = Trainer(settings, torch.device("cpu"))
        if arguments.start is None:
            trainer.start_from_seed()
        else:
            trainer.start_from(load_file(arguments.start))
        result = run_arm(arguments.arm, trainer, token_stream(settings), report=_print_now)
    except AtollError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    write_atomically(arguments.out, json.dumps(asdict(result)).encode())
    return 0


def _print_now(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
