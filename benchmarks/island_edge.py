"""What being an island costs a training loop: away from an edge, at one, and handing a snapshot over.

    python benchmarks/island_edge.py --json benchmarks/results/island_edge.json

    step       island.step() away from an edge, microseconds
    go on      island.step() at an edge of a tiny fragment that has nothing to apply, milliseconds
    one rank   writing the snapshot of a fragment that one rank holds, against a warm copy of its bytes
    2 x 2      the same where FSDP and tensor parallelism cut it: each of four ranks at once, against a
               warm copy of what that rank writes

The two sides of a comparison take turns. The daemon is a thread that answers by a script; the socket and
the shared memory are real.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from node.attach import Island, attach
from node.crew import Crew, muster
from node.edge_messages import (
    Apply,
    Boundary,
    FragmentLayout,
    GoOn,
    Hello,
    Message,
    TensorSlot,
    Welcome,
)
from node.fragment_memory import FragmentMemory, places_in
from node.host_group import HostGroup
from node.parameters import hold
from node.shared_buffer import SharedBuffer
from node.trainer_link import TrainerLink
from protocol.layout import TensorLayout, build_layout
from protocol.state_dir import write_atomically

TARGETS = {"step": 20.0, "go on": 2.0, "one rank": 1.3, "2 x 2": 2.0}
RANKS = 4
FAR = 1 << 40

Json = dict[str, Any]


class ScriptedDaemon:
    """One fragment, an edge every `steps`. `applies`: the snapshot comes back as the new anchor."""

    def __init__(self, steps: int, applies: bool = False) -> None:
        self._steps, self._applies = steps, applies
        self._buffers: list[SharedBuffer] = []
        self._slot = 0
        self._folder = tempfile.TemporaryDirectory(prefix="atoll-bench-")
        self._link = TrainerLink(Path(self._folder.name))
        self._thread = threading.Thread(target=lambda: asyncio.run(self._live()), daemon=True)

    def __enter__(self) -> ScriptedDaemon:
        os.environ["ATOLL_SOCKET"] = self._link.path
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """The trainer has closed its end, or never came."""
        os.environ.pop("ATOLL_SOCKET", None)
        self._thread.join(10)
        self._folder.cleanup()

    async def _live(self) -> None:
        inbox: asyncio.Queue[Message | None] = asyncio.Queue()
        serving = asyncio.create_task(self._link.run(inbox.put_nowait))
        while (message := await inbox.get()) is not None:
            if isinstance(message, Hello):
                self._link.turn_to(message.incarnation)
                layout = one_fragment(message.layout)
                self._buffers = [SharedBuffer.create("bench", layout.values) for _ in range(3)]
                await self._link.send(self._welcome(layout), [b.fd for b in self._buffers])
            elif isinstance(message, Boundary):
                await self._link.send(self._answer(message))
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        self._link.close()
        for buffer in self._buffers:
            buffer.close()

    def _welcome(self, layout: FragmentLayout) -> Welcome:
        """The anchor is not zero: a model of zeros would train too fast to be true."""
        generator = np.random.default_rng(1)
        for buffer in self._buffers[1:]:
            buffer.values[:] = generator.standard_normal(layout.values, np.float32) * 0.02
        return Welcome(
            fragments=(layout,),
            anchor_slot=(0,),
            round=0,
            first_step=0,
            next_edge_step=self._steps,
            next_fragment=0,
            committed_tokens=0,
            islands=1,
            index=0,
            evaluate=False,
            warmup_tokens=0,
            target_tokens=FAR,
            min_lr_ratio=1.0,
        )

    def _answer(self, boundary: Boundary) -> Message:
        edge = boundary.step + self._steps
        if not self._applies:
            return GoOn(boundary.sequence, edge, 0)
        self._slot = 1 - self._slot
        np.copyto(self._buffers[1 + self._slot].values, self._buffers[0].values)
        return Apply(
            sequence=boundary.sequence,
            fragment=0,
            round=boundary.sequence,
            ref="snapshot",
            anchor_slot=self._slot,
            next_edge_step=edge,
            next_fragment=0,
            committed_tokens=boundary.tokens,
            islands=1,
            evaluate=False,
            last=False,
        )


def one_fragment(tensors: Sequence[TensorLayout]) -> FragmentLayout:
    (fragment,) = build_layout(tensors, 1, None, 2).fragments
    slots = tuple(
        TensorSlot(tensor.name, offset, tensor.values)
        for tensor, offset in zip(fragment.tensors, fragment.offsets, strict=True)
    )
    return FragmentLayout(fragment.values, slots)


class Block(nn.Module):
    """The weights of a transformer block; nothing is computed with them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)


CUT = {
    "qkv": ColwiseParallel(),
    "out": RowwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}


def blocks(depth: int, width: int) -> nn.Sequential:
    return nn.Sequential(*(Block(width) for _ in range(depth)))


# --- away from an edge, and at one -------------------------------------------------------------


def joined(model: nn.Module) -> Island:
    return attach(model, torch.optim.SGD(model.parameters()))


def timed(function: Callable[[], object], times: int) -> list[float]:
    """Seconds of each call."""
    seconds = []
    for _ in range(times):
        before_s = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - before_s)
    return seconds


def spread(seconds: Sequence[float], unit_s: float) -> Json:
    median, high = np.percentile(seconds, [50, 99]) / unit_s
    return {"median": round(float(median), 3), "p99": round(float(high), 3)}


