"""Committed updates from any island that holds them: an island that was away fetches k small updates."""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from node.cell_chunks import chunks, cut_cells
from node.exchange import Compute
from node.run_state import RunState
from node.update_log import reduced_root_of
from protocol import atoll_peer_pb2 as pb
from protocol.errors import BadFrame, ConfigError, TransportError
from protocol.frames import FrameKind, decode_frame, encode_frame
from protocol.merkle import DIGEST_BYTES
from protocol.messages import Record
from protocol.transport import Connection, Stream, Transport
from protocol.wire import parse

log = structlog.get_logger()


class UpdateDonor:
    """Handler of `Peer/Update`."""

    def __init__(self, state: RunState, compute: Compute) -> None:
        self._state, self._compute = state, compute

    async def serve(self, stream: Stream) -> None:
        request = parse(pb.UpdateRequest, await stream.receive() or b"")
        state = self._state
        if request.run_id != state.start.run_id or request.fragment >= len(state.layout.fragments):
            raise BadFrame(f"updates of run {state.start.run_id} are served here")
        if len(request.reduced_root) != DIGEST_BYTES:
            raise BadFrame(f"an update is named by a root of {DIGEST_BYTES} bytes")
        cells = await self._compute(state.stored_update, request.reduced_root, request.fragment)
        if cells is None:
            await stream.send(encode_frame(FrameKind.MISSING))
            return
        sizes = [len(cell) for cell in cells]
        for first, count in chunks(sizes, request.first_cell, len(sizes)):
            payload = b"".join(cells[first : first + count])
            await stream.send(
                encode_frame(FrameKind.REDUCED, payload, first_cell=first, cells=count)
            )


async def fetch_update(
    transport: Transport, donors: Iterable[str], state: RunState, record: Record
) -> list[bytes] | None:
    """The reduced cells of a commit from the first donor that has them, verified; else None."""
    for donor in donors:
        connection: Connection | None = None
        try:
            connection = await transport.connect(donor)
            cells = await _fetch(connection, state, record)
        except (TransportError, ConfigError) as error:
            log.warning("donor_failed", donor=donor, reason=str(error))
            continue
        finally:
            if connection is not None:
                await connection.close()
        if cells is not None:
            return cells
    return None


async def _fetch(connection: Connection, state: RunState, record: Record) -> list[bytes] | None:
    commit = record.commit
    if commit is None:
        return None
    sizes = state.sizes(commit.fragment)
    request = pb.UpdateRequest(
        run_id=state.start.run_id, reduced_root=commit.reduced_root, fragment=commit.fragment
    )
    stream = await connection.stream("Peer/Update")
    await stream.send(request.SerializeToString())
    cells: list[bytes] = []
    while len(cells) < len(sizes):
        message = await stream.receive()
        frame = decode_frame(message or b"")
        if frame.kind is FrameKind.MISSING:
            return None
        if frame.kind is not FrameKind.REDUCED or frame.first_cell != len(cells) or not frame.cells:
            raise BadFrame(f"a {frame.kind.name} frame at cell {frame.first_cell}")
        cells += [bytes(data) for _, data in cut_cells(frame, sizes)]
    if reduced_root_of(cells) != commit.reduced_root:
        raise BadFrame("an update that does not lead to its root")
    return cells
