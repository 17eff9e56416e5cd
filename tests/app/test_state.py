"""A link brings a view back; whatever else comes in its place is refused in one sentence."""

import base64
import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnres.app.state import LOSS, MAX_CHARACTERS, MAX_LINK, Cut, View, decode, encode, from_json
from attnres.errors import UserError


def fields(query):
    return dict(pair.split("=") for pair in query.replace("%20", " ").replace("+", " ").split("&"))


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
VIEWS = st.builds(
    View,
    text=TEXTS,
    models=st.sampled_from([(0,), (1,), (0, 1), (1, 0)]),
    by=st.sampled_from(["contribution", "weight"]),
    read=st.none() | st.integers(0, 99),
    source=st.sampled_from(["heaviest", LOSS, "embedding", "attention 11", "block 2"]),
    token=st.none() | st.integers(0, 999),
    half=st.integers(0, 1),
    cuts=st.lists(
        st.builds(Cut, st.integers(0, 1), st.integers(0, 99), st.integers(0, 99), st.none() | st.integers(0, 999)),
        max_size=9,
        unique=True,
    ).map(tuple),
    span=st.sampled_from(["all", "one"]),
) | st.builds(View, text=TEXTS, other=TEXTS, models=st.sampled_from([(0,), (1,)]))


@given(VIEWS)
def test_a_link_and_a_browser_bring_a_view_back(view):
    assert decode(fields(encode(view)), 2) == view
    assert from_json(json.loads(json.dumps(view.to_json())), 2) == view


def test_a_link_names_no_path_and_little_else():
    assert encode(View("", None, (0, 1), cuts=(Cut(1, 4, 0), Cut(0, 2, 1, 7)))) == "m=0.1&e=1.4.0_0.2.1.7"
    assert decode({}, 1) == View()


@pytest.mark.parametrize(
    "broken",
    [
        {"t": "!!"},
        {"t": "AAAA"},
        {"t": base64.urlsafe_b64encode(zlib.compress(b"\xff\xfe")).decode()},
        {"m": ""},
        {"m": "0.0.0"},
        {"m": "1.1"},
        {"m": "/etc/passwd"},
        {"r": "-1"},
        {"r": "1e9"},
        {"s": "<script>"},
        {"k": "٣"},
        {"k": "9999999"},
        {"h": "2"},
        {"e": "0.1"},
        {"e": "0.1.1.1.1"},
        {"b": "size"},
        {"o": "two"},
        {"u": "", "m": "0.1"},
        {"e": "0.1.x"},
        {"e": "_".join(["0.1.1"] * 600)},
    ],
)
def test_a_damaged_link_is_one_sentence(broken):
    with pytest.raises(UserError, match="damaged"):
        decode(broken, 2)


@pytest.mark.parametrize(
    "broken",
    [
        None,
        [],
        {"text": 1},
        {"models": []},
        {"models": [0, 0]},
        {"models": [9]},
        {"read": -1},
        {"read": 10**6},
        {"token": True},
        {"half": 2},
        {"source": "<script>"},
        {"by": "size"},
        {"span": "two"},
        {"cuts": [[0, 1, 2]]},
        {"cuts": [{"model": 0, "read": 1}]},
        {"cuts": [{"model": 0, "read": 1, "source": 1}] * 600},
        {"other": "b", "models": [0, 1]},
        {"more": 1},
    ],
)
def test_what_a_browser_sends_in_the_place_of_a_view_is_one_sentence(broken):
    with pytest.raises(UserError, match=r"load the page again|damaged|other models"):
        from_json(broken, 2)


def test_a_link_to_models_that_are_not_open_says_so():
    with pytest.raises(UserError, match="other models"):
        decode({"m": "0.1"}, 1)


def test_a_small_link_cannot_unpack_to_a_large_text():
    bomb = base64.urlsafe_b64encode(zlib.compress(b"a" * 10_000_000, 9)).decode()
    with pytest.raises(UserError, match="damaged"):
        decode({"t": bomb}, 1)
    assert len(bomb) < 20_000
    whole = "a" * MAX_CHARACTERS
    assert decode(fields(encode(View(whole))), 1).text == whole


def test_a_text_that_does_not_pack_has_no_link():
    assert encode(View("a" * (MAX_CHARACTERS + 1))) == ""
    text = "".join(chr(0x4E00 + i * 7919 % 20000) for i in range(MAX_CHARACTERS))
    assert encode(View(text)) == ""
    assert len(encode(View("".join(chr(32 + i * 31 % 90) for i in range(MAX_CHARACTERS))))) < MAX_LINK
