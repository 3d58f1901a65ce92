"""Keeps an island's ranks training: starts them, starts them again, says so when they are silent.

torchrun mends a lost rank by itself: it starts all ranks of the island anew, and they take up the anchor and
their last inner checkpoint. When torchrun itself ends badly it is started again here, on a smaller mesh
if devices have gone, as long as it had got anywhere since the last start. The daemon stays a member all
the while.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress

import structlog

from node.arrival import Described
from node.daemon import Daemon
from node.mesh import Mesh, shrink
from node.settings import Place, settings_for
from node.site import Site
from node.trainer_process import TrainerProcess, torchrun_command
from protocol.errors import TrainerFailed
from protocol.spec import OwnModel
from protocol.state_dir import write_atomically

log = structlog.get_logger()

_AGAIN_S = 1.0
_COUNT_DEVICES = "import torch; print(torch.cuda.device_count())"


class Training:
    """`run` lasts until the trainer ends well; to be cancelled, or stopped, at any time."""

    def __init__(self, daemon: Daemon, site: Site, described: Described) -> None:
        self._daemon, self._site, self._described = daemon, site, described
        self._process: TrainerProcess | None = None

    async def run(self) -> None:
        """Raises TrainerFailed if the trainer fails before its first edge, or where it did before."""
        mesh = self._site.island.mesh
        watching = asyncio.create_task(self._watch())
        try:
            while True:
                boundaries = self._daemon.boundaries
                try:
                    await self._train(mesh)
                    return
                except TrainerFailed as error:
                    if self._daemon.finished.is_set():
                        raise
                    smaller = await self._mesh_that_fits(mesh)
                    if smaller == mesh and self._daemon.boundaries == boundaries:
                        raise
                    log.warning("trainer_starts_again", mesh=str(smaller), reason=str(error))
                mesh = smaller
                await asyncio.sleep(_AGAIN_S)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def stop(self) -> None:
        if self._process is not None:
            await self._process.stop()

    async def _train(self, mesh: Mesh) -> None:
        site = self._site
        environment = {
            "ATOLL_SOCKET": self._daemon.trainer_socket,
            "OMP_NUM_THREADS": str(site.island.threads),
            "PYTHONUNBUFFERED": "1",
            # Else torchrun's ranks that start again find the dead ones' addresses in its store.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        if not site.command:
            environment["PYTHONSAFEPATH"] = "1"
        if not isinstance(self._described.spec.model, OwnModel):
            write_atomically(site.trainer_settings, self._settings(mesh))
            environment["ATOLL_TRAINER_SETTINGS"] = str(site.trainer_settings)
        command = site.command or torchrun_command(
            site.torchrun_logs, mesh.ranks, site.island.restarts
        )
        self._process = TrainerProcess(command, environment, site.trainer_log)
        await self._process.run()

    def _settings(self, mesh: Mesh) -> bytes:
        """For the built-in recipes; an island's place in the data order is its rank in the view."""
        site, daemon = self._site, self._daemon
        island = site.island.model_copy(update={"mesh": mesh})
        place = Place(
            site.cache,
            site.tokenizer,
            daemon.place_in_view,
            island,
            site.text,
            site.inner_checkpoints,
        )
        settings = settings_for(self._described.spec, daemon.islands, place, "the run's spec")
        return settings.model_dump_json().encode()

    async def _mesh_that_fits(self, mesh: Mesh) -> Mesh:
        """`mesh`, or what is left of it on the devices that are left. CPUs do not run out."""
        if self._site.command or self._site.island.device == "cpu":
            return mesh
        devices = await _cuda_devices()
        return mesh if devices in (0, mesh.ranks) else shrink(mesh, devices)

    # --- silence -------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Says so, once each, when a trainer does not attach, and when an attached one does not step."""
        limit_s = self._site.island.silent_s
        await self._say_unless(
            self._daemon.attached,
            f"the trainer has not attached after {limit_s:g} s: does the script call atoll.attach()?",
        )
        await self._say_unless(
            self._daemon.stepped,
            f"the trainer has attached and not reached its first edge in {limit_s:g} s: does the script "
            f"call island.step() after every optimizer step?",
        )

    async def _say_unless(self, event: asyncio.Event, text: str) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._site.island.silent_s):
                await event.wait()
                return
        log.warning("trainer_silent", reason=text, log=str(self._site.trainer_log))
        await event.wait()


async def _cuda_devices() -> int:
    """How many there are now; a process of its own looks, for the daemon has no torch."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c", _COUNT_DEVICES),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    said, _ = await process.communicate()
    return int(said or 0)
