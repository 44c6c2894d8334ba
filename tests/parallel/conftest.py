"""One pool for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from parallel.pool import Pool

RANKS = 8


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    pool = Pool(RANKS, tmp_path_factory.mktemp("pool"))
    yield pool
    pool.close()
