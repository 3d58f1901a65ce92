"""From an address to a verified start: what is this run, is it mine, and do I hold its start state?"""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from node.coordinator_client import CoordinatorClient
from node.journal import Journal
from node.run_state import RunState
from node.site import Site
from node.start_donor import fetch_start
from protocol import atoll_coordinator_pb2 as pb
from protocol.chain import verified_start
from protocol.errors import BadFrame, RunMismatch
from protocol.merkle import digest
from protocol.messages import IslandId, Record, Start
from protocol.spec import RunSpec, load_spec, spec_differences, spec_from_json
from protocol.state_dir import write_atomically
from protocol.transport import Transport
from protocol.wire import signed_from_pb

log = structlog.get_logger()


@dataclass(frozen=True)
class Described:
    """A run, as its coordinator tells it, checked against the owner's signature."""

    spec: RunSpec
    start: Start
    owner: IslandId
    tokenizer_json: bytes
    donors: tuple[str, ...]  # of the start state; the coordinator's own address is one of them


async def describe(client: CoordinatorClient, site: Site, journal: Journal) -> Described:
    """Raises RunMismatch if this node belongs to another run, or its own spec file differs."""
    reply = await client.describe()
    described = _checked(reply, site.coordinator)
    _same_run_as_before(described, journal, site)
    if site.spec is not None:
        differences = spec_differences(load_spec(site.spec), described.spec)
        if differences:
            raise RunMismatch(
                f"{site.spec} is not the run's spec: {'; '.join(differences)}. "
                "Leave --spec out to take the run's own, or give both the same file"
            )
    if described.tokenizer_json:
        write_atomically(site.tokenizer, described.tokenizer_json)
    return described


def _checked(reply: pb.DescribeReply, coordinator: str) -> Described:
    spec = spec_from_json(reply.spec_json.encode(), "the coordinator's spec")
    signed = signed_from_pb(reply.start)
    start = verified_start(signed, signed.signer)
    if start.spec_digest != spec.digest():
        raise RunMismatch("the coordinator hands out another spec than the one the owner signed")
    expected = start.tokenizer_digest
    if (digest(reply.tokenizer_json) if reply.tokenizer_json else b"") != expected:
        raise BadFrame("the coordinator hands out another tokenizer than the one the owner signed")
    donors = (coordinator, *reply.donors)
    return Described(spec, start, signed.signer, reply.tokenizer_json, donors)


def _same_run_as_before(described: Described, journal: Journal, site: Site) -> None:
    """The first run a state directory meets is the only one it will ever serve."""
    pinned = {"run_id": described.start.run_id.encode(), "owner": described.owner}
    for key, value in pinned.items():
        known = journal.get(key)
        if known is None:
            journal.put(key, value)
        elif known != value:
            raise RunMismatch(
                f"{site.state} belongs to another run ({key} differs): choose another --name or --state, "
                "or remove that directory"
            )


async def prepare_state(
    transport: Transport, described: Described, site: Site, journal: Journal
) -> tuple[RunState, list[Record]]:
    """The island's state: restored from disk, or fetched from donors and verified.

    Returns also the commits whose cells have to be fetched from other islands.
    """
    state = RunState(site, described.spec, described.start, described.owner, journal)
    if site.snapshot.exists():
        return state, state.restore()
    await fetch_start(transport, described.donors, described.start, state.layout, state.replica)
    state.save_snapshot()
    log.info("start_state_verified", values=state.layout.values)
    return state, []
