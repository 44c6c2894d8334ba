"""What the protos and the documents promise: every RPC, the statuses its comment lists, and those that all share."""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

import slipstream.api

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "slipstream.api."
STATUS = re.compile(r"`([A-Z_]+)`\s*\(`([A-Z_]+)`\)")
TABLE_ROW = re.compile(r"^\| `([A-Z_]+)` \| (?:`([A-Z_]+)`|none) \|", re.MULTILINE)

Status = tuple[str, str]
"""(code, reason); the reason is empty where gRPC itself answers."""


@dataclass(frozen=True)
class Rpc:
    """One method of one service."""

    service: str
    name: str
    request: Any
    """Class of its requests."""
    response: Any
    client_streaming: bool
    server_streaming: bool
    statuses: frozenset[Status]
    """What its comment lists beyond the usual ones."""

    @property
    def path(self) -> str:
        return f"/{self.service}/{self.name}"

    @property
    def short(self) -> str:
        return f"{self.service.rpartition('.')[2]}.{self.name}"


@cache
def rpcs() -> dict[str, list[Rpc]]:
    """Every service of the contract, by full name."""
    for module in pkgutil.walk_packages(slipstream.api.__path__, "slipstream.api."):
        if module.name.endswith("_pb2"):
            importlib.import_module(module.name)
    comments = rpc_comments()
    pool = descriptor_pool.Default()
    found: dict[str, list[Rpc]] = {}
    for service in dict.fromkeys(path.rpartition("/")[0] for path in comments):
        descriptor = pool.FindServiceByName(service)
        found[service] = [
            Rpc(
                service,
                method.name,
                message_factory.GetMessageClass(method.input_type),
                message_factory.GetMessageClass(method.output_type),
                method.client_streaming,
                method.server_streaming,
                frozenset(STATUS.findall(comments[f"{service}/{method.name}"])),
            )
            for method in descriptor.methods
        ]
    return found


@cache
def rpc_comments() -> dict[str, str]:
    """The comment of every RPC, by "package.Service/Method", from the source info of the descriptor image."""
    command = [sys.executable, str(ROOT / "hatch_build.py"), "image", "/dev/stdout"]
    image = descriptor_pb2.FileDescriptorSet.FromString(subprocess.run(command, capture_output=True, check=True).stdout)
    comments: dict[str, str] = {}
    for file in image.file:
        if not file.package.startswith(PACKAGE):
            continue
        for location in file.source_code_info.location:
            if len(location.path) == 4 and location.path[0] == 6 and location.path[2] == 2:
                service = file.service[location.path[1]]
                name = f"{file.package}.{service.name}/{service.method[location.path[3]].name}"
                comments[name] = location.leading_comments
    return comments


@cache
def common_statuses() -> frozenset[Status]:
    """What every RPC may answer, from the table in the documents."""
    text = (ROOT / "docs" / "operations.md").read_text()
    section = text.partition("## What every RPC may answer")[2].partition("\n## ")[0]
    rows = frozenset(TABLE_ROW.findall(section))
    assert len(rows) >= 8, "the table of common statuses is gone"
    return rows
