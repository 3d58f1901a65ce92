"""This island's rounds: carries out, in order, what the pure round machine decides.

The machine says what; this file is how: exchange, disk, votes, the swap of anchors, the trainer's answer.
It runs in the daemon's one task and is never entered twice at a time; only `obey`, which stores a promise
and returns, is also called by the task that registers.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import structlog
from safetensors.numpy import save

from node.contribution import Contribution
from node.events import Events
from node.exchange import Exchange, Hooks, Wiring
from node.metered_transport import MeteredTransport
from node.outbox import Outbox
from node.run_state import RunState, committed
from node.site import Site
from node.trainer_desk import TrainerDesk
from node.update_donor import fetch_update
from outer_optimizer.encoding import BadEncoding
from outer_optimizer.finite import NonFinite
from protocol import atoll_coordinator_pb2 as pb
from protocol import round as rm
from protocol.errors import BadFrame, InvariantBroken, TrainerFailed
from protocol.frames import Frame
from protocol.identity import short, verified
from protocol.messages import ClosedRecord, Digest, IslandId, Plan, Ready, Record, Signed, Term
from protocol.state_dir import write_atomically
from protocol.wire import (
    decode_part_root,
    decode_plan,
    encode_ready,
    encode_report,
    plan_id,
)

log = structlog.get_logger()

_RETRY_S = 0.5
_EARLY_FRAMES = 256
_PAST_PLANS = 64

Put = Callable[..., None]
"""put(coroutine function, *arguments): to be run in the daemon's one task, after what waits already."""


@dataclass(frozen=True)
class Surroundings:
    """What an island's rounds touch."""

    site: Site
    wiring: Wiring
    transport: MeteredTransport
    events: Events
    desk: TrainerDesk
    outbox: Outbox
    put: Put


