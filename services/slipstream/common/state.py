"""The state a run shares through Redis: versions that only move forward, leases, and a stream for followers.

Everything here can be rebuilt from manifests and the journal, so losing Redis pauses work and loses
nothing. Changes are optimistic transactions (WATCH/MULTI), which need no scripting right.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from redis import asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ClusterDownError, OutOfMemoryError, ReadOnlyError, ResponseError, TryAgainError, WatchError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from slipstream.common.errors import StateConflict, StateUnavailable
from slipstream.common.version import UNSET, PolicyVersion

T = TypeVar("T")

PUBLISHED = "published"
SERVING = "serving"
STREAM_LENGTH = 10_000
BLOCK_MS = 2_000
ATTEMPTS = 50
PING_TTL_S = 10.0

_PASSING = re.compile(r"\b(BUSY|MISCONF|NOREPLICAS) ")
"""Codes that redis-py has no class for, anywhere in what it makes of them in a pipeline."""


class Lease(NamedTuple):
    """A lease that is held: its owner and what the owner says about itself."""

    owner: str
    fields: dict[str, str]


class Change(NamedTuple):
    """One entry of the stream. `id` resumes a follower."""

    id: str
    key: str
    value: str


class State:
    """A client of the run's Redis. Every method raises `StateUnavailable` when Redis is away, or full."""

    def __init__(self, url: str, run_id: str) -> None:
        self._prefix = f"slipstream:{run_id}:"
        # No retry here: callers pause and say so. The socket waits longer than a blocking read does.
        # Any: the types cannot tell that replies are decoded to text.
        self._redis: Any = redis.Redis.from_url(  # pyright: ignore[reportUnknownMemberType]
            url,
            decode_responses=True,
            socket_connect_timeout=2.0,
            socket_timeout=BLOCK_MS / 1000 + 3.0,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )

    async def close(self) -> None:
        await self._redis.aclose()

    async def ping(self) -> None:
        """Return if Redis answers and takes writes."""
        await self.put("ping", "", PING_TTL_S)

    # Versions

    async def advance(self, key: str, version: PolicyVersion) -> bool:
        """Move `key` forward to `version` and tell followers. False, and no change, if it is not newer."""

        async def change(pipe: Any, name: str) -> bool:
            held = await pipe.get(name)
            if held is not None and PolicyVersion.parse(held) >= version:
                return False
            pipe.multi()
            pipe.set(name, str(version))
            pipe.xadd(
                self._prefix + "changes", {"key": key, "value": str(version)}, maxlen=STREAM_LENGTH, approximate=True
            )
            return True

        return await self._transaction(key, change)

    async def version(self, key: str) -> PolicyVersion:
        """The version at `key`, or `UNSET`."""
        with _available():
            text = await self._redis.get(self._prefix + key)
        return UNSET if text is None else PolicyVersion.parse(text)

    # Leases

    async def acquire(self, key: str, owner: str, ttl_s: float, fields: dict[str, str] | None = None) -> bool:
        """Take the lease at `key`, or renew it with new `fields` if `owner` holds it. False if another does."""
        value = json.dumps({"owner": owner, "fields": fields or {}})

        async def change(pipe: Any, name: str) -> bool:
            if _owner(await pipe.get(name)) not in (None, owner):
                return False
            pipe.multi()
            pipe.set(name, value, px=_milliseconds(ttl_s))
            return True

        return await self._transaction(f"lease:{key}", change)

    async def renew(self, key: str, owner: str, ttl_s: float) -> bool:
        """Keep the lease at `key` for another `ttl_s`. False if it expired or is another's."""

        async def change(pipe: Any, name: str) -> bool:
            if _owner(await pipe.get(name)) != owner:
                return False
            pipe.multi()
            pipe.pexpire(name, _milliseconds(ttl_s))
            return True

        return await self._transaction(f"lease:{key}", change)

    async def release(self, key: str, owner: str) -> bool:
        """Give the lease at `key` back. False if `owner` did not hold it."""

        async def change(pipe: Any, name: str) -> bool:
            if _owner(await pipe.get(name)) != owner:
                return False
            pipe.multi()
            pipe.delete(name)
            return True

        return await self._transaction(f"lease:{key}", change)

    async def lease(self, key: str) -> Lease | None:
        """The lease at `key`, if one is held."""
        with _available():
            text = await self._redis.get(f"{self._prefix}lease:{key}")
        return None if text is None else Lease(**json.loads(text))

    async def leases(self, prefix: str = "") -> dict[str, Lease]:
        """Held leases whose key starts with `prefix`, by key."""
        start = f"{self._prefix}lease:"
        found: dict[str, Lease] = {}
        with _available():
            async for name in self._redis.scan_iter(match=f"{_literal(start + prefix)}*", count=500):
                text = await self._redis.get(name)
                if text is not None:
                    found[name.removeprefix(start)] = Lease(**json.loads(text))
        return found

    # Plain values

    async def put(self, key: str, value: str, ttl_s: float | None = None) -> None:
        """Set `key`, for `ttl_s` if given."""
        with _available():
            await self._redis.set(self._prefix + key, value, px=None if ttl_s is None else _milliseconds(ttl_s))

    async def write_many(self, values: dict[str, str], deleted: Sequence[str] = (), ttl_s: float | None = None) -> None:
        """Set and delete many keys in one round trip, each by itself."""
        px = None if ttl_s is None else _milliseconds(ttl_s)
        with _available():
            async with self._redis.pipeline(transaction=False) as pipe:
                for key, value in values.items():
                    pipe.set(self._prefix + key, value, px=px)
                if deleted:
                    pipe.delete(*(self._prefix + key for key in deleted))
                await pipe.execute()

    async def get(self, key: str) -> str | None:
        with _available():
            return await self._redis.get(self._prefix + key)

    async def get_many(self, keys: Sequence[str]) -> dict[str, str]:
        """What is at those of the keys that are set, in one round trip."""
        if not keys:
            return {}
        with _available():
            values = await self._redis.mget([self._prefix + key for key in keys])
        return {key: value for key, value in zip(keys, values, strict=True) if value is not None}

    async def delete(self, *keys: str) -> None:
        if keys:
            with _available():
                await self._redis.delete(*(self._prefix + key for key in keys))

    # Followers

    async def last_change(self) -> str:
        """Id of the newest entry of the stream: follow from here to see only what comes."""
        with _available():
            newest = await self._redis.xrevrange(self._prefix + "changes", count=1)
        return newest[0][0] if newest else "0"

    async def follow(self, after: str = "0") -> AsyncIterator[Change]:
        """Changes after id `after`, for ever. The stream keeps the newest; a follower that fell far behind
        reads the values themselves."""
        name = self._prefix + "changes"
        while True:
            with _available():
                reply: Any = await self._redis.xread({name: after}, count=100, block=BLOCK_MS)
            for _, entries in reply or ():
                for entry_id, fields in entries:
                    after = entry_id
                    yield Change(entry_id, fields["key"], fields["value"])

    async def _transaction(self, key: str, change: Callable[[Any, str], Awaitable[bool]]) -> bool:
        """Run `change` on a watched key until nobody else changed the key meanwhile."""
        name = self._prefix + key
        with _available():
            async with self._redis.pipeline(transaction=True) as pipe:
                for _ in range(ATTEMPTS):
                    try:
                        await pipe.watch(name)
                        if not await change(pipe, name):
                            return False
                        await pipe.execute()
                        return True
                    except WatchError:
                        continue
        raise StateConflict(f"{key} keeps changing", key=key)


