"""Gates that no loss depends on: their course against the same optimizer written out, and what the command writes."""

import json
import math

import null_gates as command
import numpy as np
import pytest
from null_gates import VARIANTS, Options, Variant, findings, simulate

from attnres.errors import UserError


@pytest.fixture
def options(tmp_path):
    return Options(tmp_path / "out", steps=60, every=20, seeds=(0, 1))


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
def test_the_course_is_that_of_the_penalty_alone(tmp_path, lr):
    course = simulate(Variant(), Options(tmp_path, steps=60, every=1, lr=lr))
    assert course["count"] == pytest.approx(written_out(60, lr), rel=2e-3, abs=2e-3)
    assert (course["count"][42] < 0.01) == (lr == 0.05), "at the low rate they cannot follow the temperature"


def test_without_the_penalty_annealing_alone_closes_them(options):
    course = simulate(VARIANTS["without the penalty"], options)
    assert course["logit"] == [-2.0] * 4 and course["penalty"] == [0.0] * 4
    assert course["count"] == pytest.approx([11 * sigmoid(-2 / t) for t in course["temperature"]], rel=1e-4)
    assert course["count"][0] == pytest.approx(4.414, abs=1e-3) and course["count"][-1] < 1e-6


def test_noise_is_the_seeds(options):
    runs = [simulate(VARIANTS["noise of 0.01"], options, seed) for seed in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]


def test_the_command_writes_courses_and_a_picture(options, monkeypatch, capsys):
    line = ["null_gates.py", "--out", str(options.out), "--steps", "60", "--every", "20", "--seeds", "0", "1"]
    monkeypatch.setattr("sys.argv", line)
    command.main()
    printed = capsys.readouterr().out.splitlines()
    assert [text.split("  ")[0] for text in printed] == list(VARIANTS)
    assert {path.name for path in options.out.iterdir()} == {"null_gates.json", "null-gates.pdf", "null-gates.png"}
    results = json.loads((options.out / "null_gates.json").read_text())
    assert (results["target"], results["gates"], results["annealing"]) == (4.0, 11, [12.0, 42.0])
    assert results["steps"] == [0, 20, 40, 60]
    for one in results["variants"]:
        assert len(one["courses"]) == (2 if one["noise"] else 1)
        assert all(len(values) == 4 for run in one["courses"] for values in run.values())
    noisy = results["variants"][-1]
    assert noisy["count"]["end"] == pytest.approx(np.mean([run["count"][-1] for run in noisy["courses"]]))
    panels = command.courses(results).figure.axes
    lines = {line.get_label(): line.get_ydata() for line in panels[0].get_lines()}
    assert list(lines["as published"]) == results["variants"][0]["courses"][0]["count"]
    dotted = panels[3].get_lines()[-1].get_ydata()
    assert dotted[0] == pytest.approx(5 * math.log(4 / 7)) and dotted[-1] == pytest.approx(0.1 * math.log(4 / 7))


def test_mistakes_are_told(options):
    options.steps = 0
    with pytest.raises(UserError, match="steps is 0: expected a whole number"):
        findings(options)
