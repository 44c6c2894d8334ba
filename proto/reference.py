"""Writes docs/api.md: what third parties may call, from the comments of the protos.

python proto/reference.py            write it
python proto/reference.py check      exit with 1 unless it is up to date
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from hatch_build import write_image  # noqa: E402

PAGE = ROOT / "docs" / "api.md"
PUBLIC = ("rollout/v1/rollout.proto", "run/v1/run.proto", "types/v1/types.proto")
LEFT_OUT = {"FindSession", "FindSessionRequest", "FindSessionResponse"}
"""The gateway's."""
HEAD = """# API reference

What third parties may call, made from the comments of `proto/` by `python proto/reference.py`. Every call carries the
run's token as `authorization: Bearer`; errors are `google.rpc.Status` with one `ErrorInfo`, whose reasons are in
[operations.md](operations.md#error-reasons). The Python client is in [clients/python](../clients/python/README.md).
"""
_SERVICE, _MESSAGE, _ENUM = 6, 4, 5
_FIELD = descriptor_pb2.FieldDescriptorProto


def reference() -> str:
    """The page."""
    with tempfile.TemporaryDirectory() as scratch:
        image = Path(scratch, "image.binpb")
        write_image(image)
        files = descriptor_pb2.FileDescriptorSet.FromString(image.read_bytes()).file
    chosen = {name: file for name in PUBLIC for file in files if file.name.endswith(name)}
    return HEAD + "".join("\n".join(_file(chosen[name])) + "\n" for name in PUBLIC)


def _file(file: descriptor_pb2.FileDescriptorProto) -> Iterator[str]:
    comments = {tuple(place.path): place.leading_comments for place in file.source_code_info.location}
    for number, service in enumerate(file.service):
        yield f"\n## {service.name}\n\n{_text(comments, _SERVICE, number)}"
        for index, method in enumerate(service.method):
            if method.name not in LEFT_OUT:
                stream = "stream " if method.server_streaming else ""
                takes, answers = _short(method.input_type), _short(method.output_type)
                yield f"\n### {method.name}\n\n`{method.name}({takes}) returns ({stream}{answers})`\n"
                yield _text(comments, _SERVICE, number, 2, index)
    for number, message in enumerate(file.message_type):
        if message.name in LEFT_OUT:
            continue
        yield f"\n### `{message.name}`\n\n{_text(comments, _MESSAGE, number)}"
        if message.field:
            yield "\n| field | type | |\n|---|---|---|"
        for index, field in enumerate(message.field):
            text = _text(comments, _MESSAGE, number, 2, index).replace("\n", " ").replace("|", "\\|")
            yield f"| `{field.name}` | {_type(message, field)} | {text} |"
    for number, enum in enumerate(file.enum_type):
        yield f"\n### `{enum.name}`\n\n{_text(comments, _ENUM, number)}\n\n| value | |\n|---|---|"
        for index, value in enumerate(enum.value):
            text = _text(comments, _ENUM, number, 2, index).replace("\n", " ")
            yield f"| `{value.name}` | {text} |"


def _text(comments: dict[tuple[int, ...], str], *path: int) -> str:
    return "\n".join(line.removeprefix(" ").rstrip() for line in comments.get(path, "").splitlines()).strip()


def _type(message: descriptor_pb2.DescriptorProto, field: Any) -> str:
    maps = {nested.name: nested for nested in message.nested_type if nested.options.map_entry}
    if (entry := maps.get(_short(field.type_name))) is not None:
        return f"map of {_type(message, entry.field[0])} to {_type(message, entry.field[1])}"
    name = f"`{_short(field.type_name)}`" if field.type_name else _FIELD.Type.Name(field.type)[5:].lower()
    repeated = "repeated " if field.label == _FIELD.LABEL_REPEATED else ""
    return repeated + ("optional " if field.proto3_optional else "") + name


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def main() -> None:
    text = reference()
    if sys.argv[1:] == ["check"]:
        sys.exit(0 if PAGE.exists() and PAGE.read_text() == text else "docs/api.md is old: python proto/reference.py")
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
