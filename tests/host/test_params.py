"""SamplingParams: what is out of bounds is refused by name, whatever it is, and what is within is kept as it came."""

from __future__ import annotations

import math
import sys
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.core.errors import RequestError
from nanoserve.core.params import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_BYTES,
    MAX_STOP_STRINGS,
    SamplingParams,
)

INT32, INT64 = 2**31 - 1, 2**63 - 1
INTEGERS = {  # the least and the largest
    "n": (1, MAX_N),
    "top_k": (-1, INT32),
    "seed": (-(2**63), 2**64 - 1),
    "max_tokens": (1, INT64),
    "min_tokens": (0, INT64),
    "logprobs": (0, MAX_LOGPROBS),
}
NUMBERS = {  # the least, is it itself within, and the largest
    "temperature": (0.0, True, 100.0),
    "top_p": (0.0, False, 1.0),
    "min_p": (0.0, True, 1.0),
    "presence_penalty": (-2.0, True, 2.0),
    "frequency_penalty": (-2.0, True, 2.0),
    "repetition_penalty": (0.0, False, 100.0),
}
SWITCHES = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens")
LISTS = ("stop", "stop_token_ids", "logit_bias")
OPTIONAL = ("seed", "max_tokens", "logprobs", *LISTS)
NO_NUMBERS = (True, False, "1", b"1", [1], (), {}, object(), 1j, math.nan, math.inf, -math.inf)
HUGE = (10**400, -(10**400), 10**6000)  # beyond floats, and beyond what Python prints


def refused(name: str, value: Any, **others: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value}, **others)
    error = caught.value
    assert error.param == name
    assert error.code == "invalid_value"
    assert error.status == 400
    assert error.message.startswith(name)
    assert len(error.message) < 200
    return error


def kept(name: str, value: Any) -> Any:
    return getattr(SamplingParams(**{name: value}), name)


def test_every_field_is_in_a_table_here() -> None:
    assert {field.name for field in fields(SamplingParams)} == {*INTEGERS, *NUMBERS, *SWITCHES, *LISTS}


def test_defaults_are_the_models_own_distribution() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (params.stop, params.stop_token_ids, params.logit_bias) == ((), (), {})
    assert not params.greedy


def test_nobody_changes_it() -> None:
    with pytest.raises(FrozenInstanceError):
        SamplingParams().n = 2  # type: ignore[misc]


def test_temperature_0_is_greedy() -> None:
    assert all(SamplingParams(temperature=zero).greedy for zero in (0, 0.0, -0.0))
    assert not SamplingParams(temperature=sys.float_info.min).greedy


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_have_bounds(name: str) -> None:
    low, high = INTEGERS[name]
    assert kept(name, low) == low
    if name != "min_tokens":  # it is bounded by max_tokens as well
        assert kept(name, high) == high
    assert str(low) in refused(name, low - 1).message
    assert str(high) in refused(name, high + 1).message


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_have_bounds(name: str) -> None:
    low, within, high = NUMBERS[name]
    least = low if within else math.nextafter(low, math.inf)
    for value in (least, high, int(high)):
        assert kept(name, value) == value
    for value in (math.nextafter(least, -math.inf), math.nextafter(high, math.inf), int(high) + 1):
        refused(name, value)


@pytest.mark.parametrize("name", [*INTEGERS, *NUMBERS])
def test_what_is_no_number_is_refused(name: str) -> None:
    for value in NO_NUMBERS:
        refused(name, value)
    if name not in OPTIONAL:
        refused(name, None)


@pytest.mark.parametrize("name", INTEGERS)
def test_a_float_is_no_integer(name: str) -> None:
    refused(name, 1.0)


@pytest.mark.parametrize("name", [*INTEGERS, *NUMBERS])
def test_A51_huge_integers_are_refused_without_printing_them(name: str) -> None:
    for value in HUGE:
        refused(name, value)


@pytest.mark.parametrize("name", OPTIONAL)
def test_A14_null_is_as_good_as_nothing(name: str) -> None:
    assert kept(name, None) == getattr(SamplingParams(), name)


@pytest.mark.parametrize("name", SWITCHES)
def test_switches_are_true_or_false(name: str) -> None:
    assert kept(name, True) is True
    assert kept(name, False) is False
    for value in (None, 0, 1, "false", "", [], math.nan):
        refused(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 10**9),
        ("n", 1000),
        ("logprobs", 10**6),
        ("stop", ["a"] * 10**6),
        ("stop", [str(i) for i in range(MAX_STOP_STRINGS + 1)]),
        ("stop", "a" * 2**20),
        ("stop", ["a", "b" * (MAX_STOP_BYTES + 1)]),
        ("stop", "é" * (MAX_STOP_BYTES // 2 + 1)),  # bytes count, not characters
        ("stop_token_ids", list(range(MAX_LOGIT_BIAS + 1))),
        ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 0.0)),
    ],
)
def test_A51_caps(name: str, value: Any) -> None:
    refused(name, value)


