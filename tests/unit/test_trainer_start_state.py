"""A recipe's start state out of given weights: exactly its parameters, or one line on what differs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from node.model import build_model
from node.settings import TrainerSettings
from node.start_state import write_start_state
from protocol.errors import ConfigError

torch.set_num_threads(1)

SETTINGS = TrainerSettings.model_validate(
    {
        "seed": 1,
        "target_tokens": 10_000,
        "model": {"width": 16, "depth": 1, "heads": 2, "context": 8},
        "data": {"text": ["unused"]},
        "inner": {},
        "cache_dir": "unused",
        "index": 0,
        "islands": 1,
    }
)
HEAD = "head.weight"


def trained() -> dict[str, torch.Tensor]:
    model = build_model(SETTINGS.model, 7)
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def start_from(folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    save_file(tensors, folder / "w.safetensors")
    layout = write_start_state(SETTINGS, folder / "start.safetensors", folder / "w.safetensors")
    assert {tensor.dtype for tensor in layout} == {"float32"}
    return load_file(folder / "start.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_start_state_is_the_given_weights_in_fp32_and_the_recipes_order(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    given = {name: tensor.to(dtype) for name, tensor in trained().items()}
    made = start_from(tmp_path, dict(reversed(given.items())))
    assert made.keys() == given.keys()
    assert all(torch.equal(made[name], tensor.float()) for name, tensor in given.items())
    layout = write_start_state(SETTINGS, tmp_path / "a.safetensors", tmp_path / "w.safetensors")
    assert layout == write_start_state(SETTINGS, tmp_path / "b.safetensors")


def changed(**tensors: torch.Tensor | None) -> dict[str, torch.Tensor]:
    table = trained() | {name.replace("__", "."): value for name, value in tensors.items()}
    return {name: tensor for name, tensor in table.items() if tensor is not None}


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (
            changed(norm__weight=None),
            "parameter 7: they lack norm.weight [16] float32",
        ),
        (
            changed(norm__weight=torch.ones(17)),
            "parameter 7: they have norm.weight [17] float32, the model has norm.weight [16] float32",
        ),
        (
            changed(norm__weight=None, norm__scale=torch.ones(16).bfloat16()),
            "parameter 7: they have norm.scale [16] bfloat16, the model has norm.weight [16] float32",
        ),
        (
            changed(norm__weight=torch.ones(16, dtype=torch.int32)),
            "parameter 7: they have norm.weight [16] I32, the model has norm.weight [16] float32",
        ),
        (changed(extra=torch.ones(2)), "they have extra [2] float32, which the model lacks"),
        (
            changed(norm__weight=torch.full((16,), torch.nan)),
            "norm.weight holds values that are not finite",
        ),
    ],
    ids=["missing", "shape", "name", "integers", "extra", "nan"],
)
def test_the_first_parameter_that_differs_is_named(
    tmp_path: Path, tensors: dict[str, torch.Tensor], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        start_from(tmp_path, tensors)
    assert str(caught.value).endswith(said)
    assert str(tmp_path / "w.safetensors") in str(caught.value)
    assert not (tmp_path / "start.safetensors").exists()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize("names", [("embedding",), ("head",), ("embedding", "head")])
def test_a_second_name_of_a_tied_parameter_counts_only_where_the_first_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    monkeypatch.setattr("node.model.build_model", lambda model, seed: Tied())
    values = {"embedding": torch.randn(5, 4), "head": torch.randn(5, 4)}
    made = start_from(tmp_path, {f"{name}.weight": values[name] for name in names})
    assert made.keys() == {"embedding.weight"}
    assert torch.equal(made["embedding.weight"], values[names[0]])


def test_what_transformers_has_saved_in_shards_is_read_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    saved = LlamaForCausalLM(config).bfloat16()
    saved.save_pretrained(tmp_path / "model", max_shard_size="4KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 1
    monkeypatch.setattr("node.model.build_model", lambda model, seed: LlamaForCausalLM(config))
    layout = write_start_state(SETTINGS, tmp_path / "start.safetensors", tmp_path / "model")
    expected = {name: parameter.detach().float() for name, parameter in saved.named_parameters()}
    assert [tensor.name for tensor in layout] == list(expected)
    made = load_file(tmp_path / "start.safetensors")
    assert all(torch.equal(made[name], tensor) for name, tensor in expected.items())
