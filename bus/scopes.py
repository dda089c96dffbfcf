"""Task groups whose single failure arrives as itself."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup


def only(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the exception a group holds if it is the only one, however deep, else the group."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


@asynccontextmanager
async def flat_task_group() -> AsyncIterator[TaskGroup]:
    """Like ``anyio.create_task_group``, but a single exception is raised without its group."""
    try:
        async with anyio.create_task_group() as group:
            yield group
    except BaseExceptionGroup as error:
        inner = only(error)
        if inner is error:
            raise
        raise inner from inner.__cause__
