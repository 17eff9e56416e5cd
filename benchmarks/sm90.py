"""What the Triton kernels become on an H100, without one: registers, spills, copies, occupancy.

    python benchmarks/sm90.py                                   # every kernel and width; about two minutes
    python benchmarks/sm90.py --only merge --width 2048 --sass sass/
    python benchmarks/sm90.py --json benchmarks/results/sm90.json

Each specimen, what training launches at some width, is compiled for sm_90 (H100, H200) as the JIT would for aligned
tensors, and assembled by the `ptxas` that comes with Triton. Counts of loads, stores and copies are of
instructions in the PTX, whose loops are not unrolled by Triton: they say how wide an access is, not how many are made.
Scalars per token (logits, weights, statistics) are narrow by nature.

Spills are bytes a thread; shared memory is bytes a CTA. Occupancy is the theoretical one, from registers, shared
memory and threads.
"""

import argparse
import ast
import functools
import hashlib
import io
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from attnres import ops
from attnres.ops.backend import MergeGradInputs, MergeInputs, ReadGradInputs, ReadInputs
from attnres.ops.norms import Norm

if TYPE_CHECKING:
    from attnres.ops.gpu.launch import Launch

# One streaming multiprocessor of compute capability 9.0 (CUDA C++ programming guide, technical specifications).
REGISTERS, MAX_WARPS, MAX_CTAS = 65536, 64, 32
SHARED, SHARED_PER_CTA, SHARED_RESERVED = 228 * 1024, 227 * 1024, 1024
PARTITIONS, REGISTER_UNIT = 4, 256  # a warp lives in one partition; registers come in units of 256 a warp

DIVISIBLE = [["tt.divisibility", 16]]


RECORD = Path(__file__).parent / "results" / "sm90.json"
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


class Specimen(NamedTuple):
    """One instance of a kernel to be compiled (`triton.compiler.ASTSource`).

    All pointers, and all integers whose parameter name contains "stride", are to be compiled as divisible by 16, as
    they are for tensors of a width divisible by 16.

    Attributes:
        name: of the case, without its width.
        width: d.
        kernel: a `triton.jit` function.
        signature: type of every parameter by name, such as "*bf16", "i64", "constexpr", or a tuple of these.
        constants: values of the constexpr parameters by name.
        options: num_warps and num_stages.
    """

    name: str
    width: int
    kernel: Any
    signature: dict[str, Any]
    constants: dict[str, Any]
    options: dict[str, int]


@dataclass(frozen=True)
class Built:
    """One kernel at one width, compiled for sm_90.

    Attributes:
        stages: how deep the kernel's loop over memory is pipelined; 1 is not at all.
        registers: a thread. spill_stores, spill_loads: bytes a thread.
        shared: bytes a CTA, static and dynamic.
        async_16, async_other: asynchronous copies to shared memory of 16 bytes, and of fewer.
        loads, stores: instructions on global memory by their width in bytes, widest first.
        dots: tensor-core instructions. barriers: at which the warps of a program wait for each other.
        ctas, occupancy: CTAs on a multiprocessor, and resident warps as a share of the most possible.
        seconds: to compile, ptxas included.
        digest: of what it was compiled from.
    """

    name: str
    width: int
    warps: int
    stages: int
    registers: int
    spill_stores: int
    spill_loads: int
    shared: int
    async_16: int
    async_other: int
    loads: dict[int, int]
    stores: dict[int, int]
    dots: int
    barriers: int
    ctas: int
    occupancy: float
    seconds: float
    digest: str


