"""Ranks and launchers that are killed: the others end, and what was saved goes on bit for bit (`make test-scale`)."""

from pathlib import Path

import pytest
from soak import LAYOUTS, Soak
from test_two_ranks import configuration

pytestmark = pytest.mark.scale

KILLS = 4
"""Of each layout, so that there are more than ten; `make soak` has 200."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_killed_processes_take_the_others_along_and_the_run_goes_on_bit_for_bit(corpus, tmp_path, layout):
    if not Path("/proc/self/task").exists():
        pytest.skip("children are found in /proc")
    values = configuration(corpus, tmp_path, **LAYOUTS[layout])
    soak = Soak(tmp_path / "soak", values, KILLS, seed=layout)
    while soak.done < KILLS:
        soak.kill()
    assert soak.counts["rank"] + soak.counts["launcher"] == KILLS and soak.counts["lost, said so"] >= 1
    assert not soak.trial.counts
