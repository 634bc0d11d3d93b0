"""Talk to a model: type a question and read the answer as it is produced.

    python chat.py                                         newest out/ppo_actor_*.pth, else the bundled demo
    python chat.py --model out/ppo_actor_128.pth           a .pth, a directory or a hub name
    python chat.py --weight full_sft --hidden_size 512     out/full_sft_512.pth: MiniMind's way of naming
    python chat.py --prompt "What is six plus seven?"      one answer
    python chat.py < prompts.txt                           an answer to every line, each on its own
    python chat.py --compare model/demo/policy             every answer beside that of another model

At the prompt, /clear forgets the conversation, Ctrl-C stops an answer and forgets its question, /exit or
Ctrl-D leaves. A model that learned from conversations remembers N turns with --history N.
A model without a chat template goes on from the text you type and remembers nothing.

Decoding is greedy by default: what differs between two answers is then the models, not luck. With
--temperature, tokens come from the whole distribution, as in PPO training: no top-k, no top-p.
"""

import os
import re
import shutil
import sys
import unicodedata
from itertools import count, zip_longest
from pathlib import Path

import torch
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from dataset.conversations import encode, for_tokenizer, render
from errors import FlagParser, InputError, run_script
from model.checks import check_tokenizer, eos_ids
from model.loading import load_policy, load_tokenizer, tokenizer_source
from trainer.distributed import init_world
from trainer.interrupt import StopRequest

ROOT = Path(__file__).resolve().parent


def parse_args(argv=None):
    p = FlagParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    # models
    p.add_argument("--model", default="", help="a .pth, a directory or a hub name")
    p.add_argument("--weight", default="", help="load OUT_DIR/{weight}_{hidden_size}.pth; default: ppo_actor")
    p.add_argument("--hidden_size", type=int, default=0, help="of --weight; default: 512")
    p.add_argument("--use_moe", type=int, default=0, choices=[0, 1], help="load the _moe checkpoint")
    p.add_argument("--out_dir", default=str(ROOT / "out"), help="where --weight is looked for")
    p.add_argument("--compare", default="", help="a second model to answer the same prompts")
    p.add_argument("--tokenizer", default="", help="of both models; default: beside each model")
    p.add_argument("--trust_remote_code", action="store_true", help="run code that a model brings along")
    # answers
    p.add_argument("--prompt", help="answer this and leave")
    p.add_argument("--history", type=int, default=0, help="turns that it remembers; 0: each prompt is new")
    p.add_argument("--max_gen_len", type=int, default=512, help="longest answer in tokens")
    p.add_argument("--temperature", type=float, default=0.0, help="0: always the likeliest token")
    p.add_argument("--seed", type=int, default=42, help="of sampling; line n of the input uses seed + n")
    p.add_argument("--device", default="", help="cpu, cuda, cuda:1; default: a GPU where there is one")
    args = p.parse_args(argv)
    for name, least in (("max_gen_len", 1), ("temperature", 0), ("seed", 0), ("history", 0)):
        if not least <= getattr(args, name) < 2**63:
            raise InputError(f"--{name} {getattr(args, name)}: must be {least} or more, and below 2**63")
    if args.model and (args.weight or args.hidden_size or args.use_moe):
        raise InputError("--model and --weight (--hidden_size, --use_moe) both name a model: give one")
    return args


def model_path(args):
    """The path or hub name of the model that the flags ask for."""
    if args.model:
        return args.model
    if args.weight or args.hidden_size or args.use_moe:
        name = f"{args.weight or 'ppo_actor'}_{args.hidden_size or 512}{'_moe' if args.use_moe else ''}.pth"
        return str(Path(args.out_dir) / name)
    trained = Path(args.out_dir).glob("ppo_actor_*.pth")
    path = max(trained, key=lambda p: p.stat().st_mtime, default=ROOT / "model" / "demo" / "policy")
    say(f"no --model given: {path}")
    return str(path)


