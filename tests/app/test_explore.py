"""`attnres.explore` opens models in memory, of whatever kind, and lets go of its port when it is closed."""

import json
import urllib.error
import urllib.request

import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

pytest.importorskip("uvicorn", reason="the extra `app` is not installed")

import attnres
from attnres import UserError
from attnres.app.opened import Given, Opened


class Own(nn.Module):
    """The shortest transformer-like module with depth reads: two sublayers, no position."""

    def __init__(self):
        super().__init__()
        self.residual = attnres.make_residual("full", 2, 16)
        self.embedding, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)
        self.mlps = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.norms = nn.ModuleList(nn.RMSNorm(16) for _ in range(3))

    def forward(self, ids):
        residual = self.residual
        state = residual.start(self.embedding(ids))
        for index, mlp in enumerate(self.mlps):
            x, state = residual.read(state, index, self.norms[index])
            state = residual.write(state, index, mlp(x).tanh())
        return self.head(residual.finish(state, self.norms[2]))

    def get_extra_state(self):
        """What Megatron's layers have in a state dict: no tensor."""


def asked(url, path, **question):
    request = urllib.request.Request(
        f"{url}/{path}", json.dumps(question).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        return answer.headers, json.loads(answer.read().splitlines()[-1])


def test_a_module_of_ones_own_opens_without_a_tokenizer():
    torch.manual_seed(0)
    model = Own()
    with attnres.explore(model, text=[3, 1, 4, 1, 5]) as page:
        headers, shown = asked(page.url, "show", view=None, link="")
        assert shown["view"]["text"] == "3 1 4 1 5"
        assert "http://localhost:*" in headers["content-security-policy"] and page.url in page._repr_html_()
    page.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(page.url)
    assert "closed" in repr(page) and model.residual.observer is None and model.training
    given = Given(model, name="Own")
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.tensor([[3, 1, 4]])), -1)
    torch.testing.assert_close(given.read("3 1 4").log_probs, expected[0])


def test_a_model_without_depth_reads_opens_as_standard(folders, tmp_path):
    """In memory and as a folder: the conversion changes no logit."""
    config = Qwen3Config(
        **{k: v for k, v in Opened(folders["full"]).checkpoint.fields.items() if k in Qwen3Config().to_dict()}
    )
    config.architectures, config.model_type = None, "qwen3"
    plain, tokenizer = Qwen3ForCausalLM(config).eval(), Opened(folders["full"]).tokenizer
    plain.save_pretrained(tmp_path / "plain")
    tokenizer.save_pretrained(tmp_path / "plain")
    for opened in (Given(plain, tokenizer, name="plain"), Opened(tmp_path / "plain")):
        assert opened.residual.name == "standard" and "(standard" in opened.label
        reading = opened.read("def read")
        with torch.no_grad():
            expected = torch.log_softmax(plain(torch.tensor([reading.ids])).logits[0], -1)
        torch.testing.assert_close(reading.log_probs, expected, atol=1e-5, rtol=1e-5)


def test_models_in_memory_are_told_apart_by_their_numbers():
    torch.manual_seed(0)
    first, second = Own(), Own()
    keys = [Given(one, name="Own").key for one in (first, second, first)]
    assert keys[0] == keys[2] != keys[1]


def test_what_cannot_be_explored_says_why():
    for model, words in [(nn.Linear(2, 2), "no residual"), ([Own()] * 3, "one, or two"), (lambda x: x, "no module")]:
        with pytest.raises(UserError, match=words):
            attnres.explore(model)
    with pytest.raises(UserError, match="port"):
        attnres.explore(Own(), port=99999)
