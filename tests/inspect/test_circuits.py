"""Attribution graphs: links against difference quotients and passes without a part, and as Neuronpedia reads them."""

import json

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import repeat_kv

from attnres import UserError
from attnres.inspect import Ablate, Steer, circuit, intervene, read_vectors
from attnres.inspect.circuits import Link, pruned

TEXT, TARGET, RIVAL = [5, 9, 7, 30, 12], 8, 3
EDIT = Ablate("embedding", reads="mlp 1")


def value(model, *edits):
    with torch.no_grad(), intervene(model, EDIT, *edits):
        last = model(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0, -1].double()
    return (last[TARGET] - last[RIVAL]).item()


@pytest.fixture(scope="module", params=["block", "full"])
def model(request, make_model):
    return make_model(request.param).double()


@pytest.fixture(scope="module")
def graph(model):
    return circuit(model, TEXT, target=TARGET, against=RIVAL, edits=[EDIT], most=6, batch_size=4)


def links_of_depth(graph):
    return [link for link in graph.links if link.source[0] == link.target[0] and link.source[1] < link.target[1]]


def test_links_of_depth_are_what_taking_a_part_out_of_an_input_does(model, graph):
    """To first order by a difference quotient, the largest by a whole pass; blocks are taken apart by their weights."""
    with intervene(model, EDIT):
        vectors = read_vectors(model, TEXT)
    before = value(model)
    assert graph.before == pytest.approx(before, abs=1e-6)
    depth = links_of_depth(graph)
    assert sum(link.measured is not None for link in depth) == 6
    for number, link in enumerate(depth[:40:3] if len(depth) > 40 else depth):
        (token, output), (_, place) = link[:2]
        read = place - 1
        source = next(i for i, one in enumerate(vectors.layout[read].sources) if output in one.span)
        part = vectors.weights[read][token, source] * vectors.outputs[output][token]
        h, name = vectors.reads[read][token], vectors.layout[read].name
        if link.measured is not None:
            gone = value(model, Steer(-part, reads=name, tokens=token)) - before
            assert link.measured == pytest.approx(gone, abs=1e-5), number
        if (h - part).norm() < 1e-3 * h.norm():  # nothing else is read
            assert abs(link.estimate) < 1e-3
            continue
        step = (h.norm() / (h - part).norm()) * (h - part) - h
        ends = [value(model, Steer(size * step, reads=name, tokens=token)) for size in (1e-4, -1e-4)]
        assert link.estimate == pytest.approx((ends[0] - ends[1]) / 2e-4, rel=1e-2, abs=1e-4), number


def test_links_between_tokens_are_what_not_attending_does(model, graph):
    """By a difference quotient along the weights without one token, renormalised, in one attention of all heads."""
    asked = {}

    def attention(module, query, key, values, mask, scaling, dropout=0.0, **options):
        key, values = (repeat_kv(one, module.num_key_value_groups) for one in (key, values))
        weights = (query @ key.mT * scaling).masked_fill(torch.ones(5, 5).tril() == 0, -torch.inf).softmax(-1)
        if module.layer_idx == asked.get("layer"):
            rest = weights[:, :, asked["t"]].clone()
            rest[:, :, asked["u"]] = 0
            rest = rest / rest.sum(-1, keepdim=True)
            weights = weights.clone()
            weights[:, :, asked["t"]] += asked["size"] * (rest - weights[:, :, asked["t"]])
        return (weights @ values).transpose(1, 2).contiguous(), weights

    ALL_ATTENTION_FUNCTIONS.register("probe", attention)
    implementation = model.config._attn_implementation
    model.set_attn_implementation("probe")
    between = [link for link in graph.links if link.source[0] != link.target[0]]
    assert graph.attends and between
    try:
        for link in between[::3]:
            (u, place), (t, same) = link[:2]
            assert u < t and place == same and graph.places[place].endswith("attention")
            ends = []
            for size in (1e-4, -1e-4):
                asked.update(layer=(place - 1) // 2, t=t, u=u, size=size)
                ends.append(value(model))
            assert link.estimate == pytest.approx((ends[0] - ends[1]) / 2e-4, rel=1e-2, abs=1e-5)
    finally:
        model.set_attn_implementation(implementation)


def test_a_pruned_graph_leads_to_the_output():
    links = [
        Link((0, 0), (0, 1), 0.3, None),
        Link((0, 1), (1, 1), 0.5, 0.1),
        Link((1, 1), (1, 2), -0.4, None),
        Link((1, 0), (1, 2), 0.2, 0.35),
    ]
    assert pruned(links, (1, 2), 0.0) == links
    assert pruned(links, (1, 2), 0.2) == links[2:], "what leads to it is too small by its measured effect"
    assert pruned(links, (1, 2), 0.5) == []


NODE = {"node_id": str, "feature": int, "layer": str, "ctx_idx": int, "feature_type": str, "jsNodeId": str}
NODE |= {"clerp": str, "influence": float}


def test_it_is_a_graph_of_neuronpedias(graph):
    """The fields that its schema requires (apps/webapp/app/api/graph/graph-schema.json of hijohnnylin/neuronpedia),
    with their types; links end in nodes, and the output is one of them."""
    stored = json.loads(json.dumps(graph.neuronpedia(0.01, model="mine", slug="one"), allow_nan=False))
    assert set(stored) == {"metadata", "qParams", "nodes", "links"}
    about = stored["metadata"]
    assert (about["scan"], about["slug"]) == ("mine", "one") and about["prompt"] == "".join(about["prompt_tokens"])
    assert len(about["prompt_tokens"]) == len(TEXT)
    for node in stored["nodes"]:
        assert all(isinstance(node[name], kind) for name, kind in NODE.items()), node
        assert 0 <= node["ctx_idx"] < len(TEXT) and 0 <= node["influence"] <= 1 + 1e-9
    ids = [node["node_id"] for node in stored["nodes"]]
    assert len(set(ids)) == len(ids)
    assert [node["feature"] for node in stored["nodes"] if node["feature_type"] == "logit"] == [TARGET]
    assert {end for link in stored["links"] for end in (link["source"], link["target"])} <= set(ids)
    assert len(stored["links"]) == len(graph.pruned(0.01))
    assert all(isinstance(link["weight"], float) for link in stored["links"])
    assert len(graph.neuronpedia(1e9)["nodes"]) == 1


def test_what_has_no_graph_says_why(make_model, model):
    with pytest.raises(UserError, match="deepnorm"):
        circuit(make_model("deepnorm"), TEXT)
    with pytest.raises(UserError, match="give circuit the edits"), intervene(model, EDIT):
        circuit(model, TEXT)
