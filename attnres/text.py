"""Format numbers, amounts, lists of names, names of runs and tables as text. None and NaN become a dash."""

import csv
import io
import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence

UNKNOWN = "–"
AMOUNTS = ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k"))


def whole_characters(text: str) -> str:
    """Return the text with U+FFFD for lone surrogates, which come from arguments that are no UTF-8 and from JSON
    escapes.

    >>> whole_characters("caf\\udce9")
    'caf\ufffd'
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def number(value: float | None, digits: int = 3, *, signed: bool = False) -> str:
    """Return a number with fixed digits and a true minus sign; zero has no sign.

    >>> number(-0.1162, signed=True), number(12345.6, 0), number(None)
    ('−0.116', '12,346', '–')
    """
    if value is None or math.isnan(value):
        return UNKNOWN
    text = f"{value:{'+' if signed else ''},.{digits}f}"
    return text.replace("-", "−") if text.strip("+-0.") else text.lstrip("+-")


def chance(p: float) -> str:
    """Return a probability with three digits, four below 0.1.

    >>> chance(0.12345), chance(0.0123), chance(1e-9)
    ('0.123', '0.0123', '< 0.0001')
    """
    return "< 0.0001" if p < 0.00005 else number(p, 3 if p >= 0.1 else 4)


def tick(value: float) -> str:
    """Return a number for an axis in three significant digits, without trailing zeros.

    Large numbers are in k, M, B and T; larger ones, and those below a ten-thousandth, are powers of ten.

    >>> tick(-0.05), tick(20.25), tick(1500), tick(22937600), tick(3e-5), tick(1e18)
    ('−0.05', '20.2', '1.5 k', '22.9 M', '3e−5', '1e18')
    """
    if math.isnan(value):
        return UNKNOWN
    rounded = float(f"{value:.3g}") + 0.0  # adding zero removes the sign of -0
    size, unit = next((amount for amount in AMOUNTS if amount[0] <= abs(rounded) < 1e15), (1.0, ""))
    mantissa, _, exponent = f"{rounded / size:.3g}".partition("e")
    return (mantissa + (f"e{int(exponent)}" if exponent else "") + unit).replace("-", "−")


def digits_for(value: float, error: float | None) -> int:
    """Return the number of digits for a value with a standard error: three below 10, two below 1,000, none above; up to
    six if the error needs them."""
    digits = 3 if abs(value) < 10 else 2 if abs(value) < 1000 else 0
    needed = math.ceil(-math.log10(error)) if error and 0 < error < math.inf else 0
    return max(digits, min(6, needed))


def with_error(value: float | None, error: float | None, *, signed: bool = False, digits: int | None = None) -> str:
    """Return value ± standard error, both by default to `digits_for` them; without an error if it is unknown.

    >>> with_error(-0.01234, 0.0004), with_error(494.4, 21.33), with_error(2.5, None)
    ('−0.0123 ± 0.0004', '494.40 ± 21.33', '2.500')
    """
    if value is None:
        return UNKNOWN
    digits = digits_for(value, error) if digits is None else digits
    text = number(value, digits, signed=signed)
    return text if error is None or math.isnan(error) else f"{text} ± {number(error, digits)}"


def memory(size: float) -> str:
    """Return bytes in GB or MB (powers of ten)."""
    if math.isnan(size):
        return UNKNOWN
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def duration(seconds: float) -> str:
    """Return hours, minutes or seconds, to the precision of an estimate.

    >>> duration(42), duration(310), duration(8000)
    ('42 s', '5 min', '2 h 13 min')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def one_line(text: str) -> str:
    """Return text on one line, with control characters escaped.

    >>> one_line("a\\nb\\tc\\x1b[1m")
    'a b c\\\\x1b[1m'
    """
    spaced = " ".join(text.split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in spaced)


def counted(count: int, what: str) -> str:
    """Return a count with its noun, in the plural if needed.

    >>> counted(1, "window"), counted(1234, "window")
    ('1 window', '1,234 windows')
    """
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def settings_text(settings: Mapping[str, object]) -> str:
    """Return settings as one line of text.

    >>> settings_text({"num_blocks": 8, "query_std": 0.02})
    'num_blocks=8, query_std=0.02'
    """
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def with_settings(name: str, settings: Mapping[str, object] | None) -> str:
    """Return a mechanism's name, with the given settings in brackets.

    >>> with_settings("block", {"num_blocks": 8}), with_settings("full", None)
    ('block (num_blocks=8)', 'full')
    """
    return f"{name} ({settings_text(settings)})" if settings else name


def first_of(names: Sequence[str], what: str) -> str:
    """Return the first of several names, and how many more there are.

    >>> first_of(["a", "b", "c"], "other tensor"), first_of(["a"], "other tensor")
    ("'a' and 2 other tensors", "'a'")
    """
    return f"'{names[0]}'" + (f" and {counted(len(names) - 1, what)}" if len(names) > 1 else "")


def listed(names: Sequence[str]) -> str:
    """Return names as a list in a sentence.

    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def csv_text(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table as CSV, one line of text for the head and each row.

    >>> csv_text(["name", "loss"], [["block, 4", 4.39]])
    'name,loss\\n"block, 4",4.39\\n'
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    return text.getvalue()


_NAME = re.compile(r"(?P<label>.+)-seed(?P<seed>\d+)")


def run_name(label: str, seed: int) -> str:
    """Return the name of the run of a variant and seed, which is its folder's.

    >>> run_name("block", 1)
    'block-seed1'
    """
    return f"{label}-seed{seed}"


def label_and_seed(name: str) -> tuple[str, int] | None:
    """Split a run's name into label and seed; None if it is no run's name.

    >>> label_and_seed("block-num_blocks4-seed10"), label_and_seed("figures")
    (('block-num_blocks4', 10), None)
    """
    match = _NAME.fullmatch(name)
    return (match["label"], int(match["seed"])) if match else None


RIGHT_TO_LEFT = ("R", "AL", "AN")
UNSEEN = ("Cc", "Cf", "Zl", "Zp", "Zs")


def visible(piece: str) -> str:
    """Return a token's text with invisible characters made visible: spaces at its ends, line ends, tabs, and codes for
    control and format characters and other spaces. Right-to-left text is isolated from the words around it."""
    words = piece.strip(" ")
    front = len(piece) - len(piece.lstrip(" "))
    shown = "␣" * front + words + "␣" * (len(piece) - front - len(words))
    shown = shown.replace("\r", "\\r").replace("\n", "↵").replace("\t", "⇥")
    shown = "".join(map(_seen, shown)) or "∅"
    return f"\u2068{shown}\u2069" if any(unicodedata.bidirectional(c) in RIGHT_TO_LEFT for c in shown) else shown


def _seen(letter: str) -> str:
    code = ord(letter)
    if code < 32 or code == 127:  # few fonts have the control pictures ␀ to ␡
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if letter != " " and unicodedata.category(letter) in UNSEEN else letter
