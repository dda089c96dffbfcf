from __future__ import annotations

import anyio
import pytest

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
