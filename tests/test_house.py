"""The structure of the code: imports go one way, and what is public has docstrings."""

import ast
from pathlib import Path

import pytest
from tiny import ROOT

# Packages by level, the lowest first. A module imports from its own package and from lower levels only.
LEVELS = (
    ({"errors"},),
    ({"atomic_files"}, {"progress_bar"}),
    ({"model"},),
    ({"dataset"},),
    ({"trainer.compute"},),
    ({"trainer.generation"}, {"trainer.rewards"}, {"trainer.runs"}, {"trainer.ppo"}),
    ({"trainer.collect"},),
    ({"trainer.options"},),
    ({"trainer"},),  # what the scripts share
    ({"trainer.train_ppo"}, {"trainer.train_sft"}, {"trainer.train_reward"}, {"chat"}, {"export"}),
    ({"dataset.demo"},),
)
SPECIAL = ("__init__", "__call__", "__len__", "__getitem__", "__iter__")  # what users of a class call
FILES = [
    path
    for path in sorted(ROOT.rglob("*.py"))
    if path.relative_to(ROOT).parts[0] in ("model", "dataset", "trainer") or path.parent == ROOT
]


def room_of(module):
    """A module's dotted name -> (its level, its package or, at the lowest level, itself)."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        for level, rooms in enumerate(LEVELS):
            for room in rooms:
                if name in room:
                    return level, name if level else module
    return None


def imports_of(path):
    """The modules of this project that a file imports, inside functions as well."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where something comes from"
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if exists(name)}


def exists(module):
    return ROOT.joinpath(*module.split(".")).with_suffix(".py").is_file()


def wrong_imports(name, imported):
    """Those of the imported modules that the module ``name`` must not import."""
    level, room = room_of(name)
    return [
        other
        for other in imported
        if room_of(other) and room_of(other)[1] != room and room_of(other)[0] >= level
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path):
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    assert wrong_imports(name, imports_of(path)) == []


def test_a_wrong_import_is_noticed():
    assert wrong_imports("trainer.compute.scoring", {"trainer.runs.metrics"})  # up
    assert wrong_imports("trainer.rewards.combine", {"trainer.runs.checkpoints"})  # to the same level
    assert wrong_imports("model.loading", {"dataset.formats"})
    assert wrong_imports("trainer.supervised", {"trainer.train_sft"})
    assert not wrong_imports("trainer.train_ppo", {"trainer.ppo", "trainer.compute.rollout_data"})
    assert not wrong_imports("trainer.runs.resume", {"trainer.runs.checkpoints", "trainer.compute.memory"})


def test_every_file_has_a_place():
    assert all(room_of(".".join(path.relative_to(ROOT).with_suffix("").parts)) for path in FILES)
    assert len(FILES) > 50


def test_public_functions_and_classes_have_docstrings():
    for path in FILES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        public = [
            node
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
        ]
        if not Path(path).name.startswith(("make_", "__init__")):
            assert ast.get_docstring(tree), path
            silent = [
                n.name for n in public if not ast.get_docstring(n) and n.name not in ("main", "parse_args")
            ]
            assert silent == [], f"{path.relative_to(ROOT)}: {silent}"


def functions_of(body, inside=""):
    """(qualified name, node) of a module's public functions and methods, not of those inside functions."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from functions_of(node.body, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef) and (not node.name.startswith("_") or node.name in SPECIAL):
            yield inside + node.name, node


def is_untyped(name, node):
    """Whether an argument or the result has no type. Triton's kernels have none."""
    arguments = node.args
    given = [
        *arguments.posonlyargs,
        *arguments.args,
        *arguments.kwonlyargs,
        arguments.vararg,
        arguments.kwarg,
    ]
    decorators = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
    if "." in name and "staticmethod" not in decorators:
        given = given[1:]
    untyped = [one.arg for one in given if one and not one.annotation]
    no_result = node.returns is None and not (node.name == "__init__" and any(given))
    return "constexpr" not in ast.unparse(arguments) and (bool(untyped) or no_result)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_public_functions_have_types(path):
    functions = functions_of(ast.parse(path.read_text(encoding="utf-8")).body)
    assert [name for name, node in functions if is_untyped(name, node)] == []


def test_a_missing_type_is_noticed():
    source = "class A:\n def f(self, x) -> int: ...\n def g(self): ...\n def h(self, x: int) -> int: ..."
    found = [name for name, node in functions_of(ast.parse(source).body) if is_untyped(name, node)]
    assert found == ["A.f", "A.g"]


def test_docstrings_are_short():
    """The why stands in docs/. Scripts begin with the algorithm."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                lines = [line for line in (ast.get_docstring(node) or "").splitlines() if line]
                assert len(lines) <= 5, f"{path}: {node.name}"
