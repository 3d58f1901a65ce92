"""A coordinator and N islands as real local processes that talk real gRPC.

The cluster lives in one folder: the run directory, the coordinator's state, one state directory per
island. Every process is started in a session of its own, dies with the simulator, and is stopped in
order when the block ends, whatever ended it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from atoll.simulator.scenario import IslandTable, Scenario
from protocol.errors import RunFailed
from protocol.identity import KEY_BYTES, create
from protocol.run_files import RunDirectory

_STOP_S = 10.0
_START_S = 60.0
_POLL_S = 0.05


@dataclass
class Member:
    """One process of the cluster."""

    name: str
    process: asyncio.subprocess.Process
    log: Path


class Cluster:
    """`async with Cluster(...) as cluster` starts everything; leaving stops everything."""

    def __init__(self, scenario: Scenario, folder: Path, cache: Path) -> None:
        self._scenario, self.folder, self._cache = scenario, folder, cache
        self.run = RunDirectory(folder / "run")
        self.address = ""
        self.members: list[Member] = []

    def state_of(self, island: IslandTable) -> Path:
        return self.folder / island.name

    async def __aenter__(self) -> Cluster:
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _start(self) -> None:
        listening = self.folder / "listening.json"
        await self._spawn(
            "coordinator",
            ["-m", "atoll", "run", "start", str(self.run.path), "--listen", "127.0.0.1:0"]
            + ["--state", str(self.folder / "coordinator"), "--json", str(listening)],
        )
        self.address = await self._address(listening)
        for island in self._scenario.islands:
            await self._start_island(island)

    async def _start_island(self, island: IslandTable) -> None:
        state = self.state_of(island)
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._give_identity(island)
        settings = {
            "name": island.name,
            "coordinator": self.address,
            "state": str(state),
            "cache": str(self._cache),
            "island": island.settings.model_dump(),
            "link": self._scenario.link_of(island).model_dump(),
        }
        path = state / "island.json"
        path.write_text(json.dumps(settings))
        await self._spawn(island.name, ["-m", "atoll.simulator.island", str(path)])

    def _give_identity(self, island: IslandTable) -> None:
        """Keys from the run's seed: who sums first, and who reads which batch, repeats with it."""
        key = self.state_of(island) / "identity.key"
        if not key.exists():
            seed = f"{self._scenario.spec.seed}/{island.name}".encode()
            create(key, blake3(b"simulated island " + seed).digest(KEY_BYTES))

    async def _spawn(self, name: str, arguments: list[str]) -> None:
        log = self.folder / f"{name}.log"
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-P", "-m", "node.launcher", sys.executable, "-P", *arguments),
                env={**os.environ, "PYTHONSAFEPATH": "1"},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        finally:
            os.close(output)
        self.members.append(Member(name, process, log))

    async def _address(self, listening: Path) -> str:
        """Where the coordinator listens; it writes the file when it does."""
        try:
            async with asyncio.timeout(_START_S):
                while not listening.exists():
                    self.raise_if_failed()
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise RunFailed(
                f"the coordinator does not listen after {_START_S} s: {_last_words(self.members[0].log)}"
            ) from None
        return str(json.loads(listening.read_bytes())["address"])

    def raise_if_failed(self) -> None:
        """Raises RunFailed with the last line of the first process that ended with an error."""
        for member in self.members:
            code = member.process.returncode
            if code:
                raise RunFailed(f"{member.name} ended with code {code}: {_last_words(member.log)}")

    @property
    def islands_ended(self) -> bool:
        return all(m.process.returncode is not None for m in self.members[1:])

    async def stop(self) -> None:
        """SIGTERM to all, then SIGKILL to whoever is left; returns when all have gone."""
        for sign in (signal.SIGTERM, signal.SIGKILL):
            living = [m for m in self.members if m.process.returncode is None]
            for member in living:
                with contextlib.suppress(ProcessLookupError):
                    member.process.send_signal(sign)
            if living:
                await asyncio.wait(
                    [asyncio.ensure_future(m.process.wait()) for m in living], timeout=_STOP_S
                )


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    return f"{(errors or lines or ['no output'])[-1][:500]} (all of it: {log})"
