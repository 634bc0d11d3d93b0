"""mutations.py: what its rules make, and that it tells a noticed fault from one that is not."""

import mutations
import pytest
from tiny import LINUX, ROOT

SOURCE = '''"""Text 1."""
import numpy as np
ROOT = __file__ + "1"
def f(x: int = 2, *, flag: bool = True) -> int:
    """Text 2."""
    if x < 3 and flag:
        raise ValueError(f"{x + 1}")
    y = x
    y = np.min(y, key=-x)
    y += x.sum(1)
    z = zip(x), zip(*x), x.repeat_interleave(2)
    return [a for a in y if a is None], g(a, b), h((0, a))
def describe():
    return 1 + 2
'''
FAULTS = """
def f(x: int=3, *, flag: bool=True) -> int:
def f(x: int=2, *, flag: bool=False) -> int:
if not (x < 3 and flag):
if x < 3 or flag:
if x <= 3 and flag:
if x < 4 and flag:
pass  # raise ValueError(f'{x + 1}')
pass  # y = np.min(y, key=-x)
y = np.max(y, key=-x)
y = np.min(y)
y = np.min(y, key=x)
pass  # y += x.sum(1)
y -= x.sum(1)
y += x.sum()
y += x.sum(2)
z = (zip([*x][::-1]), zip(*x), x.repeat_interleave(2))
z = (zip(x), zip(*x), x.repeat(2))
z = (zip(x), zip(*x), x.repeat_interleave())
z = (zip(x), zip(*x), x.repeat_interleave(3))
return ([a for a in y], g(a, b), h((0, a)))
return ([a for a in y if a is not None], g(a, b), h((0, a)))
return ([a for a in y if a is None], g(b, a), h((0, a)))
return ([a for a in y if a is None], g(a, b), h((a, 0)))
return ([a for a in y if a is None], g(a, b), h((1, a)))
"""
RIGHT = """def add(a, b):
    return a + b + 0
"""
TEST = """from right import add

def test_add():
    assert add(1, 2) == 3
"""


def test_each_rule_makes_its_fault_and_text_is_left_alone():
    found = mutations.faults_of("f.py", SOURCE)
    assert sorted(fault.line for fault in found) == sorted(FAULTS.strip().splitlines())


@pytest.mark.parametrize("file", mutations.TESTS | mutations.HAND_WRITTEN)
def test_the_lists_fit_the_code(file):
    faults, misfits = mutations.chosen(file, mutations.TESTS.get(file, ()))
    assert misfits == [] and faults
    for path, _, name in {test.partition("::") for fault in faults for test in fault.tests}:
        assert f"def {name.partition('[')[0]}" in (ROOT / path).read_text("utf-8"), (path, name)


def test_lists_that_do_not_fit_are_an_error(monkeypatch, tmp_path):
    (tmp_path / "right.py").write_text(RIGHT)
    monkeypatch.setattr(mutations, "ROOT", tmp_path)
    monkeypatch.setattr(mutations, "EQUIVALENT", {"right.py": {"why": ["return a + b - 0", "return 1"]}})
    monkeypatch.setattr(mutations, "HAND_WRITTEN", {"right.py": [("a + b", "b", "t"), ("c", "d", "t")]})
    faults, misfits = mutations.chosen("right.py", ("t",))
    assert [fault.line for fault in faults] == ["return a - b + 0", "return a + b + 1", "a + b -> b"]
    assert [line.split(": ")[-1] for line in misfits] == ["return 1", "'c'"]
    with pytest.raises(SystemExit, match="2"):
        mutations.main(["right.py", "--tests", "t"])


@pytest.mark.skipif(not LINUX, reason="mutations.py forks")
def test_a_fault_is_noticed_or_not(monkeypatch, tmp_path, capfd):
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "test_right.py").write_text(TEST)
    monkeypatch.setattr(mutations, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match="True"):
        mutations.main(["right.py", "--tests", "test_right.py"])
    lines = [line.split(" s  ") for line in capfd.readouterr().out.splitlines() if " s  " in line]
    assert sorted((word.rpartition("  ")[0].strip(), fault) for word, fault in lines) == [
        ("NOT NOTICED", "right.py:2: return a + b - 0  []"),
        ("noticed", "right.py:2: return a + b + 1  [test_add]"),
        ("noticed", "right.py:2: return a - b + 0  [test_add]"),
    ]
