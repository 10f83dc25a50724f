"""The border between front and engine: frames however they are cut, messages of every kind, and the other end gone."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.core.config import Decision, EngineConfig
from nanoserve.core.params import SamplingParams
from nanoserve.core.plan import TokenLogprobs
from nanoserve.core.request import FinishReason, Request
from nanoserve.engine.channel import CHUNK, HEADER, Channel, ChannelClosed, Frames, frame
from nanoserve.engine.messages import (
    Abort,
    Add,
    Command,
    EngineInfo,
    EngineStats,
    Failed,
    News,
    Ping,
    Pong,
    Progress,
    Ready,
    Refused,
    Report,
    Stop,
    Update,
)

# ---- frames

BODIES = [b"", b"a", b"\x00" * 4, bytes(range(256)), b"", b"end"]
STREAM = b"".join(HEADER.pack(len(body)) + body for body in BODIES)


@pytest.mark.parametrize("size", [*range(1, 12), 100, 255, 256, 257, len(STREAM)])
def test_frames_cut_in_equal_pieces(size: int) -> None:
    frames = Frames()
    pieces = [STREAM[start : start + size] for start in range(0, len(STREAM), size)]
    assert [body for piece in pieces for body in frames.feed(piece)] == BODIES


def test_frames_cut_in_two_anywhere() -> None:
    for cut in range(len(STREAM) + 1):
        frames = Frames()
        assert [*frames.feed(STREAM[:cut]), *frames.feed(STREAM[cut:])] == BODIES


@given(st.lists(st.binary(max_size=40), max_size=8), st.data())
def test_frames_cut_in_any_way(bodies: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(HEADER.pack(len(body)) + body for body in bodies)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    frames, found = Frames(), list[bytes]()
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += frames.feed(stream[start:end])
    assert found == bodies


def test_a_frame_is_not_given_out_before_it_is_whole() -> None:
    frames = Frames()
    whole = frame(Ping(7))
    for byte in whole[:-1]:
        assert list(frames.feed(bytes([byte]))) == []
    assert list(frames.feed(whole[-1:])) == [whole[HEADER.size :]]


# ---- messages

ids = st.text(max_size=12)
token = st.integers(0, 2**31 - 1)
tokens = st.lists(token, max_size=6).map(tuple)
counts = st.integers(0, 2**48)
number = st.floats(allow_nan=False)
seeds = st.integers(-(2**63), 2**64 - 1)

sampling = st.builds(
    SamplingParams,
    n=st.integers(1, 128),
    temperature=st.floats(0, 100),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(-1, 2**31 - 1),
    min_p=st.floats(0, 1),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.integers(-2, 2),  # a whole number where a float is declared
    repetition_penalty=st.floats(0, 100, exclude_min=True),
    logit_bias=st.dictionaries(token, st.floats(-100, 100), max_size=4),
    seed=st.none() | seeds,
    max_tokens=st.none() | st.integers(9, 10**6),
    min_tokens=st.integers(0, 9),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=3).map(tuple),
    stop_token_ids=tokens,
    include_stop_str_in_output=st.booleans(),
    ignore_eos=st.booleans(),
    skip_special_tokens=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
)
requests = st.builds(
    Request,
    id=ids,
    prompt=tokens,
    sampling=sampling,
    max_tokens=st.integers(1, 10**6),
    stop_ids=st.frozensets(token, max_size=4),
    priority=st.integers(-(2**31), 2**31 - 1),
    cache_salt=ids,
)
logprobs = st.builds(TokenLogprobs, number, tokens, st.lists(number, max_size=4).map(tuple))
updates = st.builds(
    Update,
    request_id=ids,
    index=st.integers(0, 127),
    tokens=tokens,
    logprobs=st.lists(logprobs, max_size=3).map(tuple),
    finish=st.none() | st.sampled_from(FinishReason),
    stop_id=st.none() | token,
    cached_tokens=counts,
    queued_seconds=number,
)
stats = st.builds(
    EngineStats,
    **{field: number if field == "kv_cache_usage" else counts for field in EngineStats.__struct_fields__},
)
infos = st.builds(
    EngineInfo,
    model=ids,
    family=ids,
    vocab_size=counts,
    max_model_len=counts,
    eos_token_ids=tokens,
    sampling_defaults=st.dictionaries(ids, number | counts, max_size=3),
    num_blocks=counts,
    block_size=counts,
    num_parameters=counts,
    weight_bytes=counts,
    kv_bytes_per_token=counts,
    decisions=st.lists(st.builds(Decision, ids, ids, ids), max_size=3).map(tuple),
    seconds=st.dictionaries(ids, number, max_size=3),
)
commands = st.one_of(
    st.builds(Add, requests),
    st.builds(Abort, ids, st.none() | st.integers(0, 127)),
    st.builds(Ping, counts),
    st.just(Stop()),
)
reports = st.one_of(
    st.builds(Ready, infos),
    st.builds(Progress, ids, counts, counts),
    st.builds(Refused, ids, ids, st.none() | ids, st.none() | ids, st.integers(400, 599)),
    st.builds(News, st.lists(updates, max_size=3), stats),
    st.builds(Pong, counts, stats),
    st.builds(Failed, ids, ids),
)


def decoded(message: object, kind: Any) -> object:
    (body,) = Frames().feed(frame(message))
    return msgspec.msgpack.decode(body, type=kind)


@given(commands)
def test_commands_arrive_as_they_were_sent(message: Command) -> None:
    assert decoded(message, Command) == message


@given(reports)
def test_reports_arrive_as_they_were_sent(message: Report) -> None:
    assert decoded(message, Report) == message


def test_whole_numbers_among_sampling_defaults_stay_whole() -> None:
    made = {"top_k": 20, "temperature": 0.6}
    (body,) = Frames().feed(frame(made))
    arrived = msgspec.msgpack.decode(body, type=get_type_hints(EngineInfo)["sampling_defaults"])
    assert SamplingParams(**arrived).top_k == 20


def test_a_config_arrives_as_it_was_sent() -> None:
    config = EngineConfig(model="m", seed=3, max_model_len=64, enable_prefix_caching=False, dtype="float32")
    assert decoded(config, EngineConfig) == config


# ---- the engine's end


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Channel[Command]]]:
    """The front's socket, and the channel at the other end."""
    front, back = socket.socketpair()
    with front, back:
        yield front, Channel(back, Command)  # type: ignore[arg-type]


