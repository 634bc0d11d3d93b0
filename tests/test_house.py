"""The structure of the code: imports go one way, and what is public has docstrings and types."""

import ast
import sys

from tiny import ROOT

# Packages by level, the lowest first. A module imports from its own package and from lower levels only.
LEVELS = """
errors
atomic_files progress_bar
model
dataset
trainer.compute trainer.user_code
trainer.generation trainer.rewards trainer.runs
trainer.environments
trainer.advantages
trainer.losses trainer.rollout
trainer.options
trainer
trainer.train_ppo trainer.train_sft trainer.train_reward chat export
dataset.demo
"""
LEVEL_OF = {room: level for level, line in enumerate(LEVELS.split("\n")) for room in line.split()}
SPECIAL = ("__init__", "__call__", "__len__", "__getitem__", "__iter__")  # what users of a class call
PLACES = ("*.py", "model/**/*.py", "dataset/**/*.py", "trainer/**/*.py")
# {module: its tree}
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): ast.parse(path.read_text(encoding="utf-8"))
    for place in PLACES
    for path in ROOT.glob(place)
}


def room_of(module):
    """A module's dotted name -> the longest room of LEVELS that it is in."""
    return max((room for room in LEVEL_OF if f"{module}.".startswith(f"{room}.")), key=len, default=None)


def imports_of(tree):
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where something comes from"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found & FILES.keys()


def wrong_imports(module, imported):
    room = room_of(module)
    pairs = [(other, room_of(other)) for other in imported]
    return [other for other, its in pairs if its != room and LEVEL_OF[its] >= LEVEL_OF[room]]


def test_every_file_has_a_place_and_imports_point_down():
    """To the same level only within a package."""
    wrong = {module: wrong_imports(module, imports_of(tree)) for module, tree in FILES.items()}
    assert {module: found for module, found in wrong.items() if found} == {}
    assert wrong_imports("trainer.compute.scoring", {"trainer.runs.metrics"})  # up
    assert wrong_imports("trainer.rewards.combine", {"trainer.runs.checkpoints"})  # across
    assert all(map(room_of, FILES))
    assert len(FILES) > 50


def functions_of(body, inside=""):
    """(qualified name, node) of a module's public functions and methods, not of those inside functions."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from functions_of(node.body, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef) and (not node.name.startswith("_") or node.name in SPECIAL):
            yield inside + node.name, node


def is_untyped(name, node):
    """Whether an argument or the result has no type. Triton's kernels have none."""
    given = [x for x in ast.walk(node.args) if isinstance(x, ast.arg)]
    if "." in name and "staticmethod" not in map(ast.unparse, node.decorator_list):
        given = [x for x in given if x.arg not in ("self", "cls")]
    no_result = node.returns is None and not (node.name == "__init__" and given)
    return "constexpr" not in ast.unparse(node.args) and (no_result or not all(x.annotation for x in given))


def untyped(tree):
    return [name for name, node in functions_of(tree.body) if is_untyped(name, node)]


def test_public_functions_have_types():
    assert {module: untyped(tree) for module, tree in FILES.items() if untyped(tree)} == {}
    source = "class A:\n def f(self, x) -> int: ...\n def g(self): ...\n def h(self, x: int) -> int: ..."
    assert untyped(ast.parse(source)) == ["A.f", "A.g"]


def test_what_is_public_has_a_docstring_and_it_is_short():
    """The why stands in docs/. Scripts begin with the algorithm."""
    for module, tree in FILES.items():
        free = "make_" in module or module.endswith("__init__")
        assert free or ast.get_docstring(tree), module
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                said = ast.get_docstring(node) or ""
                assert len([line for line in said.splitlines() if line]) <= 5, (module, node.name)
                private = node.name.startswith("_") or node.name in ("main", "parse_args")
                assert said or private or free or node not in tree.body, (module, node.name)


def test_nothing_beside_the_scripts_hides_what_they_import():
    """Python looks for a module in the script's folder first."""
    libraries = {
        name for name, x in sys.modules.items() if "site-packages" in (getattr(x, "__file__", 0) or "")
    }
    beside = {path.stem for path in (ROOT / "trainer").iterdir()} - {"__init__", "__pycache__"}
    assert not beside & (libraries | sys.stdlib_module_names)
