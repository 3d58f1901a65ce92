"""A whole run in one event loop and virtual time: real coordinator, real daemons, memory network.

Only the trainer is a stand-in: a few NumPy lines that pull the parameters towards an island's own target,
so the outcome is known; it speaks the real messages and uses the real shared memory.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from atoll.simulator.scenario import Link
from atoll.simulator.shaped_transport import ShapedTransport
from coordinator.coordinator import Coordinator, layout_of
from coordinator.service import Service
from node.arrival import describe, prepare_state
from node.coordinator_client import CoordinatorClient
from node.daemon import Daemon
from node.edge_messages import (
    Apply,
    Boundary,
    Evaluation,
    GoOn,
    Hello,
    Message,
    Refused,
    Stop,
    Welcome,
)
from node.events import Events
from node.journal import Journal
from node.metered_transport import MeteredTransport
from node.replica import Replica
from node.shared_buffer import SharedBuffer
from node.site import Site
from node.start_donor import StartDonor, flat_from_file
from outer_optimizer.codec import codec_for
from outer_optimizer.optimizer import transform_for
from protocol.identity import Identity
from protocol.layout import TensorLayout, build_layout
from protocol.memory_transport import MemoryNetwork
from protocol.messages import Start
from protocol.run_files import Run
from protocol.spec import RunSpec, parse_spec
from protocol.virtual_time import run_virtual
from protocol.wire import encode_start

TENSORS = (
    TensorLayout("embedding", (40, 300), "float32"),
    TensorLayout("norm", (300,), "float32"),
    TensorLayout("scale", (), "float32"),
    TensorLayout("head", (300, 20), "float32"),
)
STEP_TOKENS = 100


def identity_of(name: str) -> Identity:
    return Identity(name.encode().ljust(32, b"."))


def make_spec(**tables: Any) -> RunSpec:
    base: dict[str, Any] = {
        "name": "scenario",
        "target_tokens": 4_000,
        "data": {"text": ["unused"]},
        "outer": {"inner_steps": 5, "lr": 1.0, "momentum": 0.0, "codec": "fp32"},
        "sync": {"expected_islands": 2, "cell_values": 4_096, "grace_s": 1.0},
    }
    for key, value in tables.items():
        base[key] = base[key] | value if isinstance(value, dict) else value
    return parse_spec(base, "scenario")


def make_run(folder: Path, spec: RunSpec) -> tuple[Run, Path]:
    """A start state without torch: some deterministic values."""
    file = folder / "start.safetensors"
    values = {
        t.name: np.sin(np.arange(t.values, dtype=np.float32) + n).reshape(t.shape)
        for n, t in enumerate(TENSORS)
    }
    save_file(values, file)
    layout = build_layout(
        TENSORS, spec.outer.fragments, spec.sync.cell_values, spec.sync.expected_islands
    )
    replica = Replica(layout, transform_for(spec.outer.optimizer), codec_for(spec.outer.codec))
    for number, fragment in enumerate(layout.fragments):
        replica.load_anchor(number, 0, flat_from_file(fragment, file))
    roots = tuple(replica.root(n) for n in range(len(layout.fragments)))
    start = Start("scenario-1", spec.digest(), TENSORS, roots, b"")
    owner = identity_of("owner")
    return Run(spec, owner, owner.sign("start", encode_start(start)), start, b""), file


class StandInTrainer:
    """Both a trainer and the daemon's link to it. `pull` = the value every parameter moves towards."""

    path = "stand-in"

    def __init__(self, pull: float, step_s: float) -> None:
        self.pull, self.step_s = pull, step_s
        self.refused = ""
        self.refs: list[str] = []
        self.steps = self.tokens = 0
        self.local: list[np.ndarray] = []
        self._answers: asyncio.Queue[Message] = asyncio.Queue()
        self._buffers: list[list[SharedBuffer]] = []
        self.go = asyncio.Event()
        self.incarnation = 0

    async def run(self, on_message: Callable[[Message | None], None]) -> None:
        await self.go.wait()
        while True:
            self.incarnation += 1
            self._answers = asyncio.Queue()
            life = asyncio.ensure_future(self._train(on_message))
            again = asyncio.ensure_future(self._restarted())
            try:
                await asyncio.wait({life, again}, return_when=asyncio.FIRST_COMPLETED)
                if life.done():
                    life.result()
                    await asyncio.Event().wait()
            finally:
                life.cancel()
                again.cancel()
                await asyncio.gather(life, again, return_exceptions=True)
            on_message(None)

    async def _restarted(self) -> None:
        self.restart = asyncio.Event()
        await self.restart.wait()

    def turn_to(self, incarnation: str) -> None:
        pass

    async def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        if descriptors and isinstance(message, Welcome):
            sizes = [f.values for f in message.fragments]
            for b in (b for three in self._buffers for b in three):
                b.close()
            duplicates = [os.dup(fd) for fd in descriptors]
            self._buffers = [
                [SharedBuffer.open(fd, size) for fd in duplicates[3 * i : 3 * i + 3]]
                for i, size in enumerate(sizes)
            ]
        self._answers.put_nowait(message)

    def close(self) -> None:
        for b in (b for three in self._buffers for b in three):
            b.close()

    async def _train(self, on_message: Callable[[Message | None], None]) -> None:
        on_message(Hello(f"life-{self.incarnation}", 1, TENSORS))
        welcome = await self._answers.get()
        if isinstance(welcome, Refused):
            self.refused = welcome.reason
            return
        assert isinstance(welcome, Welcome)
        slots = list(welcome.anchor_slot)
        self.local = [
            three[1 + slot].values.copy() for three, slot in zip(self._buffers, slots, strict=True)
        ]
        if welcome.evaluate:
            on_message(Evaluation(welcome.round, self._loss()))
        step, edge, fragment = welcome.first_step, welcome.next_edge_step, welcome.next_fragment
        self.steps = self.tokens = 0
        for sequence in range(10_000):
            while step < edge:
                await asyncio.sleep(self.step_s)
                for values in self.local:
                    values += np.float32(0.1) * (np.float32(self.pull) - values)
                step, self.steps, self.tokens = step + 1, self.steps + 1, self.tokens + STEP_TOKENS
            self._buffers[fragment][0].values[:] = self.local[fragment]
            on_message(
                Boundary(
                    sequence, f"life-{self.incarnation}", fragment, step, self.tokens, self.steps,
                    self._loss(), self.steps * self.step_s, 0.0,
                )
            )  # fmt: skip
            answer = await self._answers.get()
            if isinstance(answer, Stop):
                return
            assert isinstance(answer, Apply | GoOn), answer
            if isinstance(answer, Apply):
                self._apply(answer, slots)
                if answer.evaluate:
                    on_message(Evaluation(answer.round, self._loss()))
                if answer.last:
                    return
            edge, fragment = answer.next_edge_step, answer.next_fragment

    def _apply(self, answer: Apply, slots: list[int]) -> None:
        buffers, number = self._buffers[answer.fragment], answer.fragment
        self.refs.append(answer.ref)
        new = buffers[1 + answer.anchor_slot].values
        if answer.ref == "anchor":
            self.local[number] += new - buffers[1 + slots[number]].values
        else:
            self.local[number] = new.copy()
        slots[number] = answer.anchor_slot

    def _loss(self) -> float:
        return float(sum(np.abs(v - np.float32(self.pull)).mean() for v in self.local))


