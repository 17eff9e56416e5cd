"""Look inside a trained model: where its tokens read from, and what happens when one of those paths is cut.

make demo                                   trains the models
python examples/look_inside.py              opens the Block model; or: python examples/look_inside.py MODEL
"""

import sys

import torch

import attnres
from attnres.inspect import KnockOut, attribute, effect
from attnres.inspect.measures import depth_distance, effective_number
from attnres.models import open_checkpoint

TEXT = """def area(shape):
    if shape.kind == "circle":
        return math.pi * shape.radius ** 2
    return shape.width * shape.height
"""


def main(model: str = "runs/demo/block-seed0", text: str = TEXT) -> None:
    checkpoint = open_checkpoint(model)
    tokenizer, net = checkpoint.tokenizer, checkpoint.load()
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    pieces = [tokenizer.decode([token]) for token in ids[0].tolist()]

    # 1. Record what one forward pass does; no logit changes.
    with attnres.record(net, tokens=True) as trace, torch.no_grad():
        net(input_ids=ids)
    distance, effective = depth_distance(trace.mixing), effective_number(trace.entropy)
    print("read           sources  effective  distance  heaviest source, mean weight")
    for row, (read, names, weights) in enumerate(zip(trace.reads, trace.sources, trace.weights)):
        weight, best = max(zip(weights, names))
        print(f"{read:14} {len(names):7}  {effective[row]:9.2f}  {distance[row]:8.2f}  {best} {weight:.2f}")

    # 2. Token by token: which predictions still read the embedding itself?
    share = trace.token_weights[-1][0, :, trace.sources[-1].index("embedding")]
    for position in sorted(range(len(pieces)), key=lambda t: -share[t])[:5]:
        print(
            f"output read, embedding's weight {share[position]:.2f} (mean {share.mean():.2f}) at {pieces[position]!r}"
        )

    # 3. Cut it: no read after layer 1 sees the embedding.
    change = effect(net, ids, KnockOut("embedding", reads=range(4, len(trace.reads))))
    print(f"without the embedding after layer 1: {change.difference:+.3f} ± {change.error:.3f} nats per token")

    # 4. Which edges does the last prediction depend on? Measured by removing each, and estimated by one gradient.
    found = attribute(net, ids)
    for edge in found.top(5):
        print(f"{edge.read} <- {edge.source}: {edge.knockout:+.3f} removed, {edge.gradient:+.3f} by gradient")
    print(f"rank correlation of both over {found.agreement.edges} edges: {found.agreement.spearman:.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
