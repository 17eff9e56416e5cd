"""The user sees bars on a terminal, plain lines elsewhere, and nothing if not wanted."""

import io

import pytest
from rich.console import Console

from attnres import progress
from attnres.progress import STEPS, Bars


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def shown(clock: list[float], *, terminal: bool, wanted: bool = True, stays: bool = True) -> str:
    """What appears during a run of four steps, 20 seconds each, resumed at step 1."""
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=120)
    with Bars(STEPS, rate=lambda rate: f"{rate:.2f} steps/s", shown=wanted, stays=stays, console=console) as bars:
        bars.say("resumed at [step] 1")
        bar = bars.add("block-seed0", 4, 1)
        for step in (2, 3, 4):
            clock[0] += 20
            bar.update(step, f"loss {5 - step / 10:.3f}")
    return text.getvalue()


def test_a_terminal_gets_a_bar_with_figures_and_the_time_left(clock):
    text = shown(clock, terminal=True)
    assert "\x1b[" in text and "resumed at [step] 1" in text
    for part in ("block-seed0", "step 4/4", "loss 4.600", "0.05 steps/s", "left 0 s"):
        assert part in text


def test_a_pipe_gets_plain_lines_and_not_one_a_step(clock):
    assert shown(clock, terminal=False).splitlines() == [
        "resumed at [step] 1",
        "block-seed0  step 3/4  loss 4.700  0.05 steps/s  left 20 s",
        "block-seed0  step 4/4  loss 4.600  0.05 steps/s  left 0 s",
    ]


def test_the_next_piece_of_work_has_a_rate_of_its_own(clock):
    text = io.StringIO()
    with Bars(STEPS, console=Console(file=text, width=120)) as bars:
        bar = bars.add("reading", 100)
        clock[0] += 1000
        bar.update(100)
        bar.begin("tokenising")
        for done in (50, 100):
            clock[0] += 40
            bar.update(done)
    assert text.getvalue().splitlines() == [
        "reading  step 100/100  left 0 s",
        "tokenising  step 50/100  left 40 s",
        "tokenising  step 100/100  left 0 s",
    ]


def test_what_does_not_stay_gives_no_last_line(clock):
    assert len(shown(clock, terminal=False, stays=False).splitlines()) == 2


def test_nothing_is_shown_if_not_wanted(clock):
    assert shown(clock, terminal=True, wanted=False) == shown(clock, terminal=False, wanted=False) == ""


def test_an_estimate_that_was_too_small_gives_one_last_line(clock):
    text = io.StringIO()
    with Bars(console=Console(file=text)) as bars:
        bar = bars.add("work", 10)
        for done in (10, 11, 12):
            bar.update(done)
        bar.finish()
    assert text.getvalue().splitlines() == ["work  100%  left 0 s"]


def test_bars_come_and_go_and_an_estimate_is_corrected_at_the_end(clock):
    text = io.StringIO()
    with Bars(console=Console(file=text)) as bars:
        first, second = bars.add("a", 10), bars.add("b", None)
        clock[0] += 60
        first.advance(5)
        first.remove()
        second.advance(30, "tokenising")
        second.finish()
    assert text.getvalue().splitlines() == ["a  50%  left 60 s", "b  0%  tokenising", "b  100%  left 0 s"]
