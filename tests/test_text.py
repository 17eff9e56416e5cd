"""Numbers as people read them: a true minus sign, digits that the error deserves."""

import math

import pytest

from attnres.text import counted, duration, listed, memory, number, tick, with_error


def test_numbers_have_a_true_minus_and_zero_no_sign():
    assert number(-0.1162, signed=True) == "−0.116"
    assert number(0.1162, signed=True) == "+0.116"
    assert number(-0.0001, signed=True) == "0.000"
    assert number(math.nan) == number(None) == "–"
    assert number(1234.5678, 1) == "1,234.6"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((0.0, "0"), (-0.0, "0"), (1.0, "1"), (-0.5, "−0.5"), (0.05, "0.05"), (10.5, "10.5"), (100.0, "100")),
        *((999.9999, "1 k"), (1500, "1.5 k"), (-20_000, "−20 k"), (999_999, "1 M"), (2.5e6, "2.5 M"), (3e9, "3 B")),
        *((1e-3, "0.001"), (3e-5, "3e−5"), (2e13, "20 T"), (1e15, "1e15"), (-2.5e18, "−2.5e18"), (math.nan, "–")),
    ],
)
def test_a_number_on_an_axis_has_three_digits_and_no_zeros_for_nothing(value, text):
    assert tick(value) == text


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (-0.01234, 0.0004, "−0.0123 ± 0.0004"),
        (-0.00012, 0.00003, "−0.00012 ± 0.00003"),
        (0.5, math.nan, "+0.500"),
        (0.5, None, "+0.500"),
        (494.4, 21.33, "+494.40 ± 21.33"),
        (3037764.2, 3052976.0, "+3,037,764 ± 3,052,976"),
        (0.0, 0.0, "0.000 ± 0.000"),
        (None, None, "–"),
    ],
)
def test_a_number_has_the_digits_of_its_error(value, error, text):
    assert with_error(value, error, signed=True) == text


def test_amounts_and_lists():
    assert (memory(1.234e9), memory(5e7), memory(math.nan)) == ("1.23 GB", "50 MB", "–")
    assert [duration(seconds) for seconds in (0, 42, 310, 8000)] == ["0 s", "42 s", "5 min", "2 h 13 min"]
    assert (counted(1, "edge"), counted(0, "edge"), counted(1200, "edge")) == ("1 edge", "0 edges", "1,200 edges")
    assert (listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c"])) == ("a", "a and b", "a, b and c")
