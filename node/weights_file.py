"""Weights to start from: a safetensors file, or a directory of them, read without torch.

A directory is Hugging Face's: `model.safetensors.index.json` says which files hold which tensors; without
one, all its *.safetensors together. Tensors come in the order that `atoll.save_start` noted in the file's
metadata, else as they lie in the file (the format sorts by dtype and name).

Invariant: what `StoredTensor.read` returns is fp32, finite, and exactly what stands in the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import safetensors

from outer_optimizer.transform import FloatArray
from protocol.errors import ConfigError
from protocol.layout import TensorLayout

ORDER = "atoll.order"  # metadata key: JSON list of the tensors' names
INDEX = "model.safetensors.index.json"
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # those that fp32 holds exactly

Metadata = Mapping[str, str]


@dataclass(frozen=True)
class StoredTensor:
    """`dtype` in the file's own words; `offset` in bytes from the beginning of `file`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    offset: int

    @property
    def layout(self) -> TensorLayout:
        return TensorLayout(self.name, self.shape, DTYPES.get(self.dtype, self.dtype))

    def read(self) -> FloatArray:
        """Raises ConfigError for a dtype that fp32 cannot hold, and for values that are not finite."""
        if self.dtype not in DTYPES:
            raise ConfigError(
                f"{self.file}: {self.name} is {self.dtype}: save it as {' or '.join(DTYPES)}"
            )
        values = self._values()
        if not np.isfinite(values).all():
            raise ConfigError(f"{self.file}: {self.name} holds values that are not finite")
        return values

    def _values(self) -> FloatArray:
        if self.dtype == "BF16":  # the upper half of an fp32
            return (self._raw("<u2").astype(np.uint32) << 16).view(np.float32)
        return self._raw("<f2" if self.dtype == "F16" else "<f4").astype(np.float32)

    def _raw(self, dtype: str) -> npt.NDArray[Any]:
        count = math.prod(self.shape)
        flat = np.fromfile(self.file, dtype, count, offset=self.offset)
        return flat.reshape(self.shape)


def open_weights(source: Path) -> dict[str, StoredTensor]:
    """Name -> tensor, in layout order. Raises ConfigError if anything is missing or stands there twice."""
    tensors: dict[str, StoredTensor] = {}
    for file in _files(source):
        for tensor in _in_order(file):
            if tensor.name in tensors:
                raise ConfigError(
                    f"{source}: {tensor.name} stands in {tensors[tensor.name].file.name} and in "
                    f"{file.name}: give one file, or take the other away"
                )
            tensors[tensor.name] = tensor
    if not tensors:
        raise ConfigError(f"{source}: holds no tensors")
    _check_index(source, tensors)
    return tensors


def _files(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise ConfigError(f"--weights {source}: no such file or directory")
    index = _index(source)
    files = sorted(source / name for name in set(index.values())) or sorted(
        source.glob("*.safetensors")
    )
    if not files:
        raise ConfigError(f"{source}: holds no *.safetensors (other formats can run code)")
    return files


def _index(folder: Path) -> dict[str, str]:
    """Tensor -> file of a model that is saved in several; empty without an index."""
    path = folder / INDEX
    if not path.is_file():
        return {}
    try:
        table = _json(path, path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    index = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(index, dict) or not index:
        raise ConfigError(f"{path}: has no weight_map")
    for name in index.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise ConfigError(f"{path}: weight_map names {name!r}, which is no file beside it")
    return cast(dict[str, str], index)


def _check_index(source: Path, tensors: Mapping[str, StoredTensor]) -> None:
    for name, file in _index(source).items() if source.is_dir() else ():
        if name not in tensors or tensors[name].file.name != file:
            raise ConfigError(f"{source / INDEX}: {name} is not in {file}, where it should be")


def _in_order(file: Path) -> Iterator[StoredTensor]:
    stored, metadata = _header(file)
    names = _order(file, metadata, list(stored))
    return (stored[name] for name in names)


def _header(file: Path) -> tuple[dict[str, StoredTensor], Metadata]:
    """The library checks the header: sizes, bounds, overlaps. Offsets are then read from it."""
    try:
        with safetensors.safe_open(file, framework="numpy") as opened:
            names, metadata = opened.offset_keys(), opened.metadata() or {}
        with open(file, "rb") as raw:
            size = int.from_bytes(raw.read(8), "little")
            table = json.loads(raw.read(size))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror or error}") from None
    except safetensors.SafetensorError as error:
        raise ConfigError(f"{file}: not a safetensors file: {error}") from None
    stored = {
        name: StoredTensor(
            name,
            tuple(table[name]["shape"]),
            table[name]["dtype"],
            file,
            8 + size + table[name]["data_offsets"][0],
        )
        for name in names
    }
    return stored, metadata


def _order(file: Path, metadata: Metadata, names: Sequence[str]) -> Sequence[str]:
    if ORDER not in metadata:
        return names
    order = _json(file, metadata[ORDER].encode())
    if not isinstance(order, list) or sorted(map(str, order)) != sorted(names):
        raise ConfigError(f"{file}: its {ORDER} does not list its tensors: save it again")
    return [str(name) for name in order]


def _json(path: Path, data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
