"""Metrics of the broadcaster."""

from __future__ import annotations

from prometheus_client import Counter

from slipstream.broadcaster.store import VersionStore
from slipstream.common.metrics import Reading

versions = Reading("gauge", "slipstream_broadcaster_versions", "Sealed versions held.")
newest_step = Reading("gauge", "slipstream_broadcaster_newest_step", "Step of the newest; -1 before the first.")
stored_bytes = Reading("gauge", "slipstream_broadcaster_stored_bytes", "Bytes of all versions, open ones included.")
limit_bytes = Reading("gauge", "slipstream_broadcaster_limit_bytes", "The most bytes it may hold.")
sent_bytes = Counter("slipstream_broadcaster_sent_bytes", "Bytes of weights handed out.")


def observe(store: VersionStore, max_store_bytes: int) -> None:
    """Read this broadcaster from now on."""
    versions.read_from(lambda: len(store.versions))
    newest_step.read_from(lambda: store.newest.step if store.newest is not None else -1)
    stored_bytes.read_from(lambda: store.size_bytes)
    limit_bytes.read_from(lambda: max_store_bytes)
