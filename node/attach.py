"""`attach(model, optimizer)`: makes a training loop, on one rank or many, one island's trainer.

    island = attach(model, optimizer)
    while not island.should_stop:
        ...forward, backward, optimizer.step()...
        island.step(tokens=tokens_of_all_ranks, loss=loss)

Without ATOLL_SOCKET in the environment nothing else happens, and the loop computes what it always did,
bit for bit. With a daemon behind it the parameters become the run's anchor, and at each edge step `step`
hands over a snapshot, waits, and moves the parameters to the new anchor.

Invariants: parameters change in place only, inside `attach` and `step`; between edges `step` makes no
system call, no collective, and reads no tensor; every rank calls `attach` and `step` alike, and all see
the same `should_stop`, `steps` and `progress_tokens`, which never goes back.
"""

from __future__ import annotations

import math
import operator
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from node.edge import Edge, Figures
from node.edge_messages import Apply, Boundary, Evaluation, GoOn
from node.inner import lr_at
from node.launcher import die_with_parent
from node.parameters import Models, Optimizers, hold
from protocol.spec import Inner

VARIABLE = "ATOLL_SOCKET"
NEVER = 1 << 62


def attach(
    model: Models,
    optimizer: Optimizers,
    *,
    masters: Mapping[str, Tensor] | None = None,
    ties: Mapping[str, str] | None = None,
    figures: Figures | None = None,
) -> Island:
    """Joins this process to the daemon named by ATOLL_SOCKET, if any. To be called on every rank.

    Args:
        model: or a list of them, such as the pipeline stages of this rank. Wrapped and on its device.
        optimizer: or a list of them, made from the model's parameters as they are now.
        masters: parameter name -> the fp32 tensor that the optimizer moves in its place.
        ties: parameter name -> the run's name of the same tensor, where another rank holds that one.
        figures: floating-point operations per token and per second, for MFU.

    Raises:
        ConfigError: ranks that do not know each other, a wrapper that is not supported, or an optimizer
            that moves tensors of its own.
        RunMismatch: the daemon refuses this trainer, and says why.
        DaemonLost: nobody answers, here or in any later call of `step`.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return Island(None)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # torchrun starts ranks in sessions of their own: without it they would train on, unseen.
        die_with_parent(signal.SIGKILL)
    return Island(Edge(path, hold(model, optimizer, masters, ties), figures or Figures()))


class Island:
    """What the training loop sees of the run.

    Attributes:
        steps: inner steps of this island, earlier incarnations included.
        should_stop: the run is over, or this trainer's part in it.
        evaluate_now: the held-out loss on the anchor of `round` is asked for, until the next step.
        round: the last round applied.
        data_shard: (index, count): this island takes the samples whose number modulo count is index.
        seconds, skipped: totals a loop may keep here: what it spends on what, and steps it has skipped;
            they are reported at the next edge.
    """

    def __init__(self, edge: Edge | None) -> None:
        self._edge = edge
        self.should_stop = self.evaluate_now = False
        self.round = self.first_step = self.steps = self.skipped = 0
        self.data_shard = (0, 1)
        self.seconds: dict[str, float] = {}
        self._next_edge_step, self._next_fragment = NEVER, 0
        self._committed_tokens, self._islands = 0, 1
        self._tokens = self._tokens_at_apply = self._least_progress_tokens = 0
        self._boundaries = 0
        self._compute_s = 0.0
        self._schedule: Inner | None = None
        self._target_tokens = 1
        if edge is not None:
            welcome = edge.welcome
            self.round, self.evaluate_now = welcome.round, welcome.evaluate
            self.first_step = self.steps = welcome.first_step
            self.data_shard = welcome.index, welcome.islands
            self._next_edge_step = welcome.next_edge_step
            self._next_fragment = welcome.next_fragment
            self._committed_tokens, self._islands = welcome.committed_tokens, welcome.islands
            self._schedule = Inner(
                lr=1.0, warmup_tokens=welcome.warmup_tokens, min_lr_ratio=welcome.min_lr_ratio
            )
            self._target_tokens = welcome.target_tokens
        self._left_s = time.perf_counter()

    @property
    def attached(self) -> bool:
        return self._edge is not None

    @property
    def progress_tokens(self) -> int:
        """Tokens of the whole run, as far as this island can tell; the learning rate follows it."""
        own = self._tokens - self._tokens_at_apply
        return max(self._least_progress_tokens, self._committed_tokens + own * self._islands)

    @property
    def lr_factor(self) -> float:
        """What to multiply the learning rate with, by the run's schedule; 1 without a daemon."""
        if self._schedule is None:
            return 1.0
        return lr_at(self.progress_tokens, self._schedule, self._target_tokens)

    def state_dict(self) -> dict[str, int]:
        """Where this island is, to be kept beside a checkpoint of one's own. The daemon has the truth:
        after a restart `attach` says where to go on."""
        return {
            "round": self.round,
            "steps": self.steps,
            "tokens": self._tokens,
            "progress_tokens": self.progress_tokens,
        }

    def step(self, *, tokens: int, loss: Tensor | float | None = None) -> None:
        """To call after each `optimizer.step()`, on every rank.

        Args:
            tokens: what this step trained on, all ranks of the island together.
            loss: of this step, this rank's own; read only at an edge. Ranks without one leave it out.
        """
        self.steps += 1
        self._tokens += operator.index(tokens)
        self.evaluate_now = False
        while self._edge is not None and self.steps >= self._next_edge_step:
            self._meet(self._edge, loss)

    def _meet(self, edge: Edge, loss: Tensor | float | None) -> None:
        value = loss.item() if isinstance(loss, Tensor) else math.nan if loss is None else loss
        arrived_s = (
            time.perf_counter()
        )  # after the loss was read: a device has done its work by then
        rank_s = arrived_s - self._left_s
        self._compute_s += rank_s
        answer = edge.meet(self._boundary(edge, value), rank_s)
        if isinstance(answer, Apply):
            edge.apply(answer)
            self._least_progress_tokens = self.progress_tokens
            self._committed_tokens, self._islands = answer.committed_tokens, answer.islands
            self._tokens_at_apply = self._tokens
            self.round = answer.round
            self.evaluate_now = self.evaluate_now or answer.evaluate
        if isinstance(answer, GoOn) or (isinstance(answer, Apply) and not answer.last):
            self._next_edge_step = answer.next_edge_step
            self._next_fragment = answer.next_fragment
        else:
            self.should_stop, self._next_edge_step = True, NEVER
        left_s = time.perf_counter()
        self.seconds["outer"] = self.seconds.get("outer", 0.0) + left_s - arrived_s
        self._left_s = left_s

    def _boundary(self, edge: Edge, loss: float) -> Boundary:
        self._boundaries += 1
        return Boundary(
            sequence=self._boundaries,
            incarnation=edge.incarnation,
            fragment=self._next_fragment,
            step=self.steps,
            tokens=self._tokens,
            steps=self.steps - self.first_step,
            loss=loss if math.isfinite(loss) else None,
            compute_s=self._compute_s,
            wait_s=edge.wait_s,
            rank_s=(),
            seconds=self.seconds,
            skipped=self.skipped,
        )

    @contextmanager
    def anchor(self) -> Iterator[None]:
        """Inside, the parameters are the run's anchor: evaluate or export here, on every rank.

        Not counted as compute.
        """
        entered_s = time.perf_counter()
        if self._edge is None:
            yield
        else:
            with self._edge.at_anchor():
                yield
        self._left_s += time.perf_counter() - entered_s

    def take_anchor(self) -> None:
        """Ends with the run's anchor in the parameters: a trainer that was late holds more than that."""
        if self._edge is not None:
            self._edge.take_anchor()

    def report_evaluation(self, loss: Tensor | float) -> None:
        """Reports the held-out loss on the anchor of `round`; rank 0's counts, if it is finite."""
        self.evaluate_now = False
        value = float(loss)
        if self._edge is not None and math.isfinite(value):
            self._edge.report(Evaluation(self.round, value))

    def close(self) -> None:
        if self._edge is not None:
            self._edge.close()
