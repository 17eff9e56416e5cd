"""Windows score every token once, and perplexity is that of the text."""

import math

import pytest
import torch

from attnres.evals.scoring import score, windows
from attnres.evals.tasks import wikitext
from attnres.models import open_checkpoint


@pytest.mark.parametrize("bos", [(), (99,)], ids=["plain", "bos"])
@pytest.mark.parametrize("stride", [1, 3, 8])
@pytest.mark.parametrize("length", [2, 7, 8, 9, 16, 31])
def test_every_token_is_scored_once_within_its_window(length, stride, bos):
    ids, width = list(range(length)), 8
    spans = windows(ids, width, stride, bos)
    scored = [token for request in spans for token in request.continuation]
    for request in spans:
        whole = [*request.context, *request.continuation]
        assert len(whole) <= width
        assert tuple(whole[: len(bos)]) == bos
        seen = whole[len(bos) :]
        assert seen == list(range(seen[0], seen[-1] + 1))
    if bos:
        assert scored == ids
    elif stride < width:
        assert scored == ids[1:]
        assert all(len(request.context) >= width - stride for request in spans[1:-1])
    else:
        assert scored == [i for i in ids if i % width]


def test_sliding_perplexity_is_each_tokens_own_with_its_context(folders):
    subject = open_checkpoint(folders["block"])
    model = subject.load()
    ids = torch.randint(0, 300, (50,), generator=torch.Generator().manual_seed(0)).tolist()
    scores = score(model, windows(ids, 16, 4), context=64, batch_tokens=256)
    total = 0.0
    for t in range(1, 50):
        end = 16 if t < 16 else min(50, 16 + math.ceil((t - 15) / 4) * 4)
        begin = 0 if t < 16 else 4 * math.ceil((t - 15) / 4)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids[begin:end]])).logits[0, t - 1 - begin]
        total += logits.double().log_softmax(0)[ids[t]].item()
    assert sum(scored.total for scored in scores) == pytest.approx(total, abs=1e-3)


def test_wikitext_is_joined_as_its_hub_version_is():
    assert wikitext([" ", " = A = ", "text"]) == "\n\n = A = \n\n\ntext\n"
