"""Which checkpoints are there, which stay, and what counts as one."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest

from slipstream.common.errors import CheckpointFailed
from slipstream.common.version import PolicyVersion
from slipstream.trainer.checkpoint_store import CheckpointStore, Saved


def put(store: CheckpointStore, incarnation: int, step: int) -> None:
    version = PolicyVersion(incarnation, step)
    scratch = store.begin(version)
    (scratch / "rank-00000.safetensors").write_bytes(b"1234")
    metadata = {"files": {"rank-00000.safetensors": zlib.crc32(b"1234")}, "sizes": {"rank-00000.safetensors": 4}}
    (scratch / "metadata.json").write_text(json.dumps(metadata))
    store.commit(version, {"loss": 0.5})


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def newest(store: CheckpointStore) -> Saved:
    saved = store.newest()
    assert saved is not None
    return saved


def test_the_newest_is_of_the_latest_incarnation_and_says_what_its_step_was(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=9)
    assert store.newest() is None
    for version in ((1, 2), (1, 10), (2, 9)):
        put(store, *version)
    assert newest(store) == Saved(PolicyVersion(2, 9), tmp_path / "2.9", {"loss": 0.5})


def test_the_last_and_those_of_every_so_many_steps_stay(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2, keep_every_steps=3)
    for step in range(9):
        put(store, 1, step)
    assert names(tmp_path) == {"1.3", "1.6", "1.7", "1.8"}
    put(store, 2, 7)  # of step 8 there are two lives: the latest counts
    assert names(tmp_path) == {"1.3", "1.6", "1.8", "2.7"}


def test_other_folders_are_left_alone_and_remnants_go(tmp_path):
    (tmp_path / "final").mkdir()
    (tmp_path / ".saving-1.1").mkdir()
    store = CheckpointStore(tmp_path)
    put(store, 1, 2)
    put(store, 1, 3)
    assert names(tmp_path) == {"final", "1.3"}


@pytest.mark.parametrize("file", ["COMPLETE", "state.json", "metadata.json", "rank-00000.safetensors"])
@pytest.mark.parametrize("damage", ["gone", "cut", "flipped"])
def test_one_that_is_not_whole_is_passed_over(tmp_path, file, damage):
    store = CheckpointStore(tmp_path, keep_last=2)
    put(store, 1, 1)
    put(store, 1, 2)
    path = tmp_path / "1.2" / file
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(data[:-2])
    else:
        path.write_bytes(data[:1] + bytes([data[1] ^ 4]) + data[2:])
    assert newest(store).version == PolicyVersion(1, 1)
    put(store, 2, 2)
    assert newest(store).version == PolicyVersion(2, 2)


@pytest.mark.parametrize(
    ("file", "data", "cause"),
    [
        ("rank-00000.safetensors", None, "the file is missing"),
        ("rank-00000.safetensors", b"123", "it has 3 bytes, and 4 were written"),
        ("rank-00000.safetensors", b"1235", "its 4 bytes have the checksum ece4d035, and those written had 9be3e0a3"),
        ("metadata.json", None, "the file is missing"),
        ("state.json", b"{}", "its 2 bytes have the checksum"),
        ("COMPLETE", b"{", "it is no JSON"),
        ("COMPLETE", b"7", "it does not hold what it should"),
        ("COMPLETE", None, "it has no COMPLETE: it is gone, or was never written to its end"),
    ],
)
def test_a_damaged_one_is_refused_with_the_file_and_what_is_wrong_with_it(tmp_path, file, data, cause):
    store = CheckpointStore(tmp_path)
    put(store, 1, 1)
    assert store.whole(PolicyVersion(1, 1)) == newest(store)
    path = tmp_path / "1.1" / file
    path.write_bytes(data) if data is not None else path.unlink()
    with pytest.raises(CheckpointFailed) as refused:
        store.whole(PolicyVersion(1, 1))
    assert cause in refused.value.message
    assert refused.value.metadata["path"] in (str(path), str(path.parent))
    assert store.find(PolicyVersion(1, 1)) is None


def test_no_incarnation_is_opened_twice(tmp_path):
    assert [CheckpointStore(tmp_path / "new").open_incarnation(1) for _ in range(3)] == [1, 2, 3]
    assert CheckpointStore(tmp_path / "new").open_incarnation(7) == 7
    (tmp_path / "new" / "incarnation").write_text("seven")
    with pytest.raises(CheckpointFailed, match="incarnation must hold"):
        CheckpointStore(tmp_path / "new").open_incarnation(7)
