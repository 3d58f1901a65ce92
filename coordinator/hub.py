"""Events to every watcher: a record, plan or peer list goes to all, in one order.

A watcher has a bounded queue. One that falls behind is dropped; it comes back, names the first record it
lacks, and gets everything from there: nothing it could miss is only in a queue.
"""

from __future__ import annotations

import asyncio

_QUEUED_EVENTS = 4_096


class Hub:
    def __init__(self) -> None:
        self._queues: set[asyncio.Queue[bytes | None]] = set()

    def subscribe(self) -> asyncio.Queue[bytes | None]:
        """A queue of encoded events; None means: you were too slow or the coordinator stops."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._queues.add(queue)
        return queue

    def unsubscribe(self, queue: asyncio.Queue[bytes | None]) -> None:
        self._queues.discard(queue)

    def publish(self, event: bytes) -> None:
        for queue in list(self._queues):
            if queue.qsize() >= _QUEUED_EVENTS:
                self._queues.discard(queue)
                queue.put_nowait(None)
            else:
                queue.put_nowait(event)

    def close(self) -> None:
        for queue in self._queues:
            queue.put_nowait(None)
        self._queues.clear()
