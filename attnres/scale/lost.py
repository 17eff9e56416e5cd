"""What messages between processes say when one of these is gone."""

import torch.distributed as dist

WORDS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Timed out waiting",
    "remote process exited",
    "NCCL communicator was aborted",
    "failed to recv",
    "failed to send",
)
"""Of gloo, NCCL and torch's store, whose errors have no class of their own."""


def is_loss(error: BaseException | None) -> bool:
    """Return whether an error, or one that it wraps or comes from, is that another process is gone."""
    looked_at = set[int]()
    left = [error]
    while left:
        one = left.pop()
        if one is None or id(one) in looked_at:
            continue
        looked_at.add(id(one))
        if isinstance(one, dist.DistNetworkError) or any(word in str(one) for word in WORDS):
            return True
        wrapped = getattr(one, "failures", None)  # of a checkpoint's: by rank, each with its traceback
        left += [one.__cause__, one.__context__, *(pair[0] for pair in (wrapped or {}).values())]
    return False
