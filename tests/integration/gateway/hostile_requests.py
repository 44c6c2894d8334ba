"""Requests that nobody should send, made by hypothesis: what is sent, how slowly, and how the connection ends."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass

from hypothesis import strategies as st

PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/models",
    "/v1/models/my-run",
    "/v1/responses",
    "/",
    "*",
    "//x/..",
)
ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
HUGE_BYTES = 4 << 20


@dataclass(frozen=True)
class Hostile:
    """One connection: parts that are written one after the other, and what its client does then."""

    parts: tuple[bytes, ...]
    ending: str
    """"wait" for an answer, "half-close" and wait, or "vanish"."""
    pauses: bool
    """Between parts."""

    @property
    def head_only(self) -> bool:
        """Whether its answer has no body."""
        return b"".join(self.parts).startswith(b"HEAD ")

    def __repr__(self) -> str:
        shown = [part if len(part) < 400 else part[:400] + b"... %d bytes" % len(part) for part in self.parts]
        return f"Hostile({shown}, {self.ending!r}, {self.pauses})"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)
FIELDS = (
    "messages",
    "tools",
    "stop",
    "n",
    "stream",
    "seed",
    "max_tokens",
    "temperature",
    "prompt",
    "logprobs",
    "model",
)


@st.composite
def asked(draw: st.DrawFn) -> bytes:
    """A request as JSON, some of its fields other than they should be."""
    body = {**ASK, **draw(st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=8), json_values, max_size=3))}
    return json.dumps(body).encode(errors="surrogatepass")


bodies = st.one_of(
    asked(),
    st.just(json.dumps(ASK).encode()),
    st.binary(max_size=300),
    st.integers(0, 200_000).map(lambda depth: b"[" * depth),
    st.sampled_from([64 << 10, (64 << 10) + 1, HUGE_BYTES]).map(lambda size: b'"' + b"x" * (size - 2) + b'"'),
)
keys = st.sampled_from(
    ["Bearer mine", "Bearer mine", "Bearer mine", "Bearer yours", "bearer  nobody", "Basic bWluZQ==", ""]
)
strange_headers = st.one_of(
    st.tuples(st.binary(min_size=1, max_size=12), st.binary(max_size=40)),
    st.sampled_from(
        [
            (b"content-encoding", b"gzip"),
            (b"content-encoding", b"br, gzip"),
            (b"expect", b"100-continue"),
            (b"expect", b"200-ok"),
            (b"connection", b"upgrade"),
            (b"upgrade", b"websocket"),
            (b"content-type", b"text/plain; charset=nonsense"),
            (b"content-length", b"7"),
            (b"transfer-encoding", b"chunked"),
            (b"transfer-encoding", b"gzip, chunked"),
            (b"x", b"y" * 9000),
            (b"host", b"other"),
        ]
    ),
)


lies = st.sampled_from([None] * 4 + [b"more", b"1", b"-1", b"zz", b"f" * 40, b""])
chunks = st.lists(st.tuples(st.integers(1, 100_000), lies), min_size=1, max_size=4)
chunk_ends = st.sampled_from([b"0\r\n\r\n", b"0\r\n\r\n", b"0\r\n\r\n", b"", b"0\r\nx: y\r\n\r\n", b"00000"])


def in_chunks(body: bytes, sizes: list[tuple[int, bytes | None]], end: bytes) -> bytes:
    """A body in chunks, some of which lie about their size."""
    out, at = [], 0
    for size, lie in sizes:
        part = body[at : at + size]
        at += size
        said = b"%x" % len(part) if lie is None else b"%x" % (len(part) + 5) if lie == b"more" else lie
        out.append(said + b"\r\n" + part + b"\r\n")
    return b"".join([*out, end])


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """The bytes of one request, or of something like it."""
    method = draw(
        st.sampled_from([b"POST"] * 6 + [b"GET", b"HEAD", b"PUT", b"DELETE", b"OPTIONS", b"CONNECT", b"P\x00ST"])
    )
    path = draw(st.sampled_from(PATHS[:2] * 3 + PATHS) | st.text(max_size=20)).encode(errors="surrogatepass")
    version = draw(st.sampled_from([b"HTTP/1.1"] * 8 + [b"HTTP/1.0", b"HTTP/2.0", b"http", b""]))
    body = draw(bodies)
    headers = [(b"host", b"x"), (b"authorization", draw(keys).encode())]
    headers += draw(st.lists(strange_headers, max_size=2))
    match draw(st.sampled_from(["true", "true", "true", "chunked", "chunked", "more", "less", "none", "nonsense"])):
        case "true":
            headers.append((b"content-length", b"%d" % len(body)))
        case "chunked":
            headers.append((b"transfer-encoding", b"chunked"))
            body = in_chunks(body, draw(chunks), draw(chunk_ends))
        case "more":
            headers.append((b"content-length", b"%d" % (len(body) + draw(st.sampled_from([1, 100, 2**40])))))
        case "less":
            headers.append((b"content-length", b"%d" % (len(body) // 2)))
        case "nonsense":
            headers.append((b"content-length", draw(st.sampled_from([b"-1", b"1e3", b"", b"0x10", b"9" * 400]))))
        case _:
            pass
    head = b" ".join((method, path, version)) + b"\r\n"
    head += b"".join(name + b": " + value + b"\r\n" for name, value in headers)
    return head + b"\r\n" + body


@st.composite
def hostile(draw: st.DrawFn) -> Hostile:
    """A connection."""
    data = draw(requests() | requests() | requests() | st.binary(max_size=200))
    cuts = sorted(draw(st.lists(st.integers(0, max(len(data), 1)), max_size=3)))
    ends = [0, *cuts, draw(st.sampled_from([len(data)] * 4 + [len(data) // 2]))]
    parts = tuple(data[start:end] for start, end in itertools.pairwise(ends) if end > start)
    ending = draw(st.sampled_from(["wait"] * 4 + ["half-close", "vanish"]))
    return Hostile(parts, ending, draw(st.booleans()))
