"""Structured logs: one JSON object per line in ``logs/PROCESS.jsonl`` of the run directory.

Libraries that use the standard logging module write to the same file. Files rotate, so long runs keep a
bounded history.
"""

from __future__ import annotations

import logging
import logging.handlers
import socket
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog

_FILE_BYTES = 64 << 20
_FILES_KEPT = 3

Sink = Callable[[str, MutableMapping[str, Any]], None]


@contextmanager
def quiet_bus() -> Iterator[None]:
    """Suppress the bus's log of an unreachable broker: the command reports it as an error."""
    log = logging.getLogger("spade.bus")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


class _SinkHandler(logging.Handler):
    """Passes warnings and errors to the live view (see :func:`configure`)."""

    def __init__(self, sink: Sink) -> None:
        super().__init__(logging.WARNING)
        self._sink = sink

    def emit(self, record: logging.LogRecord) -> None:
        event = record.msg if isinstance(record.msg, dict) else {"event": record.getMessage()}
        self._sink(record.levelname.lower(), event)


def configure(directory: Path, process: str, *, sink: Sink | None = None) -> structlog.stdlib.BoundLogger:
    """Send this process's logs to ``directory``/``process``.jsonl and return the root logger.

    ``sink`` also receives (level, event fields) of warnings and errors. A second call replaces the
    destination. Raises OSError when the file cannot be opened.
    """
    directory.mkdir(parents=True, exist_ok=True)
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    handler = logging.handlers.RotatingFileHandler(
        directory / f"{process}.jsonl", maxBytes=_FILE_BYTES, backupCount=_FILES_KEPT, encoding="utf-8"
    )
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.dict_tracebacks,
                structlog.processors.JSONRenderer(default=str),
            ],
        )
    )
    root = logging.getLogger()
    close(root)
    root.addHandler(handler)
    if sink is not None:
        root.addHandler(_SinkHandler(sink))
    root.setLevel(logging.INFO)
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger("spade")
    return logger.bind(process=process, host=socket.gethostname())


def close(root: logging.Logger | None = None) -> None:
    """Remove our handlers from the root logger and close their files."""
    root = root or logging.getLogger()
    for handler in [item for item in root.handlers if isinstance(item, _OURS)]:
        root.removeHandler(handler)
        handler.close()


_OURS = (logging.handlers.RotatingFileHandler, _SinkHandler)
