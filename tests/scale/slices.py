"""A model in slices, held against the same model in this one process: for the launches of this folder."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.distributed import DistributedConfig

from attnres.head import token_losses
from attnres.models import build
from attnres.residuals.mechanisms.depth_attention import DepthState
from attnres.residuals.mechanisms.streams import Streams
from attnres.scale.context import share_out_tokens
from attnres.scale.tensor import share_out_layers
from attnres.streams.stream import Stream

SIZE = {"family": "qwen3", "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 4}
SIZE |= {"num_key_value_heads": 4, "intermediate_size": 24}
WORDS, TOKENS = 31, 7  # which neither 2 nor 4 divides


def model_of(case: dict[str, Any], positions: int = 64) -> Any:
    """A model in fp64 whose residual has left its start values."""
    size, settings = {**SIZE, **case.get("size", {})}, case.get("settings", {})
    model = build(size, case["residual"], vocab_size=WORDS, max_positions=positions, settings=settings).double()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.residual.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw).to(parameter) * 0.2)
    return model.train()


def vectors_at_the_head(model: Any, ids: torch.Tensor) -> float:
    """Vectors a token of the whole pass that this rank's stream has before the head's read."""
    count: list[int] = []

    def look(norm: Any, args: Any) -> None:
        if isinstance(args[0], Stream):  # and not what a norm that is called apart is given by the read
            state = args[0].state
            if isinstance(state, DepthState):  # queries are parameters', and the same on every rank
                state = state._replace(shared=type(state.shared)())
            if isinstance(state, Streams):  # and so are the tables
                state = state._replace(tables=())
            count.append(sum(tensor.numel() for tensor in tree_leaves([state, args[0].output])))

    handle = model.model.norm.register_forward_pre_hook(look)
    model(input_ids=ids, use_cache=False)
    handle.remove()
    return count[0] / (ids.numel() * model.config.hidden_size)


def run_slices(case: dict[str, Any]) -> dict[str, Any]:
    """Largest differences of logits, gradients (relative), chunked prefill and decoding; vectors a token.

    `case["tokens"]`: of tokens alone (context parallelism), where there is no prefill.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole, model = (model_of(case) for _ in range(2))
    slices = (share_out_tokens if case.get("tokens") else share_out_layers)(model, mesh)
    draw = torch.Generator().manual_seed(5)
    x, y = (torch.randint(WORDS, (2, TOKENS), generator=draw) for _ in "xy")
    wanted = whole(input_ids=x, use_cache=False).logits
    token_losses(wanted, y).sum().backward()
    logits = model(input_ids=x, use_cache=False).logits
    token_losses(logits, slices.of(y)).sum().backward()
    errors: dict[str, Any] = {"logits": (logits - slices.of(wanted)).abs().max().item(), "gradient": 0.0}
    theirs = dict(whole.named_parameters())
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            gradient = parameter.grad.full_tensor()
        else:
            gradient = parameter.grad
            dist.all_reduce(gradient)
        scale = theirs[name].grad.abs().max().clamp_min(1e-30)
        errors["gradient"] = max(errors["gradient"], ((gradient - theirs[name].grad).abs().max() / scale).item())

    ids = torch.randint(WORDS, (2, 21), generator=draw)
    errors["vectors"] = [vectors_at_the_head(one, ids[:, :20]) for one in (whole, model)]
    if case.get("tokens"):
        return errors
    reader = model_of(case)
    share_out_layers(reader, mesh, whole_output=True)
    with torch.no_grad():
        wanted, cache = whole(input_ids=ids, use_cache=False).logits, DynamicCache(config=reader.config)
        parts = [reader(input_ids=part, past_key_values=cache).logits for part in ids.split([9, 10, 1, 1], 1)]
        errors["prefill"] = (torch.cat(parts, 1) - wanted).abs().max().item()
        words = [one.generate(ids, max_new_tokens=4, do_sample=False).tolist() for one in (whole, reader)]
    return {**errors, "generated": words[0] == words[1], "heads": cache.layers[0].keys.shape[1]}


def run_long_prompt(tokens: int) -> dict[str, Any]:
    """A prompt of many tokens in fp32, read whole and in 64 chunks: vectors a token of one process and of a model in
    slices, largest differences of logits."""
    case = {"residual": "block", "settings": {"block_size": 2}, "size": {"num_hidden_layers": 2}}
    whole, reader = (model_of(case, positions=tokens).float().eval() for _ in range(2))
    share_out_layers(reader, init_device_mesh("cpu", (dist.get_world_size(),)), whole_output=True)
    ids = torch.randint(WORDS, (1, tokens), generator=torch.Generator().manual_seed(4))
    vectors = [vectors_at_the_head(one, ids) for one in (whole, reader)]  # without gradients they are in a bank
    with torch.no_grad():
        wanted = whole(input_ids=ids, use_cache=False).logits
        errors = {"whole": (reader(input_ids=ids, use_cache=False).logits - wanted).abs().max().item()}
        cache, of_chunks = DynamicCache(config=reader.config), []
        for part in ids.chunk(64, 1):
            of_chunks.append(reader(input_ids=part, past_key_values=cache).logits)
    return {**errors, "chunks": (torch.cat(of_chunks, 1) - wanted).abs().max().item(), "vectors": vectors}


def run_plan(folder: Path) -> dict[str, float]:
    """Transformers' own `tp_plan="auto"` on our classes: largest difference of logits in fp32 and of generated words.

    All ranks see `folder`.
    """
    model = model_of({"residual": "block", "settings": {"block_size": 3}}).float()
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    sliced = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_plan="auto"))
    ids = torch.randint(WORDS, (2, 8), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        ours, theirs = (one(input_ids=ids).logits for one in (sliced, model))
        words = [one.generate(ids, max_new_tokens=3, do_sample=False) for one in (sliced, model)]
    whole = ours.full_tensor() if isinstance(ours, DTensor) else ours
    return {"logits": (whole - theirs).abs().max().item(), "words": (words[0] - words[1]).abs().max().item()}
