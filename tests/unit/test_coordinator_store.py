"""The coordinator's disk: what is written stays, in order, also through kill -9."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.store import Store
from protocol.messages import ClosedRecord

_APPEND_FOREVER = """
import itertools, sys
from pathlib import Path
from coordinator.store import Store
from protocol.messages import ClosedRecord
store = Store(Path(sys.argv[1]))
store.raise_term()
for slot in itertools.count():
    store.save_plan(slot, 1, b"plan %d" % slot)
    store.append(slot, ClosedRecord(b"record %d" % slot, b"certificate %d" % slot))
    print(slot, flush=True)
"""


def closed(slot: int) -> ClosedRecord:
    return ClosedRecord(b"record %d" % slot, b"certificate %d" % slot)


def open_store(tmp_path: Path) -> Store:
    return Store(tmp_path / "coordinator.db")


def test_the_term_rises_at_every_opening(tmp_path: Path) -> None:
    counters = []
    for _ in range(3):
        store = open_store(tmp_path)
        counters.append(store.raise_term())
        store.close()
    assert counters == [1, 2, 3]


def test_the_term_rises_above_what_others_have_promised(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert store.raise_term(at_least=41) == 42
    assert store.raise_term(at_least=7) == 43
    store.close()
    store = open_store(tmp_path)
    assert store.raise_term() == 44
    store.close()


def test_records_come_back_byte_for_byte_in_slot_order(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert store.records() == []
    many = [ClosedRecord(bytes(range(256)), b""), closed(1), closed(2)]
    for slot, record in enumerate(many):
        store.append(slot, record)
    assert store.records() == many
    store.close()


def test_a_slot_is_closed_once_and_a_second_record_changes_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.save_plan(0, 1, b"plan")
    store.append(0, closed(0))
    store.save_plan(1, 1, b"next")
    with pytest.raises(sqlite3.IntegrityError):
        store.append(0, closed(9))
    assert store.records() == [closed(0)]
    store.append(1, closed(1))
    assert store.records() == [closed(0), closed(1)]
    store.close()


def test_the_newest_plan_of_the_slot_comes_back(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert store.last_plan(1) is None
    for attempt, plan in ((1, b"first"), (2, b"second"), (3, b"third")):
        store.save_plan(1, attempt, plan)
    assert store.last_plan(1) == b"third"
    assert store.last_plan(2) is None
    store.close()


def test_a_plan_under_a_later_term_is_newer_though_its_attempt_is_lower(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.save_plan(1, 3, b"third attempt of the first term")
    store.close()
    store = open_store(tmp_path)
    store.raise_term()
    store.save_plan(1, 1, b"first attempt of the second term")
    assert store.last_plan(1) == b"first attempt of the second term"
    store.close()


def test_a_later_plan_is_newer_also_after_plans_of_an_older_slot_were_forgotten(
    tmp_path: Path,
) -> None:
    store = open_store(tmp_path)
    store.save_plan(0, 1, b"first")
    store.save_plan(0, 2, b"second")
    store.save_plan(1, 1, b"old")
    store.append(0, closed(0))
    store.save_plan(1, 1, b"new")
    assert store.last_plan(1) == b"new"
    store.close()


def test_a_record_forgets_the_plans_of_its_slot(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.save_plan(0, 1, b"first")
    store.save_plan(0, 2, b"second")
    store.append(0, closed(0))
    assert store.last_plan(0) is None
    store.save_plan(1, 1, b"next")
    assert store.last_plan(1) == b"next"
    store.close()


def test_everything_survives_a_process_that_never_closed(tmp_path: Path) -> None:
    first = open_store(tmp_path)
    first.raise_term()
    first.append(0, closed(0))
    first.save_plan(1, 1, b"plan")
    second = open_store(tmp_path)
    assert second.records() == [closed(0)]
    assert second.last_plan(1) == b"plan"
    assert second.raise_term() == 2
    second.close()
    first.close()


def test_kill_minus_nine_in_mid_append_leaves_a_dense_log_with_all_that_was_acknowledged(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", _APPEND_FOREVER, str(tmp_path / "coordinator.db")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        acknowledged = [int(child.stdout.readline()) for _ in range(25)]
        child.kill()
        acknowledged += [int(line) for line in child.stdout if line.endswith("\n")]
    store = open_store(tmp_path)
    records = store.records()
    assert records == [closed(slot) for slot in range(len(records))]
    assert acknowledged == list(range(len(acknowledged)))
    assert len(acknowledged) <= len(records) <= len(acknowledged) + 1
    assert store.last_plan(len(records) - 1) is None
    assert store.raise_term() == 2
    store.append(len(records), closed(len(records)))
    store.close()
