"""A text cut into windows for perplexity, in the two ways that tables use.

    non-overlapping  windows of W tokens, each seen alone; the first token of each has no context and is not scored
    sliding          windows of W tokens that begin S tokens after each other; every token but the text's first is
                     scored once, in the first window that holds it: after window one with W - S tokens or more before

The second is Transformers' "perplexity of fixed-length models", the first the same with S = W. Published tables mean
one or the other; neither is lm-eval's perplexity per word. A tokenizer that puts a token in front of a text (Llama's,
Gemma's) puts it in front of every window here, where it takes one of the W places; then no token goes unscored.
"""

from collections.abc import Sequence

from attnres.evals.scoring import Request


def windows(ids: Sequence[int], width: int, stride: int, bos: Sequence[int] = ()) -> list[Request]:
    """Requests that score each token of `ids` (that can be) once, in order; `stride` = `width` does not overlap.

    >>> [(list(r.context), list(r.continuation)) for r in windows(range(6), width=4, stride=4)]
    [([0], [1, 2, 3]), ([4], [5])]
    >>> [(list(r.context), list(r.continuation)) for r in windows(range(6), width=4, stride=2)]
    [([0], [1, 2, 3]), ([2, 3], [4, 5])]
    """
    room = width - len(bos)
    # A stride of the whole width leaves no token in common, with or without a token in front.
    step = min(stride, room)
    requests, scored = [], 0
    for begin in range(0, len(ids), step):
        end = min(begin + room, len(ids))
        start = max(scored, begin + (0 if bos else 1))
        if start < end:
            requests.append(Request([*bos, *ids[begin:start]], list(ids[start:end])))
        scored = end
        if end == len(ids):
            break
    return requests
