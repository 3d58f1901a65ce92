"""Ranks started, started again, and their silence: a scripted torchrun, virtual time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from node import training
from node.arrival import Described
from node.daemon import Daemon
from node.island_settings import IslandSettings
from node.mesh import Mesh
from node.site import Site
from node.training import Training
from protocol.errors import ConfigError, TrainerFailed
from protocol.messages import IslandId, Start
from protocol.spec import parse_spec
from protocol.virtual_time import run_virtual

SILENT_S = 30.0
MESH = Mesh(replicate=2, shard=4)

Life = Callable[["World"], Awaitable[None]]


class FakeDaemon:
    trainer_socket = "/nowhere/trainer.sock"
    islands, place_in_view = 3, 2

    def __init__(self) -> None:
        self.boundaries = 0
        self.attached, self.stepped = asyncio.Event(), asyncio.Event()
        self.finished = asyncio.Event()


class World:
    """`lives`: what each start of torchrun does, in turn; `starts`: how it was called."""

    def __init__(
        self, folder: Path, patch: pytest.MonkeyPatch, lives: Sequence[Life], **island: Any
    ) -> None:
        self.daemon = FakeDaemon()
        self.starts: list[tuple[list[str], dict[str, str]]] = []
        self.devices = MESH.ranks
        self._lives = list(lives)
        patch.setattr(training, "TrainerProcess", self._process)
        patch.setattr(training, "_cuda_devices", self._count)
        settings = {"device": "cuda", "mesh": MESH, "silent_s": SILENT_S} | island
        self.site = Site(
            "here", "unused", folder, folder, island=IslandSettings.model_validate(settings)
        )
        spec = parse_spec(
            {
                "name": "test",
                "target_tokens": 1_000_000,
                "data": {"text": ["unused"]},
                "inner": {"batch_size": 8},
            },
            "test",
        )
        described = Described(spec, Start("run", b"", (), (), b""), IslandId(b""), b"", ())
        self.training = Training(cast(Daemon, self.daemon), self.site, described)

    def _process(
        self, command: Sequence[str], environment: Mapping[str, str], log_path: Path
    ) -> Process:
        self.starts.append((list(command), dict(environment)))
        return Process(self, self._lives.pop(0))

    async def _count(self) -> int:
        return self.devices

    @property
    def ranks(self) -> list[int]:
        """Per start, as torchrun was told."""
        key = "--nproc-per-node="
        return [
            int(word.removeprefix(key))
            for command, _ in self.starts
            for word in command
            if word.startswith(key)
        ]

    @property
    def mesh_told(self) -> Mesh:
        """In the settings that the ranks read."""
        settings = json.loads(self.site.trainer_settings.read_bytes())
        return Mesh.model_validate(settings["island"]["mesh"])


class Process:
    def __init__(self, world: World, life: Life) -> None:
        self._world, self._life = world, life
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        living = asyncio.ensure_future(self._life(self._world))
        stopping = asyncio.create_task(self._stopped.wait())
        try:
            await asyncio.wait((living, stopping), return_when=asyncio.FIRST_COMPLETED)
            if living.done():
                living.result()
        finally:
            living.cancel()
            stopping.cancel()
            await asyncio.gather(living, stopping, return_exceptions=True)

    async def stop(self) -> None:
        self._stopped.set()


async def works(world: World) -> None:
    world.daemon.attached.set()
    world.daemon.stepped.set()
    world.daemon.boundaries += 1


async def fails_at_once(world: World) -> None:
    raise TrainerFailed("no progress")


async def fails_later(world: World) -> None:
    await works(world)
    raise TrainerFailed("after an edge")


async def loses_four_devices(world: World) -> None:
    world.devices = 4
    raise TrainerFailed("a device fell off the bus")


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[World, list[str]]]:
    """Trains to the end; returns the world and what was logged."""

    def run(lives: Sequence[Life], **island: Any) -> tuple[World, list[str]]:
        async def main() -> World:
            world = World(tmp_path, monkeypatch, lives, **island)
            await world.training.run()
            assert asyncio.all_tasks() == {asyncio.current_task()}
            return world

        with capture_logs() as logs:
            world = run_virtual(main())
        return world, [entry["event"] for entry in logs]

    return run


Play = Callable[..., tuple[World, list[str]]]


# --- started again -----------------------------------------------------------------------------


def test_a_trainer_that_ends_well_is_not_started_again(play: Play) -> None:
    world, logged = play([works])
    assert world.ranks == [8]
    assert logged == []


def test_a_trainer_that_fails_before_its_first_edge_ends_the_training(play: Play) -> None:
    with pytest.raises(TrainerFailed, match="no progress"):
        play([fails_at_once])


def test_a_trainer_that_fails_after_progress_is_started_again_on_the_same_mesh(
    play: Play,
) -> None:
    world, logged = play([fails_later, fails_later, works])
    assert world.ranks == [8, 8, 8]
    assert logged == ["trainer_starts_again"] * 2


def test_progress_of_an_earlier_start_does_not_count(play: Play) -> None:
    with pytest.raises(TrainerFailed, match="no progress"):
        play([fails_later, fails_at_once])


def test_the_ranks_find_the_daemon_and_their_settings(play: Play) -> None:
    world, _ = play([works], threads=3)
    _, environment = world.starts[0]
    assert environment["ATOLL_SOCKET"] == world.daemon.trainer_socket
    assert environment["ATOLL_TRAINER_SETTINGS"] == str(world.site.trainer_settings)
    assert environment["OMP_NUM_THREADS"] == "3"
    settings = json.loads(world.site.trainer_settings.read_bytes())
    assert (settings["index"], settings["islands"]) == (2, 3)


# --- devices that have gone --------------------------------------------------------------------


def test_where_devices_have_gone_a_smaller_mesh_takes_over_even_before_an_edge(
    play: Play,
) -> None:
    world, logged = play([loses_four_devices, works])
    assert world.ranks == [8, 4]
    assert world.mesh_told == Mesh(replicate=1, shard=4)
    assert logged == ["trainer_starts_again"]


def test_a_smaller_mesh_that_fails_at_once_ends_the_training(play: Play) -> None:
    with pytest.raises(TrainerFailed, match="no progress"):
        play([loses_four_devices, fails_at_once])


def test_devices_too_few_for_the_other_axes_are_an_error_that_names_the_mesh(play: Play) -> None:
    with pytest.raises(ConfigError, match=r"island\.mesh: tensor 8 does not fit on 4 devices"):
        play([loses_four_devices], mesh=Mesh(tensor=8))


def test_cpus_do_not_run_out(play: Play) -> None:
    with pytest.raises(TrainerFailed, match="fell off the bus"):
        play([loses_four_devices], device="cpu")


@pytest.mark.parametrize("devices", [0, 8, 64])
def test_a_host_with_enough_devices_or_none_to_count_keeps_its_mesh(
    devices: int, play: Play
) -> None:
    async def fails(world: World) -> None:
        world.devices = devices
        await fails_later(world)

    world, _ = play([fails, works])
    assert world.ranks == [8, 8]


# --- silence -----------------------------------------------------------------------------------


def spoken(
    story: Callable[[World], Coroutine[Any, Any, None]], tmp_path: Path
) -> list[tuple[float, str]]:
    """(when, reason) of each `trainer_silent` during a life of the trainer."""
    said: list[tuple[float, str]] = []

    async def main(patch: pytest.MonkeyPatch) -> None:
        world = World(tmp_path, patch, [story])
        loop = asyncio.get_running_loop()

        class Log:
            def warning(self, event: str, reason: str, **rest: Any) -> None:
                assert event == "trainer_silent"
                assert rest == {"log": str(world.site.trainer_log)}
                said.append((loop.time(), reason))

        patch.setattr(training, "log", Log())
        await world.training.run()

    with pytest.MonkeyPatch.context() as patch:
        run_virtual(main(patch))
    return said


def test_a_trainer_that_does_not_attach_is_said_once_at_the_stated_time(tmp_path: Path) -> None:
    async def never_attaches(world: World) -> None:
        await asyncio.sleep(1_000)

    [(when_s, reason)] = spoken(never_attaches, tmp_path)
    assert when_s == pytest.approx(SILENT_S)
    assert reason.startswith("the trainer has not attached after 30 s:")
    assert "atoll.attach()" in reason


def test_a_trainer_that_attaches_and_does_not_step_is_said_that_long_after(tmp_path: Path) -> None:
    async def never_steps(world: World) -> None:
        await asyncio.sleep(20)
        world.daemon.attached.set()
        await asyncio.sleep(1_000)

    [(when_s, reason)] = spoken(never_steps, tmp_path)
    assert when_s == pytest.approx(20 + SILENT_S)
    assert reason.startswith("the trainer has attached and not reached its first edge in 30 s:")
    assert "island.step()" in reason


def test_a_slow_trainer_is_said_for_each_part_that_was_slow(tmp_path: Path) -> None:
    async def slow(world: World) -> None:
        await asyncio.sleep(100)
        world.daemon.attached.set()
        await asyncio.sleep(100)
        world.daemon.stepped.set()
        await asyncio.sleep(1_000)

    assert [when_s for when_s, _ in spoken(slow, tmp_path)] == pytest.approx([30, 130])


def test_a_trainer_in_time_is_not_spoken_of(tmp_path: Path) -> None:
    async def in_time(world: World) -> None:
        await asyncio.sleep(SILENT_S - 1)
        world.daemon.attached.set()
        await asyncio.sleep(SILENT_S - 1)
        world.daemon.stepped.set()
        await asyncio.sleep(1_000)

    assert spoken(in_time, tmp_path) == []


# --- the end -----------------------------------------------------------------------------------


def test_stop_reaches_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        started = asyncio.Event()

        async def waits(world: World) -> None:
            started.set()
            await asyncio.Event().wait()

        world = World(tmp_path, monkeypatch, [waits])
        await world.training.stop()  # nothing to stop yet
        running = asyncio.create_task(world.training.run())
        await started.wait()
        await world.training.stop()
        await running

    run_virtual(main())


def test_cancelling_leaves_nobody_watching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        started = asyncio.Event()

        async def waits(world: World) -> None:
            started.set()
            await asyncio.Event().wait()

        world = World(tmp_path, monkeypatch, [waits])
        running = asyncio.create_task(world.training.run())
        await started.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(main())
