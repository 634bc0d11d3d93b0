"""Mutations: lines made wrong by rule, each of which must make a fast test fail.

    python tests/mutations.py                                  the formulas, each file with its tests (TESTS)
    python tests/mutations.py trainer/ppo.py                   one file of them
    python tests/mutations.py chat.py --tests tests/test_chat.py
    python tests/mutations.py trainer/ppo.py --lines 50-80

It works on the checkout in which it is started. The rules walk a file's syntax tree. Each fault is made in a
copy of the checkout, where the tests run in a forked process up to the first failure: first those that run
the line, the quickest first. Exit code 1: a fault that no test noticed, or tests that fail without any; 2: a
list that does not fit the code. equivalent_faults.py has the faults that change no result, and a few that no
rule makes. Linux only.
"""

import argparse
import ast
import contextlib
import copy
import gc
import importlib
import json
import os
import shutil
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import NamedTuple

import pytest
from equivalent_faults import EQUIVALENT, HAND_WRITTEN

ROOT = Path.cwd()  # of the checkout
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "out", "node_modules", ".*_cache")
PYTEST = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--tb=short"]
NOTICED, UNNOTICED = "noticed", "NOT NOTICED"

WITHOUT_FP64 = "tests/test_mps.py::test_a_run_on_a_device_without_fp64_is_that_on_a_cpu[train_ppo]"
RECOMPUTED = "tests/test_whole_step.py::test_three_steps_equal_a_recomputation_in_plain_torch"
TESTS = {
    "trainer/advantages.py": [
        "tests/test_ppo.py",
        "tests/test_value_scale.py",
        "tests/test_step_rewards.py",
        WITHOUT_FP64,
    ],
    "trainer/losses.py": ["tests/test_ppo.py"],
    "trainer/train_ppo.py": [
        RECOMPUTED,
        "tests/test_ema.py::test_a_run_evaluates_and_saves_the_average",
        "tests/runs/test_several_answers.py",
        "tests/test_replay.py",
        "tests/dataset/test_dataset.py::test_answers_to_a_prompt_are_spread_over_minibatches",
        "tests/compute/test_loss_scale.py::test_what_a_lower_scale_cannot_help_ends_the_run_and_names_fp32",
        "tests/test_progress_bar.py::test_a_run_shows_all_its_phases_and_is_the_same_bit_for_bit",
        "tests/test_flags.py::test_a_flag_that_excludes_another_is_one_line_with_both_and_the_reason",
    ],
    "trainer/environments/conversation.py": ["tests/environments/test_conversation.py"],
    "trainer/environments/observations.py": [
        "tests/environments/test_observations.py",
        "tests/environments/test_conversation.py",
    ],
    "trainer/environments/tool_calls.py": ["tests/environments/test_tool_calls.py"],
    "trainer/options/best.py": ["tests/test_best.py"],
    "trainer/options/ema.py": ["tests/test_ema.py"],
    "trainer/options/filter_groups.py": [
        "tests/runs/test_several_answers.py",
        "tests/test_ppo.py::test_answers_without_a_score_leave_their_group",
    ],
    "trainer/options/kl_target.py": ["tests/test_kl_target.py", WITHOUT_FP64],
    "trainer/options/missing_eos.py": ["tests/test_missing_eos.py"],
    "trainer/options/offline.py": ["tests/test_offline.py"],
    "trainer/options/ptx.py": ["tests/test_ptx.py", f"{RECOMPUTED}[experts]"],
    "trainer/options/replay.py": ["tests/test_replay.py"],
    "trainer/generation/sampling.py": ["tests/generation/test_sampling.py"],
    "trainer/compute/scoring.py": [
        "tests/compute/test_scoring.py",
        f"{RECOMPUTED}[experts]",
        f"{RECOMPUTED}[all options]",
        "tests/model/test_families.py::test_family[GPT-2]",
        "tests/model/test_families.py::test_family[Mixtral]",
    ],
}
# Functions whose lines are text or a table of defaults: tests of flags and messages are about these.
WITHOUT_FAULTS = ("flag_parser", "parse_args", "build", "describe", "__repr__")
# These choose how fast a model runs, and compute nothing: any tokens would do for their comparison.
WITHOUT_FAULTS += ("pack_sequences", "prepare_training")

