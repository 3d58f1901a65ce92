"""Virtual time: hours at once, the same order every time, and an error in place of hanging."""

from __future__ import annotations

import asyncio
import time

import pytest

from protocol.virtual_time import Deadlock, run_virtual


def test_an_hour_passes_at_once() -> None:
    async def main() -> float:
        await asyncio.sleep(3_600)
        return asyncio.get_running_loop().time()

    began = time.monotonic()
    assert run_virtual(main()) == pytest.approx(3_600)
    assert time.monotonic() - began < 60


def test_every_run_begins_at_zero_and_gives_the_same_order() -> None:
    async def main() -> list[tuple[float, str]]:
        told: list[tuple[float, str]] = []

        async def speak(name: str, every_s: float) -> None:
            for _ in range(5):
                await asyncio.sleep(every_s)
                told.append((asyncio.get_running_loop().time(), name))

        assert asyncio.get_running_loop().time() == 0
        await asyncio.gather(speak("a", 2.0), speak("b", 3.0), speak("c", 2.0))
        return told

    first = run_virtual(main())
    assert first == run_virtual(main())
    assert first == sorted(first, key=lambda entry: entry[0])
    assert [name for _, name in first[:4]] == ["a", "c", "b", "a"]


def test_a_timeout_comes_at_its_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(90):
                await asyncio.Event().wait()
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(90)


def test_all_waiting_without_a_timer_is_a_deadlock() -> None:
    async def main() -> None:
        await asyncio.sleep(10)
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="no timer is set"):
        run_virtual(main())


def test_two_tasks_that_wait_for_each_other_are_a_deadlock() -> None:
    async def main() -> None:
        one, two = asyncio.Event(), asyncio.Event()

        async def after(first: asyncio.Event, then: asyncio.Event) -> None:
            await first.wait()
            then.set()

        await asyncio.gather(after(one, two), after(two, one))

    with pytest.raises(Deadlock):
        run_virtual(main())


def test_an_error_of_the_story_comes_out_unchanged() -> None:
    async def main() -> None:
        await asyncio.sleep(1)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run_virtual(main())
