"""The rate that queries and gains carry, the precision they stay in, and groups of other people's optimizers."""

import copy

import pytest
import torch
from torch import nn

import attnres
from attnres import DepthReads, Norm, UserError, make_residual
from attnres.inspect import examine
from attnres.residuals import settings_of
from attnres.residuals.check.subject import stir
from attnres.training.config import OptimConfig
from attnres.training.optim import build_optimizers

WIDTH, SUBLAYERS = 16, 6
QUERIED = [name for name in attnres.RESIDUALS if "query_lr" in settings_of(name) and name != "compose"]


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def output(residual, embedding):
    """Run fixed sublayers with a residual."""
    state = residual.start(embedding)
    for index in range(residual.num_sublayers):
        x, state = residual.read(state, index, Norm())
        state = residual.write(state, index, torch.tanh(x @ drawn(WIDTH, WIDTH, seed=index) / 2))
    return residual.finish(state, Norm())


def loss(residual):
    return (output(residual, drawn(5, WIDTH)) * drawn(5, WIDTH, seed=99)).sum()


def test_mechanisms_whose_queries_train_slowly_have_the_setting():
    assert [name for name, mechanism in attnres.RESIDUALS.items() if "query" in mechanism.slow] == QUERIED
    assert {"full", "block", "boundary", "delta_attnres"} < set(QUERIED)


@pytest.mark.parametrize("name", QUERIED)
@pytest.mark.parametrize("settings", [{}, {"query": "input"}], ids=str)
def test_the_function_stays_and_adam_moves_queries_and_gains_at_a_tenth(name, settings):
    if settings.keys() - settings_of(name).keys():
        pytest.skip("has no such setting")
    usual = make_residual(name, SUBLAYERS, WIDTH, **settings).double()
    stir(usual)
    stored = copy.deepcopy(usual)
    stored.set_query_lr(0.1)
    torch.testing.assert_close(output(stored, drawn(5, WIDTH)), output(usual, drawn(5, WIDTH)), rtol=1e-9, atol=1e-9)
    slow = [p for path, p in usual.named_parameters() if path in usual.slow]
    rest = [p for path, p in usual.named_parameters() if path not in usual.slow]
    groups = [group for group in ({"params": slow, "lr": 0.01}, {"params": rest}) if group["params"]]
    pairs = [
        (usual, torch.optim.Adam(groups, lr=0.1, eps=1e-10)),
        (stored, torch.optim.Adam(stored.parameters(), lr=0.1, eps=1e-10)),
    ]
    for _ in range(5):
        for residual, optimizer in pairs:
            optimizer.zero_grad()
            loss(residual).backward()
            optimizer.step()
    torch.testing.assert_close(stored.queries, usual.query, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(stored.gains, usual.gain, rtol=1e-5, atol=2e-6)
    assert not torch.equal(usual.gain, torch.ones_like(usual.gain))


def test_start_values_are_those_of_the_whole_rate():
    one, tenth = (make_residual("full", 4, 8, query_std=0.5, query_lr=rate) for rate in (1.0, 0.1))
    for residual in (one, tenth):
        torch.manual_seed(0)
        residual.reset_parameters()
    torch.testing.assert_close(tenth.queries, one.queries)
    assert torch.equal(tenth.gains, torch.ones(5, 8)) and torch.equal(one.gain, torch.ones(5, 8))


def test_a_start_on_the_meta_device():
    with torch.device("meta"):
        residual = make_residual("full", 4, 8, query_lr=0.1)
    residual.to_empty(device="cpu").reset_parameters()
    assert torch.equal(residual.gains, torch.ones(5, 8)) and not residual.queries.any()
    assert residual.state_dict()["query_scale"].item() == pytest.approx(0.1)


@pytest.mark.parametrize("before, after", [(1.0, 0.1), (0.1, 1.0), (0.1, 0.5), (0.1, 0.1)])
def test_checkpoints_load_at_any_rate(before, after):
    source = make_residual("block", SUBLAYERS, WIDTH, query_lr=before, query="input").double()
    stir(source)
    target = make_residual("block", SUBLAYERS, WIDTH, query_lr=after, query="input").double()
    state = source.state_dict()
    assert set(state) == {"query", "gain", "weighting.query_weight"} | ({"query_scale"} if before != 1.0 else set())
    target.load_state_dict(state)
    assert torch.equal(state["query"], source.query)  # the caller's tensors are left alone
    torch.testing.assert_close(output(target, drawn(5, WIDTH)), output(source, drawn(5, WIDTH)))


def test_a_tenth_is_the_default_of_depth_reads_and_attach_and_not_of_others():
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, 2, 32, norm_first=True, batch_first=True),
        3,
        nn.LayerNorm(WIDTH),
        enable_nested_tensor=False,
    )
    assert attnres.attach(encoder, "block").query_lr == 0.1
    assert DepthReads(SUBLAYERS, WIDTH, "full").residual.query_lr == 0.1
    assert make_residual("full", SUBLAYERS, WIDTH).query_lr == 1.0 == settings_of("full")["query_lr"]
    # a large temperature slows the logits down already
    assert DepthReads(SUBLAYERS, WIDTH, "full", read_temperature="sqrt_width").residual.query_lr == 1.0
    DepthReads(SUBLAYERS, WIDTH, "mhc")  # has no queries, and says nothing
    with pytest.raises(UserError, match="query_lr"):
        make_residual("mhc", SUBLAYERS, WIDTH, query_lr=0.1)
    with pytest.raises(UserError, match="query_lr is 0"):
        make_residual("full", SUBLAYERS, WIDTH, query_lr=0)


