"""The frames codec against protobuf itself."""

from __future__ import annotations

import zlib

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from slipstream.api.rollout.v1 import rows_pb2
from slipstream.common.crc import crc32, crc32_joined
from slipstream.common.errors import FrameInvalid
from slipstream.common.frames import decode, encode_data, encode_header, iter_frames, iter_joined_frames

FRAME = rows_pb2.FetchRowsResponse
headers = st.builds(rows_pb2.RowsHeader, size_bytes=st.integers(0, 2**40), crc32=st.integers(0, 2**32 - 1))
# Sizes around the places where the length takes one more byte.
data = st.binary(max_size=300) | st.sampled_from([127, 128, 16383, 16384, 2**20]).map(bytes)


@given(data)
def test_data_is_encoded_as_protobuf_encodes_it(value):
    assert encode_data(memoryview(value)) == FRAME(data=value).SerializeToString()


@given(headers)
def test_a_header_is_encoded_as_protobuf_encodes_it(header):
    assert encode_header(header) == FRAME(header=header).SerializeToString()


@given(data)
def test_data_decodes_from_protobufs_bytes(value):
    assert decode(FRAME(data=value).SerializeToString()) == (None, value)


@given(st.lists(st.builds(FRAME, data=data) | st.builds(FRAME, header=headers), max_size=4))
def test_concatenated_messages_merge_as_in_protobuf(frames):
    encoded = b"".join(frame.SerializeToString() for frame in frames)
    expected = FRAME.FromString(encoded)
    header, value = decode(encoded)
    assert (value is not None) == (expected.WhichOneof("frame") == "data")
    assert (header is not None) == (expected.WhichOneof("frame") == "header")
    if value is not None:
        assert value == expected.data
    if header is not None:
        assert rows_pb2.RowsHeader.FromString(header) == expected.header


@given(st.binary(max_size=64))
def test_any_bytes_decode_as_in_protobuf_or_are_refused(garbage):
    try:
        _, value = decode(garbage)
    except FrameInvalid:
        return
    try:
        expected = FRAME.FromString(garbage)
    except DecodeError:
        return  # protobuf also parses what is inside the header, and is stricter about tags
    assert (bytes(value) if value is not None else b"") == expected.data


@given(st.lists(st.binary(max_size=50), max_size=6), st.integers(0, 320), st.integers(1, 60))
def test_frames_from_an_offset_hold_the_rest_of_the_bytes(buffers, offset, frame_bytes):
    whole = b"".join(buffers)
    values = [decode(message)[1] or b"" for message in iter_frames(buffers, offset, frame_bytes)]
    assert b"".join(values) == whole[offset:]
    assert all(0 < len(value) <= frame_bytes for value in values)


@given(st.lists(st.binary(max_size=50), max_size=9), st.integers(0, 480), st.integers(1, 60))
def test_joined_frames_are_full_but_the_last(buffers, offset, frame_bytes):
    rest = b"".join(buffers)[offset:]
    values = [bytes(decode(message)[1] or b"") for message in iter_joined_frames(buffers, offset, frame_bytes)]
    assert values == [rest[at : at + frame_bytes] for at in range(0, len(rest), frame_bytes)]


@given(st.binary(min_size=1, max_size=300), st.data())
def test_a_frame_cut_short_is_refused(value, draw):
    message = encode_data(value)
    cut = draw.draw(st.integers(1, len(message) - 1))
    with pytest.raises(FrameInvalid):
        decode(message[:cut])


@given(st.lists(st.binary(max_size=300) | st.sampled_from([2**16, 2**20 + 1]).map(bytes), max_size=4))
def test_checksums_of_pieces_join_to_that_of_the_whole(pieces):
    joined = running = 0
    for piece in pieces:
        joined = crc32_joined(joined, crc32(piece), len(piece))
        running = crc32(piece, running)
    assert joined == running == zlib.crc32(b"".join(pieces))
