"""Posts to the coordinator, in order, delivered however long it takes.

A newer post of the same kind for the same thing replaces one that still waits; a term that no longer
rules empties the box, since everything in it is said again after the next registration.
"""

from __future__ import annotations

import asyncio

import structlog

from node.coordinator_client import CoordinatorClient
from protocol import atoll_coordinator_pb2 as pb
from protocol.errors import StaleTerm

log = structlog.get_logger()


class Outbox:
    def __init__(self, client: CoordinatorClient) -> None:
        self._client = client
        self._waiting: dict[str, pb.PostRequest] = {}
        self._filled = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    def put(self, key: str, request: pb.PostRequest) -> None:
        self._waiting[key] = request
        self._filled.set()
        self._idle.clear()

    async def run(self) -> None:
        while True:
            await self._filled.wait()
            self._filled.clear()
            while self._waiting:
                key = next(iter(self._waiting))
                await self._deliver(key, self._waiting.pop(key))
            self._idle.set()

    async def drained(self) -> None:
        await self._idle.wait()

    async def _deliver(self, key: str, request: pb.PostRequest) -> None:
        try:
            rejected = await self._client.post(request)
        except StaleTerm:
            self._waiting.clear()
            return
        if rejected:
            log.debug("not_taken", post=key, reason=rejected)
