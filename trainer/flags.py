"""Command-line flags: each is declared once, with its default, its range, what it needs or excludes, and what
resuming may do with it.

    add("--kl_horizon", int, "responses", needs="kl_target", not_with={"offline_data_path": "why"})

The checks, ``--help``, ``--resume`` and the tests read that line. Where nothing else is said, a number is 0
or more, a float at most a million, a whole number at most ``MANY``. Nothing here imports torch: --help and
wrong flags are answered at once.
"""

import argparse
import difflib
import errno
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, NoReturn

from errors import InputError
from trainer.peer_flags import PEER_FLAGS, reason_of
from trainer.runs import trackers

ROOT = Path(__file__).resolve().parents[1]
MANY = 2**20  # of anything that is counted: more would fill any memory, or take for ever
DTYPES = ["auto", "float32", "bfloat16", "float16"]
# What people set in stages 1 and 2.
STAGE_FLAGS = """
    model tokenizer hidden_size data_path eval_data_path max_seq_len epochs max_steps batch_size
    learning_rate device dtype out_dir run_name resume eval_interval tracker hf_dir"""
LARGE = 10**6  # of weights and limits


@dataclass(frozen=True)
class Flag:
    """What is known of a flag besides its help."""

    default: object
    kind: type  # of its values; bool for a flag without a value
    # When a run is resumed: it changes what one sees or where it runs, or it names a file.
    may_change: bool = False
    # Of a number:
    at_most: float = MANY
    at_least: float = 0
    above: float = -inf
    off: object = 0  # the value that asks for nothing, besides none at all; or several of them, a tuple
    needs: str | Mapping[str, str] = ""  # the flag without which it is of no use; or {its value: that flag}
    # {another flag, or "flag=value": why it excludes this one}
    not_with: Mapping[str, str] = field(default_factory=dict)

    def problem(self, value: float) -> str:
        """The rule that a number breaks, '' if it breaks none."""
        if not value <= self.at_most:
            return f"at most {self.at_most}"
        if value <= self.above:
            return f"above {self.above}"
        if value < self.at_least:
            return f"at least {self.at_least}"
        return ""

    def asks(self, value: object) -> bool:
        """Whether this value asks for something to happen."""
        off = self.off if isinstance(self.off, tuple) else (self.off,)
        return value not in (None, "", [], [""]) and value not in off


class Flags(argparse.Namespace):
    """The values of all flags. The run completes its own copy by what the data and the models decide, then
    freezes it. ``declared``: {name: ``Flag``}; ``argv``: the command line. Both are not among ``vars``."""

    __slots__ = ("_frozen", "argv", "declared")
    argv: list[str]
    declared: Mapping[str, Flag]

    def __setattr__(self, name: str, value: object) -> None:
        if getattr(self, "_frozen", False):
            raise AttributeError(f"--{name}: flags are frozen; completed() returns others")
        super().__setattr__(name, value)

    def completed(self, **values: object) -> "Flags":
        """A copy in which these flags have these values, not frozen."""
        copy = Flags(**vars(self) | values)
        copy.argv = self.argv
        copy.declared = self.declared
        return copy

    def freeze(self) -> None:
        """From here on nothing can be set."""
        self._frozen = True


def path(text: str) -> str:
    """The ``type`` of flags that name a file or folder of this machine, or a hub name. Whether it has to
    exist is checked where it is opened."""
    if "://" in text:
        raise argparse.ArgumentTypeError(
            f"{text[:100]}: is an address; give a file or folder of this machine, such as a mounted volume "
            "(docs/scale.md)"
        )
    try:
        os.stat(text)  # argparse refuses a text for which this raises ValueError
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise ValueError from error
    return text


