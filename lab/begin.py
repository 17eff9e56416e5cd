"""When a folder may be used for a study, and study.json, by which it is known."""

import shutil
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NotRequired, TypedDict

from attnres.errors import UserError
from attnres.files import LOCK, write_json
from attnres.reading import read_json
from attnres.training.run_folder import ended
from attnres.typed import checked
from lab.adopt import same_name
from lab.archive import ARCHIVE, is_alone
from lab.design import Design, Measured, Setting
from lab.measures import MEASURES

RECORD = "study.json"
VERSION = 1


class Asked(TypedDict):
    """study.json: what was asked for."""

    version: int
    study: str
    preset: str
    seeds: int
    source: str | None
    column: NotRequired[str | None]
    images: str | None


def asked(design: Design, setting: Setting) -> Asked:
    """What a study.json has of a study at this setting."""
    return {
        "version": VERSION,
        "study": design.name,
        "preset": setting.name,
        "seeds": setting.seeds,
        "source": setting.source,
        "column": setting.column,
        "images": setting.images,
    }


def asked_in(path: Path) -> Asked:
    """Read a study.json. Raises UserError, also for one of another version."""
    record = checked(read_json(path), Asked, path, "carry the study out again")
    if record["version"] != VERSION:
        raise UserError(f"{path} is of version {record['version']}, expected {VERSION}: carry the study out again")
    return record


def same_material(folder: Path, design: Design, setting: Setting) -> None:
    """Refuse to go on with other text or images than runs of a study were finished with, as far as their names tell and
    the study has a use for them: UserError."""
    path = folder / RECORD
    if not path.is_file() or not (is_alone(folder) or any(map(_has_ended, folder.glob("*/*")))):
        return
    before = asked_in(path)
    arms, text = design.arms(setting, Measured()), setting.config().data.source
    of_text = any(arm.compare is not None and arm.compare.base.data.source == text for arm in arms)
    uses = {
        "source": of_text,
        "column": of_text,
        "images": setting.images is not None and before["images"] is not None,
    }
    for name, used in uses.items():
        there, here = before.get(name), getattr(setting, name)
        if used and not same_name(there, here):
            raise UserError(
                f"the study in {folder} was carried out with --{name} {there or 'of the preset'}, not "
                f"{here or 'of the preset'}: give the same, or choose another --out"
            )


class Begin:
    """Writes study.json, once nothing can be refused any more; a new folder has it at once, to be known by."""

    def __init__(self, path: Path, record: Asked) -> None:
        self.path, self.record, self.done = path, record, False
        if not path.is_file():
            write_json(path, record)

    def __call__(self) -> None:
        self.done = True
        write_json(self.path, self.record)


@contextmanager
def begun(folder: Path, record: Asked) -> Generator[Begin]:
    """Leave the folder as it was where something is refused before the study has begun."""
    before = {path.name for path in folder.iterdir()}
    begin = Begin(folder / RECORD, record)
    try:
        yield begin
    except UserError:
        if not begin.done:
            for path in folder.iterdir():
                if path.name not in before | {LOCK}:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        raise


def nothing_lost(folder: Path, archived: Sequence[tuple[str, str]]) -> None:
    """Refuse to train again runs, as (arm, run), that were finished and are in runs.jsonl alone: UserError."""
    lost = [f"{arm}/{name}" for arm, name in archived if not _has_ended(folder / arm / name)]
    if lost:
        raise UserError(
            f"{folder / ARCHIVE} would lose what this command does not take of it ({len(lost)}, {lost[0]} for one: "
            "of other data or another configuration): choose another --out"
        )


def _has_ended(run: Path) -> bool:
    return ended(run) or (run / MEASURES).is_file()