def occupancy(registers: int, shared: int, warps: int) -> int:
    """CTAs of `warps` warps that fit on one multiprocessor; 0 if not even one does."""
    if shared > SHARED_PER_CTA:
        return 0
    per_warp = -(-registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    by_registers = PARTITIONS * (REGISTERS // PARTITIONS // per_warp) // warps
    by_shared = SHARED // (shared + SHARED_RESERVED)
    return min(MAX_CTAS, MAX_WARPS // warps, by_registers, by_shared)


def source_of(specimen: Specimen) -> Any:
    """The specimen as Triton's compiler wants it, specialised as the JIT does for aligned tensors."""
    from triton.compiler import ASTSource

    names = specimen.kernel.arg_names
    if set(names) != set(specimen.signature):
        wrong = sorted(set(names) ^ set(specimen.signature))
        raise ValueError(f"the specimen {specimen.name} does not fit its kernel: {', '.join(wrong)}")
    signature = {name: specimen.signature[name] for name in names}  # in the kernel's order
    constants, attributes = {}, {}

    def place(path: tuple[int, ...], kind: Any, name: str, value: Any) -> None:
        if isinstance(kind, tuple):
            for j, part in enumerate(kind):
                place((*path, j), part, name, value[j] if isinstance(value, Sequence) else None)
        elif kind == "constexpr":
            constants[path] = value
        elif kind.startswith("*") or (kind.startswith("i") and "stride" in name):
            attributes[path] = DIVISIBLE

    for i, (name, kind) in enumerate(signature.items()):
        place((i,), kind, name, specimen.constants.get(name))
    return ASTSource(specimen.kernel, signature, constants, attributes)


@functools.cache
def code() -> str:
    """The code of all kernels, without comments and docstrings."""
    modules = []
    for path in sorted((Path(ops.__file__).parent / "gpu").glob("*kernels.py")):
        module = ast.parse(path.read_text("utf-8"))
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef | ast.Module) and ast.get_docstring(node) is not None:
                del node.body[0]
        modules.append(ast.dump(module))
    return "".join(modules)


def digest(specimen: Specimen) -> str:
    """A hash of a specimen and of what it is compiled from: the kernels' code and the version of Triton."""
    import triton

    of = (specimen._replace(kernel=specimen.kernel.fn.__name__), triton.__version__)
    return hashlib.sha256(f"{code()}{of}".encode()).hexdigest()[:16]


def tool(name: str) -> str:
    """A CUDA binary that comes with Triton."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    if not path.exists():
        raise SystemExit(f"this Triton ({triton.__version__}) has no {name}: expected it at {path}")
    return str(path)


def compiled(specimen: Specimen) -> tuple[Any, int, int, int]:
    """The compiled kernel; the registers, and bytes of spill stores and loads, that ptxas reports of it."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget

    said = io.StringIO()
    with knobs.nvidia.scope(), knobs.compilation.scope(), redirect_stdout(said):
        knobs.nvidia.dump_ptxas_log = knobs.compilation.always_compile = True
        kernel = triton.compile(source_of(specimen), target=GPUTarget("cuda", 90, 32), options=dict(specimen.options))
    patterns = (r"(\d+) registers", r"(\d+) bytes spill st", r"(\d+) bytes spill lo")
    registers, stores, loads = (int(re.findall(pattern, said.getvalue())[-1]) for pattern in patterns)
    return kernel, registers, stores, loads


def accesses(ptx: str, operation: str) -> dict[int, int]:
    """How many `ld` or `st` on global memory there are, by bytes a thread, the widest first."""
    widths: Counter[int] = Counter()
    for modifiers in re.findall(rf"\b{operation}\.(?:\w+\.)?global((?:\.[\w:]+)+)", ptx):
        vector = re.search(r"\.v(\d)\b", modifiers)
        bits = re.search(r"\.[busf](\d+)$", modifiers)
        if bits is not None:
            widths[int(bits[1]) // 8 * (int(vector[1]) if vector else 1)] += 1
    return dict(sorted(widths.items(), reverse=True))


def build(specimen: Specimen, sass: Path | None = None) -> Built:
    """Compile one specimen. With `sass`, its SASS and PTX are written into that folder."""
    started = time.perf_counter()
    kernel, registers, spill_stores, spill_loads = compiled(specimen)
    ptx = kernel.asm["ptx"]
    warps, shared = kernel.metadata.num_warps, kernel.metadata.shared
    copies = Counter(re.findall(r"\bcp\.async\.c[ag]\.shared\.global\S* \[[^]]+\], \[[^]]+\], 0x(\w+)", ptx))
    ctas = occupancy(registers, shared, warps)
    if sass is not None:
        keep_assembly(sass / f"{specimen.name}-{specimen.width}", ptx, kernel.asm["cubin"])
    return Built(
        name=specimen.name,
        width=specimen.width,
        warps=warps,
        stages=specimen.constants.get("STAGES", specimen.options.get("num_stages", 1)),
        registers=registers,
        spill_stores=spill_stores,
        spill_loads=spill_loads,
        shared=shared,
        async_16=copies.pop("10", 0),
        async_other=sum(copies.values()),
        loads=accesses(ptx, "ld"),
        stores=accesses(ptx, "st"),
        dots=len(re.findall(r"\b(?:wgmma\.mma_async|mma)\.sync", ptx)),
        barriers=len(re.findall(r"\bbar(?:rier)?\.sync", ptx)),
        ctas=ctas,
        occupancy=ctas * warps / MAX_WARPS,
        seconds=round(time.perf_counter() - started, 2),
        digest=digest(specimen),
    )


def keep_assembly(stem: Path, ptx: str, cubin: bytes) -> None:
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".ptx").write_text(ptx)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool("nvdisasm"), "-c", file.name], check=True, capture_output=True, text=True)
    stem.with_suffix(".sass").write_text(done.stdout)


