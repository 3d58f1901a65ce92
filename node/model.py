"""The built-in recipes' models, whole and in their start state, which depends on the seed alone."""

from __future__ import annotations

import torch
from torch import nn

from node.gpt import Gpt
from node.hf import build_hf
from node.moe import Moe
from protocol.spec import BuiltInModel, HfModel, MoeModel


def build_model(model: BuiltInModel, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    if isinstance(model, HfModel):
        return build_hf(model)
    return Moe(model) if isinstance(model, MoeModel) else Gpt(model)


def build_without_values(model: BuiltInModel) -> nn.Module:
    """The whole model's shapes; for `to_empty` once every rank has cut out its part.

    A Hugging Face model computes its buffers when it is made, so it is made in host memory.
    """
    if isinstance(model, HfModel):
        return build_hf(model)
    with torch.device("meta"):
        return build_model(model, 0)