class FlagParser(argparse.ArgumentParser):
    """argparse with ranges, groups, constraints and one-line errors. ``flags``: {name: ``Flag``}.

    description: a script's docstring, of which ``--help`` shows the first paragraph. common: names of the
    flags that people set, with spaces between them: ``--help`` shows these only. "": all.
    """

    def __init__(self, description: str, common: str = ""):
        self.flags: dict[str, Flag] = {}
        self.common = common.split()
        super().__init__(
            description=description.split("\n\n")[0],
            usage="%(prog)s [--flag value ...]",
            epilog=common and "--help shows the flags that people set, --help all shows all of them",
            allow_abbrev=False,
            add_help=False,
            formatter_class=partial(argparse.HelpFormatter, max_help_position=32, width=110),
        )

    def group(self, title: str) -> None:
        """The flags that are added from here on stand under this title in ``--help``."""
        self._place = self.add_argument_group(title)

    def add(self, name: str, default: Any, help: str, **options: Any) -> None:
        """Declare a flag. default: its value where none is given, of the flag's type, [] of one with any
        number of values; or a type: then there is none (``bool``: a flag without a value). options:
        argparse's, and what a ``Flag`` knows."""
        known = {one.name: options.pop(one.name) for one in fields(Flag) if one.name in options}
        kind = options.pop("type", str if default == [] else type(default))  # of each value of a list
        if callable(default):
            kind = default
            default = {path: "", bool: False}.get(kind)
        if kind is bool:
            options["action"] = "store_true"
        else:
            options |= {"type": kind, "default": default}
            if default not in ("", None, []):
                help += " [%(default)s]"
            if default == []:  # --stop a b, or --stop a --stop b
                options |= {"nargs": "*", "action": "extend"}
            if name.startswith("--") and "choices" not in options:
                options["metavar"] = {int: "N", float: "X", path: "PATH"}.get(kind, "TEXT")
        if kind is path:
            known["may_change"] = True
        if kind is float:
            known.setdefault("at_most", LARGE)
        self.flags[name.lstrip("-")] = Flag(default, kind, **known)
        self._place.add_argument(name, help=help, **options)

    def parse_args(self, argv: Sequence[str] | None = None) -> Flags:  # type: ignore[override] # no namespace
        """-> the flags, each in its range and all of them together as declared. Raises InputError that names
        the first that is not. ``--help`` shows the common flags, ``--help all`` all of them, and exits."""
        # Without the byte order mark of "$(cat file)".
        words = [word.replace("\ufeff", "") for word in (sys.argv[1:] if argv is None else argv)]
        given = {word.partition("=")[0] for word in words}
        if given & {"-h", "--help"}:
            for action in self._actions:
                if self.common and action.dest not in self.common and not {"all", "--help=all"} & {*words}:
                    action.help = argparse.SUPPRESS
            self.print_help()
            self.exit()
        args, unknown = self.parse_known_args(words, Flags())
        if unknown:
            raise InputError(self._unknown(unknown[0]))
        args.argv = words
        args.declared = self.flags
        asked = {}  # {a flag that asks for something to happen: its value as text}
        for name, flag in self.flags.items():
            value = getattr(args, name)
            if value == "" and flag.kind is path and f"--{name}" in given:
                raise InputError(f"--{name}: its value is empty; give one, or leave the flag out")
            if isinstance(value, list) and flag.default != []:  # argparse makes a list of --flag=--
                raise InputError(f"--{name}: has no value; --help all lists all flags")
            if isinstance(value, int | float) and (rule := flag.problem(value)):
                raise InputError(f"--{name} {str(value)[:100]}: must be {rule}")
            if flag.asks(value):
                asked[name] = " ".join(map(str, value)) if isinstance(value, list) else str(value)
        self._check_together(asked)
        return args

    def _check_together(self, asked: Mapping[str, str]) -> None:
        """Raise InputError where a flag excludes another, or is of no use without one, as they were
        declared."""
        for name, text in asked.items():
            flag = self.flags[name]
            for condition, why in flag.not_with.items():
                other, _, value = condition.partition("=")
                if other in asked and value in ("", asked[other]):
                    raise InputError(
                        f"--{name} {text}: not with --{other} {asked[other]}: {why}; leave one of them out"
                    )
            needed = flag.needs if isinstance(flag.needs, str) else flag.needs.get(text)
            if needed and needed not in asked:
                raise InputError(f"--{name} {text}: is of use only with --{needed}; set that too")

    def _unknown(self, word: str) -> str:
        """What to say of a word that is no flag: our name for a peer's flag, or the nearest of ours."""
        word, equals, _ = word.partition("=")
        word = word[:100]
        known = name = word.lstrip("-+").replace("-", "_")
        is_flag = word.startswith("--")
        verls = equals and "." in name  # a.b=c, without dashes
        while known and (is_flag or verls):
            ours, *value = PEER_FLAGS.get(known, [known])
            if ours in self.flags:
                hint = f" (value: {value[0]})" if value else ""
                return f"{word}: it is called --{ours} here{hint}"
            reason = reason_of(known)
            if reason and self.flags.keys() >= set(re.findall(r"--(\w+)", reason)):  # of another script else
                return f"{word}: not a flag here: {reason}"
            known = known.partition(".")[2]
        if not is_flag:
            return f"{word}: not expected here; flags begin with --, --help all lists them"
        near = difflib.get_close_matches(name, self.flags, 1, 0.7)
        hint = f"did you mean --{near[0]}? " if near else ""
        return f"{word}: no such flag; {hint}--help all lists all flags"

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{' '.join(message.split())[:300]}; --help all lists all flags")


def add_machine_flags(p: FlagParser) -> None:
    """The flags of all three training scripts that say where and how it is computed."""
    add = p.add
    p.group("machine")
    add("--device", "", "cpu, cuda, cuda:1, mps; default: a CUDA GPU where there is one", may_change=True)
    add("--dtype", "auto", "of mixed precision; float16: for GPUs without bf16", choices=DTYPES)
    add("--ddp", bool, "insist on having been started by torchrun", may_change=True)
    add("--deterministic", 0, "1: the same bits in each run on a GPU; slower", choices=[0, 1])
    add("--gradient_checkpointing", 0, "1: less memory, slower", choices=[0, 1], may_change=True)
    add("--moments_dtype", "float32", "of AdamW's two moments", choices=["float32", "bfloat16"])
    add("--seed", 42, "of the order of records, sampling noise and new weights", at_most=2**63 - 1)


