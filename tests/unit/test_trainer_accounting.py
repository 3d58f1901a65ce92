from __future__ import annotations

import torch

from node.accounting import flops_per_token, peak_flops, peak_of
from protocol.spec import GptModel, HfModel, MoeModel


def test_flops_of_a_hand_counted_model() -> None:
    model = GptModel(width=8, depth=2, heads=2, context=16, vocab_size=256)
    values = 2 * (12 * 8 * 8 + 2 * 8) + 8 + 2 * 256 * 8
    assert flops_per_token(model, values) == 6 * (values - 256 * 8) + 12 * 2 * 8 * 16


def test_idle_experts_multiply_nothing() -> None:
    shape = {"width": 8, "depth": 1, "heads": 2, "context": 16, "expert_width": 32}
    few = MoeModel(**shape, experts=2, experts_per_token=2)  # type: ignore[arg-type]
    many = MoeModel(**shape, experts=8, experts_per_token=2)  # type: ignore[arg-type]
    assert flops_per_token(many, 100_000 + 6 * 2 * 8 * 32) == flops_per_token(few, 100_000)


def test_a_tied_embedding_is_also_the_head() -> None:
    config = '{"vocab_size": 100, "hidden_size": 10, "num_hidden_layers": 1}'
    model = HfModel(recipe="hf", config=config, context=2)
    tied, own = (flops_per_token(model, 5_000, tied) for tied in (True, False))
    assert tied - own == 6 * 100 * 10


def test_the_longest_known_name_gives_the_peak() -> None:
    assert peak_of("NVIDIA H100 PCIe") == 756e12
    assert peak_of("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_of("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_of("NVIDIA L40S") == 362e12
    assert peak_of("Some other card") is None


def test_the_peak_of_a_cpu_is_unknown() -> None:
    assert peak_flops(torch.device("cpu")) is None
