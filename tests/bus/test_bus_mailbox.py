from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from bus.claims import Opening
from bus.mailbox import Mailbox
from bus.scopes import flat_task_group


async def test_items_come_in_order_and_then_the_end() -> None:
    box: Mailbox[int] = Mailbox()
    for number in range(200):
        box.put(number)
    box.end()
    box.put(999)
    assert [item async for item in box] == list(range(200))


async def test_the_end_can_be_an_error() -> None:
    box: Mailbox[int] = Mailbox()
    box.put(1)
    box.end(ValueError("gone"))
    box.end()
    assert await anext(box) == 1
    for _ in range(2):
        with pytest.raises(ValueError, match="gone"):
            await anext(box)


async def test_a_full_box_drops_the_oldest() -> None:
    box: Mailbox[int] = Mailbox(limit=3)
    for number in range(5):
        box.put(number)
    assert (len(box), box.dropped) == (3, 2)
    assert box.take_all() == [2, 3, 4]
    assert len(box) == 0


async def test_every_reader_gets_something() -> None:
    box: Mailbox[int] = Mailbox()
    got: list[int] = []

    async def read() -> None:
        got.append(await anext(box))

    with anyio.fail_after(5):
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(read)
            await anyio.wait_all_tasks_blocked()
            for number in range(3):
                box.put(number)
                await anyio.wait_all_tasks_blocked()
    assert sorted(got) == [0, 1, 2]


async def test_a_cancelled_reader_loses_nothing() -> None:
    box: Mailbox[int] = Mailbox()
    with anyio.move_on_after(0.01):
        await anext(box)
    box.put(1)
    with anyio.fail_after(1):
        assert await anext(box) == 1


async def test_one_failure_arrives_as_itself_and_two_as_a_group() -> None:
    async def fail(error: Exception) -> None:
        raise error

    with pytest.raises(KeyError):
        async with flat_task_group() as group:
            group.start_soon(fail, KeyError())

    async def fail_twice() -> None:
        async with flat_task_group() as group:
            group.start_soon(fail, KeyError())
            group.start_soon(fail, ValueError())

    with pytest.raises(BaseExceptionGroup):
        await fail_twice()


async def test_what_is_there_is_taken_without_waiting_but_not_for_ever() -> None:
    box: Mailbox[int] = Mailbox()
    assert box.take() is None
    for number in range(200):
        box.put(number)
    taken = []
    while (item := box.take()) is not None:
        taken.append(item)
    assert 0 < len(taken) < 200  # others have their turn
    while len(taken) < 200:
        item = box.take()
        taken.append(await anext(box) if item is None else item)
    assert taken == list(range(200))
    assert box.take() is None


async def test_a_reader_that_never_waits_lets_others_go_on() -> None:
    box: Mailbox[Any] = Mailbox()
    for number in range(300):
        box.put(SimpleNamespace(message=number))
    others = 0

    async def count() -> None:
        nonlocal others
        while True:
            await checkpoint()
            others += 1

    async with anyio.create_task_group() as group:
        group.start_soon(count)
        opening: Opening[Any] = Opening(box, no_claim, take=box.take)
        assert [(await anext(opening)).message for _ in range(300)] == list(range(300))
        group.cancel_scope.cancel()
    assert others >= 3


async def no_claim(item: Any) -> Any:
    raise AssertionError(f"{item} is no claim")