def measure_step(calls: int) -> Json:
    loss = torch.tensor(1.0)
    with ScriptedDaemon(FAR):
        island = joined(nn.Linear(8, 8))
        seconds = timed(lambda: island.step(tokens=1_024, loss=loss), calls)
        island.close()
    return {"calls": calls, "unit": "us", **spread(seconds, 1e-6)}


def measure_go_on(edges: int) -> Json:
    loss = torch.tensor(1.0)
    with ScriptedDaemon(1):
        island = joined(nn.Linear(8, 8))
        seconds = timed(lambda: island.step(tokens=1_024, loss=loss), edges)
        island.close()
    return {"edges": edges, "unit": "ms", **spread(seconds, 1e-3)}


# --- handing a snapshot over -------------------------------------------------------------------


def memory_of(model: nn.Module, host: HostGroup) -> tuple[FragmentMemory, int, SharedBuffer]:
    """The whole model as one fragment, how many values this rank writes, and its shared vector."""
    held = hold(model, torch.optim.SGD(model.parameters()))
    crew = muster(held.pieces, True, host)
    layout = one_fragment(crew.layout)
    buffer = shared_by_all(layout.values, host)
    boxes, writes = crew.boxes[host.rank], crew.writes[host.rank]
    places = places_in(buffer, layout, boxes, crew.shapes)
    memory = FragmentMemory(held.pieces, writes, [places] * 3)
    return memory, written(crew, host.rank), buffer


def written(crew: Crew, rank: int) -> int:
    return sum(crew.boxes[rank][name].values for name in crew.writes[rank])


def shared_by_all(values: int, host: HostGroup) -> SharedBuffer:
    """Rank 0's buffer, in every rank."""
    if host.rank == 0:
        buffer = SharedBuffer.create("bench", values)
        host.broadcast(f"/proc/{os.getpid()}/fd/{buffer.fd}".encode())
        return buffer
    return SharedBuffer.open(os.open(host.broadcast(b"").decode(), os.O_RDWR), values)


def against_a_copy(memory: FragmentMemory, values: int, times: int, host: HostGroup) -> Json:
    """Both by turns, all ranks at once; medians over the turns, and over the ranks."""
    source, warm = torch.rand(values), torch.rand(values)
    for act in (memory.write_snapshot, lambda: warm.copy_(source)):
        act()
    snapshot_s, copy_s = [], []
    for _ in range(times):
        host.numbers([0.0])
        snapshot_s += timed(memory.write_snapshot, 1)
        host.numbers([0.0])
        copy_s += timed(lambda: warm.copy_(source), 1)
    medians = host.numbers([float(np.median(snapshot_s)), float(np.median(copy_s))])
    snapshot, copy = np.median(medians, axis=0)
    return {
        "mebibytes": round(values * 4 / 2**20, 1),
        "snapshot_ms": round(1e3 * float(snapshot), 2),
        "copy_ms": round(1e3 * float(copy), 2),
        "ratio": round(float(snapshot / copy), 3),
        "turns": times,
    }


def measure_one_rank(depth: int, width: int, times: int) -> Json:
    host = HostGroup()
    memory, values, buffer = memory_of(blocks(depth, width), host)
    result = against_a_copy(memory, values, times, host)
    buffer.close()
    return result


def measure_grid(depth: int, width: int, times: int) -> Json:
    """On four ranks."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    model = blocks(depth, width)
    for block in model:
        parallelize_module(block, mesh["tensor"], CUT)
        fully_shard(block, mesh=mesh["shard"])
    host = HostGroup()
    memory, values, buffer = memory_of(model, host)
    result = against_a_copy(memory, values, times, host)
    buffer.close()
    dist.destroy_process_group()
    return result


def launched_grid(depth: int, width: int, times: int) -> Json:
    """`measure_grid` under torchrun."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--local-addr=127.0.0.1", f"--nproc-per-node={RANKS}"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        own = [__file__, "--grid", *map(str, (depth, width, times)), "--json", str(out)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*torchrun, *own], env=environment, check=True)
        result: Json = json.loads(out.read_bytes())
    return result


# --- the table ---------------------------------------------------------------------------------


def table(results: Json) -> str:
    lines = [f"{'':10} {'measured':46} {'target':>8}"]
    for name, result in results.items():
        if "ratio" in result:
            said = (
                f"{result['ratio']:.2f} x   {result['snapshot_ms']:.1f} ms for "
                f"{result['mebibytes']:g} MiB, copy {result['copy_ms']:.1f} ms"
            )
            unit = "x"
        else:
            unit = result["unit"]
            said = f"{result['median']:g} {unit}   99th percentile {result['p99']:g} {unit}"
        lines.append(f"{name:10} {said:46} {TARGETS[name]:g} {unit}".rstrip())
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="What the edge costs a training loop.")
    parser.add_argument("--small", action="store_true", help="a quick look: small fragment")
    parser.add_argument("--json", type=Path, help="results, as JSON")
    parser.add_argument("--grid", type=int, nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.grid:
        result = measure_grid(*options.grid)
        if os.environ["RANK"] == "0":
            options.json.write_text(json.dumps(result))
        return
    depth, width, times = (2, 256, 5) if options.small else (8, 1_024, 20)
    results = {
        "step": measure_step(10_000),
        "go on": measure_go_on(200 if options.small else 1_000),
        "one rank": measure_one_rank(depth, width, times),
        "2 x 2": launched_grid(depth, width, times),
    }
    if options.json:
        write_atomically(options.json, json.dumps(results, indent=1).encode())
    print(table(results))


if __name__ == "__main__":
    main()
