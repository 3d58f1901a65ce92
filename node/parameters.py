"""What one rank holds of the model a run trains, under names that every island has in common.

Names are those of `named_parameters()` of the whole model, without what `torch.compile`, activation
checkpointing and DistributedDataParallel put into them. Tied parameters count once, frozen ones not at
all. A pipeline's ranks each hold some of the names.

Under FSDP2 a module's parameters are shards only while it is resharded: after an evaluation forward they
are plain tensors, and what is written to the shards would be ignored. So `settle` reshards first, always.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from node.shards import Shard, shard_of
from node.tiling import Box
from protocol.errors import ConfigError
from protocol.layout import TensorLayout

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")

T = TypeVar("T")
Models = nn.Module | Sequence[nn.Module]
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


@dataclass(frozen=True)
class Piece:
    """A shard of the tensor `name`; `shadow` is the model's own copy where the shard is a master's."""

    name: str
    dtype: str
    shard: Shard
    shadow: Tensor | None = None

    @property
    def layout(self) -> TensorLayout:
        return TensorLayout(self.name, self.shard.shape, self.dtype)


@dataclass(frozen=True)
class Held:
    """Everything this rank holds; `settle` to be called before any piece is read or written."""

    pieces: tuple[Piece, ...]
    sharded: tuple[FSDPModule, ...]

    def settle(self) -> None:
        for module in self.sharded:
            module.reshard()

    @property
    def boxes(self) -> dict[str, Box]:
        return {piece.name: piece.shard.box for piece in self.pieces}


def hold(
    models: Models,
    optimizers: Optimizers,
    masters: Mapping[str, Tensor] | None = None,
    ties: Mapping[str, str] | None = None,
) -> Held:
    """What this rank holds.

    Args:
        masters: name -> the tensor that the optimizer moves in place of the model's own.
        ties: name -> the run's name of the same tensor, where another rank holds that one.

    Raises:
        ConfigError: a wrapper that is not supported, parameters without values, or an optimizer that
            moves tensors of its own.
    """
    parts = [_unwrapped(model) for model in _list(models)]
    sharded = tuple(m for part in parts for m in part.modules() if isinstance(m, FSDPModule))
    for module in sharded:
        module.reshard()
    parameters = trained_parameters(parts)
    masters, ties = masters or {}, ties or {}
    if strange := sorted(masters.keys() - parameters.keys()):
        raise ConfigError(f"masters: the model trains no parameter {strange[0]!r}")
    known: list[Tensor] = [p for part in parts for p in part.parameters() if not p.requires_grad]
    known += [masters.get(name, own) for name, own in parameters.items()]
    _check_optimizers(_list(optimizers), known)
    pieces = tuple(
        _piece(ties.get(name, name), masters.get(name, own), own)
        for name, own in parameters.items()
    )
    return Held(pieces, sharded)


def trained_parameters(models: Models) -> dict[str, Tensor]:
    """Name -> parameter, in the order of `named_parameters()`."""
    found: dict[str, Tensor] = {}
    for model in _list(models):
        for wrapped, parameter in _unwrapped(model).named_parameters():
            name = ".".join(part for part in wrapped.split(".") if part not in WRAPPERS)
            if parameter.requires_grad and found.setdefault(name, parameter) is not parameter:
                raise ConfigError(
                    f"two of the models train another {name}: names must be those of one whole model"
                )
    return found


def layout_of(parameters: Mapping[str, Tensor]) -> tuple[TensorLayout, ...]:
    return tuple(TensorLayout(name, tuple(p.shape), _dtype(p)) for name, p in parameters.items())


def _piece(name: str, tensor: Tensor, own: Tensor) -> Piece:
    if tensor.is_meta:
        raise ConfigError(f"{name}: has no values yet: call model.to_empty(device=...) first")
    shard, own_shard = shard_of(name, tensor), shard_of(name, own)
    if (shard.shape, shard.box) != (own_shard.shape, own_shard.box):
        raise ConfigError(
            f"masters: {name} is {list(shard.shape)} at {shard.box.offset}, its parameter "
            f"{list(own_shard.shape)} at {own_shard.box.offset}: shard both alike"
        )
    return Piece(name, _dtype(tensor), shard, None if tensor is own else own_shard.local)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _list(one_or_many: T | Sequence[T]) -> list[T]:
    return list(one_or_many) if isinstance(one_or_many, list | tuple) else [cast(T, one_or_many)]


def _unwrapped(model: nn.Module) -> nn.Module:
    """Raises ConfigError, naming the wrapper, if it keeps the parameters to itself."""
    while isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod"):
        inner = model.module if isinstance(model, DistributedDataParallel) else model._orig_mod
        model = cast(nn.Module, inner)
    if not isinstance(model, nn.Module) or type(model).__name__ == "DeepSpeedEngine":
        raise ConfigError(f"{type(model).__name__} is not supported: attach the nn.Module itself")
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ConfigError(
            "FullyShardedDataParallel hides the shapes of its parameters: use FSDP2, "
            "torch.distributed.fsdp.fully_shard"
        )
    return model


def _check_optimizers(optimizers: Sequence[torch.optim.Optimizer], known: Sequence[Tensor]) -> None:
    """Refuses an optimizer that moves tensors of its own, such as fp32 masters: it would copy them over
    the model at its next step and so undo every anchor."""
    own = {id(tensor) for tensor in known}
    foreign = sum(
        id(tensor) not in own
        for optimizer in optimizers
        for group in optimizer.param_groups
        for tensor in group["params"]
    )
    if foreign:
        raise ConfigError(
            f"the optimizer holds {foreign} tensors that are not trainable parameters of the model: "
            f"build it from model.parameters() after fully_shard, or name its masters: "
            f"attach(..., masters={{name: tensor}})"
        )
