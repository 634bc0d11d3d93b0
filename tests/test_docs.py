"""The documents name code, tests, commands and figures that are really there."""

import importlib
import inspect
import json
import re
import string

import pytest
from tiny import ROOT, read_jsonl, run_files, train, write_jsonl

from trainer import train_ppo, train_reward, train_sft
from trainer.about_run import start_facts
from trainer.peer_flags import PEER_FLAGS
from trainer.runs import displays, health
from trainer.runs.health import RULES

LINK = re.compile(r"\[`(?P<name>\w+)`\]\((?P<path>[\w./]+\.py)\)")
DOCUMENTS = sorted([*ROOT.glob("README*.md"), *(ROOT / "docs").glob("*.md")])
READMES = [ROOT / "README.md", ROOT / "README_zh.md"]


def text_of(path):
    return path.read_text(encoding="utf-8")


def defines(path, name):
    return re.search(rf"^\s*(def|class) {name}\b", text_of(path), re.MULTILINE)


def is_documented(path):
    return pytest.param(path, id=path.name)


@pytest.mark.parametrize("document", [is_documented(path) for path in DOCUMENTS])
def test_links_to_code_name_what_the_file_defines(document):
    for match in LINK.finditer(text_of(document)):
        path = (document.parent / match["path"]).resolve()
        assert defines(path, match["name"]), f"{document.name}: {match[0]}"


@pytest.mark.parametrize("document", [is_documented(path) for path in DOCUMENTS])
def test_links_to_files_and_sections_exist(document):
    for target, section in re.findall(r"\]\((?!https?:)([^)#]*)(#[^)]+)?\)", text_of(document)):
        path = document.parent / target if target else document
        assert path.exists(), f"{document.name}: {target}"
        assert not re.match("#L[0-9]", section), f"{document.name}: {target}{section}: line numbers go stale"
        if section:
            assert section[1:] in anchors(path), f"{document.name}: {target}{section}"


def anchors(path):
    """What GitHub calls the sections of a Markdown file."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text_of(path), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_every_decision_names_code_and_a_test():
    sections = text_of(ROOT / "docs" / "ppo.md").split("\n## ")[1:]
    numbered = [s for s in sections if re.match(r"\d+\. ", s)]
    assert [int(s.split(".")[0]) for s in numbered] == list(range(1, 15))
    for section in numbered:
        paths = [m["path"] for m in LINK.finditer(section)]
        assert any("/tests/" in p for p in paths), section[:40]
        assert any("/tests/" not in p for p in paths), section[:40]


def test_the_metrics_page_names_every_metric_of_a_run_and_no_other(tmp_path):
    """One row a name; ``<part>`` stands for a part of the reward, ``<k>`` for a number."""
    page = text_of(ROOT / "docs" / "metrics.md")
    rows = re.findall(
        r"^\| `((?:rollout|reward|kl|policy|value|perf|eval|ema|train)/[\w<>@]+)` \|", page, re.MULTILINE
    )
    assert len(rows) == len(set(rows))
    patterns = {
        name: re.compile(name.replace("<part>", r"[\w@]+").replace("<k>", r"\d+") + r"\Z") for name in rows
    }
    files = run_files(tmp_path, count=8)
    answered = [{"prompt": r["prompt"], "answer": "a"} for r in read_jsonl(files["data_path"])]
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(json.dumps(r) + "\n" for r in answered), encoding="utf-8")
    sizes = {
        "batch_size": 4,
        "mini_batch_size": 4,
        "max_gen_len": 4,
        "max_steps": 2,
        "critic_warmup_steps": 0,
        "dtype": "float16",  # which alone has a loss scale
    }
    more = {
        "eval_data_path": held_out,
        "eval_reward_fn": files["reward_fn"],
        "normalize_reward": 1,
        "length_reward": 0.5,
        "repetition_penalty": 0.5,
        "num_generations": 2,
        "filter_groups": 1,
        "kl_target": 1,
        "entropy_top": 0.5,
        "ema_beta": 0.9,
    }
    texts = write_jsonl(tmp_path / "texts.jsonl", [{"text": "a b"}])
    train(**files, reasoning=1, **sizes, **more, ptx_data_path=texts, out_dir=tmp_path / "out", run_name="r")
    pairs = write_jsonl(tmp_path / "pairs.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    offline = {"offline_data_path": pairs, "eval_data_path": pairs, "epochs": 9}
    train(model=files["model"], **sizes, **offline, out_dir=tmp_path / "out", run_name="offline")
    lines = [line for run in ("r", "offline") for line in read_jsonl(tmp_path / f"out/{run}/metrics.jsonl")]
    logged = {name for line in lines for name in line} - {"step"}
    assert len(logged) > 40
    for name in logged:
        assert any(pattern.match(name) for pattern in patterns.values()), f"{name} is not on the page"
    for name in rows:
        if not name.startswith("train/"):
            script = re.search(rf"^\| `{name}` \| (.*)$", page, re.MULTILINE)[1]
            only_elsewhere = "PPO" not in script and ("SFT" in script or "reward model" in script)
            assert only_elsewhere or any(patterns[name].match(n) for n in logged), f"{name} is never logged"


def test_each_metric_that_is_shown_is_explained_on_the_metrics_page():
    page = text_of(ROOT / "docs" / "metrics.md")
    for display in (displays.PPO, displays.OFFLINE, displays.SFT, displays.PAIRS, displays.RATINGS):
        shown = {name for panel in display.panels for name in panel.series} | {*display.line}
        shown |= {*display.followed, f"eval/{display.best}"} | {*display.evaluation}
        for name in shown:
            row = name.removesuffix("_greedy").replace(displays.PARTS, "reward/<part>")
            assert f"| `{row}` |" in page, name


def test_each_check_of_a_run_is_on_the_page_of_health():
    page = text_of(ROOT / "docs" / "health.md")
    assert sorted(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == sorted(rule.name for rule in RULES)


def test_findings_name_only_metrics_of_the_page_flags_facts_and_conclusions():
    """A name that is none of these would be left out without a word."""
    facts = re.findall(r'^        "(\w+)":', inspect.getsource(start_facts), re.MULTILINE)
    flags = train_ppo.flag_parser().flags
    known = {*flags, *facts, "held_out", *health.Past({}).seen, "start"}
    described = text_of(ROOT / "docs" / "metrics.md")

    def named(metric):
        part = metric.replace("reward/format", "reward/<part>")
        return f"`{part}`" in described

    names = 0
    for rule in RULES:
        texts = [rule.symptom, *rule.numbers, *rule.causes, rule.remedy]
        for text in texts:
            for _, field, *_ in string.Formatter().parse(text):
                name = re.split(r"[.\[]", field or "")[0]
                names += bool(name)
                if "/" in name:
                    assert named(name), (rule.name, name)
                else:
                    assert not name or name in known, (rule.name, name)
        for condition in " and ".join([*rule.look, *rule.wrong]).split(" and "):
            name = condition.split()[0]
            assert named(name) if "/" in name else name in known, (rule.name, condition)
        for flag in re.findall(r"--([a-z]\w+)", " ".join(texts)):
            assert flag in flags, (rule.name, flag)
    assert names > 60


def test_the_recipes_have_the_memory_and_rates_of_the_script(monkeypatch):
    """benchmarks/recipes.py reads the commands of the page; the table of the page must be its table."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    recipes = importlib.import_module("recipes")
    page = text_of(ROOT / "docs" / "recipes.md")
    rows = [recipes.row_of(section) for section in recipes.RECIPES]
    assert recipes.table(rows) in page
    for row in rows:
        assert f"\n## {row['recipe']}\n" in page
        if row["of the card"]:
            assert int(row["of the card"].split("%")[0]) <= 85, row
    assert recipes.commands_table() in text_of(recipes.ALGORITHMS)
    commands_of_recipes = page.split("\n## From nothing to a reward\n")[1]
    assert len(re.findall(r"^python trainer/train_ppo", commands_of_recipes, re.MULTILINE)) == len(rows)


