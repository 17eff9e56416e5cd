"""The user sees a bar on a terminal, plain lines elsewhere, and nothing if not wanted."""

import io

from rich.console import Console

from attnres.training.progress import Bar


def shown(*, terminal: bool, wanted: bool = True) -> str:
    """What appears during a run of three steps."""
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=120)
    with Bar("block-seed0", 3, shown=wanted, console=console) as bar:
        bar.say("resumed at [step] 0")
        for step in (1, 2, 3):
            bar.update(step, 4.5678, 4.25 if step > 1 else None, 12345.6)
    return text.getvalue()


def test_a_terminal_gets_a_bar_with_figures_and_the_time_left() -> None:
    text = shown(terminal=True)
    assert "\x1b[" in text and "resumed at [step] 0" in text
    for part in ("block-seed0", "3/3", "loss 4.568", "held-out 4.250", "12,346 tokens/s", "left"):
        assert part in text


def test_a_pipe_gets_plain_lines_and_not_one_a_step() -> None:
    lines = shown(terminal=False).splitlines()
    assert lines == [
        "resumed at [step] 0",
        "block-seed0  step 1/3  loss 4.568  12,346 tokens/s  left 0 s",
        "block-seed0  step 3/3  loss 4.568  held-out 4.250  12,346 tokens/s  left 0 s",
    ]


def test_nothing_is_shown_if_not_wanted() -> None:
    assert shown(terminal=True, wanted=False) == shown(terminal=False, wanted=False) == ""