class IslandUnderTest:
    """A daemon that can be started, crashed and started again on the same disk."""

    def __init__(
        self, cluster: ClusterUnderTest, name: str, link: Link, pull: float, step_s: float
    ) -> None:
        self.cluster, self.name, self.link = cluster, name, link
        self.trainer = StandInTrainer(pull, step_s)
        self.site = Site(
            name=name,
            coordinator=cluster.address,
            state=cluster.folder / name,
            cache=cluster.folder,
            listen=f"{name}:0",
        )
        self.site.state.mkdir()
        self.daemon: Daemon | None = None
        self.task: asyncio.Task[None] | None = None
        self.roots: dict[int, str] = {}

    def start(self) -> None:
        self.task = asyncio.create_task(self._live())

    async def _live(self) -> None:
        transport = MeteredTransport(ShapedTransport(self.cluster.network.transport(), self.link))
        identity, journal = identity_of(self.name), Journal(self.site.journal)
        events = Events(self.site.events)
        try:
            client = await CoordinatorClient.connect(transport, self.site.coordinator, identity)
            described = await describe(client, self.site, journal)
            state, missing = await prepare_state(transport, described, self.site, journal)
            self.daemon = Daemon(
                self.site, identity, state, transport, inline, events, self.trainer
            )
            running = asyncio.create_task(self.daemon.run(client, missing))
            try:
                await first_of(running, self.daemon.opened.wait(), self.daemon.finished.wait())
                self.trainer.go.set()
                await first_of(running, self.daemon.finished.wait())
                await asyncio.sleep(1.0)
                await self.daemon.say_goodbye()
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
        finally:
            events.close()
            journal.close()

    async def crash(self) -> None:
        """kill -9: what is not on disk is lost, streams break."""
        assert self.task is not None
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task
        old = self.trainer
        self.trainer = StandInTrainer(old.pull, old.step_s)

    @property
    def state(self) -> Any:
        assert self.daemon is not None
        return self.daemon.state

    def events(self, kind: str) -> list[dict[str, Any]]:
        import json

        lines = self.site.events.read_text().splitlines()
        return [e for e in map(json.loads, lines) if e["event"] == kind]


