"""Convert a pretrained decoder to one with depth reads that computes, at first, exactly the same logits.

With zero queries a read is the sum of its sources (`read_scale="sum"`), which is the plain residual stream: the logits
do not change, and training starts from the pretrained model. Every conversion measures this.
"""

import copy
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast, overload

import torch
import transformers
from transformers import PreTrainedModel

from attnres.errors import UserError, foreign, unknown
from attnres.folders import refuse_other
from attnres.models.bases import Depth, DepthMixin, class_of
from attnres.models.classes import CLASSES, register
from attnres.models.config import stray_settings
from attnres.models.exactness import BOUNDS, compare_logits, fixed_inputs, logits, training_difference
from attnres.models.export import write_model
from attnres.models.families import FAMILIES, Family, layer_count, refuse_own_reads
from attnres.models.foreign import formats_of
from attnres.models.open import DTYPES, Checkpoint, open_checkpoint
from attnres.models.probe import probe
from attnres.residuals import Residual, check_settings, make_residual, residual_class, settings_of, switched_settings
from attnres.text import first_of, memory, settings_text, with_settings


@dataclass(frozen=True)
class Conversion:
    """The report of a conversion, with its exactness.

    Attributes:
        source, out: the source model; the folder that was written, or None.
        family, model_type: the row of `FAMILIES`, or the class that was probed; `model_type` of the new config.
        probed: whether the family was found by observing a forward pass.
        residual, settings: as in the new config.
        sublayers, width: L and d.
        parameters, added_parameters: number in the source, and number of the residual (queries and gains).
        dtype: dtype of the weights; queries and gains are always fp32.
        max_difference, logit_scale, relative_difference, bound, tokens: logits of the converted model against the
            source's on a fixed batch of `tokens` tokens: the largest difference, the largest logit, their ratio, and
            its bound.
        arithmetic: the dtype of that comparison. Models in 16 bits are compared in fp32 on their own weights.
        own_difference: the largest difference in the weights' own dtype, rounding included.
        ignored: tensors of the source's files that its class does not use; the converted model lacks them.
        versions: versions of torch and transformers.
    """

    source: str
    out: str | None
    family: str
    model_type: str
    probed: bool
    residual: str
    settings: Mapping[str, Any]
    sublayers: int
    width: int
    parameters: int
    added_parameters: int
    dtype: str
    max_difference: float
    logit_scale: float
    relative_difference: float
    bound: float
    arithmetic: str
    tokens: int
    own_difference: float
    ignored: tuple[str, ...]
    versions: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as conversion.json holds it."""
        return asdict(self)

    def __str__(self) -> str:
        family = f"{self.family}{' (probed)' if self.probed else ''}"
        lines = [
            f"{self.source} -> {self.out or 'memory'}",
            f"  family      {family}, {self.sublayers} sublayers of width {self.width}",
            f"  residual    {with_settings(self.residual, self.settings)}",
            f"  parameters  {self.parameters:,} {self.dtype} + {self.added_parameters:,} fp32 (of the residual)",
            f"  logits      differ by at most {self.max_difference:.2g} of {self.logit_scale:.3g}, "
            f"that is {self.relative_difference:.1e} (bound {self.bound:.0e}, {self.arithmetic}, {self.tokens} tokens)",
        ]
        if self.arithmetic != self.dtype:
            lines.append(f"              in {self.dtype} itself, with its rounding, by {self.own_difference:.2g}")
        if self.ignored:
            lines.append(f"  left out    {first_of(self.ignored, 'other tensor')}, which its class does not use")
        return "\n".join(lines)


@overload
def convert(
    source: PreTrainedModel | str | Path,
    residual: str = "block",
    *,
    out: None = None,
    dtype: str | None = None,
    trust_remote_code: bool = False,
    **settings: Any,
) -> DepthMixin: ...


@overload
def convert(
    source: PreTrainedModel | str | Path,
    residual: str = "block",
    *,
    out: str | Path,
    dtype: str | None = None,
    trust_remote_code: bool = False,
    **settings: Any,
) -> Conversion: ...


def convert(
    source: PreTrainedModel | str | Path,
    residual: str = "block",
    *,
    out: str | Path | None = None,
    dtype: str | None = None,
    trust_remote_code: bool = False,
    **settings: Any,
) -> DepthMixin | Conversion:
    """Return a pretrained model with depth reads, its logits unchanged.

    >>> model = convert("Qwen/Qwen3-0.6B", num_blocks=8)                # doctest: +SKIP
    >>> print(model.conversion)                                         # doctest: +SKIP
    >>> print(convert("Qwen/Qwen3-0.6B", "full", out="models/full"))    # doctest: +SKIP

    Args:
        source: a Transformers model in memory (a language model, an encoder, a vision or audio model, with any head or
            none), whose weights the converted one shares (training one trains both; the object `source` does not
            change); or a folder, or a name on the hub. A model of attnres with the standard residual is accepted too.
        residual: a mechanism's name, or FILE.py:CLASS; `settings` are its settings (`num_blocks`, `block_size`,
            ...). `read_scale` is "sum" unless given: the mean is exact only up to the norms' eps.
        out: a folder to write, new or empty: sharded safetensors, config, tokenizer and generation settings of the
            source, the report as conversion.json and a model card. The folder appears only after the written model was
            loaded and compared.
        dtype: bf16, fp16, fp32 or fp64 weights, for a source on disk; None keeps the source's. Queries and gains are
            fp32.
        trust_remote_code: run code that comes with the source. Never unasked.

    Returns:
        The model, with the report as `.conversion`; with `out`, the report.

    Raises:
        UserError: an architecture without a place for depth reads (with the reason), unknown names, impossible
            settings, damaged or missing files, quantised weights, a converted model, a full disk, or logits that would
            change by more than `exactness.BOUNDS`. Then nothing is written.
    """
    # Cheap checks come before weights are read.
    if dtype is not None and dtype not in DTYPES:
        raise unknown("dtype", str(dtype), DTYPES)
    residual = residual_class(residual).name
    exact = {"read_scale": "sum"} if "read_scale" in settings_of(residual) else {}
    given_settings = {name: value for name, value in settings.items() if value is not None}
    make_settings = {**exact, **switched_settings(residual, given_settings)}
    check_settings(residual, make_settings)
    if out is not None:
        out = refuse_other(out)
    if not isinstance(source, str | Path):
        if dtype is not None:
            raise UserError(
                f"dtype '{dtype}' was given with a model in memory, whose weights are shared: cast it first"
            )
        name = getattr(getattr(source, "config", None), "name_or_path", "") or type(source).__name__
        new = _convert(source, residual, make_settings, name)
        return new if out is None else _write(new, Path(out), {})
    checkpoint = open_checkpoint(source, trust_remote_code=trust_remote_code)
    check_source(checkpoint)
    if out is not None:
        _check_room(checkpoint, Path(out), dtype)
    model, ignored = checkpoint.load_all(dtype or "auto")
    with foreign(f"{checkpoint.name} cannot be given depth reads", "does its config fit its weights?"):
        new = _convert(model, residual, make_settings, checkpoint.name, remote=checkpoint.code, ignored=ignored)
    return new if out is None else _write(new, Path(out), checkpoint.files_beside())


def check_source(source: Checkpoint) -> None:
    """Refuse with a UserError a model on disk that cannot be given depth reads, before its weights are read."""
    name, quantised = source.name, source.fields.get("quantization_config")
    refuse_own_reads(name, source.fields.get("model_type"))
    if source.kind == "attnres" and (source.residual != "standard" or source.settings):
        raise UserError(f"{name} has depth reads already (residual '{source.residual}'): convert the plain one")
    if source.kind == "foreign":
        raise UserError(
            f"{name} has depth reads in the format of '{formats_of(source.fields)[0].name}': attnres convert {name} "
            "OUT writes it as a model of attnres, attnres.load opens it"
        )
    if quantised:
        method = quantised.get("quant_method", "unknown")  # a mapping, as `Fields` says
        raise UserError(f"{name} has quantised weights ({method}): save a dequantised copy and convert that")
    _ = source.config
    source.weights.check()
    source.check_added_tokens()


def _check_room(source: Checkpoint, out: Path, dtype: str | None) -> None:
    """Refuse with a UserError a disk that is too small, before minutes of work."""
    size = source.weights.nbytes(None if dtype is None else DTYPES[dtype].itemsize)
    above = next(folder for folder in (out, *out.resolve().parents) if folder.exists())
    free = shutil.disk_usage(above).free
    if free < size:
        raise UserError(
            f"{out} needs {memory(size)} and {above} has {memory(free)} left: make room or choose another folder"
        )


def _write(new: DepthMixin, out: Path, folder: Mapping[str, Path]) -> Conversion:
    report: Conversion = replace(cast(Any, new.conversion), out=str(out))
    write_model(new, out, folder, report.to_dict(), report.source)
    return report


def _plain(model: DepthMixin) -> PreTrainedModel:
    """Return the plain Transformers model with the weights of a model that has the standard residual."""
    config: Any = model.config
    kind = type(config).__bases__[1]
    our_fields = {"model_type", "architectures", "transformers_version", *stray_settings(type(config), vars(config))}
    fields = {name: value for name, value in config.to_dict().items() if name not in our_fields}
    fields = {name: value for name, value in fields.items() if not name.startswith("residual")}
    with torch.random.fork_rng(devices=[]):
        plain = model.plain_class(kind(**fields))
    weights = {name: tensor for name, tensor in model.state_dict().items() if ".residual." not in name}
    plain.load_state_dict(weights, assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    return plain.train(model.training)


def _convert(
    model: PreTrainedModel,
    residual: str,
    settings: Mapping[str, Any],
    source: str,
    *,
    remote: Mapping[str, str] | None = None,
    ignored: Sequence[str] = (),
) -> DepthMixin:
    if isinstance(model, DepthMixin) and model.config.residual == "standard" and not model.config.residual_settings:
        model = _plain(model)
    _check_convertible(model)
    key, probed = _family_key(model)
    config_class, main = CLASSES[key]
    family: Family = main.family
    if not family.normed and settings.get("read_scale") == "mean":
        raise UserError(
            f"read_scale 'mean' was given, and in {family.causal_lm} attention and MLP take the stream with no norm "
            "before them, so that its scale counts: leave read_scale at 'sum'"
        )
    sizes = model.config.get_text_config(decoder=True)
    with torch.device("meta"):
        depth = len(family.sublayers) * cast(int, layer_count(model.config))
        make_residual(residual, depth, sizes.hidden_size, sublayers=family.sublayers, **settings)
    # A copy of every module that shares the tensors; it then becomes an instance of this package's subclass.
    tensors = [*model.parameters(), *model.buffers()]
    new: Any = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    new.__class__ = class_of(type(model), config_class)
    new.config.__class__ = config_class
    new.config.residual, new.config.residual_settings = residual, dict(settings)
    new.config.note_file()
    if probed:
        new.config.residual_family = asdict(family)
        if remote:
            kinds = {"config": "AutoConfig", "causal_lm": "AutoModelForCausalLM"}
            new.config.residual_family["remote"] = {k: remote[auto] for k, auto in kinds.items() if auto in remote}
    stray = stray_settings(type(new.config), vars(new.config))
    if stray and remote:
        raise UserError(
            f"config field '{stray[0]}' is a setting of a residual, and code that comes with this model may read it: "
            "convert a copy in which it has another name"
        )
    # Some configs store the first two themselves, which would lead back to the plain model.
    for name in ("auto_map", "model_type", *stray):
        vars(new.config).pop(name, None)
    # describes how the plain model was loaded; ours is saved in the way of its class
    vars(new).pop("_weight_conversions", None)
    for module in (new, new.base_model):
        vars(module).pop("_pp_plan", None)
    new.attach_residual()
    for module in (new, new.depth_base):
        names = getattr(module, "_keep_in_fp32_modules_strict", None) or ()
        module._keep_in_fp32_modules_strict = {*names, "residual"}
    new.residual.train(model.training)
    new.conversion = _report(model, new, source, probed, ignored)
    return new


def _report(model: PreTrainedModel, new: DepthMixin, source: str, probed: bool, ignored: Sequence[str]) -> Conversion:
    difference = compare_logits(model, new)
    if not difference.within:
        why = "read_scale 'mean' is exact only up to the norms' eps: leave it at 'sum'"
        if new.config.residual_settings.get("read_scale") != "mean":
            why = f"{_why_not_standard(new)}; to train it all the same: attnres train --init-from MODEL --inexact"
        raise UserError(
            f"residual '{new.config.residual}' would change the logits of {source} by {difference.largest:.2g} of "
            f"{difference.scale:.3g}, {difference.relative:.1e} of their scale, where at most {difference.bound:.0e} "
            f"is rounding: {why}"
        )
    dtype = str(model.dtype).removeprefix("torch.")
    with foreign(
        f"{source} runs with depth reads, and not in training mode", "does its code do something else in training?"
    ):
        training = training_difference(model, new)
    # Even models in fp64 compute parts of a pass, such as norms, in fp32.
    bound = 10 * BOUNDS[torch.float32]
    if dtype == difference.arithmetic and training is not None and training > bound:
        raise UserError(
            f"{source} computes something else in training mode with depth reads: its outputs differ by {training:.1e} "
            "of their scale with the same random numbers"
        )
    change = difference.largest
    if dtype != difference.arithmetic:
        inputs = fixed_inputs(model)
        change = (logits(model, inputs).float() - logits(new, inputs).float()).abs().max().item()
    return Conversion(
        source=source,
        out=None,
        family=type(model).__name__,
        model_type=new.config.model_type,
        probed=probed,
        residual=new.config.residual,
        settings=dict(new.config.residual_settings),
        sublayers=new.residual.num_sublayers,
        width=new.residual.width,
        parameters=sum(p.numel() for p in model.parameters()),
        added_parameters=sum(p.numel() for p in new.residual.parameters()),
        dtype=dtype,
        max_difference=difference.largest,
        logit_scale=difference.scale,
        relative_difference=difference.relative,
        bound=difference.bound,
        arithmetic=difference.arithmetic,
        tokens=difference.tokens,
        own_difference=change,
        ignored=tuple(ignored),
        versions={"torch": torch.__version__, "transformers": transformers.__version__},
    )


def _why_not_standard(model: DepthMixin) -> str:
    """Return the reason, as part of a sentence, why a model's residual does not equal the standard one at the start."""
    residual: Residual = model.residual.itself()
    settings = model.config.residual_settings
    if residual.traits.starts_standard and not model.family.normed:
        return "its sublayers take the stream with no norm before them, so that its scale counts"
    if residual.traits.starts_standard:
        return "it starts as the standard residual up to the eps of the norms alone, which is not small here"
    if type(residual).traits.starts_standard:
        changes = settings_text({name: value for name, value in settings.items() if name != "read_scale"})
        return f"with {changes} it is not the standard residual at the start"
    rule = "" if residual.about is None else f", {residual.about.rule},"
    return f"its rule{rule} is not the standard residual at the start"


