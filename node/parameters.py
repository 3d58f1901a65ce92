"""The parameters a run trains: the model's own, under names that every island has in common.

Order is that of `named_parameters()`; tied parameters count once, frozen ones not at all. Names lose what
`torch.compile` and activation checkpointing put into them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from protocol.errors import ConfigError
from protocol.layout import TensorLayout

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def trained_parameters(model: nn.Module) -> dict[str, Tensor]:
    return {
        ".".join(part for part in name.split(".") if part not in WRAPPERS): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def layout_of(parameters: Mapping[str, Tensor]) -> tuple[TensorLayout, ...]:
    return tuple(
        TensorLayout(name, tuple(p.shape), str(p.dtype).removeprefix("torch."))
        for name, p in parameters.items()
    )


def check_optimizer(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> None:
    """Raises ConfigError if `optimizer` moves tensors of its own, such as fp32 masters.

    It would copy them over the model at its next step and so undo every anchor.
    """
    own = {id(parameter) for parameter in parameters.values()}
    foreign = sum(
        id(tensor) not in own for group in optimizer.param_groups for tensor in group["params"]
    )
    if foreign:
        raise ConfigError(
            f"the optimizer holds {foreign} tensors that are not trainable parameters of the model: "
            f"build it from model.parameters()"
        )
