"""Command-line flags: each is declared once, with its default, its range and what resuming may do with it.

    add("--ppo_epochs", default=1, at_least=1, at_most=MANY, help="passes over each batch")

A script's own flags are declared in its ``flag_parser``; here is the parser, and the flags that several
scripts have. Checks of one flag against another: ``complete_flags`` in inputs.py. ``may_change``: a resumed
run may have another value. Nothing here imports torch: --help and wrong flags are answered at once.

The checks, ``--help``, the comparison on ``--resume`` and the fuzz test all read that line. The type is that
of the default. Bad flags raise ``InputError`` in one line.
"""

import argparse
import difflib
import errno
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from errors import InputError
from trainer.peer_flags import NOT_HERE, PEER_CHOICES, PEER_FLAGS, VALUES
from trainer.runs import trackers

ROOT = Path(__file__).resolve().parents[1]
MANY = 2**20  # of anything that is counted: more would fill any memory, or take for ever
DTYPES = ["auto", "float32", "bfloat16", "float16"]
LARGE = 1e6  # of weights and limits
AUTO = "auto"  # of --critic_warmup_steps: see critic_warmup.py


@dataclass(frozen=True)
class Flag:
    """What is known of a flag besides its help."""

    default: object
    kind: type | None  # of its values; None for a flag without a value
    may_change: bool  # when a run is resumed: it changes what one sees or where it runs, or it names a file
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None

    def problem(self, value):
        """The rule that a number breaks, '' if it breaks none."""
        if self.above is not None and not value > self.above:
            return f"above {self.above}"
        if self.at_least is not None and not value >= self.at_least:
            return f"at least {self.at_least}" if self.at_least else "0 or more"
        if self.at_most is not None and not value <= self.at_most:
            return f"at most {self.at_most:.0f}" if self.at_most >= 1 else f"at most {self.at_most}"
        return ""


def steps_or_auto(text):
    """The ``type`` of ``--critic_warmup_steps``: a whole number or "auto"."""
    try:
        return text if text == AUTO else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number nor {AUTO}") from None


def path(text):
    """The ``type`` of flags that name a file or folder."""
    return text


class FlagParser(argparse.ArgumentParser):
    """argparse with ranges, groups and one-line errors. ``flags``: {name: ``Flag``}."""

    def __init__(self, description):
        self.flags, self._place, self._paths = {}, None, []
        super().__init__(
            description=description,
            usage="%(prog)s [--flag value ...]",
            allow_abbrev=False,
            formatter_class=partial(argparse.HelpFormatter, max_help_position=32, width=110),
        )

    def group(self, title):
        """The flags that are added from here on stand under this title in ``--help``."""
        self._place = self.add_argument_group(title)

    def add_argument(self, *names, may_change=False, at_least=None, above=None, at_most=None, **options):
        """As argparse's. A number must have a range or choices; without ``at_most`` a float ends at a
        million."""
        name, default = names[-1].lstrip("-"), options.get("default")
        if self._place is None:  # argparse's own --help
            return super().add_argument(*names, **options)
        if options.get("action") == "store_true":
            default = False
        elif isinstance(default, str | int | float):
            options.setdefault("type", type(default))
            ranged = at_least is not None or above is not None
            if isinstance(default, float) and at_most is None:
                at_most = LARGE
            if not (isinstance(default, str) or ranged or "choices" in options):
                raise ValueError(f"--{name} needs a range or choices")
        kind = options.get("type")
        if names[0].startswith("--") and "choices" not in options and not isinstance(default, bool):
            kinds = {int: "N", float: "X", path: "PATH"}
            options["metavar"] = kinds.get(kind, "TEXT")
        if not isinstance(default, bool) and default not in ("", None, []):
            options["help"] += f" [{default}]".replace("%", "%%")
        self.flags[name] = Flag(default, kind, may_change, at_least, above, at_most)
        if kind is path:
            self._paths.append(name)
        return self._place.add_argument(*names, **options)

    def parse_args(self, argv=None):
        """-> the flags, each in its range. Raises InputError that names the first flag that is not."""
        args, unknown = self.parse_known_args(argv)
        if unknown:
            raise InputError(self._unknown(unknown[0]))
        for name, flag in self.flags.items():
            value = getattr(args, name)
            if isinstance(value, list) and flag.default != []:  # argparse makes a list of --flag=--
                raise InputError(f"--{name}: has no value; --help lists all flags")
            if isinstance(value, int | float) and (rule := flag.problem(value)):
                raise InputError(f"--{name} {str(value)[:100]}: must be {rule}")
        for name in self._paths:
            value = getattr(args, name)
            for text in value if isinstance(value, list) else [value]:
                check_path(name, text)
                if "://" in text:
                    raise InputError(
                        f"--{name} {text[:100]}: is an address; give a file or folder of this machine, such "
                        "as a mounted volume (docs/scale.md)"
                    )
        return args

    def _unknown(self, word):
        """What to say of a word that is no flag: our name for a peer's flag, or the nearest of ours."""
        word, equals, _ = word.partition("=")
        word = word[:100]
        name = word.lstrip("-+").replace("-", "_")
        parts = name.split(".")
        is_flag = word.startswith("--")
        verls = len(parts) > 1 and equals  # a.b=c, without dashes
        for start in range(len(parts)) if is_flag or verls else ():
            known = ".".join(parts[start:])
            ours = PEER_FLAGS.get(known, known if start else None)
            if ours in self.flags:
                value = f" (value: {VALUES[known]})" if known in VALUES else ""
                return f"{word}: it is called --{ours} here{value}"
            if known in NOT_HERE and "ppo_epochs" in self.flags:  # the reasons name flags of train_ppo.py
                return f"{word}: not a flag here: {NOT_HERE[known]}"
        if not is_flag:
            return f"{word}: not expected here; flags begin with --, --help lists all"
        near = difflib.get_close_matches(name, self.flags, 1, 0.7)
        hint = f"did you mean --{near[0]}? " if near else ""
        return f"{word}: no such flag; {hint}--help lists all flags"

    def _check_value(self, action, value):
        """argparse's check of choices, which knows the names that others have for them."""
        if (ours := PEER_CHOICES.get(value)) in (action.choices or ()):
            raise argparse.ArgumentError(action, f"{value} is called {ours} here")
        super()._check_value(action, value)

    def error(self, message):
        raise InputError(f"{' '.join(message.split())[:300]}; --help lists all flags")


