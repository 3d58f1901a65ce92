"""What an island must not forget: its promise, its votes, the chain. One SQLite file.

WAL with synchronous=FULL: a promise is on disk before it is answered, a vote before it is sent.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from protocol.messages import NO_TERM, Ballot, ClosedRecord, Signed, Term
from protocol.wire import decode_report, decode_signed, encode_signed

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value BLOB NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS log (
    slot INTEGER PRIMARY KEY, record BLOB NOT NULL, certificate BLOB NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS votes (
    slot INTEGER PRIMARY KEY, report BLOB NOT NULL, plan BLOB NOT NULL) STRICT;
"""


class Journal:
    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.executescript(_SCHEMA)

    def get(self, key: str) -> bytes | None:
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return row[0] if row else None

    def put(self, key: str, value: bytes) -> None:
        self._db.execute(
            "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
            (key, value),
        )

    @property
    def promised(self) -> Term:
        value = self.get("promise")
        return Term(int.from_bytes(value[:8], "big"), value[8:]) if value else NO_TERM

    def promise(self, term: Term) -> None:
        self.put("promise", term.counter.to_bytes(8, "big") + term.boot_id)

    def records(self) -> list[ClosedRecord]:
        rows = self._db.execute("SELECT record, certificate FROM log ORDER BY slot")
        return [ClosedRecord(record, certificate) for record, certificate in rows]

    def append(self, slot: int, closed: ClosedRecord) -> None:
        """Adds a record and forgets the votes of its slot, both or neither."""
        with self._db:
            self._db.execute("BEGIN")
            self._db.execute(
                "INSERT INTO log VALUES (?, ?, ?)", (slot, closed.record, closed.certificate)
            )
            self._db.execute("DELETE FROM votes WHERE slot <= ?", (slot,))

    def vote(self, slot: int, report: Signed, plan: bytes) -> None:
        """The latest signed report of a slot with its plan, kept until the slot is closed here."""
        self._db.execute(
            "INSERT OR REPLACE INTO votes VALUES (?, ?, ?)", (slot, encode_signed(report), plan)
        )

    def ballots(self) -> dict[int, Ballot]:
        """Highest ballot signed per open slot."""
        rows = self._db.execute("SELECT slot, report FROM votes")
        return {slot: decode_report(decode_signed(data).payload).ballot for slot, data in rows}

    def close(self) -> None:
        self._db.close()