OPERATORS = {ast.Add: ast.Sub, ast.Mult: ast.Div, ast.Lt: ast.LtE, ast.Gt: ast.GtE, ast.Eq: ast.NotEq}
OPERATORS |= {ast.Is: ast.IsNot, ast.In: ast.NotIn, ast.And: ast.Or}
OPERATORS |= {ast.BitAnd: ast.BitOr, ast.LShift: ast.RShift}
OPERATORS |= {wrong: right for right, wrong in OPERATORS.items()}
OPERATORS |= {ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult}
NEGATIONS = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)  # their swap is the negation
NAMES = {"min": "max", "minimum": "maximum", "amin": "amax", "argmin": "argmax", "any": "all"}
NAMES |= {"zeros": "ones", "zeros_like": "ones_like", "new_zeros": "new_ones", "floor": "ceil"}
NAMES |= {wrong: right for right, wrong in NAMES.items()}
NAMES |= {"repeat_interleave": "repeat"}
# Arguments that no test of one process on a CPU can miss, and safeguards.
LEFT_ALONE = ("device", "non_blocking", "pin_memory", "strict", "stacklevel", "use_cache", "attention_mask")
LEFT_ALONE += ("shard_group",)


class Fault(NamedTuple):
    """What takes the place of ``right`` in ``whole``, a file's syntax tree or its text; ``line``: line
    ``number`` then."""

    file: str
    number: int
    line: str
    tests: tuple
    whole: ast.Module | str = ""
    right: ast.AST | str = ""
    wrong: ast.AST | str = ""

    def source(self):
        """The wrong file; without its comments, if a rule made it."""
        if isinstance(self.whole, str):
            return self.whole.replace(self.right, self.wrong)
        return ast.unparse(Put(self.right, self.wrong).visit(self.whole))


class Put(ast.NodeTransformer):
    """Puts one node into the place of another."""

    def __init__(self, old, new):
        self.old, self.new = old, new

    def visit(self, node):
        return self.new if node is self.old else self.generic_visit(node)


# ---------------------------------------------------------------------------------------------- the rules


def changed(node, **fields):
    """A copy of a node with other fields."""
    other = copy.copy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


def without(items, place):
    return [*items[:place], *items[place + 1 :]]


def wrong_expressions(node, modules):
    """-> the wrong expressions for a right one. modules: the names that the file imports."""
    match node:
        case ast.BinOp(op=ast.BitOr(), right=ast.Dict()):
            return
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in OPERATORS:
            yield changed(node, op=OPERATORS[type(op)]())
        case ast.Compare(ops=ops):
            for place, op in enumerate(ops):
                yield changed(node, ops=[*ops[:place], OPERATORS[type(op)](), *ops[place + 1 :]])
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
        case ast.Call(func=function, args=args, keywords=keywords):
            pair = args[-2:]
            if (
                len(pair) == 2
                and name_of(function) not in NAMES
                and not any(isinstance(x, ast.Starred) for x in pair)
            ):
                yield changed(node, args=[*args[:-2], pair[1], pair[0]])
            elif is_method(function, modules) and args and "device" not in name_of(args[-1]):
                yield changed(node, args=args[:-1])
            for place, keyword in enumerate(keywords):
                if keyword.arg in NAMES:
                    keyword = changed(keyword, arg=NAMES[keyword.arg])
                    yield changed(node, keywords=[*without(keywords, place), keyword])
                elif keyword.arg not in LEFT_ALONE:
                    yield changed(node, keywords=without(keywords, place))
            if name_of(function) == "zip" and not isinstance(args[-1], ast.Starred):
                yield changed(node, args=[*args[:-1], backwards(args[-1])])
            for place, x in enumerate(args):
                if isinstance(x, ast.Tuple) and len(x.elts) == 2:
                    turned = changed(x, elts=x.elts[::-1])
                    yield changed(node, args=[*args[:place], turned, *args[place + 1 :]])
        case ast.ListComp(generators=[one, *rest]) | ast.GeneratorExp(generators=[one, *rest]) if one.ifs:
            yield changed(node, generators=[changed(one, ifs=one.ifs[1:]), *rest])
        case ast.DictComp(generators=[one, *rest]) | ast.SetComp(generators=[one, *rest]) if one.ifs:
            yield changed(node, generators=[changed(one, ifs=one.ifs[1:]), *rest])