def specimen_of(launch: "Launch", name: str, width: int) -> Specimen:
    signature = {key: type_of(value) for key, value in launch.arguments.items()}
    absent = {key: None for key, value in launch.arguments.items() if value is None}
    signature |= dict.fromkeys(launch.constants, "constexpr")
    return Specimen(name, width, launch.kernel, signature, launch.constants | absent, launch.options)


def type_of(value: Any) -> Any:
    """A kernel parameter's type as `Specimen.signature` has it."""
    if isinstance(value, tuple):
        return tuple(type_of(part) for part in value)
    if isinstance(value, Tensor):
        return "*" + NAMES[value.dtype]
    return "constexpr" if value is None else "fp32" if isinstance(value, float) else "i32"


def vector(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def of_merge() -> Iterator[Specimen]:
    """What training, one-pass reads and GPT-2 compile."""
    from attnres.ops.gpu.merge import plan_backward, plan_merge, plan_mix

    tokens = 64

    def both(
        name: str, width: int, k: int, sealed: bool, norm: Norm, dtype: torch.dtype = torch.bfloat16
    ) -> Iterator[Specimen]:
        opens, query = [vector(tokens, width, dtype=dtype) for _ in range(k)], vector(width)
        part = (vector(tokens, width, dtype=dtype), vector(tokens), vector(tokens)) if sealed else (None, None, None)
        added = vector(tokens, width, dtype=dtype) if sealed else None
        (launch,), (x, saved, _) = plan_merge(MergeInputs(opens, added, query, 1e-6, *part, norm, dtype))
        yield specimen_of(launch, f"{name}, forward", width)
        carried = [vector(tokens, width, dtype=dtype) for _ in range(k)]
        (launch,), _ = plan_backward(MergeGradInputs(x, carried, opens, query, norm, saved))
        yield specimen_of(launch, f"{name}, backward", width)

    for width in (896, 1024, 1536, 2048, 2304, 4096, 7168):
        rms = Norm(vector(width), out_dtype=torch.bfloat16)
        yield from both("block, 1 open", width, 1, True, rms)
        yield from both("one pass, 9 opens", width, 9, False, rms)
    for width in (768, 4096):
        layer = Norm(vector(width), vector(width), center=True, out_dtype=torch.bfloat16)
        yield from both("block, LayerNorm", width, 1, True, layer)
    yield from both("block, fp32", 2048, 1, True, Norm(vector(2048)), torch.float32)
    for width in (2048, 7168):
        sources = [vector(tokens, width, dtype=torch.bfloat16)] * 9
        yield specimen_of(plan_mix(sources, vector(tokens, 9), None, torch.bfloat16), "mix, 9 sources", width)


def of_sealed() -> Iterator[Specimen]:
    """What training compiles for reads of sealed sources."""
    from attnres.ops.gpu.sealed import FEW, plan_backward, plan_read
    from attnres.ops.gpu.token_kernels import read_token, read_token_backward

    bf16, fp32 = torch.bfloat16, torch.float32

    def both(
        name: str,
        width: int,
        reads: int,
        dtypes: Sequence[torch.dtype] = (bf16,),
        n: int = 9,
        carried: bool = True,
        tokens: int = 4096,
        held: bool = False,
    ) -> Iterator[Specimen]:
        """The kernels of both ways; with `held` those alone that hold a token's sources in registers."""
        name = f"{n} sources, {reads} reads{name}"
        sources = [vector(tokens, width, dtype=dtypes[min(j, len(dtypes) - 1)]) for j in range(n)]
        queries, grads = vector(reads, width), [vector(tokens, width, dtype=dtypes[-1]) for _ in range(reads)]
        (launch,), result = plan_read(ReadInputs(queries, sources, 1e-6, dtypes[-1]))
        if not held or launch.kernel is read_token:
            yield specimen_of(launch, f"{name}, forward", width)
        dtop = [vector(tokens) for _ in range(reads)]
        earlier = [source if carried else None for source in sources]
        inputs = ReadGradInputs(queries, sources, result.inv_rms, result.logits, grads, dtop, earlier)
        launches, _ = plan_backward(inputs)
        if held and launches[0].kernel is not read_token_backward:
            return
        for launch, what in zip(launches, ("backward", "backward, queries"), strict=False):
            yield specimen_of(launch, f"{name}, {what}", width)

    for width in (896, 2048, 2304, 4096, 7168):
        for reads in (4, 6, 24):
            yield from both("", width, reads)
    for width in (960, 1168, 1264, 1536):
        yield from both("", width, 4)
    # the last shapes of the rows of `sealed.HELD` among them
    for width, reads, n in (
        (512, 3, 2),
        (512, 3, 8),
        (512, 4, 8),
        (1024, 7, 4),
        (2048, 4, 4),
        (4096, 8, 8),
        (512, 6, 20),
    ):
        yield from both(", fp32, held", width, reads, [fp32], n=n, held=True)
    for width, reads, n in ((2048, 4, 4), (2048, 8, 8), (8192, 4, 4)):
        yield from both(", held", width, reads, n=n, held=True)
    yield from both(", few tokens", 2304, 6, tokens=FEW)
    yield from both(", few tokens, fp32", 2304, 6, [fp32], tokens=FEW)
    yield from both(", fp32", 2304, 24, [fp32])
    yield from both(", first gradients", 2304, 6, carried=False)
    yield from both(", fp32", 2304, 6, [fp32])
    yield from both(", fp32 embedding", 2304, 6, [fp32, bf16])
    for n, reads in ((1, 4), (33, 8), (130, 11)):
        yield from both("", 2048, reads, n=n)


def specimens() -> Iterator[Specimen]:
    """Every kernel at every width that is looked at."""
    yield from of_sealed()
    yield from of_merge()


@contextmanager
def cache_of_its_own() -> Generator[None]:
    """Nothing is left in the user's Triton cache, unless TRITON_CACHE_DIR says where to keep it."""
    if "TRITON_CACHE_DIR" in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        try:
            yield
        finally:
            del os.environ["TRITON_CACHE_DIR"]


def _by_width(counts: dict[int, int]) -> str:
    """Accesses of 16 bytes, of 4 to 8 and of fewer."""
    wide = sum(n for width, n in counts.items() if width >= 16)
    narrow = sum(n for width, n in counts.items() if width < 4)
    return f"{wide} / {sum(counts.values()) - wide - narrow} / {narrow}"


def show(rows: Sequence[Built]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="kernels compiled for sm_90")
    for heading in ("kernel", "d"):
        table.add_column(heading, justify="left" if heading == "kernel" else "right", no_wrap=True)
    for heading in (
        "warps",
        "stages",
        "registers",
        "spilled\nst / ld, B",
        "shared\nKiB",
        "cp.async\n16 B / other",
        "loads\n16 / 4-8 / <4 B",
        "stores\n16 / 4-8 / <4 B",
        "dots",
        "barriers",
        "CTAs\nper SM",
        "occupancy",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        spilled = row.spill_stores or row.spill_loads
        table.add_row(
            row.name,
            str(row.width),
            str(row.warps),
            str(row.stages),
            str(row.registers),
            f"[red]{row.spill_stores} / {row.spill_loads}[/red]" if spilled else "0",
            f"{row.shared / 1024:.1f}",
            f"{row.async_16} / {row.async_other}",
            _by_width(row.loads),
            _by_width(row.stores),
            str(row.dots),
            str(row.barriers),
            str(row.ctas) if row.ctas else "[red]0[/red]",
            f"{row.occupancy:.0%}",
        )
    # A pipe has no width of its own: rows of a record must not wrap.
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def write(path: Path, rows: Sequence[Built]) -> None:
    """The record: what was built, and with which compilers."""
    import triton

    from attnres.files import write_json

    release = subprocess.run([tool("ptxas"), "--version"], check=True, capture_output=True, text=True).stdout
    version = re.search(r"V([\d.]+)", release)
    record = {"target": "sm_90a", "triton": triton.__version__, "ptxas": version[1] if version else release.strip()}
    write_json(path, {**record, "kernels": [asdict(row) for row in rows]})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only kernels whose name starts with one of these")
    parser.add_argument("--width", nargs="+", type=int, metavar="D", help="only these widths")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record there")
    parser.add_argument("--sass", type=Path, metavar="FOLDER", help="keep each kernel's PTX and SASS there")
    args = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        raise SystemExit("TRITON_INTERPRET is set: interpreted kernels cannot be compiled; unset it")

    specimens_to_build = [
        specimen
        for specimen in specimens()
        if (args.only is None or specimen.name.startswith(tuple(args.only)))
        and (args.width is None or specimen.width in args.width)
    ]
    if not specimens_to_build:
        known = sorted({(s.name, s.width) for s in specimens()})
        raise SystemExit(f"no kernel fits; there are {', '.join(f'{name} ({width})' for name, width in known)}")
    with cache_of_its_own():
        rows = [build(specimen, args.sass) for specimen in specimens_to_build]
    show(rows)
    if args.json is not None:
        write(args.json, rows)


if __name__ == "__main__":
    main()
