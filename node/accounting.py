"""What training costs in floating-point operations, and what the device could do at most.

Model FLOPs per token are 6 N + 12 L W T (PaLM, appendix B): a multiply and an add per weight, forward once and
backward twice, and attention's two products over the full context. N leaves out the embedding table, which
multiplies nothing, and of a mixture of experts counts those a token visits. Recomputation is not counted:
this is MFU, not hardware utilisation.
"""

from __future__ import annotations

import json

import torch

from node.edge import Figures
from node.island_settings import IslandSettings
from protocol.spec import BuiltInModel, GptModel, HfModel, MoeModel

# Dense bf16 with fp32 accumulation, FLOP/s, as the makers state it. The longest name that fits counts.
PEAK_BF16_FLOPS = {
    "A10": 125e12,
    "A100": 312e12,
    "A30": 165e12,
    "A40": 150e12,
    "B200": 2_250e12,
    "GH200": 989e12,
    "H100": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H200": 989e12,
    "L4": 121e12,
    "L40": 181e12,
    "L40S": 362e12,
    "RTX 3090": 71e12,
    "RTX 4090": 165e12,
    "RTX 5090": 210e12,
}


def flops_per_token(model: BuiltInModel, values: int, tied: bool = False) -> float:
    """`values` = trained parameters of the whole model; `tied` = its embedding is also its head."""
    if isinstance(model, HfModel):
        config = json.loads(model.config)
        width = config.get("hidden_size") or config.get("n_embd") or 0
        depth = config.get("num_hidden_layers") or config.get("n_layer") or 0
        embedding = 0 if tied else model.vocab_size * width
        return 6.0 * (values - embedding) + 12.0 * depth * width * model.context
    visited = values - model.vocab_size * model.width - _idle_expert_values(model)
    return 6.0 * visited + 12.0 * model.depth * model.width * model.context


def _idle_expert_values(model: GptModel) -> int:
    if not isinstance(model, MoeModel):
        return 0
    idle = model.experts - model.experts_per_token
    return model.depth * idle * 2 * model.width * model.expert_width


def figures_of(
    model: BuiltInModel, values: int, tied: bool, island: IslandSettings, device: torch.device
) -> Figures:
    return Figures(flops_per_token(model, values, tied), island.peak_flops or peak_flops(device))


def peak_flops(device: torch.device) -> float | None:
    """Of one device, or None: nobody states it for a CPU."""
    if device.type != "cuda":
        return None
    return peak_of(torch.cuda.get_device_name(device))


def peak_of(device_name: str) -> float | None:
    """From a name such as "NVIDIA H100 PCIe"."""
    words = f" {device_name.replace('-', ' ')} "
    known = [name for name in PEAK_BF16_FLOPS if f" {name} " in words]
    return PEAK_BF16_FLOPS[max(known, key=len)] if known else None
