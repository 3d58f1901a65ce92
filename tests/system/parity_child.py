"""Under torchrun: every kind of mesh against one process, one case after another; a JSON line for each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from node.batches import Batches
from node.model import build_model
from node.parameters import trained_parameters
from node.settings import TrainerSettings
from node.shards import shard_of, view_of
from node.trainer import Trainer

STEPS, LR, CPU = 3, 0.5, torch.device("cpu")
GPT = {"width": 32, "depth": 2, "heads": 4, "context": 16}
DEEP = GPT | {"depth": 4}
MOE = {"recipe": "moe", **GPT, "experts": 4, "expert_width": 16, "balance": 0.1}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
SGD = {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.0, "clip": 0.1, "batch_size": 8}


@dataclass(frozen=True)
class Case:
    """`tolerances`: of losses and norms before the clip, and of weights."""

    name: str
    mesh: dict[str, int]
    model: dict[str, Any] = field(default_factory=lambda: GPT)
    island: dict[str, Any] = field(default_factory=dict)
    inner: dict[str, Any] = field(default_factory=lambda: SGD)
    tolerances: tuple[float, float] = (1e-5, 1e-6)


def hf(**changes: Any) -> dict[str, Any]:
    return {"recipe": "hf", "config": json.dumps(LLAMA | changes), "context": 16}


def four_rank_cases() -> Iterator[Case]:
    yield Case("replicate", {"replicate": 4})
    yield Case("shard", {"shard": 4})
    yield Case("hsdp", {"replicate": 2, "shard": 2})
    yield Case("tensor", {"tensor": 4})
    yield Case("shard x tensor", {"shard": 2, "tensor": 2})
    yield Case("pipeline 1F1B", {"pipeline": 4}, DEEP)
    yield Case("pipeline, more microbatches", {"pipeline": 4}, DEEP, island={"microbatch": 1})
    yield Case("shard x pipeline", {"shard": 2, "pipeline": 2}, DEEP)
    yield Case("tensor x pipeline", {"tensor": 2, "pipeline": 2})
    yield Case("context", {"context": 4})
    yield Case("context x shard", {"context": 2, "shard": 2})
    yield Case("expert", {"expert": 4}, MOE)
    yield Case("expert x shard", {"expert": 2, "shard": 2}, MOE)
    yield Case("expert x replicate", {"expert": 2, "replicate": 2}, MOE)
    yield Case("experts, not split", {"shard": 4}, MOE)
    yield Case("microbatches", {"shard": 2, "tensor": 2}, island={"microbatch": 2})
    yield Case("zero 2", {"shard": 4}, island={"zero": 2})
    recomputed = {"activation_checkpoints": True}
    yield Case("activation checkpoints", {"shard": 2, "tensor": 2}, island=recomputed)
    yield Case("llama, shard", {"shard": 4}, hf())
    yield Case("llama, tied, shard", {"shard": 4}, hf(tie_word_embeddings=True))
    yield Case("llama, shard x tensor", {"shard": 2, "tensor": 2}, hf())
    muon = {**SGD, "optimizer": "muon", "weight_decay": 0.1}
    yield Case("muon", {"shard": 2, "tensor": 2}, inner=muon, tolerances=(1e-5, 1e-5))
    bf16 = {"compute": "bf16"}
    yield Case("bf16", {"shard": 4}, island=bf16, tolerances=(0.02, 0.02))
    yield Case("bf16 pipeline", {"shard": 2, "pipeline": 2}, island=bf16, tolerances=(0.02, 0.02))


def eight_rank_cases() -> Iterator[Case]:
    yield Case("shard x tensor x pipeline", {"shard": 2, "tensor": 2, "pipeline": 2})
    yield Case("replicate x shard x tensor", {"replicate": 2, "shard": 2, "tensor": 2})
    yield Case("replicate x shard x context", {"replicate": 2, "shard": 2, "context": 2})
    yield Case("replicate x shard x expert", {"replicate": 2, "shard": 2, "expert": 2}, MOE)


def settings_of(case: Case, mesh: dict[str, int], island: dict[str, Any]) -> TrainerSettings:
    table = {
        "seed": 3,
        "target_tokens": 1_000_000,
        "model": case.model,
        "data": {"text": ["unused"], "eval_sequences": 10},
        "inner": case.inner,
        "cache_dir": "unused",
        "index": 0,
        "islands": 1,
        "island": {**island, "mesh": mesh},
    }
    return TrainerSettings.model_validate(table)


def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, 4_000, dtype=np.uint16)


@dataclass
class Trained:
    trainer: Trainer
    losses: list[float]
    norms: list[float]
    held_out: float


def train(case: Case, settings: TrainerSettings, everywhere: bool) -> Trained:
    trainer = Trainer(settings, CPU)
    trainer.start_from_seed()
    batches = Batches(tokens(), settings, trainer.mine)
    losses, norms = [], []
    for step in range(STEPS):
        loss = trainer.gradients(*batches.at(step))
        losses.append(mean_of_ranks(loss) if everywhere else loss.item())
        assert trainer.inner_step.apply(LR if case.inner is SGD else 0.01)
        norms.append(trainer.inner_step.norm)
    return Trained(trainer, losses, norms, trainer.held_out_loss(tokens()[:400]))


def mean_of_ranks(loss: torch.Tensor | None) -> float:
    totals = torch.zeros(2) if loss is None else torch.tensor([loss.item(), 1.0])
    dist.all_reduce(totals)
    return float(totals[0] / totals[1])


def alone_of(case: Case, known: dict[str, Trained]) -> Trained:
    """One process: the same for all meshes of one model and optimizer."""
    key = json.dumps([case.model, case.inner])
    if key not in known:
        known[key] = train(case, settings_of(case, {}, {}), everywhere=False)
    return known[key]


def run(case: Case, known: dict[str, Trained]) -> dict[str, Any]:
    alone = alone_of(case, known)
    together = train(case, settings_of(case, case.mesh, case.island), everywhere=True)
    start = dict(build_model(together.trainer.settings.model, 3).named_parameters())
    weights = trained_parameters(alone.trainer.part.module)
    difference, moved = 0.0, 0.0
    for name, parameter in trained_parameters(together.trainer.part.module).items():
        shard, whole = shard_of(name, parameter), weights[name].detach()
        reference = view_of(whole.reshape(-1), shard.shape, shard.box)
        if reference.numel():
            difference = max(difference, (shard.local - reference).abs().max().item())
        moved = max(moved, (whole - start[name].detach()).abs().max().item())
    worst = torch.tensor([difference])
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return {
        "case": case.name,
        "tolerances": case.tolerances,
        "loss": worst_of(together.losses, alone.losses),
        "held_out": abs(together.held_out - alone.held_out),
        "norm": worst_of(together.norms, alone.norms),
        "weights": worst.item(),
        "moved": moved,
        "least_norm": min(alone.norms),
        "clip": case.inner["clip"],
    }


def worst_of(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cases = four_rank_cases() if dist.get_world_size() == 4 else eight_rank_cases()
    known: dict[str, Trained] = {}
    for case in cases:
        result = run(case, known)
        if dist.get_rank() == 0:
            print(json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
