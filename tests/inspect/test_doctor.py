"""Each fault is planted in a plain, an attached and a converted model and found there; a healthy model has none."""

import contextlib
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tiny import SIZE
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3Config, Qwen3ForCausalLM

import attnres
from attnres import cli
from attnres.inspect import examine
from attnres.ops.cpu import switched

WIDTH, LAYERS = 16, 2
ATTENTIONS = ("layers.1.self_attn", "model.layers.1.self_attn")
"""Of the second layer, in the models below."""


class Plain(nn.Module):
    """A user's own loop."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.mlps = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2 * LAYERS))
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2 * LAYERS + 1))
        self.depth = attnres.DepthReads(2 * LAYERS, WIDTH, "full", read_scale="sum")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.depth.start(self.embed(ids))
        for mlp, norm in zip(self.mlps, self.norms):
            x = x + mlp(x.read(norm))
        return x.finish(self.norms[-1])


def plain() -> tuple[nn.Module, torch.Tensor]:
    return Plain(), torch.arange(8)[None]


def attached() -> tuple[nn.Module, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
    example = torch.randn(1, 5, WIDTH)
    attnres.attach(model, "full", example=(example,))
    return model, example


def decoder() -> Qwen3ForCausalLM:
    fields = {name: value for name, value in SIZE.items() if name != "family"}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=50, **fields))


def converted() -> tuple[nn.Module, torch.Tensor]:
    return attnres.convert(decoder(), "full"), torch.arange(8)[None]


@pytest.fixture(params=[plain, attached, converted])
def subject(request: pytest.FixtureRequest) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return request.param()


def adamw(model: nn.Module, decay: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=decay)


def names(*given: object) -> set[str]:
    return {finding.name for finding in examine(*given)}  # ty: ignore[invalid-argument-type]


def residual_of(model: nn.Module) -> nn.Module:
    return attnres.inspect.find_residual(model)


def test_a_healthy_model_has_no_fault_and_stays_as_it_was(subject: tuple[nn.Module, torch.Tensor]) -> None:
    model, example = subject
    optimizer = adamw(model, decay=0.1)
    attnres.regroup(optimizer, model)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    modes, state = [part.training for part in model.modules()], torch.get_rng_state()
    assert names(model, optimizer, example) <= {"plain-torch"}  # where no C compiler is
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    assert [part.training for part in model.modules()] == modes and torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


def frozen(model: nn.Module) -> None:
    residual_of(model).requires_grad_(False)


def short(model: nn.Module) -> None:
    for parameter in residual_of(model).parameters():
        parameter.data = parameter.data.bfloat16()  # `.to` keeps them in fp32


def sharp(model: nn.Module) -> None:
    residual = residual_of(model)
    with torch.no_grad():
        for name, parameter in residual.named_parameters():
            parameter.fill_(1e3) if name == "query" else None


@pytest.mark.parametrize(
    ("plant", "name"), [(frozen, "frozen"), (short, "16-bit"), (sharp, "saturated")], ids=lambda one: str(one)[:20]
)
def test_faults_of_parameters(
    subject: tuple[nn.Module, torch.Tensor], plant: Callable[[nn.Module], None], name: str
) -> None:
    model, _ = subject
    assert name not in names(model)
    plant(model)
    assert name in names(model)


class Muon(torch.optim.SGD):
    """Somebody's Muon, by its name."""


def test_faults_of_optimizers(subject: tuple[nn.Module, torch.Tensor]) -> None:
    model, _ = subject
    residual = residual_of(model)
    ours = {id(parameter) for parameter in residual.parameters()}
    others = [parameter for parameter in model.parameters() if id(parameter) not in ours]
    assert names(model, adamw(model, decay=0.1)) >= {"decayed"}
    assert names(model, torch.optim.AdamW(others)) == {"not-optimised"}
    rest = torch.optim.AdamW(others, lr=1e-3)
    assert names(model, [rest, Muon(residual.parameters(), lr=0.02)]) == {"muon"}
    is_converted = getattr(model, "conversion", None) is not None  # whose queries train at the model's rate on purpose
    factor = 1 / getattr(residual, "query_lr", 1.0)
    fast = torch.optim.AdamW(
        [{"params": others}, {"params": list(residual.parameters()), "lr": 1e-3 * factor}], lr=1e-3
    )
    for group in fast.param_groups:
        group["weight_decay"] = 0.0
    assert names(model, fast) == (set() if is_converted else {"full-rate"})


def test_a_read_that_is_detached_has_no_gradient(subject: tuple[nn.Module, torch.Tensor]) -> None:
    model, example = subject
    sublayer = next(part for name, part in model.named_modules() if name in ("mlps.2", *ATTENTIONS))
    sublayer.register_forward_pre_hook(
        lambda _, args, kwargs: _pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs)),
        with_kwargs=True,
    )
    (finding,) = (one for one in examine(model, None, example) if one.name == "no-gradient")
    assert "attention 1" in finding.found and "mlp" not in finding.found


def test_what_somebody_put_in_place_of_start_runs_and_stays(subject: tuple[nn.Module, torch.Tensor]) -> None:
    model, example = subject
    residual, seen = residual_of(model), []
    start = residual.start

    def watched(embedding: torch.Tensor) -> object:
        seen.append(embedding.shape)
        return start(embedding)

    residual.start = watched
    assert names(model, None, example) <= {"plain-torch"}
    assert residual.start is watched and len(seen) >= 1


