"""Talk to a model: type a question and read the answer as it is produced.

    python chat.py                                         newest out/ppo_actor_*.pth, else the bundled demo
    python chat.py --model out/ppo_actor_128.pth           a .pth, a directory or a hub name
    python chat.py --best                                  the best evaluation of that run: its _best.pth
    python chat.py --weight full_sft --hidden_size 512     out/full_sft_512.pth: MiniMind's way of naming
    python chat.py --prompt "What is twelve plus five minus nine?"
    python chat.py < prompts.txt                           one answer per line, without a conversation
    python chat.py --compare model/demo/policy             every answer, then the answer of another model

At the prompt, /clear forgets the conversation, Ctrl-C stops an answer and forgets its question, /exit or
Ctrl-D ends the program. --history N lets the model read the last N turns again, which makes sense for models
trained on conversations. A model without a chat template continues the text you type and has no history.

Decoding is greedy by default, so that two answers differ because of the models and not by chance. With
--temperature, tokens are sampled from the whole distribution, as in PPO training: no top-k, no top-p.
"""

import contextlib
import inspect
import re
import sys
from itertools import count
from pathlib import Path

from errors import InputError, run_script
from trainer.flags import ROOT, FlagParser, minimind_pth, path


def parse_args(argv=None):
    p = FlagParser(description=__doc__.split("\n\n")[0])
    add = p.add
    p.group("models")
    other = {"model": "both name a model"}
    add("--model", path, "a .pth, a directory or a hub name")
    add("--weight", "", "load OUT_DIR/{weight}_{hidden_size}.pth; default: ppo_actor", not_with=other)
    add("--hidden_size", 0, "hidden size of --weight; 0: 512", not_with=other)
    add("--use_moe", 0, "1: load the _moe checkpoint", choices=[0, 1], not_with=other)
    add("--out_dir", str(ROOT / "out"), "where --weight is looked for", type=path)
    add("--best", bool, "the run's best evaluation: its _best.pth, not its last weights")
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
    add("--temperature", 0.0, "0: always the likeliest token")
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


def model_path(args) -> str:
    """The path or hub name of the model that the flags name; without such flags the newest trained actor in
    --out_dir, or the demo's. With --best it is the ``.pth`` of the best evaluation beside it. Raises
    InputError if there is none."""
    chosen = args.model
    if not chosen and (args.weight or args.hidden_size or args.use_moe):
        chosen = minimind_pth(args, args.weight or "ppo_actor")
    if not chosen:
        found = Path(args.out_dir).glob("ppo_actor_*.pth")
        results = [file for file in found if re.fullmatch(r"ppo_actor_\d+(_moe)?", file.stem)]  # no copies
        demo = ROOT / "model" / "demo" / "policy"
        chosen = max(results, key=lambda file: file.stat().st_mtime, default=demo)
    chosen = str(chosen)
    if args.best and not chosen.endswith("_best.pth"):
        chosen = chosen.removesuffix(".pth") + "_best.pth"
        if not Path(chosen).is_file():
            raise InputError(
                f"--best: there is no {chosen}: the run had no evaluation (--eval_data_path), or none was "
                "better than its start; leave --best out"
            )
    return chosen


