"""Mutations: lines made wrong by rule, each of which must make a fast test fail.

    python tests/mutations.py                                  the formulas, each file with its tests (TESTS)
    python tests/mutations.py trainer/ppo.py                   one file of them
    python tests/mutations.py chat.py --tests tests/test_chat.py --sample 40 --seed 0
    python tests/mutations.py trainer/ppo.py --lines 50-80 --list

It works on the checkout in which it is started. The rules walk a file's syntax tree. Each fault is made in a
copy of the checkout, where the tests run file by file, up to the first failure. Exit code 1: a fault that no
test noticed, or tests that fail without any; 2: a list that does not fit the code. equivalent_faults.py has
the faults that change no result, and a few that no rule makes.
"""

import argparse
import ast
import copy
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from equivalent_faults import EQUIVALENT, HAND_WRITTEN

ROOT = Path.cwd()  # of the checkout
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "out", "docs", "results", "node_modules", ".*_cache")
NOTICED, UNNOTICED = "noticed", "NOT NOTICED"
SAMPLE = 25  # of a file, where no file is named

OPTIONS = "best ema kl_target missing_eos offline ptx replay"
TESTS = {f"trainer/options/{name}.py": [f"tests/test_{name}.py"] for name in OPTIONS.split()}
TESTS |= {  # the quickest first
    "trainer/ppo.py": ["tests/test_ppo.py"],
    "trainer/train_ppo.py": [f"tests/test_{name}.py" for name in ("whole_step", "value_scale", "ptx")],
    "trainer/options/filter_groups.py": ["tests/runs/test_several_answers.py"],
    "trainer/value_scale.py": ["tests/test_value_scale.py"],
    "trainer/generation/sampling.py": ["tests/generation/test_sampling.py"],
    "trainer/compute/scoring.py": ["tests/compute/test_scoring.py"],
}
# Functions whose lines are text or a table of defaults: tests of flags and messages are about these.
WITHOUT_FAULTS = ("flag_parser", "parse_args", "build", "describe", "__repr__")

OPERATORS = {
    ast.Add: ast.Sub,
    ast.Mult: ast.Div,
    ast.Lt: ast.LtE,
    ast.Gt: ast.GtE,
    ast.Eq: ast.NotEq,
    ast.Is: ast.IsNot,
    ast.In: ast.NotIn,
    ast.And: ast.Or,
    ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift,
}
OPERATORS |= {wrong: right for right, wrong in OPERATORS.items()}
OPERATORS |= {ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult}
NEGATIONS = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)  # their swap is the negation
NAMES = {"min": "max", "minimum": "maximum", "amin": "amax", "argmin": "argmax", "any": "all"}
NAMES |= {"zeros": "ones", "zeros_like": "ones_like", "new_zeros": "new_ones", "floor": "ceil"}
NAMES |= {wrong: right for right, wrong in NAMES.items()}
# Arguments that no test on a CPU can miss, and safeguards.
LEFT_ALONE = ("device", "non_blocking", "pin_memory", "strict", "stacklevel")


class Fault(NamedTuple):
    """``source``: the text of ``file`` with a fault in line ``number``, which becomes ``line``."""

    file: str
    number: int
    line: str
    source: str
    tests: tuple = ()


# ---------------------------------------------------------------------------------------------- the rules


def changed(node, **fields):
    other = copy.copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


def with_item(items, place, *new):
    return [*items[:place], *new, *items[place + 1 :]]


