"""What repetition gains: nothing where nothing is copied, everything where it is, and what a loop over tokens says."""

import csv
import math
from pathlib import Path
from types import SimpleNamespace

import copying
import pytest
import torch
from torch import nn

from attnres.errors import UserError
from attnres.models.open import open_checkpoint

VOCABULARY = 5000


class Copier(nn.Module):
    """Certain that what followed a token's last occurrence follows again; a token that is new is followed by any."""

    def forward(self, input_ids, use_cache):
        logits = torch.zeros(*input_ids.shape, VOCABULARY)
        for row, ids in enumerate(input_ids.tolist()):
            for place, token in enumerate(ids):
                before = [at for at in range(place) if ids[at] == token]
                if before:
                    logits[row, place, ids[before[-1] + 1]] = 20.0
        return SimpleNamespace(logits=logits)


class Guesser(nn.Module):
    def forward(self, input_ids, use_cache):
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, VOCABULARY))


def test_a_model_that_copies_loses_nothing_on_what_it_has_read():
    new, repeated = copying.losses(Guesser(), VOCABULARY, length=8, sequences=64)
    assert new == repeated == pytest.approx(math.log(VOCABULARY))
    new, repeated = copying.losses(Copier(), VOCABULARY, length=8, sequences=64)
    assert new >= math.log(VOCABULARY) - 1e-4 and repeated < 0.1, "but for tokens that stood there twice"
    one, again = (copying.losses(Copier(), VOCABULARY, length=8, sequences=64, seed=seed) for seed in (0, 1))
    assert one == (new, repeated) and again != one


def test_runs_are_measured_as_a_loop_over_tokens_would(run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    copying.main((run, tmp_path / "empty"), out=tmp_path / "out.csv", length=6, sequences=3)
    with (tmp_path / "out.csv").open() as file:
        (row,) = csv.DictReader(file)
    checkpoint = open_checkpoint(str(run))
    model, size = checkpoint.load("fp32"), checkpoint.vocab_size
    tokens = torch.randint(size, (3, 6), generator=torch.Generator().manual_seed(0))
    halves = ([], [])
    with torch.no_grad():
        for one in torch.cat([tokens, tokens], 1):
            for place in range(1, 12):
                p = model(input_ids=one[None, :place]).logits[0, -1].softmax(-1)[one[place]]
                if place != 6:
                    halves[place > 6].append(-math.log(p))
    new, repeated = (sum(half) / len(half) for half in halves)
    assert (float(row["new"]), float(row["repeated"])) == pytest.approx((new, repeated), abs=1e-3)
    assert float(row["gain"]) == pytest.approx(new - repeated, abs=2e-3) and row["run"].endswith("/run")
    with pytest.raises(UserError, match="at most half"):
        copying.main((run,), out=tmp_path / "no.csv", length=1000)
    with pytest.raises(UserError, match="no finished run with a model"):
        copying.main((tmp_path / "empty",), out=tmp_path / "no.csv")
    assert not (tmp_path / "no.csv").exists()
