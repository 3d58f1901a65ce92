"""The daemon: one island's whole life.

    join ─► hold the start state ─► trainer runs H inner steps ─► boundary: contribution, Ready
      ▲                                                                    │
      └── finish ◄── apply ◄── record (certified) ◄── vote ◄── exchange ◄── plan

One task owns all state: it takes inputs (coordinator events, trainer messages, progress of the exchange)
from one queue, lets the pure round machine decide, and carries the effects out in order. Blocking work
goes to one worker thread. The daemon never imports torch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import structlog
from safetensors.numpy import save

from node.contribution import Contribution
from node.coordinator_client import CoordinatorClient, registration_of
from node.edge_messages import Boundary, Evaluation, Hello, Message
from node.events import Events
from node.exchange import Compute, Exchange, Hooks, Wiring
from node.metered_transport import MeteredTransport
from node.outbox import Outbox
from node.peer_links import PeerLinks
from node.run_state import RunState, committed
from node.site import Site
from node.trainer_desk import TrainerDesk
from node.trainer_link import TrainerLink
from node.update_donor import UpdateDonor, fetch_update
from protocol import atoll_coordinator_pb2 as pb
from protocol import round as rm
from protocol.errors import InvariantBroken, RunMismatch, TransportError
from protocol.frames import Frame
from protocol.identity import Identity, short, verified
from protocol.messages import ClosedRecord, Digest, Endpoint, IslandId, Plan, Ready, Record, Signed
from protocol.state_dir import write_atomically
from protocol.transport import Server
from protocol.wire import (
    closed_from_pb,
    decode_part_root,
    decode_plan,
    encode_plan,
    encode_ready,
    encode_report,
    member_from_pb,
    plan_id,
    signed_from_pb,
    signed_to_pb,
    term_from_pb,
)

log = structlog.get_logger()

_RETRY_S = 0.5
_EARLY_FRAMES = 256


class Daemon:
    """`compute` runs blocking functions off the event loop."""

    def __init__(
        self,
        site: Site,
        identity: Identity,
        state: RunState,
        transport: MeteredTransport,
        compute: Compute,
        events: Events,
        trainer_link: TrainerLink,
    ) -> None:
        self._site, self._identity, self._me = site, identity, identity.island
        self.state, self._journal, self._compute = state, state.journal, compute
        self._transport, self.events = transport, events
        self._inbox: asyncio.Queue[Callable[[], Coroutine[Any, Any, None]]] = asyncio.Queue()
        self._machine = rm.RoundMachine(
            self._me,
            state.journal.promised,
            state.chain.head_slot,
            state.chain.view_slot,
            state.journal.ballots(),
        )
        self._trainer_link = trainer_link
        self._desk = TrainerDesk(state, self._me, self._trainer_link, compute, events.write)
        self._links = PeerLinks(transport, state.start.run_id, self._me, self._from_peer)
        self._contribution: Contribution | None = None
        self._exchange: Exchange | None = None
        self._early: list[tuple[IslandId, Frame]] = []
        self._part_roots: dict[tuple[Digest, int], Signed] = {}
        self._addresses: dict[IslandId, str] = {}
        self.opened, self.finished = asyncio.Event(), asyncio.Event()

    # --- life ----------------------------------------------------------------------------------

    @property
    def islands(self) -> int:
        return len(self.state.chain.view)

    @property
    def place_in_view(self) -> int:
        return [m.island for m in self.state.chain.view].index(self._me)

    @property
    def trainer_socket(self) -> str:
        return self._trainer_link.path

    async def run(self, client: CoordinatorClient, missing: list[Record]) -> None:
        """Serves peers and trainer and follows the coordinator, until cancelled.

        `missing` = committed rounds whose cells this island lacks, oldest first.
        """
        streams = {
            "Peer/Exchange": self._links.serve,
            "Peer/Update": UpdateDonor(self.state).serve,
        }
        server = await self._transport.serve(self._site.listen, {}, streams)
        self._client = client
        self._outbox = Outbox(client)
        self._put(self._take_up, missing)
        jobs = (
            self._consume(),
            self._follow(server),
            self._outbox.run(),
            self._trainer_link.run(self._from_trainer),
            self._report_progress(),
        )
        tasks = [asyncio.create_task(job) for job in jobs]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._stop_exchange()
            await self._links.close()
            await server.close()
            self._trainer_link.close()
            self._desk.close()

    async def _take_up(self, missing: list[Record]) -> None:
        """After a restart: the rounds we lack, then the state the log says we are in."""
        for record in missing:
            await self._repair(record)
        if self.state.chain.finished:
            await self._finish()
        elif self.state.chain.opened:
            self.opened.set()

    async def _consume(self) -> None:
        while True:
            job = await self._inbox.get()
            await job()

    def _put(self, job: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        self._inbox.put_nowait(lambda: job(*arguments))

    # --- coordinator ---------------------------------------------------------------------------

    async def _follow(self, server: Server) -> None:
        """Registers, then takes events from the head of our log on; again and again."""
        while True:
            try:
                await self._register(server)
                async for event in self._client.watch(
                    self.state.start.run_id, self.state.chain.head_slot + 1
                ):
                    self._put(self._event, event)
            except TransportError as error:
                log.warning("coordinator_lost", reason=str(error), retry_s=_RETRY_S)
            await asyncio.sleep(_RETRY_S)

    async def _register(self, server: Server) -> None:
        """Promises the coordinator's term, stored first; then says again what it may not know."""
        address = self._site.advertise or server.address
        registration = registration_of(
            self.state.start.run_id,
            self._site.name,
            [Endpoint(address)],
            self.state.spec.digest(),
            self.state.chain.head_slot,
        )
        while (
            other := await self._client.register(registration, self._machine.promised)
        ) is not None:
            effects = self._machine.step(rm.TermSeen(other), time.monotonic())
            if any(isinstance(effect, rm.RefuseTerm) for effect in effects):
                log.warning(
                    "old_coordinator", its_term=other.counter, ours=self._machine.promised.counter
                )
                await asyncio.sleep(_RETRY_S)
            await self._carry_out(effects)
        if self._contribution is not None:
            self._send_ready(self._contribution)

    async def _event(self, event: pb.Event) -> None:
        term = term_from_pb(event.term)
        effects = self._machine.step(rm.TermSeen(term), time.monotonic())
        await self._carry_out(effects)
        if any(isinstance(effect, rm.RefuseTerm) for effect in effects):
            return
        match event.WhichOneof("body"):
            case "record":
                await self._record(closed_from_pb(event.record))
            case "plan":
                plan = decode_plan(event.plan)
                await self._step(rm.PlanArrived(plan, plan_id(event.plan)))
            case "peers":
                self._set_peers(event.peers)
            case "part_root":
                self._compare_part_root(signed_from_pb(event.part_root))
            case "lobby":
                log.info("lobby", present=event.lobby.present, expected=event.lobby.expected)

    def _set_peers(self, peers: pb.Peers) -> None:
        self._addresses = {
            member_from_pb(entry.member).island: (
                entry.endpoints[0].address if entry.endpoints else ""
            )
            for entry in peers.peers
        }
        if self.state.chain.opened:
            self._links.set_peers(self._addresses)

    async def _record(self, closed: ClosedRecord) -> None:
        record = self.state.append(closed)
        if record is None:
            return
        await self._step(rm.RecordArrived(record, closed))
        if record.slot == 0:
            self.events.write("opened", islands=[m.name for m in self.state.chain.view])
            self._links.set_peers(self._addresses)
            self.opened.set()

    def _compare_part_root(self, signed: Signed) -> None:
        """Two signed roots of one part of one plan prove that its owner told us different sums."""
        part = decode_part_root(verified(signed, "part-root"))
        known = self._part_roots.setdefault((part.plan_id, part.first_cell), signed)
        if known.signer == signed.signer and decode_part_root(known.payload).root != part.root:
            raise InvariantBroken(
                f"{short(signed.signer)} signed two sums for one part of one plan"
            )

    # --- round machine -------------------------------------------------------------------------

    async def _step(self, event: rm.Event) -> None:
        await self._carry_out(self._machine.step(event, time.monotonic()))

    async def _carry_out(self, effects: list[rm.Effect]) -> None:
        for effect in effects:
            match effect:
                case rm.StorePromise(term):
                    self._journal.promise(term)
                case rm.Exchange(plan, pid):
                    await self._start_exchange(plan, pid)
                case rm.Abandon():
                    await self._stop_exchange()
                case rm.ReportGone(plan, root):
                    gone = pb.Gone(run_id=plan.run_id, round=plan.slot, root=root)
                    self._post("gone", gone.SerializeToString())
                case rm.Stage(plan, pid):
                    await self._stage(plan, pid)
                case rm.Vote(report, plan):
                    signed = self._identity.sign("report", encode_report(report))
                    self._journal.vote(report.slot, signed, encode_plan(plan))
                    self._outbox.put("report", pb.PostRequest(report=signed_to_pb(signed)))
                case rm.Apply(record, staged):
                    await self._apply(record, staged)
                case rm.SkipRound(record):
                    self.events.write("void", round=record.slot)
                    await self._offer()
                case rm.Finish():
                    await self._finish()
                case rm.RefuseTerm():
                    pass

    async def _start_exchange(self, plan: Plan, pid: Digest) -> None:
        await self._stop_exchange()
        mine = plan.participant(self._me)
        self.events.write("planned", round=plan.slot, attempt=plan.ballot.attempt)
        self._exchange = Exchange(
            plan,
            pid,
            self.state.layout.fragments[self.state.fragment_of(plan.slot)],
            self._contribution if mine is not None else None,
            self.state.chain.members,
            Wiring(self._identity, self._links, self.state.codec, self._compute),
            Hooks(
                part_held=lambda part: self._put(self._step, rm.PartHeld(pid, part)),
                part_summed=lambda signed: self._outbox.put(
                    "part_root", pb.PostRequest(part_root=signed_to_pb(signed))
                ),
            ),
        )
        self._exchange.start()
        early, self._early = self._early, []
        for peer, frame in early:
            self._from_peer(peer, frame)

    async def _stop_exchange(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            await exchange.stop()

    async def _stage(self, plan: Plan, pid: Digest) -> None:
        if self._exchange is None or self._exchange.plan_id != pid:
            return
        cells = self._exchange.cells()
        reduced_root, new_root = await self._compute(self.state.stage, plan.slot, cells)
        await self._step(rm.Staged(pid, reduced_root, new_root))

    async def _apply(self, record: Record, staged: bool) -> None:
        if staged:
            self.state.swap(record)
        else:
            await self._repair(record)
        commit = committed(record)
        self.events.write(
            "commit",
            round=record.slot,
            fragment=commit.fragment,
            participants=[short(p.island) for p in commit.participants],
            new_root=commit.new_root.hex(),
            tokens=self.state.chain.committed_tokens,
            listed=commit.participant(self._me) is not None,
            sent_bytes=self._transport.traffic.sent_bytes,
            received_bytes=self._transport.traffic.received_bytes,
        )
        log.info(
            "committed",
            round=record.slot,
            tokens=self.state.chain.committed_tokens,
            loss=self._desk.loss,
        )
        self._contribution = None
        await self._desk.applied(record)
        await self._offer()

    async def _repair(self, record: Record) -> None:
        """Fetches the committed cells from whoever holds them, until somebody does."""
        commit = committed(record)
        while True:
            cells = self.state.stored_update(commit.reduced_root, commit.fragment)
            if cells is None:
                others = [a for i, a in sorted(self._addresses.items()) if i != self._me and a]
                cells = await fetch_update(self._transport, others, self.state, record)
            if cells is not None:
                await self._compute(self.state.apply_update, record, cells)
                self.events.write("repaired", round=record.slot)
                return
            log.warning("update_nowhere", round=record.slot, retry_s=_RETRY_S)
            await asyncio.sleep(_RETRY_S)

    async def _finish(self) -> None:
        tensors = self.state.replica.named_tensors()
        write_atomically(self._site.final_model, await self._compute(save, tensors))
        self.state.save_snapshot()
        self.events.write(
            "finished", round=self.state.chain.head_slot, model=str(self._site.final_model)
        )
        self._links.stop_dialling()
        await self._desk.stop("the run is finished")
        self.finished.set()

    # --- peers ---------------------------------------------------------------------------------

    def _from_peer(self, peer: IslandId, frame: Frame) -> None:
        """Frames of the running plan; those of a plan we have not heard of yet wait for it."""
        exchange = self._exchange
        if exchange is not None and exchange.plan_id == frame.plan_id:
            exchange.receive(peer, frame)
        elif len(self._early) < _EARLY_FRAMES:
            self._early.append((peer, frame))

    # --- trainer -------------------------------------------------------------------------------

    def _from_trainer(self, message: Message | None) -> None:
        self._put(self._trainer_said, message)

    async def _trainer_said(self, message: Message | None) -> None:
        match message:
            case Hello():
                if not await self._desk.greet(message):
                    raise RunMismatch("the trainer's model is not the run's (see the log)")
                self.events.write("trainer", incarnation=message.incarnation)
            case Boundary():
                self._note_boundary(message)
                await self._desk.arrive(message)
                await self._offer()
            case Evaluation(round_, loss):
                tokens = self.state.chain.committed_tokens
                self._desk.loss = loss
                self.events.write("evaluation", round=round_, tokens=tokens, loss=loss)
            case _:
                pass

    async def _offer(self) -> None:
        """A waiting trainer's work becomes our contribution, unless a plan already names one."""
        round_ = self.state.chain.head_slot + 1
        if self._desk.waiting is None or not self._machine.may_replace_contribution(round_):
            return
        contribution = await self._desk.contribution()
        if contribution is None:
            return
        self._contribution = contribution
        self._machine.hold_contribution(round_, contribution.root)
        self._send_ready(contribution)

    def _send_ready(self, contribution: Contribution) -> None:
        round_ = self.state.chain.head_slot + 1
        base = self.state.chain.bases[contribution.fragment]
        ready = Ready(
            run_id=self.state.start.run_id,
            round=round_,
            base_round=base.round,
            base_root=base.root,
            revision=0,
            root=contribution.root,
            tokens=contribution.tokens,
            steps=contribution.steps,
            up_bps=0.0,
            squared_norms=contribution.squared_norms,
        )
        self._post("ready", encode_ready(ready))

    def _note_boundary(self, boundary: Boundary) -> None:
        self.events.write(
            "boundary",
            step=boundary.step,
            tokens=boundary.tokens,
            loss=boundary.loss,
            compute_s=round(boundary.compute_s, 4),
            wait_s=round(boundary.wait_s, 4),
        )

    # --- progress ------------------------------------------------------------------------------

    def _post(self, kind: str, payload: bytes) -> None:
        request = pb.PostRequest()
        getattr(request, kind).CopyFrom(signed_to_pb(self._identity.sign(kind, payload)))
        self._outbox.put(kind, request)

    def progress(self) -> pb.Progress:
        """How far this island is, for the coordinator's status."""
        totals = self._desk.totals
        progress = pb.Progress(run_id=self.state.start.run_id)
        if totals is not None:
            progress.steps, progress.tokens = totals.step, totals.tokens
            progress.compute_s, progress.wait_s = totals.compute_s, totals.wait_s
        if self._desk.loss is not None:
            progress.loss, progress.has_loss = self._desk.loss, True
        return progress

    async def _report_progress(self) -> None:
        """Also the heartbeat: the coordinator hears from us at least this often."""
        while True:
            await asyncio.sleep(self.state.spec.sync.heartbeat_s)
            self._post("progress", self.progress().SerializeToString())

    async def say_goodbye(self) -> None:
        self._post("leave", b"")
        async with asyncio.timeout(2 * _RETRY_S):
            await self._outbox.drained()
