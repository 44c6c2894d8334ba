"""Whoever meets a bound is told it: its number, and the setting that it comes from, where there is one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import grpc

import slipstream.common
from slipstream.common.config import ServiceConfig
from slipstream.common.errors import SlipstreamError

SERVICES = Path(slipstream.common.__file__).parents[1]
FULL = {cls.__name__ for cls in SlipstreamError.by_reason.values() if cls.code is grpc.StatusCode.RESOURCE_EXHAUSTED}


def refusals() -> Iterator[tuple[str, ast.Call, dict[str, ast.expr]]]:
    """Each place that makes such an error: where, the call, and what it says by name."""
    for path in sorted(SERVICES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())) if "api" not in path.relative_to(SERVICES).parts else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FULL:
                said = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
                yield f"{path.relative_to(SERVICES)}:{node.lineno}", node, said


def test_every_refusal_for_want_of_room_says_the_limit_or_where_there_is_none():
    found = list(refusals())
    assert len(found) > 15
    assert [where for where, _, said in found if not {"limit", "limit_bytes", "path"} & said.keys()] == []


def test_the_settings_that_such_refusals_name_exist_and_are_in_the_message():
    named = 0
    for where, call, said in refusals():
        name = said.get("name")
        if not isinstance(name, ast.Constant) or "." not in (setting := str(name.value)):
            continue
        assert setting in ast.unparse(call.args[0]), where
        service, _, key = setting.partition(".")
        module = import_module(f"slipstream.{service}.config")
        classes = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, ServiceConfig)]
        config: Any = next(each for each in classes if each.__module__ == module.__name__)
        for part in key.split("."):
            assert part in config.model_fields, f"{where}: {setting}"
            config = config.model_fields[part].annotation
        named += 1
    assert named > 8
