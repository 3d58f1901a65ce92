"""What the coordinator must not forget: term, log, plans of the open slot. One SQLite file.

WAL with synchronous=FULL: when a method returns, its write survives a power cut. One writer, the
coordinator's loop; a second process on the same file is refused by the lock of the state directory.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from protocol.messages import ClosedRecord

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value BLOB NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS log (
    slot INTEGER PRIMARY KEY, record BLOB NOT NULL, certificate BLOB NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS plans (
    slot INTEGER NOT NULL, attempt INTEGER NOT NULL, made INTEGER NOT NULL, plan BLOB NOT NULL) STRICT;
"""


class Store:
    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.executescript(_SCHEMA)

    def raise_term(self, at_least: int = 0) -> int:
        """Counter of a new incarnation, above every earlier one and above `at_least`."""
        row = self._db.execute("SELECT value FROM meta WHERE key = 'term'").fetchone()
        counter = max(int(row[0]) if row else 0, at_least) + 1
        self._db.execute(
            "INSERT INTO meta VALUES ('term', ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
            (str(counter).encode(),),
        )
        return counter

    def records(self) -> list[ClosedRecord]:
        rows = self._db.execute("SELECT record, certificate FROM log ORDER BY slot")
        return [ClosedRecord(record, certificate) for record, certificate in rows]

    def append(self, slot: int, closed: ClosedRecord) -> None:
        """Adds a record and forgets the plans of its slot, both or neither."""
        with self._db:
            self._db.execute("BEGIN")
            self._db.execute(
                "INSERT INTO log VALUES (?, ?, ?)", (slot, closed.record, closed.certificate)
            )
            self._db.execute("DELETE FROM plans WHERE slot <= ?", (slot,))

    def save_plan(self, slot: int, attempt: int, plan: bytes) -> None:
        self._db.execute(
            "INSERT INTO plans VALUES (?, ?, (SELECT coalesce(max(made) + 1, 0) FROM plans), ?)",
            (slot, attempt, plan),
        )

    def last_plan(self, slot: int) -> bytes | None:
        row = self._db.execute(
            "SELECT plan FROM plans WHERE slot = ? ORDER BY made DESC LIMIT 1", (slot,)
        ).fetchone()
        return row[0] if row else None

    def close(self) -> None:
        self._db.close()
