"""Talk to a model: type a question and read the answer as it is produced.

    python chat.py                                         newest out/ppo_actor_*.pth, else the bundled demo
    python chat.py --model out/ppo_actor_128.pth           a .pth, a directory or a hub name
    python chat.py --weight full_sft --hidden_size 512     out/full_sft_512.pth: MiniMind's way of naming
    python chat.py --prompt "What is twelve plus five minus nine?"     or < prompts.txt: one answer per line
    python chat.py --compare model/demo/policy             every answer, then the answer of another model

/clear forgets the conversation, Ctrl-C stops an answer and forgets its question, /exit or Ctrl-D ends."""

import contextlib
import inspect
import io
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from errors import InputError, run_script
from trainer.flags import ROOT, FlagParser, Flags, minimind_pth, path


def parse_args(argv: Sequence[str] | None = None) -> Flags:
    p = FlagParser(description=__doc__.split("\n\n")[0])
    add = p.add
    p.group("models")
    other = {"model": "both name a model"}
    add("--model", path, "a .pth, a directory or a hub name")
    add("--weight", "", "load OUT_DIR/{weight}_{hidden_size}.pth; default: ppo_actor", not_with=other)
    add("--hidden_size", 0, "hidden size of --weight; 0: 512", not_with=other)
    add("--use_moe", 0, "1: load the _moe checkpoint", choices=[0, 1], not_with=other)
    add("--out_dir", str(ROOT / "out"), "where --weight is looked for", type=path)
    add("--compare", path, "a second model to answer the same prompts")
    add("--tokenizer", path, "tokenizer of both models; default: each model's own")
    add("--trust_remote_code", bool, "run code that a model brings along")
    p.group("answers")
    add("--prompt", str, "answer this and exit")
    add("--system_prompt", str, "system message; default: the one of its training; '': none")
    add("--chat_template_kwargs", str, "JSON: the template's switches; default: its training's")
    add("--history", 0, "turns that it reads again; 0: each prompt is new")
    add("--max_gen_len", 512, "longest answer in tokens", at_least=1)
    add("--stop", [], "texts that end an answer; default: its training's", nargs="*")
    add("--temperature", 0.0, "0: always the likeliest token; else all tokens, without top-k or top-p")
    add("--seed", 42, "seed of sampling; line n uses seed + n", at_most=2**63 - 1)
    add("--device", "", "cpu, cuda, cuda:1; default: a GPU where there is one")
    return p.parse_args(argv)


if __name__ == "__main__":  # before the imports below, which take seconds: help and wrong flags
    run_script(parse_args)

import torch

from dataset.chat_template import encode, prompt_text, set_system_prompt, set_template_kwargs
from dataset.formats import add_system
from model.loading import (
    check_tokenizer,
    eos_ids,
    load_policy,
    load_tokenizer,
    most_positions,
    tokenizer_source,
)
from trainer.endings import read_stops
from trainer.runs.distributed import init_world


def model_path(args: Flags) -> str:
    """The path or hub name of the model that the flags name; without such flags the newest trained actor in
    --out_dir, or the demo's."""
    chosen = args.model
    if not chosen and (args.weight or args.hidden_size or args.use_moe):
        chosen = minimind_pth(args, args.weight or "ppo_actor")
    if not chosen:
        results = Path(args.out_dir).glob("ppo_actor_*[0-9e].pth")  # not _best and _ema, but _moe
        demo = ROOT / "model" / "demo" / "policy"
        chosen = max(results, key=lambda file: file.stat().st_mtime, default=demo)
    return str(chosen)


