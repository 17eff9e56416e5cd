"""A model to evaluate or to generate with: a folder of this package, any Hugging Face folder, or a name on the hub.

Everything that can be wrong with it short of its weights is found before a weight is loaded. Weights are safetensors;
code that comes with a model runs only when it was trusted.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from attnres.errors import UserError, first_line
from attnres.evals.config import Dtype
from attnres.files import read_json
from attnres.models import load
from attnres.models.classes import register_stored
from attnres.models.foreign_kinds import refuse_foreign
from attnres.progress import quiet_transformers

DEFAULT_CONTEXT = 2048
"""Where neither config nor tokenizer says how long a text may be; lm-eval assumes the same."""

_DTYPES: dict[str, str | torch.dtype] = {"auto": "auto", "fp32": torch.float32, "bf16": torch.bfloat16}
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_FETCHED = ("*.json", "*.safetensors", "*.txt", "*.model", "*.tiktoken", "*.jinja")
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "*.tiktoken",
    "tekken.json",
)


@dataclass(frozen=True)
class Subject:
    """A model that was looked at and not yet loaded.

    Attributes:
        name: as the user gave it.
        folder: where config, weights and tokenizer lie.
        rows: of the token embedding, where the config says.
        context: the longest sequence in tokens.
        bos: what the tokenizer itself puts in front of a text: one token or none.
        prefix: the token that stands in for an empty context, as in lm-eval: beginning, else end of text.
    """

    name: str
    folder: Path
    config: Any
    tokenizer: PreTrainedTokenizerBase
    rows: int | None
    context: int
    bos: tuple[int, ...]
    prefix: int | None
    trust_remote_code: bool

    def load(self, dtype: Dtype = "auto", device: str = "cpu") -> PreTrainedModel:
        """The model in evaluation mode; `auto` keeps the dtype of its file. Raises UserError."""
        wanted = _DTYPES[dtype]
        with quiet_transformers():
            return self._load(wanted).to(device).eval()

    def _load(self, wanted: str | torch.dtype) -> Any:
        if _is_ours(self.config):
            return load(self.folder, dtype=wanted, trust_remote_code=self.trust_remote_code)
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                self.folder,
                config=self.config,
                dtype=wanted,
                use_safetensors=True,
                trust_remote_code=self.trust_remote_code,
                output_loading_info=True,
            )
            model, info = loaded
        except Exception as error:  # Transformers, safetensors and remote code raise many kinds
            raise UserError(
                f"the model in {self.folder} cannot be loaded ({first_line(error)}): is it a causal language model "
                "with whole safetensors files?"
            ) from error
        if info["missing_keys"]:  # Transformers would draw them at random and go on
            name, *others = sorted(info["missing_keys"])
            raise UserError(f"the model in {self.folder} lacks '{name}' and {len(others)} other tensors: copy it again")
        return model

    def check_ids(self, largest: int) -> None:
        """Refuse token ids past the end of the embedding: the tokenizer belongs to another model."""
        if self.rows is not None and largest >= self.rows:
            raise UserError(
                f"the tokenizer in {self.folder} gives id {largest} and the model's embedding has {self.rows} rows: "
                "they belong to different models"
            )


def find_subject(name: str | Path, *, trust_remote_code: bool = False) -> Subject:
    """Look at a run folder of `attnres train` (its `model`), a model folder, or a model on the hub.

    Raises:
        UserError: nothing there, an unfinished run, no weights in safetensors, no tokenizer, untrusted code.
    """
    folder = _folder_of(str(name), trust_remote_code)
    raw = read_json(folder / "config.json")
    if isinstance(raw, dict):
        refuse_foreign(name, raw)
    if not isinstance(raw, dict) or not (raw.get("model_type") or raw.get("auto_map")):
        hint = ""
        if (folder / "checkpoint" / "model").is_dir():
            hint = ": this run has not finished, continue it with attnres train --resume"
        raise UserError(f"{folder}/config.json is not that of a model{hint}")
    if not any(folder.glob("*.safetensors")):
        raise UserError(f"{folder} holds no weights: expected model.safetensors, or its parts and their index")
    if not any(file for pattern in _TOKENIZERS for file in folder.glob(pattern)):
        raise UserError(
            f"{folder} holds no tokenizer: copy tokenizer.json and tokenizer_config.json of the model there"
        )
    try:
        register_stored(raw, folder, trust_remote_code=trust_remote_code)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except UserError:
        raise
    except Exception as error:
        advice = (
            "" if trust_remote_code or not raw.get("auto_map") else "; it brings code: read it, --trust-remote-code"
        )
        raise UserError(f"the model in {folder} cannot be opened ({first_line(error)}){advice}") from error
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise UserError(f"the tokenizer in {folder} cannot be opened ({first_line(error)})") from error
    text_config = getattr(config, "text_config", None) or config
    rows = getattr(text_config, "vocab_size", None)
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    own = tuple(tokenizer("")["input_ids"])
    found = Subject(
        name=str(name),
        folder=folder,
        config=config,
        tokenizer=tokenizer,
        rows=rows,
        context=context_of(config, tokenizer),
        bos=own if begin is not None and own == (begin,) else (),
        prefix=begin if begin is not None else end,
        trust_remote_code=trust_remote_code,
    )
    found.check_ids(tokenizer.vocab_size - 1)
    return found


def _is_ours(config: Any) -> bool:
    return str(config.model_type).startswith("attnres_")


def _folder_of(name: str, trust_remote_code: bool) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        folder = path / "model" if (path / "model" / "config.json").is_file() else path
        if not (folder / "config.json").is_file():
            raise UserError(
                f"{path} holds no model: expected a run folder, or one with config.json and model.safetensors"
            )
        return folder
    if path.exists() or not _HUB_NAME.fullmatch(name):
        raise UserError(f"model '{name}' does not exist: expected a run folder, a model folder or a name on the hub")
    try:
        patterns = [*_FETCHED, "*.py"] if trust_remote_code else list(_FETCHED)
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # connections, missing repositories, gated ones
        raise UserError(
            f"model '{name}' is no folder here and cannot be fetched from the hub ({first_line(error)}): check the "
            "name and the connection"
        ) from error


def context_of(config: Any, tokenizer: PreTrainedTokenizerBase) -> int:
    """The longest sequence in tokens, found as lm-eval finds it."""
    config = getattr(config, "text_config", None) or config
    for name in ("n_positions", "max_position_embeddings", "n_ctx"):
        value = getattr(config, name, None)
        if value is not None:
            return int(value)
    longest = tokenizer.model_max_length
    return int(longest) if longest < 10**9 else DEFAULT_CONTEXT  # Transformers means "unknown" by 10**30
