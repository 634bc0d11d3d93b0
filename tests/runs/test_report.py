"""report.html and its rows: what is kept of a run, what the page says, how a browser shows it."""

import json
import re
import shutil
import time
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import flags, read_jsonl, save_policy_dir, save_reward_dir, word_tokenizer, write_jsonl

from errors import InputError
from trainer import train_ppo, train_sft
from trainer.compute.rollout_data import Rollout
from trainer.runs import displays, report
from trainer.runs.distributed import World
from trainer.runs.health import Finding
from trainer.runs.plots import draw_panel, draw_svgs
from trainer.runs.report import Report, changes, read_metrics
from trainer.runs.samples import rows_of_evaluation, rows_of_step

PICTURES = True  # see pictures.py

ALONE = World(0, 1, torch.device("cpu"))
HTML = [  # the policy's words, so a real run writes them
    '<script>document.title="ran"</script>',
    "<img/src=x/onerror=document.title='ran'>",
    "</answer>",
    "&amp;",
    "&",
    "]]>",
    "{{7*7}}",
    "中文",
]
REWARD = """def score(prompts, responses, answers):
    return [len(set(r.split())) - 0.05 * len(r) for r in responses]
"""
SECTIONS = ["verdict", "curves", "distributions", "answers", "samples", "configuration"]


