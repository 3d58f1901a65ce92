"""Everything this island remembers of the run: chain, votes, agreed state. Durable, verified, restorable.

Snapshot + replay of committed updates = the exact state, so a restart lands on the last committed round.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from node.journal import Journal
from node.replica import Replica
from node.site import Site
from node.update_log import UpdateLog, reduced_root_of
from outer_optimizer.codec import codec_for
from outer_optimizer.optimizer import transform_for
from outer_optimizer.schedule import Phase, phase_at
from outer_optimizer.transform import Hyper
from protocol.chain import Chain
from protocol.errors import InvariantBroken
from protocol.layout import Layout, build_layout
from protocol.messages import ClosedRecord, Commit, Digest, IslandId, Record, Start
from protocol.spec import RunSpec
from protocol.wire import decode_record

log = structlog.get_logger()

_SNAPSHOT_EVERY_ROUNDS = 16


class RunState:
    def __init__(
        self, site: Site, spec: RunSpec, start: Start, owner: IslandId, journal: Journal
    ) -> None:
        self._site, self.spec, self.start, self.journal = site, spec, start, journal
        self.layout: Layout = build_layout(
            start.layout, spec.outer.fragments, spec.sync.cell_values, spec.sync.expected_islands
        )
        self.codec = codec_for(spec.outer.codec)
        self.replica = Replica(self.layout, transform_for(spec.outer.optimizer), self.codec)
        self.chain = Chain(start.run_id, owner, spec.sync.durability_of)
        self._updates = UpdateLog(site.updates)
        self._phases = phases_of(spec)
        self._staged: dict[int, Digest] = {}

    # --- rounds --------------------------------------------------------------------------------

    def fragment_of(self, round_: int) -> int:
        return self.chain.fragment_of(round_)

    def inner_steps(self, round_: int) -> int:
        """Inner steps between the boundaries before and at `round_`."""
        return phase_at(self._phases, round_).inner_steps // len(self.layout.fragments)

    def sizes(self, fragment: int) -> list[int]:
        return [self.codec.encoded_bytes(c.lengths) for c in self.layout.fragments[fragment].cells]

    def stage(self, round_: int, reduced: Sequence[bytes]) -> tuple[Digest, Digest]:
        """Makes the cells durable, computes the new anchor beside the old: (reduced root, new root)."""
        fragment = self.fragment_of(round_)
        reduced_root = reduced_root_of(reduced)
        self._updates.store(reduced_root, reduced)
        new_root = self.replica.stage(fragment, reduced, self._hyper(round_))
        self._staged[fragment] = new_root
        return reduced_root, new_root

    def swap(self, record: Record) -> None:
        """Applies a commit whose new anchor is staged. The root proves it before it counts."""
        commit = committed(record)
        if self._staged.pop(commit.fragment, None) != commit.new_root:
            raise InvariantBroken(
                f"round {record.slot}: the staged anchor is not the committed one"
            )
        self.replica.swap(commit.fragment, record.slot)

    def snapshot_due(self, record: Record) -> bool:
        return record.slot % _SNAPSHOT_EVERY_ROUNDS == 0

    def apply_update(self, record: Record, reduced: Sequence[bytes]) -> None:
        """Applies a commit from its fetched or stored cells."""
        commit = committed(record)
        if self.stage(record.slot, reduced) != (commit.reduced_root, commit.new_root):
            raise InvariantBroken(
                f"round {record.slot}: these cells do not lead to the committed anchor: "
                "this machine computes other bits than the islands that voted"
            )
        self.swap(record)

    def stored_update(self, reduced_root: Digest, fragment: int) -> list[bytes] | None:
        return self._updates.load(reduced_root, self.sizes(fragment))

    def _hyper(self, round_: int) -> Hyper:
        outer, phase = self.spec.outer, phase_at(self._phases, round_)
        return Hyper(phase.lr, phase.momentum, outer.beta1, outer.beta2, outer.epsilon)

    # --- disk ----------------------------------------------------------------------------------

    def append(self, closed: ClosedRecord) -> Record | None:
        """Checks and stores the next record; None if it is one we have."""
        record = self.chain.check(closed)
        if record.slot <= self.chain.head_slot:
            return None
        self.journal.append(record.slot, closed)
        return self.chain.append(closed)

    def record(self, slot: int) -> Record:
        return decode_record(self.chain.records[slot].record)

    def save_snapshot(self) -> None:
        self.replica.save(self._site.snapshot)
        self._updates.keep_only(set(self._recent_roots()))

    def _recent_roots(self) -> list[Digest]:
        """Updates that are still of use: those of the last rounds, for islands that were away."""
        records = (c for c in self.chain.records[-2 * _SNAPSHOT_EVERY_ROUNDS :])
        commits = (decode_record(c.record).commit for c in records)
        return [commit.reduced_root for commit in commits if commit is not None]

    def _check_snapshot(self) -> None:
        """The snapshot is what the chain says of its rounds."""
        for fragment, round_ in enumerate(self.replica.rounds):
            expected = self.start.fragment_roots[fragment] if round_ == 0 else b""
            if 0 < round_ <= self.chain.head_slot and (commit := self.record(round_).commit):
                expected = commit.new_root
            if self.replica.root(fragment) != expected:
                raise InvariantBroken(
                    f"{self._site.snapshot}: damaged: fragment {fragment} is not that of round {round_}: "
                    "remove the file to start from the run's own"
                )

    def restore(self) -> list[Record]:
        """Reads chain and snapshot back and replays stored updates.

        Returns commits that could not be replayed here: their cells must be fetched, in order.
        """
        records = [self.chain.append(closed) for closed in self.journal.records()]
        self.replica.restore(self._site.snapshot)
        self._check_snapshot()
        missing: list[Record] = []
        for record in records:
            commit = record.commit
            if commit is None or record.slot <= self.replica.rounds[commit.fragment]:
                continue
            cells = None if missing else self.stored_update(commit.reduced_root, commit.fragment)
            if cells is None:
                missing.append(record)
            else:
                self.apply_update(record, cells)
        return missing


def phases_of(spec: RunSpec) -> tuple[Phase, ...]:
    outer = spec.outer
    if not outer.schedule:
        return (Phase(0, outer.inner_steps, outer.lr, outer.momentum),)
    return tuple(
        Phase(
            p.from_round,
            p.inner_steps,
            outer.lr if p.lr is None else p.lr,
            outer.momentum if p.momentum is None else p.momentum,
        )
        for p in outer.schedule
    )


def committed(record: Record) -> Commit:
    if record.commit is None:
        raise InvariantBroken(f"slot {record.slot} holds no commit")
    return record.commit
