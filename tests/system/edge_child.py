"""Run by test_edge_meshes.py under torchrun: four ranks attach one model after another, each cut otherwise.

    torchrun ... edge_child.py CASES.json RESULTS.jsonl

Rank 0 has a scripted daemon beside it, in a thread: the real TrainerLink, real shared memory. What the
parameters should be is worked out on whole tensors by every rank (`Truth`), and compared bit for bit with
what DTensor itself puts together: none of the code under test has a part in it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from node.attach import Island, attach
from node.crew import muster
from node.edge_link import DaemonLost
from node.edge_messages import (
    Apply,
    Boundary,
    FragmentLayout,
    GoOn,
    Hello,
    Message,
    Refused,
    Stop,
    TensorSlot,
    Welcome,
)
from node.host_group import HostGroup
from node.parameters import hold
from node.shards import view_of
from node.shared_buffer import SharedBuffer
from node.trainer_link import TrainerLink
from protocol.errors import RunMismatch
from protocol.layout import TensorLayout, build_layout

RANKS = 4
SHORT_TIMEOUT_S, FROZEN_S = 5.0, 8.0
SENTINEL = np.float32(-1.2345e37)
GROWTH = (
    1.25  # what a step of "training" multiplies with: the same bits whichever way a tensor is cut
)
SPECIAL = [-0.0, float("inf"), float("-inf"), 1e-45, -3.4028235e38, 1e-39]

Specs = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def values(name: str, shape: Sequence[int], generation: int) -> Tensor:
    """The anchor number `generation` of one tensor; the first has values that only a copy keeps."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + generation)
    flat = torch.randn(shape, generator=generator).reshape(-1)
    if generation == 0:
        special = torch.tensor(SPECIAL)[: flat.numel()]
        flat[: len(special)] = special
    return flat.view(tuple(shape))


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(bits(a), bits(b))


# --- the daemon --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Edge:
    """What the daemon does at one boundary: a reference and an anchor, "go on", "stop", or "vanish"."""

    fragment: int
    kind: str
    generation: int = 0