# ----------------------------------------------------------------------------------------------------- README


def commands(path):
    """The lines of the code blocks that a user types, without comments."""
    lines = (
        "\n".join(re.findall(r"```\n(.*?)```", text_of(path), re.DOTALL)).replace("\\\n", " ").splitlines()
    )
    starts = ("make ", "python ", "torchrun ", ".venv/bin/", "pip ", "git ")
    return [" ".join(line.split("#")[0].split()) for line in lines if line.startswith(starts)]


@pytest.mark.parametrize("readme", [is_documented(path) for path in READMES])
def test_the_demo_figures_are_those_of_the_results_file(readme):
    runs = json.loads(text_of(ROOT / "benchmarks/results/demo.json"))["runs"]
    run = next(run for run in runs if run["seed"] == 42)  # the default, so what `make train` does
    rows = re.findall(
        r"^\| .+ \| ([\d.]+) \| \*\*([\d.]+)\*\* \| ([\d.]+) \| \*\*([\d.]+)\*\* \|$", text_of(readme), re.M
    )
    names = ["accuracy", "format_rate", "score", "length", "finished"]
    assert len(rows) == len(names)
    for name, cells in zip(names, rows, strict=True):
        wanted = [run[when][f"{name}{kind}"] for kind in ("", "_greedy") for when in ("before", "after")]
        assert [float(cell) for cell in cells] == pytest.approx(wanted, abs=6e-4), name


def test_both_readmes_have_the_same_commands_figures_and_files():
    english, chinese = READMES
    assert commands(english) == commands(chinese)
    assert len(commands(english)) >= 10
    for pattern in (r"\d+\.\d+", r"`(--\w+)", r"\]\(([^)#]+)"):
        mine, theirs = (set(re.findall(pattern, text_of(path))) for path in READMES)
        assert mine - {"README_zh.md"} == theirs - {"README.md"}, pattern


@pytest.mark.parametrize("document", [is_documented(path) for path in DOCUMENTS if path.name != "log.md"])
def test_commands_have_flags_that_exist(document):
    parsers = {"train_ppo.py": train_ppo, "train_sft.py": train_sft, "train_reward.py": train_reward}
    for command in commands(document):
        for name, script in parsers.items():
            if name in command:
                given = set(re.findall(r"--(\w+)", command.split(name)[1]))
                assert given <= set(script.flag_parser().flags), command


def test_the_table_of_files_is_complete():
    page = text_of(ROOT / "docs" / "code.md")
    for path in (*ROOT.glob("trainer/**/*.py"), *ROOT.glob("model/*.py"), *ROOT.glob("dataset/*.py")):
        if path.name != "__init__.py":
            assert f"(../{path.relative_to(ROOT).as_posix()})" in page, path


def test_names_of_other_trainers_are_answered_as_the_page_says():
    table = re.findall(
        r"^\| `--([\w.]+)`.*?\| `--(\w+)", text_of(ROOT / "docs" / "migrating.md"), re.MULTILINE
    )
    assert len(table) >= 10
    flags = train_ppo.flag_parser().flags
    for theirs, ours in table:
        assert ours in flags
        assert theirs == ours or PEER_FLAGS.get(theirs) == ours, theirs