def check_path(name, text):
    """InputError for a text that no file or folder can be called: asking whether it exists would fail."""
    try:
        os.stat(text)
    except ValueError as error:
        raise InputError(f"--{name} {text[:100]!r}: is no path ({error}); check it") from error
    except OSError as error:  # whether it has to exist is checked where it is opened
        if error.errno == errno.ENAMETOOLONG:
            raise InputError(f"--{name} {text[:100]}…: is too long for a path; shorten it") from error


def add_machine_flags(p, seed):
    """The flags of all three training scripts that say where and how it is computed. ``seed``: its help."""
    add = p.add_argument
    p.group("machine")
    add("--device", default="", may_change=True, help="cpu, cuda, cuda:1; default: a GPU where there is one")
    add("--dtype", default="auto", choices=DTYPES, help="of mixed precision; float16: for GPUs without bf16")
    add("--ddp", action="store_true", may_change=True, help="insist on having been started by torchrun")
    add(
        "--deterministic",
        default=0,
        choices=[0, 1],
        help="1: the same bits in each run on a GPU; slower",
    )
    add("--gradient_checkpointing", default=0, choices=[0, 1], may_change=True, help="1: less memory, slower")
    add("--moments_dtype", default="float32", choices=["float32", "bfloat16"], help="of AdamW's two moments")
    add("--seed", default=42, at_least=0, at_most=2**63 - 1, help=seed)


def add_output_flags(p, save_interval, eval_interval):
    """The flags of all three training scripts that say what is written; arguments: their defaults, in
    steps."""
    add = p.add_argument
    p.group("output")
    add(
        "--out_dir",
        default=str(ROOT / "out"),
        type=path,
        may_change=True,
        help="where all is written",
    )
    add("--run_name", default="", type=path, may_change=True, help="folder of this run; default: numbered")
    add("--resume", default="", type=path, may_change=True, help="auto, or a run or checkpoint folder")
    add(
        "--log_interval",
        default=0,
        at_least=0,
        may_change=True,
        help="steps per printed line; 0: 20 or more lines",
    )
    add("--save_interval", default=save_interval, at_least=1, may_change=True, help="steps per checkpoint")
    add("--keep_checkpoints", default=2, at_least=1, may_change=True, help="how many of the newest are kept")
    add(
        "--eval_interval",
        default=eval_interval,
        at_least=0,
        may_change=True,
        help="steps; 0: only at the ends",
    )
    trackers.add_flags(add)


def add_stage_flags(p):
    """The flags that stages 1 and 2 have; each adds its own first."""
    add = p.add_argument
    add("--prompt_key", default="", help="key of the prompt in a record; default: by the record's form")
    add("--answer_key", default="", help="key of the answer; a path as extra_info.answer works")
    add("--system_prompt", type=str, help="system message of records that have none; default: model's own")
    add("--prompt_template", default="", help="text with {prompt}, Jinja, or a file of either")
    add("--chat_template_kwargs", type=str, help="JSON: the template's switches; default: model's own")
    add("--eval_size", type=int, at_least=0, help="last records held out [256, at most a tenth]; 0: none")
    add("--max_seq_len", default=256, at_least=1, at_most=MANY, help="in tokens; longer records are dropped")
    add("--num_workers", default=0, at_least=0, at_most=64, may_change=True, help="data loader processes")
    p.group("optimisation")
    add("--epochs", default=3, at_least=1, at_most=MANY, help="passes over the records")
    add("--max_steps", default=0, at_least=0, at_most=MANY, help="stop after so many batches; 0: by --epochs")
    add("--batch_size", default=32, at_least=1, at_most=MANY, help="records per step and process")
    add("--learning_rate", type=float, above=0, at_most=1, help="peak; default: by the model's size")
    add("--warmup_ratio", default=0.05, at_least=0, at_most=1, help="share of the steps in which it rises")
    add("--weight_decay", default=0.1, at_least=0, help="of matrices, not of gains and biases")
    add("--grad_clip", default=1.0, above=0, help="largest gradient norm")
    add_machine_flags(p, seed="of new weights and the order of records")
    add_output_flags(p, save_interval=200, eval_interval=200)
    add("--hf_dir", default="", type=path, may_change=True, help="where the HF directory is written")


def complete_output_flags(args):
    """Make --out_dir absolute: where things are written must not depend on the working directory, which a
    reward function may change. InputError for a --run_name that is a path, or trackers that exclude each
    other."""
    if args.run_name in (".", "..") or "/" in args.run_name or "\\" in args.run_name:
        raise InputError(f"--run_name {args.run_name}: must be a name and not a path; see --out_dir")
    trackers.wanted(args)
    args.out_dir = os.path.abspath(args.out_dir)
