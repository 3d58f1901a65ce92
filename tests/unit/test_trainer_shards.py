"""Boxes of DTensors that FSDP2 and tensor parallelism have cut unevenly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from node.tiling import Box, writers

CHILD = Path(__file__).with_name("shards_child.py")


def test_rows_that_do_not_divide_have_the_boxes_that_fsdp_gave_them() -> None:
    """Tensor parallelism over 2 cuts first, FSDP2 over 3 what is left, each into runs rounded up.

    That each local tensor has its box's shape is checked where boxes are made.
    """
    done = subprocess.run(
        [sys.executable, "-P", str(CHILD)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    boxes: dict[int, dict[int, Box]] = {}
    for line in done.stdout.splitlines():
        rank, rows, (offset, shape) = json.loads(line)
        boxes.setdefault(rows, {})[rank] = Box(tuple(offset), tuple(shape))
    assert set(boxes) == {7, 13, 19, 50_257}
    for rows, held in boxes.items():
        writers([{"w": held[rank]} for rank in range(6)], {"w": (rows, 1)})  # they tile
        half = -(-rows // 2)
        for rank, box in held.items():
            first, size = (0, half) if rank % 2 == 0 else (half, rows - half)
            step = -(-size // 3)
            mine = range(first, first + size)[rank // 2 * step : (rank // 2 + 1) * step]
            assert box.shape == (len(mine), 1)
            assert not mine or box.offset == (mine.start, 0)