def wrong_expressions(node, modules):
    """-> the wrong expressions for a right one. modules: the names that the file imports."""
    match node:
        case ast.BinOp(op=ast.BitOr(), right=ast.Dict()):
            return
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in OPERATORS:
            yield changed(node, op=OPERATORS[type(op)]())
        case ast.Compare(ops=ops):
            for place, op in enumerate(ops):
                yield changed(node, ops=with_item(ops, place, OPERATORS[type(op)]()))
        case ast.UnaryOp(op=ast.USub() | ast.Not(), operand=operand):
            yield operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield ast.Constant(value + 1)
        case ast.Constant(value=float(value)):
            yield ast.Constant(-value or 1.0)
        case ast.Name(id=name) if name in NAMES:
            yield changed(node, id=NAMES[name])
        case ast.Attribute(attr=name) if name in NAMES:
            yield changed(node, attr=NAMES[name])
        case ast.IfExp(test=test) if not is_negation(test):
            yield changed(node, test=ast.UnaryOp(ast.Not(), test))
        case ast.Call():
            yield from wrong_calls(node, modules)
        case (
            ast.ListComp(generators=[one, *rest])
            | ast.GeneratorExp(generators=[one, *rest])
            | ast.DictComp(generators=[one, *rest])
            | ast.SetComp(generators=[one, *rest])
        ) if one.ifs:
            yield changed(node, generators=[changed(one, ifs=one.ifs[1:]), *rest])


def wrong_calls(node, modules):
    """The last two arguments swapped, or a method's only one left out; each keyword left out or renamed."""
    function, args, keywords = node.func, node.args, node.keywords
    is_method = isinstance(function, ast.Attribute) and root(function) not in modules
    starred = any(isinstance(x, ast.Starred) for x in args[-2:])
    if len(args) > 1 and name_of(function) not in NAMES and not starred:
        yield changed(node, args=[*args[:-2], args[-1], args[-2]])
    elif is_method and args and "device" not in name_of(args[-1]):
        yield changed(node, args=args[:-1])
    for place, keyword in enumerate(keywords):
        if keyword.arg in NAMES:
            renamed = changed(keyword, arg=NAMES[keyword.arg])
            yield changed(node, keywords=with_item(keywords, place, renamed))
        elif keyword.arg not in LEFT_ALONE:
            yield changed(node, keywords=with_item(keywords, place))
    for place, x in enumerate(args):
        if isinstance(x, ast.Tuple) and len(x.elts) == 2:
            yield changed(node, args=with_item(args, place, changed(x, elts=x.elts[::-1])))


def is_negation(test):
    if isinstance(test, ast.Compare):
        return len(test.ops) == 1 and isinstance(test.ops[0], NEGATIONS)
    return isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)


def name_of(node):
    return getattr(node, "attr", None) or getattr(node, "id", "")


def root(node):
    """The name that a chain of attributes, calls and subscripts begins with."""
    while node and not isinstance(node, ast.Name):
        node = getattr(node, "value", None) or getattr(node, "func", None)
    return name_of(node)


def may_be_left_out(node, bound):
    """Whether a statement is left out. bound: the names that have had a value before it."""
    match node:
        case ast.Expr(value=ast.Constant()):
            return False
        case ast.Assign(targets=[target]):
            names = {x.id for x in ast.walk(target) if isinstance(x, ast.Name)}
            return isinstance(target, ast.Attribute | ast.Subscript) or names <= bound
    return isinstance(node, ast.Expr | ast.AugAssign | ast.Raise | ast.Break | ast.Continue | ast.Delete)


