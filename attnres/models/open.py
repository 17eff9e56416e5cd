"""Find and load a model: `open_checkpoint` finds out what a name refers to, `Checkpoint.load` loads it.

A name is one of

    RUN                a run folder: its finished model
    RUN/checkpoint     a checkpoint of a run: the model as it was then, with the finished run's tokenizer
    FOLDER             config.json, safetensors and, mostly, a tokenizer
    OWNER/NAME         a model on the hub, which is fetched
    example            the small trained model that comes with the package

It refers to a plain Hugging Face model, one of attnres, or another project's checkpoint with depth reads. Finding it
reads no weight and runs no code. Weights are safetensors; code that comes with a model runs only if it is trusted.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from attnres.data.tokenizer import holds_tokenizer
from attnres.errors import UserError, foreign, unknown
from attnres.files import user_path
from attnres.models.bases import class_named
from attnres.models.classes import register_stored
from attnres.models.config import ResidualConfigMixin
from attnres.models.encoding import check_ids, context_of, text_config
from attnres.models.families import refuse_own_reads
from attnres.models.foreign import formats_of
from attnres.models.foreign.weights import assemble, foreign_config
from attnres.models.model_files import AGAIN, BESIDE, WeightFiles, config_place, fields_of, place_of
from attnres.progress import quiet_transformers
from attnres.reading import MAX_DEPTH, read_json
from attnres.text import first_of

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
_IMPLEMENTATIONS = (None, "eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm")
"""Implementations of attention and experts in Transformers and torch themselves."""


@dataclass(frozen=True)
class Checkpoint:
    """A model that was found and not loaded.

    Attributes:
        name: the name that the user gave.
        folder: where config.json and the weights lie.
        fields: config.json.
        run: the run folder that the model belongs to, or None.
        trusted: whether code that comes with the model may run.
    """

    name: str
    folder: Path
    fields: dict[str, Any]
    run: Path | None
    trusted: bool

    @functools.cached_property
    def has_tokenizer(self) -> bool:
        """Return whether the folder holds one."""
        return holds_tokenizer(self.folder)

    @property
    def kind(self) -> Literal["plain", "attnres", "foreign"]:
        """Return whether the model is a plain Transformers model, one of attnres, or another project's with depth
        reads."""
        if str(self.fields.get("model_type")).startswith("attnres_"):
            return "attnres"
        return "foreign" if formats_of(self.fields) else "plain"

    @property
    def code(self) -> dict[str, str]:
        """Return the classes whose code lies in the folder and has to run, such as "AutoConfig" -> "module.Class";
        empty if Transformers' or this package's classes suffice."""
        if self.kind == "attnres":
            return (self.fields.get("residual_family") or {}).get("remote") or {}
        if self.kind == "foreign":  # this package builds it, whatever classes its config names
            return {}
        return (self.fields.get("auto_map") or {}) if self.fields.get("model_type") not in CONFIG_MAPPING else {}

    def title(self, parts: int = 1) -> str:
        """Return a hub name unchanged; else the last `parts` parts of the path of the run or folder, and the
        checkpoint's step."""
        if not user_path(self.name).exists():
            return self.name
        path = [part for part in self.folder.absolute().parts if part != "model"]
        return "/".join(path[-parts - (path[-1] == "checkpoint") :])

    @property
    def step(self) -> int | None:
        """Return the model's training step, if its run says; else None."""
        for file in (self.folder.parent / "summary.json", self.folder.parent / "state.json"):
            if file.is_file():
                value = read_json(file)
                if isinstance(value, dict) and isinstance(value.get("step"), int):
                    return value["step"]
        return None

    @property
    def residual(self) -> str | None:
        """Return the name of its residual; None for a plain model."""
        return getattr(self.config, "residual", None)

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings of its residual that are not the defaults."""
        settings = getattr(self.config, "residual_settings", None) or {}
        return {name: value for name, value in settings.items() if value is not None}

    # ------------------------------------------------------------------ config and tokenizer

    @functools.cached_property
    def config(self) -> Any:
        """Return the Transformers config; for another project's checkpoint, that of the attnres model made from it.

        Raises:
            UserError: code that is not trusted, an unknown model type, or fields that make no valid config.
        """
        if self.code and not self.trusted:
            raise UserError(
                f"{self.name} brings its own code ({', '.join(sorted(self.code.values()))}), which is not run unasked: "
                "read it, then pass trust_remote_code (--trust-remote-code)"
            )
        model_type = self.fields.get("model_type")
        if self.kind == "foreign":
            return foreign_config(self.name, self.fields)
        if self.kind == "attnres":
            register_stored(self.fields, self.folder, trust_remote_code=self.trusted)
        elif model_type not in CONFIG_MAPPING and not self.code:
            raise UserError(
                f"{self.name} is of type '{model_type}', which this version of Transformers does not know: upgrade it"
            )
        if not self.trusted:
            _refuse_fetched_code(self.name, self.fields)
        with foreign(f"config.json of {self.name} makes no config", "fetch or copy it again"):
            return AutoConfig.from_pretrained(self.folder, trust_remote_code=bool(self.code))

    @functools.cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer.

        Raises:
            UserError: there is no tokenizer, it is damaged, or it belongs to another model.
        """
        if not self.has_tokenizer:
            raise UserError(
                f"{self.folder} holds no tokenizer: copy tokenizer.json and tokenizer_config.json of the model there"
            )
        config, advice = self.config, "fetch or copy it again"
        if not self.trusted:
            advice += ", or, if it brings code that you trust, give --trust-remote-code"
        with foreign(f"the tokenizer in {self.folder} cannot be opened", advice):
            tokenizer: Any = AutoTokenizer.from_pretrained(self.folder, config=config, trust_remote_code=self.trusted)
            largest = tokenizer.vocab_size - 1
            for name in ("bos", "eos", "unk", "pad"):  # a damaged tokenizer may fail only when it is first used
                getattr(tokenizer, f"{name}_token_id")
        check_ids([largest], self.vocab_size, self.name)
        return tokenizer

    @property
    def vocab_size(self) -> int | None:
        """Return the rows of the token embedding, None if the config does not say."""
        return getattr(text_config(self.config), "vocab_size", None)

    @property
    def context(self) -> int:
        """Return the longest sequence, in tokens."""
        return context_of(self.config, self.tokenizer if self.has_tokenizer else None)

    # ------------------------------------------------------------------ files

    @functools.cached_property
    def weights(self) -> WeightFiles:
        """Return the model's weight files, unopened."""
        return WeightFiles(self.name, self.folder)

    def check_added_tokens(self) -> None:
        """Refuse with a UserError a tokenizer.json that is damaged or has ids (also of added tokens) outside the
        embedding."""
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            return
        with foreign(f"tokenizer.json of {self.name} cannot be read", AGAIN):
            ids = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True).values()
        check_ids(ids or [0], self.vocab_size, self.name)

    def files_beside(self) -> dict[str, Path]:
        """Return, by name, the files to copy when the model is written to another folder; Python files only if
        trusted."""
        patterns = (*BESIDE, "*.py") if self.trusted and self.code else BESIDE
        files = (file for pattern in patterns for file in sorted(self.folder.glob(pattern)))
        return {file.name: file for file in files if file.is_file()}

    # ------------------------------------------------------------------ the model

    def load(
        self, dtype: str | torch.dtype = "auto", device: str | torch.device = "cpu", **options: Any
    ) -> PreTrainedModel:
        """Return the model, in evaluation mode.

        Args:
            dtype: dtype of the weights: auto (as stored), a name in `DTYPES` or a torch.dtype; a residual's parameters
                are always fp32.
            options: arguments of `from_pretrained`.

        Raises:
            UserError: weights that are damaged, missing or do not fit the config; code that is not trusted.
        """
        model: Any = self.load_all(dtype, **options)[0]
        model.tokenizer_folder = str(self.folder)
        return model if "device_map" in options else model.to(device)

    def load_all(self, dtype: str | torch.dtype = "auto", **options: Any) -> tuple[PreTrainedModel, list[str]]:
        """Load the model on the CPU; return it and the names of stored tensors that its class does not use."""
        if isinstance(dtype, str) and dtype != "auto":
            if dtype not in DTYPES:
                raise unknown("dtype", dtype, ["auto", *DTYPES])
            dtype = DTYPES[dtype]
        config = self.config
        with quiet_transformers():
            if self.kind == "foreign":
                self.weights.check()
                return assemble(self.name, self.fields, config, self.weights.paths, dtype, **options), []
            named = None if self.code else _named_class(self.name, config)
            options |= {} if named else {"trust_remote_code": bool(self.code)}
            with foreign(f"{self.name} cannot be loaded", "is it a model of Transformers, and whole?"):
                loaded: Any = (named or AutoModelForCausalLM).from_pretrained(
                    self.folder,
                    config=config,
                    dtype=dtype,
                    use_safetensors=True,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # raised below, with the tensor's name
                    **options,
                )
        model, info = loaded
        for tensor, stored, expected in sorted(info["mismatched_keys"]):  # a set, whose order differs between processes
            raise UserError(
                f"'{tensor}' of {self.name} has shape {tuple(stored)}, and its config says {tuple(expected)}: {AGAIN}"
            )
        if info["missing_keys"]:  # Transformers would initialise them randomly and continue
            raise UserError(f"{self.name} lacks {first_of(sorted(info['missing_keys']), 'other tensor')}: {AGAIN}")
        return model.eval(), sorted(info["unexpected_keys"])


