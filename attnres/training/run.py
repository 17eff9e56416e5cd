"""A training run in progress: its setup, the measurements after its steps, and its files.

The same code serves one process and several under `torchrun`: each takes its part of every batch, and the first one
writes the files.
"""

import dataclasses
import math
import random
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attnres.errors import UserError
from attnres.files import write_json
from attnres.models.bases import checkpoint_activations
from attnres.models.model_files import tensors_of, write_snapshot
from attnres.models.step_cost import forward_flops, peak_flops, step_flops
from attnres.progress import STEPS, Bars
from attnres.reading import read_json
from attnres.stats import or_none, standard_error
from attnres.training import checkpoint, environment, finetune, start, validate
from attnres.training.balance import Balancer
from attnres.training.checkpoint import random_state, set_random_state
from attnres.training.config import TrainConfig, to_dict
from attnres.training.data import data_record, held_out, open_data
from attnres.training.environment import tune
from attnres.training.feed import Feed
from attnres.training.interrupt import Signals
from attnres.training.layout import Layout, collected, parallelize
from attnres.training.objective import Objective, loss_kind, precision
from attnres.training.optim import Transfer, kinds, optimizers_of
from attnres.training.parallel import Processes
from attnres.training.prepare import PreparedRun
from attnres.training.records import RunState, run_state_of
from attnres.training.run_folder import DIVERGED, Output, same_data
from attnres.training.step import Steps, Update


