"""`attach(model, optimizer)`: makes a plain training loop one island's trainer.

    island = attach(model, optimizer)
    while not island.should_stop:
        ...forward, backward, optimizer.step()...
        island.step(tokens=batch_tokens, loss=loss)

Without ATOLL_SOCKET in the environment nothing else happens, and the loop computes what it always did,
bit for bit. With a daemon behind it the parameters become the run's anchor, and at each edge step `step`
hands over a snapshot, waits, and moves the parameters to the new anchor.

Invariants: parameters change in place only, inside `attach` and `step`; between edges `step` makes no
system call and reads no tensor; `progress_tokens` never goes back.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from node.edge import Edge
from node.edge_messages import Apply, Boundary, Evaluation, GoOn
from node.parameters import check_optimizer, trained_parameters
from protocol.errors import ConfigError

VARIABLE = "ATOLL_SOCKET"
NEVER = 1 << 62


def attach(model: nn.Module, optimizer: torch.optim.Optimizer) -> Island:
    """Joins this process to the daemon named by ATOLL_SOCKET, if any.

    Raises:
        ConfigError: several ranks, or an optimizer that moves tensors of its own.
        RunMismatch: the daemon refuses this trainer, and says why.
        DaemonLost: nobody answers, here or in any later call of `step`.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return Island(None)
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigError(
            "an island has one trainer rank for now: start it with --nproc-per-node 1"
        )
    parameters = trained_parameters(model)
    check_optimizer(optimizer, parameters)
    return Island(Edge(path, parameters))


class Island:
    """What the training loop sees of the run.

    Attributes:
        steps: inner steps of this island, earlier incarnations included.
        should_stop: the run is over, or this trainer's part in it.
        evaluate_now: the held-out loss on the anchor of `round` is asked for, until the next step.
        round: the last round applied.
    """

    def __init__(self, edge: Edge | None) -> None:
        self._edge = edge
        self.should_stop = self.evaluate_now = False
        self.round = self.first_step = self.steps = 0
        self._next_edge_step, self._next_fragment = NEVER, 0
        self._committed_tokens, self._islands = 0, 1
        self._tokens = self._tokens_at_apply = self._least_progress_tokens = 0
        self._boundaries = 0
        self._compute_s = 0.0
        if edge is not None:
            welcome = edge.welcome
            self.round, self.evaluate_now = welcome.round, welcome.evaluate
            self.first_step = self.steps = welcome.first_step
            self._next_edge_step = welcome.next_edge_step
            self._next_fragment = welcome.next_fragment
            self._committed_tokens, self._islands = welcome.committed_tokens, welcome.islands
        self._left_s = time.perf_counter()

    @property
    def attached(self) -> bool:
        return self._edge is not None

    @property
    def progress_tokens(self) -> int:
        """Tokens of the whole run, as far as this island can tell; the learning rate follows it."""
        own = self._tokens - self._tokens_at_apply
        return max(self._least_progress_tokens, self._committed_tokens + own * self._islands)

    def step(self, *, tokens: int, loss: Tensor | float | None = None) -> None:
        """To call after each `optimizer.step()`.

        Args:
            tokens: what this step trained on.
            loss: of this step; read only at an edge.
        """
        self.steps += 1
        self._tokens += tokens
        self.evaluate_now = False
        while self._edge is not None and self.steps >= self._next_edge_step:
            self._meet(self._edge, loss)

    def _meet(self, edge: Edge, loss: Tensor | float | None) -> None:
        self._compute_s += time.perf_counter() - self._left_s
        answer = edge.meet(self._boundary(edge, loss))
        if isinstance(answer, Apply):
            edge.apply(answer)
            self._least_progress_tokens = self.progress_tokens
            self._committed_tokens, self._islands = answer.committed_tokens, answer.islands
            self._tokens_at_apply = self._tokens
            self.round, self.evaluate_now = answer.round, answer.evaluate
        if isinstance(answer, GoOn) or (isinstance(answer, Apply) and not answer.last):
            self._next_edge_step = answer.next_edge_step
            self._next_fragment = answer.next_fragment
        else:
            self.should_stop, self._next_edge_step = True, NEVER
        self._left_s = time.perf_counter()

    def _boundary(self, edge: Edge, loss: Tensor | float | None) -> Boundary:
        self._boundaries += 1
        value = loss.item() if isinstance(loss, Tensor) else math.nan if loss is None else loss
        return Boundary(
            sequence=self._boundaries,
            incarnation=edge.incarnation,
            fragment=self._next_fragment,
            step=self.steps,
            tokens=self._tokens,
            steps=self.steps - self.first_step,
            loss=value if math.isfinite(value) else None,
            compute_s=self._compute_s,
            wait_s=edge.wait_s,
        )

    @contextmanager
    def at_anchor(self) -> Iterator[None]:
        """Inside, the parameters are the run's anchor: evaluate here. Not counted as compute."""
        entered_s = time.perf_counter()
        if self._edge is None:
            yield
        else:
            with self._edge.at_anchor():
                yield
        self._left_s += time.perf_counter() - entered_s

    def report_evaluation(self, loss: float) -> None:
        """Reports the held-out loss on the anchor of `round`."""
        self.evaluate_now = False
        if self._edge is not None:
            self._edge.report(Evaluation(self.round, loss))

    def close(self) -> None:
        if self._edge is not None:
            self._edge.close()
