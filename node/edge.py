"""The trainer's side of a boundary: snapshot out, answer in, anchor applied.

    every rank: write own pieces ─► all have written ─► rank 0: Boundary ─► daemon
    every rank: apply own pieces ◄─ broadcast        ◄─ rank 0: answer   ◄─┘

One boundary at a time. `apply` follows the one rule  local += new anchor - ref.  No inner step lies between
snapshot and answer, so with the snapshot as ref the sum is the new anchor itself, and that is what is
copied: no rounding enters.

Invariants: all ranks make the same calls in the same order; only rank 0 speaks to the daemon; whoever reads
or writes pieces has resharded first.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from node.crew import Crew, muster
from node.edge_link import DaemonLost, EdgeLink
from node.edge_messages import (
    Applied,
    Apply,
    Boundary,
    Buffers,
    Evaluation,
    Follow,
    FragmentLayout,
    GoOn,
    Hello,
    Message,
    Refused,
    Stop,
    Welcome,
    decode,
    encode,
)
from node.fragment_memory import BUFFERS, FragmentMemory, Places, boxes_in, places_in
from node.host_group import HostGroup
from node.parameters import Held
from node.relay import Proxy, Remote, proxy_of
from node.shared_buffer import SharedBuffer
from protocol.errors import AtollError, InvariantBroken, RunMismatch

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Figures:
    """What the daemon is told for its accounts; `peak_flops` of one rank."""

    flops_per_token: float = 0.0
    peak_flops: float | None = None


class Edge:
    """Joins on construction: then the parameters are the anchor, and `welcome` says where we are."""

    def __init__(self, path: str, held: Held, figures: Figures) -> None:
        self.wait_s = 0.0
        self._host = HostGroup()
        self._held = held
        self.incarnation, host = json.loads(
            self._host.broadcast(json.dumps([secrets.token_hex(8), _host()]).encode())
        )
        self._link = _link_if_local(path, self._host.rank) if host == _host() else None
        self._buffers: list[SharedBuffer] = []
        self._fragments: list[FragmentMemory] = []
        self._relays: list[list[Proxy | Remote]] = []
        try:
            crew = muster(held.pieces, self._link is not None, self._host)
            self.welcome = self._join(crew, figures)
            for number, layout in enumerate(self.welcome.fragments):
                self._add_fragment(number, layout, crew)
            held.settle()
            for number, slot in enumerate(self.welcome.anchor_slot):
                for relay in self._relays[number]:
                    relay.pull(slot)
                self._fragments[number].take_anchor(slot)
        except BaseException:
            self.close()
            raise

    # --- joining -------------------------------------------------------------------------------

    def _join(self, crew: Crew, figures: Figures) -> Welcome:
        peak = figures.peak_flops and figures.peak_flops * self._host.size
        hello = Hello(
            self.incarnation,
            os.getpid(),
            crew.layout,
            self._host.size,
            figures.flops_per_token or 6.0 * sum(tensor.values for tensor in crew.layout),
            peak,
        )
        welcome = self._ask(hello)
        if isinstance(welcome, Refused):
            raise RunMismatch(f"the daemon refuses this trainer: {welcome.reason}")
        if not isinstance(welcome, Welcome):
            raise InvariantBroken(f"the daemon answers Hello with {type(welcome).__name__}")
        if self._link is not None and self._host.rank:
            self._link.send(Follow(self._host.rank, self.incarnation))
            answer = self._link.receive()
            if isinstance(answer, Refused):
                raise RunMismatch(f"the daemon refuses rank {self._host.rank}: {answer.reason}")
            if not isinstance(answer, Buffers):
                raise InvariantBroken(f"the daemon answers Follow with {type(answer).__name__}")
        return welcome

    def _ask(self, message: Message) -> Message:
        """Rank 0 asks, all ranks get the answer; the others' `message` is not used."""
        line = b""
        if self._host.rank == 0 and self._link is not None:
            try:
                self._link.send(message)
                line = encode(self._link.receive())
            except AtollError:
                self._host.broadcast(b"")
                raise
        line = self._host.broadcast(line)
        if not line:
            raise DaemonLost("rank 0 cannot reach the daemon")
        return decode(line)

    def _add_fragment(self, number: int, layout: FragmentLayout, crew: Crew) -> None:
        rank, shapes = self._host.rank, crew.shapes
        boxes = [boxes_in(layout, held) for held in crew.boxes]
        relays: list[Proxy | Remote] = []
        if self._link is None:
            remote = Remote(self._host, proxy_of(rank, crew.local), boxes[rank], BUFFERS)
            relays.append(remote)
            places: list[Places] = [*remote.places]
            writes = set(boxes[rank])
        else:
            descriptors = self._link.take_descriptors(BUFFERS)
            shared = [SharedBuffer.open(fd, layout.values) for fd in descriptors]
            self._buffers += shared
            places = [places_in(buffer, layout, boxes[rank], shapes) for buffer in shared]
            writes = crew.writes[rank]
            for other, local in enumerate(crew.local):
                if not local and proxy_of(other, crew.local) == rank:
                    theirs = [places_in(buffer, layout, boxes[other], shapes) for buffer in shared]
                    relays.append(
                        Proxy(self._host, other, boxes[other], crew.writes[other], theirs)
                    )
        pieces = [piece for piece in self._held.pieces if piece.name in boxes[rank]]
        self._fragments.append(FragmentMemory(pieces, writes, places))
        self._relays.append(relays)

    # --- boundaries ----------------------------------------------------------------------------

    def meet(self, boundary: Boundary, rank_s: float) -> Apply | GoOn | Stop:
        """Hands over the snapshot of the fragment that is due; returns when the daemon answers.

        `rank_s` = this rank's time since the last edge. The boundary's loss becomes the ranks' mean.
        """
        self._held.settle()
        self._fragments[boundary.fragment].write_snapshot()
        for relay in self._relays[boundary.fragment]:
            relay.push()
        before_s = time.perf_counter()
        rows = self._host.numbers(
            [rank_s, float("nan") if boundary.loss is None else boundary.loss]
        )
        losses = [loss for _, loss in rows if loss == loss]
        answer = self._ask(
            replace(
                boundary,
                rank_s=tuple(seconds for seconds, _ in rows),
                loss=sum(losses) / len(losses) if losses else None,
            )
        )
        self.wait_s += time.perf_counter() - before_s
        if isinstance(answer, Stop):
            return answer
        if isinstance(answer, Apply | GoOn) and answer.sequence == boundary.sequence:
            return answer
        raise InvariantBroken(f"the daemon answers boundary {boundary.sequence} with {answer}")

    def apply(self, answer: Apply) -> None:
        memory = self._fragments[answer.fragment]
        for relay in self._relays[answer.fragment]:
            relay.pull(answer.anchor_slot)
        if answer.ref == "anchor":
            memory.rebase(answer.anchor_slot)
        else:
            memory.take_anchor(answer.anchor_slot)
        self._tell(Applied(answer.fragment, answer.round, answer.sequence))

    def take_anchor(self) -> None:
        """The parameters become the anchor, for good."""
        self._held.settle()
        for memory in self._fragments:
            memory.take_anchor(memory.slot)

    def report(self, evaluation: Evaluation) -> None:
        self._tell(evaluation)

    def _tell(self, message: Message) -> None:
        if self._host.rank == 0 and self._link is not None:
            self._link.send(message)

    @contextmanager
    def at_anchor(self) -> Iterator[None]:
        """Inside, the parameters are the anchor, whatever rebases went before."""
        self._held.settle()
        kept = [[local.clone() for local in memory] for memory in self._fragments]
        self.take_anchor()
        try:
            yield
        finally:
            self._held.settle()
            for memory, values in zip(self._fragments, kept, strict=True):
                memory.restore(values)

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
        self._fragments, self._relays = [], []
        for buffer in self._buffers:
            buffer.close()


def _host() -> str:
    """Another one on every machine, and after every boot of it."""
    return _BOOT_ID.read_text().strip()


def _link_if_local(path: str, rank: int) -> EdgeLink | None:
    """A rank that does not reach the daemon's socket is on another host; rank 0 must not be."""
    try:
        return EdgeLink(path)
    except DaemonLost:
        if rank == 0:
            raise
        return None
