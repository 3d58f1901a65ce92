"""What one sees while a simulation runs: a bar of tokens, one row per island."""

from __future__ import annotations

import asyncio

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from atoll.simulator.cluster import Cluster
from protocol import atoll_coordinator_pb2 as pb
from protocol.errors import TransportError
from protocol.grpc_transport import GrpcTransport
from protocol.transport import Connection
from protocol.wire import parse

_POLL_S = 0.5


async def show_until_ended(cluster: Cluster, console: Console) -> None:
    """Follows the run to its end. Raises RunFailed as soon as one process fails."""
    connection = await GrpcTransport().connect(cluster.address)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f} tokens"),
        TimeElapsedColumn(),
        console=console,
    )
    bar = progress.add_task("starting", total=1)
    try:
        with Live(console=console, refresh_per_second=4, transient=True) as live:
            said = ""
            while not cluster.islands_ended:
                cluster.raise_if_failed()
                status = await _status(connection)
                if status is not None:
                    progress.update(
                        bar,
                        total=status.target_tokens,
                        completed=min(status.committed_tokens, status.target_tokens),
                        description=_headline(status),
                    )
                    live.update(Group(progress, _table(status)))
                    if not console.is_terminal and said != (said := _headline(status)):
                        console.print(_plain(status))
                await asyncio.sleep(_POLL_S)
        cluster.raise_if_failed()
    finally:
        await connection.close()


async def _status(connection: Connection) -> pb.StatusReply | None:
    try:
        request = pb.StatusRequest().SerializeToString()
        return parse(pb.StatusReply, await connection.call("Coordinator/Status", request, 2.0))
    except TransportError:
        return None  # it has said goodbye, or is not up yet; the processes themselves tell which


def _headline(status: pb.StatusReply) -> str:
    if status.holding:
        return f"held: {status.holding}"
    if status.finished:
        return "finished"
    return f"round {status.head_slot + 1}" if status.opened else "islands are joining"


def _table(status: pb.StatusReply) -> Table:
    table = Table("island", "steps", "loss", "computing", "waiting")
    for island in status.islands:
        p = island.progress
        busy_s = max(p.compute_s + p.wait_s, 1e-9)
        table.add_row(
            island.peer.member.name if island.peer.alive else f"{island.peer.member.name} (silent)",
            str(p.steps),
            f"{p.loss:.3f}" if p.has_loss else "-",
            f"{p.compute_s:.0f} s ({p.compute_s / busy_s:.0%})",
            f"{p.wait_s:.0f} s",
        )
    return table


def _plain(status: pb.StatusReply) -> str:
    """One line for logs and pipes."""
    losses = [i.progress.loss for i in status.islands if i.progress.has_loss]
    loss = f", loss {min(losses):.3f}" if losses else ""
    return (
        f"{_headline(status)}: {status.committed_tokens:,} of {status.target_tokens:,} tokens{loss}"
    )