class ClusterUnderTest:
    """Coordinator, donor and islands on one memory network."""

    def __init__(self, folder: Path, spec: RunSpec) -> None:
        self.folder, self.spec = folder, spec
        self.network = MemoryNetwork()
        self.address = "coordinator:7447"
        self.run, self._start_file = make_run(folder, spec)
        self.islands: dict[str, IslandUnderTest] = {}

    async def start(self, *names: str, link: Link | None = None, step_s: float = 0.1) -> None:
        self._donor = StartDonor(self.run.start, layout_of(self.run), self._start_file)
        await self.start_coordinator()
        for number, name in enumerate(names):
            island = IslandUnderTest(self, name, link or Link(), float(number), step_s)
            self.islands[name] = island
            island.start()

    async def start_coordinator(self) -> None:
        folder = self.folder / "coordinator"
        folder.mkdir(exist_ok=True)
        now_s = asyncio.get_running_loop().time
        self.coordinator = Coordinator(self.run, folder, now_s)
        service = Service(self.coordinator, self.spec.sync.heartbeat_s)
        self._server = await service.serve(
            self.network.transport(), self.address, self._donor.streams
        )
        self._ticking = asyncio.create_task(self._tick())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            self.coordinator.tick()

    async def crash_coordinator(self) -> None:
        self._ticking.cancel()
        await self._server.close()
        self.coordinator.close()

    async def finished(self) -> None:
        """Every island has come to the end of the run."""
        await asyncio.gather(*(i.task for i in self.islands.values() if i.task is not None))

    async def reached(self, round_: int) -> None:
        while self.coordinator.chain.head_slot < round_:
            for island in self.islands.values():
                if island.task is not None and island.task.done():
                    island.task.result()
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        for island in self.islands.values():
            if island.task is not None:
                island.task.cancel()
                await asyncio.gather(island.task, return_exceptions=True)
        await self.crash_coordinator()


async def inline(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


async def first_of(running: asyncio.Task[None], *others: Coroutine[Any, Any, Any]) -> None:
    tasks = [asyncio.ensure_future(other) for other in others]
    done, _ = await asyncio.wait({running, *tasks}, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    if running in done:
        running.result()


Story = Callable[[ClusterUnderTest], Coroutine[Any, Any, None]]


@pytest.fixture
def play(tmp_path: Path) -> Callable[[RunSpec, Story], None]:
    """Plays a story on a cluster in virtual time; an hour of it at most."""

    def run(spec: RunSpec, story: Story) -> None:
        async def main() -> None:
            cluster = ClusterUnderTest(tmp_path, spec)
            try:
                async with asyncio.timeout(3_600):
                    await story(cluster)
            finally:
                await cluster.close()

        run_virtual(main())

    return run


@pytest.fixture
def spec_with() -> Callable[..., RunSpec]:
    return make_spec