class AnswerStreamer(BaseStreamer):
    """What ``generate`` hands its tokens to: passes text to ``show`` as soon as it is sure.

    A character of several tokens decodes to U+FFFD until it is whole, so these wait at the end of the text.
    (transformers' TextStreamer makes words wait, and loses spaces.) Clean-up would change what was shown.
    """

    def __init__(self, tokenizer, eos, show, stop):
        self.decode, self.eos, self.show, self.stop = tokenizer.decode, eos, show, stop
        self.ids = []  # of the answer, without the EOS
        self.finished = False  # ended by an EOS
        self.text, self.shown = "", 0

    def put(self, value):
        self.stop.obey()  # here, and not somewhere inside generate that might swallow it
        if value.dim() == 2:  # the prompt, which comes first
            return
        self.finished = value.item() in self.eos
        self.ids += [] if self.finished else [value.item()]
        self.text = self.decode(self.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        self._show_up_to(len(self.text.rstrip("\ufffd")))

    def end(self):
        self._show_up_to(len(self.text))

    def _show_up_to(self, length):
        self.show(self.text[self.shown : length])
        self.shown = max(self.shown, length)


class Speaker:
    """A model that answers, and its conversation so far."""

    def __init__(self, path, args, device):
        self.name, self.history = path, []  # messages: user, assistant, user, …
        self.tokenizer = load_tokenizer(args.tokenizer or tokenizer_source(path), args.trust_remote_code)
        self.model = load_policy(path, args.trust_remote_code).to(device).eval()
        check_tokenizer(self.tokenizer, self.model)
        self.positions = getattr(self.model.config, "max_position_embeddings", 1 << 30)  # ALiBi: no end
        self.eos = eos_ids(self.tokenizer, self.model)
        settings = {"eos_token_id": self.eos, "pad_token_id": self.eos[0], "do_sample": args.temperature > 0}
        if args.temperature > 0:
            settings |= {"temperature": args.temperature, "top_k": 0, "top_p": 1.0}
        self.model.generation_config = GenerationConfig(**settings)  # not the model's top-k or penalties

    def encode(self, prompt, max_gen_len):
        """``prompt``, after the conversation so far -> token ids; InputError for one that is too long alone.

        The oldest turns are forgotten until the answer has ``max_gen_len`` or half of the model's positions.
        """
        turn = {"role": "user", "content": prompt}
        for start in range(0, len(self.history) + 1, 2):
            asked = for_tokenizer(self.tokenizer, [*self.history[start:], turn])
            text = asked if isinstance(asked, str) else render(self.tokenizer, asked, generate=True)
            ids = encode(self.tokenizer, [text])[0]
            if len(ids) + min(max_gen_len, self.positions // 2) <= self.positions:
                break
        if not 0 < len(ids) < self.positions:
            raise InputError(f"the prompt has {len(ids)} tokens, {self.name} takes 1 to {self.positions - 1}")
        if start:
            say(f"({self.name}: no room for the whole conversation, oldest turns forgotten: {start // 2})")
        self.history = self.history[start:]
        return ids

    def answer(self, ids, max_gen_len, show):
        """Generate an answer, ``show`` its text piece by piece -> the streamer that has all of it."""
        config = GenerationConfig(max_new_tokens=min(max_gen_len, self.positions - len(ids)))
        tokens = torch.tensor([ids], device=self.model.device)
        with StopRequest() as stop:
            mask, streamer = torch.ones_like(tokens), AnswerStreamer(self.tokenizer, self.eos, show, stop)
            self.model.generate(tokens, attention_mask=mask, generation_config=config, streamer=streamer)
        return streamer


def say(text):
    """To the person, not part of an answer."""
    print(text, file=sys.stderr, flush=True)


def wrap(text, width):
    """Lines of exactly ``width`` terminal columns, broken at a space where there is one."""
    # Chinese characters and emoji take two columns: give them two characters, which must stay together.
    text = "".join(c + "\0" * (unicodedata.east_asian_width(c) in "WF") for c in text.expandtabs(4))
    fits = rf".{{1,{width}}}(?!\0)"
    rows = [row for line in text.splitlines() for row in re.findall(f"{fits}(?= |$) ?|{fits}", line) or [""]]
    return [row.rstrip().ljust(width).replace("\0", "") for row in rows]


def side_by_side(names, texts, width):
    """Two named texts as the two columns of one text, ``width`` wide."""
    column = (width - 3) // 2
    both = [wrap(f"{n[-column:]}\n{'-' * column}\n{t}", column) for n, t in zip(names, texts, strict=True)]
    return "\n".join(f"{a} | {b}".rstrip() for a, b in zip_longest(*both, fillvalue=" " * column))


def ask(speakers, prompt, number, args):
    """Answer one prompt, the ``number``-th, with every model, and add it to their conversations."""
    prompt = prompt.encode("utf-8", "replace").decode()  # terminals and shells can send broken characters
    prompts = [speaker.encode(prompt, args.max_gen_len) for speaker in speakers]
    pair, width = len(speakers) == 2, shutil.get_terminal_size().columns
    columns = pair and width >= 60  # in a narrower terminal, one answer under the other
    show = len if columns else lambda text: print(text, end="", flush=True)  # len: to no effect
    answers = []
    for speaker, ids in zip(speakers, prompts, strict=True):
        torch.manual_seed(args.seed + number)  # the same luck for both models
        show(f"[{speaker.name}]\n" if pair else "")
        answers.append(speaker.answer(ids, args.max_gen_len, show))
        show("\n")
    if columns:
        print(side_by_side([s.name for s in speakers], [a.text for a in answers], width), flush=True)
    for speaker, answer in zip(speakers, answers, strict=True):
        if not answer.finished:
            say(f"({speaker.name}: cut after {len(answer.ids)} tokens)")
        if speaker.tokenizer.chat_template is not None:
            said = {"role": "assistant", "content": answer.text}
            speaker.history += [{"role": "user", "content": prompt}, said]
            del speaker.history[: -2 * args.history or None]


def talk(speakers, args, interactive):
    """Answer the lines of stdin, as one conversation or else each on its own -> how many had no answer."""
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
    if args.prompt is not None:
        ask(speakers, args.prompt, 0, args)
    elif not sys.stdin.isatty():
        sys.exit(2 if talk(speakers, args, interactive=False) else 0)
    else:
        if sys.platform != "win32":  # which has none
            import readline  # noqa: F401  (arrow keys and line history in input())
        for speaker in speakers:
            note = "" if speaker.tokenizer.chat_template else ", no chat template: it continues your text"
            say(f"{speaker.name}: {speaker.model.num_parameters():,} parameters on {device}{note}")
        say(f"it remembers {args.history} turns (--history); /clear forgets, Ctrl-C stops, /exit leaves")
        talk(speakers, args, interactive=True)


if __name__ == "__main__":
    for stream in filter(None, (sys.stdin, sys.stdout)):  # a closed one is None
        stream.reconfigure(errors="replace")
    try:
        run_script(main)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # whoever read the answers has left: no complaint, not even from the last flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
