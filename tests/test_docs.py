"""The documents name code, files, flags, metrics and figures that are there, and their commands run."""

import inspect
import io
import itertools
import json
import re
import shlex
import string
from types import SimpleNamespace

import pytest
from tiny import ROOT, assistant, flags, read_jsonl, request_of, run_files, turn_files, user, write_jsonl

import chat
import export
from trainer import train_ppo, train_reward, train_sft
from trainer.peer_flags import PEER_FLAGS
from trainer.rewards.reward_function import call_reward_function, load_reward_functions
from trainer.run import PpoRun
from trainer.runs import displays, health

LINK = re.compile(r"\[`(?P<name>\w+)`\]\((?P<path>[\w./]+\.py)\)")
PARTS = r"(environment|format|marks|model\w*|function|repetition|length_reward|missing_eos|judge_\w+)"
YOURS = re.compile(
    r"PATH|out/tools|prompts|train.jsonl|pairs.jsonl|problems|verl|hidden_size|Qwen|…|base|best|_512"
)
PAGES = sorted([*ROOT.glob("README*.md"), *ROOT.glob("docs/*.md")])
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in PAGES}


def page(name):
    return TEXTS[f"docs/{name}.md"]


def anchors(text):
    """What GitHub calls the sections of a Markdown file."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def commands(text):
    """The lines of the code blocks that a user types, without comments."""
    lines = "\n".join(re.findall(r"```\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ").splitlines()
    starts = ("make ", "python ", "torchrun ", ".venv/bin/", "pip ", "git ")
    return [" ".join(line.split(" #")[0].split()) for line in lines if line.startswith(starts)]


@pytest.mark.parametrize("document", TEXTS)
def test_links_lead_to_what_is_there(document):
    folder = (ROOT / document).parent
    for match in LINK.finditer(TEXTS[document]):
        defined = rf"^\s*(def|class) {match['name']}\b"
        code = (folder / match["path"]).read_text(encoding="utf-8")
        assert re.search(defined, code, re.MULTILINE), match[0]
    for target, section in re.findall(r"\]\((?!https?:)([^)#]*)(#[^)]+)?\)", TEXTS[document]):
        path = (folder / target).resolve() if target else ROOT / document
        assert path.exists(), target
        assert not section or section[1:] in anchors(path.read_text(encoding="utf-8")), f"{target}{section}"


def test_every_decision_names_its_code_and_its_test():
    numbers = [str(n) for n in range(1, 16)]
    assert re.findall(r"^## (\d+)\. ", page("ppo"), re.MULTILINE) == numbers
    rows = re.findall(r"^\| (\d+) \| (.+) \| \[test_\w+\.py\]\(\.\./tests/.+ \|$", page("ppo"), re.MULTILINE)
    assert [number for number, code in rows if LINK.search(code)] == numbers


def metric_rows(text):
    groups = "rollout|reward|kl|policy|value|perf|eval|train"
    return re.findall(rf"^\| `((?:{groups})/[\w<>@]+)` \|", text, re.MULTILINE)


def test_the_metrics_page_names_every_metric_of_a_run_and_no_other(tmp_path):
    """``<part>`` stands for a part of the reward, ``<k>`` for a number; ``_greedy`` and ema/ have no rows."""
    names = metric_rows(page("metrics"))
    assert len(names) == len(set(names))
    meant = {name: name.replace("<part>", PARTS).replace("<k>", r"\d+") for name in names}
    files = run_files(tmp_path, count=8)
    answered = [{"prompt": r["prompt"], "answer": "a"} for r in read_jsonl(files["data_path"])]
    pairs = write_jsonl(tmp_path / "pairs.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    more = {"ptx_data_path": write_jsonl(tmp_path / "texts.jsonl", [{"text": "a b"}])}
    more["eval_data_path"] = write_jsonl(tmp_path / "e.jsonl", answered)
    more["eval_reward_fn"] = files["reward_fn"]
    logged = {"model": files["model"], "offline_data_path": pairs, "eval_data_path": pairs, "epochs": 9}
    options = """--normalize_reward 1 --reasoning 1 --length_reward 0.5 --repetition_penalty 0.5 --kl_target 1
        --num_generations 2 --filter_groups 1 --entropy_top 0.5 --ema_beta 0.9 --eval_interval 1"""
    both = """ --max_steps 2 --batch_size 4 --mini_batch_size 4 --max_gen_len 4 --critic_warmup_steps 0
        --dtype float16"""  # which has a loss scale
    found = set()
    turns = turn_files(tmp_path)
    turns = turns | {"eval_data_path": turns["data_path"], "env": f"{turns.pop('code')}:Env"}
    runs = ((files | more, options), (logged, "--eval_interval 1"), (turns, "--eval_interval 1"))
    for given, flagged in runs:
        out = tmp_path / f"out{len(found)}"
        train_ppo.main([*flags(**given, out_dir=out), *(flagged + both).split()])
        found |= {name for line in read_jsonl(out / "run_1/metrics.jsonl") for name in line}
    found = {re.sub("^ema/", "eval/", name).removesuffix("_greedy") for name in found} - {"step"}
    assert len(found) > 40
    assert [x for x in found if not any(re.fullmatch(pattern, x) for pattern in meant.values())] == []
    of_ppo = metric_rows(page("metrics").split("## The stages before PPO")[0])
    assert [name for name in of_ppo if not any(re.fullmatch(meant[name], x) for x in found)] == []
    for display in (displays.PPO, displays.OFFLINE, displays.SFT, displays.PAIRS, displays.RATINGS):
        shown = {*display.line, *display.followed, *display.evaluation, f"eval/{display.best}"}
        shown |= {name for panel in display.panels for name in panel.series}
        for name in shown:
            assert name.removesuffix("_greedy").replace(displays.PARTS, "reward/<part>") in names, name


def test_findings_are_on_their_page_and_name_only_what_there_is():
    """A name that is no metric, flag, fact or conclusion of health.py would be left out without a word."""
    rows = re.findall(r"^\| `(\w+)` \|", page("health"), re.MULTILINE)
    assert sorted(rows) == sorted(rule.name for rule in health.RULES)
    given = {*train_ppo.flag_parser().flags}
    facts = re.findall(r'^            "(\w+)":', inspect.getsource(PpoRun.facts), re.MULTILINE)
    known = given | {*facts, "start", *re.findall(r'"(\w+)"', inspect.getsource(health))}
    known |= {"reward/format", "reward/function", "reward/server", "reward/environment", "reward/unscored"}
    known |= {*metric_rows(page("metrics"))}
    named = set()
    for rule in health.RULES:
        texts = [rule.symptom, *rule.numbers, *rule.causes, rule.remedy]
        fields = {field for text in texts for _, field, *_ in string.Formatter().parse(text) if field}
        conditions = " and ".join([*rule.look, *rule.wrong]).split(" and ")
        names = {re.split(r"[.\[]", field)[0] for field in fields} | {x.split()[0] for x in conditions if x}
        assert names <= known, rule.name
        assert {*re.findall(r"--([a-z]\w+)", " ".join(texts))} <= given, rule.name
        named |= fields
    assert len(named) > 40


def test_the_recipes_have_the_memory_and_rates_of_the_script(benchmark):
    recipes = benchmark("recipes")
    rows = [recipes.row_of(section) for section in recipes.RECIPES]
    assert recipes.table(rows) in page("recipes")
    assert all(int(row["of the card"].split("%")[0] or 0) <= 85 for row in rows if row["of the card"])
    assert recipes.commands_table() in page("algorithms")
    assert len(re.findall(r"^python trainer/train_ppo", page("recipes"), re.MULTILINE)) == len(rows)


def test_the_readmes_agree_and_have_the_figures_of_the_demo():
    runs = json.loads((ROOT / "benchmarks/results/demo.json").read_text(encoding="utf-8"))["runs"]
    run = next(run for run in runs if run["seed"] == 42)  # the default, so what `make train` does
    names = ["accuracy", "format_rate", "score", "length", "finished"]
    wanted = [run[when][x + kind] for x in names for kind in ("", "_greedy") for when in ("before", "after")]
    english, chinese = TEXTS["README.md"], TEXTS["README_zh.md"]
    for text in (english, chinese):
        cells = re.findall(r"(?<=\| )(?:\*\*)?(\d+\.\d{3})(?:\*\*)? (?=\|)", text.split("## ")[1])
        assert [float(cell) for cell in cells] == pytest.approx(wanted, abs=6e-4)
    assert commands(english) == commands(chinese)
    for pattern in (r"\d+\.\d+", r"`(--\w+)", r"\]\(([^)#]+)"):
        mine, theirs = ({*re.findall(pattern, text)} for text in (english, chinese))
        assert mine - {"README_zh.md"} == theirs - {"README.md"}, pattern


def test_flags_of_commands_and_pages_exist():
    scripts = (train_ppo, train_sft, train_reward)
    others = {"help", "max_restarts", "shutdown_timeout", "high_entropy_token_ratio"}  # of other programs
    known = others.union(*(script.flag_parser().flags for script in scripts))
    for name, text in TEXTS.items():
        assert name == "docs/migrating.md" or {*re.findall(r"`--(\w+)", text)} <= known, name
        for line, script in itertools.product(commands(text), scripts):
            _, program, given = line.partition(f"{script.__name__.rpartition('.')[2]}.py ")
            assert not program or {*re.findall(r"--(\w+)", given)} <= {*script.flag_parser().flags}, line


@pytest.mark.slow
def test_commands_run_where_all_their_files_are_there(tmp_path, monkeypatch, capsys):
    """What is trained is a step of the demo. Its answers to the examples must be right."""
    monkeypatch.chdir(ROOT)
    few = write_jsonl(tmp_path / "few.jsonl", read_jsonl(ROOT / "dataset/demo/eval.jsonl")[:4])
    small = "--max_steps 1 --batch_size 8 --mini_batch_size 8 --max_gen_len 8 --missing_eos_penalty 0"
    small = [*shlex.split(small), "--eval_data_path", few]
    mains = {"trainer/train_ppo.py": train_ppo.main, "chat.py": chat.main, "export.py": export.main}
    ran = []
    for line in dict.fromkeys(line for text in TEXTS.values() for line in commands(text)):
        words = shlex.split(line.replace(" exported", " out/plain").replace("out/", f"{tmp_path}/"))
        if words[0].endswith("python") and words[1] in mains and not YOURS.search(line):
            monkeypatch.setattr("sys.stdin", io.StringIO("What is twelve plus five minus nine?\n"))
            there = [] if "--out_dir" in words or "export" in words[1] else ["--out_dir", str(tmp_path)]
            mains[words[1]](words[2:] + there + (small if "train" in words[1] else []))
            ran.append(line)
    assert len(ran) > 10, ran
    asked = sum("chat.py" in line for line in ran)
    assert capsys.readouterr().out.count("17 - 9 = 8") >= asked > 1


def test_the_reward_functions_of_the_page_score_as_it_says(tmp_path):
    found = {}
    start = r"```\n# \w+\.py +--reward_fn \w+\.py:"
    for name, code in re.findall(rf"{start}(\w+)\n(.*?)```", page("rewards"), re.DOTALL):
        (tmp_path / "mine.py").write_text(code)
        [(found[name], _)] = load_reward_functions([f"{tmp_path}/mine.py:{name}"]).values()
    assert found["score"](["q"] * 3, ["it is 5", "6", "5"], ["5", "5", None]) == [1.0, 0.0, 0.0]
    late = found["right_and_short"](["q"] * 2, ["5" + " " * 199, "6" * 800], ["5"] * 2, 3, total_steps=4)
    assert late == [1 - 0.375 / 2, -0.375]
    assert found["right_lines"](["q"], ["2 + 3 = 5\nso\n1 + 1 = 3"], [None]) == [[(9, 1.0), (21, -1.0)]]
    records = [{"reward_model": {"ground_truth": 5}, "target": "6"}, {"ground_truth": "7"}]
    request = request_of(["q", [user("q")]], ["it is 5", "6" * 80], records=records)
    request.run_values = {"trainer_state": None}
    wanted = {"compute_score": [1.0, 0.0], "right_target": [0.0, None], "asked": [1.0, 0.0]}
    for name, scores in wanted.items():
        assert call_reward_function(found[name], request, 0)[0] == scores
    assert request.logged == {"characters": [43.5]}
    talks = [[user("q"), assistant("1"), user("more"), assistant("2")], [user("q"), assistant("1")]]
    games = [SimpleNamespace(solved=True), SimpleNamespace(solved=False)]
    assert found["few_turns"](["q"] * 2, ["2", "1"], [None] * 2, talks, games) == [-0.2, None]


def test_every_folder_is_on_the_page_of_the_code():
    for path in (*ROOT.glob("trainer/**/*.py"), *ROOT.glob("model/*.py"), *ROOT.glob("dataset/*.py")):
        assert f"(../{path.parent.relative_to(ROOT).as_posix()})" in page("code"), path


def test_names_of_other_trainers_are_answered_as_the_page_says():
    table = re.findall(r"^\| `--([\w.]+)`.*?\| `--(\w+)", page("migrating"), re.MULTILINE)
    assert len(table) >= 10
    for theirs, ours in table:
        assert ours in train_ppo.flag_parser().flags
        assert theirs == ours or PEER_FLAGS[theirs][0] == ours, theirs
