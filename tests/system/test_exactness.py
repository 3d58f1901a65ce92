"""What training through a daemon computes, against the plain loop: real daemons, real gRPC, real torch.

Coordinator and daemons live in one background event loop, trainers in threads of this process.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch import nn

import atoll
from coordinator.coordinator import Coordinator, layout_of
from coordinator.service import Service
from node.arrival import describe, prepare_state
from node.coordinator_client import CoordinatorClient
from node.daemon import Daemon
from node.events import Events
from node.journal import Journal
from node.metered_transport import MeteredTransport
from node.parameters import layout_of as model_layout
from node.parameters import trained_parameters
from node.replica import Replica
from node.site import Site
from node.start_donor import StartDonor, flat_from_file
from node.trainer_link import TrainerLink
from outer_optimizer.codec import codec_for
from outer_optimizer.optimizer import transform_for
from protocol.grpc_transport import GrpcTransport
from protocol.identity import Identity
from protocol.layout import build_layout
from protocol.messages import Start
from protocol.run_files import Run
from protocol.spec import RunSpec, parse_spec
from protocol.wire import encode_start

BATCH, WIDTH = 8, 24
LOCAL = "127.0.0.1:0"


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, 48), nn.Tanh(), nn.Linear(48, WIDTH))


def batch(step: int, island: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1_000 * island + step)
    return torch.randn(BATCH, WIDTH, generator=generator)


def spec_of(islands: int, steps: int, **outer: Any) -> RunSpec:
    return parse_spec(
        {
            "name": "exact",
            "target_tokens": steps * islands * BATCH,
            "data": {"text": ["unused"]},
            "outer": {"inner_steps": 1, "codec": "fp32", **outer},
            "sync": {"expected_islands": islands, "heartbeat_s": 0.5},
        },
        "test",
    )


class Daemons:
    """A run whose islands wait for trainers of this process."""

    def __init__(self, folder: Path, spec: RunSpec, model: nn.Module) -> None:
        self._folder, self._spec = folder, spec
        file = folder / "start.safetensors"
        parameters = trained_parameters(model)
        save_file({n: p.detach().numpy() for n, p in parameters.items()}, file)
        tensors = model_layout(parameters)
        islands = spec.sync.expected_islands
        layout = build_layout(tensors, spec.outer.fragments, spec.sync.cell_values, islands)
        replica = Replica(layout, transform_for(spec.outer.optimizer), codec_for("fp32"))
        replica.load_anchor(0, 0, flat_from_file(layout.fragments[0], file))
        start = Start("exact-1", spec.digest(), tuple(tensors), (replica.root(0),), b"")
        owner = Identity(b"o" * 32)
        self._run = Run(spec, owner, owner.sign("start", encode_start(start)), start, b"")
        self._file = file
        self.sockets: list[str] = []
        self.daemons: list[Daemon] = []

    async def live(self, opened: threading.Event) -> None:
        transport = GrpcTransport()
        donor = StartDonor(self._run.start, layout_of(self._run), self._file)
        coordinator = Coordinator(self._run, self._folder, time.monotonic)
        server = await Service(coordinator, 0.5).serve(transport, LOCAL, donor.streams)
        with ThreadPoolExecutor(1) as pool:
            count = self._spec.sync.expected_islands
            jobs = [self._island(i, server.address, pool) for i in range(count)]
            tasks = [asyncio.create_task(job) for job in jobs]
            try:
                while len(self.daemons) < count:
                    await asyncio.sleep(0.01)
                await asyncio.gather(*(d.opened.wait() for d in self.daemons))
                opened.set()
                await asyncio.gather(*(d.finished.wait() for d in self.daemons))
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await server.close()
                coordinator.close()

    async def _island(self, number: int, address: str, pool: ThreadPoolExecutor) -> None:
        state_dir = self._folder / f"island{number}"
        state_dir.mkdir()
        site = Site(f"island{number}", address, state_dir, self._folder)
        transport, identity = MeteredTransport(GrpcTransport()), Identity(bytes([number]) * 32)
        journal, events = Journal(site.journal), Events(site.events)
        client = await CoordinatorClient.connect(transport, address, identity)

        async def compute(function: Callable[..., Any], *arguments: Any) -> Any:
            return await asyncio.get_running_loop().run_in_executor(pool, function, *arguments)

        try:
            described = await describe(client, site, journal)
            state, missing = await prepare_state(transport, described, site, journal)
            link = TrainerLink(state_dir)
            self.sockets.append(link.path)
            daemon = Daemon(site, identity, state, transport, compute, events, link)
            self.daemons.append(daemon)
            await daemon.run(client, missing)
        finally:
            await client.close()
            events.close()
            journal.close()


@contextmanager
def running(folder: Path, spec: RunSpec, model: nn.Module) -> Iterator[Daemons]:
    daemons, opened = Daemons(folder, spec, model), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(daemons.live(opened)))
    thread.start()
    try:
        assert opened.wait(30)
        yield daemons
    finally:
        thread.join(30)
        assert not thread.is_alive()


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, island: Any, number: int, steps: int
) -> None:
    for step in range(steps):
        if island.should_stop:
            return
        x = batch(step, number)
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        island.step(tokens=BATCH, loss=loss)


def flat(model: nn.Module) -> np.ndarray:
    return np.concatenate([p.detach().numpy().ravel() for p in model.parameters()])


def test_one_island_with_h1_and_outer_lr_1_equals_the_plain_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = 50
    plain = make_model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    train(plain, optimizer, atoll.attach(plain, optimizer), 0, steps)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    spec = spec_of(1, steps, optimizer="sgd", lr=1.0, momentum=0.0)
    with running(tmp_path, spec, model) as daemons:
        monkeypatch.setenv("ATOLL_SOCKET", daemons.sockets[0])
        island = atoll.attach(model, optimizer)
        train(model, optimizer, island, 0, steps)
        assert island.should_stop
        island.close()
    np.testing.assert_allclose(flat(model), flat(plain), atol=1e-6, rtol=0)


def test_two_islands_with_h1_and_averaging_equal_data_parallel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inner SGD with momentum is linear in the gradient, so averaging parameters averages gradients."""
    steps = 20
    together = make_model()
    optimizer = torch.optim.SGD(together.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(2):
            x = batch(step, number)
            ((together(x) - x).square().mean() / 2).backward()
        optimizer.step()
    models = [make_model(), make_model()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
    with running(tmp_path, spec_of(2, steps, optimizer="average"), models[0]) as daemons:
        islands = []
        for number in range(2):
            monkeypatch.setenv("ATOLL_SOCKET", daemons.sockets[number])
            islands.append(atoll.attach(models[number], optimizers[number]))
        threads = [
            threading.Thread(target=train, args=(models[i], optimizers[i], islands[i], i, steps))
            for i in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for island in islands:
            island.close()
    for model in models:
        np.testing.assert_allclose(flat(model), flat(together), atol=1e-6, rtol=0)
    assert np.array_equal(flat(models[0]), flat(models[1]))
