"""`join`: everything a node does from the command line to its exit code."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from node.arrival import Described, describe, prepare_state
from node.coordinator_client import CoordinatorClient
from node.daemon import Daemon
from node.events import Events
from node.journal import Journal
from node.mesh import check_mesh, check_microbatch
from node.metered_transport import MeteredTransport
from node.site import Site
from node.text import check_text
from node.torch_extra import require_torch
from node.trainer_link import TrainerLink
from node.training import Training
from protocol.errors import PeerUnreachable, TrainerFailed
from protocol.identity import load_or_create
from protocol.messages import Record
from protocol.state_dir import locked
from protocol.transport import Transport

log = structlog.get_logger()

_COORDINATOR_PATIENCE_S = 30.0
_EARLY_END_S = 5.0  # between the trainer's end and the commit that explains it
_FAREWELL_S = 60.0  # for the last evaluation, after the run is finished


async def join(site: Site, transport: Transport) -> Daemon:
    """Takes part in a run until it is finished; returns the daemon for its figures.

    Raises an AtollError whose text is the one line to show.
    """
    if not site.command:
        require_torch("the built-in trainer")
    metered = MeteredTransport(transport)
    with locked(site.state), ThreadPoolExecutor(1, "numpy") as pool:
        identity = load_or_create(site.identity_key)
        journal, events = Journal(site.journal), Events(site.events)
        client = await CoordinatorClient.connect(metered, site.coordinator, identity)
        try:
            described = await _patiently(partial(describe, client, site, journal))
            if not site.command:
                spec = described.spec
                check_mesh(site.island.mesh, spec.built_in_model, spec.inner)
                check_microbatch(site.island.mesh, spec.inner, site.island.microbatch)
                check_text(described.spec, site.tokenizer, site.cache, site.text)
            state, missing = await prepare_state(metered, described, site, journal)
            link = TrainerLink(site.state)
            daemon = Daemon(site, identity, state, metered, _computing_in(pool), events, link)
            await _live(daemon, client, site, described, missing)
            events.write(
                "ended",
                sent_bytes=metered.traffic.sent_bytes,
                received_bytes=metered.traffic.received_bytes,
            )
            return daemon
        finally:
            await client.close()
            events.close()
            journal.close()


def _computing_in(pool: ThreadPoolExecutor) -> Callable[..., Any]:
    async def compute(function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(pool, function, *arguments)

    return compute


async def _patiently(call: Callable[[], Any]) -> Any:
    """The coordinator may come up after the node: tries for a while before giving up."""
    deadline_s = time.monotonic() + _COORDINATOR_PATIENCE_S
    while True:
        try:
            return await call()
        except PeerUnreachable as error:
            if time.monotonic() > deadline_s:
                raise
            log.info("waiting_for_coordinator", reason=str(error))
            await asyncio.sleep(1.0)


async def _live(
    daemon: Daemon,
    client: CoordinatorClient,
    site: Site,
    described: Described,
    missing: list[Record],
) -> None:
    """Daemon and trainer side by side, until the run is finished; an error in either ends both."""
    following = asyncio.create_task(daemon.run(client, missing))
    trainer = Training(daemon, site, described)
    training: asyncio.Task[None] | None = None
    try:
        await _first(following, daemon.opened.wait(), daemon.finished.wait())
        if not daemon.finished.is_set():
            training = asyncio.create_task(trainer.run())
            await _first(
                following, daemon.finished.wait(), _lasting(daemon, training, site.trainer_log)
            )
        await daemon.say_goodbye()
        if training is not None:
            patience_s = None if site.command else _FAREWELL_S  # an own script may export at length
            await _first(following, asyncio.wait({training}, timeout=patience_s))
            if training.done():
                training.result()
            else:
                log.warning("trainer_still_busy", waited_s=_FAREWELL_S)
    finally:
        if not daemon.opened.is_set():
            await daemon.say_goodbye()  # stopped in the lobby: the run must not open with our ghost
        if training is not None:
            training.cancel()
            await asyncio.gather(training, return_exceptions=True)
            await trainer.stop()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def _lasting(daemon: Daemon, training: asyncio.Task[None], log_path: Path) -> None:
    """Raises if the trainer fails, or ends long before its work is done."""
    await asyncio.shield(training)
    await asyncio.sleep(_EARLY_END_S)
    if daemon.state.chain.committed_tokens >= daemon.state.spec.target_tokens:
        await asyncio.Event().wait()  # the run's end waits for others
    raise TrainerFailed(f"the trainer ended before the run did: see {log_path}")


async def _first(following: asyncio.Task[None], *others: Coroutine[Any, Any, Any]) -> None:
    """Waits for the first of these; an error of the daemon or of that first one is raised."""
    tasks = [asyncio.ensure_future(other) for other in others]
    try:
        done, _ = await asyncio.wait({following, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
