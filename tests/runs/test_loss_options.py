"""Whole runs with options: stopped and resumed they end bit for bit alike, and two processes equal one."""

import json
from functools import cache

import pytest
import same_runs
from same_runs import CRITIC, EXACT, same_metrics, same_weights, sizes
from tiny import CHAT, WORDS, flags, read_jsonl, run_files, train, write_jsonl

from errors import InputError
from trainer import train_ppo

RUN = EXACT | {"max_gen_len": 6, "max_steps": 4, "ppo_epochs": 2, "seed": 1, "eval_interval": 2}
OPTIONS = {"kl_target": 0.05, "kl_horizon": 32, "entropy_coef": 0.05, "entropy_top": 0.4, "ema_beta": 0.7}
OPTIONS |= {"policy_loss": "gspo", "mask_truncated": 1}
ONLINE = RUN | CRITIC | OPTIONS | {"replay_batches": 1}
# Many answers to a prompt score the same.
FEW_SCORES = """def score(prompts, responses, answers, step, total_steps):
    return [(1 + step / total_steps) * ({"a", "c"} <= set(r.split())) for r in responses]
"""
STEP_SCORES = """
def score(prompts, responses, answers):
    places = [[i for i, c in enumerate(r) if c in "be"] for r in responses]
    return [[(i, 0.5) for i in mine] if len(r) % 4 else 0.1 * len(r) for r, mine in zip(responses, places)]
"""
# What an environment draws depends on the seed that it gets.
ENVIRONMENTS = """import random
class Game:
    def reset(self, seed):
        self.random = random.Random(seed)
        return " " + self.random.choice("abcdefgh")
    def step(self, text):
        word = self.random.choice("abcdefgh")
        return word, text.count(word) - 0.25, word in "gh"
class Box:
    def reset(self, seed, prompt):
        self.limit = random.Random(seed).randint(0, 2)
        self.sum = len(prompt) % 2
    def add(self, n: int) -> int:
        \"\"\"Add a number.

        Args:
            n: the number
        \"\"\"
        self.sum += n
        if self.sum > 4:
            raise ValueError("full")
        return "abcdefgh"[self.sum]
    def get_reward(self):
        return float(self.sum > self.limit)
"""
CALLS = [
    f'<tool_call>{{"name":"{name}","arguments":{{"n":{n}}}}}</tool_call>'
    for name, n in [("add", 2), ("no", 1)]
]
# Results of tools and lists of tools are a part of it.
TOOLS_CHAT = "{% for t in tools or [] %}{{ t['function']['name'] + ' ' }}{% endfor %}" + CHAT
GROUPS = {"advantage": "rloo", "num_generations": 4, "filter_groups": 2, "kl_in": "reward"}
GROUPS |= {"policy_loss": "cispo"}
GROUPS |= {"replay_batches": 1, "update_old_actor_freq": 2, "missing_eos_penalty": 0, "temperature": 0.8}
ENDINGS = RUN | CRITIC | {"critic_init": "actor", "max_gen_len": 8, "min_gen_len": 3, "overlong_buffer": 3}
ENDINGS |= {"overlong_penalty": 0.5, "replay_batches": 1, "update_old_actor_freq": 2}
ENDS = ["--stop", "b ", "d", "--stop_token_ids", "9"]
TURNS = RUN | CRITIC | {"max_gen_len": 20, "max_turns": 3, "replay_batches": 1, "kl_in": "reward"}
TURNS |= {"update_old_actor_freq": 2, "gamma": 0.9, "lam": 0.8, "ema_beta": 0.7, "min_gen_len": 3}
OFFLINE = RUN | CRITIC | {"max_gen_len": 8, "accumulation_steps": 2, "lr_schedule": "constant"}
ADAPTERS = {"lora_r": 2, "gradient_checkpointing": 1, "dtype": "float16", "ppo_epochs": 1}
# the flags, and the responses of a batch
RUNS = {
    "options": (ONLINE | {"accumulation_steps": 2, "normalize_reward": 1, "critic_lam": 0.97}, 16),
    "adapters in fp16": (ONLINE | ADAPTERS | {"update_old_actor_freq": 2, "kl_in": "reward"}, 8),
    "several answers": (RUN | GROUPS, 32),
    "endings": (ENDINGS, 16),
    "several turns": (TURNS, 16),
    "tools": (RUN | GROUPS | {"max_gen_len": 32, "max_turns": 3}, 32),
    "offline": (OFFLINE, 16),
    "offline, adapters": (OFFLINE | ADAPTERS, 16),
    "offline, bf16": (OFFLINE | {"dtype": "bfloat16"}, 16),
}
KINDS = [*RUNS][:-2] + [pytest.param(kind, marks=pytest.mark.slow) for kind in [*RUNS][-2:]]


