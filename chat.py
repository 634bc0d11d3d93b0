"""Ask a model: the answer is shown as it is produced, thoughts and special tokens of its own included.

    python chat.py --prompt "What is twelve plus five?"           newest out/ppo_actor_*.pth, else the demo
    python chat.py --model out/ppo_actor_128.pth < prompts.txt    a .pth, a directory or a hub name

Without --prompt each line of the input, or typed in a terminal, is a question of its own. Conversations with
memory: export.py, then ``transformers serve`` and ``transformers chat`` with the exported folder."""

import io
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

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
from model.loading import check_tokenizer, load_policy, load_tokenizer, most_positions, tokenizer_source
from trainer.generation.stops import decode, load_endings, response_text
from trainer.runs.distributed import init_world


def model_path(args: Flags) -> str:
    """--model; without it the newest trained actor in --out_dir, or the demo's."""
    results = Path(args.out_dir).glob("ppo_actor_*[0-9e].pth")  # not _best and _ema, but _moe
    demo = ROOT / "model/demo/policy"
    return args.model or str(max(results, key=lambda file: file.stat().st_mtime, default=demo))


class Speaker:
    """A model that answers."""

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
        stops = args.stop or ([trained] if isinstance(trained, str) else trained)
        given = Namespace(stop=stops, stop_token_ids=[], min_gen_len=0, reasoning=0)
        self.endings = load_endings(given, self.tokenizer, self.model)
        # Not what a checkpoint adds to it, such as top-p or a repetition penalty.
        sampling = {"do_sample": True, "temperature": args.temperature, "top_k": 0}
        self.model.generation_config = GenerationConfig(
            **(sampling if args.temperature else {}),
            eos_token_id=self.endings.eos,
            suppress_tokens=[i for run in self.endings.forbidden.textless for i in range(*run)] or None,
            pad_token_id=self.tokenizer.pad_token_id,
        )

    def encode(self, prompt: str) -> list[int]:
        """A prompt -> token ids. Raises InputError if they are too long."""
        messages = add_system([{"role": "user", "content": prompt}], self.system_prompt)
        ids = encode(self.tokenizer, [prompt_text(self.tokenizer, messages)])[0]
        if not 0 < len(ids) < self.positions:
            raise InputError(
                f"the prompt has {len(ids)} tokens, {self.name} takes 1 to {self.positions - 1}; shorten it"
            )
        return ids

    def answer(self, prompt: str) -> str:
        """Show the answer to a prompt word by word, with the stop string that ended it -> the answer without
        that. Raises InputError if the prompt is too long."""
        prompt_ids = self.encode(prompt)
        limit = min(self.args.max_gen_len, self.positions - len(prompt_ids))
        tokens = torch.tensor([prompt_ids], device=self.model.device)
        eos, stops, _ = self.endings

        def ended(ids: list[int]) -> bool:
            if ids[-1] in eos or not stops:
                return ids[-1] in eos
            text = decode(self.tokenizer, ids)
            return any(stop_text in text for stop_text in stops.texts)

        def stop(sequence: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return torch.tensor([ended(sequence[0, len(prompt_ids) :].tolist())], device=sequence.device)

        def shown(ids: list[int]) -> str:
            return decode(self.tokenizer, [i for i in ids if i not in eos])

        sequence = self.model.generate(  # type: ignore[operator]  # PreTrainedModel does not declare it
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=limit,
            stopping_criteria=[stop],
            streamer=TextStreamer(SimpleNamespace(decode=shown), skip_prompt=True),  # type: ignore[arg-type]
        )
        ids = sequence[0, len(prompt_ids) :].tolist()
        if not ended(ids):
            say(f"(cut after {limit} tokens)")
        return response_text(ids, ended(ids), self.tokenizer, stops)


def say(text: str) -> None:
    """Print a message to the user on stderr: it is not part of an answer."""
    print(text, file=sys.stderr)


def questions(args: Flags) -> Iterator[str]:
    """--prompt, or the lines of the input. Those of a file or pipe are shown."""
    if args.prompt is not None:
        yield args.prompt
        return
    terminal = sys.stdin and sys.stdin.isatty()  # a closed stream is None
    if terminal:
        say("type a question; Ctrl-D ends")
    for line in sys.stdin or ():
        prompt = line.removeprefix("\ufeff").strip()
        if not terminal:
            print(f"> {prompt}", flush=True)
        yield prompt


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    device = init_world(args.device).device
    speaker = Speaker(model_path(args), args, device)
    say(f"{speaker.name}: {speaker.model.num_parameters():,} parameters on {device}")
    for number, prompt in enumerate(questions(args)):
        torch.manual_seed(args.seed + number)
        if prompt or args.prompt is not None:
            speaker.answer(prompt)


if __name__ == "__main__":
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    run_script(main)
