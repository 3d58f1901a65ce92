"""The daemon's dealings with its trainer: buffers, boundaries, answers.

At a boundary the trainer has written a snapshot and waits. The desk turns the snapshot into this
island's contribution for the lowest open round, and answers when that round is closed. Rounds are
numbered here, never by the trainer.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import structlog

from node.contribution import Contribution, make_contribution
from node.edge_messages import (
    Apply,
    Boundary,
    FragmentLayout,
    GoOn,
    Hello,
    Refused,
    Stop,
    TensorSlot,
    Welcome,
)
from node.exchange import Compute
from node.handover import Handover
from node.run_state import RunState, committed
from node.shared_buffer import SharedBuffer
from node.trainer_link import TrainerLink
from protocol.layout import Fragment, first_difference
from protocol.messages import IslandId, Record

log = structlog.get_logger()

_SNAPSHOT = 2


class TrainerDesk:
    """`note` records an event of this island (name and fields)."""

    def __init__(
        self,
        state: RunState,
        me: IslandId,
        link: TrainerLink,
        compute: Compute,
        note: Callable[..., None],
    ) -> None:
        self._state, self._me, self._link = state, me, link
        self._compute, self._note = compute, note
        sync = state.spec.sync
        self.handover = Handover(me, sync.late, sync.max_carry_rounds)
        self._buffers = [_make_buffers(i, f.values) for i, f in enumerate(state.layout.fragments)]
        self.waiting: Boundary | None = None
        self.totals: Boundary | None = None
        self.loss: float | None = None
        self.dismissed = False  # the present trainer has been told that the run is over
        self.tokens_at: dict[int, int] = {}  # of rounds whose evaluation is asked for
        self._steps_before = 0

    # --- greeting ------------------------------------------------------------------------------

    async def greet(self, hello: Hello) -> str | None:
        """Answers a new trainer with buffers and anchors, or refuses it and says why."""
        self._link.turn_to(hello.incarnation)
        difference = first_difference(hello.layout, self._state.layout.tensors)
        if difference is not None:
            await self._link.send(Refused(difference))
            return difference
        chain, replica = self._state.chain, self._state.replica
        self.waiting = self.totals = None
        self.dismissed = False
        self._steps_before = chain.steps_of(self._me)
        self.handover.begin(hello.incarnation, self._steps_before, list(replica.rounds))
        for number, buffers in enumerate(self._buffers):
            await self._compute(np.copyto, buffers[0].values, replica.anchor(number))
        welcome = Welcome(
            fragments=tuple(_edge_layout(f) for f in self._state.layout.fragments),
            anchor_slot=(0,) * len(self._buffers),
            round=chain.head_slot,
            first_step=self._steps_before,
            next_edge_step=self._steps_before + self._state.inner_steps(self._next_round),
            next_fragment=self._state.fragment_of(self._next_round),
            committed_tokens=chain.committed_tokens,
            islands=len(chain.view),
            index=[member.island for member in chain.view].index(self._me),
            evaluate=self._evaluation_due(chain.head_slot, chain.head_slot == 0),
            warmup_tokens=self._state.spec.inner.warmup_tokens,
            target_tokens=self._state.spec.target_tokens,
            min_lr_ratio=self._state.spec.inner.min_lr_ratio,
        )
        descriptors = [
            b.fd for anchors in self._buffers for b in (anchors[_SNAPSHOT], *anchors[:2])
        ]
        await self._link.send(welcome, descriptors)
        return None

    @property
    def _next_round(self) -> int:
        return self._state.chain.head_slot + 1

    @property
    def _evaluator(self) -> bool:
        """The first island of the view measures the held-out loss."""
        view = self._state.chain.view
        return bool(view) and view[0].island == self._me

    def _evaluation_due(self, round_: int, due: bool) -> bool:
        if due and self._evaluator:
            self.tokens_at[round_] = self._state.chain.committed_tokens
        return due and self._evaluator

    # --- boundaries ----------------------------------------------------------------------------

    async def arrive(self, boundary: Boundary) -> None:
        """A trainer waits at its boundary."""
        if self._state.chain.finished:
            await self.stop("the run is finished")
            return
        self.waiting = self.totals = boundary
        if boundary.loss is not None:
            self.loss = boundary.loss
        fragment = self.handover.fragments[boundary.fragment]
        if fragment.given_round < self._state.replica.rounds[boundary.fragment]:
            await self._catch_up(boundary)
        elif self._state.fragment_of(self._next_round) != boundary.fragment:
            await self._go_on(boundary, self._state.inner_steps(self._next_round))

    async def contribution(self) -> Contribution | None:
        """This island's contribution to the next round, from the waiting trainer's snapshot."""
        boundary = self.waiting
        if boundary is None or self._state.fragment_of(self._next_round) != boundary.fragment:
            return None
        number = boundary.fragment
        contribution: Contribution = await self._compute(
            make_contribution,
            number,
            self._state.layout.fragments[number],
            self._state.codec,
            self._state.replica.anchor(number),
            self._buffers[number][_SNAPSHOT].values,
            self.handover.uncounted(number, boundary),
        )
        self.handover.snapshot(number, contribution.root, boundary)
        return contribution

    async def applied(self, record: Record) -> None:
        """The daemon has applied a commit: if the trainer waits for this fragment, hand it over."""
        if self.waiting is not None and self.waiting.fragment == committed(record).fragment:
            await self._hand_over(self.waiting, record)

    async def skipped(self) -> None:
        """A round closed without a sum: what waits for another fragment than the next one's goes on."""
        waiting = self.waiting
        if waiting is not None and self._state.fragment_of(self._next_round) != waiting.fragment:
            await self._go_on(waiting, steps=0)

    async def _catch_up(self, boundary: Boundary) -> None:
        """Rounds of this fragment closed while the trainer was under way: one jump over all of them."""
        record = self._state.record(self._state.replica.rounds[boundary.fragment])
        await self._hand_over(boundary, record)

    async def _hand_over(self, boundary: Boundary, record: Record) -> None:
        commit, chain = committed(record), self._state.chain
        number = commit.fragment
        ref = self.handover.apply(number, record.slot, commit, boundary)
        state = self.handover.fragments[number]
        state.slot = 1 - state.slot
        anchor = self._state.replica.anchor(number)
        await self._compute(np.copyto, self._buffers[number][state.slot].values, anchor)
        last = chain.committed_tokens >= self._state.spec.target_tokens
        every = self._state.spec.data.eval_every_rounds
        # Work that missed its round is offered to the next one at once, not after another H steps.
        carried = ref == "anchor" and self._state.fragment_of(self._next_round) == number
        steps = self._state.inner_steps(self._next_round)
        self.waiting, self.dismissed = None, last
        if ref == "reset":
            self._note("work_lost", round=record.slot, fragment=number)
            log.warning("work_lost", round=record.slot)
        await self._link.send(
            Apply(
                sequence=boundary.sequence,
                fragment=number,
                round=record.slot,
                ref=ref,
                anchor_slot=state.slot,
                next_edge_step=boundary.step + (0 if carried else steps),
                next_fragment=number if carried else self._state.fragment_of(self._next_round),
                committed_tokens=chain.committed_tokens,
                islands=len(chain.view),
                evaluate=self._evaluation_due(record.slot, last or record.slot % every == 0),
                last=last,
            )
        )

    async def _go_on(self, boundary: Boundary, steps: int) -> None:
        self.waiting = None
        await self._link.send(
            GoOn(
                sequence=boundary.sequence,
                next_edge_step=boundary.step + steps,
                next_fragment=self._state.fragment_of(self._next_round),
            )
        )

    async def stop(self, reason: str) -> None:
        self.waiting, self.dismissed = None, True
        await self._link.send(Stop(reason))

    def close(self) -> None:
        for buffers in self._buffers:
            for buffer in buffers:
                buffer.close()


def _make_buffers(number: int, values: int) -> list[SharedBuffer]:
    """Anchor slots 0 and 1, and the snapshot."""
    return [
        SharedBuffer.create(f"atoll-{number}-{what}", values)
        for what in ("anchor0", "anchor1", "snapshot")
    ]


def _edge_layout(fragment: Fragment) -> FragmentLayout:
    slots = tuple(
        TensorSlot(tensor.name, offset, tensor.values)
        for tensor, offset in zip(fragment.tensors, fragment.offsets, strict=True)
    )
    return FragmentLayout(fragment.values, slots)
