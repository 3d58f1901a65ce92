"""Forked children and the daemon's client library: nothing that must not be copied by a fork is there.

The trainer's process holds one socket and shared memory, no RPC threads, so loaders may fork; the daemon
and every other process of the product is started by exec.
"""

from __future__ import annotations

import ast
import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from node.edge_messages import (
    Applied,
    Boundary,
    FragmentLayout,
    GoOn,
    Hello,
    Message,
    TensorSlot,
    Welcome,
    decode,
    encode,
)
from node.shared_buffer import SharedBuffer

ROOT = Path(__file__).resolve().parents[2]
VALUES = 6

SCRIPT = """
import torch, atoll
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(2)
torch.ones(1 << 20).sum()              # the thread pool is up before anything forks
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
island = atoll.attach(model, optimizer)
data = TensorDataset(torch.ones(32, 2))
steps = 0
for _ in range(5):
    for (x,) in DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="fork"):
        loss = model(x).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        island.step(tokens=4, loss=loss)
        steps += 1
print("steps", steps)
"""


class StandInDaemon:
    """Answers every boundary with GoOn."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.boundaries = 0
        self._buffers = [SharedBuffer.create(f"b{n}", VALUES) for n in range(3)]
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(1)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        with connection, connection.makefile("rb") as lines:
            for line in lines:
                self._answer(connection, decode(line))

    def _answer(self, connection: socket.socket, message: Message) -> None:
        if isinstance(message, Hello):
            slots = (TensorSlot("weight", 0, 4), TensorSlot("bias", 4, 2))
            welcome = Welcome(
                (FragmentLayout(VALUES, slots),), (0,), 0, 0, 1, 0, 0, 1, 0, False, 0, 1, 0.1
            )
            socket.send_fds(connection, [encode(welcome)], [b.fd for b in self._buffers])
        elif isinstance(message, Boundary):
            self.boundaries += 1
            connection.sendall(encode(GoOn(message.sequence, message.step + 1, 0)))
        else:
            assert isinstance(message, Applied)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)
        for buffer in self._buffers:
            buffer.close()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[StandInDaemon]:
    stand_in = StandInDaemon(tmp_path / "d.sock")
    yield stand_in
    stand_in.close()


def test_loaders_that_fork_never_hang_an_attached_script(daemon: StandInDaemon) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "ATOLL_SOCKET": daemon.path},
    )
    assert done.stdout.split() == ["steps", "40"], done.stderr
    assert daemon.boundaries == 40


def test_attach_brings_no_rpc_library_into_the_trainer() -> None:
    program = "import sys, node.attach; print('grpc' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("place", ["thread", "coroutine"])
def test_attach_and_step_work_in_a_thread_and_inside_a_running_event_loop(
    daemon: StandInDaemon, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    import torch

    import atoll

    monkeypatch.setenv("ATOLL_SOCKET", daemon.path)

    def use() -> None:
        model = torch.nn.Linear(2, 2)
        island = atoll.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        island.step(tokens=1)
        island.close()

    async def inside() -> None:
        use()

    if place == "thread":
        thread = threading.Thread(target=use)
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
    else:
        asyncio.run(inside())
    assert daemon.boundaries == 1


def test_no_module_of_the_product_forks() -> None:
    """Processes are started by exec; multiprocessing, whose default is fork, is used nowhere."""
    packages = ("protocol", "outer_optimizer", "coordinator", "node", "atoll")
    for package in packages:
        for path in (ROOT / package).rglob("*.py"):
            for found in ast.walk(ast.parse(path.read_text())):
                names = [a.name for a in found.names] if isinstance(found, ast.Import) else []
                names += [found.module or ""] if isinstance(found, ast.ImportFrom) else []
                assert not any(n.split(".")[0] == "multiprocessing" for n in names), path
                assert not (
                    isinstance(found, ast.Attribute) and found.attr in ("fork", "forkpty")
                ), path


def test_large_arithmetic_works_in_a_daemon_process_started_beside_busy_threads() -> None:
    """The daemon is started by exec after its parent has used many threads."""
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            np.ones(1 << 16).sum()

    threads = [threading.Thread(target=busy) for _ in range(4)]
    for thread in threads:
        thread.start()
    program = (
        "import numpy as np\n"
        "from outer_optimizer.aggregate import weighted_mean\n"
        "ones, out = np.ones(25_000_000, np.float32), np.empty(25_000_000, np.float32)\n"
        "weighted_mean([ones, ones], [np.float32(0.5)] * 2, out)\n"
        "print(int(out.sum(dtype=np.float64)))"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
        )
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert done.stdout.strip() == "25000000"
