"""Small random models with a tokenizer of their own, saved as users have them."""

import pytest
import torch
from tiny import SIZE
from transformers import PreTrainedTokenizerFast

from attnres.app.opened import Opened
from attnres.app.page import Page
from attnres.data.tokenizer import END_OF_TEXT, train_tokenizer
from attnres.files import write_json
from attnres.models import build

TRAINING_TEXT = ["def read(rows, name):\n    return rows[name]\n", "The quick brown fox jumps over the lazy dog. "] * 40
CONTEXT = 512


def save_model(folder, residual, seed=0, vocabulary=300, size=SIZE, **settings):
    """A model whose logits are far apart and whose depth reads are not uniform."""
    backend, _ = train_tokenizer(vocabulary, TRAINING_TEXT)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT)
    tokenizer.save_pretrained(folder)
    model = build(size, residual, vocab_size=len(tokenizer), max_positions=CONTEXT, seed=seed, settings=settings)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_((0.5 if "residual" in name else 0.2) * torch.randn(parameter.shape, generator=g))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Models by what is special about them; `block` and `full` share a tokenizer, `other` has another."""
    root = tmp_path_factory.mktemp("models")
    write_json(root / "block" / "summary.json", {"step": 1200})
    save_model(root / "block" / "model", "block", block_size=2)
    return {
        "block": root / "block",
        "full": save_model(root / "full", "full", seed=1),
        "standard": save_model(root / "standard", "standard", seed=2),
        "deepnorm": save_model(root / "deepnorm", "deepnorm", seed=2),
        "other": save_model(root / "other", "full", seed=3, vocabulary=280),
        "shallow": save_model(root / "shallow", "full", seed=4, size=SIZE | {"num_hidden_layers": 2}),
    }


@pytest.fixture(scope="session")
def block(folders):
    return Opened(folders["block"])


@pytest.fixture(scope="session")
def full(folders):
    return Opened(folders["full"])


@pytest.fixture
def page(block, full):
    return Page([block, full])
