"""A user's function travels as its source, and every way to get it wrong is named."""

import pickle
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from data.user_code import UserCodeError, load

SCORER = """
from dataclasses import dataclass

@dataclass
class Verdict:
    value: "float"

def score(response, metadata):
    return Verdict(float(response == metadata["answer"])).value

def fail(response, metadata):
    return 1 / 0

constant = 7
"""


@pytest.fixture
def scorer(tmp_path: Path) -> Path:
    (tmp_path / "my_scorer.py").write_text(SCORER)
    return tmp_path / "my_scorer.py"


def test_the_function_runs(scorer: Path):
    function = load(f"{scorer}:score").function
    assert function("4", {"answer": "4"}) == 1.0
    assert function("5", {"answer": "4"}) == 0.0


def test_it_runs_in_a_process_that_lacks_the_file(scorer: Path, tmp_path: Path):
    (tmp_path / "code.pickle").write_bytes(pickle.dumps(load(f"{scorer}:score")))
    scorer.unlink()
    program = (
        "import pickle, sys; code = pickle.load(open(sys.argv[1], 'rb')); "
        "print(code.function('4', {'answer': '4'}), code.digest)"
    )
    out = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "code.pickle")],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    scorer.write_text(SCORER)
    assert out.stdout.split() == ["1.0", load(f"{scorer}:score").digest]


def test_a_traceback_shows_the_users_line(scorer: Path):
    code = pickle.loads(pickle.dumps(load(f"{scorer}:fail")))
    scorer.unlink()
    with pytest.raises(ZeroDivisionError) as raised:
        code.function("", {})
    assert "return 1 / 0" in "".join(traceback.format_exception(raised.value))


def test_the_digest_is_of_source_and_name(scorer: Path, tmp_path: Path):
    here = load(f"{scorer}:score").digest
    (tmp_path / "moved.py").write_text(SCORER)
    assert load(f"{tmp_path / 'moved.py'}:score").digest == here
    assert load(f"{scorer}:fail").digest != here
    scorer.write_text(SCORER.replace("==", "!="))
    changed = load(f"{scorer}:score")
    assert changed.digest != here
    assert changed.function("4", {"answer": "4"}) == 0.0  # not the module of the source before


def test_every_wrong_name_is_explained(scorer: Path, tmp_path: Path):
    with pytest.raises(UserCodeError, match=r"'exact': not a user function; write path/to/file\.py:function"):
        load("exact")
    with pytest.raises(UserCodeError, match=r"none\.py: cannot be read \(No such file or directory\)"):
        load(f"{tmp_path / 'none.py'}:score")
    with pytest.raises(UserCodeError, match=r"my_scorer\.py: no function 'scor'; did you mean score\?"):
        load(f"{scorer}:scor")
    with pytest.raises(UserCodeError, match=r"no function 'zzz'; it has dataclass, Verdict, score, fail, constant"):
        load(f"{scorer}:zzz")
    with pytest.raises(UserCodeError, match=r"constant is int; it must be a function"):
        _ = load(f"{scorer}:constant").function


def test_a_file_that_is_not_python_is_named_with_its_line(scorer: Path):
    scorer.write_text("x = 1\ndef score(:\n")
    with pytest.raises(UserCodeError, match=r"my_scorer\.py:2: not Python"):
        load(f"{scorer}:score")


@pytest.mark.parametrize(
    ("line", "reason"), [("1 / 0", "ZeroDivisionError: division by zero"), ("exit(3)", "SystemExit: 3")]
)
def test_a_file_that_fails_when_run_is_named(line: str, reason: str, scorer: Path):
    scorer.write_text(f"def score(a, b): ...\n{line}\n")
    code = load(f"{scorer}:score")  # reading it runs nothing
    for _ in range(2):  # the second time too: no half-made module stays
        with pytest.raises(UserCodeError, match=f"my_scorer.py: running it raises {reason}; mend the file"):
            _ = code.function
