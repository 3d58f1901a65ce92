"""This island's copy of the agreed state: anchor and outer-optimizer state of every fragment, fp32.

A round is computed into spare buffers (`stage`) and becomes visible by a swap (`swap`), so a round that
fails leaves nothing half-applied. `root` proves the state: a leaf is BLAKE3(anchor cell ‖ outer-state
cell). Everything here is separately rounded NumPy arithmetic: the same bits on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors
from safetensors.numpy import save

from outer_optimizer.codec import Codec
from outer_optimizer.digest import state_digest
from outer_optimizer.finite import require_finite
from outer_optimizer.transform import FloatArray, Hyper, OuterTransform, State
from protocol.errors import InvariantBroken
from protocol.layout import Cell, Fragment, Layout
from protocol.merkle import leaf, root
from protocol.messages import Digest
from protocol.state_dir import write_atomically


@dataclass
class _Buffers:
    anchor: FloatArray
    state: State

    @staticmethod
    def empty(values: int, arrays: int) -> _Buffers:
        return _Buffers(
            np.zeros(values, np.float32),
            tuple(np.zeros(values, np.float32) for _ in range(arrays)),
        )


class Replica:
    def __init__(self, layout: Layout, transform: OuterTransform, codec: Codec) -> None:
        self._layout, self._transform, self._codec = layout, transform, codec
        arrays = len(transform.state_names)
        self._current = [_Buffers.empty(f.values, arrays) for f in layout.fragments]
        self._spare = [_Buffers.empty(f.values, arrays) for f in layout.fragments]
        for buffers in self._current:
            transform.init(buffers.state)
        self.rounds = [0] * len(layout.fragments)

    def anchor(self, fragment: int) -> FloatArray:
        """The agreed parameters. Read only; valid until the next swap."""
        return self._current[fragment].anchor

    def root(self, fragment: int) -> Digest:
        buffers = self._current[fragment]
        cells = self._layout.fragments[fragment].cells
        return root([_state_leaf(buffers, cell) for cell in cells])

    def stage(self, fragment: int, reduced: Sequence[bytes], hyper: Hyper) -> Digest:
        """Computes the next anchor into the spare buffer; returns the root it would have.

        Raises NonFinite if any value is not finite, BadEncoding if a cell does not decode.
        """
        old, new = self._current[fragment], self._spare[fragment]
        leaves = []
        for cell, data in zip(self._layout.fragments[fragment].cells, reduced, strict=True):
            at = slice(cell.start, cell.start + cell.values)
            gradient = np.empty(cell.values, np.float32)
            self._codec.decode(data, cell.lengths, gradient)
            new_state = tuple(array[at] for array in new.state)
            self._transform.update(
                old.anchor[at],
                gradient,
                tuple(array[at] for array in old.state),
                hyper,
                new.anchor[at],
                new_state,
            )
            for array in (new.anchor[at], *new_state):
                require_finite(array, "the new anchor")
            leaves.append(_state_leaf(new, cell))
        return root(leaves)

    def swap(self, fragment: int, round_: int) -> None:
        """The staged anchor becomes the agreed one."""
        current, spare = self._current[fragment], self._spare[fragment]
        self._current[fragment], self._spare[fragment] = spare, current
        self.rounds[fragment] = round_

    def load_anchor(self, fragment: int, first_cell: int, values: FloatArray) -> None:
        """Start state, from a donor: fills the anchor from the start of a cell on."""
        start = self._layout.fragments[fragment].cells[first_cell].start
        self._current[fragment].anchor[start : start + values.size] = values

    def save(self, path: Path) -> None:
        """Snapshot of all fragments, atomic and fsynced."""
        metadata = {"rounds": ",".join(map(str, self.rounds))}
        tensors = {
            f"{number}.{name}": array
            for number, buffers in enumerate(self._current)
            for name, array in zip(self._array_names, (buffers.anchor, *buffers.state), strict=True)
        }
        write_atomically(path, save(tensors, metadata))

    def restore(self, path: Path) -> None:
        """Raises InvariantBroken unless the file is a whole snapshot of this run's layout and optimizer."""
        expected = {f"{n}.{name}" for n in range(len(self.rounds)) for name in self._array_names}
        try:
            with safetensors.safe_open(path, framework="numpy") as file:
                rounds = [int(r) for r in (file.metadata() or {}).get("rounds", "").split(",")]
                if set(file.keys()) != expected or len(rounds) != len(self.rounds):
                    raise ValueError("it holds other arrays")
                for number, buffers in enumerate(self._current):
                    arrays = (buffers.anchor, *buffers.state)
                    for name, array in zip(self._array_names, arrays, strict=True):
                        _copy(file.get_tensor(f"{number}.{name}"), array)
        except (
            ValueError,
            TypeError,
            AttributeError,
            OSError,
            safetensors.SafetensorError,
        ) as error:
            raise InvariantBroken(
                f"{path}: not a snapshot of this run ({error}): remove it to start from the run's own"
            ) from None
        self.rounds = rounds

    @property
    def _array_names(self) -> tuple[str, ...]:
        return ("anchor", *self._transform.state_names)

    def named_tensors(self) -> dict[str, FloatArray]:
        """The anchor as the model's parameters, in their own shapes."""
        return {
            name: values
            for fragment, buffers in zip(self._layout.fragments, self._current, strict=True)
            for name, values in tensors_of(fragment, buffers.anchor).items()
        }


def tensors_of(fragment: Fragment, flat: FloatArray) -> dict[str, FloatArray]:
    """Views of a fragment's flat vector, by parameter name."""
    return {
        tensor.name: flat[offset : offset + tensor.values].reshape(tensor.shape)
        for tensor, offset in zip(fragment.tensors, fragment.offsets, strict=True)
    }


def _state_leaf(buffers: _Buffers, cell: Cell) -> Digest:
    at = slice(cell.start, cell.start + cell.values)
    return leaf(state_digest(buffers.anchor[at], tuple(array[at] for array in buffers.state)))


def _copy(source: FloatArray, target: FloatArray) -> None:
    if source.shape != target.shape or source.dtype != np.float32:
        raise ValueError(
            f"an array of {source.shape} {source.dtype} in place of {target.shape} float32"
        )
    np.copyto(target, source)
