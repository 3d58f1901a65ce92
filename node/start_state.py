"""Makes a run's start state: `python -P -m node.start_state OUT [--settings FILE] [--weights SOURCE]`.

With settings the model is the spec's recipe: its parameters follow from the seed alone, or are those of
SOURCE, which must hold exactly the recipe's. Without settings the model is the islands' own, and SOURCE
says all there is to know of it; then no torch is needed.

OUT holds fp32 whatever the parameters' dtype. OUT.layout.json beside it lists [name, shape, dtype] in
layout order; both files are whole or absent, and the layout is there before the state.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.numpy import save

from node.settings import TrainerSettings, load_settings
from node.weights_file import DTYPES, StoredTensor, open_weights
from outer_optimizer.transform import FloatArray
from protocol.errors import AtollError, ConfigError
from protocol.layout import TensorLayout
from protocol.state_dir import write_atomically

if TYPE_CHECKING:
    from torch import nn

OWN_DTYPES = ("F32", "BF16")  # of the parameters of an own model


def write_start_state(
    settings: TrainerSettings, out: Path, weights: Path | None = None
) -> tuple[TensorLayout, ...]:
    """The start state of a built-in recipe. Raises ConfigError if the weights are not its."""
    from node.model import build_model
    from node.parameters import layout_of, trained_parameters

    model = build_model(settings.model, settings.seed)
    parameters = trained_parameters(model)
    layout = layout_of(parameters)
    if weights is None:
        values = {name: p.detach().float().contiguous().numpy() for name, p in parameters.items()}
    else:
        values = _read_for(layout, _other_names(model), weights)
    return _write(out, layout, values)


def write_own_start(weights: Path, out: Path) -> tuple[TensorLayout, ...]:
    """The start state of a model that only the islands' own script can make."""
    stored = open_weights(weights)
    for tensor in stored.values():
        if tensor.dtype not in OWN_DTYPES:
            raise ConfigError(
                f"--weights {weights}: {tensor.name} is {tensor.dtype}: parameters of a run are "
                f"{' or '.join(OWN_DTYPES)} (atoll.save_start writes only what is trained)"
            )
    layout = tuple(tensor.layout for tensor in stored.values())
    return _write(out, layout, {name: tensor.read() for name, tensor in stored.items()})


def _write(
    out: Path, layout: tuple[TensorLayout, ...], values: Mapping[str, FloatArray]
) -> tuple[TensorLayout, ...]:
    write_atomically(out.with_suffix(".layout.json"), json.dumps(layout).encode())
    write_atomically(out, save(dict(values)))
    return layout


def _other_names(model: nn.Module) -> dict[str, str]:
    """Second names of tied parameters -> the first, which is the run's."""
    first: dict[int, str] = {}
    pairs = [
        (name, first.setdefault(id(parameter), name))
        for name, parameter in model.named_parameters(remove_duplicate=False)
    ]
    return {name: run_name for name, run_name in pairs if name != run_name}


def _read_for(
    layout: Sequence[TensorLayout], other_names: Mapping[str, str], weights: Path
) -> dict[str, FloatArray]:
    """Exactly the tensors of `layout`; a second name counts only where the first is not there."""
    opened = open_weights(weights)
    stored = {
        other_names.get(name, name): tensor
        for name, tensor in opened.items()
        if other_names.get(name) not in opened
    }
    difference = _difference(stored, layout)
    if difference is not None:
        raise ConfigError(f"--weights {weights}: {difference}")
    return {tensor.name: stored[tensor.name].read() for tensor in layout}


def _difference(stored: Mapping[str, StoredTensor], layout: Sequence[TensorLayout]) -> str | None:
    """The first parameter in which the weights are not the model's, or None."""
    names = {tensor.name for tensor in layout}
    strangers = [tensor for name, tensor in stored.items() if name not in names]
    for number, wanted in enumerate(layout):
        tensor = stored.get(wanted.name)
        if tensor is not None and tensor.shape == wanted.shape and tensor.dtype in DTYPES:
            continue
        model = f"{wanted.name} {list(wanted.shape)} {wanted.dtype}"
        if tensor is None and not strangers:
            return f"parameter {number}: they lack {model}"
        return (
            f"parameter {number}: they have {_shown(tensor or strangers[0])}, the model has {model}"
        )
    return f"they have {_shown(strangers[0])}, which the model lacks" if strangers else None


def _shown(tensor: StoredTensor) -> str:
    return f"{tensor.name} {list(tensor.shape)} {tensor.layout.dtype}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="node.start_state", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--settings", type=Path, help="of a built-in recipe")
    parser.add_argument("--weights", type=Path, help="safetensors file or directory")
    arguments = parser.parse_args()
    try:
        if arguments.settings is not None:
            settings = load_settings(arguments.settings)
            layout = write_start_state(settings, arguments.out, arguments.weights)
        elif arguments.weights is not None:
            layout = write_own_start(arguments.weights, arguments.out)
        else:
            parser.error("one of --settings and --weights is needed")
    except AtollError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(layout))
    return 0


if __name__ == "__main__":
    sys.exit(main())
