"""Folders of made-up names, splits, forms and compressions: the documents that are read against those written."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from fuzz.material import Material
from fuzz.tally import Tally

FORMS = (".jsonl", ".json", ".csv", ".parquet", ".arrow", ".txt", ".md")
PACKED = {"": None, ".gz": "gzip", ".zst": "zstd"}
PLACES = ("{split}-{n:05d}-of-00009", "{split}/{n}", "data/{split}.{n}", "en/c4-{split}.{n:05d}", "{split}_{n}/part")
SPLITS = (("train", ("test", "validation")), ("training", ("dev",)), ("web", ("eval", "valid")), ("part", ()))
ABOUT = (
    "README.md",
    "LICENSE.txt",
    "load.py",
    "requirements.txt",
    "dataset_info.json",
    "picture.png",
    ".gitattributes",
)


def try_folders(material: Material, tally: Tally, cases: int, *, more: Callable[[], bool] = lambda: True) -> None:
    """Write so many folders, as long as there is `more` time, and read each as a source."""
    from attnres.data.sources import open_source
    from attnres.errors import UserError

    folder = material.root / "folder"
    for _ in range(cases):
        if not more():
            return
        number = tally.tried("folders")
        shutil.rmtree(folder, ignore_errors=True)
        expected = write_folder(folder, random.Random(number))
        try:
            source = open_source(folder)
            found = sorted(source.read())
        except UserError as error:
            source, found = None, [str(error)]
        names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        verdict = "done" if source is not None and source.files and found == expected else "different"
        tally.count("folders", verdict, f"seed {number}: {', '.join(names)}", said=f"{found} for {expected}")


def write_folder(folder: Path, draw: random.Random) -> list[str]:
    """Write a folder as people have them and return the documents in it to train on, sorted."""
    split, others = draw.choice(SPLITS)
    place = draw.choice(PLACES)
    plain = draw.random() < 0.3  # text and code lie beside rows only as what they are not: documents
    forms = FORMS[5:] if plain else FORMS[:5]
    documents = [f"{split} {n}" for n in range(draw.randrange(1, 5))]
    for n, text in [*enumerate(documents), *((n, other) for n, other in enumerate(others))]:
        form = draw.choice(forms)
        packed = "" if form in (".parquet", ".arrow") else draw.choice(tuple(PACKED))
        suffix = draw.choice((str.lower, str.upper))(form + packed) if draw.random() < 0.2 else form + packed
        name = place.format(split=text.partition(" ")[0], n=n)
        write(folder / f"{name}{suffix}", form, PACKED[packed], text)
    for name in draw.sample([name for name in ABOUT if not (plain and name == "load.py")], 3):
        (folder / name).write_text("about the others")
    return sorted(documents)


def write(path: Path, form: str, compression: str | None, text: str) -> None:
    """Write a file of one document."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"id": [7], "text": [text]})
    if form == ".parquet":
        return pq.write_table(table, path)
    if form == ".arrow":
        with pa.ipc.new_stream(path, table.schema) as file:
            return file.write_table(table)
    row = json.dumps({"id": 7, "text": text})
    content = {".jsonl": row, ".json": f"[{row}]", ".csv": f"id,text\n7,{text}\n"}.get(form, text)
    with pa.output_stream(str(path), compression=compression) as file:
        file.write(content.encode())
