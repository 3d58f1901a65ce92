"""The data of one plan: a two-stage all-reduce among islands.

    participant ── LEAVES, then CELLS against the owner's CREDIT ──► owner: checks, sums, encodes once
    everyone    ◄── REDUCED cells as they are ready, then the signed PART_ROOT ── owner

The owner sums in fp32 in sorted island order and decodes what it encoded like everybody else. It grants
credit window by window, so it never holds more than `_WINDOW_BYTES` per peer. Everything on a link may
be said again: after a lost link both sides begin their part of the conversation anew, and what already
arrived is not asked for twice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import structlog

from node.contribution import LEAF_BYTES, Contribution, split_leaf
from node.peer_links import Link, PeerLinks
from outer_optimizer.aggregate import add_weighted
from outer_optimizer.codec import Codec
from outer_optimizer.pseudo_gradient import squared_norm
from protocol.errors import BadFrame, InvariantBroken, TransportError
from protocol.frames import Frame, FrameKind, encode_frame
from protocol.identity import Identity, short, verified
from protocol.layout import Fragment
from protocol.merkle import DIGEST_BYTES, digest, leaf, prove_range, root, verify_range
from protocol.messages import Digest, IslandId, Part, PartRoot, Plan, Signed
from protocol.wire import decode_part_root, decode_signed, encode_part_root, encode_signed

log = structlog.get_logger()

CHUNK_BYTES = 256 << 10
_WINDOW_BYTES = 4 << 20  # at least CHUNK_BYTES: a chunk is summed when all of it is there
_NORM_TOLERANCE = 1e-4
# Below these a measured rate is that of a buffer, not of a line.
_TELLING_BYTES = 4 << 20
_TELLING_S = 0.5

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
        self.plan, self.plan_id = plan, plan_id
        self._fragment, self._contribution, self._members = fragment, contribution, members
        self._codec, self._links, self._compute = wiring.codec, wiring.links, wiring.compute
        self._identity, self._me, self._hooks = wiring.identity, wiring.identity.island, hooks
        self._sizes = [wiring.codec.encoded_bytes(cell.lengths) for cell in fragment.cells]
        self.reduced: dict[int, bytes] = {}
        self._grants: dict[IslandId, asyncio.Queue[tuple[int, int]]] = {}
        self._leaves: dict[IslandId, list[tuple[Digest, float]]] = {}
        self._inbox: dict[IslandId, dict[int, memoryview]] = {}
        self._summed_to = -1
        self._signed_root: Signed | None = None
        self._held: set[Part] = set()
        self._changed = asyncio.Event()
        self._mine = next((part for part in plan.parts if part.owner == self._me), None)
        self._tasks: list[asyncio.Task[None]] = []
        self._sent_bytes, self._sending_s = 0, 0.0

    # --- life ----------------------------------------------------------------------------------

    def start(self) -> None:
        jobs: list[Coroutine[Any, Any, None]] = []
        if self._contribution is not None:
            for part in self.plan.parts:
                if part.owner != self._me:
                    self._grants[part.owner] = asyncio.Queue()
                    jobs.append(self._with_link(part.owner, self._offer, part))
        if self._mine is not None:
            part = self._mine
            self._summed_to = part.first_cell
            jobs.append(self._sum_part(part))
            others = [p.island for p in self.plan.participants if p.island != self._me]
            self._inbox = {island: {} for island in others}
            jobs += [self._with_link(island, self._collect, part) for island in others]
            jobs += [
                self._with_link(island, self._deliver, part)
                for island in sorted(self._members - {self._me})
            ]
        self._tasks = [asyncio.create_task(job) for job in jobs]
        for task in self._tasks:
            task.add_done_callback(_log_failure)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cells(self) -> list[bytes]:
        """All reduced cells in order; only once every part is held."""
        return [self.reduced[i] for i in range(len(self._sizes))]

    async def _with_link(
        self, island: IslandId, job: Callable[[Link, Part], Awaitable[None]], part: Part
    ) -> None:
        """Does `job` on every link there is, one after the other, until the exchange is stopped.

        Also after it was done: what was sent on a link that broke may not have arrived.
        """
        while True:
            link = await self._links.link(island)
            work = asyncio.ensure_future(job(link, part))
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

    async def _offer(self, link: Link, part: Part) -> None:
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
            for at, cells in self._chunks(first, first + count):
                await self._send(
                    link, FrameKind.CELLS, b"".join(mine.cells[at : at + cells]), (at, cells)
                )

    # --- owner ---------------------------------------------------------------------------------

    async def _collect(self, link: Link, part: Part) -> None:
        """Grants credit: at most a window ahead of what is summed."""
        granted = self._next_missing(link.island, part)
        while granted < part.stop_cell:
            stop = self._window_stop(part)
            if granted < stop:
                await self._send(link, FrameKind.CREDIT, b"", (granted, stop - granted))
                granted = stop
            else:
                await self._until(partial(self._window_beyond, part, granted))

    def _next_missing(self, island: IslandId, part: Part) -> int:
        cell = self._summed_to
        while cell < part.stop_cell and cell in self._inbox[island]:
            cell += 1
        return cell

    def _window_beyond(self, part: Part, granted: int) -> bool:
        return self._window_stop(part) > granted

    def _window_stop(self, part: Part) -> int:
        stop, taken = self._summed_to, 0
        while stop < part.stop_cell and (taken == 0 or taken + self._sizes[stop] <= _WINDOW_BYTES):
            taken += self._sizes[stop]
            stop += 1
        return stop

    async def _sum_part(self, part: Part) -> None:
        leaves, norms = [], np.zeros(len(self._fragment.tensors))
        for first, count in self._chunks(part.first_cell, part.stop_cell):
            batch = range(first, first + count)
            await self._until(partial(self._arrived, batch))
            for cell, encoded, cell_norms in await self._compute(self._sum_cells, batch):
                self.reduced[cell] = encoded
                leaves.append(leaf(digest(encoded)))
                for tensor, norm in cell_norms:
                    norms[tensor] += norm
            for box in self._inbox.values():
                for cell in batch:
                    del box[cell]
            self._summed_to = first + count
            self._changed.set()
        part_root = PartRoot(
            run_id=self.plan.run_id,
            plan_id=self.plan_id,
            first_cell=part.first_cell,
            cells=part.cells,
            root=root(leaves),
            residual_before=b"",
            residual_after=b"",
            squared_norms=tuple(float(n) for n in norms),
        )
        self._signed_root = self._identity.sign("part_root", encode_part_root(part_root))
        self._changed.set()
        self._hooks.part_summed(self._signed_root)
        self._hold(part)

    def _arrived(self, batch: range) -> bool:
        return all(cell in box for box in self._inbox.values() for cell in batch)

    def _summed(self, stop: int) -> bool:
        return self._summed_to >= stop

    def _sum_cells(self, batch: range) -> list[tuple[int, bytes, list[tuple[int, float]]]]:
        return [(cell, *self._sum_cell(cell)) for cell in batch]

    def _sum_cell(self, number: int) -> tuple[bytes, list[tuple[int, float]]]:
        """Weighted mean of one cell in sorted island order, encoded; with its norms per tensor."""
        cell = self._fragment.cells[number]
        total, values, scratch = (np.zeros(cell.values, np.float32) for _ in range(3))
        for participant in self.plan.participants:
            data, claim = self._contributed(participant.island, number)
            self._codec.decode(data, cell.lengths, values)
            norm = squared_norm(values)
            if abs(norm - claim) > _NORM_TOLERANCE * max(norm, claim):
                raise InvariantBroken(
                    f"{short(participant.island)} signed a squared norm of {claim} for cell {number}, "
                    f"it is {norm}: its contribution is false"
                )
            add_weighted(total, values, np.float32(participant.weight), scratch)
        encoded = self._codec.encode(total, cell.lengths)
        self._codec.decode(encoded, cell.lengths, total)
        norms, start = [], 0
        for tensor, count in cell.segments:
            norms.append((tensor, squared_norm(total[start : start + count])))
            start += count
        return encoded, norms

    def _contributed(self, island: IslandId, cell: int) -> tuple[bytes | memoryview, float]:
        if island == self._me and self._contribution is not None:
            return self._contribution.cells[cell], split_leaf(
                self._contribution.leaf_contents[cell]
            )[1]
        part = self._mine
        if part is None:
            raise InvariantBroken("only an owner sums")
        return self._inbox[island][cell], self._leaves[island][cell - part.first_cell][1]

    async def _deliver(self, link: Link, part: Part) -> None:
        """Reduced cells as they are ready, then the signed root."""
        for first, count in self._chunks(part.first_cell, part.stop_cell):
            await self._until(partial(self._summed, first + count))
            payload = b"".join(self.reduced[c] for c in range(first, first + count))
            await self._send(link, FrameKind.REDUCED, payload, (first, count))
        await self._until(lambda: self._signed_root is not None)
        if self._signed_root is not None:
            await self._send(link, FrameKind.PART_ROOT, encode_signed(self._signed_root), part[1:])

    # --- what arrives --------------------------------------------------------------------------

    def receive(self, peer: IslandId, frame: Frame) -> None:
        """Takes one frame of this plan. Raises BadFrame; the link is closed then."""
        match frame.kind:
            case FrameKind.CREDIT:
                self._take_credit(peer, frame)
            case FrameKind.LEAVES:
                self._take_leaves(peer, frame)
            case FrameKind.CELLS:
                self._take_cells(peer, frame)
            case FrameKind.REDUCED:
                self._take_reduced(peer, frame)
            case FrameKind.PART_ROOT:
                self._take_part_root(peer, frame)
            case _:
                raise BadFrame(f"a {frame.kind.name} frame does not belong to a plan")
        self._changed.set()

    def _take_credit(self, peer: IslandId, frame: Frame) -> None:
        part = self._part_of(peer, frame)
        if part.owner in self._grants:
            self._grants[part.owner].put_nowait((frame.first_cell, frame.cells))

    def _take_leaves(self, peer: IslandId, frame: Frame) -> None:
        part, participant = self._mine, self.plan.participant(peer)
        if part is None or participant is None or part[1:] != (frame.first_cell, frame.cells):
            raise BadFrame("leaves of a part that is not ours")
        body, split = bytes(frame.payload), part.cells * LEAF_BYTES
        contents = [body[i : i + LEAF_BYTES] for i in range(0, split, LEAF_BYTES)]
        proof = [body[i : i + DIGEST_BYTES] for i in range(split, len(body), DIGEST_BYTES)]
        leaves = [leaf(content) for content in contents]
        if not verify_range(participant.root, len(self._sizes), part.first_cell, leaves, proof):
            raise BadFrame("leaves that do not lead to the contribution's root")
        self._leaves[peer] = [split_leaf(content) for content in contents]

    def _take_cells(self, peer: IslandId, frame: Frame) -> None:
        part = self._mine
        if part is None or peer not in self._inbox or peer not in self._leaves:
            raise BadFrame("cells that nobody asked for")
        if frame.first_cell < part.first_cell or frame.first_cell + frame.cells > self._window_stop(
            part
        ):
            raise BadFrame("cells beyond the granted credit")
        for cell, data in self._cut(frame):
            if cell < self._summed_to:
                continue
            if digest(data) != self._leaves[peer][cell - part.first_cell][0]:
                raise BadFrame(f"cell {cell} is not the one that was signed")
            self._inbox[peer][cell] = data

    def _take_reduced(self, peer: IslandId, frame: Frame) -> None:
        part = self._part_of(peer, frame)
        if part in self._held:
            return
        for cell, data in self._cut(frame):
            self.reduced[cell] = bytes(data)

    def _take_part_root(self, peer: IslandId, frame: Frame) -> None:
        part = self._part_of(peer, frame)
        signed = decode_signed(bytes(frame.payload))
        claim = decode_part_root(verified(signed, "part_root"))
        if signed.signer != peer or claim.plan_id != self.plan_id:
            raise BadFrame("a part root of another owner or plan")
        cells = [self.reduced.get(c) for c in range(part.first_cell, part.stop_cell)]
        present = [leaf(digest(c)) for c in cells if c is not None]
        if len(present) != part.cells or root(present) != claim.root:
            raise BadFrame("reduced cells that do not lead to their owner's signed root")
        self._hold(part)

    def _hold(self, part: Part) -> None:
        if part not in self._held:
            self._held.add(part)
            self._hooks.part_held(part)

    # --- cells and chunks ----------------------------------------------------------------------

    def _part_of(self, owner: IslandId, frame: Frame) -> Part:
        for part in self.plan.parts:
            if (
                part.owner == owner
                and part.first_cell <= frame.first_cell
                and frame.first_cell + frame.cells <= part.stop_cell
            ):
                return part
        raise BadFrame(f"{short(owner)} does not own these cells")

    def _chunks(self, first: int, stop: int) -> Iterator[tuple[int, int]]:
        return chunks(self._sizes, first, stop)

    def _cut(self, frame: Frame) -> list[tuple[int, memoryview]]:
        return cut_cells(frame, self._sizes)

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


def chunks(sizes: Sequence[int], first: int, stop: int) -> Iterator[tuple[int, int]]:
    """Runs (first cell, cells) of at most CHUNK_BYTES, or one larger cell."""
    while first < stop:
        count, taken = 1, sizes[first]
        while first + count < stop and taken + sizes[first + count] <= CHUNK_BYTES:
            taken += sizes[first + count]
            count += 1
        yield first, count
        first += count


def cut_cells(frame: Frame, sizes: Sequence[int]) -> list[tuple[int, memoryview]]:
    """The cells of a chunk. Their sizes come from our layout; a wrong total is a BadFrame."""
    stop = frame.first_cell + frame.cells
    if stop > len(sizes) or sum(sizes[frame.first_cell : stop]) != len(frame.payload):
        raise BadFrame(f"cells {frame.first_cell}..{stop} do not have {len(frame.payload)} bytes")
    cells, start = [], 0
    for cell in range(frame.first_cell, stop):
        cells.append((cell, memoryview(frame.payload)[start : start + sizes[cell]]))
        start += sizes[cell]
    return cells


def _log_failure(task: asyncio.Task[None]) -> None:
    """An error in one job holds the round: it must be seen at once, not when the exchange is stopped."""
    if not task.cancelled() and task.exception() is not None:
        log.error("exchange_failed", reason=str(task.exception()))
