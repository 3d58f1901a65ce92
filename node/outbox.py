"""Posts to the coordinator, in order, delivered however long it takes.

A newer post of a kind replaces one that still waits: only the latest Ready, vote or progress of an island
counts. When another term rules, the box is emptied: what still matters is said again after the next
registration.
"""

from __future__ import annotations

import asyncio
from typing import Literal

import structlog

from node.coordinator_client import CoordinatorClient
from protocol import atoll_coordinator_pb2 as pb
from protocol.errors import StaleTerm
from protocol.identity import Identity
from protocol.messages import Signed
from protocol.wire import signed_to_pb

log = structlog.get_logger()

Kind = Literal["ready", "part_root", "report", "gone", "progress", "leave"]


class Outbox:
    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._waiting: dict[Kind, pb.PostRequest] = {}
        self._filled, self._idle = asyncio.Event(), asyncio.Event()
        self._idle.set()

    def sign_and_put(self, kind: Kind, payload: bytes) -> None:
        self.put(kind, self._identity.sign(kind, payload))

    def put(self, kind: Kind, signed: Signed) -> None:
        request = pb.PostRequest()
        getattr(request, kind).CopyFrom(signed_to_pb(signed))
        self._waiting[kind] = request
        self._filled.set()
        self._idle.clear()

    async def run(self, client: CoordinatorClient) -> None:
        while True:
            await self._filled.wait()
            self._filled.clear()
            while self._waiting:
                kind = next(iter(self._waiting))
                await self._deliver(client, kind, self._waiting.pop(kind))
            self._idle.set()

    async def drained(self) -> None:
        await self._idle.wait()

    async def _deliver(
        self, client: CoordinatorClient, kind: Kind, request: pb.PostRequest
    ) -> None:
        try:
            rejected = await client.post(request)
        except StaleTerm:
            self._waiting.clear()
            return
        if rejected:
            log.debug("not_taken", post=kind, reason=rejected)
