"""Small random models with a tokenizer of their own, saved as users have them."""

import torch
from tiny import SIZE
from transformers import PreTrainedTokenizerFast
from words import sentence

from attnres.data.tokenizer import END_OF_TEXT, train_tokenizer
from attnres.models import build

CONTEXT = 64


def write_tokenizer(folder, vocabulary=320, **options):
    backend, _ = train_tokenizer(vocabulary, [sentence(i, 60) for i in range(50)])
    names = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, **options}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_model(folder, residual="block", seed=0, vocabulary=320, plain=False):
    """A model whose logits are far apart and whose depth reads are not uniform."""
    tokenizer = write_tokenizer(folder, vocabulary)
    settings = {"block_size": 2} if residual == "block" else {}
    model = build(SIZE, residual, vocab_size=len(tokenizer), max_positions=CONTEXT, seed=seed, settings=settings)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        # The residual's last, so that the other weights are the same whatever it has.
        for name, parameter in sorted(model.named_parameters(), key=lambda pair: "residual" in pair[0]):
            scale = 0.5 if "residual" in name else 0.2
            parameter.add_(scale * torch.randn(parameter.shape, generator=g))
    model.config.eos_token_id = model.generation_config.eos_token_id = 0
    if plain:
        from transformers import Qwen3Config, Qwen3ForCausalLM

        fields = {k: v for k, v in model.config.to_dict().items() if not k.startswith("residual") and k != "model_type"}
        twin = Qwen3ForCausalLM(Qwen3Config(**fields))
        twin.load_state_dict(model.state_dict(), strict=False)
        model = twin
    model.save_pretrained(folder)
    return folder