def backwards(rows):
    """-> [*rows][::-1]: each meets what belongs to another one."""
    rows = ast.List([ast.Starred(rows, ast.Load())], ast.Load())
    return ast.Subscript(rows, ast.Slice(step=ast.UnaryOp(ast.USub(), ast.Constant(1))), ast.Load())


def is_negation(test):
    """Whether a rule for expressions already makes the opposite of this condition."""
    if isinstance(test, ast.Compare):
        return len(test.ops) == 1 and isinstance(test.ops[0], NEGATIONS)
    return isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)


def is_method(function, modules):
    return isinstance(function, ast.Attribute) and root(function) not in modules


def name_of(node):
    return getattr(node, "attr", None) or getattr(node, "id", "")


def root(node):
    """The name that a chain of attributes, calls and subscripts begins with."""
    while not isinstance(node, ast.Name):
        node = getattr(node, "value", None) or getattr(node, "func", None)
        if node is None:
            return ""
    return node.id


def may_be_left_out(node, bound):
    """Whether a statement is left out. bound: the names that have had a value before it."""
    match node:
        case ast.Expr(value=ast.Constant()) | ast.Pass():
            return False
        case ast.Assign(targets=[target]):
            names = [x.id for x in ast.walk(target) if isinstance(x, ast.Name)]
            return isinstance(target, ast.Attribute | ast.Subscript) or set(names) <= bound
    return isinstance(node, ast.Expr | ast.AugAssign | ast.Raise | ast.Break | ast.Continue | ast.Delete)


class Rules(ast.NodeVisitor):
    """Collects (node, the node that takes its place, the statement that has it) in ``found``."""

    def __init__(self, tree):
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        self.modules = {(x.asname or x.name).split(".")[0] for node in imports for x in node.names}
        self.bound, self.found, self.statement = set(), [], None

    def visit_Module(self, node):
        for x in node.body:  # but not what puts the checkout on sys.path
            names = {y.id for y in ast.walk(x) if isinstance(y, ast.Name)}
            if isinstance(x, ast.FunctionDef | ast.ClassDef) or not names & {"sys", "__file__"}:
                self.visit(x)

    def visit(self, node):
        if isinstance(node, ast.stmt):
            self.statement = node
        super().visit(node)

    def add(self, node, wrong):
        self.found.append((node, wrong, self.statement))

    def generic_visit(self, node):
        if isinstance(node, ast.expr):
            for wrong in wrong_expressions(node, self.modules):
                self.add(node, wrong)
        elif isinstance(node, ast.stmt):
            if may_be_left_out(node, self.bound):
                self.add(node, ast.Pass())
            if isinstance(node, ast.AugAssign) and type(node.op) in OPERATORS.keys() - {ast.BitOr}:
                self.add(node, changed(node, op=OPERATORS[type(node.op)]()))
            if isinstance(node, ast.If) and not is_negation(node.test):
                self.add(node.test, ast.UnaryOp(ast.Not(), node.test))
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
        self.add(node, ast.Pass())  # what the message says is for people

    def visit_keyword(self, node):
        if node.arg not in LEFT_ALONE:
            self.visit(node.value)

    def visit_JoinedStr(self, node):
        pass  # text

    visit_Import = visit_ImportFrom = visit_Assert = visit_JoinedStr