def finding(level, step, name="kl_far"):
    """A finding as health.py gives it."""
    symptom = "the <b>policy</b> is far from its start"
    causes = ("a high --learning_rate", "a small --kl_coef")
    return Finding(
        name=name,
        level=level,
        step=step,
        symptom=symptom,
        numbers="kl/k1 2.0",
        causes=causes,
        remedy="--kl_coef 0.06",
        source="a paper",
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A policy that writes HTML, and flags of a short run with evaluations."""
    folder = tmp_path_factory.mktemp("files")
    tokenizer = word_tokenizer(HTML, chat=True)
    prompts = [{"prompt": " ".join(HTML[(n + i) % 8] for i in range(1 + n % 7))} for n in range(40)]
    (folder / "reward.py").write_text(REWARD)
    held_out = [{**prompt, "answer": "<b>&"} for prompt in prompts[:12]]
    return {
        "model": save_policy_dir(folder / "policy", tokenizer, layers=2, spread=2.0),
        "reward_model": save_reward_dir(folder / "reward", tokenizer) + "=0.5",
        "reward_fn": f"{folder / 'reward.py'}:score",
        "data_path": write_jsonl(folder / "prompts.jsonl", prompts),
        "eval_data_path": write_jsonl(folder / "eval.jsonl", held_out),
        "batch_size": 8,
        "mini_batch_size": 4,
        "max_gen_len": 12,
        "device": "cpu",
        "run_name": "r",
        "dtype": "float32",
        "learning_rate": 0.01,
        "epochs": 9,
        "max_steps": 6,
        "missing_eos_penalty": 1,
        "eval_interval": 3,
    }


@pytest.fixture(scope="module")
def run_folder(files, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    train_ppo.main(flags(**files, out_dir=out))
    return out / "r"


def written(folder, times=1, findings=(), long_text=""):
    """The report of a copy of this run folder, its steps repeated ``times`` times -> the path."""
    for name in ("metrics.jsonl", *displays.PPO.samples):
        rows = read_jsonl(folder / name)
        steps, later = max(row["step"] for row in rows), [row for row in rows if row["step"]]
        rows += [{**row, "step": row["step"] + k * steps} for k in range(1, times) for row in later]
        if long_text and name != "metrics.jsonl":
            rows = [
                {**row, "response": row["response"] + long_text * row["step"]}
                for row in rows
                if "prompt" in row
            ]
        write_jsonl(folder / name, rows)
    config = json.loads((folder / "config.json").read_text())
    args = train_ppo.flag_parser().parse_args(["--batch_size", "8"])
    known = {"held_out": range(12), "best_metric": "eval/score", "script": "train_ppo.py"}
    known |= {"held_out_pairs": None, "progress": SimpleNamespace(step=6 * times)}
    run = SimpleNamespace(args=args, world=ALONE, display=displays.PPO, total_steps=6 * times, **known)
    said = []
    drawn = Report(run, SimpleNamespace(path=folder, config=config), said.append)
    drawn.write(list(findings), "ended")
    assert said == []
    return folder / "report.html"


@pytest.fixture
def copied(run_folder, tmp_path):
    """A copy of the run folder without checkpoints and weights."""
    shutil.copytree(
        run_folder, tmp_path / "copy", ignore=shutil.ignore_patterns("checkpoints", "*.pth", "best")
    )
    return tmp_path / "copy"


class Page(HTMLParser):
    """The elements of a page as [(tag, attributes)], its texts by the tag that they are in, and links."""

    def __init__(self, path):
        super().__init__()
        self.elements, self.texts, self._open = [], [], []
        self.feed(Path(path).read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.texts.append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def text(self):
        return "".join(self.texts)


# ------------------------------------------------------------------------------------------ what is kept


def rollout_of(lengths, logprobs):
    """A filled rollout of responses with these lengths; old_logprobs - ref_logprobs is as given [B, R]."""
    count, width = len(lengths), len(logprobs[0])
    return Rollout(
        tokens=torch.zeros(count, width + 1, dtype=torch.int64),
        prompt_len=torch.ones(count, dtype=torch.int64),
        response_len=torch.tensor(lengths),
        finished=torch.tensor(lengths) < width,
        sampler_logprobs=torch.zeros(count, width),
        old_logprobs=torch.tensor(logprobs),
        ref_logprobs=torch.zeros(count, width),
    )


def step_of(scores, lengths, logprobs, model, older=0):
    """(run, batch, rollout) for ``rows_of_step``; the rollout begins with ``older`` replayed rows."""
    new = rollout_of(lengths, logprobs)
    filled = rollout_of([1] * older + lengths, [[9.0] * len(logprobs[0])] * older + logprobs)
    parts = {"score": torch.tensor(scores), "model": torch.tensor(model)}
    args = SimpleNamespace(offline_data_path="")
    run = SimpleNamespace(args=args, world=ALONE)
    prompts = [SimpleNamespace(prompt=f"p{n}") for n in range(len(scores))]
    texts = [f"r{n}" for n in range(len(scores))]
    return run, SimpleNamespace(prompts=prompts, texts=texts, rollout=new, scores=parts), filled


@pytest.mark.parametrize("older", [0, 3])
def test_of_a_step_the_first_two_and_those_that_stand_out_are_kept(older):
    """By hand. KLs: 0.5, 1 + 2, -1 (its second place is padding), 4."""
    logprobs = [[0.5, 7.0, 7.0], [1.0, 2.0, 7.0], [-1.0, 7.0, 7.0], [1.0, 1.0, 2.0]]
    model = [-0.2, 1.4, 1.5, 0.1]
    kept = rows_of_step(*step_of([1.0, 3.0, -2.0, 0.0], [1, 2, 1, 3], logprobs, model, older))
    rows = {row["kind"]: row for row in kept["samples.jsonl"]}
    assert [row["response"] for row in kept["samples.jsonl"] if row["kind"] == "first"] == ["r0", "r1"]
    assert {kind: row["response"] for kind, row in rows.items() if kind != "first"} == {
        "best": "r1",
        "worst": "r2",
        "longest": "r3",
    }
    assert [rows[kind]["kl"] for kind in ("best", "worst", "longest")] == [3.0, -1.0, 4.0]
    assert rows["longest"] == {
        "prompt": "p3",
        "response": "r3",
        "parts": {"score": 0.0, "model": pytest.approx(0.1)},
        "length": 3,
        "finished": False,
        "kl": 4.0,
        "kind": "longest",
    }
    (deciles,) = kept["deciles.jsonl"]  # of four numbers a decile is 0.3 of the way to the next one
    assert deciles["length"] == [1.0, 1.0, 1.0, 1.0, 1.2, 1.5, 1.8, 2.1, 2.4, 2.7, 3.0]
    assert deciles["score"][:3] == [-2.0, -1.4, -0.8]
    assert [deciles["kl"][n] for n in (0, 5, 10)] == [-1.0, 1.75, 4.0]


def test_what_stands_out_is_taken_from_all_processes():
    run, batch, rollout = step_of([1.0, 2.0, 3.0], [1, 2, 3], [[0.0] * 3] * 3, [1.4, 1.4, -1.4])
    row = {"prompt": "q", "response": "far", "parts": {"score": 9.0, "model": 0.0}, "length": 1, "kl": 5.0}
    run.world = SimpleNamespace(gather=lambda mine: [mine, [row]])
    kept = rows_of_step(run, batch, rollout)
    found = [(row["kind"], row["response"]) for row in kept["samples.jsonl"]]
    assert found == [("first", "r0"), ("first", "r1"), ("best", "far"), ("worst", "r0"), ("longest", "r2")]
    assert kept["deciles.jsonl"][0]["score"][5] == 2.5
    assert kept["deciles.jsonl"][0]["score"][10] == 9.0


def test_the_first_held_out_prompts_are_kept_by_number_over_processes():
    world = SimpleNamespace(gather=lambda rows: [rows, {0: {"place": 0}, 2: rows[2]}])
    rows = rows_of_evaluation({2: {"place": 2}}, world)["eval_samples.jsonl"]
    assert rows == [{"place": 0}, {"place": 2}]


def test_a_run_keeps_the_same_eight_of_twelve_held_out_prompts_at_every_evaluation(run_folder):
    rows = read_jsonl(run_folder / "eval_samples.jsonl")
    assert [(row["step"], row["place"]) for row in rows] == [(s, p) for s in (0, 3, 6) for p in range(8)]
    assert all(rows[p]["prompt"] == rows[p + 8]["prompt"] for p in range(16))
    assert {row["answer"] for row in rows} == {"<b>&"}
    mean = read_metrics(run_folder)[0]["eval/length_greedy"]
    assert any(row["greedy"]["response"] != row["response"] for row in rows)
    assert 1 <= mean <= 12
    assert [row["step"] for row in read_jsonl(run_folder / "deciles.jsonl")] == list(range(1, 7))


# ---------------------------------------------------------------------------------------------- what is shown


def test_changed_words_are_marked():

    def found(before, after):
        return "".join(
            f"[{piece}]" if piece and is_new else piece for piece, is_new in changes(after, before)
        )

    assert found("a b", "a b") == "a b"
    assert found("a b c", "a x c d") == "a[ x] c[ d]"
    assert found("a b", "a") == "a"
    assert found("好的吗", "好了吗") == "好[了]吗"


def test_changes_of_texts_that_repeat_themselves_are_found_quickly():
    start = time.process_time()
    for before, after in (
        ("a b " * 500, "b a " * 400),
        ("word " * 400, "word " * 300 + "end"),
        ("x" * 2000, "y x"),
    ):
        pieces = changes(after, before)
        assert "".join(piece for piece, _ in pieces) == after.rstrip()
    assert time.process_time() - start < 5


def test_of_each_kind_the_most_outstanding_are_shown_once(copied):
    row = {"prompt": "p", "finished": True, "kl": None}
    rows = [
        {**row, "step": n, "kind": kind, "response": f"r{n % 7}", "parts": {"score": -n}, "length": n}
        for n in range(20)
        for kind in ("best", "worst", "longest")
    ]
    without_kinds = {"step": 1, "prompt": "", "response": "", "parts": {"score": 1}}  # an old version's
    write_jsonl(copied / "samples.jsonl", [without_kinds, *rows])
    text = written(copied).read_text()
    section = text[text.index('id="samples"') : text.index('id="configuration"')]
    shown = [re.findall(r"step (\d+): score", part) for part in section.split("<h3>")[1:]]
    assert shown == [["0", "1", "2", "3", "4"], *2 * [["19", "18", "17", "16", "15"]]]


def test_the_page_has_all_sections_plots_and_texts_and_no_script(run_folder):
    page = Page(run_folder / "report.html")
    assert [a["id"] for a in page.all("section")] == SECTIONS
    assert page.all("script") == []
    assert [a for a in page.all("img") if "src=x" in str(a)] == []
    assert len(page.all("figure")) == len(page.all("svg")) >= 12
    for row in read_jsonl(run_folder / "eval_samples.jsonl"):
        assert all(word in page.text for word in row["response"].split())
    assert HTML[0] in page.text
    assert "<b>&" in page.text
    for word in ("The score ", "ended", "--learning_rate", "0.01", "train_ppo.py --model", "The longest"):
        assert word in page.text
    head = [a for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    assert head[0]["content"].startswith("default-src 'none'")
    inside = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}  # names, nothing is loaded
    links = [v for _, a in page.elements for k, v in a.items() if k in ("href", "src", "xlink:href") and v]
    assert all(link.startswith(("#", "data:")) for link in links)
    assert set(re.findall(r'="(https?://[^"]+)"', (run_folder / "report.html").read_text())) <= inside


def test_plots_have_one_sentence_each_and_no_colour_of_their_own(run_folder):
    text = (run_folder / "report.html").read_text()
    assert text.count('class="hint"') == text.count("<figure>")
    drawn = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    used = set(re.findall(r"(?:fill|stroke): *([^;\"]+)", drawn))
    assert {colour for colour in used if not colour.startswith("var(--")} == {"none"}
    shown = {f"--c{n}" for n in (0, 1, 2, 9)}
    assert shown <= set(re.findall(r"var\(([^)]*)\)", drawn))
    assert all(f"{name}: " in text.split("</style>")[0] for name in (*shown, "--ca", "--cb"))
    assert "<text" in drawn


def test_findings_come_first_with_all_they_say_and_are_marked_at_their_steps(copied):
    path = written(copied, findings=[finding("wrong", 2), finding("look", 4), finding("look", 4)])
    page, text = Page(path), path.read_text()
    for words in ("1. Wrong", "3. Look at this", "since step 2", "<b>policy</b> is far", "a small --kl_coef"):
        assert words in page.text
    assert text.index("finding-1") < text.index('id="curves"')
    figure = re.search(r"<svg.*?</svg>", text, re.DOTALL)[0]
    marks = re.findall(r"<text style=\"[^\"]*(--ca|--cb)[^\"]*\"[^>]*>([^<]*)<", figure)
    assert marks == [("--ca", "1"), ("--cb", "2")]  # of those that begin together only the first
    assert [figure.count(f"stroke: var(--{level})") for level in ("ca", "cb")] == [1, 1]
    assert "No finding" not in page.text
    assert "No finding" in Page(written(copied)).text


def test_curves_of_long_runs_are_means_with_a_band_from_least_to_most():
    records = [{"step": n, "reward/score": float(n % 2)} for n in range(1, 2001)]

    def drawn(records, display=displays.PPO):
        return draw_svgs(records, display.panels[:1], [])

    (plot,) = drawn(records)
    assert plot["labels"] == ["training"]
    assert len(plot["svg"]) < 80_000
    assert drawn(records, displays.SFT) == []
    seen = shapes(displays.PPO.panels[0], records)
    assert len(seen.lines[0][0]) == 500
    assert seen.lines[0][0][:2] == [2.5, 6.5]
    assert set(seen.lines[0][1]) == {0.5}
    ((least, most),) = seen.bands
    assert (set(least), set(most)) == ({0.0}, {1.0})
    assert shapes(displays.PPO.panels[0], records[:500]).lines[0][1][:3] == [1.0, 0.0, 1.0]


def shapes(panel, rows):
    """What is drawn of a panel: ``lines`` [(steps, values)], ``bands`` [(lower, upper)], ``markers``."""
    seen = SimpleNamespace(lines=[], bands=[], markers=[])

    def plot(steps, values, label, marker):
        seen.lines.append(([float(x) for x in steps], values.tolist()))
        seen.markers.append(marker)
        return [SimpleNamespace(get_color=lambda: "red")]

    def fill_between(steps, lower, upper, **how):
        seen.bands.append((lower.tolist(), upper.tolist()))

    draw_panel(SimpleNamespace(plot=plot, fill_between=fill_between), panel, rows)
    return seen


def test_deciles_are_drawn_as_the_median_with_a_band_for_each_pair():
    panel = displays.DISTRIBUTIONS[1]
    rows = [{"step": n, "length": [n + k for k in range(11)]} for n in (1, 2)]
    seen = shapes(panel, [*rows, {"step": 3}])
    assert seen.lines == [([1.0, 2.0], [6, 7])]
    assert seen.bands == [([1 + k, 2 + k], [11 - k, 12 - k]) for k in range(5)]
    many = [{"step": n, "length": list(range(n % 2, 11 + n % 2))} for n in range(1000)]
    seen = shapes(panel, many)
    assert len(seen.lines[0][0]) == 500
    assert set(seen.lines[0][1]) == {5.5}  # the mean of two steps


def test_evaluations_have_markers_and_so_has_a_single_step():
    panel = displays.Panel("", {"eval/score": "", "reward/score": ""}, "")
    rows = [{"step": n, "eval/score": 1.0, "reward/score": 1.0} for n in (1, 2)]
    assert shapes(panel, rows).markers == ["o", None]
    assert shapes(panel, rows[:1]).markers == ["o", "o"]


def test_only_distributions_that_a_run_has_are_drawn():
    rows = [{"step": 1, "length": list(range(11))}, {"step": 2}]
    (plot,) = draw_svgs(rows, displays.DISTRIBUTIONS, [])
    assert plot["panel"].title == "length (tokens)"


# ----------------------------------------------------------------------------------- when it is written


def test_it_is_written_as_the_run_goes_and_at_the_end(files, tmp_path, monkeypatch):
    states, write = [], Report.write

    def noted(self, findings, state):
        states.append((self.run.progress.step, state))
        return write(self, findings, state)

    monkeypatch.setattr(Report, "write", noted)
    monkeypatch.setattr(report, "SHARE", 0)
    train_ppo.main(flags(**{**files, "max_steps": 2}, out_dir=tmp_path))
    assert states == [(0, "running"), (1, "running"), (2, "running"), (2, "ended")]


def test_writing_it_takes_at_most_a_hundredth_of_the_time(copied, monkeypatch):
    now = 0.0
    monkeypatch.setattr(report, "time", SimpleNamespace(perf_counter=lambda: now))
    drawn = Report(SimpleNamespace(), SimpleNamespace(path=copied), lambda line: None)
    now = 99.0
    assert not drawn.is_due()
    now = 100.0
    assert drawn.is_due()  # the first one is assumed to take a second

    def write(*given):
        nonlocal now
        now += 3.0

    drawn._write = write
    drawn.write([], "running")
    now = 402.0
    assert not drawn.is_due()
    now = 403.0
    assert drawn.is_due()


def test_a_stopped_run_has_a_report_that_says_so(files, tmp_path, monkeypatch):
    (tmp_path / "stop.py").write_text(
        "import os\ncalls = 0\ndef score(prompts, responses, answers):\n    global calls\n    calls += 1\n"
        "    calls == 5 and os.kill(os.getpid(), 15)\n    return [1.0] * len(responses)\n"
    )
    stop = {**files, "reward_fn": f"{tmp_path / 'stop.py'}:score"}
    with pytest.raises(SystemExit):
        train_ppo.main(flags(**stop, out_dir=tmp_path))
    text = Page(tmp_path / "r" / "report.html").text
    assert "step 3 of 6, stopped" in text
    assert "The run was stopped, after step 3 of 6." in text


def test_a_report_that_cannot_be_written_ends_the_run_in_one_line(copied):
    (copied / "report.html").unlink()
    (copied / "report.html").mkdir()
    with pytest.raises(InputError, match=r"report\.html: cannot be written"):
        written(copied)


def test_a_fault_in_the_page_does_not_end_a_run(files, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "in_words", lambda *more: 1 / 0)
    train_ppo.main(flags(**{**files, "max_steps": 1}, out_dir=tmp_path))
    assert "note: report.html cannot be made (ZeroDivisionError: division by zero)" in capsys.readouterr().out
    assert (tmp_path / "ppo_actor_32.pth").exists()


def test_half_a_character_in_the_data_does_no_harm(copied):
    path = written(copied, long_text="\ud83d")
    assert HTML[3] in Page(path).text


@pytest.fixture(scope="module")
def long_report(run_folder, tmp_path_factory):
    """The report of 1,020 steps, 341 evaluations and responses of up to 10,000 characters -> its path."""
    folder = tmp_path_factory.mktemp("long") / "r"
    shutil.copytree(run_folder, folder, ignore=shutil.ignore_patterns("checkpoints", "*.pth", "best"))
    return written(folder, times=170, long_text="word " * 2)


def test_the_report_of_a_thousand_steps_is_small(long_report):
    print(f"{long_report.stat().st_size / 1e6:.2f} MB")
    assert long_report.stat().st_size < 10e6
    text = Page(long_report).text
    assert "Shown are 13 of 341 evaluations" in text
    assert "the rest is in the run folder" in text


def test_stage_1_has_a_report_of_curves_only(files, tmp_path):
    pairs = [{"instruction": "a b", "output": f"c {'d ' * (n % 3)}"} for n in range(12)]
    data = write_jsonl(tmp_path / "data.jsonl", pairs)
    sizes = {"device": "cpu", "batch_size": 4, "eval_size": 4, "max_steps": 3, "epochs": 9}
    train_sft.main(flags(model=files["model"], data_path=data, out_dir=tmp_path / "out", **sizes))
    page = Page(next((tmp_path / "out").glob("sft_1/report.html")))
    assert [a["id"] for a in page.all("section")] == ["verdict", "curves", "configuration"]
    assert len(page.all("svg")) == 3
    assert "train_sft.py: step 3 of 3, ended" in page.text
    assert "No finding" not in page.text  # nothing is watched


# ----------------------------------------------------------------------------------------- in a browser

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium of this machine. Without one these tests are skipped."""
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install -r requirements-dev.txt")
    if CHROMIUM is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    with playwright.sync_playwright() as tools:
        found = tools.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


def opened(browser, path, width=1280, scheme="light"):
    """A report opened in a window of this width; every request and error of the page is noted on it."""
    page = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme).new_page()
    page.seen = []
    page.on("request", lambda request: page.seen.append(request.url))
    page.goto(path.as_uri())
    return page