class Speaker:
    """A model that answers, and its conversation so far."""

    def __init__(self, path: str, args: Flags, device: torch.device) -> None:
        self.name = path
        self.args = args
        self.tokenizer = load_tokenizer(args.tokenizer or tokenizer_source(path), args.trust_remote_code)
        self.model = load_policy(path, args.trust_remote_code)
        self.model.to(device)  # type: ignore[arg-type]  # transformers' wrapper of ``to`` loses its self
        check_tokenizer(self.tokenizer, self.model)
        self.system_prompt = set_system_prompt(self.tokenizer, args.system_prompt)
        set_template_kwargs(self.tokenizer, args.chat_template_kwargs)
        self.positions = most_positions(self.model.config)
        trained = self.model.generation_config.stop_strings or []  # a list, or one text
        trained = [trained] if isinstance(trained, str) else trained
        self.stops, ids = read_stops(args.stop or trained, self.tokenizer)
        self.eos = {*eos_ids(self.tokenizer, self.model), *ids}
        turns = args.history if self.tokenizer.chat_template else 0
        self.history: deque[dict[str, str]] = deque(maxlen=2 * turns)  # messages: user, assistant, user, …

    def encode(self, prompt: str) -> list[int]:
        """The conversation so far and ``prompt`` -> token ids. Raises InputError if they are too long."""
        messages = add_system([*self.history, {"role": "user", "content": prompt}], self.system_prompt)
        ids = encode(self.tokenizer, [prompt_text(self.tokenizer, messages)])[0]
        if not 0 < len(ids) < self.positions:
            raise InputError(
                f"prompt and conversation have {len(ids)} tokens, {self.name} takes 1 to "
                f"{self.positions - 1}; /clear forgets the conversation"
            )
        return ids

    @torch.no_grad()
    def answer(self, prompt: str) -> str:
        """Show the answer to a prompt, piece by piece -> the answer.

        A character of several tokens decodes to U+FFFD until it is complete, and the last characters may
        begin a stop string: both are held back. (transformers' TextStreamer holds back whole words.)
        """
        asked = self.encode(prompt)
        limit = min(self.args.max_gen_len, self.positions - len(asked))
        held = max(map(len, self.stops), default=1) - 1
        last = {}
        if (
            "logits_to_keep" in inspect.signature(self.model.forward).parameters
        ):  # not in all code from outside
            last["logits_to_keep"] = 1  # not those of a whole long prompt
        cache = None
        ids: list[int] = []
        text = ""
        shown = 0  # characters
        finished = False
        while not finished and len(ids) < limit:
            tokens = torch.tensor([ids[-1:] or asked], device=self.model.device)
            output = self.model(tokens, past_key_values=cache, use_cache=True, **last)
            cache = output.past_key_values
            logits = output.logits[0, -1].float()
            choice = logits.argmax()
            if self.args.temperature > 0:
                choice = torch.softmax(logits / self.args.temperature, -1).multinomial(1)
            finished = choice.item() in self.eos
            if not finished:
                ids.append(int(choice))
            # Without clean-up of spaces, which would change what has been shown.
            text = str(
                self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            )
            ends = [text.index(stop) for stop in self.stops if stop in text]
            if ends:
                text = text[: min(ends)]
                finished = True
            final = len(text[: -held or None].rstrip("\ufffd"))
            show(text[shown:final])
            shown = max(shown, final)
        show(text[shown:] + "\n")
        if not finished:
            say(f"({self.name}: cut after {len(ids)} tokens)")
        return text


def say(text: str) -> None:
    """Print a message to the user on stderr: it is not part of an answer."""
    print(text, file=sys.stderr, flush=True)


def show(text: str) -> None:
    """Print a piece of an answer."""
    print(text, end="", flush=True)


def typed(interactive: bool) -> Iterator[str]:
    """The lines of stdin, up to /exit. Those of a file or pipe are shown. Ctrl-C forgets a line."""
    with contextlib.suppress(EOFError):
        while True:
            try:
                line = input("> " if interactive else "").strip()
            except KeyboardInterrupt:
                if not interactive:
                    raise
                show("\n")
                continue
            if line == "/exit":
                return
            if not interactive:
                show(f"> {line}\n")
            yield line


def talk(speakers: list[Speaker], args: Flags, prompts: Iterable[str], interactive: bool) -> None:
    """Answer each prompt with every model."""
    for number, prompt in enumerate(prompts):
        answers = []
        try:
            for speaker in speakers:
                torch.manual_seed(args.seed + number)  # the same random numbers for both models
                if prompt == "/clear":
                    speaker.history.clear()
                elif prompt:
                    if len(speakers) > 1:
                        show(f"[{speaker.name}]\n")
                    answers.append(speaker.answer(prompt))
            for speaker, text in zip(speakers, answers, strict=False):  # only once all have answered
                said = {"role": "assistant", "content": text}
                speaker.history += [{"role": "user", "content": prompt}, said]
        except (InputError, KeyboardInterrupt) as error:
            if not interactive:
                raise
            say(f"\n{str(error) or 'stopped'}")


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    device = init_world(args.device).device
    speakers = [Speaker(path, args, device) for path in (model_path(args), args.compare) if path]
    for speaker in speakers:
        say(f"{speaker.name}: {speaker.model.num_parameters():,} parameters on {device}")
    interactive = args.prompt is None and sys.stdin.isatty()
    if interactive:
        say("/clear forgets the conversation (--history), Ctrl-C stops an answer, /exit leaves")
    talk(speakers, args, typed(interactive) if args.prompt is None else [args.prompt], interactive)


if __name__ == "__main__":
    if isinstance(sys.stdin, io.TextIOWrapper):  # a closed stream is None
        sys.stdin.reconfigure(errors="replace")
    with contextlib.suppress(ImportError):  # Windows has no readline
        import readline  # noqa: F401  (arrow keys and line history in input())
    run_script(main)