def open_checkpoint(name: str | Path, *, trust_remote_code: bool = False) -> Checkpoint:
    """Find a model by its name (see the module's docstring); no weight is read and no code is run.

    >>> open_checkpoint("runs/demo/block-seed0").residual  # doctest: +SKIP
    'block'

    Args:
        trust_remote_code: code that comes with the model may run when it is loaded.

    Raises:
        UserError: nothing is there, the run is unfinished, or there is no config.json of a model or no safetensors.
    """
    folder, run = place_of(str(name), code=trust_remote_code)
    checkpoint = Checkpoint(str(name), folder, fields_of(str(name), folder), run, trust_remote_code)
    _ = checkpoint.weights.paths
    return checkpoint


def open_config(name: str | Path) -> Checkpoint:
    """Find a model of which only config.json is needed; nothing else is fetched from the hub.

    Raises:
        UserError: nothing is there, or no config.json of a model.
    """
    folder = config_place(str(name))
    return Checkpoint(str(name), folder, fields_of(str(name), folder), None, False)


def load(
    name: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    **options: Any,
) -> PreTrainedModel:
    """Load a model with a residual, in evaluation mode.

    >>> model = load("runs/demo/block-seed0")               # doctest: +SKIP
    >>> model = load("wdlctc/open-attnres-block")           # doctest: +SKIP

    Args:
        name: a run folder, a checkpoint of a run, a model folder or a name on the hub, of attnres or of another
            project's depth reads.
        dtype, device, options: as for `Checkpoint.load`.
        trust_remote_code: run code that comes with the model, if it was converted from such a model.

    Raises:
        UserError: no such model, a plain one, damaged or missing weights, or code that is not trusted.
    """
    checkpoint = open_checkpoint(name, trust_remote_code=trust_remote_code)
    if checkpoint.kind == "plain":
        refuse_own_reads(str(name), checkpoint.fields.get("model_type"))
        raise UserError(
            f"{name} holds a plain '{checkpoint.fields.get('model_type')}' model: expected one with a residual; "
            "attnres.convert gives it depth reads"
        )
    return checkpoint.load(dtype, device, **options)


