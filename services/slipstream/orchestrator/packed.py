"""Messages as the journal keeps them: compressed, in text."""

from __future__ import annotations

import base64
import zlib
from typing import TypeVar

from google.protobuf.message import Message

MessageT = TypeVar("MessageT", bound=Message)


def packed(message: Message) -> str:
    """Return a message as the journal keeps it."""
    return base64.b64encode(zlib.compress(message.SerializeToString(), 1)).decode()


def unpack(text: str, kind: type[MessageT]) -> MessageT:
    """Return a message from the journal."""
    return kind.FromString(zlib.decompress(base64.b64decode(text)))
