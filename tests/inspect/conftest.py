"""Small random models with a tokenizer of their own, in memory and saved as users have them."""

import pytest
from tiny import SIZE, stir
from transformers import PreTrainedTokenizerFast
from words import sentence

from attnres.data.tokenizer import END_OF_TEXT, train_tokenizer
from attnres.models import build

CONTEXT = 32


def written(seed, words=12):
    return sentence(seed, words).capitalize() + "."


@pytest.fixture(scope="session")
def documents():
    """Five texts of several windows and of one."""
    return [" ".join(written(10 * i + j) for j in range(1 + 3 * (i % 3))) for i in range(5)]


@pytest.fixture(scope="session")
def tokenizer():
    backend, _ = train_tokenizer(300, [written(i, 60) for i in range(50)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT)


@pytest.fixture(scope="session")
def make_model(tokenizer):
    """A model of the tokenizer's vocabulary whose reads are not uniform."""

    def make(residual="block", scale=0.5, **settings):
        if residual == "block":
            settings = {"block_size": 2, **settings}
        model = build(SIZE, residual, vocab_size=len(tokenizer), max_positions=CONTEXT, settings=settings).eval()
        stir(model.residual, scale, seed=1)
        return model

    return make


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory, make_model, tokenizer):
    """The folder of a saved model with depth reads of some kind, or a plain one."""
    root, folders = tmp_path_factory.mktemp("models"), {}

    def get(residual):
        if residual not in folders:
            folders[residual] = folder = root / residual
            model = make_model("standard" if residual == "plain" else residual)
            if residual == "plain":
                from transformers import Qwen3Config, Qwen3ForCausalLM

                fields = {k: v for k, v in model.config.to_dict().items() if not k.startswith(("residual", "model_t"))}
                model = Qwen3ForCausalLM(Qwen3Config(**fields))
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        return folders[residual]

    return get
