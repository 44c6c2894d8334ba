"""Logs, set up once from config. Events are fixed snake_case names, values are fields. Metrics: `metrics.py`."""

from __future__ import annotations

import logging
import sys
from typing import TextIO, cast

import structlog

from slipstream.common.config import ServiceConfig
from slipstream.common.disk import LogFile

log = structlog.get_logger()


def setup_logging(config: ServiceConfig, service: str = "") -> None:
    """Write JSON lines to `log.file`, each with run, service and replica; without a file, to standard error.

    Standard error on a terminal gets the console form. Lines of libraries that use `logging` join in.
    """
    stream: TextIO = sys.stderr
    if config.log.file is not None:
        stream = cast(TextIO, LogFile(config.log.file, config.log.limit_bytes, config.log.kept_files))
    console = config.log.file is None and sys.stderr.isatty()
    render = structlog.dev.ConsoleRenderer() if console else structlog.processors.JSONRenderer(default=str)
    level = logging.getLevelNamesMapping()[config.log.level.upper()]
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    errors: list[structlog.typing.Processor] = [] if console else [structlog.processors.format_exc_info]
    structlog.configure(
        processors=[*shared, *errors, render],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(stream),
        cache_logger_on_first_use=True,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *errors, render],
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(max(level, logging.WARNING))
    structlog.contextvars.clear_contextvars()
    fields = {"run_id": config.run_id, "service": service, "replica": config.replica}
    structlog.contextvars.bind_contextvars(**{key: value for key, value in fields.items() if value})