class Rules(ast.NodeVisitor):
    """Collects (node, the node that takes its place) in ``found``."""

    def __init__(self, tree):
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        self.modules = {(x.asname or x.name).split(".")[0] for node in imports for x in node.names}
        self.bound, self.found = set(), []

    def of(self, node):
        """What they make in a statement of the module, but not in what puts the checkout on sys.path."""
        self.found = []
        names = {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}
        if isinstance(node, ast.FunctionDef | ast.ClassDef) or not names & {"sys", "__file__"}:
            self.visit(node)
        return self.found

    def generic_visit(self, node):
        if isinstance(node, ast.expr):
            self.found += [(node, wrong) for wrong in wrong_expressions(node, self.modules)]
        elif isinstance(node, ast.stmt) and may_be_left_out(node, self.bound):
            self.found.append((node, ast.Pass()))
        if isinstance(node, ast.AugAssign) and type(node.op) in OPERATORS.keys() - {ast.BitOr}:
            self.found.append((node, changed(node, op=OPERATORS[type(node.op)]())))
        if isinstance(node, ast.If) and not is_negation(node.test):
            self.found.append((node.test, ast.UnaryOp(ast.Not(), node.test)))
        super().generic_visit(node)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            self.bound.add(node.id)

    def visit_FunctionDef(self, node):
        if node.name in WITHOUT_FAULTS:
            return
        outside, arguments = self.bound, node.args
        self.bound = {x.arg for x in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        for x in (*arguments.defaults, *arguments.kw_defaults, *node.body):
            if x:
                self.visit(x)
        self.bound = outside

    def visit_ClassDef(self, node):
        for x in node.body:
            self.visit(x)

    def visit_AnnAssign(self, node):
        if node.value:
            self.visit(node.value)
        if isinstance(node.target, ast.Name):
            self.bound.add(node.target.id)

    def visit_If(self, node):
        if "__name__" not in ast.unparse(node.test):
            self.generic_visit(node)

    def visit_Raise(self, node):
        self.found.append((node, ast.Pass()))  # what the message says is for people

    def visit_keyword(self, node):
        if node.arg not in LEFT_ALONE:
            self.visit(node.value)

    def visit_JoinedStr(self, node):
        pass  # text

    visit_Import = visit_ImportFrom = visit_Assert = visit_JoinedStr


class Swap(ast.NodeTransformer):
    """Puts one node in the place of another."""

    def __init__(self, old, new):
        self.old, self.new = old, new

    def visit(self, node):
        return self.new if node is self.old else self.generic_visit(node)


def faults_of(file, source, tests=()):
    """All faults that the rules make in a file -> list of ``Fault``, by their places."""
    lines = source.splitlines()
    tree = ast.parse(source)
    rules, faults = Rules(tree), []
    for whole in tree.body:
        first = min(x.lineno for x in (whole, *getattr(whole, "decorator_list", ()))) - 1
        right = ast.unparse(whole)
        made = {right}
        for node, new in rules.of(whole):
            wrong = ast.unparse(Swap(node, new).visit(copy.deepcopy(whole, {id(node): node})))
            if wrong in made:
                continue
            made.add(wrong)
            pairs = itertools.zip_longest(right.splitlines(), wrong.splitlines(), fillvalue="")
            line = next(b for a, b in pairs if a != b).strip()
            if isinstance(new, ast.Pass):
                line = f"pass  # {ast.unparse(node).splitlines()[0]}"
            text = "\n".join([*lines[:first], wrong, *lines[whole.end_lineno :], ""])
            faults.append(Fault(file, node.lineno, line, text, tests))
    return sorted(faults, key=lambda fault: fault.number)


def hand_written(file):
    """The faults that people found missing once -> (list of ``Fault``, what does not fit)."""
    faults, misfits = [], []
    source = (ROOT / file).read_text(encoding="utf-8")
    for old, new, test in HAND_WRITTEN.get(file, ()):
        if source.count(old) != 1:
            misfits.append(f"{file}: found {source.count(old)} times instead of once: {old!r}")
            continue
        number = source[: source.index(old)].count("\n") + 1
        faults.append(Fault(file, number, f"{old} -> {new}", source.replace(old, new), (test,)))
    return faults, misfits


def chosen(file, tests, sample=None, seed=0, lines=None):
    """The faults to try in a file -> (list of ``Fault``, misfits of the lists). A sample depends on the texts
    of the lines, not on their places."""
    source = (ROOT / file).read_text(encoding="utf-8")
    faults = faults_of(file, source, tuple(tests)) if sample != 0 else []
    known = EQUIVALENT.get(file, ())
    made = {fault.line for fault in faults}
    misfits = [f"{file}: no rule makes this: {line}" for line in known if faults and line not in made]
    faults = [fault for fault in faults if fault.line not in known]
    if lines:
        first, _, last = lines.partition("-")
        faults = [fault for fault in faults if int(first) <= fault.number <= int(last or first)]
    if sample is not None:
        faults.sort(key=lambda fault: zlib.crc32(f"{seed} {fault.line}".encode()))
        faults = sorted(faults[:sample], key=lambda fault: fault.number)
    more, wrong = ([], []) if lines else hand_written(file)
    return faults + more, misfits + wrong


# --------------------------------------------------------------------------------------------- the runs


def attempt(fault, limit=600):
    """Run a fault's tests, file by file, in a copy of the checkout -> (word, failing test, seconds)"""
    begun, word, failed = time.perf_counter(), UNNOTICED, ""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryDirectory() as parent:
        folder = shutil.copytree(ROOT, Path(parent) / "copy", ignore=LEFT_OUT)
        (folder / fault.file).write_text(fault.source, encoding="utf-8")
        for test in fault.tests:
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", test]
            given = {"cwd": folder, "env": environment, "capture_output": True, "text": True}
            try:
                done = subprocess.run(command, **given, timeout=limit)
            except subprocess.TimeoutExpired:
                word, failed = NOTICED, "it never ends"
                break
            if done.returncode:
                lines = [x for x in done.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))]
                failed = lines[0].split("::")[-1].split(" - ")[0] if lines else f"code {done.returncode}"
                word = NOTICED if done.returncode in (1, 2) or done.returncode < 0 else "no test ran"
                break
    return word, failed, time.perf_counter() - begun


