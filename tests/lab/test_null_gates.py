"""Gates that no loss depends on: their course against the same optimizer written out, and what each variant is."""

import math

import numpy as np
import pytest

from lab.studies.null_gates import QUANTITIES, VARIANTS, runs, simulate


def course(rows, quantity="count"):
    return [row["value"] for row in rows if row["quantity"] == quantity]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def written_out(steps, lr):
    """The sum of 11 gates, every one of them the same number, by the study's penalty and schedules and by AdamW."""
    b, mean, square, counts = -2.0, 0.0, 0.0, [11 * sigmoid(-0.4)]
    for step in range(1, steps + 1):
        t = 5.0 - 4.9 * min(max((step / steps - 0.2) / 0.5, 0.0), 1.0)
        gate = sigmoid(b / t)
        gradient = 2 * 0.1 * (11 * gate - 4) * gate * (1 - gate) / t
        gradient *= min(1.0, 1.0 / (abs(gradient) * math.sqrt(11) + 1e-6))
        warm, done = 0.2 * steps, step / steps
        rate = step / warm if step <= warm else 0.1 + 0.9 * (1 + math.cos(math.pi * (done - 0.2) / 0.8)) / 2
        mean, square = 0.9 * mean + 0.1 * gradient, 0.95 * square + 0.05 * gradient**2
        b -= lr * rate * (mean / (1 - 0.9**step)) / (math.sqrt(square / (1 - 0.95**step)) + 1e-8)
        counts.append(11 * sigmoid(b / t))
    return counts


@pytest.mark.parametrize("lr", [0.5, 0.05])
def test_the_course_is_that_of_the_penalty_alone(lr):
    counts = course(simulate("as published", steps=60, every=1, lr=lr))
    assert counts == pytest.approx(written_out(60, lr), rel=2e-3, abs=2e-3)
    assert (counts[42] < 0.01) == (lr == 0.05), "at the low rate they cannot follow the temperature"


def test_without_the_penalty_annealing_alone_closes_them():
    rows = simulate("without the penalty", steps=60, every=20)
    assert course(rows, "logit") == [-2.0] * 4 and course(rows, "penalty") == [0.0] * 4
    counts = course(rows)
    assert counts == pytest.approx([11 * sigmoid(-2 / t) for t in course(rows, "temperature")], rel=1e-4)
    assert counts[0] == pytest.approx(4.414, abs=1e-3) and counts[-1] < 1e-6


def test_noise_is_the_seeds_and_the_rest_runs_once():
    rows = [simulate("noise of 0.01", steps=20, every=10, seed=seed) for seed in (0, 0, 1)]
    assert rows[0] == rows[1] != rows[2]
    assert {row["quantity"] for row in rows[0]} == set(QUANTITIES) and [row["step"] for row in rows[0][::4]] == [
        0,
        10,
        20,
    ]
    names = runs(60, 3)
    assert sum(name.startswith("noise of 0.01-") for name in names) == 3
    assert len(names) == len(VARIANTS) + 4 and "as published-seed1" not in names
