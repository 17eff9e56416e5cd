"""`attnres check`: one line a check, status 1 where one fails, 2 for a mistake."""

import pytest

from attnres import cli
from attnres.models.check import MODEL_CHECKS
from attnres.residuals.check import CHECKS

MECHANISM = '''
"""A mechanism of a user's own."""
from attnres.residuals.mechanisms.standard import Standard


class Mine(Standard):
    """h_l = sum_{i<l} v_i."""

    name = "mine"


class Wrong(Standard):
    """h_l = sum_{i<l} v_i, and says otherwise."""

    name = "wrong"
    traits = Standard.traits._replace(sums_to_one=True, starts_standard=False)
'''


@pytest.fixture
def run(tmp_path, registered, capsys):
    """(exit status, lines on stdout, stderr) of `attnres check`; {file} is one with mechanisms."""
    file = tmp_path / "mine.py"
    file.write_text(MECHANISM)

    def run(*arguments):
        code = 0
        try:
            cli.main(["check", *(argument.format(file=file) for argument in arguments)])
        except SystemExit as left:
            code = left.code
        printed = capsys.readouterr()
        return code, printed.out.splitlines(), printed.err

    return run


@pytest.mark.long
def test_a_file_of_a_users_own_is_checked_line_by_line(run):
    code, lines, _ = run("{file}:Mine")
    assert code == 0 and [line[:14].strip() for line in lines] == [*CHECKS, *MODEL_CHECKS]
    assert all(line[15:].startswith("ok ") for line in lines)


def test_what_fails_is_said_and_is_the_status(run):
    code, lines, _ = run("{file}:Wrong")
    failed = [line for line in lines if "FAILED" in line]
    assert code == 1 and [line.split()[0] for line in failed] == ["weights", "start"]
    assert "traits say sums_to_one=True" in failed[0] and lines[-1] == "2 checks failed"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["blokc"], "did you mean 'block'"),
        (["{file}:Mnie"], "did you mean 'Mine'"),
        (["missing.py:Mine"], "there is no file"),
        (["block", "--settings", "blocksize=2"], "did you mean 'block_size'"),
        (["block", "--settings", "block_size=99"], "fits no network"),
        ([], "is missing"),
    ],
)
def test_a_mistake_is_one_sentence(run, arguments, message):
    code, lines, error = run(*arguments)
    assert code == 2 and not lines and message in error
