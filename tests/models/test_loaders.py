"""A saved folder loads with its depth reads by whatever people load weights with. So does one that an earlier version
wrote, where a module's "model.residual.query" was "residual.query"."""

import functools

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from accelerate import init_empty_weights, load_checkpoint_and_dispatch, load_checkpoint_in_model
from safetensors.torch import load_file, load_model, save_file
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers import AutoModel, Trainer, TrainingArguments

from attnres import convert, load
from attnres.models.exactness import fixed_inputs, logits

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
TEXT = {**SMALL, "num_key_value_heads": 1, "vocab_size": 40, "max_position_embeddings": 64}
SEEN = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "num_mel_bins": 8,
    "max_source_positions": 20,
    "max_target_positions": 20,
}
FAMILIES = {
    "LlamaForCausalLM": {**TEXT, "tie_word_embeddings": True},
    "GPT2LMHeadModel": {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 40, "n_positions": 64},
    "ModernBertForMaskedLM": {**SMALL, **ENDS, "vocab_size": 40, "cls_token_id": 1, "sep_token_id": 2},
    "ViTForImageClassification": {**SMALL, "image_size": 16, "patch_size": 4},
    "WhisperForConditionalGeneration": {**SEEN, **ENDS, "vocab_size": 40},
    "T5ForConditionalGeneration": {
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 32,
        "num_layers": 2,
        "num_heads": 2,
        "vocab_size": 40,
        "decoder_start_token_id": 0,
    },
    # Its experts have other names, and another shape, in a file: what goes by names takes no such folder.
    "MixtralForCausalLM": {**TEXT, "num_local_experts": 2},
}
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
families = pytest.mark.parametrize("family", FAMILIES)


def converted(family, seed):
    cls = getattr(transformers, family)
    torch.manual_seed(seed)
    return convert(cls(cls.config_class(**FAMILIES[family])).eval(), "full")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Make a family's model whose reads were trained, as it is, its folder, and that which an earlier version wrote."""

    @functools.cache
    def make(family):
        model = converted(family, 0)
        with torch.no_grad():
            model.residual.query.normal_(0, 0.5)
            model.residual.gain.normal_(1, 0.2)
        new, old = (tmp_path_factory.mktemp(f"{family}-{age}") for age in ("new", "old"))
        for folder in (new, old):
            model.save_pretrained(folder)
        path = old / "model.safetensors"
        tensors = load_file(path)
        of_head = {f"residual.{n.rpartition('residual.')[2]}" if "residual." in n else n: t for n, t in tensors.items()}
        save_file(of_head, path, metadata={"format": "pt"})
        return model, new, old

    return make


def from_pretrained(model, folder):
    return type(model).from_pretrained(folder)


def by_attnres(model, folder):
    return load(folder)


def fresh(load_into):
    """Give a loader a model of the same shapes with other weights, and return that."""

    @functools.wraps(load_into)
    def loader(model, folder):
        torch.manual_seed(1)
        made = type(model)(model.config)
        load_into(made, folder)
        return made

    return loader


@fresh
def state_dict(model, folder):
    tensors = load_file(folder / "model.safetensors")
    left = model.load_state_dict(tensors, strict=False)
    assert not left.unexpected_keys and not [name for name in left.missing_keys if "residual" in name]


@fresh
def by_safetensors(model, folder):
    load_model(model, folder / "model.safetensors")


@fresh
def wrapped(model, folder):
    """A state dict as `DataParallel` and `DistributedDataParallel` name it."""
    tensors = load_file(folder / "model.safetensors")
    wrapper = torch.nn.DataParallel(model)
    left = wrapper.load_state_dict({f"module.{name}": tensor for name, tensor in tensors.items()}, strict=False)
    assert not left.unexpected_keys


@fresh
def resumed(model, folder):
    Trainer(model, TrainingArguments(str(folder), report_to=[]))._load_from_checkpoint(str(folder))


@fresh
def set_whole(model, folder):
    options = StateDictOptions(full_state_dict=True, strict=False)
    set_model_state_dict(model, load_file(folder / "model.safetensors"), options=options)


@fresh
def set_compiled(model, folder):
    compiled = torch.compile(model, backend="eager")
    set_model_state_dict(compiled, load_file(folder / "model.safetensors"), options=StateDictOptions(strict=False))


@fresh
def by_accelerate(model, folder):
    load_checkpoint_in_model(model, folder)


def dispatched(model, folder):
    with init_empty_weights():
        made = type(model)(model.config)
    made.tie_weights()
    return load_checkpoint_and_dispatch(made, str(folder / "model.safetensors"), device_map={"": "cpu"})


@fresh
def distributed(model, folder):
    """As torchtitan reads a folder of the hub: what a file does not name is not asked for."""
    names = load_file(folder / "model.safetensors")
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name in names}
    assert [name for name in tensors if "residual.query" in name]
    dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)


BOTH = [from_pretrained, by_attnres, state_dict, by_safetensors, wrapped, resumed]
"""Those that know the names of an earlier version too."""
BY_NAME = [set_whole, set_compiled, by_accelerate, dispatched, distributed]


def check(model, loaded):
    inputs = fixed_inputs(model)
    assert torch.equal(logits(loaded.eval(), inputs), logits(model, inputs))


@pytest.mark.quick("*-LlamaForCausalLM", "from_pretrained-*")
@families
@pytest.mark.parametrize("loader", [*BOTH, *BY_NAME])
def test_a_saved_folder_is_loaded_with_its_depth_reads(saved, family, loader):
    model, folder, _ = saved(family)
    if family == "MixtralForCausalLM" and loader not in (from_pretrained, by_attnres):
        pytest.skip("a folder of the plain model has other names too")
    check(model, loader(model, folder))


@families
@pytest.mark.parametrize("loader", BOTH)
def test_a_folder_of_an_earlier_version_is_loaded_with_its_depth_reads(saved, family, loader):
    model, _, folder = saved(family)
    if family == "MixtralForCausalLM" and loader not in (from_pretrained, by_attnres):
        pytest.skip("a folder of the plain model has other names too")
    check(model, loader(model, folder))


@families
@pytest.mark.parametrize("age", ["new", "old"])
def test_a_base_model_and_a_head_load_each_other(saved, family, age, tmp_path):
    model, new, old = saved(family)
    base = AutoModel.from_pretrained(new if age == "new" else old)
    assert torch.equal(base.residual.query, model.residual.query)
    base.save_pretrained(tmp_path)
    assert torch.equal(type(model).from_pretrained(tmp_path).residual.query, model.residual.query)


@families
def test_a_file_has_the_names_of_the_modules(saved, family):
    model, new, old = saved(family)
    of_modules = {name for name in model.state_dict() if "residual." in name}
    for folder in (new, old):
        loaded = load(folder)
        loaded.save_pretrained(folder / "again")
        assert {n for n in load_file(folder / "again" / "model.safetensors") if "residual." in n} == of_modules


def test_names_of_both_ages_at_once_are_unexpected(saved):
    """What adds a model's own tensors to a file's, as `set_model_state_dict` does, must lose no reads in silence."""
    model, _, old = saved("LlamaForCausalLM")
    options = StateDictOptions(full_state_dict=True, strict=True)
    tensors = load_file(old / "model.safetensors") | {"lm_head.weight": model.lm_head.weight.detach()}
    with pytest.raises(RuntimeError, match=r"Unexpected key.*residual\.query"):
        set_model_state_dict(converted("LlamaForCausalLM", 1), tensors, options=options)
