"""What a simulation has shown, as one JSON object with stable keys (later versions add, never rename).

Made from the islands' own event files; times are seconds since the first island saw the run open.
`outer_bytes` counts every byte the islands sent, control messages, scales, retries and start-up phase
included; `data_parallel_bytes` is what a bf16 all-reduce at every inner step would have sent:
inner_steps x 2 (M - 1) x N x 2. A round's `digest` is its new_root.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1

Event = dict[str, Any]


@dataclass(frozen=True)
class Facts:
    """What the report needs besides the events."""

    run_id: str
    seed: int
    spec_digest: str
    parameters: int
    wall_s: float


def read_events(path: Path) -> list[Event]:
    """Events of one island; a last line that was cut off by a crash is left out."""
    events = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            events.append(json.loads(line))
        except ValueError:
            break
    return events


def make_report(
    facts: Facts, islands: dict[str, list[Event]], baselines: dict[str, Any] | None
) -> dict[str, Any]:
    opened_s = min((e["at_s"] for es in islands.values() for e in _of(es, "opened")), default=0.0)
    rows = [_island(name, events) for name, events in islands.items()]
    curve = _curve(islands)
    rounds = _rounds(islands, opened_s)
    outer_bytes = sum(row["sent_bytes"] for row in rows)
    steps = max((row["inner_steps"] for row in rows), default=0)
    data_parallel_bytes = steps * 2 * (len(rows) - 1) * facts.parameters * 2
    busy_s = sum(row["compute_s"] + row["wait_s"] for row in rows)
    voids = {e["round"] for events in islands.values() for e in _of(events, "void")}
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": facts.run_id,
        "seed": facts.seed,
        "spec_digest": facts.spec_digest,
        "wall_s": round(facts.wall_s, 2),
        "islands": rows,
        "rounds": rounds,
        "loss": {
            "initial": curve[0][1] if curve else None,
            "final": curve[-1][1] if curve else None,
            "curve": curve,
        },
        "baselines": {arm: (baselines or {}).get(arm) for arm in ("data_parallel", "solo")},
        "traffic": {
            "outer_bytes": outer_bytes,
            "data_parallel_bytes": data_parallel_bytes,
            "ratio": round(outer_bytes / data_parallel_bytes, 5) if data_parallel_bytes else None,
        },
        "utilisation": round(sum(r["compute_s"] for r in rows) / busy_s, 4) if busy_s else None,
        "digests_agree": _agree(islands),
        "lost_rounds": len(voids),
    }


def _of(events: list[Event], kind: str) -> list[Event]:
    return [e for e in events if e["event"] == kind]


def _island(name: str, events: list[Event]) -> Event:
    boundaries, commits = _of(events, "boundary"), _of(events, "commit")
    last = (_of(events, "ended") or commits or [{}])[-1]
    lives = _lives(events)
    ends = [life[-1] for life in lives if life]
    tokens = sum(end["tokens"] for end in ends)
    compute_s, wait_s = (round(sum(e[key] for e in ends), 4) for key in ("compute_s", "wait_s"))
    trainer = (_of(events, "trainer") or [{}])[-1]
    return {
        "name": name,
        "ranks": trainer.get("ranks", 0),
        "tokens": tokens,
        "inner_steps": boundaries[-1]["step"] if boundaries else 0,
        "rounds": sum(e["listed"] for e in commits),
        "sent_bytes": last.get("sent_bytes", 0),
        "received_bytes": last.get("received_bytes", 0),
        "compute_s": compute_s,
        "wait_s": wait_s,
        "tokens_per_s": round(tokens / (compute_s + wait_s), 1) if ends else None,
        "mfu": _mfu(trainer, tokens, compute_s + wait_s),
        "seconds": _seconds(ends),
        "rank_skew": _rank_skew(boundaries),
        "skipped_steps": sum(end["skipped"] for end in ends),
        "trainer_starts": len(lives),
    }


def _lives(events: list[Event]) -> list[list[Event]]:
    """The boundaries of each trainer this island has had."""
    lives: list[list[Event]] = []
    for e in events:
        if e["event"] == "trainer":
            lives.append([])
        elif e["event"] == "boundary" and lives:
            lives[-1].append(e)
    return lives


def _mfu(trainer: Event, tokens: int, wall_s: float) -> float | None:
    """Model FLOPs per second over the peak of all ranks; None where the peak is not known."""
    peak = trainer.get("peak_flops")
    if not peak or not wall_s:
        return None
    return float(round(tokens * trainer["flops_per_token"] / wall_s / peak, 4))


def _seconds(ends: list[Event]) -> dict[str, float]:
    parts = sorted({part for end in ends for part in end["seconds"]})
    return {part: round(sum(e["seconds"].get(part, 0.0) for e in ends), 3) for part in parts}


def _rank_skew(boundaries: list[Event]) -> float | None:
    """Mean over edges of the slowest rank's time since the last edge over the fastest's."""
    ratios = [max(s) / min(s) for e in boundaries if len(s := e["rank_s"]) > 1 and min(s) > 0]
    return round(sum(ratios) / len(ratios), 3) if ratios else None


def _curve(islands: dict[str, list[Event]]) -> list[list[float]]:
    """[tokens, held-out loss on the anchor], in the order of tokens."""
    points = {
        e["tokens"]: e["loss"] for events in islands.values() for e in _of(events, "evaluation")
    }
    return [[tokens, points[tokens]] for tokens in sorted(points)]


def _rounds(islands: dict[str, list[Event]], opened_s: float) -> list[Event]:
    """One row per committed round, with the times and bytes of all islands together."""
    commits: dict[int, list[Event]] = {}
    attempts: dict[int, int] = {}
    sent: dict[int, int] = {}
    for events in islands.values():
        before = 0
        for e in events:
            if e["event"] == "planned":
                attempts[e["round"]] = max(attempts.get(e["round"], 0), e["attempt"])
            if e["event"] == "commit":
                commits.setdefault(e["round"], []).append(e)
                sent[e["round"]] = sent.get(e["round"], 0) + e["sent_bytes"] - before
                before = e["sent_bytes"]
    rows, previous_s = [], opened_s
    for number in sorted(commits):
        first = min(commits[number], key=lambda e: e["at_s"])
        rows.append(
            {
                "round": number,
                "fragment": first["fragment"],
                "attempt": attempts.get(number, 1),
                "participants": first["participants"],
                "digest": first["new_root"],
                "open_s": round(previous_s - opened_s, 3),
                "commit_s": round(first["at_s"] - opened_s, 3),
                "bytes": sent[number],
            }
        )
        previous_s = first["at_s"]
    return rows


def _agree(islands: dict[str, list[Event]]) -> bool:
    """Every round that any island committed has one root on all islands that hold it."""
    roots: dict[int, set[str]] = {}
    for events in islands.values():
        for e in _of(events, "commit"):
            roots.setdefault(e["round"], set()).add(e["new_root"])
    return bool(roots) and all(len(found) == 1 for found in roots.values())
