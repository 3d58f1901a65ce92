"""Models out of Hugging Face configurations; their meshes are tested in system/test_parallel_parity.py."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from node.hf import blocks_of, tensor_plan
from node.model import build_model
from node.parameters import trained_parameters
from node.settings import TrainerSettings
from node.trainer import Trainer
from protocol.errors import ConfigError
from protocol.spec import HfModel

torch.set_num_threads(1)

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
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 256,
    "n_embd": 32,
    "n_layer": 1,
    "n_head": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def hf(fields: dict[str, Any]) -> HfModel:
    return HfModel(recipe="hf", config=json.dumps(fields), context=16)


def test_tied_weights_count_once() -> None:
    apart = trained_parameters(build_model(hf(LLAMA), 0))
    tied = trained_parameters(build_model(hf(LLAMA | {"tie_word_embeddings": True}), 0))
    assert apart.keys() - tied.keys() == {"lm_head.weight"}


def test_parameters_are_fp32_and_the_seeds_alone_whatever_the_configuration_says() -> None:
    models = [build_model(hf(LLAMA | {"dtype": "bfloat16"}), 1) for _ in range(2)]
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b)
    assert len(blocks_of(models[0])) == 2


@pytest.mark.parametrize(
    "key", ["attn_implementation", "_attn_implementation", "experts_implementation"]
)
def test_a_configuration_cannot_have_kernels_fetched(key: str) -> None:
    model = build_model(hf(LLAMA | {key: "somebody/kernels"}), 0)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model_type": None}, "model.config: ValueError: Unrecognized model identifier"),
        ({"model_type": "t5"}, "model.config: ValueError: Unrecognized configuration class"),
        ({"hidden_size": 30}, "The hidden size (30) is not a multiple"),
        ({"hidden_size": "x"}, "Field 'hidden_size' expected int"),
        (
            {"max_position_embeddings": 8},
            "model.context = 16 is more than max_position_embeddings = 8",
        ),
    ],
)
def test_a_configuration_that_makes_no_model_is_one_line(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_model(hf(LLAMA | fields), 0)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_evaluation_is_without_dropout() -> None:
    table = {
        "seed": 1,
        "target_tokens": 10_000,
        "model": hf(GPT2).model_dump(),
        "data": {"text": ["unused"]},
        "inner": {},
        "cache_dir": "unused",
        "index": 0,
        "islands": 1,
    }
    trainer = Trainer(TrainerSettings.model_validate(table), torch.device("cpu"))
    held_out = np.arange(200, dtype=np.uint16)
    assert trainer.held_out_loss(held_out) == trainer.held_out_loss(held_out)
    assert trainer.part.module.training


def test_the_tensor_plan_is_transformers_own() -> None:
    plan = tensor_plan(build_model(hf(LLAMA), 0), 2)
    assert "model.layers.*.self_attn.q_proj" in plan
    assert "model.layers.*.mlp.down_proj" in plan


@pytest.mark.parametrize(
    ("fields", "ranks", "said"),
    [
        (LLAMA, 3, "island.mesh: tensor = 3 does not divide num_attention_heads = 4"),
        (LLAMA, 4, "island.mesh: tensor = 4 does not divide num_key_value_heads = 2"),
        (LLAMA | {"intermediate_size": 49}, 2, "tensor = 2 does not divide intermediate_size = 49"),
        (GPT2, 2, "island.mesh.tensor: transformers has no plan for GPT2LMHeadModel"),
        (LLAMA | {"model_type": "qwen3"}, 2, "style 'replicated_with_grad_allreduce' of"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(
    fields: dict[str, Any], ranks: int, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        tensor_plan(build_model(hf(fields), 0), ranks)
    assert said in str(caught.value)
