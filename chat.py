"""Ask a model: the answer is shown as it is produced, thoughts and special tokens of its own included.

    python chat.py --prompt "What is twelve plus five?"           newest out/ppo_actor_*.pth, else the demo
    python chat.py --model out/ppo_actor_128.pth < prompts.txt    a .pth, a directory or a hub name
    python chat.py --tools tools.py:add --prompt "What is 2 + 3?"     its calls are run, it reads the results
    python chat.py --env game.py:Game --record game.jsonl         it plays in an environment, as in training

Without --prompt each line of the input, or typed in a terminal, is a question of its own. What tools and
environments answer is shown on stderr behind a "|", so that the output has what the model says and no more.
Conversations with memory: export.py, then ``transformers serve`` and ``transformers chat`` with the exported
folder."""

import io
import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import redirect_stdout
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
    p.group("several turns (environments.md)")
    add("--env", path, "what answers each turn, a class of yours: path.py:Class")
    add("--tools", [], "functions that the model may call: path.py:f,g …", type=path)
    add("--max_turns", 8, "turns of an answer, with --env or --tools", at_least=1, off=8)
    fields = (
        "JSON or a file, whose first record is taken: what reset gets; its prompt, if it has one, is asked"
    )
    add("--record", str, fields, needs="env")
    return p.parse_args(argv)


if __name__ == "__main__":  # before the imports below, which take seconds: help and wrong flags
    run_script(parse_args)

import torch
from transformers import GenerationConfig, TextStreamer

from dataset.chat_template import encode, prompt_text, set_system_prompt, set_template_kwargs, unmark
from dataset.formats import (
    PROMPTS,
    AnyPrompt,
    Record,
    add_system,
    keys_found,
    to_messages,
    to_prompt,
    tools_of,
    without_calls,
)
from dataset.lm_dataset import Prompt, lists_tools
from dataset.record_files import located, open_records
from model.loading import check_tokenizer, load_policy, load_tokenizer, most_positions, tokenizer_source
from trainer.compute.batch import new_batch
from trainer.environments.conversation import Conversation, MultiTurn
from trainer.environments.environment import Environments, load_environments, needed
from trainer.generation.sampling import noise_keys
from trainer.generation.stops import decode, load_endings, response_text
from trainer.runs.distributed import init_world

