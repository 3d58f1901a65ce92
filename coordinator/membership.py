"""Who is here: the lobby before the run opens, and who is alive after.

Pure: `step(event, now_s) -> effects`, clocks are the caller's. A node registers under its identity key;
when `expected` nodes hold the verified start state, the run opens with exactly these as its first view.
An island counts as alive while it was heard within `lease_s` by *our* monotonic clock.

Invariants: one live registration per identity, one identity per name; the view never changes here (that
takes a decided record); registrations under another term than ours are no promise and do not count.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from protocol.messages import Digest, Endpoint, IslandId, Member, Term


@dataclass(frozen=True)
class Registered:
    """A verified registration. `rejoin` data (head) lets the coordinator see who lags."""

    member: Member
    endpoints: tuple[Endpoint, ...]
    spec_digest: Digest
    holds_start: bool
    head_slot: int
    promise: Term


@dataclass(frozen=True)
class Heard:
    """Any authentic message of this island."""

    island: IslandId


@dataclass(frozen=True)
class Left:
    island: IslandId


@dataclass(frozen=True)
class Tick:
    pass


Event = Registered | Heard | Left | Tick


@dataclass(frozen=True)
class Admit:
    island: IslandId


@dataclass(frozen=True)
class Reject:
    """This node may not take part; `reason` is the one line it shows."""

    reason: str


@dataclass(frozen=True)
class RefuseTerm:
    """The registration promises another term than the one in force."""


@dataclass(frozen=True)
class OpenRun:
    """Everyone expected is here and holds the start state: make genesis with this view."""

    view: tuple[Member, ...]


@dataclass(frozen=True)
class PeersChanged:
    """Tell all where everyone is and who is alive."""


Effect = Admit | Reject | RefuseTerm | OpenRun | PeersChanged


@dataclass(frozen=True)
class Presence:
    member: Member
    endpoints: tuple[Endpoint, ...]
    holds_start: bool
    heard_s: float
    alive: bool = True


@dataclass
class Membership:
    """`view` is empty until the run opens; it is restored from the log at a restart."""

    spec_digest: Digest
    expected: int
    lease_s: float
    term: Term
    view: tuple[Member, ...] = ()
    present: dict[IslandId, Presence] = field(default_factory=dict)

    @property
    def alive(self) -> frozenset[IslandId]:
        return frozenset(i for i, p in self.present.items() if p.alive)

    def promised(self) -> int:
        """Members of the view that have promised our term (a registration is one)."""
        members = {member.island for member in self.view}
        return len(members & self.present.keys())

    def step(self, event: Event, now_s: float) -> list[Effect]:
        match event:
            case Registered():
                return self._register(event, now_s)
            case Heard(island):
                return self._heard(island, now_s)
            case Left(island):
                return [PeersChanged()] if self.present.pop(island, None) else []
            case Tick():
                return self._expire(now_s)

    def _register(self, r: Registered, now_s: float) -> list[Effect]:
        if r.promise != self.term:
            return [RefuseTerm()]
        reason = self._objection(r)
        if reason:
            return [Reject(reason)]
        self.present[r.member.island] = Presence(r.member, r.endpoints, r.holds_start, now_s)
        effects: list[Effect] = [Admit(r.member.island), PeersChanged()]
        ready = [p.member for p in self.present.values() if p.holds_start]
        if not self.view and len(ready) >= self.expected:
            self.view = tuple(sorted(ready))
            effects.append(OpenRun(self.view))
        return effects

    def _objection(self, r: Registered) -> str:
        if r.spec_digest != self.spec_digest:
            return (
                "this node's run spec is not the run's: start it without --spec, "
                "or with the same file as the coordinator"
            )
        taken = (p.member for p in self.present.values())
        if any(
            m.name == r.member.name and m.island != r.member.island for m in (*taken, *self.view)
        ):
            return f"the name {r.member.name!r} is taken in this run: choose another with --name"
        if self.view and r.member not in self.view:
            names = ", ".join(member.name for member in self.view)
            return (
                f"the run is already under way with {names}; this version admits no further islands. "
                "To come back as one of them, use its --name and state directory"
            )
        return ""

    def _heard(self, island: IslandId, now_s: float) -> list[Effect]:
        presence = self.present.get(island)
        if presence is None:
            return []
        self.present[island] = replace(presence, heard_s=now_s, alive=True)
        return [] if presence.alive else [PeersChanged()]

    def _expire(self, now_s: float) -> list[Effect]:
        silent = [
            i for i, p in self.present.items() if p.alive and now_s - p.heard_s > self.lease_s
        ]
        for island in silent:
            if self.view:
                self.present[island] = replace(self.present[island], alive=False)
            else:
                del self.present[island]
        return [PeersChanged()] if silent else []
