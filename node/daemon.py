"""The daemon: one island's whole life.

    join ─► hold the start state ─► trainer runs H inner steps ─► boundary: contribution, Ready
      ▲                                                                    │
      └── finish ◄── apply ◄── record (certified) ◄── vote ◄── exchange ◄── plan

One task owns all state: it takes inputs (coordinator events, trainer messages, progress of the exchange)
from one queue and finishes each before the next. Blocking work goes to one worker thread. The daemon
never imports torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any

import structlog

from node.coordinator_client import CoordinatorClient, registration_of
from node.edge_messages import Boundary, Evaluation, Hello, Message
from node.events import Events
from node.exchange import Compute, Wiring
from node.metered_transport import MeteredTransport
from node.outbox import Outbox
from node.peer_links import PeerLinks
from node.rounds import Rounds, Surroundings
from node.run_state import RunState
from node.site import Site
from node.trainer_desk import TrainerDesk
from node.trainer_link import TrainerLink
from node.update_donor import UpdateDonor
from protocol import atoll_coordinator_pb2 as pb
from protocol.errors import RunMismatch, StreamClosed, TransportError
from protocol.frames import Frame
from protocol.identity import Identity
from protocol.messages import Endpoint, IslandId, Record
from protocol.transport import Server
from protocol.wire import closed_from_pb, member_from_pb, signed_from_pb, term_from_pb

log = structlog.get_logger()

_RETRY_S = 0.5
_GOODBYE_S = 2.0


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
        self._site, self._me, self.state = site, identity.island, state
        self._transport, self._events, self._trainer_link = transport, events, trainer_link
        self._compute = compute
        self._silent: set[str] = set()
        self._inbox: asyncio.Queue[Callable[[], Coroutine[Any, Any, None]]] = asyncio.Queue()
        self._outbox = Outbox(identity)
        self._desk = TrainerDesk(state, self._me, trainer_link, compute, events.write)
        self._links = PeerLinks(transport, state.start.run_id, self._me, self._from_peer)
        wiring = Wiring(identity, self._links, state.codec, compute)
        self._rounds = Rounds(
            state,
            Surroundings(site, wiring, transport, events, self._desk, self._outbox, self._put),
        )
        self.opened, self.finished = self._rounds.opened, self._rounds.finished
        self.attached, self.stepped = asyncio.Event(), asyncio.Event()
        self.boundaries = 0  # that this daemon's trainers have reached

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
            "Peer/Update": UpdateDonor(self.state, self._compute).serve,
        }
        server = await self._transport.serve(self._site.listen, {}, streams)
        self._put(self._rounds.take_up, missing)
        jobs = (
            self._consume(),
            self._follow(client, server),
            self._outbox.run(client),
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
            await self._rounds.stop_exchange()
            await self._links.close()
            await server.close()
            self._trainer_link.close()
            self._desk.close()

    async def _consume(self) -> None:
        while True:
            job = await self._inbox.get()
            await job()

    def _put(self, job: Callable[..., Coroutine[Any, Any, None]], *arguments: Any) -> None:
        self._inbox.put_nowait(lambda: job(*arguments))

    # --- coordinator ---------------------------------------------------------------------------

    async def _follow(self, client: CoordinatorClient, server: Server) -> None:
        """Registers, then takes events from the head of our log on; again and again."""
        run_id = self.state.start.run_id
        while True:
            try:
                await self._register(client, server)
                self._put(self._rounds.say_again)
                events = client.watch(run_id, self.state.chain.head_slot + 1)
                async with aclosing(events):
                    async for event in events:
                        if event.WhichOneof("body") == "peers":
                            self._take_peers(
                                event.peers
                            )  # at once: a repair may wait for an address
                        self._put(self._take_event, event)
            except TransportError as error:
                if not self.finished.is_set():
                    log.warning("coordinator_lost", reason=str(error), retry_s=_RETRY_S)
            await asyncio.sleep(_RETRY_S)

    async def _register(self, client: CoordinatorClient, server: Server) -> None:
        """Promises the coordinator's term, stored first."""
        registration = registration_of(
            self.state.start.run_id,
            self._site.name,
            [Endpoint(self._site.advertise or server.address)],
            self.state.spec.digest(),
            self.state.chain.head_slot,
        )
        while (other := await client.register(registration, self._rounds.promised)) is not None:
            if not await self._rounds.obey(other):
                log.warning("old_coordinator", its_term=other.counter)
                await asyncio.sleep(_RETRY_S)

    async def _take_event(self, event: pb.Event) -> None:
        if not await self._rounds.obey(term_from_pb(event.term)):
            return
        match event.WhichOneof("body"):
            case "record":
                await self._rounds.take_record(closed_from_pb(event.record))
            case "plan":
                await self._rounds.take_plan(event.plan)
            case "part_root":
                self._rounds.take_part_root(signed_from_pb(event.part_root))
            case "lobby":
                log.info("lobby", present=event.lobby.present, expected=event.lobby.expected)

    def _take_peers(self, peers: pb.Peers) -> None:
        addresses = {
            member_from_pb(p.member).island: p.endpoints[0].address if p.endpoints else ""
            for p in peers.peers
        }
        if self._me not in addresses:
            raise StreamClosed("the coordinator has given up our place")  # so we register again
        self._links.set_peers(addresses)
        silent = {p.member.name for p in peers.peers if not p.alive}
        if silent != self._silent:
            log.warning(
                "islands_silent", names=sorted(silent), lease_s=self.state.spec.sync.lease_s
            )
            self._silent = silent

    def _from_peer(self, peer: IslandId, frame: Frame) -> None:
        self._rounds.take_frame(peer, frame)

    # --- trainer -------------------------------------------------------------------------------

    def _from_trainer(self, message: Message | None) -> None:
        self._put(self._trainer_said, message)

    async def _trainer_said(self, message: Message | None) -> None:
        match message:
            case Hello():
                difference = await self._desk.greet(message)
                if difference is not None:
                    raise RunMismatch(f"the trainer's model is not the run's: {difference}")
                self.attached.set()
                self._events.write(
                    "trainer",
                    incarnation=message.incarnation,
                    ranks=message.ranks,
                    flops_per_token=message.flops_per_token,
                    peak_flops=message.peak_flops,
                )
            case Boundary() if message.incarnation != self._desk.handover.incarnation:
                pass  # of a trainer that another has replaced
            case Boundary():
                self.stepped.set()
                self.boundaries += 1
                self._note_boundary(message)
                await self._desk.arrive(message)
                await self._rounds.offer()
            case Evaluation(round_, loss):
                tokens = self._desk.tokens_at.pop(round_, self.state.chain.committed_tokens)
                self._desk.loss = loss
                self._events.write("evaluation", round=round_, tokens=tokens, loss=loss)
            case None if not self._desk.dismissed:
                self._events.write("trainer_lost")
                log.warning("trainer_lost", log=str(self._site.trainer_log))
            case _:
                pass

    def _note_boundary(self, boundary: Boundary) -> None:
        self._events.write(
            "boundary",
            step=boundary.step,
            tokens=boundary.tokens,
            loss=boundary.loss,
            compute_s=round(boundary.compute_s, 4),
            wait_s=round(boundary.wait_s, 4),
            rank_s=[round(seconds, 4) for seconds in boundary.rank_s],
            seconds={part: round(seconds, 4) for part, seconds in boundary.seconds.items()},
            skipped=boundary.skipped,
        )

    # --- progress ------------------------------------------------------------------------------

    def progress(self) -> pb.Progress:
        """How far this island is, for the coordinator's status."""
        totals, traffic = self._desk.totals, self._transport.traffic
        progress = pb.Progress(
            run_id=self.state.start.run_id,
            sent_bytes=traffic.sent_bytes,
            received_bytes=traffic.received_bytes,
        )
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
            self._outbox.sign_and_put("progress", self.progress().SerializeToString())

    async def say_goodbye(self) -> None:
        """Tells the coordinator, if it is there to be told."""
        self._outbox.sign_and_put("leave", self.state.start.run_id.encode())
        with suppress(TimeoutError):
            async with asyncio.timeout(_GOODBYE_S):
                await self._outbox.drained()
