"""The votes of one update in a data-parallel group.

Every rank swaps and checks in a pause, and stays there until all have said that theirs is good: then all go on with the
new weights, or all put the old ones back. A stage passes when every rank has voted for it; a failure ends all stages
that have not passed. The last stage is the commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Set
from contextlib import suppress
from typing import Any, Protocol

from slipstream.common.errors import GroupSplit, GroupVetoed, SlipstreamError, UpdateNotOpen

PREPARED, CHECKSUM, PROBE, FAILED = "prepared", "checksum", "probe", "failed"
SLACK_S = 5.0
"""By which a rank waits longer for a verdict than the leader waits for votes: in doubt is worse than a veto."""


class Ballot:
    """At the leader: counts the votes of the ranks that take part."""

    def __init__(self, update_id: str, ranks: Set[int], vote_timeout_s: float) -> None:
        self._update_id = update_id
        self._ranks = frozenset(ranks)
        self._vote_timeout_s = vote_timeout_s
        self._votes: dict[str, dict[int, bytes]] = {}
        self._verdicts: dict[str, asyncio.Future[str]] = {}
        self.failure = ""

    async def cast(self, stage: str, rank: int, held_slices: bytes = b"") -> str:
        """Vote for a stage; returns once it is decided. Empty means passed, else it says why not."""
        if rank not in self._ranks:
            raise UpdateNotOpen(f"rank {rank} takes no part in this update", update_id=self._update_id)
        verdict = self._verdicts.setdefault(stage, asyncio.get_running_loop().create_future())
        votes = self._votes.setdefault(stage, {})
        votes[rank] = held_slices
        if not verdict.done():
            if self.failure:
                verdict.set_result(self.failure)
            elif votes.keys() == self._ranks:
                missing = _held_by_none(list(votes.values()))
                if missing:
                    self.veto(f"{missing} slices are held by no rank of the group")
                else:
                    verdict.set_result("")
        try:
            async with asyncio.timeout(self._vote_timeout_s):
                return await asyncio.shield(verdict)
        except TimeoutError:
            late = sorted(self._ranks - votes.keys())
            self.veto(f"ranks {late} did not vote for {stage!r} within {self._vote_timeout_s:g} s")
            return verdict.result()

    def veto(self, failure: str) -> None:
        """A rank failed: what has not passed will not."""
        self.failure = self.failure or failure
        for verdict in self._verdicts.values():
            if not verdict.done():
                verdict.set_result(self.failure)


def _held_by_none(votes: list[bytes]) -> int:
    length = max(map(len, votes))
    return sum(not any(vote[at : at + 1] == b"\1" for vote in votes) for at in range(length))


class Voice(Protocol):
    """How one rank votes; each call waits. Raises what the vote came to."""

    def good(self, stage: str, held_slices: bytes = b"") -> None:
        """Vote for a stage and wait for the verdict. Raises `GroupVetoed` or `GroupSplit`."""
        ...

    def failed(self, failure: str) -> None:
        """Say that this rank will not swap. Does not raise."""
        ...


Cast = Callable[[str, bytes, str], Coroutine[Any, Any, str]]
"""(stage, held slices, failure) -> verdict. Raises where the leader does not answer."""


class ThreadVoice:
    """Votes from the thread that holds the pause, while the event loop goes on."""

    def __init__(self, cast: Cast, timeout_s: float) -> None:
        self._cast = cast
        self._loop = asyncio.get_running_loop()
        self._timeout_s = timeout_s
        self._heard = False
        """The group knows already that this rank does not go on, or this rank that the group does not."""

    def good(self, stage: str, held_slices: bytes = b"") -> None:
        try:
            failure = self._run(stage, held_slices, "")
        except (SlipstreamError, TimeoutError) as error:
            self._heard = True
            if stage != PROBE:  # nobody goes on without this rank's later votes
                raise GroupVetoed(f"the group's leader did not answer: {error}", stage=stage) from error
            raise GroupSplit(f"the verdict of the group is not known: {error}", stage=stage) from error
        if failure:
            self._heard = True
            raise GroupVetoed(f"the group did not take the update: {failure}", stage=stage)

    def failed(self, failure: str) -> None:
        if not self._heard:
            self._heard = True
            with suppress(SlipstreamError, TimeoutError):  # then ApplyUpdate tells, a little later
                self._run(FAILED, b"", failure)

    def _run(self, stage: str, held_slices: bytes, failure: str) -> str:
        call = asyncio.run_coroutine_threadsafe(self._cast(stage, held_slices, failure), self._loop)
        return call.result(self._timeout_s)
