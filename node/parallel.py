"""From a whole model to this rank's part of it: one page, in the order in which things are done.

    cut for the pipeline ─► tensor ─► experts ─► context ─► activation checkpoints ─► FSDP2

All parts are PyTorch's own. Gradients are averaged by FSDP2 alone: its mesh spans every axis whose ranks see
different tokens (shard, context, expert; `replicate` outside them, as in HSDP), so the mean of the ranks' mean
losses is the mean over all tokens. Experts are averaged along `replicate` and `shard` only; what their tokens
from the expert axis add up to is scaled down where they are used. One rank in fp32 is not wrapped at all and
computes the plain model's bits.

Invariants: names and whole shapes are those of the whole model, whatever the mesh; `mesh` has all six axes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from node import hf
from node.gpt import Attention, Gpt
from node.island_settings import IslandSettings
from node.mesh import AXES
from node.moe import MixtureOfExperts
from node.ulysses import Context

DATA_AXES = ("shard", "context", "expert")


@dataclass(frozen=True)
class Part:
    """What one rank trains. `mesh` is None for one rank that needs no process group."""

    module: nn.Module
    mesh: DeviceMesh | None
    compute: str

    def size(self, axis: str) -> int:
        return 1 if self.mesh is None else int(self.mesh[axis].size())

    def rank(self, axis: str) -> int:
        return 0 if self.mesh is None else int(self.mesh[axis].get_local_rank())

    @property
    def batch_shard(self) -> int:
        """Which of the island's samples are this rank's: its place along replicate, shard, expert."""
        place = 0
        for axis in ("replicate", "shard", "expert"):
            place = place * self.size(axis) + self.rank(axis)
        return place


def part_of(model: nn.Module, island: IslandSettings, device: torch.device) -> Part:
    """This rank's part of the whole `model`, on `device`; parameters that were on meta have no values yet."""
    mesh = None
    if island.mesh.ranks > 1 or island.wraps_one_rank:
        mesh = init_device_mesh(device.type, island.mesh.sizes, mesh_dim_names=AXES)
        _cut(model, mesh)
        _split_matrices(model, mesh)
        _split_experts(model, mesh)
        _split_sequences(model, mesh)
    if island.activation_checkpoints:
        _checkpoint(model)
    if mesh is not None:
        _shard(model, mesh, island)
    if any(parameter.is_meta for parameter in model.parameters()):
        model.to_empty(device="cpu" if island.offload else device)
        if isinstance(model, Gpt):
            model.reset_buffers(device)
    elif not island.offload:
        model.to(device)
    return Part(model, mesh, island.compute)


# --- pipeline ----------------------------------------------------------------------------------


def _cut(model: nn.Module, mesh: DeviceMesh) -> None:
    """Takes away what other stages hold: as many blocks each, give or take one."""
    stages, stage = mesh["pipeline"].size(), mesh["pipeline"].get_local_rank()
    if stages == 1 or not isinstance(model, Gpt):
        return
    depth = len(model.blocks)
    for number in range(depth):
        if number * stages // depth != stage:
            del model.blocks[str(number)]
    if stage > 0:
        model.embedding = None
    if stage < stages - 1:
        model.norm = model.head = None


# --- tensor ------------------------------------------------------------------------------------


def _split_matrices(model: nn.Module, mesh: DeviceMesh) -> None:
    axis = mesh["tensor"]
    if axis.size() == 1:
        return
    if isinstance(model, Gpt):
        model.token_shards = axis.size()
        parallelize_module(model, axis, _gpt_plan(model))
    else:
        parallelize_module(model, axis, hf.tensor_plan(model, axis.size()))


def _gpt_plan(model: Gpt) -> dict[str, ParallelStyle]:
    """Heads and MLP columns are split; between them each rank holds a slice of the tokens, norms included
    (sequence parallelism), and the head leaves the logits split by vocabulary, for a parallel loss."""
    tokens, whole = Shard(1), Replicate()
    plan: dict[str, ParallelStyle] = {}
    if model.embedding is not None:
        plan["embedding"] = RowwiseParallel(input_layouts=whole, output_layouts=tokens)
    for name in model.blocks:
        block = f"blocks.{name}"
        plan |= {
            f"{block}.attention_norm": SequenceParallel(),
            f"{block}.attention": PrepareModuleInput(
                input_layouts=(tokens, None, None), desired_input_layouts=(whole, None, None)
            ),
            f"{block}.attention.qkv": ColwiseParallel(),
            f"{block}.attention.out": RowwiseParallel(output_layouts=tokens),
            f"{block}.mlp_norm": SequenceParallel(),
            f"{block}.mlp": PrepareModuleInput(
                input_layouts=(tokens,), desired_input_layouts=(whole,)
            ),
            f"{block}.mlp.up": ColwiseParallel(),
            f"{block}.mlp.down": RowwiseParallel(output_layouts=tokens),
        }
    if model.head is not None:
        plan["norm"] = SequenceParallel()
        plan["head"] = ColwiseParallel(
            input_layouts=tokens, output_layouts=Shard(-1), use_local_output=False
        )
    return plan


# --- experts and context -----------------------------------------------------------------------


def _split_experts(model: nn.Module, mesh: DeviceMesh) -> None:
    axis = mesh["expert"]
    layers = [layer for layer in model.modules() if isinstance(layer, MixtureOfExperts)]
    if not layers:
        return
    everyone = mesh["replicate", "shard", "context", "expert"]._flatten("tokens").get_group()
    for layer in layers:
        layer.data_group = everyone
        if axis.size() > 1:
            layer.split_over(axis)


def _split_sequences(model: nn.Module, mesh: DeviceMesh) -> None:
    if mesh["context"].size() == 1 or not isinstance(model, Gpt):
        return
    model.context = Context(mesh["context"])
    for layer in model.modules():
        if isinstance(layer, Attention):
            layer.context = model.context


# --- memory and gradients ----------------------------------------------------------------------


def _checkpoint(model: nn.Module) -> None:
    """Keeps each block's input only, and computes the rest again in the backward."""
    wrapped = set(blocks_of(model))
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in wrapped:
                parent.register_module(name, checkpoint_wrapper(child))


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return list(model.blocks.values()) if isinstance(model, Gpt) else hf.blocks_of(model)


def _shard(model: nn.Module, mesh: DeviceMesh, island: IslandSettings) -> None:
    data_ranks = mesh["replicate"].size() * _data_ranks(mesh)
    if data_ranks == 1 and island.compute == "fp32" and not island.offload:
        return
    options: dict[str, Any] = {"reshard_after_forward": island.zero == 3}
    if island.compute == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    if island.offload:
        options["offload_policy"] = CPUOffloadPolicy()
    data = _with_replicas(mesh, mesh[DATA_AXES]._flatten("data"))
    if mesh["expert"].size() > 1:
        for layer in model.modules():
            if isinstance(layer, MixtureOfExperts):
                fully_shard(layer.experts, mesh=_with_replicas(mesh, mesh["shard"]), **options)
    for block in blocks_of(model):
        fully_shard(block, mesh=data, **options)
    fully_shard(model, mesh=data, **options)


def _data_ranks(mesh: DeviceMesh) -> int:
    return int(mesh["shard"].size() * mesh["context"].size() * mesh["expert"].size())


def _with_replicas(mesh: DeviceMesh, shards: DeviceMesh) -> DeviceMesh:
    if mesh["replicate"].size() == 1:
        return shards
    return DeviceMesh._concatenate([mesh["replicate"], shards])