class Answer:
    """An answer, token by token: ``show`` gets its text as soon as that is final.

    An incomplete character of several tokens decodes to U+FFFD. So U+FFFD at the end of the text is held
    back, and so are as many characters as may begin a stop string: an answer ends before the first one.
    (transformers' TextStreamer holds back whole words, and loses spaces.) Clean-up of spaces is off, because
    it would change text that has been shown.
    """

    def __init__(self, tokenizer, eos: list[int], show, stops=()):
        self.decode = tokenizer.decode
        self.eos = eos
        self.show = show
        self.stops = stops  # the stop strings
        self.held = max(map(len, stops), default=1) - 1
        self.ids = []  # without the EOS
        self.finished = False  # True if an EOS or a stop string ended it
        self.text = ""
        self.shown = 0

    def add(self, token: int):
        """The answer goes on with this token."""
        if token in self.eos:
            self.finished = True
            return
        self.ids.append(token)
        self.text = self.decode(self.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        found = [self.text.index(text) for text in self.stops if text in self.text]
        if found:
            self.text = self.text[: min(found)]
            self.finished = True
        self.show_up_to(min(len(self.text.rstrip("\ufffd")), len(self.text) - self.held))

    def show_up_to(self, length: int):
        """Show what of the first characters has not been shown."""
        if length > self.shown:
            self.show(self.text[self.shown : length])
            self.shown = length


class Speaker:
    """A model that answers, and its conversation so far."""

    def __init__(self, path: str, args, device):
        self.name = path
        self.temperature = args.temperature
        self.history = []  # messages: user, assistant, user, …
        self.tokenizer = load_tokenizer(args.tokenizer or tokenizer_source(path), args.trust_remote_code)
        self.model = load_policy(path, args.trust_remote_code).to(device).eval()
        check_tokenizer(self.tokenizer, self.model)
        self.system_prompt = set_system_prompt(self.tokenizer, args.system_prompt)
        self.template_kwargs = set_template_kwargs(self.tokenizer, args.chat_template_kwargs)
        self.positions = most_positions(self.model.config)
        texts, ids = read_stops(args.stop, self.tokenizer)
        trained = self.model.generation_config.stop_strings or []  # a list, or one text
        self.stops = texts or ([trained] if isinstance(trained, str) else trained)
        self.eos = {*eos_ids(self.tokenizer, self.model), *ids}

    def describe(self) -> str:
        """The model, and what of its training or of the flags goes with each prompt."""
        facts = [
            f"{self.name}: {self.model.num_parameters():,} parameters on {self.model.device}",
            "" if self.tokenizer.chat_template else "no chat template: it continues your text",
            self.system_prompt and f"system message: {self.system_prompt[:200]}",
            self.template_kwargs and f"chat template with {self.template_kwargs[:200]}",
            self.stops and f"answers end before {', '.join(map(repr, self.stops))}",
        ]
        return "\n  ".join(filter(None, facts))

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
    def answer(self, ids: list[int], max_gen_len: int, show) -> Answer:
        """Answer these tokens, and ``show`` the text piece by piece."""
        answer = Answer(self.tokenizer, self.eos, show, self.stops)
        past = None
        last = {}
        if "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            last["logits_to_keep"] = 1  # not those of a whole long prompt
        while not answer.finished and len(answer.ids) < min(max_gen_len, self.positions - len(ids)):
            tokens = torch.tensor([answer.ids[-1:] or ids], device=self.model.device)
            output = self.model(tokens, past_key_values=past, use_cache=True, **last)
            past = output.past_key_values
            logits = output.logits[0, -1].float()
            token = logits.argmax()
            if self.temperature > 0:
                token = torch.softmax(logits / self.temperature, -1).multinomial(1)
            answer.add(token.item())
        answer.show_up_to(len(answer.text))
        return answer


def say(text: str):
    """Print a message to the user on stderr: it is not part of an answer."""
    print(text, file=sys.stderr, flush=True)


def show(text: str):
    """Print a piece of an answer."""
    print(text, end="", flush=True)


def ask(speakers: list[Speaker], prompt: str, number: int, args):
    """Answer prompt ``number`` with every model, and add prompt and answer to the conversations."""
    asked = [speaker.encode(prompt) for speaker in speakers]
    answers = []
    for speaker, ids in zip(speakers, asked, strict=True):
        torch.manual_seed(args.seed + number)  # the same random numbers for both models
        if len(speakers) > 1:
            show(f"[{speaker.name}]\n")
        answer = speaker.answer(ids, args.max_gen_len, show)
        show("\n")
        if not answer.finished:
            say(f"({speaker.name}: cut after {len(answer.ids)} tokens)")
        answers.append(answer)
    for speaker, answer in zip(speakers, answers, strict=True):  # only once all have answered
        if speaker.tokenizer.chat_template is not None:
            said = {"role": "assistant", "content": answer.text}
            speaker.history += [{"role": "user", "content": prompt}, said]
            del speaker.history[: -2 * args.history or None]


def talk(speakers: list[Speaker], args, interactive: bool) -> int:
    """Answer the lines of stdin, one conversation if ``interactive``, else each alone -> failures."""
    failed = 0
    for number in count():
        try:
            prompt = input("> " if interactive else "").strip()
            if prompt == "/exit":
                break
            if prompt == "/clear" or not interactive:
                for speaker in speakers:
                    speaker.history = []
            if prompt not in ("", "/clear"):
                show("" if interactive else f"> {prompt}\n")
                ask(speakers, prompt, number, args)
        except InputError as error:
            say(f"error: {error}")
            failed += 1
        except KeyboardInterrupt:
            if not interactive:
                raise
            show("\n")
        except EOFError:
            show("\n" if interactive else "")
            break
    return failed


def main(argv=None):
    args = parse_args(argv)
    device = init_world(args.device).device
    speakers = [Speaker(path, args, device) for path in (model_path(args), args.compare) if path]
    for speaker in speakers:
        say(speaker.describe())
    if args.prompt is not None:
        ask(speakers, args.prompt, 0, args)
    elif not sys.stdin.isatty():
        sys.exit(2 if talk(speakers, args, interactive=False) else 0)
    else:
        with contextlib.suppress(ImportError):  # Windows has no readline
            import readline  # noqa: F401  (arrow keys and line history in input())
        say(f"it remembers {args.history} turns (--history); /clear forgets, Ctrl-C stops, /exit leaves")
        talk(speakers, args, interactive=True)


if __name__ == "__main__":
    if sys.stdin:  # a closed stream is None
        sys.stdin.reconfigure(errors="replace")
    run_script(main)