def test_A51_as_much_as_the_caps_allow_is_taken() -> None:
    params = SamplingParams(
        n=MAX_N,
        logprobs=MAX_LOGPROBS,
        stop=["é" * (MAX_STOP_BYTES // 2)] * MAX_STOP_STRINGS,  # type: ignore[arg-type]
        stop_token_ids=tuple(range(MAX_LOGIT_BIAS)),
        logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS), -100),
    )
    assert len(params.stop) == MAX_STOP_STRINGS


@pytest.mark.parametrize(
    ("value", "stop"),
    [("a", ("a",)), (["a", "b"], ("a", "b")), (("a",), ("a",)), ([], ()), (None, ()), ("\0", ("\0",)), ("🙂", ("🙂",))],
)
def test_forms_of_stop(value: Any, stop: tuple[str, ...]) -> None:
    assert kept("stop", value) == stop


@pytest.mark.parametrize("value", ["", ["a", ""], [1], [None], [["a"]], [b"a"], b"ab", 5, True, {"a": 1}, iter("ab")])
def test_stop_holds_strings_that_are_not_empty(value: Any) -> None:
    refused("stop", value)


def test_A60_a_lone_surrogate_is_no_stop_string() -> None:
    for value in ("\ud800", "\ude00", "a\udfffb", ["a", "\ud83d"], "\ud83d\ude42"):
        assert "surrogate" in refused("stop", value).message


@pytest.mark.parametrize("value", [[-1], [INT32 + 1], [True], [1.0], ["1"], [None], [[1]], 5, "12", {5: 1}, [10**6000]])
def test_A14_stop_token_ids_are_ids(value: Any) -> None:
    refused("stop_token_ids", value)


def test_stop_token_ids_are_kept() -> None:
    assert kept("stop_token_ids", [0, 5, INT32]) == (0, 5, INT32)
    assert kept("stop_token_ids", {7}) == (7,)


@pytest.mark.parametrize(
    "value",
    [
        {-1: 1.0}, {INT32 + 1: 1.0}, {"5": 1.0}, {"abc": 5}, {True: 1.0}, {1.0: 1.0}, {None: 1.0}, {10**6000: 1.0},
        {5: 1000}, {5: -100.5}, {5: math.nan}, {5: math.inf}, {5: -math.inf}, {5: "1"}, {5: None}, {5: True},
        {5: 10**400}, [], [(5, 1.0)], "abc", 5, True,
    ],
)  # fmt: skip
def test_A14_logit_bias_maps_ids_to_numbers_within_100(value: Any) -> None:
    refused("logit_bias", value)


def test_logit_bias_is_a_copy() -> None:
    bias: dict[int, float] = {0: -100, 7: 100.0}
    params = SamplingParams(logit_bias=bias)
    bias[3] = 1.0
    assert params.logit_bias == {0: -100, 7: 100.0}


def test_A15_min_tokens_above_max_tokens() -> None:
    error = refused("min_tokens", 6, max_tokens=5)
    assert "6" in error.message
    assert "5" in error.message
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    assert SamplingParams(min_tokens=INT64).min_tokens == INT64  # bounded where the context length is known


ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-3, 130),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.floats(-3, 3),
    st.text(max_size=5),
    st.text(st.characters(categories=["Cs"]), max_size=2),
    st.binary(max_size=3),
    st.lists(st.one_of(st.integers(), st.text(max_size=3), st.none()), max_size=4),
    st.dictionaries(
        st.one_of(st.integers(), st.text(max_size=2)), st.one_of(st.floats(), st.integers(), st.none()), max_size=3
    ),
)


@given(st.dictionaries(st.sampled_from([field.name for field in fields(SamplingParams)]), ANYTHING, max_size=3))
def test_whatever_comes_is_kept_within_bounds_or_refused_by_name(given: dict[str, Any]) -> None:
    error: RequestError | None = None
    try:
        params = SamplingParams(**given)
    except RequestError as refusal:
        error = refusal
    if error is not None:
        assert error.param in given
        assert error.message.startswith(error.param)
        assert error.message.encode()  # it can be sent
        return
    for name, (low, high) in INTEGERS.items():
        value = getattr(params, name)
        assert (value is None and name in OPTIONAL) or (type(value) is int and low <= value <= high)
    for name, (low, within, high) in NUMBERS.items():
        value = getattr(params, name)
        assert type(value) in (int, float)
        assert low <= value <= high
        assert within or value > low
    assert all(type(getattr(params, name)) is bool for name in SWITCHES)
    assert all(isinstance(text, str) and text.encode() for text in params.stop)
    assert all(0 <= token <= INT32 for token in (*params.stop_token_ids, *params.logit_bias))
    assert all(abs(bias) <= 100 for bias in params.logit_bias.values())
    assert params.max_tokens is None or params.min_tokens <= params.max_tokens
