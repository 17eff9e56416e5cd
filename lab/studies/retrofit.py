"""Depth reads added to a trained model: is continuing with them better than continuing without?"""

from attnres.text import run_name
from lab.contrast import contrast
from lab.design import Arm, Design, Measured, Setting, StudyResult

LAYOUTS = ("standard", "block:num_blocks=4", "full", "cumulative:num_blocks=4", "cumulative:block_size=1")
REGIMES = (
    "standard",
    "block:num_blocks=4",
    "block:num_blocks=4,gate=scalar",
    "block:num_blocks=4@train_only=residual",
    "block:num_blocks=4@distill_weight=0.5",
    "standard@distill_weight=0.5",
)
SHARE, COOLER = 0.1, 0.1
"""Fraction of the recipe's steps, and of its learning rates."""


def arms(setting: Setting, measured: Measured) -> list[Arm]:
    """Request a standard model, trained once; then its continuations."""
    first = setting.arm("pretrained", ["standard"], [0], of=setting.config(), started_from=True)
    if not measured.complete(first.name) or measured.diverged(first.name, "standard"):
        return [first]
    start = (setting.folder("retrofit") / first.name / run_name("standard", 0)).resolve()
    optim = setting.config().optim
    cooler = {"lr": COOLER * optim.lr, "muon_lr": COOLER * optim.muon_lr}
    run = setting.config(
        model={"size": None},
        data={"tokenizer": None},
        finetune={"init_from": str(start), "inexact": True},
        optim=cooler,
        steps=max(2, round(SHARE * setting.preset.steps)),
    )
    layouts = setting.arm("layouts", setting.some(LAYOUTS), of=run)
    regimes = setting.arm("regimes", setting.some(REGIMES), of=run)  # requested after layouts, to copy the runs in both
    return [first, layouts, *([regimes] if measured.complete("layouts") or "regimes" in measured.begun else [])]


def analyse(setting: Setting, measured: Measured) -> StudyResult:
    """Compare each continuation with that of the standard model."""
    if measured.diverged("pretrained", "standard"):
        return StudyResult("The model to continue diverged: there is nothing to put depth reads on.")
    tables, charts, sentences, values = [], [], [], {}
    for arm, title in (("layouts", "Continued in each layout"), ("regimes", "Ways to continue")):
        contrasts = contrast(measured, arm, "standard")
        if contrasts.others:
            tables.append(contrasts.table(title))
            charts.append(contrasts.chart(arm, title))
            sentences.append(f"{title}: {contrasts.sentence()}")
            values[arm] = contrasts.values()
    return StudyResult(" ".join(sentences) or "Nothing has finished yet.", tables, charts, values)


STUDY = Design(
    "retrofit",
    "Does a finished model gain by depth reads?",
    "One standard model trained at the recipe, then continued for a tenth of it at a tenth of the rates: as it is, "
    "with the paper's layout (whose first logits are its own), and with open-attention-residuals' (whose are not).",
    "open-attention-residuals: Qwen3-0.6B 2.571 to 2.550 (Block) and 2.549 (Full) after 10,000 steps, 1.7B 2.343 to "
    "2.340.",
    arms,
    analyse,
)
