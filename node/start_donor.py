"""Start state from the run's creator to everyone: served cell by cell, verified by root.

The donor side needs no torch and no run: it reads the safetensors file `run init` left. The joiner side
tries one donor after the other, resumes at the first missing cell, and believes nothing before the root
of the whole fragment is the one the owner signed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import safetensors
import structlog

from node.cell_chunks import chunks, cut_cells
from node.replica import Replica, tensors_of
from outer_optimizer.transform import FloatArray
from protocol import atoll_peer_pb2 as pb
from protocol.errors import BadFrame, PeerUnreachable, RunMismatch, StreamClosed, TransportError
from protocol.frames import FrameKind, decode_frame, encode_frame
from protocol.layout import Fragment, Layout
from protocol.messages import Start
from protocol.transport import Stream, StreamHandler, Transport
from protocol.wire import parse

log = structlog.get_logger()

_FP32 = np.dtype("<f4")


class StartDonor:
    def __init__(self, start: Start, layout: Layout, file: Path) -> None:
        self._run_id, self._layout = start.run_id, layout
        self._anchors = [flat_from_file(fragment, file) for fragment in layout.fragments]

    @property
    def streams(self) -> dict[str, StreamHandler]:
        """To be served wherever the run's start state is to be had."""
        return {"Peer/State": self._state}

    async def _state(self, stream: Stream) -> None:
        request = parse(pb.StateRequest, await stream.receive() or b"")
        if request.run_id != self._run_id or request.fragment >= len(self._anchors):
            raise BadFrame(f"the start state of run {self._run_id} is served here")
        fragment, anchor = self._layout.fragments[request.fragment], self._anchors[request.fragment]
        sizes = cell_bytes(fragment)
        for first, count in chunks(sizes, request.first_cell, len(sizes)):
            start = fragment.cells[first].start
            values = sum(sizes[first : first + count]) // _FP32.itemsize
            payload = anchor[start : start + values].astype(_FP32, copy=False).tobytes()
            await stream.send(encode_frame(FrameKind.STATE, payload, first_cell=first, cells=count))
        await stream.send(encode_frame(FrameKind.END))


def cell_bytes(fragment: Fragment) -> list[int]:
    return [cell.values * _FP32.itemsize for cell in fragment.cells]


def flat_from_file(fragment: Fragment, file: Path) -> FloatArray:
    """A fragment's flat vector out of a safetensors file of named parameters."""
    flat = np.zeros(fragment.values, np.float32)
    with safetensors.safe_open(file, framework="numpy") as tensors:
        for name, view in tensors_of(fragment, flat).items():
            np.copyto(view, tensors.get_tensor(name))
    return flat


async def fetch_start(
    transport: Transport, donors: Sequence[str], start: Start, layout: Layout, replica: Replica
) -> None:
    """Fills the replica. Raises RunMismatch if no donor has the signed state, or none answers."""
    for number, expected in enumerate(start.fragment_roots):
        await _fetch_fragment(transport, donors, start.run_id, number, layout, replica)
        if replica.root(number) != expected:
            raise RunMismatch(
                f"the start state of fragment {number} is not the one the owner signed: "
                "the donor's file was changed; restore it on the host of `atoll run start`"
            )


async def _fetch_fragment(
    transport: Transport,
    donors: Sequence[str],
    run_id: str,
    number: int,
    layout: Layout,
    replica: Replica,
) -> None:
    sizes = cell_bytes(layout.fragments[number])
    first, problem = (
        0,
        "no donor is known: is `atoll run start` (not only the coordinator) running?",
    )
    for donor in donors:
        connection = await transport.connect(donor)
        try:
            stream = await connection.stream("Peer/State")
            try:
                request = pb.StateRequest(run_id=run_id, fragment=number, first_cell=first)
                await stream.send(request.SerializeToString())
                while first < len(sizes):
                    first = _take(await stream.receive(), first, number, sizes, replica)
            finally:
                await stream.close()
            return
        except TransportError as error:
            problem = str(error)
            log.warning("donor_failed", donor=donor, reason=problem, cells=first)
        finally:
            await connection.close()
    raise PeerUnreachable(
        f"the start state could not be fetched: {problem} (a coordinator alone does not have it: use "
        "`atoll run start`, or give it the --donor of an `atoll run donate`)"
    )


def _take(
    message: bytes | None, first: int, number: int, sizes: Sequence[int], replica: Replica
) -> int:
    """Puts one chunk in its place; returns the next missing cell."""
    if message is None:
        raise StreamClosed("the donor ended before the last cell")
    frame = decode_frame(message)
    if frame.kind is not FrameKind.STATE or frame.first_cell != first or not frame.cells:
        raise BadFrame(
            f"a {frame.kind.name} frame at cell {frame.first_cell}, expected cell {first}"
        )
    cut_cells(frame, sizes)
    replica.load_anchor(number, first, np.frombuffer(frame.payload, _FP32))
    return first + frame.cells
