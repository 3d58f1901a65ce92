"""Weights to start from: read exactly, in order, without torch; every fault one line that names the file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from node.start_state import write_own_start
from node.weights_file import INDEX, ORDER, open_weights
from protocol.errors import ConfigError
from protocol.layout import TensorLayout

Tensors = dict[str, torch.Tensor]


def written(path: Path, tensors: Tensors, order: list[str] | str | None = None) -> Path:
    text = json.dumps(order) if isinstance(order, list) else order
    save_file(tensors, path, metadata=None if text is None else {ORDER: text})
    return path


def read_all(source: Path) -> None:
    for tensor in open_weights(source).values():
        tensor.read()


def fault(source: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_all(source)
    (line,) = str(caught.value).splitlines()
    assert str(source) in line
    return line


# --- values ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_read_is_what_stands_in_the_file(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    special = torch.tensor([0.0, -0.0, 1e-7, -65_504.0, 2.0**-24, 1.5])
    tensors = {
        "a": torch.randn(3, 5).to(dtype),
        "b": special.to(dtype),
        "scalar": torch.tensor(2.5, dtype=dtype),
        "none": torch.zeros(0, 4, dtype=dtype),
    }
    stored = open_weights(written(tmp_path / "w.safetensors", tensors))
    for name, tensor in tensors.items():
        values = stored[name].read()
        assert values.dtype == np.float32
        assert values.shape == tuple(tensor.shape)
        assert values.tobytes() == tensor.float().numpy().tobytes()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_value_that_is_not_finite_is_refused_by_name(
    tmp_path: Path, bad: float, dtype: torch.dtype
) -> None:
    tensors = {"fine": torch.ones(3), "layer.bad": torch.tensor([1.0, bad], dtype=dtype)}
    line = fault(written(tmp_path / "w.safetensors", tensors))
    assert "layer.bad holds values that are not finite" in line


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.bool, torch.float8_e4m3fn])
def test_a_dtype_that_fp32_does_not_hold_is_refused_by_name(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    line = fault(written(tmp_path / "w.safetensors", {"steps": torch.ones(2).to(dtype)}))
    assert "steps is " in line
    assert "save it as F32 or BF16 or F16" in line


# --- order and files ---------------------------------------------------------------------------


def test_the_order_noted_in_the_file_counts_and_else_that_of_the_file(tmp_path: Path) -> None:
    tensors = {"z": torch.ones(2), "a": torch.ones(2).bfloat16(), "m": torch.ones(2)}
    assert list(open_weights(written(tmp_path / "1.safetensors", tensors))) == ["m", "z", "a"]
    noted = written(tmp_path / "2.safetensors", tensors, ["z", "a", "m"])
    assert list(open_weights(noted)) == ["z", "a", "m"]


@pytest.mark.parametrize("order", [["a"], ["a", "b", "c"], ["a", "a"], "{}", "[", "[1, 2]"])
def test_a_noted_order_that_is_not_the_files_is_refused(
    tmp_path: Path, order: list[str] | str
) -> None:
    tensors = {"a": torch.ones(2), "b": torch.ones(2)}
    fault(written(tmp_path / "w.safetensors", tensors, order))


def indexed(folder: Path, **files: list[str]) -> Path:
    """A directory as `save_pretrained` leaves it when a model is saved in several files."""
    for file, names in files.items():
        save_file({name: torch.ones(2) for name in names}, folder / f"{file}.safetensors")
    index = {name: f"{file}.safetensors" for file, names in files.items() for name in names}
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    return folder


def test_a_directory_with_an_index_is_read_from_the_files_it_names(tmp_path: Path) -> None:
    indexed(tmp_path, one=["b", "c"], two=["a"])
    save_file({"a": torch.zeros(9)}, tmp_path / "consolidated.safetensors")
    stored = open_weights(tmp_path)
    assert list(stored) == ["b", "c", "a"]
    assert stored["a"].shape == (2,)


def test_a_directory_without_an_index_is_all_its_files(tmp_path: Path) -> None:
    save_file({"b": torch.ones(2)}, tmp_path / "1.safetensors")
    save_file({"a": torch.ones(2)}, tmp_path / "2.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert list(open_weights(tmp_path)) == ["b", "a"]
    save_file({"a": torch.ones(2)}, tmp_path / "3.safetensors")
    assert "a stands in 2.safetensors and in 3.safetensors" in fault(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not valid JSON"),
        ("[]", "has no weight_map"),
        ("{}", "has no weight_map"),
        ('{"weight_map": {}}', "has no weight_map"),
        ('{"weight_map": {"a": "../one.safetensors"}}', "no file beside it"),
        ('{"weight_map": {"a": 1}}', "no file beside it"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "cannot be read"),
        ('{"weight_map": {"z": "one.safetensors"}}', "z is not in one.safetensors"),
    ],
)
def test_a_damaged_index_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    indexed(tmp_path, one=["a"])
    (tmp_path / INDEX).write_text(text)
    assert said in fault(tmp_path)


def test_what_is_no_safetensors_is_one_line(tmp_path: Path) -> None:
    assert "no such file or directory" in fault(tmp_path / "nothing")
    assert "holds no *.safetensors" in fault(tmp_path)
    path = tmp_path / "w.safetensors"
    for data in (b"", b"\x80\x02}q\x00.", (1 << 60).to_bytes(8, "little") + b"{}"):
        path.write_bytes(data)
        assert "not a safetensors file" in fault(path)
    written(path, {"a": torch.ones(100)})
    path.write_bytes(path.read_bytes()[:-4])
    assert "not a safetensors file" in fault(path)
    written(path, {})
    assert "holds no tensors" in fault(path)


# --- the start state of an own model -----------------------------------------------------------


def test_an_own_start_keeps_order_and_dtype_in_the_layout_and_fp32_in_the_file(
    tmp_path: Path,
) -> None:
    tensors = {"z": torch.randn(2, 3), "a": torch.randn(4).bfloat16(), "s": torch.tensor(1.0)}
    weights = written(tmp_path / "w.safetensors", tensors, list(tensors))
    out = tmp_path / "start.safetensors"
    assert write_own_start(weights, out) == (
        TensorLayout("z", (2, 3), "float32"),
        TensorLayout("a", (4,), "bfloat16"),
        TensorLayout("s", (), "float32"),
    )
    made = load_file(out)
    assert made.keys() == tensors.keys()
    assert all(torch.equal(made[name], tensor.float()) for name, tensor in tensors.items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.int64, torch.float64])
def test_an_own_start_of_another_dtype_is_refused_by_name(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    weights = written(
        tmp_path / "w.safetensors", {"a": torch.ones(2), "b": torch.ones(2).to(dtype)}
    )
    with pytest.raises(ConfigError, match=r"b is [FI]\d\d: parameters of a run are F32 or BF16"):
        write_own_start(weights, tmp_path / "start.safetensors")
    assert not (tmp_path / "start.safetensors").exists()


def test_an_own_start_needs_no_torch(tmp_path: Path) -> None:
    weights = written(tmp_path / "w.safetensors", {"a": torch.ones(2).bfloat16()})
    program = (
        "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None\n"
        "from node.start_state import main; sys.exit(main())"
    )
    out = tmp_path / "start.safetensors"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, str(out), "--weights", str(weights)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert load_file(out)["a"].tolist() == [1.0, 1.0]
