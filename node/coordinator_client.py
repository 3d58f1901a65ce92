"""The node's end of the control plane: register, watch, post; reconnects by itself.

Every post is safe to repeat: the coordinator keys what it takes by (island, round, plan). A post that
cannot be delivered is tried again until it is answered or its caller gives up.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import structlog

from protocol import atoll_coordinator_pb2 as pb
from protocol.errors import BadFrame, NotAdmitted, StaleTerm, TransportError
from protocol.identity import Identity
from protocol.messages import Endpoint, Term
from protocol.transport import Connection, Transport
from protocol.wire import parse, signed_to_pb, term_from_pb, term_to_pb

log = structlog.get_logger()

_CALL_S = 10.0
_RETRY_S = 0.5


class CoordinatorClient:
    def __init__(self, connection: Connection, identity: Identity) -> None:
        self._connection, self._identity = connection, identity
        self.term: Term | None = None

    @staticmethod
    async def connect(transport: Transport, address: str, identity: Identity) -> CoordinatorClient:
        return CoordinatorClient(await transport.connect(address), identity)

    async def describe(self) -> pb.DescribeReply:
        """Raises PeerUnreachable if nobody answers."""
        reply = await self._connection.call(
            "Coordinator/Describe", pb.DescribeRequest().SerializeToString(), _CALL_S
        )
        return parse(pb.DescribeReply, reply)

    async def register(self, registration: pb.Registration, promise: Term) -> Term | None:
        """Registers under `promise`. Returns the coordinator's term if that is another one, else None.

        Raises NotAdmitted with the coordinator's reason.
        """
        registration.promise.CopyFrom(term_to_pb(promise))
        signed = self._identity.sign("registration", registration.SerializeToString())
        request = pb.RegisterRequest(registration=signed_to_pb(signed)).SerializeToString()
        answer = await self._connection.call("Coordinator/Register", request, _CALL_S)
        reply = parse(pb.RegisterReply, answer)
        if reply.rejected:
            raise NotAdmitted(reply.rejected)
        if reply.refused:
            return term_from_pb(reply.term)
        self.term = term_from_pb(reply.term)
        return None

    async def watch(self, run_id: str, from_slot: int) -> AsyncGenerator[pb.Event, None]:
        """Events from `from_slot` on. Raises TransportError when the stream ends."""
        request = pb.WatchRequest(run_id=run_id, island=self._identity.island, from_slot=from_slot)
        stream = await self._connection.stream("Coordinator/Watch")
        try:
            await stream.send(request.SerializeToString())
            while (message := await stream.receive()) is not None:
                yield parse(pb.Event, message)
        finally:
            await stream.close()

    async def post(self, request: pb.PostRequest) -> str:
        """Delivers, however often it takes. Returns why it was not taken, or ''.

        Raises StaleTerm if another term rules: register again first.
        """
        while True:
            if self.term is None:
                raise StaleTerm("not registered")
            term = self.term
            request.term.CopyFrom(term_to_pb(term))
            try:
                answer = await self._connection.call(
                    "Coordinator/Post", request.SerializeToString(), _CALL_S
                )
            except BadFrame as error:
                return str(error)  # it would be no better the next time
            except TransportError as error:
                log.warning("coordinator_unreachable", reason=str(error), retry_s=_RETRY_S)
                await asyncio.sleep(_RETRY_S)
                continue
            reply = parse(pb.PostReply, answer)
            if reply.refused and self.term != term:
                continue  # registered under a newer one meanwhile
            if reply.refused:
                raise StaleTerm("another coordinator term rules")
            return reply.rejected

    async def close(self) -> None:
        await self._connection.close()


def registration_of(
    run_id: str, name: str, endpoints: Sequence[Endpoint], spec_digest: bytes, head_slot: int
) -> pb.Registration:
    """What a node that holds the start state says of itself; head_slot -1 = no log yet."""
    return pb.Registration(
        run_id=run_id,
        name=name,
        endpoints=[pb.Endpoint(**endpoint._asdict()) for endpoint in endpoints],
        spec_digest=spec_digest,
        head_slot=max(0, head_slot),
        has_log=head_slot >= 0,
        holds_start=True,
    )
