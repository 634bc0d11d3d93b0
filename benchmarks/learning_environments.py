"""Task (f) of docs/learning.md: a game of several turns whose best policy is known, and who learns it.

    python benchmarks/learning_environments.py                     # our estimators: an hour on one core
    python benchmarks/learning_environments.py --who trl_tool our_group_tool --peer_python ENV/bin/python
    python benchmarks/learning_environments.py --variants          # what wrong masks and returns cost
    python benchmarks/learning_environments.py --table             # the tables of docs/learning.md

The game: guess.py, a number from 1 to 7 in three turns. Turns are texts, or ("_tool") calls of a tool, which
TRL's GRPOTrainer needs. The policy has 300,000 parameters; stage 1 has taught it to play at random. The value
of a policy is computed exactly, over all games that it can play, and so are that of the best policy (by
dynamic programming over what a player has seen) and that of random play. All of them ask the user's class.
Runs are processes of one thread in fp32, as in learning.py. Results, run by run, go into
benchmarks/results/learning_environments.json; a run that is there is not made again.
"""

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import RESULTS, ROOT, machine, read, table
from guess import TURNS, Guess, GuessTool
from learning_report import PAGE, middle
from learning_run import FIXED, RATES, Curve, command_line
from learning_tasks import script, write_jsonl
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from transformers.utils import get_json_schema

from atomic_files import write_whole
from trainer import advantages, train_ppo
from trainer.models import Models
from trainer.run import PpoRun

FILE = RESULTS / "learning_environments.json"
GAME = ROOT / "benchmarks" / "guess.py"
NUMBERS = range(1, 8)
OPEN, CLOSE = '<tool_call>{"name":"guess","arguments":{"number":', "}}</tool_call>"  # each is one token
WORDS = ["go", "guess", "higher", "lower", "won", "lost", "done", OPEN, CLOSE, *map(str, NUMBERS)]
ROLES = ("user", "assistant", "tool")
TEMPLATE = """
{%- for tool in tools or [] -%}{{- '<|tool|> ' + tool.function.name + ' <|end|> ' -}}{%- endfor -%}
{%- for message in messages -%}
{{- '<|' + message.role + '|> ' + (message.content or '') -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>{"name":"' + call.function.name + '","arguments":{' -}}
{%- for name, value in call.function.arguments.items() -%}
{{- '"' + name + '": ' + (value | tojson) -}}
{%- endfor -%}
{{- ' }}</tool_call>' -}}
{%- endfor -%}
{{- ' <|end|> ' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|> ' -}}{%- endif -%}
"""
# How TRL reads the calls in a turn: in the form of transformers' ``parse_response``. No space behind the
# anchor: a decoded prompt has none at its end, so TRL would read the turn before once more.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|end|>", "content": "text"},
    },
}
TOOLS = [get_json_schema(GuessTool().guess)]
POINTS = 10  # evaluations of a run, besides the one at its start
SEEDS = (0, 1, 2)
# In both kinds of game: what all trainers get.
SIZES = {
    "batch_size": 128, "mini_batch_size": 32, "ppo_epochs": 2, "max_steps": 100, "kl_coef": 0.03,
    "missing_eos_penalty": 0, "reasoning": 0,
}  # fmt: skip
TEXT = {"env": f"{GAME}:Guess", "max_turns": TURNS, "max_gen_len": 16}
TOOL = {"env": f"{GAME}:GuessTool", "max_turns": TURNS + 1, "max_gen_len": 32}  # the last turn: no call
FOUR = {"num_generations": 4}  # answers to each prompt, which all have the same number
ESTIMATORS = {
    "our_gae": {},
    "our_rloo": {"advantage": "rloo", **FOUR},
    "our_group": {"advantage": "group", **FOUR},
    "our_reinforce": {"advantage": "reinforce"},
}
WHO = {name: TEXT | flags for name, flags in ESTIMATORS.items()}
WHO |= {f"{name}_tool": TOOL | flags for name, flags in ESTIMATORS.items()}
WHO |= {"trl_tool": TOOL}
NAMES = {
    "our_gae": "PPO", "our_rloo": "RLOO", "our_group": "GRPO, `group`", "our_reinforce": "REINFORCE",
    "trl": "TRL's GRPO",
}  # fmt: skip
# Of actor and critic
RATES_TRIED = {name: [[5e-4], [1e-3]] for name in WHO}
RATES_TRIED |= {name: [[2.5e-4], *RATES_TRIED[name]] for name in ("our_group_tool", "trl_tool")}
RATES_TRIED |= {name: [[5e-4, 2e-3], [1e-3, 2e-3]] for name in ("our_gae", "our_gae_tool")}
GOAL = 0.95  # a share of the optimum