def pair(n):
    words = {"chosen": "a " * (1 + n % 5), "rejected": "b " * (1 + n % 3)}
    return {"prompt": f"c {'d' if n % 2 else 'e'}", **words}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """By the kind of a run; the others are online."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "few.py").write_text(FEW_SCORES)
    online = run_files(folder)
    held_out = [{"prompt": f"{word} b", "answer": "a"} for word in "abcde"]
    online["eval_data_path"] = write_jsonl(folder / "eval.jsonl", held_out)
    scored = online | {"reward_fn": f"{folder / 'few.py'}:score"}
    del scored["reward_model"]
    (folder / "steps.py").write_text(STEP_SCORES)
    steps = {"reward_fn": f"{folder / 'steps.py'}:score", "eval_data_path": online["data_path"]}
    texts = write_jsonl(folder / "texts.jsonl", [{"text": f"{word} b c"} for word in "abcde"])
    offline = {
        "model": online["model"],
        "offline_data_path": write_jsonl(folder / "pairs.jsonl", map(pair, range(50))),
        "eval_data_path": write_jsonl(
            folder / "held_out.jsonl", [*map(pair, range(7)), pair(7) | {"chosen": "a " * 9}]
        ),
        "ptx_data_path": texts,
    }
    (folder / "environments.py").write_text(ENVIRONMENTS)
    turns = run_files(folder / "turns", words=[*WORDS, *CALLS], template=TOOLS_CHAT)
    del turns["reward_model"]
    turns["eval_data_path"] = online["eval_data_path"]
    game = turns | {"env": f"{folder / 'environments.py'}:Game"}
    box = turns | {"env": f"{folder / 'environments.py'}:Box"}
    found = {"offline": offline, "several answers": scored, "endings": online | steps}
    found |= {"several turns": game, "tools": box}
    return found | {"": online | {"ptx_data_path": texts}}


@pytest.fixture(scope="module")
def argv_of(files):
    def argv(kind, out_dir, processes=1, **more):
        given, responses = RUNS[kind]
        chosen = files.get(kind.partition(",")[0], files[""])
        values = {**chosen, **given, **sizes(responses // processes), "out_dir": out_dir, **more}
        return [*flags(**values), *(ENDS if kind == "endings" else [])]

    return argv


@pytest.fixture(scope="module")
def whole(argv_of, tmp_path_factory):
    @cache
    def folder(kind):
        out = tmp_path_factory.mktemp("whole")
        train_ppo.main(argv_of(kind, out))
        return out / "r"

    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_from_a_checkpoint_a_run_goes_on_bit_for_bit(whole, argv_of, tmp_path, kind, capsys):
    same_runs.resumed_is_the_same(whole(kind), argv_of(kind, tmp_path), tmp_path, last=4)
    if kind.startswith("offline"):
        says_what_it_is(whole(kind), capsys.readouterr().out)


def says_what_it_is(run, said):
    """It is a run of offline PPO, of 50 pairs, which has learned."""
    lines = read_jsonl(run / "metrics.jsonl")
    assert lines[-1]["eval/chosen_preferred"] > max(0.5, lines[0]["eval/chosen_preferred"])
    assert "policy/ptx_loss" in lines[-1]
    text = (run / "summary.md").read_text()
    assert "The chosen_preferred" in text and "on 7 held-out pairs" in text
    assert "can be chance" in text or "rose" in text
    assert "score" not in text.split("Health")[0]
    assert "the scores of" in said and "answers  100\nheld out 7 (1 of 8 read dropped, " in said
    assert "4 steps of 16 logged answers, 1 x cpu" in said
    assert (run / "report.html").is_file()


TOGETHER = {  # what is compared
    "options": ["actor", "critic", "ema"],
    "offline": ["actor", "critic"],
    "several answers": ["actor"],
    "endings": ["actor", "critic"],
    "several turns": ["actor", "critic", "ema"],
    "tools": ["actor"],
}
OF_OPTIONS = {"kl/coef", "kl/sequence", "policy/entropy", "policy/loss", "ema/score"}


OFTEN = ["options", "several answers", "endings", "several turns", "tools"]


@pytest.mark.parametrize("kind", [*OFTEN, pytest.param("offline", marks=pytest.mark.slow)])
def test_two_processes_equal_one(whole, argv_of, tmp_path, kind):
    one, two = whole(kind), tmp_path / "r"
    same_runs.run_in_two_processes(argv_of(kind, tmp_path, processes=2))
    same_weights(one, two, 4, TOGETHER[kind])
    names = OF_OPTIONS if kind == "options" else None
    but = ("perf/", "policy/") if kind in ("several answers", "tools") else ("perf/",)
    same_metrics(one, two, names, but, rel=1e-3, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["several turns", "tools"])
def test_two_shards_equal_one(whole, argv_of, tmp_path, kind):
    more = {"ema_beta": ""} if kind == "several turns" else {}
    train_ppo.main(argv_of(kind, tmp_path / "one", **more))
    same_runs.run_in_two_processes(argv_of(kind, tmp_path / "two", processes=2, shard=1, **more))
    same_weights(tmp_path / "one" / "r", tmp_path / "two" / "r", 4, TOGETHER[kind][:2])


def test_environments_answer_calls_and_games_are_played(whole):
    for kind in ("several turns", "tools"):
        lines = read_jsonl(whole(kind) / "metrics.jsonl")
        assert all(1 < line["rollout/turns"] < 3 for line in lines[1:])
        assert all(line["rollout/observation_tokens"] > 0 for line in lines[1:])
        assert "eval/turns" in lines[0]
    assert all(0.2 < line["rollout/failed_calls"] < 0.9 for line in lines[1:])
    assert all(line["rollout/calls"] > 0.2 for line in lines[1:])
    texts = json.dumps(read_jsonl(whole("tools") / "samples.jsonl"))
    assert "there is no tool" in texts


def test_the_options_have_their_numbers_in_every_step(whole):
    steps = read_jsonl(whole("options") / "metrics.jsonl")[1:]
    assert len({step["kl/coef"] for step in steps}) > 2
    assert "ema/score" in steps[-1]


def test_other_logged_answers_are_another_run(whole, argv_of, tmp_path):
    out = whole("offline").parent
    other = write_jsonl(tmp_path / "other.jsonl", map(pair, range(1, 51)))
    with pytest.raises(InputError, match=r"offline_data_path .* does not hold what the run began with"):
        train_ppo.main(argv_of("offline", out, resume="auto", offline_data_path=other))


def test_without_a_critic_nothing_of_one_is_trained_logged_or_saved(whole):
    run = whole("several answers")
    names = {path.name for path in (run / "checkpoints" / "step_4").iterdir()}
    assert "actor.safetensors" in names
    assert not any("critic" in name for name in names)
    lines = read_jsonl(run / "metrics.jsonl")
    assert not any(name.startswith("value/") for line in lines for name in line)
    assert "policy/loss" in lines[1]  # the actor trains from the first step on
    assert lines[1]["rollout/sampled_again"] > 0
    assert lines[1]["rollout/equal_groups"] < 0.8
    assert "eval/pass@4" in lines[0]


def test_every_ending_occurs(whole):
    run = whole("endings")
    rows = [row for name in ("samples", "eval_samples") for row in read_jsonl(run / f"{name}.jsonl")]
    assert all(3 <= row["length"] <= 8 for row in rows)
    assert {row["finished"] for row in rows} == {True, False}
    assert {row["parts"]["overlong"] < 0 for row in rows} == {True, False}
    words = [(row["response"].split(), row["length"]) for row in rows if row["finished"]]
    assert {length - len(found) for found, length in words} >= {1, 2}  # an EOS or "d", and "b "
    assert all({"d", "h"}.isdisjoint(found[2:]) for found, _ in words)  # a reward sees no end
    assert all(row["parts"]["missing_eos"] == 0 for row in rows if row["finished"])
    assert read_jsonl(run / "metrics.jsonl")[1]["rollout/sampler_gap"] < 1e-5


def test_the_result_knows_what_ends_its_answers(whole, files, tmp_path):
    """generation_config.json has the endings of this run, and none of an earlier one."""
    out = whole("endings").parent
    ends = json.loads((out / "ppo_actor_32" / "generation_config.json").read_text())
    assert (ends["stop_strings"], ends["eos_token_id"]) == (["b ", "d"], [0, 9])
    again = {**files["endings"], "model": out / "ppo_actor_32.pth", "max_gen_len": 4, "max_steps": 1}
    train(**again, batch_size=4, critic_init="actor", out_dir=tmp_path)
    ends = json.loads((tmp_path / "ppo_actor_32" / "generation_config.json").read_text())
    assert "stop_strings" not in ends and ends["eos_token_id"] == [0, 9]
