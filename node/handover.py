"""What the present trainer has been given, and what it has given: one rule for applying an anchor.

    local += new anchor - ref

ref is the *snapshot* behind a contribution that the commit lists, else the *anchor* last handed over.
Whatever cannot be accounted for is a *reset* (local := new anchor), counted and shown. An inner step's
displacement thus enters a fragment's anchor at most once.

Pure bookkeeping; the tensors lie in shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from node.edge_messages import Boundary, Reference
from protocol.messages import Commit, Digest, IslandId


@dataclass(frozen=True)
class Snapshot:
    """The trainer's parameters as handed in for one contribution."""

    incarnation: str
    root: Digest
    tokens: int  # totals of the incarnation at that boundary
    steps: int


@dataclass
class FragmentHandover:
    given_round: int
    slot: int = 0
    snapshot: Snapshot | None = None
    missed: int = 0


@dataclass
class Handover:
    """State of one trainer incarnation, over all fragments."""

    me: IslandId
    late: Literal["carry", "drop"]
    max_carry_rounds: int
    incarnation: str = ""
    first_step: int = 0
    fragments: list[FragmentHandover] = field(default_factory=list)
    counted_tokens: list[int] = field(default_factory=list)
    counted_steps: list[int] = field(default_factory=list)
    resets: int = 0

    def begin(self, incarnation: str, first_step: int, rounds: list[int]) -> None:
        """A new trainer starts from the anchors of `rounds`, all in slot 0."""
        old = {number: f.snapshot for number, f in enumerate(self.fragments)}
        self.incarnation, self.first_step = incarnation, first_step
        self.fragments = [FragmentHandover(r, 0, old.get(i)) for i, r in enumerate(rounds)]
        self.counted_tokens = [0] * len(rounds)
        self.counted_steps = [0] * len(rounds)

    def uncounted(self, fragment: int, boundary: Boundary) -> tuple[int, int]:
        """Tokens and steps since this fragment last counted this trainer."""
        return (
            boundary.tokens - self.counted_tokens[fragment],
            boundary.steps - self.counted_steps[fragment],
        )

    def snapshot(self, fragment: int, root: Digest, boundary: Boundary) -> None:
        self.fragments[fragment].snapshot = Snapshot(
            boundary.incarnation, root, boundary.tokens, boundary.steps
        )

    def apply(self, fragment: int, round_: int, commit: Commit, boundary: Boundary) -> Reference:
        """How the trainer, waiting at `boundary`, is to apply this commit; updates the books."""
        state = self.fragments[fragment]
        mine, kept = commit.participant(self.me), state.snapshot
        jumped = max(1, (round_ - state.given_round) // len(self.fragments))
        state.given_round, state.snapshot = round_, None
        if mine is not None:
            state.missed = 0
            return self._listed(fragment, mine.root, kept, boundary)
        state.missed += jumped
        if self.late == "drop" or state.missed > self.max_carry_rounds:
            state.missed = 0
            return self._reset(fragment, boundary)
        return "anchor"

    def _listed(
        self, fragment: int, root: Digest, kept: Snapshot | None, boundary: Boundary
    ) -> Reference:
        if kept is not None and kept.root == root:
            if kept.incarnation != self.incarnation:
                return "anchor"  # this trainer never took those steps
            self.counted_tokens[fragment] = kept.tokens
            self.counted_steps[fragment] = kept.steps
            return "snapshot"
        return self._reset(fragment, boundary)

    def _reset(self, fragment: int, boundary: Boundary) -> Reference:
        """What was trained up to here is in no anchor and will be in none."""
        self.counted_tokens[fragment] = boundary.tokens
        self.counted_steps[fragment] = boundary.steps
        self.resets += 1
        return "reset"