def faults_of(file, source, tests=()):
    """All faults that the rules make in a file -> list of ``Fault``."""
    tree = ast.parse(source)
    rules, faults, texts = Rules(tree), [], set()
    rules.visit(tree)
    for right, wrong, statement in rules.found:
        texts.add((statement, ast.unparse(statement)))
        text = ast.unparse(Put(right, wrong).visit(statement))
        if right is not statement:
            Put(wrong, right).visit(statement)
        if (statement, text) not in texts:
            texts.add((statement, text))
            line = next(x for x in text.splitlines() if not x.startswith("@"))
            if isinstance(wrong, ast.Pass):
                line += f"  # {ast.unparse(right).splitlines()[0]}"
            faults.append(Fault(file, right.lineno, line, tests, tree, right, wrong))
    return sorted(faults, key=lambda fault: fault.number)


def chosen(file, tests, lines=""):
    """The faults to try in a file -> (list of ``Fault``, what does not fit). lines: "50", "50-80" or all."""
    source = (ROOT / file).read_text(encoding="utf-8")
    faults = faults_of(file, source, tuple(tests)) if tests else []
    known = [line for lines in EQUIVALENT.get(file, {}).values() for line in lines]
    made = {fault.line for fault in faults}
    misfits = [f"{file}: no rule makes this: {line}" for line in known if line not in made]
    faults = [fault for fault in faults if fault.line not in known]
    for right, wrong, test in HAND_WRITTEN.get(file, ()):
        if source.count(right) == 1:
            number = source.partition(right)[0].count("\n") + 1
            faults.append(Fault(file, number, f"{right} -> {wrong}", (test,), source, right, wrong))
        else:
            misfits.append(f"{file}: found {source.count(right)} times instead of once: {right!r}")
    if lines:
        first, _, last = lines.partition("-")
        faults = [fault for fault in faults if int(first) <= fault.number <= int(last or first)]
    return faults, misfits


# --------------------------------------------------------------------------------------------- the runs


class Watch:
    """A pytest plugin: notes in ``tests`` what seconds each test takes, and which lines of a file it runs."""

    def __init__(self, file):
        self.file = os.path.abspath(file)
        self.tests = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        begun, lines = time.process_time(), set()

        def trace(frame, event, arg):
            mine = frame.f_code.co_filename == self.file
            if mine:
                lines.add(frame.f_lineno)
            return trace if mine else None

        sys.settrace(trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            self.tests[item.nodeid] = time.process_time() - begun, sorted(lines)


class Order:
    """A pytest plugin: tests that run a line come first, then the quickest. tests: of a ``Watch``."""

    def __init__(self, line, tests):
        self.places = {name: (line not in lines, seconds) for name, (seconds, lines) in tests.items()}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        items.sort(key=lambda item: self.places.get(item.nodeid, (False, 0.0)))


def run_tests(fault, tests):
    """In a copy of the checkout: make the fault and run its tests -> pytest's exit code."""
    path = Path(fault.file)
    if fault.whole:
        path.write_text(fault.source(), encoding="utf-8")
    date = zlib.crc32(path.read_bytes())  # by which Python finds the bytecode: another for each fault
    os.utime(path, (date, date))
    plugin = Order(fault.number, tests) if tests else Watch(path)
    code = pytest.main([*PYTEST, *fault.tests], plugins=[plugin])
    if not tests:
        modules = [name for name, x in sys.modules.items() if ".venv" in str(getattr(x, "__file__", ""))]
        Path("found.json").write_text(json.dumps([plugin.tests, modules]))
    return int(code)


def start(fault, tests, folder, limit):
    """Fork a process for ``run_tests`` in ``folder`` -> its pid."""
    if pid := os.fork():
        return pid
    code = 3
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))  # a fault that never ends is noticed as well
        os.chdir(folder)
        sys.stdout = sys.stderr = log = open("log.txt", "w", encoding="utf-8", buffering=1)  # noqa: SIM115
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        code = run_tests(fault, tests)
    finally:
        os._exit(code)


def result_of(status, folder):
    """The exit status of a fault's process -> (word, the first test that failed, or "")."""
    if os.WIFSIGNALED(status):
        return NOTICED, "it never ends, or crashes"
    lines = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()
    failed = [x.split("::")[-1].split(" - ")[0] for x in lines if x.startswith(("FAILED", "ERROR"))]
    code = os.waitstatus_to_exitcode(status)
    # pytest's 4: it cannot import a file of tests, which it could before the fault was made
    word = {0: UNNOTICED, 1: NOTICED, 2: NOTICED, 4: NOTICED}.get(code, f"no test ran ({code})")
    return word, failed[0] if failed else ""