def _check_convertible(model: Any) -> None:
    if not isinstance(model, PreTrainedModel):
        raise UserError(f"a {type(model).__name__} was given: expected a Transformers model")
    name, config = type(model).__name__, model.config
    if isinstance(model, Depth):
        raise UserError(f"{name} has depth reads already (residual '{config.residual}'): convert the plain model")
    refuse_own_reads(name, getattr(config, "model_type", None))
    if getattr(config, "quantization_config", None) is not None:
        raise UserError(f"{name} has quantised weights: load it dequantised, for example with dtype='bf16'")
    devices = {parameter.device for parameter in model.parameters()} - {torch.device("meta")}
    if len(devices) > 1:
        raise UserError(f"{name} lies on {len(devices)} devices: load it on one, without a device_map")
    for module in model.modules():
        options = getattr(getattr(module, "_gradient_checkpointing_func", None), "keywords", {})
        if getattr(module, "gradient_checkpointing", False) and options.get("use_reentrant"):
            raise UserError(
                f"{name} has reentrant gradient checkpointing, which drops gradients of a depth stream: pass "
                "use_reentrant=False"
            )
    for where, parameter in model.named_parameters():
        if parameter.is_meta:
            raise UserError(
                f"'{where}' of {name} is not in memory (offloaded or on the meta device): load the model whole"
            )
        if parameter.dtype not in DTYPES.values():
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise UserError(f"'{where}' of {name} has dtype {dtype}: expected {', '.join(DTYPES)}")


def _family_key(model: PreTrainedModel) -> tuple[str, bool]:
    """Return the key in `CLASSES` of this model's family, and whether it was probed.

    Every model is probed: a listed family is refused too if its layers do something else in this configuration.
    """
    probed, plain = probe(model), type(model)

    def has(key: str) -> bool:
        config, main = CLASSES[key]
        return type(model.config) in config.__bases__ and main.family.places == probed.places

    listed = next((key for key in FAMILIES if key in CLASSES and has(key)), None)
    if listed is not None:
        return listed, False
    # Whatever this process converted before: a written model must have the same type in every process.
    key = f"{model.config.model_type}_{plain.__name__}".lower()
    if key not in CLASSES:
        register(key, probed, type(model.config), plain)
    elif not has(key):
        raise UserError(
            f"another {plain.__name__}, whose layers are read at other places or whose code is another, was given "
            "depth reads in this process: convert this one in a process of its own"
        )
    return key, True
