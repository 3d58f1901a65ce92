"""The data of one plan: a two-stage all-reduce among islands.

    participant ── LEAVES, then CELLS against the owner's CREDIT ──► owner: checks, sums, encodes once
    everyone    ◄── REDUCED cells as they are ready, then the signed PART_ROOT ── owner

The owner decodes what it encoded like everybody else. Everything on a link may be said again: after a
lost link both sides begin their part of the conversation anew, and what has arrived is not asked for twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog

from node.cell_chunks import chunks, cut_cells
from node.contribution import Contribution
from node.part_sum import PartSum
from node.peer_links import Link, PeerLinks
from outer_optimizer.codec import Codec
from protocol.errors import BadFrame, InvariantBroken, TransportError
from protocol.frames import Frame, FrameKind, encode_frame
from protocol.identity import Identity, short, verified
from protocol.layout import Fragment
from protocol.merkle import digest, leaf, prove_range, root
from protocol.messages import Digest, IslandId, Part, Plan, Signed
from protocol.wire import decode_part_root, decode_signed, encode_part_root, encode_signed

log = structlog.get_logger()

# Below these a measured rate is that of a buffer, not of a line.
_TELLING_BYTES = 4 << 20
_TELLING_S = 0.5
_MOST_GRANTS = 1_024

Compute = Callable[..., Awaitable[Any]]
"""Runs a blocking function off the event loop (or inline, in virtual time)."""


@dataclass(frozen=True)
class Hooks:
    """What the exchange tells its island."""

    part_held: Callable[[Part], None]
    part_summed: Callable[[Signed], None]


@dataclass(frozen=True)
class Wiring:
    """What stays the same from plan to plan."""

    identity: Identity
    links: PeerLinks
    codec: Codec
    compute: Compute


class Exchange:
    """`members` = everyone who is to receive the sum; `contribution` None = we only receive."""

    def __init__(
        self,
        plan: Plan,
        plan_id: Digest,
        fragment: Fragment,
        contribution: Contribution | None,
        members: frozenset[IslandId],
        wiring: Wiring,
        hooks: Hooks,
    ) -> None:
        self.plan, self.plan_id, self._members = plan, plan_id, members
        self._contribution, self._wiring, self._hooks = contribution, wiring, hooks
        self._me = wiring.identity.island
        self._sizes = [wiring.codec.encoded_bytes(cell.lengths) for cell in fragment.cells]
        self._reduced: dict[int, bytes] = {}
        self._held: set[Part] = set()
        self._grants: dict[IslandId, asyncio.Queue[tuple[int, int]]] = {}
        self._signed_root: Signed | None = None
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._sent_bytes, self._sending_s = 0, 0.0
        mine = next((part for part in plan.parts if part.owner == self._me), None)
        self.sum = mine and PartSum(plan, mine, fragment, wiring.codec, contribution, self._me)

    # --- life ----------------------------------------------------------------------------------

    def start(self) -> None:
        jobs: list[Coroutine[Any, Any, None]] = []
        if self._contribution is not None:
            for part in self.plan.parts:
                if part.owner != self._me:
                    self._grants[part.owner] = asyncio.Queue(_MOST_GRANTS)
                    jobs.append(self._with_link(part.owner, partial(self._offer, part)))
        if self.sum is not None:
            jobs.append(self._reduce(self.sum))
            for island in self.sum.senders:
                jobs.append(self._with_link(island, partial(self._collect, self.sum)))
            for island in sorted(self._members - {self._me}):
                jobs.append(self._with_link(island, partial(self._deliver, self.sum)))
        self._tasks = [asyncio.create_task(job) for job in jobs]
        for task in self._tasks:
            task.add_done_callback(_log_failure)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cells(self) -> list[bytes]:
        """All reduced cells in order; only once every part is held."""
        return [self._reduced[i] for i in range(len(self._sizes))]

    async def _with_link(self, island: IslandId, job: Callable[[Link], Awaitable[None]]) -> None:
        """Does `job` on every link there is, one after the other, until the exchange is stopped.

        Also after it was done: what was sent on a link that broke may not have arrived.
        """
        while True:
            link = await self._wiring.links.link(island)
            work = asyncio.ensure_future(job(link))
            lost = asyncio.ensure_future(link.lost.wait())
            try:
                await asyncio.wait({work, lost}, return_when=asyncio.FIRST_COMPLETED)
                if not lost.done():
                    work.result()
                    await lost
            except TransportError as error:
                log.warning("exchange_retry", peer=short(island), reason=str(error))
                await link.lost.wait()
            finally:
                work.cancel()
                lost.cancel()
                await asyncio.gather(work, lost, return_exceptions=True)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    # --- participant ---------------------------------------------------------------------------

    async def _offer(self, part: Part, link: Link) -> None:
        """Leaves of the owner's part with their proof, then cells as the owner grants them.

        Grants outlive the link they came on: on the next one the owner asks for what it still lacks.
        """
        mine = self._contribution
        if mine is None:
            raise InvariantBroken("an island without a contribution has nothing to offer")
        contents = mine.leaf_contents[part.first_cell : part.stop_cell]
        proof = prove_range(mine.leaves, part.first_cell, part.cells)
        await self._send(link, FrameKind.LEAVES, b"".join([*contents, *proof]), part[1:])
        while True:
            first, count = await self._grants[part.owner].get()
            for at, cells in chunks(self._sizes, first, first + count):
                await self._send(
                    link, FrameKind.CELLS, b"".join(mine.cells[at : at + cells]), (at, cells)
                )

    # --- owner ---------------------------------------------------------------------------------

    async def _collect(self, part_sum: PartSum, link: Link) -> None:
        """Grants credit: at most a window ahead of what is summed."""
        granted = part_sum.next_missing(link.island)
        while granted < part_sum.part.stop_cell:
            stop = part_sum.window_stop()
            if granted < stop:
                await self._send(link, FrameKind.CREDIT, b"", (granted, stop - granted))
                granted = stop
            else:
                await self._until(partial(_window_beyond, part_sum, granted))

    async def _reduce(self, part_sum: PartSum) -> None:
        """Sums chunk by chunk, as soon as all of a chunk has arrived from everyone."""
        part = part_sum.part
        for first, count in chunks(self._sizes, part.first_cell, part.stop_cell):
            cells = range(first, first + count)
            await self._until(partial(part_sum.arrived, cells))
            encoded = await self._wiring.compute(part_sum.sum_cells, cells)
            self._reduced.update(zip(cells, encoded, strict=True))
            part_sum.let_go(cells)
            self._changed.set()
        payload = encode_part_root(part_sum.part_root(self.plan_id))
        self._signed_root = self._wiring.identity.sign("part_root", payload)
        self._changed.set()
        self._hooks.part_summed(self._signed_root)
        self._hold(part)

    async def _deliver(self, part_sum: PartSum, link: Link) -> None:
        """Reduced cells as they are ready, then the signed root."""
        part = part_sum.part
        for first, count in chunks(self._sizes, part.first_cell, part.stop_cell):
            await self._until(partial(_summed, part_sum, first + count))
            payload = b"".join(self._reduced[c] for c in range(first, first + count))
            await self._send(link, FrameKind.REDUCED, payload, (first, count))
        await self._until(lambda: self._signed_root is not None)
        if self._signed_root is not None:
            await self._send(link, FrameKind.PART_ROOT, encode_signed(self._signed_root), part[1:])

    # --- what arrives --------------------------------------------------------------------------

    def receive(self, peer: IslandId, frame: Frame) -> None:
        """Takes one frame of this plan. Raises BadFrame; the link is closed then."""
        match frame.kind:
            case FrameKind.CREDIT:
                part = self._part_of(peer, frame)
                grants = self._grants.get(part.owner)
                if grants is not None:
                    if grants.full():
                        raise BadFrame("more credit than can be used")
                    grants.put_nowait((frame.first_cell, frame.cells))
            case FrameKind.LEAVES:
                cells = frame.first_cell, frame.cells
                self._owned().take_leaves(peer, cells, bytes(frame.payload))
            case FrameKind.CELLS:
                self._owned().take_cells(peer, cut_cells(frame, self._sizes))
            case FrameKind.REDUCED:
                if self._part_of(peer, frame) not in self._held:
                    for cell, data in cut_cells(frame, self._sizes):
                        self._reduced[cell] = bytes(data)
            case FrameKind.PART_ROOT:
                self._take_part_root(peer, frame)
            case _:
                raise BadFrame(f"a {frame.kind.name} frame does not belong to a plan")
        self._changed.set()

    def _owned(self) -> PartSum:
        if self.sum is None:
            raise BadFrame("cells or leaves of a part that is not ours")
        return self.sum

    def _take_part_root(self, peer: IslandId, frame: Frame) -> None:
        part = self._part_of(peer, frame)
        signed = decode_signed(bytes(frame.payload))
        claim = decode_part_root(verified(signed, "part_root"))
        if signed.signer != peer or claim.plan_id != self.plan_id:
            raise BadFrame("a part root of another owner or plan")
        cells = [self._reduced.get(c) for c in range(part.first_cell, part.stop_cell)]
        present = [leaf(digest(c)) for c in cells if c is not None]
        if len(present) != part.cells or root(present) != claim.root:
            raise BadFrame("reduced cells that do not lead to their owner's signed root")
        self._hold(part)

    def _hold(self, part: Part) -> None:
        if part not in self._held:
            self._held.add(part)
            self._hooks.part_held(part)

    def _part_of(self, owner: IslandId, frame: Frame) -> Part:
        for part in self.plan.parts:
            if (
                part.owner == owner
                and part.first_cell <= frame.first_cell
                and frame.first_cell + frame.cells <= part.stop_cell
            ):
                return part
        raise BadFrame(f"{short(owner)} does not own these cells")

    # --- sending -------------------------------------------------------------------------------

    def measured_up_bps(self) -> float | None:
        """Rate at which links took our cells; None if too few passed to tell."""
        if self._sent_bytes < _TELLING_BYTES or self._sending_s < _TELLING_S:
            return None
        return 8 * self._sent_bytes / self._sending_s

    async def _send(
        self, link: Link, kind: FrameKind, payload: bytes, cells: Sequence[int]
    ) -> None:
        first, count = cells
        frame = encode_frame(kind, payload, plan_id=self.plan_id, first_cell=first, cells=count)
        before_s = time.monotonic()
        await link.send(frame)
        self._sending_s += time.monotonic() - before_s
        self._sent_bytes += len(frame)


def _window_beyond(part_sum: PartSum, granted: int) -> bool:
    return part_sum.window_stop() > granted


def _summed(part_sum: PartSum, stop: int) -> bool:
    return part_sum.summed_to >= stop


def _log_failure(task: asyncio.Task[None]) -> None:
    """An error in one job holds the round: it must be seen at once, not when the exchange is stopped."""
    if not task.cancelled() and task.exception() is not None:
        log.error("exchange_failed", reason=str(task.exception()))