class Model(nn.Module):
    """A matrix, a vector and depth reads."""

    def __init__(self, query_lr=1.0, **settings):
        super().__init__()
        self.matrix, self.vector = nn.Parameter(torch.ones(4, WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.residual = make_residual("block", SUBLAYERS, WIDTH, query_lr=query_lr, **settings)


@pytest.mark.parametrize("query_lr", [1.0, 0.1])
@pytest.mark.parametrize("residual_lr", [None, 0.03])
def test_exactly_one_rule_slows_queries_in_our_own_loop(query_lr, residual_lr):
    config = OptimConfig(lr=0.5, residual_lr=residual_lr)
    (optimizer,) = build_optimizers(Model(query_lr), config)
    (group,) = [group for group in optimizer.param_groups if group["kind"] == "read"]
    assert group["lr"] * query_lr == pytest.approx(0.05 if residual_lr is None else residual_lr)


def rates(optimizer, model):
    """Name -> the rate and decay that moves what a read uses."""
    names = {id(p): name for name, p in model.named_parameters()}
    found = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            name = names[id(p)]
            slow = name.removeprefix("residual.") in model.residual.slow
            carried = model.residual.query_lr if slow else 1.0
            found[name] = pytest.approx(float(group["lr"]) * carried), group["weight_decay"]
    return found


OPTIONS = {
    "foreach": {"lr": 0.5},
    "fused": {"lr": 0.5, "fused": True},
    "a tensor": {"lr": torch.tensor(0.5), "foreach": False},
}


@pytest.mark.parametrize("query_lr", [1.0, 0.1])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_regroup_slows_queries_once_and_decays_nothing(query_lr, options):
    model = Model(query_lr, gate="scalar")

    def adamw():
        matrices, vectors = [[p for p in model.parameters() if (p.dim() >= 2) == wide] for wide in (True, False)]
        return torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": vectors}], weight_decay=0.2, **options
        )

    optimizer = adamw()
    attnres.regroup(optimizer, model)
    expected = {
        "matrix": (0.5, 0.1),
        "vector": (0.5, 0.2),
        "residual.query": (0.05, 0.0),
        "residual.gain": (0.05, 0.0),
        "residual.gates.gate": (0.5, 0.0),
    }
    assert rates(optimizer, model) == expected
    attnres.regroup(optimizer, model)
    assert rates(optimizer, model) == expected and len(optimizer.param_groups) == 4
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    resumed = adamw()
    attnres.regroup(resumed, model)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    attnres.regroup(resumed, model)
    assert rates(resumed, model) == expected and len(resumed.param_groups) == 4
    assert resumed.state[model.residual.query]["step"] == 1
    old = adamw()  # of a checkpoint that was saved before anybody regrouped
    old.step()
    late = adamw()
    late.load_state_dict(old.state_dict())
    attnres.regroup(late, model)
    assert rates(late, model) == expected and late.state[model.residual.query]["step"] == 1


@pytest.mark.parametrize("query_lr", [1.0, 0.1])
@pytest.mark.parametrize("whose", ["our loop", "somebody"])
def test_a_tenth_that_somebody_gave_is_no_hundredth(query_lr, whose):
    model = Model(query_lr, gate="scalar")
    reads = [p for p in model.residual.parameters() if p.dim() == 2]
    if whose == "our loop":
        (optimizer,) = build_optimizers(model, OptimConfig(lr=0.5))
    else:
        ids = {id(p) for p in reads}
        rest = [p for p in model.parameters() if id(p) not in ids]
        optimizer = torch.optim.AdamW([{"params": rest}, {"params": reads, "lr": 0.05}], lr=0.5, weight_decay=0.1)
        assert ("slowed-twice" in {one.name for one in examine(model, optimizer)}) == (query_lr == 0.1)
    attnres.regroup(optimizer, model)
    moved = rates(optimizer, model)
    assert moved["residual.query"] == moved["residual.gain"] == (0.05, 0.0)
    assert moved["residual.gates.gate"] == (0.5, 0.0) and moved["matrix"][0] == 0.5
    assert not {one.name for one in examine(model, optimizer)}


@pytest.mark.parametrize("fields", [{"kind": "adamw"}, {"use_muon": False}, {"fallback_lr_scale": 1.0}], ids=str)
def test_an_optimizer_of_both_kinds_takes_queries_for_adam(fields):
    class MuonAndAdam(torch.optim.AdamW):
        pass

    model = nn.Module()
    model.residual = attnres.make_residual("full", 4, 8)
    made = MuonAndAdam([{"params": list(model.parameters()), "weight_decay": 0.5, **fields}], lr=1.0)
    attnres.regroup(made, model)
    for parameter in (model.residual.query, model.residual.gain):
        (group,) = (one for one in made.param_groups if any(p is parameter for p in one["params"]))
        assert group["weight_decay"] == 0 and not group.get("use_muon", False)
        assert group["lr"] == pytest.approx(0.1 / model.residual.query_lr)


def test_queries_leave_muon():
    model = Model()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    muon, adamw = torch.optim.Muon(matrices, lr=0.5), torch.optim.AdamW([model.vector], lr=0.2)
    with pytest.raises(UserError, match=r"Muon has queries.*\[muon, adamw\]"):
        attnres.regroup(muon, model)
    attnres.regroup([muon, adamw], model)
    assert [p for group in muon.param_groups for p in group["params"]] == [model.matrix]
    assert rates(adamw, model)["residual.query"] == (pytest.approx(0.02), 0.0)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    muon.step(), adamw.step()


def test_an_optimizer_without_the_reads_or_with_a_scheduler_is_told():
    model = Model()
    with pytest.raises(UserError, match=r"'residual\.query'"):
        attnres.regroup(torch.optim.SGD([model.matrix], lr=0.1), model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with pytest.raises(UserError, match="scheduler"):
        attnres.regroup(optimizer, model)


@pytest.mark.parametrize("cast", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.bfloat16()])
def test_queries_and_gains_stay_in_fp32(cast):
    model = cast(Model(0.1, gate="scalar"))
    assert model.matrix.element_size() == 2
    assert {p.dtype for p in model.residual.state_dict().values()} == {torch.float32}
    assert Model().double().residual.query.dtype == torch.float64
    embedding = torch.ones(2, WIDTH, dtype=model.matrix.dtype)
    x, _ = model.residual.read(model.residual.start(embedding), 0, Norm())
    assert x.dtype == embedding.dtype
    with torch.autocast("cpu", dtype=torch.bfloat16):
        state = model.residual.write(model.residual.start(embedding), 0, embedding)
        model.residual.read(state, 1, Norm())[0].sum().backward()
    assert model.residual.query.grad.dtype == torch.float32