def test_receive_takes_all_that_is_there(ends: tuple[socket.socket, Channel[Command]]) -> None:
    front, channel = ends
    assert channel.receive(wait=False) == []
    front.sendall(frame(Ping(1)) + frame(Abort("a")) + frame(Stop())[:3])
    assert channel.receive(wait=False) == [Ping(1), Abort("a")]
    assert channel.receive(wait=False) == []
    front.sendall(frame(Stop())[3:])
    assert channel.receive(wait=True) == [Stop()]


def test_receive_waits_until_something_comes(ends: tuple[socket.socket, Channel[Command]]) -> None:
    front, channel = ends
    timer = threading.Timer(0.05, front.sendall, [frame(Ping(2))])
    timer.start()
    assert channel.receive(wait=True) == [Ping(2)]
    timer.join()


def test_a_message_longer_than_one_read(ends: tuple[socket.socket, Channel[Command]]) -> None:
    front, channel = ends
    long = Add(Request(id="a", prompt=(70_000,) * CHUNK, sampling=SamplingParams(), max_tokens=1))
    writer = threading.Thread(target=front.sendall, args=[frame(long)])
    writer.start()
    found: list[Command] = []
    while not found:
        found += channel.receive(wait=True)
    writer.join()
    assert found == [long]


def test_send_is_what_frames_reads(ends: tuple[socket.socket, Channel[Command]]) -> None:
    front, channel = ends
    channel.send(Pong(1, EngineStats(num_running=2)))
    (body,) = Frames().feed(front.recv(CHUNK))
    assert msgspec.msgpack.decode(body, type=Report) == Pong(1, EngineStats(num_running=2))  # type: ignore[arg-type]


@pytest.mark.parametrize("wait", [True, False])
def test_the_other_end_is_gone(ends: tuple[socket.socket, Channel[Command]], wait: bool) -> None:
    front, channel = ends
    front.close()
    with pytest.raises(ChannelClosed):
        channel.receive(wait=wait)
    with pytest.raises(ChannelClosed):
        channel.send(Pong(1, EngineStats()))