def seconds_of(file, tests):
    """How long these tests take on the code as it is. SystemExit where they fail: then they prove nothing."""
    source = (ROOT / file).read_text(encoding="utf-8")
    word, test, seconds = attempt(Fault(file, 1, "nothing", source, tuple(tests)))
    if word != UNNOTICED:
        raise SystemExit(f"error: {file}: without any fault the tests do not pass: {word} {test}")
    return seconds


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("files", nargs="*", help="default: all that stand in TESTS")
    parser.add_argument("--tests", nargs="+", help="the quickest first; default: as in TESTS")
    parser.add_argument("--sample", type=int, help=f"of each file; default: all, or {SAMPLE} without files")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--lines", help="only of these lines, as 50 or 50-80")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="at a time")
    parser.add_argument("--list", action="store_true", help="only show them")
    args = parser.parse_args(argv)
    sample = args.sample if args.files or args.sample else SAMPLE
    plan, misfits = {}, []
    for file in args.files or TESTS | HAND_WRITTEN:
        if not (tests := args.tests or TESTS.get(file, ())) and args.files:
            parser.error(f"{file}: which tests? Give --tests")
        plan[file], wrong = chosen(file, tests, sample if tests else 0, args.seed, args.lines)
        misfits += wrong
    if misfits:
        print(*misfits, sep="\n", file=sys.stderr)
        raise SystemExit(2)
    if args.list:
        print(*(f"{fault.file}:{fault.number}: {fault.line}" for x in plan.values() for fault in x), sep="\n")
        return
    survivors = []
    for file, faults in plan.items():
        seconds = seconds_of(file, dict.fromkeys(test for fault in faults for test in fault.tests))
        print(f"{file}: {len(faults)} faults; without any its tests pass, in {seconds:.0f} s", flush=True)
        with ThreadPoolExecutor(args.jobs) as pool:
            tried = pool.map(partial(attempt, limit=20 + 4 * seconds), faults)
            for fault, (word, test, took) in zip(faults, tried, strict=True):
                line = f"{fault.file}:{fault.number}: {fault.line}"
                survivors += [line] if word != NOTICED else []
                print(f"{word:12} {took:5.1f} s  {line}  [{test}]", flush=True)
    print(f"\n{sum(map(len, plan.values()))} faults, {len(survivors)} not noticed")
    print(*survivors, sep="\n")
    raise SystemExit(bool(survivors))


if __name__ == "__main__":
    main()