def _named_class(name: str, config: Any) -> Any:
    """Return the class of this package or of Transformers that a config names, with whatever head; None if it names
    none.

    Raises:
        UserError: the config names a class of this package whose plain class is missing.
    """
    names = getattr(config, "architectures", None)
    label = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    if not isinstance(config, ResidualConfigMixin):
        cls = getattr(transformers, label, None)
        return cls if isinstance(cls, type) and issubclass(cls, PreTrainedModel) else None
    if not label:
        return None
    ours = class_named(label, type(config))
    if ours is None:
        raise UserError(
            f"{name} is of class '{label}', and neither Transformers nor this process has its plain class: "
            "AutoModelForCausalLM and similar classes load it with another head"
        )
    return ours


def _refuse_fetched_code(name: str, fields: Any, depth: int = 0) -> None:
    """Refuse with a UserError a config that names an implementation which Transformers would fetch and run."""
    if isinstance(fields, dict) and depth < MAX_DEPTH:
        for key, value in fields.items():
            named = value.values() if isinstance(value, dict) else [value]
            if "_implementation" in key and (code := [part for part in named if part not in _IMPLEMENTATIONS]):
                raise UserError(
                    f"config.json of {name} names the {key.lstrip('_')} {code[0]!r}, which may be fetched and run: "
                    "remove that line, or read the code and pass trust_remote_code (--trust-remote-code)"
                )
            _refuse_fetched_code(name, value, depth + 1)