SHOWN = 2_000  # characters of what answers a turn


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

    def asked(self, prompt: AnyPrompt) -> AnyPrompt:
        """A text of the user, or the messages of a record -> messages with the system message."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return add_system(messages, self.system_prompt)

    def encode(self, prompt: AnyPrompt) -> list[int]:
        """A prompt -> token ids. Raises InputError if they are too long."""
        ids = encode(self.tokenizer, [prompt_text(self.tokenizer, self.asked(prompt))])[0]
        self.room(ids)
        return ids

    def room(self, prompt_ids: list[int]) -> int:
        """How many tokens an answer to a prompt may have. Raises InputError if there is room for none."""
        if not 0 < len(prompt_ids) < self.positions:
            raise InputError(
                f"the prompt has {len(prompt_ids)} tokens, {self.name} takes 1 to {self.positions - 1}; "
                "shorten it"
            )
        return min(self.args.max_gen_len, self.positions - len(prompt_ids))

    def answer(self, prompt: AnyPrompt) -> str:
        """Show the answer to a prompt word by word, with the stop string that ended it -> the answer without
        that. Raises InputError if the prompt is too long."""
        prompt_ids = self.encode(prompt)
        limit = self.room(prompt_ids)
        ids, ended = self.speak(prompt_ids, limit)
        if not ended:
            say(f"(cut after {limit} tokens)")
        return response_text(ids, ended, self.tokenizer, self.endings.stops)

    def speak(self, context: list[int], limit: int) -> tuple[list[int], bool]:
        """Show what comes behind these tokens word by word -> (its tokens, at most ``limit``; whether it has
        ended by itself)."""
        tokens = torch.tensor([context], device=self.model.device)
        eos, stops, _ = self.endings

        def ended(ids: list[int]) -> bool:
            if ids[-1] in eos or not stops:
                return ids[-1] in eos
            text = decode(self.tokenizer, ids)
            return any(stop_text in text for stop_text in stops.texts)

        def stop(sequence: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return torch.tensor([ended(sequence[0, len(context) :].tolist())], device=sequence.device)

        def shown(ids: list[int]) -> str:
            return decode(self.tokenizer, [i for i in ids if i not in eos])

        sequence = self.model.generate(  # type: ignore[operator]  # PreTrainedModel does not declare it
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=limit,
            stopping_criteria=[stop],
            streamer=TextStreamer(SimpleNamespace(decode=shown), skip_prompt=True),  # type: ignore[arg-type]
        )
        ids = sequence[0, len(context) :].tolist()
        return ids, ended(ids)


class Player(Speaker):
    """A model that answers in several turns, with tools or in an environment, by the code of training.
    record: the fields for ``reset``."""

    def __init__(
        self, path: str, args: Flags, device: torch.device, environments: Environments, record: Record
    ) -> None:
        super().__init__(path, args, device)
        self.record = record
        self.tools = tools_of(record) or environments.schemas
        # No limit of time: a person can end what hangs. ``room`` says how long a prompt may be
        self.limits = Namespace(max_turns=args.max_turns, reward_timeout=0)
        self.turns = MultiTurn(
            environments=environments,
            tokenizer=self.tokenizer,
            endings=self.endings,
            thinking=None,
            args=self.limits,
            longest_prompt=sys.maxsize,
        )
        self.output = sys.stdout

    def answer(self, prompt: AnyPrompt) -> str:
        """Show the answer to a prompt turn by turn -> its last turn. Raises InputError as ``play``."""
        with redirect_stdout(sys.stderr):  # what the user's code prints
            return self.play(prompt).text

    def speak(self, context: list[int], limit: int) -> tuple[list[int], bool]:
        with redirect_stdout(self.output):
            return super().speak(context, limit)

    def play(self, prompt: AnyPrompt) -> Conversation:
        """Show the answer to a prompt turn by turn, behind each turn what answers it, and the score that the
        environment gives. torch's seed decides that of ``reset``. Raises InputError if the prompt is too
        long, the chat template cannot go on behind a turn, or reset, step or get_reward fails."""
        messages = self.asked(prompt)
        tools = () if lists_tools(to_messages(messages)) else self.tools
        text = prompt_text(self.tokenizer, messages, tools)
        (ids,) = encode(self.tokenizer, [text])
        first = Prompt(0, messages, None, ids, self.record, unmark(text), tools=tools)
        self.turns.check(first)
        try:
            return self.play_from(first, prompt)
        finally:
            self.turns.close()

    def play_from(self, first: Prompt, prompt: AnyPrompt) -> Conversation:
        """``play`` with the prompt as the model reads it. prompt: as it was given."""
        (talk,) = self.turns.begin([first], noise_keys(torch.initial_seed(), 0, [0]))
        question = to_messages(talk.prompt.prompt)[-1]["content"]
        if question != prompt:  # of a record, or with what reset adds
            show(question)
        limit = self.limits.max_gen_len = self.room(talk.prompt.prompt_ids)
        while not talk.over:
            ids, ended = self.speak(talk.context, limit - len(talk.ids))
            tokens = torch.tensor([ids])
            length = torch.tensor([len(ids)])
            turn = new_batch([talk.context], tokens, torch.zeros(1, len(ids)), length, torch.tensor([ended]))
            self.turns.reply([talk], turn)
            for message in talk.observations:
                name = f"{message['name']}: " if "name" in message else ""
                show(name + message["content"])
        if not ended:
            say(f"(cut after {limit} tokens)")
        elif not talk.finished:
            say(f"(cut: {limit} tokens have no room for what answers this turn)")
        elif talk.observations and len(talk.turn_ends) == self.limits.max_turns:
            say(f"(turn {self.limits.max_turns} of --max_turns)")
        (score,) = self.turns.scores([talk])
        if score is not None:
            say(f"(score {score:g})")
        return talk


def read_record(given: str) -> Record:
    """--record -> the record, {} without the flag. Raises InputError if it is no record."""
    if not given.lstrip().startswith("{"):
        if not given:
            return {}
        records = open_records(given)
        with located(records, 0):
            return records[0]
    try:
        return dict(json.loads(given))
    except ValueError as error:
        raise InputError(
            f"--record {given[:100]}: {error}; give a JSON object, or a file of records"
        ) from error


def show(text: str) -> None:
    """Show what an environment says, each line behind a "|", and of much only the beginning."""
    rest = len(text) - SHOWN
    text = text[:SHOWN] + f" … ({rest} characters more)" * (rest > 0)
    say("\n".join(f"| {line}" for line in text.splitlines() or [""]))


def say(text: str) -> None:
    """Print a message to the user on stderr: it is not part of an answer."""
    print(text, file=sys.stderr)


def asked_by(record: Record) -> AnyPrompt | None:
    """The prompt of a record, as messages, None if it has none. Raises InputError if it cannot be read."""
    if record.keys().isdisjoint((*PROMPTS, "instruction", "text")):
        return None
    return to_messages(without_calls(record, to_prompt(record)[0]))


def questions(args: Flags, record: Record) -> Iterator[AnyPrompt]:
    """--prompt, or the prompt of --record, or the lines of the input. Those of a file or pipe are shown."""
    given = asked_by(record) if args.prompt is None else args.prompt
    if given is not None:
        yield given
        return
    terminal = sys.stdin and sys.stdin.isatty()  # a closed stream is None
    if terminal:
        say("type a question; Ctrl-D ends")
    for line in sys.stdin or ():
        prompt = line.removeprefix("\ufeff").strip()
        if not terminal:
            print(f"> {prompt}", flush=True)
        yield prompt


def make_speaker(args: Flags, record: Record, device: torch.device) -> Speaker:
    """The model that the flags name. Raises InputError for flags that name nothing usable."""
    if not (args.env or args.tools):
        return Speaker(model_path(args), args, device)
    environments = load_environments(args.env, args.tools)
    for name in needed(environments.reset_takes):
        if name not in record:
            raise InputError(
                f"--env {args.env}: reset's parameter {name!r} is not in the record; {keys_found(record)}: "
                f"give it in --record '{{\"{name}\": …}}', or a default"
            )
    return Player(model_path(args), args, device, environments, record)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    record = read_record(args.record or "")
    device = init_world(args.device).device
    speaker = make_speaker(args, record, device)
    say(f"{speaker.name}: {speaker.model.num_parameters():,} parameters on {device}")
    for number, prompt in enumerate(questions(args, record)):
        torch.manual_seed(args.seed + number)
        if prompt or args.prompt is not None:
            speaker.answer(prompt)


if __name__ == "__main__":
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    run_script(main)
