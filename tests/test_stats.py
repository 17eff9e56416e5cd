"""Means and their errors are the formulas in their docstrings, on arrays small enough to do by hand."""

import math

import numpy as np
import pytest

from attnres.stats import RatioSums, ratio, standard_error, t_quantile


def test_student_t():
    assert t_quantile(0.975, 1) == pytest.approx(12.706, rel=1e-3)
    assert t_quantile(0.975, 40) == pytest.approx(2.0211, abs=2e-4)
    assert t_quantile(0.975, 10_000) == pytest.approx(1.9602, abs=2e-4)
    with pytest.raises(ValueError, match="at least 1"):
        t_quantile(0.975, 0)


def test_the_error_of_a_ratio_with_ones_below_is_that_of_a_mean():
    values = np.array([1.0, 2.0, 4.0, math.nan])
    mean, error, items, total = ratio(values)
    assert (mean, items, total) == (pytest.approx(7 / 3), 3, 3.0)
    assert error == pytest.approx(np.std(values[:3], ddof=1) / math.sqrt(3))
    assert error == pytest.approx(standard_error(values))
    assert ratio(np.array([2.0]))[0] == 2.0 and math.isnan(ratio(np.array([2.0])).error)
    assert math.isnan(ratio(np.array([])).mean)
    assert ratio(np.array([20.0, 15.0, 9.0]), np.array([10.0, 5.0, 0.0]))[:3:2] == (pytest.approx(35 / 15), 2)


def test_standard_errors_along_an_axis_leave_out_nan():
    values = np.array([[1.0, 5.0], [3.0, math.nan], [8.0, math.nan]])
    np.testing.assert_allclose(standard_error(values, 0), [np.std([1, 3, 8], ddof=1) / math.sqrt(3), math.nan])
    assert standard_error(values, 1).shape == (3,)


def test_errors_of_labels_are_those_of_a_ratio_over_documents():
    rng = np.random.default_rng(0)
    sums = RatioSums(2, 3)
    tokens, totals = [], []
    for _ in range(7):
        count = rng.integers(1, 9)
        values = rng.random((count, 3))
        tokens.append(count)
        totals.append(values.sum(0))
        sums.add(np.array([count, 0.0]), np.stack([values.sum(0), np.zeros(3)]))
    b, a = np.array(tokens, dtype=float), np.stack(totals)
    mean = a.sum(0) / b.sum()
    error = np.sqrt(7 / 6 * ((a - mean * b[:, None]) ** 2).sum(0)) / b.sum()
    seen = sums.ratio(0)
    assert (seen.total, seen.items) == (b.sum(), 7)
    np.testing.assert_allclose(seen.mean, mean)
    np.testing.assert_allclose(seen.error, error)
    assert sums.ratio(1).total == 0 and np.isnan(sums.ratio(1).mean).all()


def test_one_document_has_a_mean_and_no_error():
    sums = RatioSums(1, 1)
    sums.add(np.array([2.0]), np.array([[3.0]]))
    assert sums.ratio(0).mean[0] == 1.5 and np.isnan(sums.ratio(0).error[0])
