"""A link brings a view back; whatever else comes in its place is refused in one sentence."""

import base64
import json
import zlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnres.app.state import MAX_CHARACTERS, MAX_LINK, Cut, View, decode, encode, from_json, key_of
from attnres.errors import UserError

KEYS = ("one-20~0123456789ab", "two~ba9876543210")


def fields(query):
    return dict([query.split("=")])


def packed(value):
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return {"v": base64.urlsafe_b64encode(zlib.compress(text, 9)).decode()}


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
VIEWS = st.builds(
    View,
    text=TEXTS,
    models=st.sampled_from([(0,), (1,), (0, 1), (1, 0)]),
    token=st.none() | st.integers(0, 999),
    target=st.none() | st.integers(0, 99_999),
    against=st.none() | st.integers(0, 99_999),
    by=st.sampled_from(["contribution", "weight"]),
    cuts=st.lists(
        st.builds(Cut, st.integers(0, 1), st.integers(0, 99), st.integers(0, 99), st.none() | st.integers(0, 999)),
        max_size=9,
        unique=True,
    ).map(tuple),
    span=st.sampled_from(["all", "one"]),
    edited=st.booleans(),
    tab=st.sampled_from(["explain", "patch", "search", "training"]),
    other=TEXTS,
    read=st.integers(0, 99),
    source=st.integers(0, 99),
)


@given(VIEWS)
def test_a_link_and_a_browser_bring_a_view_back(view):
    assert decode(fields(encode(view, KEYS)), KEYS) == view
    assert from_json(json.loads(json.dumps(view.to_json())), 2) == view


@given(VIEWS, st.permutations(["a~000000000000", *KEYS, "b~000000000001"]))
def test_a_link_means_the_same_models_in_any_list(view, keys):
    place = [keys.index(key) for key in KEYS]
    cuts = tuple(replace(cut, model=place[cut.model]) for cut in view.cuts)
    moved = replace(view, models=tuple(place[number] for number in view.models), cuts=cuts)
    assert decode(fields(encode(view, KEYS)), keys) == moved


def test_a_link_names_no_path_and_little_else():
    link = encode(View("", (0, 1), cuts=(Cut(1, 4, 0), Cut(0, 2, 1, 7))), KEYS)
    cuts = [{"model": 1, "read": 4, "source": 0, "token": None}, {"model": 0, "read": 2, "source": 1, "token": 7}]
    unpacked = json.loads(zlib.decompress(base64.urlsafe_b64decode(fields(link)["v"] + "==")))
    assert unpacked == {"keys": list(KEYS), "models": [0, 1], "cuts": cuts}
    assert decode({}, KEYS) == View()
    assert key_of("/home/me/my runs/block", None, b"").startswith("block~")


def test_a_renamed_model_is_found_by_its_content_and_one_that_is_there_twice_is_two():
    link = encode(View("", (0, 1)), KEYS)
    assert decode(fields(link), ("2~ba9876543210", "1~0123456789ab")).models == (1, 0)
    twice = (KEYS[0], KEYS[0])
    assert decode(fields(encode(View("", (0, 1)), twice)), twice).models == (0, 1)


CUT = {"model": 0, "read": 1, "source": 1}


@pytest.mark.parametrize(
    "broken",
    [
        {"v": "!!"},
        {"v": "AAAA"},
        packed(b"\xff\xfe"),
        packed(b"{"),
        packed([]),
        packed({}),
        *(
            packed({"keys": list(KEYS), "text": "a", **part})
            for part in [
                {"keys": 1},
                {"keys": [0]},
                {"keys": ["/etc/passwd"]},
                {"keys": []},
                {"models": [2]},
                {"models": []},
                {"models": [0, 1, 0]},
                {"read": -1},
                {"read": 1e9},
                {"source": "<script>"},
                {"token": "3"},
                {"token": 99_999_999},
                {"tab": "report"},
                {"by": "size"},
                {"span": "two"},
                {"other": None},
                {"cuts": [[0, 1]]},
                {"cuts": [CUT | {"more": 1}]},
                {"cuts": [CUT | {"model": 2}]},
                {"cuts": [CUT] * 600},
                {"text": "a" * (MAX_CHARACTERS + 1)},
            ]
        ),
    ],
)
def test_a_damaged_link_is_one_sentence(broken):
    with pytest.raises(UserError, match="damaged"):
        decode(broken, KEYS)


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
        {"read": 10**8},
        {"token": True},
        {"edited": 2},
        {"source": "<script>"},
        {"by": "size"},
        {"span": "two"},
        {"cuts": [[0, 1, 2]]},
        {"cuts": [{"model": 0, "read": 1}]},
        {"cuts": [{"model": 0, "read": 1, "source": 1}] * 600},
        {"other": None},
        {"more": 1},
    ],
)
def test_what_a_browser_sends_in_the_place_of_a_view_is_one_sentence(broken):
    with pytest.raises(UserError, match=r"load the page again|damaged|other models"):
        from_json(broken, 2)


def test_a_link_to_models_that_are_not_open_says_so():
    link = fields(encode(View("", (0, 1)), KEYS))
    with pytest.raises(UserError, match=r"the model two \(ba9876543210\), which is not open here"):
        decode(link, KEYS[:1])


def test_a_cut_in_a_model_that_is_not_open_is_in_none_of_those_that_are():
    link = fields(encode(View("", (0,), cuts=(Cut(1, 4, 0), Cut(0, 2, 1))), KEYS))
    gone, there = decode(link, KEYS[:1]).cuts
    assert gone.model >= 1 and there == Cut(0, 2, 1)


def test_a_small_link_cannot_unpack_to_a_large_text():
    bomb = packed(b'{"text":"' + b"a" * 10_000_000 + b'"}')
    with pytest.raises(UserError, match="damaged"):
        decode(bomb, KEYS)
    bomb = bomb["v"]
    assert len(bomb) < 20_000
    whole = "a" * MAX_CHARACTERS
    assert decode(fields(encode(View(whole), KEYS)), KEYS).text == whole


def test_a_text_that_does_not_pack_has_no_link():
    assert encode(View("a" * (MAX_CHARACTERS + 1)), KEYS) == ""
    text = "".join(chr(0x4E00 + i * 7919 % 20000) for i in range(MAX_CHARACTERS))
    assert encode(View(text), KEYS) == ""
    assert len(encode(View("".join(chr(32 + i * 31 % 90) for i in range(MAX_CHARACTERS))), KEYS)) < MAX_LINK
