from __future__ import annotations

import random
from pathlib import Path

import pytest

from slipstream.common.compressed_lines import encode_frame, encode_line, read_compressed


def frames(*parts: list[str]) -> list[bytes]:
    return [encode_frame([encode_line({"text": text}) for text in part]) for part in parts]


def texts(path: Path, data: bytes) -> list[str]:
    path.write_bytes(data)
    return [record["text"] for record in read_compressed(path)]


def test_records_come_back_in_order_whatever_is_in_them(tmp_path: Path) -> None:
    noise = random.Random(0).randbytes(300_000).hex()  # longer than what is read at once
    wanted = [["a\nb", "ä\ud800", "\u2028"], [noise], [], ["last"]]
    found = texts(tmp_path / "f", b"".join(frames(*wanted)))
    assert found == ["a\nb", "ä\ud800", "\u2028", noise, "last"]
    assert list(read_compressed(tmp_path / "missing")) == []


def test_a_file_that_is_still_written_gives_its_whole_frames(tmp_path: Path) -> None:
    first, second = frames(["a"], ["b", "c"])
    for length in range(len(second)):
        assert texts(tmp_path / "f", first + second[:length]) == ["a"]
    assert texts(tmp_path / "f", first + second) == ["a", "b", "c"]


@pytest.mark.parametrize(
    "damage", [lambda f: f[: len(f) // 2], lambda f: f[:-1], lambda f: b"\n" + f[:7], lambda f: b"x"]
)
def test_a_damaged_frame_costs_itself_alone(tmp_path: Path, damage) -> None:
    first, second, third = frames(["a"], ["b" * 50, "c"], ["d"])
    assert texts(tmp_path / "f", first + damage(second) + third) == ["a", "d"]


def test_the_bytes_of_no_whole_frame_are_told(tmp_path: Path) -> None:
    def told(*parts: bytes) -> list[int]:
        (tmp_path / "f").write_bytes(b"".join(parts))
        lost: list[int] = []
        list(read_compressed(tmp_path / "f", lost.append))
        return lost

    first, second, third = frames(["a"], ["b" * 50, "c"], ["d"])
    assert told(first, second, third) == []
    assert told(first, second[:9], third) == [9]
    assert told(b"junk", first, second, third[:-1]) == [4, len(third) - 1]
    assert told(random.Random(0).randbytes(300_000)) == [300_000]
    assert told() == []


def test_a_flipped_byte_is_not_taken_for_text(tmp_path: Path) -> None:
    first, second, third = frames(["a"], [f"{n} apples" for n in range(50)], ["d"])
    for at in range(4, len(second), 7):
        flipped = second[:at] + bytes([second[at] ^ 0x10]) + second[at + 1 :]
        found = texts(tmp_path / "f", first + flipped + third)
        assert found[0] == "a"
        assert [text for text in found if not text.endswith("apples")] in (["a", "d"], ["a"])
