"""Sweep of outer settings against data-parallel and solo training, all islands in one process.

    python benchmarks/outer_sweep.py --json benchmarks/results/outer_sweep.json --jobs 2

Same model, data order, learning-rate schedule, outer transform and codec as a real run; what is missing is
the network. Every arm starts from the same state; all but solo see the same tokens. Islands meet after the
inner steps of the phase; int8 goes both ways: each island's pseudo-gradient, and the reduced one. Finished
arms found in the JSON file are not run again. Choose on one --seed and --split, report on another.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from node.baseline import batches_of, run_arm, with_lr
from node.batches import Batches
from node.inner import lr_at
from node.model import build_model
from node.parameters import layout_of, trained_parameters
from node.settings import TrainerSettings
from node.text import Tokens, split_tokens
from node.trainer import Trainer, token_stream
from outer_optimizer.aggregate import weighted_mean
from outer_optimizer.codec import codec_for
from outer_optimizer.optimizer import transform_for
from outer_optimizer.schedule import Phase, phase_at
from outer_optimizer.transform import FloatArray, Hyper, State
from protocol.layout import Fragment, build_layout
from protocol.spec import load_spec
from protocol.state_dir import write_atomically

Plain = Literal["data_parallel", "solo"]

SPEC = load_spec(Path(__file__).parent.parent / "examples" / "quickstart" / "run.toml")
ISLANDS = SPEC.sync.expected_islands
STEP_TOKENS = ISLANDS * SPEC.inner.batch_size * SPEC.built_in_model.context
EVALUATIONS = 5
CODEC = codec_for(SPEC.outer.codec)


class Arm(NamedTuple):
    name: str
    kind: Plain | Literal["local"]
    lr: float
    phases: tuple[Phase, ...] = ()


def local(lr: float, *phases: tuple[int, int, float, float]) -> Arm:
    """`phases` are (from_round, inner_steps, outer lr, momentum)."""
    parts = [f"{first}: H{steps} {outer}/{momentum}" for first, steps, outer, momentum in phases]
    return Arm(f"local [{', '.join(parts)}] lr {lr}", "local", lr, tuple(map(Phase._make, phases)))


LEARNING_RATES = (1e-3, 2e-3, 3e-3, 5e-3)
BEST_LR = 2e-3
ARMS = [
    *(local(lr, (0, 5, 1.0, 0.0), (20, 20, 0.7, 0.9)) for lr in (1e-3, 2e-3, 3e-3)),
    *(Arm(f"data_parallel lr {lr}", "data_parallel", lr) for lr in LEARNING_RATES),
    *(Arm(f"solo lr {lr}", "solo", lr) for lr in LEARNING_RATES),
    local(BEST_LR, (0, 4, 1.0, 0.0), (25, 20, 0.7, 0.9)),
    local(BEST_LR, (0, 5, 1.0, 0.0), (28, 20, 0.7, 0.9)),
    local(BEST_LR, (0, 5, 1.0, 0.0), (28, 20, 0.9, 0.9)),
    local(BEST_LR, (0, 6, 1.0, 0.0), (30, 20, 0.7, 0.9)),
    local(BEST_LR, (0, 2, 1.0, 0.0), (10, 5, 1.0, 0.0), (26, 20, 0.7, 0.9)),
    local(3e-3, (0, 6, 1.0, 0.0), (30, 20, 0.7, 0.9)),
    local(BEST_LR, (0, 8, 1.0, 0.0), (30, 20, 0.7, 0.9)),
    local(BEST_LR, (0, 6, 1.0, 0.0), (30, 20, 0.7, 0.9), (42, 20, 1.0, 0.0)),
    local(BEST_LR, (0, 6, 0.9, 0.5), (30, 20, 0.7, 0.9)),
    local(BEST_LR, (0, 9, 1.0, 0.0), (36, 20, 0.7, 0.9)),
    local(BEST_LR, (0, 11, 0.7, 0.8)),
    local(BEST_LR, (0, 20, 0.7, 0.9)),
    local(BEST_LR, (0, 6, 1.0, 0.0), (30, 20, 0.5, 0.9)),
]


def sweep_settings(seed: int, steps: int, cache_dir: Path) -> TrainerSettings:
    """The quickstart's own model, data and inner optimizer."""
    return TrainerSettings.model_validate(
        {
            "seed": seed,
            "target_tokens": steps * STEP_TOKENS,
            "model": SPEC.built_in_model.model_dump(),
            "data": SPEC.data.model_dump(),
            "inner": SPEC.inner.model_dump(),
            "cache_dir": str(cache_dir),
            "index": 0,
            "islands": ISLANDS,
        }
    )


def rotated(tokens: Tokens, split: int) -> Tokens:
    """Puts another part of the text at the end, where the held-out part is cut off."""
    return np.roll(tokens, -round(split * SPEC.data.held_out * len(tokens)))


