"""The recipe "hf": any causal language model of Hugging Face transformers, from its configuration.

No code of the configuration's author is run: `trust_remote_code` stays off, and kernels that a configuration
names, which transformers would fetch from its hub, are not taken. Tensor parallelism follows the plan that
transformers keeps for the model, as data; styles other than column- and row-wise are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from protocol.errors import ConfigError
from protocol.spec import HfModel

STYLES: dict[str, type[ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}


def build_hf(model: HfModel) -> nn.Module:
    """Raises ConfigError if the configuration does not make a model here."""
    try:
        import transformers
        from huggingface_hub.errors import StrictDataclassError
    except ImportError:
        raise ConfigError(
            "model.recipe = \"hf\" needs the extra: pip install 'atoll[hf]'"
        ) from None
    fields = json.loads(model.config)
    kind = fields.pop("model_type", None)
    try:
        config = transformers.AutoConfig.for_model(kind, **fields)
        config._attn_implementation = config._experts_implementation = None
        made = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (ValueError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
        raise ConfigError(f"model.config: {type(error).__name__}: {_one_line(error)}") from None
    longest = getattr(config, "max_position_embeddings", None)
    if isinstance(longest, int) and model.context > longest:
        raise ConfigError(
            f"model.context = {model.context} is more than max_position_embeddings = {longest} "
            f"of model.config"
        )
    made.float().train()
    made.config.use_cache = False
    return made  # type: ignore[no-any-return]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The layers that transformers itself never splits between devices."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def ties_embedding(model: Any) -> bool:
    """Whether a Hugging Face model's head is its embedding."""
    if not hasattr(model, "get_output_embeddings"):
        return False
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def tensor_plan(model: nn.Module, ranks: int) -> dict[str, ParallelStyle]:
    """Module name -> style, for `parallelize_module`. Raises ConfigError naming what does not fit."""
    config: Any = model.config
    plan = getattr(config, "base_model_tp_plan", None)
    if not plan:
        raise ConfigError(
            f"island.mesh.tensor: transformers has no plan for {type(model).__name__}"
        )
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        size = getattr(config, key, None) or 0
        if size % ranks:
            raise ConfigError(
                f"island.mesh: tensor = {ranks} does not divide {key} = {size} of model.config"
            )
    prefix = model.base_model_prefix
    return {f"{prefix}.{name}": style for name, style in _styles(plan)}


def _styles(plan: dict[str, str]) -> Iterator[tuple[str, ParallelStyle]]:
    for name, style in plan.items():
        if style not in STYLES:
            raise ConfigError(
                f"island.mesh.tensor: style {style!r} of {name} in transformers' plan is not supported"
            )
        yield name, STYLES[style]()
