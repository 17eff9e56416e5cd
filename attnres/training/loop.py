"""One training run, from a configuration to a folder with its model, its metrics and its summary.

Read `train` for the order of things and `Run.step` for what an update is. The same code serves one process and
several under `torchrun`: each takes its share of every batch, and the first one writes the files.
"""

import dataclasses
import functools
import math
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attnres.errors import Interrupted, UserError
from attnres.files import copy_files, locked, replaced_folder, write_json, write_text
from attnres.models.checkpointing import checkpoint_activations
from attnres.models.flops import forward_flops, peak_flops, step_flops
from attnres.models.snapshot import tensors_of, write_snapshot
from attnres.progress import STEPS, Bars
from attnres.reading import read_json
from attnres.stats import or_none, standard_error
from attnres.training import arithmetic, checkpoint, distill, environment, regimes, start, validate
from attnres.training.config import TrainConfig, check, resolve, to_dict
from attnres.training.data import data_record, open_data
from attnres.training.device import tune
from attnres.training.feed import Feed, Moment, Numbers, to_device
from attnres.training.inside import write_inside
from attnres.training.interrupt import Signals, caught_signals
from attnres.training.layout import collected, layout_for
from attnres.training.metrics import Metrics, Tracker, import_tracker
from attnres.training.objective import Objective, loss_kind
from attnres.training.optim import kinds, optimizers_of, set_learning_rate
from attnres.training.parallel import Processes, join_processes, losses_said
from attnres.training.past import Past, past_of
from attnres.training.run_folder import claim, forget_after, free_beside, same_data
from attnres.training.schedule import fraction_of_peak, residual_fraction

UNTIMED = 3
"""Steps at the start of a run or of its resumption that are not timed: they warm caches and compile."""
TIMED = 1000
"""Steps kept for the medians of the summary."""


def train(config: TrainConfig, *, progress: bool = True) -> dict[str, Any]:
    """Carry out a run, or what is left of it, and return its summary (the content of summary.json).

    Raises:
        UserError: the configuration cannot run, the folder is taken, the loss diverged, a file cannot be written.
        Interrupted: Ctrl-C or SIGTERM; the checkpoint is saved, `code` is the exit status.
    """
    config = start.settle(resolve(config))
    who = join_processes(config.device)
    with who.alike():
        check(config, who.world_size)
    dtype = config.dtype if config.dtype != "auto" else ("bf16" if environment.has_bf16(who.device) else "fp32")
    config = dataclasses.replace(config, dtype=dtype, device=who.device.type)
    if config.track != "none" and who.first:
        import_tracker(config.track)
    going_on = f"give the same command with --resume to go on from the last checkpoint in {config.out}"
    with losses_said(who, going_on), _claimed(config, who) as (finished, in_place):
        if finished is not None:
            return finished
        run = Run(config, who, progress=progress and who.first, in_place=in_place)
        with closing(run), run.arithmetic(), caught_signals() as signals:
            with run.bars:
                run.begin()
                while run.past.step < config.steps:
                    run.step(signals)
                    run.measure()
                    done = run.past.step == config.steps
                    if (
                        run.past.step % config.save_every == 0
                        or run.past.step in config.keep_at
                        or run.signalled
                        or run.gone
                        or done
                    ):
                        run.save()
                    if run.gone and not done:
                        raise run.taken_away()
                    if run.signalled and not done:
                        raise Interrupted(
                            f"stopped at step {run.past.step} of {config.steps}, saved in "
                            f"{run.folder / 'checkpoint'}: give the same command with --resume to continue",
                            run.signalled,
                        )
            summary = run.finish()
            if run.gone:
                raise run.taken_away()
            return summary


