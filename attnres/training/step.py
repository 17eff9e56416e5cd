"""Take a training step, from top to bottom: batch, learning rates, forward, loss, backward, clipping, optimizers,
numbers.

`Steps` takes the steps of a run and reads their results. `Update` is the part that changes a model; comparisons and
benchmarks, which have no run, time it too.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnres.errors import UserError
from attnres.training import graphs
from attnres.training.balance import Balancer
from attnres.training.config import TrainConfig
from attnres.training.feed import Arriving, Feed, Moment, Numbers, to_device
from attnres.training.inspection import magnitudes, recorded
from attnres.training.interrupt import Signals
from attnres.training.layout import PlacedModel
from attnres.training.optim import scheduled_rate, set_learning_rate
from attnres.training.prepare import sees_all_depths
from attnres.training.records import RunState

UNTIMED = 3
"""Steps at the start of a run or of its resumption that are not timed: they warm caches and compile."""
TIMED = 1000
"""Number of steps whose times are kept for the medians of the summary."""


class Steps:
    """The steps of a run, and the results of the last one.

    Args:
        run_state: the run's position; a step advances it.
        folder_is_away: returns whether the run's folder was removed or renamed.
        diverged: returns the error for (step, loss, norm) that are not finite.

    Attributes:
        loss, norm, learning_rate: values of the last step whose numbers were read.
        divergence: the KL divergence to the teacher in that step; 0 without a teacher.
        penalty: the penalty of the last step.
        signalled: 130 or 143 once any process got a signal to stop.
        folder_was_away: whether the folder was removed or renamed at any step.
    """

    def __init__(
        self,
        config: TrainConfig,
        update: "Update",
        feed: Feed,
        run_state: RunState,
        folder_is_away: Callable[[], bool],
        diverged: Callable[[int, float, float], UserError],
    ) -> None:
        self.config, self.update, self.feed, self.run_state = config, update, feed, run_state
        self.folder_is_away, self.diverged = folder_is_away, diverged
        self.placed, self.who = update.placed, update.placed.who
        self.arriving = Arriving(self.who.device)
        self.loss = self.learning_rate = self.norm = self.divergence = 0.0
        self.penalty: Tensor | None = None
        self.signalled, self.folder_was_away = 0, False
        # The step that captures a graph takes seconds; it follows the warm-up.
        self.untimed = UNTIMED if update.capture is None else max(UNTIMED, graphs.WARM_UP + 1)

    def take(self, signals: Signals) -> None:
        """Take one step.

        Raises:
            UserError: the loss or the gradient is not finite. On a CPU no parameter has changed by then. On a GPU the
                numbers are read one step later, but before anything is saved.
        """
        config, who, update, step = self.config, self.who, self.update, self.run_state.step + 1
        began = Moment.now(who.device)

        # Batch and rates. A batch depends on (seed, step) alone, so that a resumed run needs no position.
        x, y = self.feed.at(step - 1)
        factor = scheduled_rate(step, config.steps, config.optim)  # as a fraction of each group's peak learning rate
        set_learning_rate(update.optimizers, factor)
        residual = self.placed.model.residual
        residual("set_progress", step / config.steps)  # before the forward pass: mechanisms may anneal by it
        with torch.no_grad():
            self.penalty = residual("penalty")  # for the log; `Update` adds it to the loss, which is logged without it

        # Forward, loss, backward, clipping.
        every = config.depth_every if sees_all_depths(config.parallel) else 0
        record = bool(every) and (step % every == 0 or step == config.steps)
        sums, norm = update.gradients(x, y, record=record)

        # One message carries everything on which processes have to agree, and one copy brings it to the host. `read`
        # takes it apart: loss, divergence, interrupts, terminations, folder away, norm.
        counts = to_device([signals.interrupts, signals.terminations, int(self.folder_is_away())], sums)
        shared = who.sum(torch.cat([sums / self.placed.shares, counts]))
        self.arriving.numbers.append((step, Numbers(torch.cat([shared, norm.to(shared)[None]]))))
        if not self.arriving.behind:
            self.read()  # raises before the optimizers use a gradient that is not finite

        # Optimizers.
        update.apply()

        self.run_state.step, self.learning_rate = step, factor * config.optim.lr
        self.arriving.moments.append((began, Moment.now(who.device), update.depth is None))
        self.read(to_come=self.arriving.behind)

    def read(self, to_come: int = 0) -> None:
        """Read the loss, norm, signals and time of all steps except the last `to_come`. Waits for the device."""
        run_state = self.run_state
        for step, numbers in self.arriving.steps(to_come=to_come):
            self.loss, self.divergence, interrupts, terminations, away, self.norm = numbers
            if not (math.isfinite(self.loss) and math.isfinite(self.norm)):
                raise self.who.same(self.diverged(step, self.loss, self.norm))
            run_state.losses.append(self.loss)
            self.folder_was_away = self.folder_was_away or bool(away)
            self.signalled = 130 if interrupts else 143 if terminations else 0
        for seconds, usual in self.arriving.times(to_come=to_come):
            run_state.last_s = seconds
            if self.untimed:
                self.untimed -= 1
            elif usual:  # a step whose magnitudes were recorded takes longer than the others
                run_state.times = [*run_state.times[1 - TIMED :], seconds]


class Update:
    """Updates a model from a batch: the gradient of its mean loss, clipped, then the optimizers.

    Args:
        placed: the model on the processes of the run.
        clip: the largest norm of the gradient; 0 turns clipping off.
        penalty: returns the term added to the loss once a step, with a gradient, or None.
        capture: whether to capture the passes as CUDA graphs. If that is impossible, steps are eager and `path` says
            why.
        balancer: updates the biases of routers after a step; None keeps them.

    Attributes:
        depth: magnitudes by depth of the last step, if they were recorded.
    """

    def __init__(
        self,
        placed: PlacedModel,
        optimizers: list[torch.optim.Optimizer],
        clip: float,
        penalty: Callable[[], Tensor | None],
        *,
        capture: bool = False,
        balancer: Balancer | None = None,
    ) -> None:
        self.placed, self.optimizers, self.penalty = placed, optimizers, penalty
        self.balancer = balancer
        self.clip = partial(placed.clip, clip or math.inf)
        self.depth: dict[str, Any] | None = None
        self.capture = self._capture() if capture else None
        self.replayed: graphs.Passes | None = None

    def gradients(self, x: Tensor, y: Tensor, *, record: bool = False) -> tuple[Tensor, Tensor]:
        """Compute the clipped gradient of a batch.

        Args:
            x, y: this process's part of the batch, (B, T) int64.
            record: record magnitudes by depth in the last micro-batch. Its hooks read numbers, so such a step is eager.

        Returns:
            [cross-entropy, divergence] in nats a token, fp64, of this process's part, whichever of them the objective
            minimises; and the norm of the gradient before clipping.
        """
        self.depth = self.replayed = None
        capture, count = self.capture, self.placed.layout.accumulation
        if capture is not None and not record:
            self.replayed = capture.ready(x, y)
        if self.replayed is not None:
            return self.replayed(x.chunk(count), y.chunk(count))
        with nullcontext() if capture is None else capture.eager():
            sums = self.placed.gradients(x, y, partial(self._micro_batch, record))
            return sums, self.clip()

    def _micro_batch(self, record: bool, x: Tensor, y: Tensor, tokens: int, last: bool) -> Tensor:
        """Add a micro-batch's gradients; return its cross-entropy and divergence over `tokens`.

        A pipeline does not call it: `PipelinedModel.gradients` runs its own pass, so a new term of the loss goes there
        too.
        """
        objective = self.placed.objective
        assert objective is not None
        with recorded(self.placed.model) if record and last else nullcontext() as trace:  # None if not recorded
            # torch.compile would recompile for the hooks of a recorded pass, so such a pass is eager.
            sums = objective(x, y, eager=trace is not None)
            # Divided by all tokens of this process's part of the step, not the micro-batch's, so that each token weighs
            # the same.
            loss = sums.objective / tokens
            if last and (penalty := self.penalty()) is not None:
                loss = loss + penalty / self.placed.summed  # once a step; processes of tp and cp sum its gradients
            loss.backward()  # in the last micro-batch DDP averages over the processes here
        if trace:
            # Times the number of micro-batches, which gives gradients of the recorded micro-batch's mean loss.
            self.depth = magnitudes(trace, self.placed.model, tokens // y.numel())
        return torch.stack([sums.cross_entropy, sums.divergence]).double() / tokens

    def apply(self) -> None:
        """Let the optimizers step with the present gradients."""
        if self.replayed is not None:
            assert self.capture is not None
            self.capture.step(self.replayed, self.optimizers)  # no zero_grad: graphs overwrite gradients in place
        else:
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        if self.balancer is not None:
            self.balancer.update()

    def _capture(self) -> graphs.Capture:
        placed, who = self.placed, self.placed.who
        # a plain model has no residual
        residual = placed.model.residual("itself") if hasattr(placed.model, "residual") else None
        reason = graphs.why_not(who.device, residual, processes=who.world_size)
        parameters = [parameter for _, parameter in placed.named_parameters()]
        count = placed.layout.accumulation
        return graphs.Capture(partial(self._micro_batch, False), self.clip, parameters, count=count, reason=reason)

    @property
    def path(self) -> str:
        """Return how steps are executed: "eager", "captured", or "eager" and why they are not captured."""
        return "eager" if self.capture is None else self.capture.path
