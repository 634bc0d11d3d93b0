"""Talk to a model: type a question and read the answer as it is produced.

    python chat.py                                         newest out/ppo_actor_*.pth, else the bundled demo
    python chat.py --model out/ppo_actor_128.pth           a .pth, a directory or a hub name
    python chat.py --prompt "What is twelve plus five minus nine?"     or < prompts.txt: one answer per line

/clear forgets the conversation, Ctrl-C stops an answer and forgets its question, /exit or Ctrl-D ends."""

import contextlib
import io
import sys
from collections import deque
from itertools import count
from pathlib import Path

from errors import InputError, run_script
from trainer.flags import ROOT, FlagParser, Flags, path


def parse_args(argv: list[str] | None = None) -> Flags:
    p = FlagParser(description=__doc__)
    add = p.add
    p.group("models")
    add("--model", path, "a .pth, a directory or a hub name")
    add("--out_dir", str(ROOT / "out"), "where ppo_actor_*.pth is looked for without --model", type=path)
    add("--tokenizer", path, "default: the model's own")
    add("--trust_remote_code", bool, "run code that a model brings along")
    p.group("answers")
    add("--prompt", str, "answer this and exit")
    add("--system_prompt", str, "system message; default: the one of its training; '': not that")
    add("--chat_template_kwargs", str, "JSON: the template's switches; default: its training's")
    add("--history", 0, "turns that it reads again; 0: each prompt is new")
    add("--max_gen_len", 512, "longest answer in tokens", at_least=1)
    add("--stop", [], "texts that end an answer; default: its training's")
    add("--temperature", 0.0, "0: always the likeliest token; else all tokens, without top-k or top-p")
    add("--seed", 42, "seed of sampling; line n uses seed + n", at_most=2**63 - 1)
    add("--device", "", "cpu, cuda, cuda:1, mps; default: a CUDA GPU where there is one")
    return p.parse_args(argv)


if __name__ == "__main__":  # before the imports below, which take seconds: help and wrong flags
    run_script(parse_args)

import torch
from transformers import GenerationConfig, TextStreamer

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
from trainer.generation.stops import decode, without_text
from trainer.runs.distributed import init_world


def model_path(args: Flags) -> str:
    """--model; without it the newest trained actor in --out_dir, or the demo's."""
    results = Path(args.out_dir).glob("ppo_actor_*[0-9e].pth")  # not _best and _ema, but _moe
    demo = ROOT / "model/demo/policy"
    return args.model or str(max(results, key=lambda file: file.stat().st_mtime, default=demo))


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
        runs = without_text(self.tokenizer, len(self.model.get_output_embeddings().weight), self.eos)
        # Not what a checkpoint adds to it, such as top-p or a repetition penalty.
        sampling = {"do_sample": True, "temperature": args.temperature, "top_k": 0}
        self.model.generation_config = GenerationConfig(
            **(sampling if args.temperature else {}),
            eos_token_id=sorted(self.eos),
            suppress_tokens=[i for run in runs for i in range(*run)] or None,
            pad_token_id=self.tokenizer.pad_token_id,
        )
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

    def text_of(self, ids: list[int]) -> tuple[str, bool]:
        """The text of an answer up to a stop string, and whether there is one."""
        text = decode(self.tokenizer, [i for i in ids if i not in self.eos])
        ends = [text.index(stop) for stop in self.stops if stop in text]
        return text[: min(ends, default=None)], bool(ends)

    def answer(self, prompt: str) -> str:
        """Show the answer to a prompt word by word, with the stop string that ended it -> the answer without
        that. Both become part of the conversation once the answer is complete. Raises InputError if they are
        too long."""
        asked = self.encode(prompt)
        limit = min(self.args.max_gen_len, self.positions - len(asked))
        tokens = torch.tensor([asked], device=self.model.device)

        # transformers' own criterion (stop_strings) fails on tokenizers that know only some letters.
        def stops(sequence: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            _, stopped = self.text_of(sequence[0, len(asked) :].tolist())
            return torch.tensor([stopped], device=sequence.device)

        sequence = self.model.generate(  # type: ignore[operator]  # PreTrainedModel does not declare it
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=limit,
            stopping_criteria=[stops] if self.stops else [],
            # To clean up spaces would change what has been shown.
            streamer=TextStreamer(
                self.tokenizer, skip_prompt=True, skip_special_tokens=True, clean_up_tokenization_spaces=False
            ),
        )
        ids = sequence[0, len(asked) :].tolist()
        text, stopped = self.text_of(ids)
        if len(ids) == limit and ids[-1] not in self.eos and not stopped:
            say(f"(cut after {limit} tokens)")
        self.history += [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
        return text


def say(text: str) -> None:
    """Print a message to the user on stderr: it is not part of an answer."""
    print(text, file=sys.stderr)


def talk(speaker: Speaker, seed: int, interactive: bool) -> None:
    """Answer the lines of stdin, up to its end or /exit. Those of a file or pipe are shown. In a terminal an
    error or Ctrl-C ends only an answer."""
    for number in count():
        try:
            prompt = input("> " if interactive else "").removeprefix("\ufeff").strip()
            if prompt == "/exit":
                return
            if not interactive:
                print(f"> {prompt}", flush=True)
            torch.manual_seed(seed + number)
            if prompt == "/clear":
                speaker.history.clear()
            elif prompt:
                speaker.answer(prompt)
        except EOFError:
            return
        except (InputError, KeyboardInterrupt) as error:
            if not interactive:
                raise
            say(f"\n{str(error) or 'stopped'}")


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    device = init_world(args.device).device
    speaker = Speaker(model_path(args), args, device)
    say(f"{speaker.name}: {speaker.model.num_parameters():,} parameters on {device}")
    if args.prompt is not None:
        torch.manual_seed(args.seed)
        speaker.answer(args.prompt)
    elif sys.stdin:  # a closed stream is None
        interactive = sys.stdin.isatty()
        if interactive:
            say("/clear forgets the conversation (--history), Ctrl-C stops an answer, /exit leaves")
        talk(speaker, args.seed, interactive)


if __name__ == "__main__":
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    with contextlib.suppress(ImportError):  # Windows has no readline
        import readline  # noqa: F401  (arrow keys and line history in input())
    run_script(main)