def run(faults, tests, folders, report, limit):
    """Try all faults of a file, one at a time in each folder. Calls report after each."""
    waiting, free, running = list(faults), list(folders), {}
    right = (folders[0] / faults[0].file).read_bytes()
    while waiting or running:
        while waiting and free:
            fault, folder = waiting.pop(0), free.pop()
            running[start(fault, tests, folder, limit)] = fault, folder
        pid, status, used = os.wait4(-1, 0)
        fault, folder = running.pop(pid)
        report(fault, *result_of(status, folder), used.ru_utime + used.ru_stime)
        (folder / fault.file).write_bytes(right)
        free.append(folder)


def check_unchanged(file, tests, folder):
    """Run these tests on the code as it is -> {test: (seconds, the lines of the file that it runs)}.
    SystemExit where they fail: then they prove nothing. Afterwards this process has imported what they import
    from other packages, and need not again."""

    def report(fault, word, test, seconds):
        if word != UNNOTICED:
            log = (folder / "log.txt").read_text(encoding="utf-8").splitlines()[-15:]
            why = f"error: without any fault the tests do not pass: {word} {test}"
            raise SystemExit("\n".join([*log, why]))

    run([Fault(file, 1, "nothing", tuple(tests))], None, [folder], report, limit=600)
    found, modules = json.loads((folder / "found.json").read_text())
    for name in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that no forked process looks through all these
    return found


def warm_up():
    """Import what is slow to import and no fault changes."""
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch: a forked process must have one thread
    os.environ["TRITON_INTERPRET"] = "1"  # as tests/conftest.py does, before anything imports Triton
    import torch
    import transformers

    torch.set_num_threads(1)
    return transformers


def try_all(plan, jobs):
    """Try all faults, {file: list of ``Fault``}, so many at a time -> those that no test notices."""
    survivors = []

    def report(fault, word, test, seconds):
        if word != NOTICED:
            survivors.append(fault)
        print(f"{word:12} {seconds:5.1f} s  {fault.file}:{fault.number}: {fault.line}  [{test}]", flush=True)

    warm_up()
    with tempfile.TemporaryDirectory() as parent:
        folders = [Path(parent) / str(n) for n in range(max(1, jobs))]
        for folder in folders:
            shutil.copytree(ROOT, folder, ignore=LEFT_OUT)
        for file, faults in plan.items():
            tests = dict.fromkeys(test for fault in faults for test in fault.tests)
            found = check_unchanged(file, tests, folders[0])
            seconds = sum(seconds for seconds, _ in found.values())
            print(f"{file}: {len(faults)} faults; without any its tests pass, in {seconds:.0f} s", flush=True)
            run(faults, found, folders, report, limit=20 + 4 * int(seconds))
    return survivors


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("files", nargs="*", help="default: all that stand in TESTS")
    parser.add_argument("--tests", nargs="+", help="for all of them; default: as in TESTS")
    parser.add_argument("--lines", default="", help="only of these lines, as 50 or 50-80")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="at a time")
    args = parser.parse_args(argv)
    plan, misfits = {}, []
    for file in args.files or TESTS | HAND_WRITTEN:
        if not (tests := args.tests or TESTS.get(file, ())) and args.files:
            parser.error(f"{file}: which tests? Give --tests")
        plan[file], wrong = chosen(file, tests, args.lines)
        misfits += wrong
    if misfits:
        print(*misfits, sep="\n", file=sys.stderr)
        raise SystemExit(2)
    begun = time.perf_counter()
    survivors = try_all(plan, args.jobs)
    count, seconds = sum(map(len, plan.values())), time.perf_counter() - begun
    print(f"\n{count} faults, {len(survivors)} not noticed, {seconds:.0f} s with {args.jobs} at a time")
    print(*(f"{fault.file}:{fault.number}: {fault.line}" for fault in survivors), sep="\n")
    raise SystemExit(bool(survivors))


if __name__ == "__main__":
    main()