# ------------------------------------------------------------------------------- the game's values, all exact


class Answer(NamedTuple):
    """What the game says to a turn, and to which numbers it says so."""

    observation: str
    reward: float
    over: bool
    numbers: list[int]


def answers_to(guesses: list[int], numbers: list[int]) -> list[Answer]:
    """The different answers of the game to the last of these guesses, over the numbers that it may hide."""
    found: dict[tuple[str, float, bool], list[int]] = {}
    for number in numbers:
        game = Guess()
        game.reset(number)
        for guess in guesses:
            said = game.step(str(guess))
        found.setdefault(said, []).append(number)
    return [Answer(*said, hidden) for said, hidden in found.items()]


def value_of_play(choose: Callable[[list[float]], float], guesses: list[int], numbers: list[int]) -> float:
    """The sum over ``numbers`` of what a player gets who has made these guesses and only knows the answers.

    choose: the values of the seven next guesses -> the player's: ``max`` for the best one, a mean for a
    random one.
    """
    values = []
    for guess in NUMBERS:
        made = [*guesses, guess]
        value = 0.0
        for answer in answers_to(made, numbers):
            value += answer.reward * len(answer.numbers)
            if not answer.over:
                value += value_of_play(choose, made, answer.numbers)
        values.append(value)
    return choose(values)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def turn_of(guess: int, as_tool: bool) -> dict[str, Any]:
    """The message of a guess."""
    if not as_tool:
        return {"role": "assistant", "content": str(guess)}
    function = {"name": "guess", "arguments": {"number": guess}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def answer_message(observation: str, as_tool: bool) -> dict[str, Any]:
    return {"role": "tool" if as_tool else "user", "content": observation}


class Game(NamedTuple):
    """A game that is not over: its messages, guesses, the numbers that it may hide, its probability."""

    messages: list[dict[str, Any]]
    guesses: list[int]
    numbers: list[int]
    probability: float


class PolicyValue:
    """Policy -> {"value": the expected reward of a sampled game, "optimum": its share of the best policy's}.

    All games are played whose turns are guesses. A game with another turn counts as lost: in text it is, and
    a call that cannot be read hardly ever occurs.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, as_tool: bool):
        self.tokenizer = tokenizer
        self.as_tool = as_tool
        self.optimum = value_of_play(max, [], list(NUMBERS)) / len(NUMBERS)

    def ids(self, messages: list[dict[str, Any]], generate: bool = False) -> list[int]:
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generate, tools=TOOLS if self.as_tool else None
        )
        return self.tokenizer(text, add_special_tokens=False).input_ids

    @torch.no_grad()
    def turn_probabilities(self, policy: PreTrainedModel, games: list[Game]) -> list[list[float]]:
        """Of each game the probabilities of the seven guesses as its next turn."""
        starts = [self.ids(game.messages, generate=True) for game in games]
        rows = [
            self.ids([*game.messages, turn_of(guess, self.as_tool)]) for game in games for guess in NUMBERS
        ]
        # All games of a turn are equally long.
        logprobs = policy(torch.tensor(rows)).logits[:, :-1].log_softmax(-1)
        first = len(starts[0])
        taken = logprobs.gather(-1, torch.tensor(rows)[:, 1:, None])[:, first - 1 :, 0]
        return taken.sum(1).exp().view(len(games), len(NUMBERS)).tolist()

    def __call__(self, policy: PreTrainedModel) -> dict[str, float]:
        value = 0.0
        games = [Game([{"role": "user", "content": "go"}], [], list(NUMBERS), 1.0)]
        while games:
            grown = []
            for game, turns in zip(games, self.turn_probabilities(policy, games), strict=True):
                for guess, chance in zip(NUMBERS, turns, strict=True):
                    made = [*game.guesses, guess]
                    probability = game.probability * chance
                    for answer in answers_to(made, game.numbers):
                        value += probability * answer.reward * len(answer.numbers) / len(NUMBERS)
                        if not answer.over:
                            said = answer_message(answer.observation, self.as_tool)
                            messages = [*game.messages, turn_of(guess, self.as_tool), said]
                            grown.append(Game(messages, made, answer.numbers, probability))
            games = grown
        return {"value": value, "optimum": value / self.optimum}


# ---------------------------------------------------------------------------------- the start of all trainers


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each word; a guess in text is two tokens with the end of its turn, a call is four."""
    names = ["<|end|>", "<unk>", *(f"<|{role}|>" for role in ROLES), *WORDS]
    backend = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", pad_token="<|end|>", unk_token="<unk>",
        extra_special_tokens=[f"<|{role}|>" for role in ROLES], clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = TEMPLATE.replace("\n", "")
    return tokenizer


def make_policy(vocabulary: int) -> LlamaForCausalLM:
    """A model with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=96, num_hidden_layers=3, intermediate_size=192,
        num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=True, max_position_embeddings=64,
        pad_token_id=0, eos_token_id=0, bos_token_id=None, initializer_range=0.1,
    )  # fmt: skip
    return LlamaForCausalLM(config).float()


def random_game(draw: random.Random, as_tool: bool) -> list[dict[str, Any]]:
    """The messages of a game in which every guess is drawn anew."""
    game = Guess()
    game.reset(draw.choice(NUMBERS))
    messages = [{"role": "user", "content": "go"}]
    over = False
    while not over:
        guess = draw.choice(NUMBERS)
        observation, _, over = game.step(str(guess))
        messages.append(turn_of(guess, as_tool))
        if as_tool or not over:
            messages.append(answer_message(observation, as_tool))
    return [*messages, {"role": "assistant", "content": "done"}] if as_tool else messages


def prepare(folder: Path, as_tool: bool) -> dict[str, str]:
    """Write the policy that stage 1 has taught to play at random, unless it is there -> the flags that name
    it and the prompts. Their hidden numbers are in random order."""
    folder.mkdir(parents=True, exist_ok=True)
    policy = folder / "policy"
    prompts = folder / "prompts.jsonl"
    if not policy.exists():
        draw = random.Random(0)
        numbers = [*NUMBERS] * 128
        draw.shuffle(numbers)
        write_jsonl(prompts, [{"prompt": "go", "number": number} for number in numbers])
        tokenizer = make_tokenizer()
        make_policy(len(tokenizer)).save_pretrained(folder / "random")
        tokenizer.save_pretrained(folder / "random")
        tools = {"tools": TOOLS} if as_tool else {}
        games = [{"messages": random_game(draw, as_tool), **tools} for _ in range(4096)]
        script(
            "train_sft.py", "--model", folder / "random", "--data_path",
            write_jsonl(folder / "games.jsonl", games), "--epochs", 2, "--batch_size", 64,
            "--learning_rate", 1e-3, "--eval_size", 0, "--max_seq_len", 64, "--dtype", "float32",
            "--out_dir", folder, "--run_name", "sft", "--hf_dir", policy,
        )  # fmt: skip
    return {"model": str(policy), "data_path": str(prompts)}


# ------------------------------------------------------------------------------------------------------- runs


def flags_of(request: dict[str, Any], out: Path) -> dict[str, Any]:
    """The request -> flags of train_ppo.py. TRL's run reads the same."""
    flags = {**SIZES, **FIXED, **WHO[request["who"]], **request["files"], "seed": request["seed"]}
    flags |= dict(zip(RATES, request["rates"], strict=False)) | request["flags"]
    every = max(1, flags["max_steps"] // POINTS)
    return flags | {"out_dir": out, "run_name": "run", "eval_interval": every}


def run_ours(request: dict[str, Any], out: Path) -> list[dict[str, float]]:
    """The real command line; only its evaluation is replaced by the exact value. -> the points of the run"""
    curve = Curve()
    judge = PolicyValue(AutoTokenizer.from_pretrained(request["files"]["model"]), is_tool(request["who"]))

    def evaluate(run):
        curve.measure(judge, run.models.actor, run.progress.step * run.args.batch_size)
        return {}, {}

    PpoRun.evaluate = evaluate
    if request["variant"]:
        VARIANTS[request["variant"]]()
    train_ppo.main(command_line(flags_of(request, out)))
    return curve.points


def run_trl(request: dict[str, Any], out: Path) -> list[dict[str, float]]:
    """TRL's GRPOTrainer with an environment: its defaults but for sizes, rate and fp32."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    flags = flags_of(request, out)
    curve = Curve()
    tokenizer = AutoTokenizer.from_pretrained(flags["model"])
    judge = PolicyValue(tokenizer, as_tool=True)
    tokenizer.response_template = RESPONSE_TEMPLATE
    model = AutoModelForCausalLM.from_pretrained(flags["model"], dtype=torch.float32)
    records = [json.loads(line) for line in read(flags["data_path"]).splitlines()]
    data = [{**record, "prompt": [{"role": "user", "content": record["prompt"]}]} for record in records]
    per_batch = flags["batch_size"] // flags["mini_batch_size"]

    class Measure(TrainerCallback):
        def on_train_begin(self, *rest, **kwargs):
            curve.measure(judge, model, 0)

        def on_step_end(self, _, state, *rest, **kwargs):
            batches, within = divmod(state.global_step, per_batch * flags["ppo_epochs"])
            if not within and batches % flags["eval_interval"] == 0:
                curve.measure(judge, model, batches * flags["batch_size"])

    config = GRPOConfig(
        output_dir=str(out),
        per_device_train_batch_size=flags["mini_batch_size"],
        steps_per_generation=per_batch,
        num_iterations=flags["ppo_epochs"],
        max_steps=flags["max_steps"] * per_batch * flags["ppo_epochs"],
        num_generations=FOUR["num_generations"],
        max_completion_length=flags["max_gen_len"],
        max_tool_calling_iterations=TURNS,
        learning_rate=flags["learning_rate"],
        seed=flags["seed"],
        beta=flags["kl_coef"],
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        disable_tqdm=True,
    )
    GRPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=model,
        environment_factory=GuessTool,
        train_dataset=Dataset.from_list(data),
        callbacks=[Measure()],
    ).train()
    return curve.points


def is_tool(who: str) -> bool:
    return who.endswith("_tool")


# Wrong on purpose: what others had, see docs/learning.md. Each changes train_ppo.py in its own process.


def observations_learned() -> None:
    """Losses and advantages are of observations too, as if the policy had sampled them."""
    sample = train_ppo.sample

    def sample_all(*given):
        batch = sample(*given)
        batch.is_action = None
        return batch

    train_ppo.sample = sample_all
    Models.sampler_has_scored = lambda *_: False  # the sampler has no log-probs of observations


def ends_masked() -> None:
    """The token that ends a turn is not learned, but for that of the last turn, on which the reward lies."""
    sample = train_ppo.sample

    def sample_without_ends(*given):
        batch = sample(*given)
        later = torch.nn.functional.pad(batch.is_action[:, 1:], (0, 1))
        columns = torch.arange(later.shape[1])
        is_end = batch.is_action & ~later & (columns < batch.response_len[:, None] - 1)
        batch.is_action = batch.is_action & ~is_end
        return batch

    train_ppo.sample = sample_without_ends


def deltas_over_observations() -> None:
    """GAE goes over all columns, and the value of an observation's columns is 0."""

    def gae(rewards, values, mask, gamma, lam, *rest):
        rewards = torch.where(mask, rewards, 0.0)
        values = torch.where(mask, values, 0.0)
        deltas = rewards + gamma * torch.nn.functional.pad(values[:, 1:], (0, 1)) - values
        found = torch.where(mask, advantages.discounted_sums(deltas, gamma * lam), 0.0)
        return found, found + values

    advantages.gae = gae


VARIANTS = {
    "observations in the loss": observations_learned,
    "ends of turns masked": ends_masked,
    "deltas over observations": deltas_over_observations,
}
# Without a sampler's log-probs there are no importance weights.
VARIANT_FLAGS = {"observations in the loss": {"importance_cap": 0}}


# ----------------------------------------------------------------------------------------- results and tables


def load() -> list[dict[str, Any]]:
    return json.loads(read(FILE) or '{"runs": []}')["runs"]


def identity(run: dict[str, Any]) -> list[Any]:
    return [run[name] for name in ("who", "variant", "rates", "seed")]


def keep(run: dict[str, Any]) -> None:
    """Add a run to the file. One line a run."""
    runs = sorted([*load(), run], key=identity)
    lines = ",\n".join(json.dumps(run) for run in runs)
    FILE.parent.mkdir(exist_ok=True, parents=True)
    write_whole(FILE, f'{{"machine": {json.dumps(machine())},\n"runs": [\n{lines}\n]}}\n')


def make(folder: Path, python: str, who: str, rates: list[float], seed: int, variant: str = "") -> None:
    """One run in a process of its own, unless the file has it."""
    run = {"who": who, "variant": variant, "rates": rates, "seed": seed}
    if any(identity(old) == identity(run) for old in load()):
        return
    files = prepare(folder / ("tool" if is_tool(who) else "text"), is_tool(who))
    request = {**run, "files": files, "flags": VARIANT_FLAGS.get(variant, {})}
    command = [python if who.startswith("trl") else sys.executable, __file__, json.dumps(request)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{who}, {variant}: {done.stderr[-2000:]}")
    points = json.loads(done.stdout.splitlines()[-1])
    run["curve"] = {name: [point[name] for point in points] for name in points[0]}
    keep(run)
    curve = run["curve"]
    print(f"{identity(run)}: {curve['optimum'][-1]:.4f}, {curve['seconds'][-1]:.0f} s", flush=True)


def run_request(request: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as out:
        points = (run_ours if request["who"].startswith("our") else run_trl)(request, Path(out))
    print("\n" + json.dumps(points))


def compare(folder: Path, python: str, who: str, seeds: list[int]) -> None:
    """Each rate with each seed."""
    for rates in RATES_TRIED[who]:
        for seed in seeds:
            make(folder, python, who, rates, seed)


def best_rates(runs: list[dict[str, Any]], who: str) -> list[float]:
    """The rates with the best mean end."""
    ends: dict[tuple[float, ...], list[float]] = {}
    for run in runs:
        if run["who"] == who and not run["variant"]:
            ends.setdefault(tuple(run["rates"]), []).append(end(run))
    return list(max(ends, key=lambda rates: statistics.mean(ends[rates])))


def end(run: dict[str, Any]) -> float:
    """The share of the optimum after the last step."""
    return run["curve"]["optimum"][-1]


def results_table(runs: list[dict[str, Any]]) -> str:
    """Each trainer at its best rates, then the wrong variants."""
    rows = []
    for who in dict.fromkeys(run["who"] for run in runs):
        rates = best_rates(runs, who)
        for variant in ("", *VARIANTS):
            kind = [r for r in runs if (r["who"], r["variant"], r["rates"]) == (who, variant, rates)]
            if kind:
                rows.append(row_of(kind))
    return table(rows)


def row_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Runs that differ in their seeds -> a row of the table."""
    first = runs[0]
    curves = [run["curve"] for run in runs]
    until = [samples_until(curve, GOAL) for curve in curves]
    return {
        "turns": "calls" if is_tool(first["who"]) else "text",
        "trainer": NAMES[first["who"].removesuffix("_tool")],
        "changed": first["variant"],
        "rates": ", ".join(f"{rate:g}" for rate in first["rates"]),
        "runs": len(runs),
        "share of the optimum": middle([end(run) for run in runs]),
        f"samples to {GOAL}": f"{statistics.median(until):,.0f}".replace("inf", "not reached"),
        "CPU seconds": f"{statistics.median(curve['seconds'][-1] for curve in curves):.0f}",
    }


def samples_until(curve: dict[str, list[float]], goal: float) -> float:
    """The first measured number of samples with this share of the optimum; infinite if there is none."""
    pairs = zip(curve["samples"], curve["optimum"], strict=True)
    return next((samples for samples, share in pairs if share >= goal), math.inf)


def write_page() -> None:
    """The table of docs/learning.md, between its marks."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition("<!-- environments -->\n")
    _, _, after = rest.partition("<!-- end of environments -->")
    text = f"{before}<!-- environments -->\n{results_table(load())}\n<!-- end of environments -->{after}"
    PAGE.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--who", nargs="+", choices=list(WHO), default=list(ESTIMATORS))
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--variants", action="store_true", help="what is wrong on purpose, with PPO")
    parser.add_argument("--peer_python", default=sys.executable, help="the Python that has TRL")
    parser.add_argument("--folder", type=Path, help="keeps the start of the runs; default: a temporary one")
    parser.add_argument("--table", action="store_true", help="write the table, run nothing")
    args = parser.parse_args()
    if args.table:
        write_page()
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        for who in args.who:
            if not args.variants:
                compare(folder, args.peer_python, who, args.seeds)
                continue
            for variant in VARIANTS:
                for seed in args.seeds:
                    make(folder, args.peer_python, who, best_rates(load(), who), seed, variant)
    print(results_table(load()))


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("{"):
        run_request(json.loads(sys.argv[1]))
    else:
        main()
