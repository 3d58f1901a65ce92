"""`atoll.save_start`: the start state of a model that only one's own script can make.

Writes what `atoll run init --weights FILE` reads: the trainable parameters, whole, under the names that
every island has in common, and their order in the file's metadata, since the format sorts tensors.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor
from torch.distributed.tensor import DTensor

from node.parameters import Models, trained_parameters
from node.weights_file import ORDER
from protocol.errors import ConfigError
from protocol.state_dir import write_atomically

DTYPES = (torch.float32, torch.bfloat16)


def save_start(model: Models, path: str | os.PathLike[str]) -> None:
    """Writes the start state of a run with `model.recipe = "own"`.

    Call it on every rank, with the model, or the list of models, that is given to `attach`, and with all
    parts of it: before a pipeline is cut. Sharded parameters are gathered one by one; rank 0 writes.

    Raises:
        ConfigError: no trainable parameter, one without values or of a dtype that runs do not have, or
            no such folder.
    """
    parameters = trained_parameters(model)
    _check(parameters)
    writes = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    if writes and not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"{path}: its folder does not exist: make it, or choose another")
    whole = {}
    for name, parameter in parameters.items():
        values = _gathered(parameter)
        if writes:
            whole[name] = values.to("cpu", copy=True).contiguous()
    if writes:
        write_atomically(Path(path), save(whole, {ORDER: json.dumps(list(whole))}))


def _gathered(parameter: Tensor) -> Tensor:
    values = parameter.detach()
    return values.full_tensor() if isinstance(values, DTensor) else values


def _check(parameters: dict[str, Tensor]) -> None:
    if not parameters:
        raise ConfigError("save_start: the model has no trainable parameter")
    for name, parameter in parameters.items():
        if parameter.is_meta:
            raise ConfigError(f"{name}: has no values yet: call model.to_empty(device=...) first")
        if parameter.dtype not in DTYPES:
            raise ConfigError(
                f"{name}: is {parameter.dtype}: trainable parameters of a run are float32 or bfloat16"
            )