class Run:
    """A run in progress: the model, its optimizers, its data and its measurements."""

    def __init__(
        self, prepared: PreparedRun, who: Processes, *, progress: bool, in_place: Callable[[], bool] | None = None
    ):
        """Open the data, build the model or load it from the checkpoint, open the metrics.

        `in_place` returns whether the folder still exists, since somebody may rename or remove it.
        """
        config = prepared.config
        # How the processes share the work, and the measurements so far.
        self.start_model = prepared.start
        self.who, self.output = who, Output(config, who, in_place)
        self.layout = Layout(
            *(who, config.parallel, config.batch_size, config.accumulation, config.data.seq_len, config.dtype),
            compile=config.compile and max(config.parallel.shard, config.parallel.pp) > 1,
        )
        self.run_state = RunState()
        self.saved: int | None = None  # step of the last checkpoint
        self.saving: checkpoint.ShardedSave | None = None  # one that may still be being written

        # The data come before the checkpoint, so that a checkpoint of other data is refused.
        sizes = {"batch_size": config.batch_size, "seed": config.seed}
        self.prepared, self.batches, self.windows = open_data(config.data, who, **sizes, progress=progress)
        self.record = data_record(self.prepared, self.windows)
        self.data = {name: value for name, value in self.record.items() if name != "windows_sha256"}
        here = self.output.folder / "checkpoint"

        def saved_state() -> dict[str, Any] | None:
            same_data(self.output.folder, self.record)
            return checkpoint.read_state(here, to_dict(config), self.data)

        state = who.of_first(saved_state)

        # The model, complete on every process, and its properties as a whole.
        environment.reset_peak_memory(who.device)
        with who.alike():
            self._make_model(here, state)
        self.trainable = sum(p.numel() for p in self.model.parameters() if p.requires_grad)  # over all stages
        # Only once: a model on the hub or a disk may be unavailable later.
        self.extra_files = start.extra_files(self.start_model, self.prepared)
        taught = 0.0 if self.teacher is None else forward_flops(self.teacher.model, config.data.seq_len)
        self.flops = step_flops(self.model, config.data.seq_len) + taught  # operations a token
        peak = peak_flops(who.device, config.dtype)
        self.peak = None if peak is None else peak * who.world_size  # operations a second

        # The model's place on the processes, the optimizers of the local parameters, and the state of a checkpoint.
        # kinds in the complete model: a stage cannot tell an untied head without the embedding
        groups = kinds(self.model)
        transfer = Transfer.of(self.model, config.optim.base_width)
        objective = Objective(
            self.model, self.kind, self.cast, self.teacher, compiled=config.compile and not self.layout.compile
        )
        with who.alike():
            balance = config.optim.balance
            self.balancer = None if balance == "none" else Balancer(self.model, balance, who)
            self.placed = parallelize(objective, self.layout)
        self.model = self.placed.model
        # After building, which may draw more numbers for one residual than another: seed all random generators.
        torch.manual_seed(config.seed + who.rank)
        random.seed(config.seed + who.rank)
        np.random.seed(config.seed + who.rank)  # noqa: NPY002 (for code that uses it)
        self.optimizers = optimizers_of(dict(self.placed.named_parameters()), groups, config.optim, transfer)
        update = Update(
            self.placed,
            self.optimizers,
            config.optim.clip,
            lambda: self.model.residual("penalty"),  # looked up at each call, because the residual may be replaced
            capture=config.cuda_graphs,
            balancer=self.balancer,
        )
        if state:
            with who.alike():
                self._restore(here, state)

        self._compare_arithmetic(state)

        # The folder with its files, and messages for the user.
        self.resumed = state is not None
        self.described = environment.describe(who.device, config.dtype) | {"loss": self.kind, "step": update.path}
        records = {"data.json": self.record}
        if self.start is not None:
            records["start.json"] = {**self.start, "trainable": self.trainable}
        who.of_first(lambda: self.output.open(self.described, records, self.run_state.step if state else -1))
        self._show(progress=progress)

        # The steps.
        share = {"rank": self.placed.rank, "world_size": self.placed.shares}
        feed = Feed(self.batches, who.device, **share, steps=config.steps)
        self.steps = Steps(config, update, feed, self.run_state, self.output.is_away, self._diverged)
        self.since = time.perf_counter()

    @property
    def config(self) -> TrainConfig:
        """Return the run's configuration, with the folder to which it is written now."""
        return self.output.config

    # -------------------------------------------------------------- what it begins with

    def _make_model(self, here: Path, state: dict[str, Any] | None) -> None:
        """Build the model or load it from the checkpoint `here`, on its device, and choose the trained parameters."""
        config, who = self.config, self.who
        if state:
            self.model = checkpoint.load_model(here, state)
            self.start = None
            if config.finetune.init_from is not None:
                self.start = read_json(self.output.folder / "start.json")
        else:
            self.model, self.start = start.first_model(config, self.start_model, self.prepared)
        self.teacher = start.load_teacher(
            self.start_model, config.finetune, self.start or {}, who.device, config.data.seq_len
        )
        finetune.choose_trained(self.model, config.finetune, config.seed)
        if state:
            checkpoint.load_adapter(here, state, self.model)
        self.model = self.model.to(who.device).train()
        tune(self.model, who.device, config.data.seq_len)
        checkpoint_activations(self.model, config.gradient_checkpointing)
        if config.stream_dtype == "bf16":
            self.model.residual.itself().stream_dtype = torch.bfloat16
        self.kind = loss_kind(config.loss, self.model, self.layout.rows * config.data.seq_len, self.teacher)

    def _restore(self, here: Path, state: dict[str, Any]) -> None:
        """Continue from the checkpoint `here`: measurements, optimizers, and this process's random numbers."""
        who = self.who
        self.run_state, self.saved = checkpoint.as_saved(here, lambda: run_state_of(state)), state["step"]
        checkpoint.restore(here, state, self.placed, self.optimizers)
        if who.rank < len(state["random"]):  # processes beyond the former number start from the seed
            numbers = state["random"][who.rank]
            checkpoint.as_saved(here, lambda: set_random_state(numbers, who.device))

    def _compare_arithmetic(self, state: dict[str, Any] | None) -> None:
        """Refuse a checkpoint computed with something else that affects the last bits, before a file changes."""
        config, who = self.config, self.who
        compared = who, self.model.residual("itself").width, self.kind if config.loss == "auto" else None
        self.computed_with = partial(environment.arithmetic, *compared)
        self.arithmetic = partial(
            environment.restored_arithmetic, self._recorded(state), *compared, different=config.allow_different
        )
        with who.alike(), self.arithmetic():
            pass

    def _show(self, *, progress: bool) -> None:
        """Open the progress bar, and say what the user may not expect of this run."""
        config, path, name = self.config, self.described["step"], self.config.name or ""
        self.bars = Bars(STEPS, shown=progress)
        self.bar = self.bars.add(name, config.steps, self.run_state.step)
        if warning := environment.emulated(self.who.device, config.dtype):
            self.bars.say(f"{name}: {warning}")
        if path.startswith("eager: "):
            self.bars.say(f"{name}: --cuda-graphs: steps are {path}")
        if self.resumed:
            self.bars.say(f"{name}: resumed at step {self.run_state.step} of {config.steps}")

    # -------------------------------------------------------------- its steps

    def begin(self) -> None:
        """Prepare the first step: write the residual's start values and, for a pretrained model, the held-out loss."""
        if self.run_state.step == 0:
            self._snapshot()
            if self.start is not None:
                self._validate()

    def step(self, signals: Signals) -> None:
        """Take one step (`attnres.training.step.Steps`), and record it if steps are now executed in another way."""
        self.steps.take(signals)
        path = self.steps.update.path
        if path != self.described["step"]:
            self.described["step"] = path
            self.who.of_first(lambda: self.output.describe(self.described, resumed=self.resumed))
            self.bars.say(f"{self.config.name}: --cuda-graphs: steps are {path}")

    def cast(self) -> AbstractContextManager[Any]:
        """Return the precision context of a forward pass."""
        return precision(self.config.dtype, self.who.device)

    # -------------------------------------------------------------- what is written

    def measure(self) -> None:
        """Write the lines of a step to metrics.jsonl, validate if it is due, and update the progress bar."""
        if self.steps.folder_was_away and self.output.gone is None:
            self.output.move_beside(self.run_state.step)
        config, run_state, steps = self.config, self.run_state, self.steps
        depth = steps.update.depth
        last = run_state.step == config.steps
        tokens = config.batch_size * config.data.seq_len
        if (
            last
            or depth
            or not (run_state.last_s and run_state.step % config.log_every and run_state.step % config.val_every)
        ):
            self.steps.read()
        if run_state.step % config.log_every == 0 or last:
            run_state.train_loss = sum(run_state.losses) / len(run_state.losses)
            seconds = statistics.median(run_state.times[-len(run_state.losses) :] or [run_state.last_s])
            run_state.losses = []
            self._write(
                "train",
                tokens=run_state.step * tokens,
                loss=run_state.train_loss,
                lr=steps.learning_rate,
                grad_norm=steps.norm,
                tokens_per_s=tokens / seconds,
                step_s=seconds,
                flops_per_s=self.flops * tokens / seconds,
                **({} if self.peak is None else {"mfu": self.flops * tokens / seconds / self.peak}),
                **({"divergence": steps.divergence} if self.teacher else {}),
                **({} if steps.penalty is None else {"penalty": steps.penalty.item()}),
                **({} if self.balancer is None else {"expert_load": self.balancer.load}),
            )
        if depth:
            self._write("depth", **depth)
        if run_state.step % config.val_every == 0 or last:
            self._validate()
            self._snapshot()
        seconds = statistics.median(run_state.times[-20:] or [run_state.last_s])
        held_out = "" if run_state.val_loss is None else f"  held-out {run_state.val_loss:.3f}"
        self.bar.update(run_state.step, f"loss {steps.loss:.3f}{held_out}  {tokens / seconds:,.0f} tokens/s")

    def save(self) -> None:
        """Write the checkpoint; the previous one stays until this one is complete."""
        self.steps.read()
        now = time.perf_counter()
        self.run_state.wall_s, self.since = self.run_state.wall_s + now - self.since, now
        states = self.who.gather(random_state(self.who.device))
        self.run_state.peak_memory_bytes = self.peak_memory()
        self.who.of_first(self.output.sync)
        state = {
            "step": self.run_state.step,
            "config": to_dict(self.config),
            "data": self.data,
            "random": states,
            "progress": dataclasses.asdict(self.run_state),
            "arithmetic": self.computed_with(),
        }
        folder, step = self.output.folder, self.run_state.step
        checkpoint_folder = folder / "checkpoint"
        extra_files = self.files_beside()
        if not self.placed.whole:
            if self.output.gone:  # and with it the checkpoint that was being written there
                self._end_saving()
            self._await_saving()
            self.saving = checkpoint.ShardedSave(checkpoint_folder, self.placed, self.optimizers, state, extra_files)
            if self.steps.signalled or self.output.gone or step in self.config.keep_at or step == self.config.steps:
                self._await_saving()

        def write() -> None:
            if self.placed.whole:
                checkpoint.save(checkpoint_folder, self.model, self.optimizers, state, extra_files)
            if step in self.config.keep_at:
                checkpoint.keep(folder, step)

        self.who.of_first(write)
        self.saved = step

    def _await_saving(self) -> None:
        """Wait until the checkpoint that is being written is complete. Raises UserError."""
        saving, self.saving = self.saving, None
        if saving is not None:
            saving.wait()

    def _end_saving(self) -> None:
        """Wait until this process's part of it is written, or has failed."""
        saving, self.saving = self.saving, None
        if saving is not None:
            with suppress(UserError):
                saving.end()

    def close(self) -> None:
        """Close the metrics and the tracker."""
        self.steps.feed.close()
        self._end_saving()  # after an error, maybe of this process alone
        self.output.close()

    # -------------------------------------------------------------- details

    def _validate(self) -> None:
        """Measure the held-out loss and write it to metrics.jsonl and val/STEP.npy."""
        run_state = self.run_state
        losses, in_context = self.placed.window_losses(self.windows, self.layout.rows).T
        run_state.val_loss = float(losses.mean())
        if not math.isfinite(run_state.val_loss):
            raise self.who.same(self._diverged(run_state.step, run_state.val_loss, self.steps.norm))
        if self.who.first:
            validate.save_windows(self.output.folder, run_state.step, losses)
        known = {"loss": run_state.val_loss, "windows": len(losses), "se": or_none(standard_error(losses))}
        self._write("val", **known, in_context=float(in_context.mean()))

    def losses_at_end(self) -> np.ndarray:
        """Return the held-out losses after the last step on `AT_THE_END` times the windows, or as many as there are."""
        count = validate.AT_THE_END * self.config.data.val_windows
        windows = held_out(self.prepared, dataclasses.replace(self.config.data, val_windows=count))
        return self.placed.window_losses(windows, self.layout.rows)

    def _snapshot(self) -> None:
        """Write the residual's parameters to residual/STEP.safetensors."""
        tensors = collected(tensors_of(self.model.residual("itself")), self.who)
        if tensors:
            write_snapshot(self.output.folder, self.run_state.step, tensors)

    def _recorded(self, state: dict[str, Any] | None) -> dict[str, Any]:
        """Return the arithmetic recorded in the checkpoint; with another layout, without how the loss is computed,
        because passes then have another size."""
        if state is None:
            return {}
        recorded, ours = dict(state.get("arithmetic") or {}), to_dict(self.config)
        resized = any(state["config"].get(name) != ours[name] for name in ("parallel", "accumulation"))
        if resized or len(state["random"]) != self.who.world_size:
            recorded.pop("loss", None)
        return recorded

    def files_beside(self) -> dict[str, Path]:
        """Return those files to copy beside the model that still exist."""
        return {name: file for name, file in self.extra_files.items() if file.is_file()}

    def peak_memory(self) -> int:
        """Return the most that any process took, in this session or an earlier one."""
        return max(self.run_state.peak_memory_bytes, *self.who.gather(environment.peak_memory(self.who.device)))

    def taken_away(self) -> UserError:
        """Return the error for a run whose folder was removed or renamed."""
        folder = self.output.folder
        return UserError(
            f"{self.output.gone} was removed or renamed, or files in it, while the run was going on: what it had up to "
            f"step {self.run_state.step} is saved in {folder}, where --out {folder} --resume continues"
        )

    def _write(self, kind: str, **values: Any) -> None:
        self.output.write(kind, self.run_state.step, **values)

    def _diverged(self, step: int, loss: float, norm: float) -> UserError:
        """Return the error for a loss or gradient that is not finite, after writing its step to the folder."""
        if self.who.first:
            write_json(self.output.folder / DIVERGED, {"step": step})
        left_over = f"the checkpoint of step {self.saved} is kept" if self.saved else "no checkpoint was made yet"
        return UserError(
            f"step {step}: the loss is {loss} and the gradient norm {norm}, the training has diverged; {left_over} in "
            f"{self.output.folder}; try a lower optim.lr, a longer optim.warmup, a smaller optim.clip or --dtype fp32 "
            "(in another --out)"
        )
