"""LoRA by peft: the adapters travel, the frozen base does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from node.attach import attach
from node.edge_messages import Boundary, Hello, Message, Stop
from node.parameters import trained_parameters
from tests.unit.scripted_daemon import Daemon

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

torch.set_num_threads(1)

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is dep:FutureWarning")

Q, V = (f"base_model.model.model.layers.0.self_attn.{name}_proj" for name in "qv")


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    base = transformers.LlamaForCausalLM(config)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(base, lora)


@pytest.fixture
def daemon(model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    monkeypatch.setenv("ATOLL_SOCKET", str(tmp_path / "s"))
    daemon = Daemon(tmp_path / "s", model)
    daemon.anchor(0)[:] = 0.125
    yield daemon
    daemon.close()


def test_only_the_adapters_are_trained_under_the_names_that_peft_gives(model: nn.Module) -> None:
    assert {name: tuple(p.shape) for name, p in trained_parameters(model).items()} == {
        f"{Q}.lora_A.default.weight": (2, 8),
        f"{Q}.lora_B.default.weight": (8, 2),
        f"{V}.lora_A.default.weight": (2, 8),
        f"{V}.lora_B.default.weight": (8, 2),
    }


@pytest.mark.parametrize("whole", [False, True], ids=["adapters alone", "all parameters"])
def test_only_the_adapters_travel_and_only_they_move(
    model: nn.Module, daemon: Daemon, whole: bool
) -> None:
    """Optimizers are often given the frozen parameters as well; they do not move them."""
    snapshots: list[np.ndarray] = []

    def stop(daemon: Daemon, boundary: Boundary) -> Message:
        snapshots.append(daemon.snapshot.copy())
        return Stop("enough")

    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    daemon.answers = [stop]
    daemon.start()
    given = model.parameters() if whole else trained_parameters(model).values()
    optimizer = torch.optim.SGD(list(given), lr=0.1)
    island = attach(model, optimizer)
    assert all(bool((p == 0.125).all()) for p in trained_parameters(model).values())
    tokens = torch.arange(8).view(1, 8)
    for _ in range(2):
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        island.step(tokens=8)
    island.close()
    daemon.join()
    hello = daemon.heard[0]
    assert isinstance(hello, Hello)
    assert [t.name for t in hello.layout] == list(trained_parameters(model))
    trained = torch.cat([p.detach().flatten() for p in trained_parameters(model).values()])
    assert torch.equal(torch.from_numpy(snapshots[0]), trained)
    assert bool((trained != 0.125).any())
    assert all(torch.equal(p, frozen[n]) for n, p in model.named_parameters() if n in frozen)
