"""Talk to a model: type a question and read the answer as it is produced.

    python chat.py                                         newest out/ppo_actor_*.pth, else the bundled demo
    python chat.py --model out/ppo_actor_128.pth           a .pth, a directory or a hub name
    python chat.py --best                                  the best evaluation of that run: its _best.pth
    python chat.py --weight full_sft --hidden_size 512     out/full_sft_512.pth: MiniMind's way of naming
    python chat.py --prompt "What is twelve plus five minus nine?"
    python chat.py < prompts.txt                           one answer per line, without a conversation
    python chat.py --compare model/demo/policy             every answer beside the answer of another model

At the prompt, /clear forgets the conversation, Ctrl-C stops an answer and forgets its question, /exit or
Ctrl-D ends the program. --history N lets the model read the last N turns again, which makes sense for models
trained on conversations. A model without a chat template continues the text you type and has no history.

Decoding is greedy by default, so that two answers differ because of the models and not by chance. With
--temperature, tokens are sampled from the whole distribution, as in PPO training: no top-k, no top-p.
"""

import contextlib
import os
import re
import shutil
import sys
import unicodedata
from itertools import count, zip_longest
from pathlib import Path

from errors import InputError, run_script
from trainer.flags import FlagParser, path

ROOT = Path(__file__).resolve().parent


def parse_args(argv=None):
    p = FlagParser(description=__doc__.split("\n\n")[0])
    add = p.add
    p.group("models")
    add("--model", path, "a .pth, a directory or a hub name")
    add("--weight", "", "load OUT_DIR/{weight}_{hidden_size}.pth; default: ppo_actor")
    add("--hidden_size", 0, "hidden size of --weight; 0: 512")
    add("--use_moe", 0, "1: load the _moe checkpoint", choices=[0, 1])
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
    args = p.parse_args(argv)
    if args.model and (args.weight or args.hidden_size or args.use_moe):
        raise InputError("--model and --weight (--hidden_size, --use_moe) both name a model: give one")
    return args


if __name__ == "__main__":  # before the imports below, which take seconds: help and wrong flags
    run_script(parse_args)

import torch
from transformers import GenerationConfig

from dataset.chat_template import encode, prompt_text, set_system_prompt, set_template_kwargs
from dataset.turns import add_system
from model.loading import check_tokenizer, eos_ids, load_policy, load_tokenizer, tokenizer_source
from trainer.endings import read_stops
from trainer.runs.distributed import init_world
from trainer.runs.interrupts import StopRequest


def model_path(args):
    """The path or hub name of the model that the flags name; without such flags the newest, or the demo.

    With --best it is the ``.pth`` of the best evaluation beside it. InputError if there is none."""
    path = args.model
    if not path and (args.weight or args.hidden_size or args.use_moe):
        name = f"{args.weight or 'ppo_actor'}_{args.hidden_size or 512}{'_moe' if args.use_moe else ''}.pth"
        path = Path(args.out_dir) / name
    chosen = str(path or newest_result(args.out_dir))
    if args.best:
        chosen = best_beside(chosen)
    if not path:
        say(f"no --model given: {chosen}")
    return chosen


def newest_result(out_dir):
    """The path of the newest trained actor there; the demo's policy if there is none."""
    found = Path(out_dir).glob("ppo_actor_*.pth")
    trained = [p for p in found if re.fullmatch(r"ppo_actor_\d+(_moe)?\.pth", p.name)]  # results, no copies
    return max(trained, key=lambda p: p.stat().st_mtime, default=ROOT / "model" / "demo" / "policy")


def best_beside(model):
    """The result of a run -> the ``.pth`` of its best evaluation. InputError if there is none."""
    path = Path(model)
    if path.stem.endswith("_best"):
        return str(path)
    best = path.with_name(f"{path.stem}_best.pth")
    if path.suffix != ".pth":
        raise InputError(f"--best: {model} is not the .pth of a run; train one, or leave --best out")
    if not best.is_file():
        raise InputError(
            f"--best: there is no {best}: the run had no evaluation (--eval_data_path), or none was better "
            "than its start; leave --best out"
        )
    return str(best)


