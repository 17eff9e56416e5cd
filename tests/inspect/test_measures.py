"""Measures are the formulas in their docstrings, on arrays small enough to do by hand."""

import numpy as np
import pytest

from attnres.inspect.inspection import depth_distance, dynamics, embedding_persistence, normalised, source_spike

STANDARD = np.tril(np.ones((5, 5)))


def test_a_plain_residual_reaches_back_half_of_its_depth_and_keeps_one_part_of_the_embedding():
    assert depth_distance(STANDARD) == pytest.approx([0, 0.5, 1, 1.5, 2])
    assert embedding_persistence(STANDARD) == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4, 1 / 5])


def test_distance_is_zero_for_the_newest_output_and_the_whole_depth_for_the_embedding():
    assert depth_distance(np.eye(4)) == pytest.approx([0, 0, 0, 0])
    first = np.zeros((4, 4))
    first[:, 0] = 2.0
    assert depth_distance(first) == pytest.approx([0, 1, 2, 3])
    assert embedding_persistence(first) == pytest.approx([1, 1, 1, 1])


def test_signs_and_scale_of_coefficients_do_not_matter():
    scaled = STANDARD * np.array([1, -2, 3, -4, 5])[:, None]
    assert normalised(scaled).sum(1) == pytest.approx(np.ones(5))
    assert depth_distance(scaled) == pytest.approx(depth_distance(STANDARD))
    assert normalised(np.zeros((2, 2))).tolist() == [[0, 0], [0, 0]]


def test_the_spike_is_the_largest_source_over_the_median():
    assert source_spike([[1, 1, 10, 2]])[0] == pytest.approx(10 / 1.5)
    assert np.isnan(source_spike([[1, 10], []])).all()


def test_dynamics_are_the_depth_lines_of_a_run_in_order_of_steps():
    lines = [
        {"kind": "train", "step": 1, "loss": 2.0},
        {"kind": "depth", "step": 10, "output_rms": [1.0], "grad_rms": [0.1], "entropy": [0.0, 1.0]},
        {"kind": "depth", "step": 5, "output_rms": [2.0], "grad_rms": [0.2], "mix": [[1.0], [0.5, 0.5]]},
        {"kind": "depth", "step": 10, "output_rms": [3.0], "grad_rms": [0.3], "mix": [[1.0], [0.2, 0.8]]},
    ]
    # rows of different lengths for each read are no curves
    assert dynamics(lines) == {"steps": [5, 10], "output_rms": [[2.0], [3.0]], "grad_rms": [[0.2], [0.3]]}
    assert dynamics(lines[:1]) is None


def test_distances_of_several_reads_a_sublayer_are_counted_from_what_was_written():
    rows = np.array([[1.0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]])
    assert depth_distance(rows, [0, 1, 1, 2]) == pytest.approx([0, 1, 0, 0])
