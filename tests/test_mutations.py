"""mutations.py: its list fits the code, and it tells a wrong line that is noticed from one that is not."""

import json
import subprocess

import mutations
import pytest
from tiny import LINUX, PYTHON, ROOT
from wrong_lines import FORMULAS, MUTATIONS, Mutation

RUN = """import json, sys
import mutations
from wrong_lines import Mutation
mutations.warm_up()
rows = [Mutation(*row) for row in json.loads(sys.argv[1])]
mutations.run(rows, 2, lambda mutation, *found: print(mutation.fault, *found))
"""


def test_every_wrong_line_is_about_a_line_that_is_there_once():
    assert mutations.misfits(MUTATIONS) == []
    assert len(MUTATIONS) > 60


def test_a_list_that_does_not_fit_is_said():
    wrong = [
        Mutation("trainer/ppo.py", "no such line", "x", "old"),
        Mutation("trainer/ppo.py", "def ", "x", "many"),
        Mutation("trainer/ppo.py", "def gae(", "def gae(", "the same"),
        Mutation("trainer/ppo.py", "def gae(", "x", "no test", ("tests/test_nothing.py",)),
    ]
    assert [line.split("(")[-1] for line in mutations.misfits(wrong)] == [
        "old)",
        "many)",
        "the same)",
        "no test)",
    ]


@pytest.mark.skipif(not LINUX, reason="mutations.py forks")
def test_a_wrong_line_is_noticed_and_a_harmless_one_is_not():
    rows = [
        ("trainer/ppo.py", "ratio - 1 - log_ratio", "log_ratio - ratio + 1", "wrong", [FORMULAS]),
        ("trainer/ppo.py", "No I/O, no", "No I/O,  no", "harmless", [FORMULAS]),
        ("trainer/ppo.py", "import torch\n", "import torch x\n", "no Python", [FORMULAS]),
    ]
    command = [PYTHON, "-c", RUN, json.dumps(rows)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT / "tests", check=True)
    found = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert found["wrong"].startswith("wrong noticed test_policy_loss_by_hand")
    assert found["harmless"].startswith(f"harmless {mutations.UNNOTICED}")
    assert f"no Python {mutations.BROKEN}" in done.stdout


def test_words_that_choose_nothing_are_an_error():
    with pytest.raises(SystemExit, match="error: no mutation has one of these words"):
        mutations.main(["nonsense"])
