"""The reduced cells of past rounds, on disk, named by what they are.

One file per reduced root, so two plans of one round can never be mixed up. A file is visible only when it
is complete and fsynced. Snapshot + replay of these files = the exact state.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from protocol.merkle import digest, leaf, root
from protocol.messages import Digest
from protocol.state_dir import write_atomically


class UpdateLog:
    def __init__(self, path: Path) -> None:
        self._path = path
        path.mkdir(exist_ok=True)

    def store(self, reduced_root: Digest, cells: Sequence[bytes]) -> None:
        """Durable when it returns."""
        write_atomically(self._file(reduced_root), b"".join(cells))

    def load(self, reduced_root: Digest, sizes: Sequence[int]) -> list[bytes] | None:
        """Cells as stored, or None if they are not here or damaged (then the file is removed)."""
        try:
            data = self._file(reduced_root).read_bytes()
        except FileNotFoundError:
            return None
        cells, start = [], 0
        for size in sizes:
            cells.append(data[start : start + size])
            start += size
        if start != len(data) or reduced_root_of(cells) != reduced_root:
            os.unlink(self._file(reduced_root))
            return None
        return cells

    def keep_only(self, roots: set[Digest]) -> None:
        """Removes every update that is not in `roots`."""
        names = {self._file(r).name for r in roots}
        for file in self._path.glob("*.cells"):
            if file.name not in names:
                file.unlink()

    def _file(self, reduced_root: Digest) -> Path:
        return self._path / f"{reduced_root.hex()}.cells"


def reduced_root_of(cells: Sequence[bytes]) -> Digest:
    return root([leaf(digest(cell)) for cell in cells])
