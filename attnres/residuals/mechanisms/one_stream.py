"""What rules of one running stream share: each sublayer reads the stream as it is, and so does the head."""

from torch import Tensor

from attnres.residuals.base import NormLike, Residual, State


class OneStream(Residual):
    """The state is the stream x, (..., d). A rule says what `write` makes of it; reads and the head take N(x)."""

    def start(self, embedding: Tensor) -> State:
        return embedding

    def read(self, state: State, index: int, norm: NormLike) -> tuple[Tensor, State]:
        return self.normed(state, index, norm), state

    def hidden_state(self, state: State) -> Tensor:
        return state

    def finish(self, state: State, norm: NormLike) -> Tensor:
        return self.normed(state, self.num_sublayers, norm)