def add_output_flags(p: FlagParser, interval: int) -> None:
    """The flags of all three training scripts that say what is written. interval: steps from one
    checkpoint or evaluation to the next, by default."""
    add = p.add
    p.group("output")
    add("--out_dir", str(ROOT / "out"), "where all is written", type=path)
    add("--run_name", path, "folder of this run; default: numbered")
    add("--resume", path, "auto, or a run or checkpoint folder")
    add("--log_interval", 0, "steps per printed line; 0: 100 lines or more", may_change=True, at_most=inf)
    add("--save_interval", interval, "steps per checkpoint", at_least=1, may_change=True, at_most=inf)
    kept = "of the result; auto: float16 where that keeps what was learned, else float32"
    add("--save_dtype", "auto", kept, choices=DTYPES, may_change=True)
    add("--keep_checkpoints", 2, "how many of the newest are kept", at_least=1, may_change=True, at_most=inf)
    add("--eval_interval", interval, "steps; 0: only at the ends", may_change=True, at_most=inf)
    choices = ["none", *trackers.TRACKERS]
    add("--tracker", [], "also log there; several work", choices=choices, may_change=True)
    add("--use_wandb", bool, "MiniMind's name for --tracker swanlab", may_change=True)
    add("--wandb_project", "small-lm-ppo", "project in SwanLab and wandb", may_change=True)


def add_model_flags(
    p: FlagParser, title: str, hidden_size: str, layers: str = "checked if given", may_change: bool = True
) -> None:
    """The flags of all three training scripts that name the model. title: of their group; hidden_size,
    layers, may_change: of these two."""
    add = p.add
    p.group(title)
    add("--model", path, "a .pth, a directory or a hub name")
    add("--tokenizer", path, "directory or hub name; default: model's")
    add("--hidden_size", 0, hidden_size, may_change=may_change)
    add("--num_hidden_layers", 0, layers, may_change=may_change)
    add("--trust_remote_code", bool, "run code that a model brings", may_change=True)


def add_data_flags(p: FlagParser, records: str) -> None:
    """The flags of all three training scripts that say how records are read. ``records``: what they are to
    the script."""
    add = p.add
    add("--prompt_key", "", "key of the prompt in a record; default: by the record's form")
    add("--answer_key", "", "key of the answer; a path as reward_model.ground_truth works")
    add("--chosen_key", "", "key of the better answer of a pair; default: chosen")
    add("--rejected_key", "", "key of the worse answer; default: rejected")
    add("--system_prompt", str, f"system message of {records} that have none; default: model's own")
    add("--prompt_template", "", "text with {prompt}, Jinja, or a file of either")
    add("--chat_template_kwargs", str, "JSON: the template's switches; default: model's own")
    add("--max_seq_len", 256, f"in tokens; longer {records} are dropped", at_least=1)
    add("--num_workers", 0, "changes nothing: the main process reads the records", may_change=True)


def add_stage_flags(p: FlagParser, records: str) -> None:
    """The flags that stages 1 and 2 have, but those of the model. records: what they learn from."""
    add = p.add
    p.group("data")
    add("--data_path", path, f"{records}: a file or a hub name")
    add("--eval_data_path", path, f"held-out {records}")
    add_data_flags(p, "records")
    add(
        "--eval_size",
        int,
        "last records held out [256, at most a tenth]; 0: none",
        at_most=inf,
        not_with={"eval_data_path": "the records of that file are held out"},
    )
    p.group("optimisation")
    add("--epochs", 3, "passes over the records", at_least=1)
    add("--max_steps", 0, "stop after so many batches; 0: by --epochs")
    add("--batch_size", 32, "records per step and process", at_least=1)
    add("--learning_rate", float, "peak; default: by the model's size", above=0, at_most=1)
    add("--warmup_ratio", 0.05, "share of the steps in which it rises", at_most=1)
    add("--weight_decay", 0.1, "of matrices, not of gains and biases")
    add("--grad_clip", 1.0, "largest gradient norm", above=0)
    add_machine_flags(p)
    add_output_flags(p, interval=200)
    add("--hf_dir", path, "where the HF directory is written")


def minimind_pth(out_dir: str, kind: str, hidden_size: int, moe: bool) -> Path:
    """MiniMind's name of a checkpoint in ``out_dir``. kind: the first part of it; hidden_size: 0 means
    MiniMind's 512."""
    return Path(out_dir) / f"{kind}_{hidden_size or 512}{'_moe' if moe else ''}.pth"


def complete_output_flags(args: Flags) -> Flags:
    """Fill in the absolute --out_dir: where things are written must not depend on the working
    directory, which a reward function may change. InputError for a path as --run_name, or no tracker."""
    if re.search(r"^\.\.?$|[/\\]", args.run_name):
        raise InputError(f"--run_name {args.run_name}: must be a name and not a path; see --out_dir")
    trackers.wanted(args)
    args.out_dir = os.path.abspath(args.out_dir)
    return args
