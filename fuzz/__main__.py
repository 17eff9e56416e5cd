"""The fault campaign: `python -m fuzz --minutes 10`. The same command again goes on where it stopped.

It exits with status 1 if anything was a failure, and prints each with what made it.
"""

import argparse
import os
import sys
import time
from pathlib import Path

AREAS = ("inputs", "folders", "flags", "disks", "kills", "comparisons", "requests")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="time in all, shared between the areas")
    parser.add_argument("--only", nargs="+", choices=AREAS, default=AREAS, help="areas")
    parser.add_argument("--out", type=Path, default=Path("build/fuzz/campaign.json"), help="counts; goes on with them")
    parser.add_argument("--page", type=Path, help="Markdown page whose counts are written anew")
    parser.add_argument("--work", type=Path, default=Path("build/fuzz/work"), help="folder for what is damaged")
    parser.add_argument("--retry", action="store_true", help="only try again which inputs, flags and full disks failed")
    options = parser.parse_args()
    work = options.work.resolve()
    os.environ.update(OMP_NUM_THREADS="1", ATTNRES_CACHE=str(work / "cache"), HF_HUB_OFFLINE="1")

    from fuzz.disk import retry_full_disks, try_full_disks
    from fuzz.explorer import try_requests
    from fuzz.flags import retry_flags, try_flags
    from fuzz.folders import try_folders
    from fuzz.forked import preload
    from fuzz.inputs import retry_inputs, try_inputs
    from fuzz.kills import try_comparisons, try_kills
    from fuzz.material import make
    from fuzz.tally import Tally

    preload()
    material, tally = make(work), Tally(options.out)
    areas = {
        "inputs": try_inputs,
        "folders": try_folders,
        "flags": try_flags,
        "disks": try_full_disks,
        "kills": try_kills,
        "comparisons": try_comparisons,
        "requests": try_requests,
    }
    if options.retry:
        for retry in (retry_inputs, retry_flags, retry_full_disks):
            retry(material, tally)
        tally.save()
        sys.exit(1 if tally.failures() else 0)
    began = time.monotonic()
    for place, name in enumerate(options.only):
        share = (options.minutes * 60 - (time.monotonic() - began)) / (len(options.only) - place)
        until = time.monotonic() + share
        areas[name](
            material,
            tally,
            {"requests": 1000, "folders": 2000}.get(name, 10**9),
            more=lambda until=until: time.monotonic() < until,
        )
        tally.save()
    tally.record["seconds"] += time.monotonic() - began
    tally.save()
    if options.page is not None:
        tally.write_into(options.page)
    print(tally.table())
    for failure in tally.failures():
        print(f"\n{failure['area']}: {failure['verdict']}: {failure['what']}\n{failure.get('said', '')}")
    sys.exit(1 if tally.failures() else 0)


if __name__ == "__main__":
    main()