def test_faults_of_the_stream(subject: tuple[nn.Module, torch.Tensor]) -> None:
    model, example = subject
    with switched(False):
        assert "plain-torch" in names(model, None, example)
    example = example.half() if example.is_floating_point() else example
    assert "stream-dtype" in names(model.half(), None, example)


def test_layers_that_nothing_reads_are_told(subject: tuple[nn.Module, torch.Tensor]) -> None:
    model, example = subject
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("proj.weight"):
                parameter.mul_(10.0)  # Transformers starts them small
            elif name.endswith("query"):
                parameter.normal_(std=1e-3)
    assert "unread" not in names(model, None, example)
    residual = residual_of(model)
    ours = {id(parameter) for parameter in residual.parameters()}
    with torch.no_grad():
        for parameter in model.parameters():  # what sublayers put out, beside an embedding that stays
            if id(parameter) not in ours and parameter.shape[0] == residual.width:
                parameter.mul_(1e-4)
    assert "unread" in names(model, None, example)


def test_a_sum_that_chooses_nothing_has_no_unread_layers() -> None:
    model = attnres.build(SIZE, "standard", vocab_size=50)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "mlp" in name:
                parameter.mul_(1e-2)
    assert not names(model, None, torch.arange(8)[None])


def attached_decoder() -> tuple[nn.Module, torch.Tensor]:
    model, example = decoder(), torch.arange(8)[None]
    attnres.attach(model.model, "full", example=(example,))
    return model, example


@pytest.mark.parametrize("make", [converted, attached_decoder])
def test_a_tie_that_the_config_does_not_name(make: Callable[[], tuple[nn.Module, torch.Tensor]]) -> None:
    model: Any = make()[0]
    assert not names(model)
    model.config.tie_word_embeddings = not model.config.tie_word_embeddings
    assert names(model) & {"tied", "untied"}


@pytest.mark.parametrize("make", [converted, attached_decoder])
def test_checkpointing_that_recomputes_nothing_or_is_reentrant(
    make: Callable[[], tuple[nn.Module, torch.Tensor]],
) -> None:
    model, example = make()
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    asked = {"input_ids": example, "use_cache": False}
    flagged = [part for part in model.modules() if getattr(part, "gradient_checkpointing", False)]
    assert not names(model, None, asked) & {"no-recompute", "reentrant"}
    for part in flagged:
        part._gradient_checkpointing_func = lambda function, *args, **kwargs: function(*args, **kwargs)
    assert "no-recompute" in names(model, None, asked)
    for part in flagged:
        part._gradient_checkpointing_func = partial(checkpoint, use_reentrant=True)
    assert "reentrant" in names(model, None, asked)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of torch's compiler itself
def test_a_break_of_the_graph_and_what_is_not_compiled_for_it() -> None:
    def found(model: nn.Module, example: torch.Tensor) -> set[str]:
        torch._dynamo.reset()
        return names(torch.compile(model, backend="eager"), None, example) & {"graph-break", "not-compiled"}

    model, example = plain()
    assert not found(model, example)
    model.get_submodule("mlps.1").register_forward_hook(lambda *_: torch._dynamo.graph_break())
    assert found(model, example) == {"graph-break", "not-compiled"}


@pytest.mark.parametrize("make", [plain, attached])
def test_a_flag_or_wrapper_of_checkpointing_that_nothing_follows(
    make: Callable[[], tuple[nn.Module, torch.Tensor]],
) -> None:
    model, example = make()
    model.grad_checkpointing = True
    assert "no-recompute" in names(model, None, example)
    model.grad_checkpointing = False
    apply_activation_checkpointing(model, check_fn=lambda part: isinstance(part, nn.Linear))
    assert "no-recompute" not in names(model, None, example)


def test_the_command_tells_and_exits_with_one(
    tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        "import attnres, torch\n"
        "from torch import nn\n"
        "def make():\n"
        "    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)\n"
        "    model = nn.TransformerEncoder(layer, 2, nn.LayerNorm(16), enable_nested_tensor=False)\n"
        "    attnres.attach(model, 'full', layers='layers')\n"
        "    return model, torch.optim.AdamW(model.parameters(), weight_decay=0.1)\n"
        "def wrong():\n"
        "    return 3\n"
    )
    with pytest.raises(SystemExit) as status:
        cli.main(["doctor", f"{tmp_path / 'mine.py'}:make", "--json"])
    assert status.value.code == 1
    assert "decayed" in [finding["name"] for finding in json.loads(capsys.readouterr().out)]
    for entry in ("mine.py:wrong", "mine.py:nothing", "other.py:make"):
        with pytest.raises(SystemExit) as status:
            cli.main(["doctor", str(tmp_path / entry)])
        assert status.value.code == 2


def test_a_folder_without_depth_reads_is_refused(folders, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as status:
        cli.main(["doctor", str(folders["plain"])])
    assert status.value.code == 2 and "no residual" in capsys.readouterr().err


def test_a_saved_model_is_examined_by_a_pass(folders, capsys: pytest.CaptureFixture[str]) -> None:
    found = examine(attnres.load(str(folders["block"])), None, {"input_ids": (torch.arange(64) * 7 % 50)[None]})
    with contextlib.suppress(SystemExit):
        cli.main(["doctor", str(folders["block"]), "--json"])
    assert {one["name"] for one in json.loads(capsys.readouterr().out)} <= {one.name for one in found} | {"unread"}
