"""Passes without gradients, whose sources lie in a bank, against the general path: the same numbers, whoever runs."""

import copy
import gc
import pickle
import threading

import pytest
import torch
from sample_mechanisms import crossed
from tiny import SIZE, stir

from attnres import UserError
from attnres.models import build
from attnres.ops import backend, cpu, dispatch, eager
from attnres.ops.bank import KEPT, Bank, Banks, Program
from attnres.ops.cpu import CpuBank
from attnres.residuals import RESIDUALS, make_residual
from attnres.residuals.program import _program, why_no_bank
from attnres.streams.banked import BankStream, start_stream

pytestmark = pytest.mark.skipif(cpu.load() is None, reason="no C compiler: the CPU kernels cannot be built")

GPT2 = {"family": "gpt2", "n_embd": 32, "n_layer": 3, "n_head": 4}
VOCAB = 61
CASES = [
    ("standard", {}, SIZE),
    ("block", {"block_size": 2}, SIZE),
    ("block", {"block_size": "1+4+1", "read_scale": "sum"}, SIZE),
    ("block", {"num_blocks": 2, "value_residual": "layer"}, SIZE),
    ("block", {"num_blocks": 3, "read_temperature": 2.0}, GPT2),
    ("block", {"block_size": 4, "summaries": "split"}, SIZE),
    ("full", {}, GPT2),
    ("full", {"window": 2}, SIZE),
    ("cumulative", {"block_size": 2}, SIZE),
    ("cumulative", {"block_size": 5}, GPT2),
    ("boundary", {"block_size": 2}, SIZE),
    ("boundary", {"num_blocks": 1}, GPT2),
]
cases = pytest.mark.parametrize(("residual", "settings", "size"), CASES)


def make(residual="block", settings=None, size=SIZE, dtype=torch.float32):
    settings = {"block_size": 2} if settings is None else settings
    model = build(size, residual, vocab_size=VOCAB, max_positions=64, seed=0, settings=settings).eval()
    stir(model.residual, 0.5, seed=7)
    model.to(dtype)
    model.residual.float()
    return model


def draw(batch, length):
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(length))


@torch.no_grad()
def in_bank(model, ids, **options):
    """Logits, and that a bank was taken for them."""
    waiting = model.residual.banks._waiting
    waiting.clear()
    logits = model(input_ids=ids, **{"use_cache": False, **options}).logits
    assert len(waiting) == 1
    return logits


@torch.no_grad()
def in_general(model, ids):
    """Logits of the general path, which hidden states ask for."""
    model.residual.banks._waiting.clear()
    logits = model(input_ids=ids, use_cache=False, output_hidden_states=True).logits
    assert not model.residual.banks._waiting
    return logits


def close(ours, general):
    tolerance = 2e-5 if ours.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours, general, rtol=0, atol=tolerance * general.abs().amax().item())


@cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bank_of_any_backend_gives_what_the_general_path_gives(residual, settings, size, dtype, monkeypatch):
    """Here of plain torch's: the bank of devices without one of their own."""
    row = dispatch.KERNELS["cpu"]._replace(load=lambda: eager, why_not=lambda call: None, bank=Bank)
    monkeypatch.setitem(dispatch.KERNELS, "cpu", row)
    model = make(residual, settings, size, dtype)
    for ids in (draw(2, 7), draw(1, 3)):
        close(in_bank(model, ids), in_general(model, ids))
    in_bank(model, draw(1, 3))
    (bank,) = model.residual.banks._waiting
    assert type(bank) is Bank and not bank._rows


@cases
def test_a_bank_of_a_stream_under_autocast_stores_finished_sources_in_bf16(residual, settings, size, monkeypatch):
    """As the general path does on devices whose kernels are narrow; the sums in progress keep the stream's dtype."""
    row = dispatch.KERNELS["cpu"]._replace(load=lambda: eager, why_not=lambda call: None, bank=Bank, narrow=True)
    monkeypatch.setitem(dispatch.KERNELS, "cpu", row)
    model, rounded = make(residual, settings, size), residual in ("block", "full")
    with torch.autocast("cpu", torch.bfloat16):
        for ids in (draw(2, 7), draw(2, 7)):  # the second pass has the first one's memory
            ours, general = in_bank(model, ids), in_general(model, ids)
            torch.testing.assert_close(ours, general, rtol=0, atol=1e-2 * general.abs().amax().item())
        in_bank(model, ids)
        assert model.residual.explain(torch.zeros(2, 7, 32), training=False).path == "bank"
    (bank,) = model.residual.banks._waiting
    assert bank.dtype == torch.float32
    assert bank.stored == (torch.bfloat16 if rounded else torch.float32)
    for row, (memory, _) in bank._sums.items():
        sealed = bank.program.sealed is not None and row in bank.program.sealed
        assert memory.dtype == (bank.stored if sealed else bank.dtype)
    in_bank(model, ids)  # without autocast the pass takes another bank
    (other,) = model.residual.banks._waiting
    assert other is not bank and other.stored == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@cases
