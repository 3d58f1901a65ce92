"""Turns a run's final model into a directory for `AutoModelForCausalLM.from_pretrained`.

python export.py runs/north/final.safetensors exported
"""

from __future__ import annotations

import sys

import torch
from safetensors.torch import load_file
from train import make_model


@torch.no_grad()
def export(final: str, directory: str) -> None:
    """The run knows parameters as `named_parameters()` does: tied ones once, under their first name."""
    model, tensors = make_model(), load_file(final)
    parameters = dict(model.named_parameters())
    if strange := sorted(parameters.keys() ^ tensors.keys()):
        sys.exit(f"{final}: is not of this model: {strange[0]} is only in one of them")
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])
    model.save_pretrained(directory)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    export(*sys.argv[1:])
