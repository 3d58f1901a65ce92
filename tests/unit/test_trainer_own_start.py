"""`atoll.save_start`: what it writes is the layout that `attach` will see, in the same order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import atoll
from node.parameters import layout_of, trained_parameters
from node.start_state import write_own_start
from node.weights_file import open_weights
from protocol.errors import ConfigError

torch.set_num_threads(1)


class Odd(nn.Module):
    """Of all that a layout must get right: order, tie, frozen part, two dtypes, a scalar, one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.z = nn.Embedding(5, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.half = nn.Linear(4, 3).bfloat16()
        self.scale = nn.Parameter(torch.tensor(0.5))
        both = torch.randn(2, 6)
        self.b, self.a = nn.Parameter(both[0]), nn.Parameter(both[1])
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.z.weight
        self.register_buffer("steps", torch.ones(3))


def test_the_start_state_has_the_layout_and_the_values_of_the_model(tmp_path: Path) -> None:
    model, path = Odd(), tmp_path / "own.safetensors"
    atoll.save_start(model, path)
    parameters = trained_parameters(model)
    assert write_own_start(path, tmp_path / "start.safetensors") == layout_of(parameters)
    for name, tensor in open_weights(path).items():
        assert torch.equal(torch.from_numpy(tensor.read()), parameters[name].detach().float())


def test_a_list_of_modules_is_one_layout_and_wrappers_leave_no_trace(tmp_path: Path) -> None:
    first, second = nn.Module(), nn.Module()
    first.one, second.two = nn.Linear(2, 3), torch.compile(nn.Linear(3, 2), backend="eager")
    atoll.save_start([first, second], str(tmp_path / "own.safetensors"))
    names = list(open_weights(tmp_path / "own.safetensors"))
    assert names == ["one.weight", "one.bias", "two.weight", "two.bias"]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (nn.Linear(2, 2).half(), "weight: is torch.float16: trainable parameters of a run are"),
        (nn.Linear(2, 2).double(), "weight: is torch.float64: "),
        (nn.Linear(2, 2, device="meta"), "weight: has no values yet"),
        (nn.Linear(2, 2).requires_grad_(False), "the model has no trainable parameter"),
        (nn.ReLU(), "the model has no trainable parameter"),
    ],
)
def test_a_model_that_no_run_can_start_from_is_refused(
    tmp_path: Path, model: nn.Module, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        atoll.save_start(model, tmp_path / "own.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no/own\.safetensors: its folder does not exist"):
        atoll.save_start(nn.Linear(2, 2), tmp_path / "no" / "own.safetensors")