def test_logits_are_those_of_the_general_path(residual, settings, size, dtype, monkeypatch):
    model = make(residual, settings, size, dtype)
    for batch, length, cached in ((1, 1, 0), (3, 1, 0), (2, 21, 0), (2, 21, 1 << 20)):
        monkeypatch.setattr(backend, "CACHED", cached)  # 0: phase 1 wherever it moves less
        ids = draw(batch, length)
        close(in_bank(model, ids), in_general(model, ids))


@cases
def test_cached_decoding_is_a_whole_pass(residual, settings, size):
    model, ids = make(residual, settings, size), draw(2, 9)
    expected, cache = in_general(model, ids), None
    with torch.no_grad():
        for start, stop in ((0, 4), (4, 5), (5, 6), (6, 9)):
            out = model(input_ids=ids[:, start:stop], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            close(out.logits, expected[:, start:stop])


@cases
def test_memory_that_is_not_needed_any_more_may_hold_anything(residual, settings, size, monkeypatch):
    """What a read does not need is poisoned before it: a source that shares its memory would be gone."""
    monkeypatch.setattr(backend, "CACHED", 0)
    model, ids = make(residual, settings, size), draw(2, 7)
    expected, read = in_bank(model, ids), CpuBank.read

    def poisoned(bank):
        program, index = bank.program, bank.index
        if index == 0:
            for memory in (bank.sums, bank._outputs, bank._scratch):
                memory.fill_(torch.nan)
        needed = {row for step in program.steps[index:] for row in (*step.rows, step.before)}
        for row, memory in zip(program.sums, bank.sums, strict=True):
            if row not in needed:
                memory.fill_(torch.nan)
        x = read(bank)
        assert not any(x.data_ptr() == memory.data_ptr() for memory in bank.sums)
        return x

    monkeypatch.setattr(CpuBank, "read", poisoned)
    assert torch.equal(in_bank(model, ids), expected)


@pytest.mark.parametrize("name", crossed())
@pytest.mark.parametrize("depth", [1, 2, 6, 11])
def test_rows_hold_the_sums_that_the_layout_names(name, depth):
    """A program run on sets of outputs in place of vectors: what a read finds in its rows is what its sources are."""
    residual = make_residual(name, depth, 16)
    reason = why_no_bank(residual, torch.zeros(1, 16), training=False)
    if reason is not None:
        assert name in reason
        return
    reads, program = residual.bank_reads(), residual.program
    rows = {0: (None, {0})}
    for index, (step, sources) in enumerate(zip(program.steps, reads.sources, strict=True)):
        if index:
            after, outputs = (None, set()) if step.before is None else rows[step.before]
            assert step.before is None or step.target in program.sums
            rows[step.target] = (after, outputs | {index})
        assert [rows[row] for row in step.rows] == [(source.after, set(source.span)) for source in sources]
        if step.keeps is not None:
            rows[step.keeps] = (index, set())
        for row in step.done:
            del rows[row]
    if name != "standard":  # whose stream is one source, the sum of those that its layout names
        assert tuple(map(tuple, reads.sources)) == tuple(read.sources for read in residual.layout())


def test_interleaved_passes_and_threads_share_no_bank():
    model = make()
    prompts = [draw(1, length) for length in (3, 4, 3, 4)]
    expected = [in_bank(model, ids) for ids in prompts]
    norms = [layer.get_submodule(path) for layer in model.depth_layers for path in model.family.reads]
    outputs = torch.randn(2, len(norms), 1, 1, 32, generator=torch.Generator().manual_seed(1))

    def run(streams, number):
        reads = []
        for norm, *written in zip(norms, *outputs[: len(streams)], strict=True):
            reads += [norm(stream) for stream in streams]
            streams = [stream + output for stream, output in zip(streams, written, strict=True)]
        return [*reads, *(model.model.norm(stream) for stream in streams)][number :: len(streams)]

    with torch.no_grad():
        alone = run([start_stream(model.residual, torch.ones(1, 1, 32))], 0)
        both = run([start_stream(model.residual, torch.ones(1, 1, 32)) for _ in range(2)], 0)
    assert all(torch.equal(a, b) for a, b in zip(alone, both, strict=True))
    wrong = []

    def repeat(ids, logits):
        with torch.no_grad():
            wrong.extend(not torch.equal(model(input_ids=ids, use_cache=False).logits, logits) for _ in range(20))

    threads = [threading.Thread(target=repeat, args=pair) for pair in zip(prompts, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 80 and not any(wrong)


def test_a_bank_is_used_again_and_a_large_one_is_given_back(monkeypatch):
    model = make()
    in_bank(model, draw(1, 5))
    (bank,) = model.residual.banks._waiting
    with torch.no_grad():
        model(input_ids=draw(1, 5), use_cache=False)
    assert model.residual.banks._waiting == [bank] and bank.nbytes < KEPT
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError), torch.no_grad():
        patch.setattr(model.depth_layers[1].mlp, "forward", lambda x: 1 / 0)
        model(input_ids=draw(1, 5), use_cache=False)
    assert model.residual.banks._waiting == []  # a pass that failed keeps its bank, and nobody else has it
    monkeypatch.setattr("attnres.ops.bank.KEPT", 10)
    with torch.no_grad():
        model(input_ids=draw(1, 5), use_cache=False)
    assert model.residual.banks._waiting == []


@pytest.mark.long
def test_no_more_than_a_bound_is_held_after_a_pass_whatever_its_length(monkeypatch):
    """Storages of tensors that the residual still holds, by the garbage collector's list of what there is."""
    model = make()
    monkeypatch.setattr("attnres.ops.bank.KEPT", 1 << 16)

    def held():
        storages = {}
        for one in gc.get_objects():
            # isinstance asks the object, and some warn when asked; a fake tensor of a trace has no bytes
            if type(one) in (torch.Tensor, torch.nn.Parameter):
                storage = one.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        return sum(storages.values())

    model(input_ids=draw(1, 1), use_cache=False)
    gc.collect()
    before = held()
    with torch.no_grad():
        for batch, tokens in ((1, 1), (1, 40), (2, 60), (1, 1), (40, 60), (1, 1)):
            model(input_ids=draw(batch, tokens), use_cache=False)
            gc.collect()
            assert held() - before <= (1 << 16) + (1 << 12)  # and what a bank has besides its vectors
    assert [bank.tokens for bank in model.residual.banks._waiting] == [1]


def test_copies_and_pickles_have_banks_of_their_own():
    model, ids = make(), draw(2, 5)
    expected = in_bank(model, ids)
    for reloaded in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert reloaded.residual.banks is not model.residual.banks
        assert torch.equal(in_bank(reloaded, ids), expected)
    assert isinstance(copy.copy(Banks()), Banks)


def test_what_changes_between_two_passes_is_what_the_second_one_has():
    model, ids = make(), draw(2, 5)
    before = in_bank(model, ids)
    norm = model.depth_layers[1].input_layernorm

    def changed():
        nonlocal before
        logits = in_bank(model, ids)
        close(logits, in_general(model, ids))
        assert logits.dtype != before.dtype or not torch.equal(logits, before)
        before = logits

    with torch.no_grad():
        norm.weight.mul_(3)  # in place
        changed()
        norm.weight.data = norm.weight.data * 3  # other memory
        changed()
        norm.weight = torch.nn.Parameter(norm.weight / 5)
        changed()
        norm.variance_epsilon = 10.0
        changed()
        norm.weight = torch.nn.Parameter(torch.linspace(1, 9, 64)[::2])  # strided: the kernels read a copy
        changed()
        norm.weight.mul_(3)
        changed()
        model.residual.query.add_(1.0)
        changed()
        model.model.residual = make_residual("block", 6, 32, block_size=3)
        changed()
        with torch.autocast("cpu", torch.bfloat16):
            changed()
        model.bfloat16()
        model.residual.float()
        changed()


def test_only_the_latest_stream_of_a_pass_can_be_asked():
    model, embedding = make(), torch.randn(1, 2, 32)
    norm = model.depth_layers[0].input_layernorm
    with torch.no_grad():
        stream = start_stream(model.residual, embedding)
        assert isinstance(stream, BankStream) and stream.shape == embedding.shape
        with pytest.raises(UserError, match="wrote before it read"):
            stream + embedding
        assert torch.equal(norm(stream), norm(stream))
        later = embedding + stream
        with pytest.raises(RuntimeError, match=r"before sublayer 0 cannot be asked.*output_hidden_states"):
            norm(stream)
        with pytest.raises(RuntimeError, match="before sublayer 0 cannot be asked"):
            stream + embedding
        with pytest.raises(RuntimeError, match="before sublayer 1 cannot be asked"):
            later.hidden_state()
        norm(later)
        with pytest.raises(RuntimeError, match=r"gave a Tensor of shape \(1, 3, 32\).*expected \(1, 2, 32\)"):
            later + torch.randn(1, 3, 32)
        with pytest.raises(RuntimeError, match="requires_grad=True"):
            later + torch.randn(1, 2, 32).requires_grad_()
        with pytest.raises(RuntimeError, match="before sublayer 1 cannot be asked"):
            torch.mul(embedding, later)
        with pytest.raises(RuntimeError, match="before sublayer 1 cannot be asked"):
            later.written()


def test_a_pass_whose_layers_have_hooks_takes_no_bank():
    """What a hook adds goes to the layer's output, which a bank would have summed already."""
    model, ids = make(), draw(2, 5)
    expected = in_bank(model, ids)
    calls = []
    handle = model.depth_layers[1].register_forward_hook(lambda *pass_: calls.append(pass_[-1].hidden_state()))
    model.residual.banks._waiting.clear()
    with torch.no_grad():
        close(model(input_ids=ids, use_cache=False).logits, expected)
    assert not model.residual.banks._waiting and len(calls) == 1
    handle.remove()
    in_general(model, ids)  # leaves Transformers' own hooks on the layers
    assert torch.equal(in_bank(model, ids), expected)


@torch.no_grad()
def test_one_rule_says_who_takes_a_bank_and_explain_says_it(monkeypatch):
    embedding, model = torch.zeros(1, 1, 32), make()

    def why(residual, like=embedding, training=False):
        plan = residual.explain(like, training=training)
        assert (plan.path == "bank") == (why_no_bank(residual, like, training=training) is None)
        return str(plan)

    assert "one pass in a bank on the C kernels" in why(model.residual)
    assert "gradients are on" in why(model.residual, training=True)
    monkeypatch.setattr(backend, "CACHED", 0)
    assert "two phases in a bank" in why(make_residual("block", 12, 32, block_size=4))
    model.residual.observer = object()
    assert "an observer or an editor watches" in why(model.residual)
    model.residual.observer, model.residual.editor = None, object()
    assert "an observer or an editor watches" in why(model.residual)
    model.residual.editor = None
    handle = model.residual.register_forward_hook(lambda *_: None)
    assert "the residual has hooks" in why(model.residual)
    handle.remove()
    assert why_no_bank(model.residual, embedding, training=False) is None
    assert "no kernel has gates" in why(make_residual("block", 6, 32, gate="scalar"))
    assert "has a mix of its own" in why(make_residual("boundary_normed", 6, 32))
    assert "streams" in why(make_residual("mhc", 6, 32))
    assert "made in plain torch" in why(make_residual("denseformer", 6, 32))
    assert "float64" in why(model.residual, embedding.double())
    assert "width 24" in why(make_residual("full", 6, 24), torch.zeros(1, 24))

    class Doubled(RESIDUALS["block"]):
        def read(self, state, index, norm):
            x, state = super().read(state, index, norm)
            return 2 * x, state

    assert "has a read of its own" in why(Doubled(6, 32))


def test_autocast_to_fp16_takes_no_bank():
    """Its norms put out fp16, for which the kernels have no code: they wrote fp32 into a buffer of half the size."""
    model = build(SIZE, "block", vocab_size=64, settings={"block_size": 3}).eval()
    ids = torch.arange(50)[None]
    expected = model(input_ids=ids, use_cache=False).logits
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        logits = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(logits.float(), expected, rtol=0, atol=0.02)


def test_queries_of_another_dtype_or_layout_are_read_as_what_they_are():
    model = build(SIZE, "full", vocab_size=64).eval()
    torch.nn.init.normal_(model.residual.query, std=0.5)
    ids = torch.arange(9)[None]
    expected = model(input_ids=ids, use_cache=False).logits.detach()
    for change in (lambda p: p.t().contiguous().t(), lambda p: p.double()):
        for parameter in (model.residual.query, model.residual.gain):
            parameter.data = change(parameter.data)
        with torch.no_grad():
            torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64, "meta"])
def test_the_memory_is_what_the_kernels_write_whatever_is_usual(default, monkeypatch):
    """Numbers in fp32 on this CPU, also where torch makes others by default."""
    monkeypatch.setattr(backend, "CACHED", 0)
    program = _program(make_residual("block", 12, 32, block_size=4))
    assert isinstance(program, Program)
    before = torch.get_default_dtype()
    try:
        if default == "meta":
            torch.set_default_device("meta")
        else:
            torch.set_default_dtype(default)
        bank = CpuBank(program, 3, 32, torch.bfloat16, torch.bfloat16, cpu)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(before)
    memory = [bank._outputs, bank._tops, bank._totals, bank._scratch, bank._zeros]
    assert {(one.dtype, one.device.type) for one in memory} == {(torch.float32, "cpu")}
    assert bank.sums.device.type == "cpu" and bank._outputs.numel()