class AnswerStreamer:
    """Gets the tokens from ``generate`` and passes their text to ``show`` as soon as it is final.

    An incomplete character of several tokens decodes to U+FFFD. So U+FFFD at the end of the text is held
    back, and so is the beginning of a stop string: an answer ends before the first one. (transformers'
    TextStreamer holds back whole words, and loses spaces.) Clean-up of spaces is off, because it would change
    text that has been shown.
    """

    def __init__(self, tokenizer, eos, show, stop, stops=()):
        self.decode = tokenizer.decode
        self.eos = eos
        self.show = show
        self.stop = stop  # ``StopRequest``
        self.stops = stops  # the stop strings
        self.ids = []  # the answer's ids, without the EOS
        self.finished = False  # True if an EOS or a stop string ended the answer
        self.text = ""
        self.shown = 0

    def put(self, value):
        """``generate`` calls it with the prompt [1, T], and then with each token [1] of the answer."""
        self.stop.obey()  # raised here: other code inside generate might catch it
        if value.dim() == 2 or self.finished:
            return
        self.finished = value.item() in self.eos
        if not self.finished:
            self.ids.append(value.item())
        self.text = self.decode(self.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        found = [self.text.index(text) for text in self.stops if text in self.text]
        if found:
            self.text = self.text[: min(found)]
            self.finished = True
        begun = [n for text in self.stops for n in range(len(text)) if self.text.endswith(text[:n])]
        self._show_up_to(min(len(self.text.rstrip("\ufffd")), len(self.text) - max(begun, default=0)))

    def end(self):
        """``generate`` calls it behind the last token."""
        self._show_up_to(len(self.text))

    def _show_up_to(self, length):
        self.show(self.text[self.shown : length])
        self.shown = max(self.shown, length)

    def ended(self, input_ids, scores, **more):
        """The ``StoppingCriteria`` of ``generate``. If it is asked before ``put``, one more token comes."""
        return torch.tensor([self.finished], device=input_ids.device)


class Speaker:
    """A model that answers, and its conversation so far."""

    def __init__(self, path, args, device):
        self.name = path
        self.history = []  # messages: user, assistant, user, …
        self.tokenizer = load_tokenizer(args.tokenizer or tokenizer_source(path), args.trust_remote_code)
        self.model = load_policy(path, args.trust_remote_code).to(device).eval()
        check_tokenizer(self.tokenizer, self.model)
        self.system_prompt = set_system_prompt(self.tokenizer, args.system_prompt)
        self.template_kwargs = set_template_kwargs(self.tokenizer, args.chat_template_kwargs)
        self.positions = getattr(self.model.config, "max_position_embeddings", 1 << 30)  # ALiBi: no limit
        texts, ids = read_stops(args.stop, self.tokenizer)
        trained = self.model.generation_config.stop_strings or []  # a list, or one text
        self.stops = texts or ([trained] if isinstance(trained, str) else trained)
        self.eos = sorted({*eos_ids(self.tokenizer, self.model), *ids})
        settings = {"eos_token_id": self.eos, "pad_token_id": self.eos[0], "do_sample": args.temperature > 0}
        if args.temperature > 0:
            settings |= {"temperature": args.temperature, "top_k": 0, "top_p": 1.0}
        self.model.generation_config = GenerationConfig(**settings)  # not the model's top-k, penalties

    def encode(self, prompt, max_gen_len):
        """The conversation so far and ``prompt`` -> token ids. InputError if the prompt alone is too long.

        The oldest turns are forgotten until the answer has room for ``max_gen_len`` tokens, or for half of
        the model's positions if that is less.
        """
        turn = {"role": "user", "content": prompt}
        for start in range(0, len(self.history) + 1, 2):
            messages = add_system([*self.history[start:], turn], self.system_prompt)
            ids = encode(self.tokenizer, [prompt_text(self.tokenizer, messages)])[0]
            if len(ids) + min(max_gen_len, self.positions // 2) <= self.positions:
                break
        if not 0 < len(ids) < self.positions:
            raise InputError(f"the prompt has {len(ids)} tokens, {self.name} takes 1 to {self.positions - 1}")
        if start:
            say(f"({self.name}: no room for the whole conversation, oldest turns forgotten: {start // 2})")
        self.history = self.history[start:]
        return ids

    def answer(self, ids, max_gen_len, show):
        """Generate an answer and ``show`` its text piece by piece -> the streamer, which holds all of it."""
        config = GenerationConfig(max_new_tokens=min(max_gen_len, self.positions - len(ids)))
        tokens = torch.tensor([ids], device=self.model.device)
        with StopRequest() as stop:
            streamer = AnswerStreamer(self.tokenizer, self.eos, show, stop, self.stops)
            self.model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                generation_config=config,
                streamer=streamer,
                stopping_criteria=[streamer.ended],
            )
        return streamer


def say(text):
    """Print a message to the user on stderr: it is not part of an answer."""
    print(text, file=sys.stderr, flush=True)


def wrap(text, width):
    """Text -> lines of exactly ``width`` terminal columns, broken at spaces where possible."""
    # Chinese characters and emoji take two columns. So each gets a NUL after it, from which it is not split.
    text = "".join(c + "\0" * (unicodedata.east_asian_width(c) in "WF") for c in text.expandtabs(4))
    fits = rf".{{1,{width}}}(?!\0)"
    rows = [row for line in text.splitlines() for row in re.findall(f"{fits}(?= |$) ?|{fits}", line) or [""]]
    return [row.rstrip().ljust(width).replace("\0", "") for row in rows]


def side_by_side(names, texts, width):
    """Two texts with their names -> one text with two columns, ``width`` wide."""
    column = (width - 3) // 2
    both = [wrap(f"{n[-column:]}\n{'-' * column}\n{t}", column) for n, t in zip(names, texts, strict=True)]
    return "\n".join(f"{a} | {b}".rstrip() for a, b in zip_longest(*both, fillvalue=" " * column))


def ask(speakers, prompt, number, args):
    """Answer prompt ``number`` with every model, and add prompt and answer to the conversations."""
    prompt = prompt.encode("utf-8", "replace").decode()  # terminals and shells can send broken characters
    prompts = [speaker.encode(prompt, args.max_gen_len) for speaker in speakers]
    pair = len(speakers) == 2
    width = shutil.get_terminal_size().columns
    columns = pair and width >= 60  # in a narrower terminal, answers are printed one after the other
    show = len if columns else lambda text: print(text, end="", flush=True)  # len: shows nothing
    answers = []
    for speaker, ids in zip(speakers, prompts, strict=True):
        torch.manual_seed(args.seed + number)  # the same random numbers for both models
        show(f"[{speaker.name}]\n" if pair else "")
        answers.append(speaker.answer(ids, args.max_gen_len, show))
        show("\n")
    if columns:
        print(side_by_side([s.name for s in speakers], [a.text for a in answers], width), flush=True)
    for speaker, answer in zip(speakers, answers, strict=True):
        if answer.finished and not answer.text.strip():
            say(f"({speaker.name}: the answer is empty: it ended at once)")
        if not answer.finished:
            say(f"({speaker.name}: cut after {len(answer.ids)} tokens)")
        if speaker.tokenizer.chat_template is not None:
            said = {"role": "assistant", "content": answer.text}
            speaker.history += [{"role": "user", "content": prompt}, said]
            del speaker.history[: -2 * args.history or None]


def talk(speakers, args, interactive):
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
                print(end="" if interactive else f"> {prompt}\n", flush=True)
                ask(speakers, prompt, number, args)
        except InputError as error:
            say(f"error: {error}")
            failed += 1
        except KeyboardInterrupt:
            if not interactive:
                raise
            print(flush=True)
        except EOFError:
            print(end="\n" if interactive else "", flush=True)
            break
    return failed


def main(argv=None):
    args = parse_args(argv)
    device = init_world(args.device).device
    speakers = [Speaker(path, args, device) for path in (model_path(args), args.compare) if path]
    for speaker in speakers:
        if speaker.system_prompt:
            say(f"{speaker.name}: system message: {speaker.system_prompt[:200]}")
        if speaker.template_kwargs:
            say(f"{speaker.name}: chat template with {speaker.template_kwargs[:200]}")
        if speaker.stops:
            say(f"{speaker.name}: answers end before {', '.join(map(repr, speaker.stops))}")
    if args.prompt is not None:
        ask(speakers, args.prompt, 0, args)
    elif not sys.stdin.isatty():
        sys.exit(2 if talk(speakers, args, interactive=False) else 0)
    else:
        with contextlib.suppress(ImportError):  # Windows has no readline
            import readline  # noqa: F401  (arrow keys and line history in input())
        for speaker in speakers:
            note = "" if speaker.tokenizer.chat_template else ", no chat template: it continues your text"
            say(f"{speaker.name}: {speaker.model.num_parameters():,} parameters on {device}{note}")
        say(f"it remembers {args.history} turns (--history); /clear forgets, Ctrl-C stops, /exit leaves")
        talk(speakers, args, interactive=True)


if __name__ == "__main__":
    if sys.stdin:  # a closed stream is None
        sys.stdin.reconfigure(errors="replace")
    try:
        run_script(main)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader of a pipe is gone: end quietly, also in the last flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