def plan_of(fragments: int) -> list[Edge]:
    """Each fragment three times over, then two boundaries with nothing to apply."""
    refs = ("snapshot", "anchor", "reset")
    edges = [Edge(n % fragments, refs[n // fragments], 1 + n) for n in range(3 * fragments)]
    return [*edges, Edge(0, "go on"), Edge(0, "stop")]


class Daemon:
    """Serves one trainer by `plan`; `snapshots` and `boundaries` are what it has been told."""

    def __init__(self, fragments: int, plan: Sequence[Edge], frozen_s: float = 0.0) -> None:
        self._fragments, self._plan, self._frozen_s = fragments, plan, frozen_s
        self.boundaries: list[Boundary] = []
        self.snapshots: list[np.ndarray] = []
        self.layouts: tuple[FragmentLayout, ...] = ()
        self._buffers: list[list[SharedBuffer]] = []
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._slots = [0] * fragments
        self._folder = tempfile.TemporaryDirectory(prefix="atoll-test-")
        self._link = TrainerLink(Path(self._folder.name))
        self.path = self._link.path
        self._thread = threading.Thread(target=lambda: asyncio.run(self._live()), daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join(30)
        if self._thread.is_alive():
            raise AssertionError("the scripted daemon has not ended")
        self._folder.cleanup()

    @property
    def names(self) -> list[list[str]]:
        return [[slot.name for slot in layout.tensors] for layout in self.layouts]

    async def _live(self) -> None:
        inbox: asyncio.Queue[Message | None] = asyncio.Queue()
        serving = asyncio.create_task(self._link.run(inbox.put_nowait))
        while (message := await inbox.get()) is not None:
            if isinstance(message, Hello):
                self._link.turn_to(message.incarnation)
                if not self._plan:
                    await self._link.send(Refused("the script wants nobody"))
                    continue
                self._cut(message.layout)
                descriptors = [buffer.fd for three in self._buffers for buffer in three]
                await self._link.send(self._welcome(), descriptors)
            elif isinstance(message, Boundary):
                if self._plan[len(self.boundaries)].kind == "vanish":
                    break
                await self._freeze()
                await self._link.send(self._answer(message))
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        self._link.close()
        for buffer in (buffer for three in self._buffers for buffer in three):
            buffer.close()

    def _cut(self, tensors: Sequence[TensorLayout]) -> None:
        self._shapes = {tensor.name: tensor.shape for tensor in tensors}
        for fragment in build_layout(tensors, self._fragments, None, 2).fragments:
            slots = tuple(
                TensorSlot(tensor.name, offset, tensor.values)
                for tensor, offset in zip(fragment.tensors, fragment.offsets, strict=True)
            )
            self.layouts += (FragmentLayout(fragment.values, slots),)
            self._buffers.append([SharedBuffer.create("test", fragment.values) for _ in range(3)])
            self._write(len(self.layouts) - 1, slot=0, generation=0)
            self._buffers[-1][0].values[:] = SENTINEL

    def _write(self, fragment: int, slot: int, generation: int) -> None:
        flat = self._buffers[fragment][1 + slot].values
        for name, start, size in map(_slot, self.layouts[fragment].tensors):
            values_of = values(name, self._shapes[name], generation)
            flat[start : start + size] = values_of.reshape(-1).numpy()

    def _welcome(self) -> Welcome:
        return Welcome(
            fragments=self.layouts,
            anchor_slot=tuple(self._slots),
            round=0,
            first_step=0,
            next_edge_step=1,
            next_fragment=self._plan[0].fragment,
            committed_tokens=0,
            islands=1,
            index=0,
            evaluate=False,
            warmup_tokens=0,
            target_tokens=1_000,
            min_lr_ratio=0.1,
        )

    async def _freeze(self) -> None:
        """Answers late, once: the trainer's ranks have to hold out."""
        thawed = asyncio.Event()
        asyncio.get_running_loop().call_later(self._frozen_s, thawed.set)
        await thawed.wait()
        self._frozen_s = 0.0

    def _answer(self, boundary: Boundary) -> Message:
        edge = self._plan[len(self.boundaries)]
        self.boundaries.append(boundary)
        snapshot = self._buffers[boundary.fragment][0].values
        self.snapshots.append(snapshot.copy())
        snapshot[:] = SENTINEL
        if edge.kind == "stop":
            return Stop("the script ends here")
        following = self._plan[len(self.boundaries)].fragment
        if edge.kind == "go on":
            return GoOn(boundary.sequence, boundary.step + 2, following)
        slot = self._slots[edge.fragment] = 1 - self._slots[edge.fragment]
        self._write(edge.fragment, slot, edge.generation)
        return Apply(
            sequence=boundary.sequence,
            fragment=edge.fragment,
            round=len(self.boundaries),
            ref=edge.kind,  # type: ignore[arg-type]
            anchor_slot=slot,
            next_edge_step=boundary.step + 1,
            next_fragment=following,
            committed_tokens=0,
            islands=1,
            evaluate=False,
            last=False,
        )


def _slot(slot: TensorSlot) -> tuple[str, int, int]:
    return slot.name, slot.offset, slot.values


# --- what should come out ----------------------------------------------------------------------


class Truth:
    """Whole parameters and anchors of the run, as they should be."""

    def __init__(self, specs: Specs) -> None:
        self._specs = specs
        self.anchors = {name: values(name, shape, 0) for name, (shape, _) in specs.items()}
        self.parameters = {
            n: self.anchors[n].to(dtype, copy=True) for n, (_, dtype) in specs.items()
        }

    def grow(self) -> None:
        for parameter in self.parameters.values():
            parameter.mul_(GROWTH)

    def snapshot(self, layout: FragmentLayout) -> np.ndarray:
        flat = np.full(layout.values, np.nan, np.float32)
        for name, start, size in map(_slot, layout.tensors):
            flat[start : start + size] = self.parameters[name].float().reshape(-1).numpy()
        return flat

    def apply(self, names: Iterable[str], edge: Edge) -> None:
        for name in names:
            shape, dtype = self._specs[name]
            old, new = self.anchors[name], values(name, shape, edge.generation)
            if edge.kind == "anchor":
                self.parameters[name].add_(new - old)
            else:
                self.parameters[name] = new.to(dtype, copy=True)
            self.anchors[name] = new


# --- four ranks and a model --------------------------------------------------------------------


@dataclass
class World:
    host: HostGroup
    faults: list[str] = field(default_factory=list)
    daemon: Daemon | None = None

    @property
    def rank(self) -> int:
        return self.host.rank

    def check(self, holds: bool, claim: str) -> None:
        if not holds:
            self.faults.append(f"rank {self.rank}: not so: {claim}")

    def from_rank_0(self, value: Any) -> Any:
        return json.loads(self.host.broadcast(json.dumps(value).encode()))


@dataclass
class Part:
    """What one rank holds: `specs` are of the whole run, `ties` as `attach` takes them.

    `index` = which values of the whole tensor the local ones are, where asking is too slow.
    """

    models: Sequence[nn.Module]
    specs: Specs
    ties: dict[str, str] = field(default_factory=dict)
    index: dict[str, Tensor] = field(default_factory=dict)

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Run's name -> parameter."""
        return {
            self.ties.get(name, name): parameter
            for model in self.models
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        trained = [[p for p in m.parameters() if p.requires_grad] for m in self.models]
        return [torch.optim.SGD(parameters, lr=0.1) for parameters in trained if parameters]

    @property
    def untrained(self) -> dict[str, Tensor]:
        frozen = {n: p for m in self.models for n, p in m.named_parameters() if not p.requires_grad}
        return frozen | {n: b for m in self.models for n, b in m.named_buffers()}


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def joined(world: World, part: Part, plan: Sequence[Edge], **how: Any) -> Island:
    """Attaches; `remote` ranks look for the daemon where it is not."""
    fragments = 1 + max((edge.fragment for edge in plan), default=0)
    remote = how.get("remote", ())
    world.daemon = None
    if world.rank == 0:
        world.daemon = Daemon(fragments, plan, how.get("frozen_s", 0.0))
    path = world.from_rank_0(world.daemon and world.daemon.path)
    os.environ["ATOLL_SOCKET"] = f"{path}.elsewhere" if world.rank in remote else path
    return attach(part.models, part.optimizers, ties=part.ties)


def left(world: World, island: Island) -> None:
    island.close()
    if world.daemon is not None:
        world.daemon.join()


def exercise(world: World, part: Part, remote: Sequence[int], frozen_s: float = 0.0) -> None:
    """A trainer's whole life: anchor taken, every fragment moved by every rule, boundaries without."""
    plan = plan_of(fragments=2)
    untouched = {name: whole(tensor).clone() for name, tensor in part.untrained.items()}
    island = joined(world, part, plan, remote=remote, frozen_s=frozen_s)
    names = world.from_rank_0(world.daemon and world.daemon.names)
    fragmented = [name for group in names for name in group]
    world.check(sorted(fragmented) == sorted(part.specs), "each tensor lies in one fragment")
    truth = Truth(part.specs)
    compare(world, part, truth.parameters, "attach takes the anchor")
    for number, edge in enumerate(plan):
        if edge.kind != "snapshot":  # so that the first round of snapshots is the anchor itself
            grow(part)
            truth.grow()
        written = truth.snapshot(world.daemon.layouts[edge.fragment]) if world.daemon else None
        island.step(tokens=1, loss=float(world.rank))
        if world.daemon is not None and written is not None:
            at = f"boundary {number} ({edge.kind})"
            check_boundary(world, world.daemon, number, written, at)
        if edge.kind == "go on":
            island.step(tokens=1)
            world.check(not island.should_stop, "the step after GoOn is no edge")
        if edge.generation:
            truth.apply(names[edge.fragment], edge)
        compare(world, part, truth.parameters, f"boundary {number} applies {edge.kind!r}")
    world.check(island.should_stop, "Stop ends the loop")
    with island.anchor():
        wanted = {n: truth.anchors[n].to(dtype) for n, (_, dtype) in part.specs.items()}
        compare(world, part, wanted, "anchor() shows the anchor")
    compare(world, part, truth.parameters, "anchor() gives the parameters back")
    for name, tensor in part.untrained.items():
        world.check(same(whole(tensor), untouched[name]), f"{name} is left alone")
    left(world, island)


def grow(part: Part) -> None:
    with torch.no_grad():
        for parameter in part.parameters.values():
            local(parameter).mul_(GROWTH)


def compare(world: World, part: Part, wanted: Mapping[str, Tensor], claim: str) -> None:
    for name, parameter in part.parameters.items():
        if name in part.index:
            holds = same(local(parameter), wanted[name].reshape(-1)[part.index[name]])
        else:
            holds = same(whole(parameter), wanted[name])
        world.check(holds, f"{claim}: {name}")


def check_boundary(world: World, daemon: Daemon, number: int, written: np.ndarray, at: str) -> None:
    """On rank 0: what the daemon was told and shown."""
    boundary, snapshot = daemon.boundaries[number], daemon.snapshots[number]
    world.check((snapshot != SENTINEL).all(), f"{at}: every value of the snapshot is written")
    world.check(snapshot.tobytes() == written.tobytes(), f"{at}: the snapshot is the parameters")
    world.check(boundary.loss == (RANKS - 1) / 2, f"{at}: the loss is the ranks' mean")
    world.check(len(boundary.rank_s) == RANKS, f"{at}: each rank's time is told")


def count_writers(world: World, part: Part) -> None:
    held = hold(part.models, part.optimizers, ties=part.ties)
    crew = muster(held.pieces, True, world.host)
    written = []
    for name, shape in crew.shapes.items():
        count = torch.zeros(shape).reshape(-1)
        if name in crew.writes[world.rank]:
            view_of(count, shape, crew.boxes[world.rank][name]).add_(1)
        written.append(count)
    total = torch.cat(written)
    dist.all_reduce(total)
    world.check(bool((total == 1).all()), "every value has exactly one writer")


# --- meshes ------------------------------------------------------------------------------------

UNEVEN: dict[str, tuple[int, ...]] = {
    "wide": (194, 6),
    "flat": (202,),
    "three": (3, 5),
    "one": (1, 4),
    "none": (0, 3),
    "narrow": (9, 1),
}
PLAIN: dict[str, tuple[int, ...]] = {"scalar": (), "slim": (7, 5), "hollow": (4, 0)}


class Bag(nn.Module):
    """Parameters by name, with random values; `slim` is the transpose of a contiguous tensor."""

    def __init__(self, tensors: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> None:
        super().__init__()
        for name, shape in tensors.items():
            start = torch.randn(shape, dtype=dtype)
            if name == "slim":
                start = torch.randn(shape[::-1], dtype=dtype).t()
            self.register_parameter(name, nn.Parameter(start))


def bag(
    tensors: Mapping[str, tuple[int, ...]], dtype: torch.dtype = torch.float32
) -> tuple[Bag, Specs]:
    return Bag(tensors, dtype), {name: (shape, dtype) for name, shape in tensors.items()}


def mesh_of(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("outer", "inner")[-len(sizes) :])


def specs_of(model: nn.Module) -> Specs:
    return {n: (tuple(p.shape), p.dtype) for n, p in model.named_parameters() if p.requires_grad}


def fsdp(mesh: DeviceMesh, dtype: torch.dtype = torch.float32) -> Part:
    model, specs = bag(UNEVEN | PLAIN, dtype)
    model.register_parameter("frozen", nn.Parameter(torch.randn(6, 2, dtype=dtype), False))
    model.register_buffer("buffer", torch.randn(3))
    fully_shard(model, mesh=mesh, ignored_params={getattr(model, name) for name in PLAIN})
    return Part([model], specs)


def replicated(world: World, case: Any) -> Part:
    model, specs = bag(UNEVEN | PLAIN)
    return Part([model], specs)


def shard_4(world: World, case: Any) -> Part:
    return fsdp(mesh_of(4))


def shard_2(world: World, case: Any) -> Part:
    """The other axis has plain copies of the same shards."""
    return fsdp(mesh_of(2, 2)["inner"])


def replicate_shard(world: World, case: Any) -> Part:
    return fsdp(mesh_of(2, 2))


def half_precision(world: World, case: Any) -> Part:
    return fsdp(mesh_of(4), torch.bfloat16)


def mixed_precision(world: World, case: Any) -> Part:
    low, specs = bag(PLAIN, torch.bfloat16)
    high, more = bag(UNEVEN)
    fully_shard(high, mesh=mesh_of(4))
    return Part([low, high], {**specs, **more})


def parallel_mlp(mesh: DeviceMesh) -> tuple[nn.Module, Specs]:
    """Column-wise and row-wise products, whose dims the two ranks do not divide evenly."""
    model = nn.Sequential(nn.Linear(6, 202), nn.Linear(202, 3), nn.LayerNorm(3), nn.Linear(3, 97))
    specs = specs_of(model)
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel(), "3": ColwiseParallel()}
    parallelize_module(model, mesh, plan)
    return model, specs


def tensor_parallel(world: World, case: Any) -> Part:
    model, specs = parallel_mlp(mesh_of(2, 2)["inner"])
    return Part([model], specs)


def shard_tensor(world: World, case: Any) -> Part:
    mesh = mesh_of(2, 2)
    model = nn.Sequential(nn.Linear(6, 204), nn.Linear(204, 5), nn.LayerNorm(5), nn.Linear(5, 194))
    specs = specs_of(model)
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel(), "3": ColwiseParallel()}
    parallelize_module(model, mesh["inner"], plan)
    fully_shard(model, mesh=mesh["outer"])
    return Part([model], specs)


def experts(world: World, case: Any) -> Part:
    """Experts on one axis, three over two ranks among them; what is common is sharded over the other."""
    mesh = mesh_of(2, 2)
    model, specs = bag({"up": (8, 4, 6), "down": (3, 6, 4), "router": (4, 8)})
    for name in ("up", "down"):
        cut = distribute_tensor(getattr(model, name).detach(), mesh["inner"], [Shard(0)])
        setattr(model, name, nn.Parameter(cut))
    router, more = bag({"common": (5, 3)})
    fully_shard(router, mesh=mesh["outer"])
    return Part([model, router], {**specs, **more})


def sharded_experts(world: World, case: Any) -> Part:
    mesh = mesh_of(2, 2)
    model, specs = bag({"up": (8, 4, 6), "down": (4, 6, 4)})
    for name in specs:
        cut = distribute_tensor(getattr(model, name).detach(), mesh["inner"], [Shard(0)])
        setattr(model, name, nn.Parameter(cut))
    fully_shard(model, mesh=mesh["outer"])
    return Part([model], specs)


def pipeline(world: World, case: Any) -> Part:
    """A stage on each rank; the last one has the embedding again, under a name of its own."""
    tensors = [{f"w{rank}": (5 + rank, 7), f"b{rank}": (3,)} for rank in range(RANKS)]
    tensors[0]["embedding"] = (11, 4)
    specs = {n: (shape, torch.float32) for stage in tensors for n, shape in stage.items()}
    own = dict(tensors[world.rank])
    if world.rank == RANKS - 1:
        own["head"] = (11, 4)
    return Part([Bag(own, torch.float32)], specs, {"head": "embedding"})


def pipeline_of_shards(world: World, case: Any) -> Part:
    """Two stages, each of two modules, sharded over two ranks; stage 1 lies on ranks 2 and 3."""
    mesh = mesh_of(2, 2)
    stages = [{f"a{n}": (5, 3), f"b{n}": (1, 3)} for n in range(4)]
    specs = {n: (shape, torch.float32) for stage in stages for n, shape in stage.items()}
    mine = [Bag(stage, torch.float32) for stage in stages[world.rank // 2 :: 2]]
    for model in mine:
        fully_shard(model, mesh=mesh["inner"])
    return Part(mine, specs)


def placements(world: World, case: Any) -> Part:
    """`case["tensors"]`: name -> shape, mesh, and per mesh axis the dim that it cuts, or None."""
    model = nn.Module()
    meshes: dict[tuple[int, ...], DeviceMesh] = {}
    specs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    index: dict[str, Tensor] = {}
    for name, (shape, sizes, dims) in case["tensors"].items():
        mesh = meshes.setdefault(tuple(sizes), mesh_of(*sizes))
        cuts = [Replicate() if dim is None else Shard(dim) for dim in dims]
        cut = distribute_tensor(torch.randn(shape), mesh, cuts)
        model.register_parameter(name, nn.Parameter(cut))
        specs[name] = (tuple(shape), torch.float32)
        numbers = torch.arange(cut.numel()).view(tuple(shape))
        index[name] = distribute_tensor(numbers, mesh, cuts).to_local()
    return Part([model], specs, index=index)


# --- FSDP2's traps -----------------------------------------------------------------------------


def small_model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5))


def sharded_model() -> Part:
    """The last layer belongs to the root, which FSDP2 leaves gathered after a forward."""
    model = small_model()
    specs = specs_of(model)
    mesh = mesh_of(4)
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Part([model], specs)


def plain_model(parameters: Mapping[str, Tensor]) -> nn.Sequential:
    model = small_model()
    model.load_state_dict(dict(parameters))
    return model


def anchor_of(specs: Specs, generation: int) -> dict[str, Tensor]:
    return {name: values(name, shape, generation) for name, (shape, _) in specs.items()}


def inputs() -> Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(9))


def computes(world: World, model: nn.Module, parameters: Mapping[str, Tensor], claim: str) -> None:
    with torch.no_grad():
        got, wanted = model(inputs()), plain_model(parameters)(inputs())
    world.check(torch.allclose(got, wanted, atol=1e-6, rtol=1e-6), claim)


def after_evaluation(world: World, case: Any) -> None:
    part = sharded_model()
    shards = list(
        part.parameters.values()
    )  # while they are: a forward leaves others in their place
    island = joined(world, part, [Edge(0, "snapshot", 1), Edge(0, "snapshot", 2), Edge(0, "stop")])
    model = part.models[0]
    for generation in (1, 2):
        with torch.no_grad():
            model(inputs())
        island.step(tokens=1)
        computes(world, model, anchor_of(part.specs, generation), f"it computes {generation}")
    left_anchor = anchor_of(part.specs, 2)
    with torch.no_grad():
        for shard in shards:
            local(shard).mul_(GROWTH)
    with island.anchor():
        computes(world, model, left_anchor, "inside anchor() it computes the anchor")
    grown = {name: tensor * GROWTH for name, tensor in left_anchor.items()}
    computes(world, model, grown, "after anchor() it computes what it did before")
    left(world, island)


def without_reshard(world: World, case: Any) -> None:
    part = sharded_model()
    model = part.models[0]
    model.set_reshard_after_backward(False)  # type: ignore[operator]
    island = joined(world, part, [Edge(0, "snapshot", 1), Edge(0, "anchor", 2), Edge(0, "stop")])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    island.step(tokens=1)
    model(inputs()).square().mean().backward()
    optimizer.step()
    island.step(tokens=1)
    plain = plain_model(anchor_of(part.specs, 1))
    plain(inputs()).square().mean().backward()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    trained = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    first, second = (anchor_of(part.specs, generation) for generation in (1, 2))
    if world.daemon is not None:
        flat = torch.cat(
            [
                trained[name].reshape(-1)
                for name in (slot.name for slot in world.daemon.layouts[0].tensors)
            ]
        )
        snapshot = torch.from_numpy(world.daemon.snapshots[1])
        world.check(torch.allclose(snapshot, flat, atol=1e-6), "the snapshot has the inner step")
    moved = {name: trained[name] + second[name] - first[name] for name in trained}
    computes(world, model, moved, "it computes the inner step, moved with the anchor")
    left(world, island)


# --- ends that all ranks must see --------------------------------------------------------------


def raises(world: World, call: Callable[[], object], error: type[Exception], text: str) -> None:
    try:
        call()
    except error as raised:
        world.check(text in str(raised), f"{text!r} is said, not {raised}")
    else:
        world.check(False, f"{error.__name__} is raised")


def daemon_vanishes(world: World, case: Any) -> None:
    part = replicated(world, case)
    island = joined(world, part, [Edge(0, "vanish")], remote=case["remote"])
    said = "rank 0 cannot reach the daemon" if world.rank else "the daemon closed the connection"
    raises(world, lambda: island.step(tokens=1), DaemonLost, said)
    left(world, island)


def daemon_refuses(world: World, case: Any) -> None:
    part = replicated(world, case)

    def join() -> None:
        joined(world, part, [], remote=case["remote"])

    raises(world, join, RunMismatch, "the script wants nobody")
    if world.daemon is not None:
        world.daemon.join()


BUILDERS: dict[str, Callable[[World, Any], Part]] = {
    builder.__name__: builder
    for builder in (
        replicated,
        shard_4,
        shard_2,
        replicate_shard,
        half_precision,
        mixed_precision,
        tensor_parallel,
        shard_tensor,
        experts,
        sharded_experts,
        pipeline,
        pipeline_of_shards,
        placements,
    )
}
STORIES: dict[str, Callable[[World, Any], None]] = {
    story.__name__: story
    for story in (after_evaluation, without_reshard, daemon_vanishes, daemon_refuses)
}


def play(world: World, case: Any) -> None:
    torch.manual_seed(1 + world.rank)  # what the parameters are before they join differs by rank
    name, remote = case["name"], case.get("remote", ())
    if name in STORIES:
        STORIES[name](world, case)
    elif name == "frozen":
        exercise(world, replicated(world, case), remote, FROZEN_S)
    else:
        part = BUILDERS[name](world, case)
        count_writers(world, part)
        exercise(world, part, remote)


def impatient_world(folder: Path) -> World:
    """The ranks again, in a process group that gives up soon; they meet in a file of their own."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=SHORT_TIMEOUT_S),
    )
    return World(HostGroup())


def main() -> None:
    torch.set_num_threads(1)
    cases = json.loads(Path(sys.argv[1]).read_bytes())
    dist.init_process_group("gloo")
    world = World(HostGroup())
    out = Path(sys.argv[2])
    with open(out, "a") as results:
        for case in cases:
            if case["name"] == "frozen":
                world = impatient_world(out.parent)
            world.faults = []
            play(world, case)
            told = world.host.gather(json.dumps(world.faults).encode())
            if world.rank == 0:
                faults = [fault for line in told for fault in json.loads(line)]
                print(json.dumps({"id": case["id"], "faults": faults}), file=results, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