def test_a_browser_shows_html_in_texts_as_text_and_runs_none_of_it(browser, copied):
    path = written(copied, findings=[finding("wrong", 2)])
    page = opened(browser, path)
    assert page.title() == "copy, step 6 of 6"
    assert page.evaluate("document.scripts.length") == 0
    assert page.seen == [path.as_uri()]  # nothing else was asked for
    for section in SECTIONS:
        assert page.locator(f"#{section} h2").is_visible()
    words = page.locator("#answers").inner_text()
    for word in {w for row in read_jsonl(copied / "eval_samples.jsonl")[:3] for w in row["response"].split()}:
        assert word in words
    assert HTML[0] in page.locator("#samples").inner_text()
    assert "The <b>policy</b> is far from its start." in page.locator(".finding").inner_text()
    assert page.locator("#curves svg").count() >= 10
    assert page.locator("#curves svg text").first.is_visible()
    assert page.locator("#answers mark").count() > 1


def test_light_and_dark_differ_and_the_plots_follow(browser, copied):
    path, seen = written(copied), []
    for scheme in ("light", "dark"):
        page = opened(browser, path, scheme=scheme)
        colours = "e => [getComputedStyle(document.body).backgroundColor, getComputedStyle(e).fill]"
        seen.append(page.locator("#curves svg text").first.evaluate(colours))
    (light, dark_text), (dark, light_text) = ([brightness(c) for c in pair] for pair in seen)
    assert light > 200 > dark_text
    assert dark < 60 < light_text


def brightness(colour):
    """ "rgb(r, g, b)" -> the mean of the three."""
    return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits_a_phone_and_wide_things_scroll_in_their_own_box(browser, copied, width):
    page = opened(browser, written(copied, findings=[finding("look", 3)]), width)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    widths = page.locator("figure svg").evaluate_all("all => all.map(e => e.getBoundingClientRect().width)")
    assert 250 < min(widths) <= max(widths) < 400
    if width == 390:
        boxes = page.locator(".scroll").evaluate_all(
            "all => all.filter(e => e.scrollWidth > e.clientWidth).length"
        )
        assert boxes > 0


def test_a_long_report_opens_in_two_seconds(browser, long_report):
    page = opened(browser, long_report)
    took = page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
    print(f"opened in {took:.0f} ms")
    assert took < 2000
