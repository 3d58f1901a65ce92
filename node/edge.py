"""The trainer's side of a boundary: snapshot out, answer in, anchor applied.

One boundary at a time: `meet` writes the snapshot, tells the daemon and waits. `apply` follows the one
rule  local += new anchor - ref.  No inner step lies between snapshot and answer, so with the snapshot as
ref the sum is the new anchor itself, and that is what is copied: no rounding enters.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from node.edge_link import EdgeLink
from node.edge_messages import (
    Applied,
    Apply,
    Boundary,
    Evaluation,
    GoOn,
    Hello,
    Refused,
    Stop,
    Welcome,
)
from node.fragment_memory import FragmentMemory
from node.parameters import layout_of
from protocol.errors import InvariantBroken, RunMismatch


class Edge:
    """Joins on construction: then the parameters are the anchor, and `welcome` says where we are."""

    def __init__(self, path: str, parameters: Mapping[str, Tensor]) -> None:
        self.incarnation = secrets.token_hex(8)
        self.wait_s = 0.0
        self._fragments: list[FragmentMemory] = []
        self._link = EdgeLink(path)
        try:
            self.welcome = self._join(parameters)
        except BaseException:
            self.close()
            raise

    def _join(self, parameters: Mapping[str, Tensor]) -> Welcome:
        self._link.send(Hello(self.incarnation, os.getpid(), layout_of(parameters)))
        welcome = self._link.receive()
        if isinstance(welcome, Refused):
            raise RunMismatch(f"the daemon refuses this trainer: {welcome.reason}")
        if not isinstance(welcome, Welcome):
            raise InvariantBroken(f"the daemon answers Hello with {type(welcome).__name__}")
        for layout, slot in zip(welcome.fragments, welcome.anchor_slot, strict=True):
            memory = FragmentMemory(layout, parameters, self._link.take_descriptors(3))
            self._fragments.append(memory)
            memory.take_anchor(slot)
        return welcome

    def meet(self, boundary: Boundary) -> Apply | GoOn | Stop:
        """Hands over the snapshot of the fragment that is due; returns when the daemon answers."""
        self._fragments[boundary.fragment].write_snapshot()
        self._link.send(boundary)
        before_s = time.perf_counter()
        answer = self._link.receive()
        self.wait_s += time.perf_counter() - before_s
        if isinstance(answer, Stop):
            return answer
        if isinstance(answer, Apply | GoOn) and answer.sequence == boundary.sequence:
            return answer
        raise InvariantBroken(f"the daemon answers boundary {boundary.sequence} with {answer}")

    def apply(self, answer: Apply) -> None:
        memory = self._fragments[answer.fragment]
        if answer.ref == "anchor":
            memory.rebase(answer.anchor_slot)
        else:
            memory.take_anchor(answer.anchor_slot)
        self._link.send(Applied(answer.fragment, answer.round, answer.sequence))

    def report(self, evaluation: Evaluation) -> None:
        self._link.send(evaluation)

    @contextmanager
    def at_anchor(self) -> Iterator[None]:
        """Inside, the parameters are the anchor, whatever rebases went before."""
        local = [[parameter.clone() for parameter in memory] for memory in self._fragments]
        for memory in self._fragments:
            memory.take_anchor(memory.slot)
        try:
            yield
        finally:
            with torch.no_grad():
                for memory, kept in zip(self._fragments, local, strict=True):
                    for parameter, value in zip(memory, kept, strict=True):
                        parameter.copy_(value)

    def close(self) -> None:
        self._link.close()
        for memory in self._fragments:
            memory.close()