class Replica:
    """One island: a model and its inner optimizer, with parameters as one flat vector."""

    def __init__(self, settings: TrainerSettings, fragment: Fragment) -> None:
        self.trainer = Trainer(settings, torch.device("cpu"))
        self.trainer.start_from_seed()
        self._flat = torch.empty(fragment.values)
        parameters = trained_parameters(self.trainer.part.module)
        self._pairs = [
            (parameters[tensor.name], self._flat[start : start + tensor.values].view(tensor.shape))
            for tensor, start in zip(fragment.tensors, fragment.offsets, strict=True)
        ]

    def train(self, batches: Batches, first: int, stop: int) -> None:
        settings = self.trainer.settings
        for step in range(first, stop):
            self.trainer.gradients(*batches.at(step))
            lr = lr_at(step * STEP_TOKENS, settings.inner, settings.target_tokens)
            self.trainer.inner_step.apply(lr)

    @torch.no_grad()
    def read(self) -> FloatArray:
        """A view that the next `read` or `write` overwrites."""
        for parameter, place in self._pairs:
            place.copy_(parameter)
        return self._flat.numpy()

    @torch.no_grad()
    def write(self, anchor: FloatArray) -> None:
        self._flat.copy_(torch.from_numpy(anchor))
        for parameter, place in self._pairs:
            parameter.copy_(place)


def over_the_wire(values: FloatArray, fragment: Fragment) -> FloatArray:
    """What arrives after int8, cell by cell."""
    out = np.empty_like(values)
    for cell in fragment.cells:
        span = slice(cell.start, cell.start + cell.values)
        CODEC.decode(CODEC.encode(values[span], cell.lengths), cell.lengths, out[span])
    return out


class OuterStep:
    """The anchor and its outer state; `commit` is one round."""

    def __init__(self, anchor: FloatArray, fragment: Fragment) -> None:
        self.anchor = anchor
        self._fragment = fragment
        self._transform = transform_for("nesterov")
        self._state = self._empty_state()
        self._transform.init(self._state)

    def _empty_state(self) -> State:
        return tuple(np.empty_like(self.anchor) for _ in self._transform.state_names)

    def commit(self, locals_: Iterable[FloatArray], phase: Phase) -> None:
        """Mean of the pseudo-gradients, int8 in both directions, one outer step."""
        arrived = [over_the_wire(self.anchor - local, self._fragment) for local in locals_]
        mean = np.empty_like(self.anchor)
        weighted_mean(arrived, [np.float32(1 / ISLANDS)] * ISLANDS, mean)
        new_anchor, new_state = np.empty_like(self.anchor), self._empty_state()
        self._transform.update(
            self.anchor,
            over_the_wire(mean, self._fragment),
            self._state,
            Hyper(phase.lr, phase.momentum),
            new_anchor,
            new_state,
        )
        self.anchor, self._state = new_anchor, new_state


def run_local(phases: Sequence[Phase], settings: TrainerSettings, tokens: Tokens) -> dict[str, Any]:
    started_s = time.perf_counter()
    steps = settings.target_tokens // STEP_TOKENS
    training, held_out = split_tokens(tokens, settings.model.context, settings.data.held_out)
    islands = batches_of(ISLANDS, training, settings)
    tensors = layout_of(trained_parameters(build_model(settings.model, settings.seed)))
    fragment = build_layout(tensors, 1, None, ISLANDS).fragments[0]
    replicas = [Replica(settings, fragment) for _ in islands]
    outer = OuterStep(replicas[0].read().copy(), fragment)
    curve: list[tuple[int, float]] = []
    step = rounds = 0
    while step < steps:
        phase = phase_at(phases, rounds)
        stop = min(steps, step + phase.inner_steps)
        for replica, batches in zip(replicas, islands, strict=True):
            replica.train(batches, step, stop)
        outer.commit((replica.read() for replica in replicas), phase)
        for replica in replicas:
            replica.write(outer.anchor)
        if stop * EVALUATIONS // steps > step * EVALUATIONS // steps:
            loss = replicas[0].trainer.held_out_loss(held_out)
            curve.append((stop * STEP_TOKENS, loss))
        step, rounds = stop, rounds + 1
    return {
        "final": curve[-1][1],
        "curve": curve,
        "rounds": rounds,
        "round_bytes": 2 * sum(CODEC.encoded_bytes(cell.lengths) for cell in fragment.cells),
        "wall_s": time.perf_counter() - started_s,
    }


def run_plain(kind: Plain, settings: TrainerSettings, tokens: Tokens) -> dict[str, Any]:
    trainer = Trainer(settings, torch.device("cpu"))
    trainer.start_from_seed()
    result = run_arm(kind, trainer, tokens, EVALUATIONS, report=lambda line: None)
    rounds = result.steps if kind == "data_parallel" else 0
    return asdict(result) | {"rounds": rounds, "round_bytes": bf16_round_bytes(trainer.part.module)}


def bf16_round_bytes(model: torch.nn.Module) -> int:
    """Out and in, for each value, of an all-reduce in bf16."""
    return 2 * 2 * sum(parameter.numel() for parameter in model.parameters())


def run(arm: Arm, seed: int, split: int, steps: int, cache_dir: Path) -> dict[str, Any]:
    """One arm, in a process of its own."""
    torch.set_num_threads(1)
    settings = with_lr(sweep_settings(seed, steps, cache_dir), arm.lr)
    tokens = rotated(token_stream(settings), split)
    if arm.kind == "local":
        result = run_local(arm.phases, settings, tokens)
    else:
        result = run_plain(arm.kind, settings, tokens)
    every_step_bytes = steps * bf16_round_bytes(build_model(settings.model, settings.seed))
    traffic = result["rounds"] * result["round_bytes"] / every_step_bytes
    place = {"name": arm.name, "seed": seed, "split": split, "steps": steps}
    return place | result | {"traffic": traffic}


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
    steps = SPEC.target_tokens // STEP_TOKENS
    parser.add_argument("--steps", type=int, default=steps, help="inner steps per island")
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