@contextmanager
def _claimed(config: TrainConfig, who: Processes) -> Generator[tuple[dict[str, Any] | None, Callable[[], bool]]]:
    """The run's folder, kept from other runs meanwhile; gives the summary if the run is finished already, and a
    function that says whether the folder is still there."""
    with ExitStack() as stack:
        in_place = _always

        def claimed() -> dict[str, Any] | None:
            nonlocal in_place
            finished = claim(_folder(config), to_dict(config), resume=config.resume)
            if finished is None:
                in_place = stack.enter_context(locked(_folder(config)))
                # And once more, should another process have been there.
                finished = claim(_folder(config), to_dict(config), resume=config.resume)
            return finished

        yield who.of_first(claimed), lambda: in_place()


class Run:
    """A run in progress: the model, its optimizers, its data and what has been measured."""

    def __init__(
        self, config: TrainConfig, who: Processes, *, progress: bool, in_place: Callable[[], bool] | None = None
    ):
        """Prepare the data, build the model or load it from the checkpoint, open the metrics.

        `in_place` says whether the folder is still there: somebody may rename or remove it.
        """
        self.in_place = in_place or _always
        self.away, self.gone = False, None  # whether the folder was taken away, and which it was
        self.config, self.who, self.folder = config, who, _folder(config)
        with who.alike():
            self.layout = layout_for(config, who)
        self.past = Past()
        self.saved: int | None = None  # step of the last checkpoint
        self.saving: checkpoint.Saving | None = None  # one that may still be written
        self.loss = self.rate = self.norm = self.divergence = 0.0  # of the last step
        self.penalty: torch.Tensor | None = None  # of the last step
        self.depth: dict[str, Any] | None = None  # of the last step, if measured
        self.signalled, self.warming = 0, UNTIMED
        self.behind = who.device.type == "cuda"  # numbers are read a step later, so that the device need not wait
        self.unread: deque[tuple[int, Numbers]] = deque()  # of the last steps
        self.untimed: deque[tuple[Moment, Moment, bool]] = deque()  # when they began and ended; whether that counts
        self.prepared, self.batches, self.windows = open_data(config, who, progress=progress)
        self.record = data_record(self.prepared, self.windows)
        self.data = {name: value for name, value in self.record.items() if name != "windows_sha256"}
        here = self.folder / "checkpoint"
        state = who.of_first(lambda: self._saved_state(here))
        environment.reset_peak_memory(who.device)
        self._make_model(here, state)
        self.beside = start.kept_files(config, self.prepared)  # once: a model of the hub or a disk may be gone later
        taught = 0.0 if self.teacher is None else forward_flops(self.teacher.model, config.data.seq_len)
        self.flops = step_flops(self.model, config.data.seq_len) + taught  # a token
        peak = peak_flops(who.device, config.dtype)
        self.peak = None if peak is None else peak * who.world_size  # a second
        groups = kinds(self.model)  # of the whole model: a stage has no embedding beside its head to tell by
        objective = Objective(self.model, self.kind, self.cast, self.teacher, compiled=config.compile)
        with who.alike():
            self.model = self.layout.place(objective)
        _seed(config.seed + who.rank)  # after building, which may draw more for one residual than another
        self.optimizers = optimizers_of(dict(self.layout.named_parameters()), groups, config.optim)
        if state:
            self._restore(here, state)
        recorded = (state or {}).get("arithmetic") or {}
        width = self.model.residual("itself").width
        self.arithmetic = partial(arithmetic.kept, recorded, who, width, different=config.allow_different)
        with who.alike(), self.arithmetic():
            pass  # what cannot be kept is refused before a file is changed
        self.metrics: Metrics | None = None
        if who.first:
            self._open_folder(self.past.step if state else -1)
        name = config.name or ""
        self.bars = Bars(STEPS, shown=progress)
        self.bar = self.bars.add(name, config.steps, self.past.step)
        if state:
            self.bars.say(f"{name}: resumed at step {self.past.step} of {config.steps}")
        share = {"rank": self.layout.rank, "world_size": self.layout.shares}
        self.feed = Feed(self.batches, who.device, **share, steps=config.steps)
        self.since = time.perf_counter()

    # -------------------------------------------------------------- what it begins with

    def _make_model(self, here: Path, state: dict[str, Any] | None) -> None:
        """Build the model or load it from the checkpoint `here`, on its device, with what is trained of it."""
        config, who = self.config, self.who
        with who.alike():
            if state:
                self.model = checkpoint.load_model(here, state)
                self.start = read_json(self.folder / "start.json") if config.finetune.init_from is not None else None
            else:
                self.model, self.start = start.first_model(config, self.prepared)
        self.teacher = distill.load_teacher(config, self.start or {}, who.device)
        regimes.choose_trained(self.model, config.finetune, config.seed)
        if state:
            checkpoint.load_adapter(here, state, self.model)
        self.model = self.model.to(who.device).train()
        tune(self.model, who.device, config.data.seq_len)
        checkpoint_activations(self.model, config.gradient_checkpointing)
        self.kind = loss_kind(config.loss, self.model, self._rows() * config.data.seq_len, self.teacher)

    def _restore(self, here: Path, state: dict[str, Any]) -> None:
        """Go on from the checkpoint `here`: what was measured, the optimizers, the random numbers of this process."""
        who = self.who
        self.past, self.saved = checkpoint.as_saved(here, lambda: past_of(state)), state["step"]
        with who.alike():
            checkpoint.restore(here, state, self.layout, self.optimizers)
        if who.rank < len(state["random"]):  # with more processes than before the new ones start from the seed
            numbers = state["random"][who.rank]
            checkpoint.as_saved(here, lambda: checkpoint.set_random_state(numbers, who.device))

    # -------------------------------------------------------------- one step

    def begin(self) -> None:
        """Before the first step: what the residual starts from and, of a pretrained model, the held-out loss."""
        if self.past.step == 0:
            self._snapshot()
            if self.start is not None:
                self._validate()

    def step(self, signals: Signals) -> None:
        """One update: the mean loss over all tokens of the batch, its gradient, clipping, the optimizers.

        A residual's penalty is added to what is minimised, once, and to no loss that is reported.
        With accumulation and several processes each token still weighs the same: every micro-batch's summed loss is
        divided by the tokens of the whole batch. A loss or gradient that is not finite raises UserError: before it
        changes a parameter or, `behind`, a step later, but before it is saved.
        """
        config, who, step = self.config, self.who, self.past.step + 1
        began = Moment.now(who.device)
        x, y = self.feed.at(step - 1)
        rate = fraction_of_peak(
            step,
            config.steps,
            schedule=config.optim.schedule,
            warmup=config.optim.warmup,
            decay=config.optim.decay,
            floor=config.optim.min_lr_ratio,
        )
        optim = config.optim
        share = residual_fraction(step, config.steps, hold=optim.residual_hold, warmup=optim.residual_warmup)
        set_learning_rate(self.optimizers, rate, share)
        self.model.residual("set_progress", step / config.steps)

        by_depth = bool(config.depth_every) and (step % config.depth_every == 0 or step == config.steps)
        with torch.no_grad():
            self.penalty = self.model.residual("penalty")
        self.depth = None
        sums = self.layout.gradients(x, y, functools.partial(self._backward, by_depth))
        limit = config.optim.clip or math.inf
        norm = self.layout.clip(limit)
        away = self.metrics is not None and not (self.in_place() and self.metrics.in_place())
        counts = to_device([signals.interrupts, signals.terminations, int(away)], sums)
        shared = who.sum(torch.cat([sums / self.layout.shares, counts]))
        self.unread.append((step, Numbers(torch.cat([shared, norm.to(shared)[None]]))))
        if not self.behind:
            self._read()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        self.past.step, self.rate = step, rate * config.optim.lr
        self.untimed.append((began, Moment.now(who.device), self.depth is None))
        self._read(leave=1)

    def _read(self, leave: int = 0) -> None:
        """Take what the last steps gave, but for the last `leave`: loss, norm, signals and, once it is over, time."""
        while len(self.unread) > leave:
            step, numbers = self.unread.popleft()
            self.loss, self.divergence, interrupts, terminations, away, self.norm = numbers.read()
            if not (math.isfinite(self.loss) and math.isfinite(self.norm)):
                raise self._diverged(step, self.loss, self.norm)
            self.past.losses.append(self.loss)
            self.away = self.away or bool(away)
            self.signalled = 130 if interrupts else 143 if terminations else 0
        while len(self.untimed) > (leave if self.behind else 0):
            began, ended, counts = self.untimed.popleft()
            self.past.last_s = began.seconds_until(ended)
            if self.warming:
                self.warming -= 1
            elif counts:
                self.past.times = [*self.past.times[1 - TIMED :], self.past.last_s]

    def _backward(self, by_depth: bool, x: torch.Tensor, y: torch.Tensor, tokens: int, last: bool) -> torch.Tensor:
        """Add a micro-batch's gradients; return its cross-entropy and divergence over `tokens`, minimised or not."""
        by_depth = by_depth and last
        with _record(self.model) if by_depth else nullcontext() as trace:
            objective = self.layout.objective
            assert objective is not None
            sums = objective(x, y, eager=trace is not None)  # hooks would make torch.compile start again
            loss = sums.objective / tokens
            if last and (penalty := self.model.residual("penalty")) is not None:
                loss = loss + penalty / self.layout.summed
            loss.backward()  # the layout averages over the processes what `tokens` divides by this one's share
        if trace:
            # to the gradient of the mean loss of the recorded micro-batch
            self.depth = _by_depth(trace, self.model, tokens // y.numel())
        return torch.stack([sums.cross_entropy, sums.divergence]).double() / tokens

    def cast(self) -> AbstractContextManager[Any]:
        """The precision of a forward pass: fp32, or bf16 by autocast over fp32 parameters."""
        if self.config.dtype == "bf16":
            return torch.autocast(self.who.device.type, dtype=torch.bfloat16)
        return nullcontext()

    # -------------------------------------------------------------- what is written

    def measure(self) -> None:
        """After a step: its lines in metrics.jsonl, validation when it is due, the progress bar."""
        if self.away and self.gone is None:
            self._move_beside()
        config, past = self.config, self.past
        last = past.step == config.steps
        tokens = config.batch_size * config.data.seq_len
        if last or self.depth or not (past.last_s and past.step % config.log_every and past.step % config.val_every):
            self._read()
        if past.step % config.log_every == 0 or last:
            past.train_loss = sum(past.losses) / len(past.losses)
            seconds = statistics.median(past.times[-len(past.losses) :] or [past.last_s])
            past.losses = []
            self._write(
                "train",
                tokens=past.step * tokens,
                loss=past.train_loss,
                lr=self.rate,
                grad_norm=self.norm,
                tokens_per_s=tokens / seconds,
                step_s=seconds,
                flops_per_s=self.flops * tokens / seconds,
                **({} if self.peak is None else {"mfu": self.flops * tokens / seconds / self.peak}),
                **({"divergence": self.divergence} if self.teacher else {}),
                **({} if self.penalty is None else {"penalty": self.penalty.item()}),
            )
        if self.depth:
            self._write("depth", **self.depth)
        if past.step % config.val_every == 0 or last:
            self._validate()
            self._snapshot()
        seconds = statistics.median(past.times[-20:] or [past.last_s])
        held_out = "" if past.val_loss is None else f"  held-out {past.val_loss:.3f}"
        self.bar.update(past.step, f"loss {self.loss:.3f}{held_out}  {tokens / seconds:,.0f} tokens/s")

    def save(self) -> None:
        """Write the checkpoint; the one before stays until this one is complete."""
        self._read()
        now = time.perf_counter()
        self.past.wall_s, self.since = self.past.wall_s + now - self.since, now
        states = self.who.gather(checkpoint.random_state(self.who.device))
        self.past.peak_memory_bytes = self._peak_memory()
        if self.metrics:
            self.metrics.sync()
        state = {
            "step": self.past.step,
            "config": to_dict(self.config),
            "data": self.data,
            "random": states,
            "progress": dataclasses.asdict(self.past),
            "arithmetic": arithmetic.arithmetic(self.who, self.model.residual("itself").width),
        }
        here, step = self.folder / "checkpoint", self.past.step
        beside = self._still_beside()
        if not self.layout.whole:
            self._await_saving()
            self.saving = checkpoint.Saving(here, self.layout, self.optimizers, state, beside)
            if self.signalled or self.gone or step in self.config.keep_at or step == self.config.steps:
                self._await_saving()
        elif self.who.first:
            checkpoint.save(here, self.model, self.optimizers, state, beside)
        if self.who.first and step in self.config.keep_at:
            checkpoint.keep(self.folder, step)
        self.saved = step
        self.who.wait()

    def _still_beside(self) -> dict[str, Path]:
        """The files that go beside the model, as far as they are still there."""
        return {name: file for name, file in self.beside.items() if file.is_file()}

    def _await_saving(self) -> None:
        """Return when the checkpoint that is being written is complete. Raises UserError."""
        saving, self.saving = self.saving, None
        if saving is not None:
            saving.wait()

    def finish(self) -> dict[str, Any]:
        """Write what the model does inside, the model and, last, the summary."""
        config, past, who = self.config, self.past, self.who
        memory = self._peak_memory()
        model = self.layout.gathered()
        if model is None:
            return who.share(None)
        if self.metrics:
            self.metrics.sync()
        write_inside(model, self.prepared, config, self.cast, self._rows())
        regimes.merge_adapter(model)
        with replaced_folder(self.folder / "model") as temporary:
            checkpoint.save_model(model, temporary)
            copy_files(self._still_beside(), temporary)
        losses = validate.read_windows(validate.windows_path(self.folder, past.step))
        seconds = statistics.median(past.times or [past.last_s])
        tokens = config.batch_size * config.data.seq_len
        summary = {
            "step": past.step,
            "tokens": past.step * tokens,
            "val_loss": past.val_loss,
            "val_se": or_none(standard_error(losses)),
            "perplexity": math.exp(min(700.0, float(losses.mean()))),
            "train_loss": past.train_loss,
            "tokens_per_s": tokens / seconds,
            "step_s": seconds,
            "flops_per_token": self.flops,
            "peak_flops": self.peak,
            "peak_memory_bytes": memory,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "extra_parameters": sum(parameter.numel() for parameter in model.residual.parameters()),
            "wall_s": past.wall_s,
            "windows": len(losses),
            "traits": model.residual("itself").traits._asdict(),
        }
        write_json(self.folder / "summary.json", summary)
        return who.share(summary)

    def close(self) -> None:
        """Close the metrics and the tracker."""
        self.feed.close()
        if self.saving is not None:  # an error came first, maybe of this process alone
            with suppress(UserError):
                self.saving.end()
        if self.metrics:
            self.metrics.close()

    # -------------------------------------------------------------- details

    def _validate(self) -> None:
        """The held-out loss, to metrics.jsonl and val/STEP.npy."""
        past = self.past
        losses = self.layout.window_losses(self.windows, self._rows())
        past.val_loss = float(losses.mean())
        if not math.isfinite(past.val_loss):
            raise self._diverged(past.step, past.val_loss, self.norm)
        if self.who.first:
            validate.save_windows(self.folder, past.step, losses)
        self._write("val", loss=past.val_loss, windows=len(losses), se=or_none(standard_error(losses)))

    def _snapshot(self) -> None:
        """What the residual has learned, to residual/STEP.safetensors."""
        tensors = collected(tensors_of(self.model.residual("itself")), self.who)
        if tensors:
            write_snapshot(self.folder, self.past.step, tensors)

    def _saved_state(self, here: Path) -> dict[str, Any] | None:
        """The state of the checkpoint, if there is one; refuses a folder of a run on other data."""
        same_data(self.folder, self.record)
        return checkpoint.read_state(here, to_dict(self.config), self.data)

    def taken_away(self) -> UserError:
        """What is said of a run whose folder was taken away."""
        return UserError(
            f"{self.gone} was removed or renamed, or files in it, while the run was going on: what it had up to step "
            f"{self.past.step} is saved in {self.folder}, where --out {self.folder} --resume goes on"
        )

    def _move_beside(self) -> None:
        """Go on in a folder beside the one that was taken away, with the metrics so far."""
        self.in_place = _always
        self.gone, self.folder = self.folder, Path(self.who.share(str(free_beside(self.folder))))
        self.config = dataclasses.replace(self.config, out=str(self.folder))
        if self.metrics:
            lines = self.metrics.text()
            self.metrics.close()
            write_text(self.folder / "metrics.jsonl", lines)
            self._open_folder(self.past.step)

    def _open_folder(self, kept: int) -> None:
        """Make it, or make it what it was at step `kept` (-1: before anything was measured)."""
        config = self.config
        write_json(self.folder / "config.json", to_dict(config))  # first: it makes the folder one of ours
        write_json(self.folder / "data.json", self.record)
        described = environment.describe(self.who.device, config.dtype) | {"loss": self.kind}
        environment.record(self.folder / "environment.json", described, resumed=self.past.step > 0)
        if self.start is not None:
            trainable = sum(p.numel() for _, p in self.layout.named_parameters() if p.requires_grad)
            write_json(self.folder / "start.json", {**self.start, "trainable": trainable})
        forget_after(self.folder, kept)
        if (
            self.gone is None and kept in config.keep_at and not checkpoint.kept(self.folder, kept).exists()
        ):  # killed after it was saved
            checkpoint.keep(self.folder, kept)
        tracker = None
        if config.track != "none":
            tracker = Tracker(config.track, self.folder, config.name or "", to_dict(config), self.past.step)
        self.metrics = Metrics(self.folder, kept, tracker)

    def _write(self, kind: str, **values: Any) -> None:
        if self.metrics:
            self.metrics.write(kind, self.past.step, **values)

    def _peak_memory(self) -> int:
        """The most that any process took, in this session or an earlier one."""
        return max(self.past.peak_memory_bytes, *self.who.gather(environment.peak_memory(self.who.device)))

    def _rows(self) -> int:
        """Sequences of a micro-batch on one process: what is known to fit in memory."""
        return self.config.batch_size // self.config.accumulation // self.layout.shares

    def _diverged(self, step: int, loss: float, norm: float) -> UserError:
        kept = f"the checkpoint of step {self.saved} is kept" if self.saved else "no checkpoint was made yet"
        return UserError(
            f"step {step}: the loss is {loss} and the gradient norm {norm}, the training has diverged; {kept} in "
            f"{self.folder}; try a lower optim.lr, a longer optim.warmup, a smaller optim.clip or --dtype fp32 "
            "(in another --out)"
        )


def _seed(seed: int) -> None:
    """Seed what may draw random numbers."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (for whatever draws from it)


def _always() -> bool:
    return True


def _folder(config: TrainConfig) -> Path:
    return Path(config.out or ".")


def _record(model: Any) -> AbstractContextManager[Any]:
    from attnres.inspect import record

    return record(model, contributions=False)  # a step's memory stays what it is


def _by_depth(trace: Any, model: Any, unit: int) -> dict[str, Any]:
    """What one step did by depth, a value a sublayer or read: magnitudes, and of depth reads how they choose."""
    from attnres.inspect import find_residual
    from attnres.inspect.geometry import learned_mixing, sharpness

    values: dict[str, Any] = {
        "output_rms": trace.output_rms,
        "input_rms": trace.input_rms,
        "grad_rms": [value * unit for value in trace.grad_rms],
    }
    residual = find_residual(model)
    if residual.traits.by_token:
        values["entropy"] = trace.entropy
    if residual.traits.has_query:
        values["sharpness"] = sharpness(residual)
    values |= learned_mixing(residual) or {}
    return values