class Rounds:
    def __init__(self, state: RunState, around: Surroundings) -> None:
        self._state, self._around = state, around
        self._me = around.wiring.identity.island
        self._events, self._desk = around.events, around.desk
        self._machine = rm.RoundMachine(
            self._me,
            state.journal.promised,
            state.chain.head_slot,
            state.chain.view_slot,
            state.journal.ballots(),
        )
        self._contribution: Contribution | None = None
        self._exchange: Exchange | None = None
        self._early: deque[tuple[IslandId, Frame]] = deque(maxlen=_EARLY_FRAMES)  # the oldest go
        self._past_plans: deque[Digest] = deque(maxlen=_PAST_PLANS)
        self._plan_bytes: dict[Digest, bytes] = {}
        self._part_roots: dict[tuple[Digest, IslandId, int], Digest] = {}
        self._up_bps = 0.0
        self.opened, self.finished = asyncio.Event(), asyncio.Event()

    # --- what is told to us --------------------------------------------------------------------

    @property
    def promised(self) -> Term:
        return self._machine.promised

    async def obey(self, term: Term) -> bool:
        """Promises a newer term, on disk before this returns; False: the speaker is outdated."""
        effects = self._machine.step(rm.TermSeen(term), time.monotonic())
        await self._carry_out(effects)
        return not any(isinstance(effect, rm.RefuseTerm) for effect in effects)

    async def take_plan(self, plan_bytes: bytes) -> None:
        pid = plan_id(plan_bytes)
        self._plan_bytes[pid] = plan_bytes
        await self._step(rm.PlanArrived(decode_plan(plan_bytes), pid))

    async def take_record(self, closed: ClosedRecord) -> None:
        """The next record of the chain; one we have is checked against ours and left."""
        record = self._state.append(closed)
        if record is None:
            return
        self._plan_bytes.clear()
        self._part_roots.clear()
        await self._step(rm.RecordArrived(record, closed))
        if record.slot == 0:
            self._events.write("opened", islands=[m.name for m in self._state.chain.view])
            self._open()

    def take_part_root(self, signed: Signed) -> None:
        """Two signed roots of one part of one plan prove that its owner told us different sums."""
        part = decode_part_root(verified(signed, "part_root"))
        key = part.plan_id, signed.signer, part.first_cell
        if self._part_roots.setdefault(key, part.root) != part.root:
            raise InvariantBroken(
                f"{short(signed.signer)} signed two sums for one part of one plan"
            )

    def take_frame(self, peer: IslandId, frame: Frame) -> None:
        """Frames of the running plan; those of a plan we have not heard of yet wait for it."""
        exchange = self._exchange
        if exchange is not None and exchange.plan_id == frame.plan_id:
            exchange.receive(peer, frame)
        elif frame.plan_id not in self._past_plans:
            self._early.append((peer, frame))

    async def say_again(self) -> None:
        """What a coordinator that has just heard of us may not know."""
        held = self._machine.held_roots.get(self._state.chain.head_slot + 1)
        if self._contribution is not None and self._contribution.root == held:
            self._send_ready(self._contribution)

    async def take_up(self, missing: list[Record]) -> None:
        """After a restart: the rounds we lack, then the state the log says we are in."""
        for record in missing:
            await self._repair(record)
        if self._state.chain.finished:
            await self._finish()
        elif self._state.chain.opened:
            self._open()

    def _open(self) -> None:
        self._around.wiring.links.begin()
        self.opened.set()

    # --- effects -------------------------------------------------------------------------------

    async def _step(self, event: rm.Event) -> None:
        await self._carry_out(self._machine.step(event, time.monotonic()))

    async def _carry_out(self, effects: list[rm.Effect]) -> None:
        for effect in effects:
            match effect:
                case rm.StorePromise(term):
                    self._state.journal.promise(term)
                case rm.Exchange(plan, pid):
                    await self._start_exchange(plan, pid)
                case rm.Abandon():
                    await self.stop_exchange()
                case rm.ReportGone(plan, root):
                    gone = pb.Gone(run_id=plan.run_id, round=plan.slot, root=root)
                    self._around.outbox.sign_and_put("gone", gone.SerializeToString())
                case rm.Stage(plan, pid):
                    await self._stage(plan, pid)
                case rm.Vote(report):
                    signed = self._around.wiring.identity.sign("report", encode_report(report))
                    self._state.journal.vote(report.slot, signed, self._plan_bytes[report.plan_id])
                    self._around.outbox.put("report", signed)
                case rm.Apply(record, staged):
                    await self._apply(record, staged)
                case rm.SkipRound(record):
                    self._events.write("void", round=record.slot)
                    await self._desk.skipped()
                    await self.offer()
                case rm.Finish():
                    await self._finish()
                case rm.RefuseTerm():
                    pass

    async def _start_exchange(self, plan: Plan, pid: Digest) -> None:
        await self.stop_exchange()
        self._events.write("planned", round=plan.slot, attempt=plan.ballot.attempt)
        self._exchange = Exchange(
            plan,
            pid,
            self._state.layout.fragments[self._state.fragment_of(plan.slot)],
            self._contribution if plan.participant(self._me) is not None else None,
            self._state.chain.members,
            self._around.wiring,
            Hooks(
                part_held=lambda part: self._around.put(self._step, rm.PartHeld(pid, part)),
                part_summed=lambda signed: self._around.outbox.put("part_root", signed),
            ),
        )
        self._exchange.start()
        early = list(self._early)
        self._early.clear()
        for peer, frame in early:
            try:
                self.take_frame(peer, frame)
            except BadFrame as error:
                log.error("bad_frame", peer=short(peer), reason=str(error))
                await self._around.wiring.links.drop(peer)

    async def stop_exchange(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            self._past_plans.append(exchange.plan_id)
            self._up_bps = exchange.measured_up_bps() or self._up_bps
            await exchange.stop()

    async def _stage(self, plan: Plan, pid: Digest) -> None:
        if self._exchange is None or self._exchange.plan_id != pid:
            return
        cells = self._exchange.cells()
        compute = self._around.wiring.compute
        try:
            reduced_root, new_root = await compute(self._state.stage, plan.slot, cells)
        except (NonFinite, BadEncoding) as error:
            raise InvariantBroken(
                f"round {plan.slot}: the sum cannot be applied: {error}"
            ) from None
        await self._step(rm.Staged(pid, reduced_root, new_root))

    async def _apply(self, record: Record, staged: bool) -> None:
        if staged:
            self._state.swap(record)
        else:
            await self._repair(record)
        self._note_commit(record)
        self._contribution = None
        await self._desk.applied(record)
        await self.offer()
        if self._state.snapshot_due(record):
            await self._around.wiring.compute(self._state.save_snapshot)

    async def _repair(self, record: Record) -> None:
        """Fetches the committed cells from whoever holds them, until somebody does."""
        commit = committed(record)
        while True:
            compute = self._around.wiring.compute
            cells = await compute(self._state.stored_update, commit.reduced_root, commit.fragment)
            if cells is None:
                donors = self._around.wiring.links.others
                cells = await fetch_update(self._around.transport, donors, self._state, record)
            if cells is not None:
                await compute(self._state.apply_update, record, cells)
                self._events.write("repaired", round=record.slot)
                return
            log.warning("update_nowhere", round=record.slot, retry_s=_RETRY_S)
            await asyncio.sleep(_RETRY_S)

    async def _finish(self) -> None:
        model = self._around.site.final_model
        tensors = self._state.replica.named_tensors()
        write_atomically(model, await self._around.wiring.compute(save, tensors))
        await self._around.wiring.compute(self._state.save_snapshot)
        self._events.write("finished", round=self._state.chain.head_slot, model=str(model))
        self._around.wiring.links.stop_dialling()
        await self._desk.stop("the run is finished")
        self.finished.set()

    # --- contributions -------------------------------------------------------------------------

    async def offer(self) -> None:
        """A waiting trainer's work becomes our contribution, unless a plan already names one."""
        round_ = self._state.chain.head_slot + 1
        if self._desk.waiting is None or not self._machine.may_replace_contribution(round_):
            return
        try:
            contribution = await self._desk.contribution()
        except NonFinite as error:
            raise TrainerFailed(f"training has diverged: {error}: try a lower inner.lr") from None
        if contribution is None:
            return
        self._contribution = contribution
        self._machine.hold_contribution(round_, contribution.root)
        self._send_ready(contribution)

    def _send_ready(self, contribution: Contribution) -> None:
        base = self._state.chain.bases[contribution.fragment]
        ready = Ready(
            run_id=self._state.start.run_id,
            round=self._state.chain.head_slot + 1,
            base_round=base.round,
            base_root=base.root,
            revision=0,
            root=contribution.root,
            tokens=contribution.tokens,
            steps=contribution.steps,
            up_bps=self._up_bps,
            squared_norms=contribution.squared_norms,
        )
        self._around.outbox.sign_and_put("ready", encode_ready(ready))

    def _note_commit(self, record: Record) -> None:
        commit, tokens = committed(record), self._state.chain.committed_tokens
        traffic = self._around.transport.traffic
        self._events.write(
            "commit",
            round=record.slot,
            fragment=commit.fragment,
            participants=[short(p.island) for p in commit.participants],
            new_root=commit.new_root.hex(),
            tokens=tokens,
            listed=commit.participant(self._me) is not None,
            sent_bytes=traffic.sent_bytes,
            received_bytes=traffic.received_bytes,
        )
        log.info("committed", round=record.slot, tokens=tokens, loss=self._desk.loss)