@contextmanager
def _available() -> Generator[None, None, None]:
    try:
        yield
    except (RedisConnectionError, RedisTimeoutError, OSError) as error:
        raise StateUnavailable(f"Redis is away: {error}") from error
    except OutOfMemoryError as error:
        raise StateUnavailable(f"Redis is full, its maxmemory is reached: {error}", limit="maxmemory") from error
    except ResponseError as error:
        if not _passes(error):
            raise
        raise StateUnavailable(f"Redis refuses what it is asked for now: {error}") from error
    # redis-py sends through `asyncio.wait_for`, which on Python 3.11 can swallow a cancellation: a loop that is
    # told to end would go on for ever.
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def _passes(error: ResponseError) -> bool:
    """Whether a refusal is the server's state, which passes: a replica that takes over, a disk it cannot save to."""
    if isinstance(error, ReadOnlyError | ClusterDownError | TryAgainError):
        return True
    return _PASSING.search(str(error)) is not None


def _owner(lease: str | None) -> str | None:
    return None if lease is None else json.loads(lease)["owner"]


def _milliseconds(seconds: float) -> int:
    return max(1, int(seconds * 1000))


def _literal(text: str) -> str:
    """`text` with the characters that Redis patterns give a meaning escaped."""
    return "".join("\\" + c if c in "*?[]\\^-" else c for c in text)
