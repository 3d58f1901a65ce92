"""Sweep of outer settings against data-parallel and solo training, all islands in one process.

    python benchmarks/outer_sweep.py --json benchmarks/results/outer_sweep.json --jobs 2

Same model, data order, learning-rate schedule, outer transform and codec as a real run; what is missing is
the network and the error feedback. Every arm starts from the same state and sees the same tokens. Islands
meet after the inner steps of the phase; int8 goes both ways: each island's pseudo-gradient, and the
reduced one. Finished arms found in the JSON file are not run again. Choose on one --seed and --split,
report on another.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from protocol.state_dir import write_atomically
from node.baseline import batches_of, run_arm, with_lr
from node.batches import split_tokens
from node.inner import build_optimizer, lr_at, take_step
from node.parameters import layout_of, trained_parameters
from node.settings import TrainerSettings
from node.text import Tokens
from node.trainer import build_model, held_out_loss, token_stream
from outer_optimizer.aggregate import weighted_mean
from outer_optimizer.codec import codec_for
from outer_optimizer.optimizer import transform_for
from outer_optimizer.schedule import Phase, phase_at
from outer_optimizer.transform import Hyper
from protocol.layout import Fragment, build_layout

Vector = npt.NDArray[np.float32]

ISLANDS = 4
STEP_TOKENS = ISLANDS * 8 * 128
EVALUATIONS = 5
HELD_OUT = 0.05
INT8_BYTES, BF16_BYTES = 1.01, 2.0


@dataclass(frozen=True)
class Arm:
    """`phases` empty = plain training with `kind` data_parallel or solo."""

    name: str
    kind: str
    lr: float
    phases: tuple[Phase, ...] = ()


def local(lr: float, *phases: tuple[int, int, float, float]) -> Arm:
    """`phases` are (from_round, inner_steps, outer lr, momentum)."""
    parts = [f"{first}: H{steps} {outer}/{momentum}" for first, steps, outer, momentum in phases]
    return Arm(f"local [{', '.join(parts)}] lr {lr}", "local", lr, tuple(map(Phase._make, phases)))


LEARNING_RATES = (5e-4, 1e-3, 2e-3, 3e-3)
ARMS = [
    local(1e-3, (0, 5, 1.0, 0.0), (25, 20, 0.7, 0.9)),
    local(2e-3, (0, 5, 1.0, 0.0), (25, 20, 0.7, 0.9)),
    *(Arm(f"data_parallel lr {lr}", "data_parallel", lr) for lr in LEARNING_RATES),
    *(Arm(f"solo lr {lr}", "solo", lr) for lr in LEARNING_RATES),
    local(3e-3, (0, 5, 1.0, 0.0), (25, 20, 0.7, 0.9)),
    local(2e-3, (0, 5, 1.0, 0.0), (25, 20, 0.9, 0.9)),
    local(2e-3, (0, 5, 1.0, 0.0), (25, 20, 0.8, 0.8)),
    local(2e-3, (0, 4, 1.0, 0.0), (25, 20, 0.7, 0.9)),
    local(2e-3, (0, 1, 1.0, 0.0), (10, 5, 1.0, 0.0), (25, 20, 0.7, 0.9)),
    local(2e-3, (0, 11, 0.7, 0.7)),
]


def sweep_settings(seed: int, steps: int, cache_dir: Path) -> TrainerSettings:
    text = ["{stdlib}/*.py", "{stdlib}/*/*.py"]
    text += [f"!{{stdlib}}/{folder}/*" for folder in ("test", "site-packages", "idlelib")]
    return TrainerSettings.model_validate(
        {
            "seed": seed,
            "target_tokens": steps * STEP_TOKENS,
            "model": {},
            "data": {"text": text, "held_out": HELD_OUT},
            "inner": {"warmup_tokens": steps * STEP_TOKENS // 20},
            "cache_dir": str(cache_dir),
            "index": 0,
            "islands": ISLANDS,
        }
    )


def rotated(tokens: Tokens, split: int) -> Tokens:
    """Puts another part of the text at the end, where the held-out part is cut off."""
    return np.roll(tokens, -round(split * HELD_OUT * len(tokens)))


class Replica:
    """One island: a model and its inner optimizer, with parameters as one flat vector."""

    def __init__(self, settings: TrainerSettings, fragment: Fragment) -> None:
        self.model = build_model(settings)
        self.optimizer = build_optimizer(self.model, settings.inner)
        self.flat = torch.empty(fragment.values)
        parameters = trained_parameters(self.model)
        self._pairs = [
            (parameters[tensor.name], self.flat[start : start + tensor.values].view(tensor.shape))
            for tensor, start in zip(fragment.tensors, fragment.offsets, strict=True)
        ]

    @torch.no_grad()
    def read(self) -> Vector:
        for parameter, place in self._pairs:
            place.copy_(parameter)
        return self.flat.numpy()

    @torch.no_grad()
    def write(self, anchor: Vector) -> None:
        self.flat.copy_(torch.from_numpy(anchor))
        for parameter, place in self._pairs:
            parameter.copy_(place)


def over_the_wire(values: Vector, fragment: Fragment) -> Vector:
    """What arrives after int8, cell by cell."""
    codec, out = codec_for("int8"), np.empty_like(values)
    for cell in fragment.cells:
        span = slice(cell.start, cell.start + cell.values)
        codec.decode(codec.encode(values[span], cell.lengths), cell.lengths, out[span])
    return out


def run_local(arm: Arm, settings: TrainerSettings, tokens: Tokens) -> dict[str, Any]:
    started_s = time.perf_counter()
    inner, steps = settings.inner, settings.target_tokens // STEP_TOKENS
    training, held_out = split_tokens(tokens, settings)
    islands = batches_of(ISLANDS, training, settings)
    fragment = build_layout(
        layout_of(trained_parameters(build_model(settings))), 1, None, ISLANDS
    ).fragments[0]
    replicas = [Replica(settings, fragment) for _ in islands]
    anchor = replicas[0].read().copy()
    transform = transform_for("nesterov")
    state = {name: np.zeros_like(anchor) for name in transform.state_names}
    curve: list[tuple[int, float]] = []
    step = number = 0
    while step < steps:
        phase = phase_at(arm.phases, number)
        stop = min(steps, step + phase.inner_steps)
        arrived = []
        for replica, batches in zip(replicas, islands, strict=True):
            for now in range(step, stop):
                replica.model(*batches.at(now)).backward()
                lr = lr_at(now * STEP_TOKENS, inner, settings.target_tokens)
                take_step(replica.model.parameters(), replica.optimizer, lr, inner.clip)
            arrived.append(over_the_wire(anchor - replica.read(), fragment))
        gradient = over_the_wire(weighted_mean(arrived, [1 / ISLANDS] * ISLANDS), fragment)
        hyper = Hyper(phase.lr, phase.momentum, 0.9, 0.99, 1e-3)
        transform.update(anchor, gradient, state, hyper, anchor, state)
        for replica in replicas:
            replica.write(anchor)
        if stop == steps or stop * EVALUATIONS // steps > step * EVALUATIONS // steps:
            loss = held_out_loss(replicas[0].model, held_out, settings)
            curve.append((stop * STEP_TOKENS, loss))
        step, number = stop, number + 1
    return {
        "final": curve[-1][1],
        "curve": curve,
        "rounds": number,
        "wall_s": time.perf_counter() - started_s,
    }


def run(arm: Arm, seed: int, split: int, steps: int, cache_dir: Path) -> dict[str, Any]:
    """One arm in a process of its own."""
    torch.set_num_threads(1)
    settings = with_lr(sweep_settings(seed, steps, cache_dir), arm.lr)
    tokens = rotated(token_stream(settings), split)
    if arm.kind == "local":
        measured = run_local(arm, settings, tokens)
    else:
        plain = run_arm(arm.kind, settings, build_model(settings), tokens, EVALUATIONS, _silent)
        measured = asdict(plain) | {"rounds": plain.steps if arm.kind == "data_parallel" else 0}
    bf16_bytes = 2 * BF16_BYTES * steps
    exchanged_bytes = 2 * (INT8_BYTES if arm.kind == "local" else BF16_BYTES) * measured["rounds"]
    return measured | _key(arm, seed, split, steps) | {"traffic": exchanged_bytes / bf16_bytes}


def _silent(line: str) -> None:
    pass


def _key(arm: Arm, seed: int, split: int, steps: int) -> dict[str, Any]:
    return {"name": arm.name, "seed": seed, "split": split, "steps": steps}


def table(results: Sequence[dict[str, Any]]) -> str:
    """Best arm first; traffic against a bf16 all-reduce in every step."""
    lines = [
        f"{'arm':66} {'seed':>4} {'split':>5} {'rounds':>6} {'traffic':>7} {'loss':>7} {'s':>5}"
    ]
    for result in sorted(results, key=lambda result: result["final"]):
        lines.append(
            f"{result['name']:66} {result['seed']:4} {result['split']:5} {result['rounds']:6} "
            f"{result['traffic']:7.2%} {result['final']:7.4f} {result['wall_s']:5.0f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Sweep of outer settings, all islands in process.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--split", type=int, default=0, help="which twentieth of the text is held out"
    )
    parser.add_argument("--steps", type=int, default=485, help="inner steps per island")
    parser.add_argument("--arms", default="", help="regular expression on the arms' names")
    parser.add_argument("--jobs", type=int, default=2, help="arms at a time, one thread each")
    parser.add_argument("--json", type=Path, required=True, help="results, kept after each arm")
    parser.add_argument("--cache", type=Path, default=Path("runs/cache"), help="token cache")
    options = parser.parse_args()
    results = json.loads(options.json.read_bytes()) if options.json.exists() else []
    finished = [
        tuple(result[key] for key in ("name", "seed", "split", "steps")) for result in results
    ]
    place = (options.seed, options.split, options.steps)
    due = [arm for arm in ARMS if re.search(options.arms, arm.name)]
    due = [arm for arm in due if (arm.name, *place) not in finished]
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        jobs = [pool.submit(run, arm, *place, options.cache) for arm in due]
        for job in as_completed(jobs):
            results.append(job.result())
            write_atomically(options.json, json.dumps(results, indent=1).encode())
            print(f"{len(results)} done: {table(results[-1:]).splitlines()[1]}", flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
