"""report.html and its rows: what is kept of a run, what the page says, how a browser shows it."""

import json
import re
import shutil
import sys
from html.parser import HTMLParser
from types import SimpleNamespace

import forks
import pytest
import tiny
import torch
from test_summary import logger_of
from tiny import flags, health_of, read_jsonl, write_jsonl

from trainer import train_ppo
from trainer.runs import displays, report, run_logger
from trainer.runs.distributed import World
from trainer.runs.health import Finding
from trainer.runs.plots import draw_png, draw_svgs
from trainer.runs.report import write_report
from trainer.step_metrics import rows_of_step

PICTURES = True  # see forks.py

ALONE = World(0, 1, torch.device("cpu"))
# The policy's words, so a real run writes them.
HTML = ['<script>document.title="ran"</script>', "<img/src=x/onerror=document.title='ran'>", "</answer>"]
HTML += ["&amp;", "&", "]]>", "{{7*7}}", "中文"]
SECTIONS = ["verdict", "answers", "samples", "curves", "configuration"]


def finding(level, step):
    causes = ["a high --learning_rate", "a small --kl_coef"]
    symptom = "the <b>policy</b> is far from its start"
    rule = Finding("kl_far", symptom, ["kl/k1 2.0"], causes, "--kl_coef 0.06", "a paper")
    return rule._replace(level=level, step=step)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A policy that writes HTML, and flags of a short run with evaluations."""
    folder = tmp_path_factory.mktemp("files")
    found = tiny.run_files(folder, words=HTML)
    found["reward_model"] += "=0.5"
    held_out = [{**prompt, "answer": "<b>&"} for prompt in read_jsonl(found["data_path"])[:12]]
    found["eval_data_path"] = write_jsonl(folder / "eval.jsonl", held_out)
    found |= {"batch_size": 8, "mini_batch_size": 4, "max_gen_len": 12, "epochs": 9, "max_steps": 6}
    found |= {"device": "cpu", "run_name": "r", "dtype": "float32", "learning_rate": 0.01, "eval_interval": 3}
    return found


@pytest.fixture(scope="module")
def run_folder(files, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    train_ppo.main(flags(**files, out_dir=out))
    return out / "r"


@pytest.fixture
def copied(run_folder, tmp_path):
    left_out = shutil.ignore_patterns("checkpoints", "*.pth", "best")
    return shutil.copytree(run_folder, tmp_path / "copy", ignore=left_out)


@pytest.fixture
def undrawn(copied, monkeypatch):
    """The same, for reports without plots."""
    monkeypatch.setitem(sys.modules, forks.PLOTS, forks.NO_PLOTS)
    return copied


def written(folder, times=1, findings=(), long_text=""):
    """The report of a copy of this run folder, its steps repeated ``times`` times -> the path."""
    for name in ("metrics.jsonl", *displays.PPO.samples):
        rows = read_jsonl(folder / name)
        steps, later = max(row["step"] for row in rows), [row for row in rows if row["step"]]
        rows += [{**row, "step": row["step"] + k * steps} for k in range(1, times) for row in later]
        if long_text and name != "metrics.jsonl":
            rows = [{**row, "response": row["response"] + long_text * row["step"]} for row in rows]
        write_jsonl(folder / name, rows)
    config = json.loads((folder / "config.json").read_text())
    history = health_of(read_jsonl(folder / "metrics.jsonl"), config).history
    args = train_ppo.flag_parser().parse_args(["--batch_size", "8"])
    run = SimpleNamespace(args=args, display=displays.PPO, total_steps=6 * times, script="train_ppo.py")
    run.best_note, run.result_path, run.progress = lambda: "", None, SimpleNamespace(step=6 * times)
    run.saved_step, run.folder = 6, folder
    write_report(run, SimpleNamespace(history=history, sorted=list(findings)), "ended")
    return folder / "report.html"


class Page(HTMLParser):
    """The elements of a page as [(tag, attributes)], and all its text."""

    def __init__(self, path):
        super().__init__()
        self.elements, self.text = [], ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def test_of_a_step_the_first_response_and_those_that_stand_out_are_kept_of_all_processes():
    def kept():
        return [(row["kind"], row["response"]) for row in rows_of_step(batch, world)["samples.jsonl"]]

    lengths = torch.tensor([1, 2, 1, 3])
    batch = SimpleNamespace(
        prompts=[SimpleNamespace(prompt=f"p{n}") for n in range(4)],
        texts=[f"r{n}" for n in range(4)],
        lengths=lengths,
        dialogues=[],
        finished=lengths < 3,
        parts={"score": torch.tensor([1.0, 3.0, -2.0, 0.0]), "model": torch.tensor([0.1] * 4)},
    )
    world = ALONE
    assert kept() == [("first", "r0"), ("best", "r1"), ("worst", "r2"), ("longest", "r3")]
    longest = {"prompt": "p3", "response": "r3", "length": 3, "finished": False, "kind": "longest"}
    longest["parts"] = {"score": 0.0, "model": pytest.approx(0.1)}
    assert rows_of_step(batch, world)["samples.jsonl"][3] == longest
    far = {"prompt": "q", "response": "far", "parts": {"score": 9.0, "model": 0.0}, "length": 1}
    world = SimpleNamespace(gather=lambda mine: [mine, [far]])
    assert kept() == [("first", "r0"), ("best", "far"), ("worst", "r2"), ("longest", "r3")]


def test_a_run_keeps_the_same_eight_of_twelve_held_out_prompts_at_every_evaluation(run_folder):
    rows = read_jsonl(run_folder / "eval_samples.jsonl")
    assert [(row["step"], row["place"]) for row in rows] == [(s, p) for s in (0, 3, 6) for p in range(8)]
    assert all(rows[p]["prompt"] == rows[p + 8]["prompt"] for p in range(16))
    assert {row["answer"] for row in rows} == {"<b>&"}
    assert any(row["greedy"]["response"] != row["response"] for row in rows)
    assert 1 <= read_jsonl(run_folder / "metrics.jsonl")[0]["eval/length_greedy"] <= 12


def test_the_page_has_all_sections_plots_and_texts_and_no_script(run_folder):
    """A plot has one sentence, and no colour of its own."""
    assert (run_folder / "curves.png").stat().st_size > 10_000
    page, text = Page(run_folder / "report.html"), (run_folder / "report.html").read_text()
    assert [a["id"] for a in page.all("section")] == SECTIONS
    assert page.all("script") == []
    assert [a for a in page.all("img") if "src=x" in str(a)] == []
    assert len(page.all("figure")) == len(page.all("svg")) >= 12
    words = " ".join(row["response"] for row in read_jsonl(run_folder / "eval_samples.jsonl")).split()
    words += [HTML[0], "<b>&", "The score ", "ended", "--learning_rate", "0.01", "train_ppo.py --model"]
    for word in (*words, "The longest", "clip fraction", "explained variance", "k1, true on average"):
        assert word in page.text
    (head,) = (a for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert head["content"].startswith("default-src 'none'")
    links = [v for _, a in page.elements for k, v in a.items() if k in ("href", "src", "xlink:href") and v]
    assert all(link.startswith(("#", "data:")) for link in links)
    assert text.count('class="hint"') == text.count("<figure>")
    drawn = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    used = set(re.findall(r"(?:fill|stroke): *([^;\"]+)", drawn))
    assert {colour for colour in used if not colour.startswith("var(--")} == {"none"}
    assert {"--c0", "--c1", "--c2", "--c9"} <= set(re.findall(r"var\(([^)]*)\)", drawn))
    assert "<text" in drawn


def section(folder, name):
    """A section of this run folder's page."""
    return written(folder).read_text().split(f'id="{name}"')[1].split("</section>")[0]


def test_the_most_outstanding_are_shown_once_and_an_answer_that_did_not_change_with_its_steps(undrawn):
    said = {"prompt": "p", "parts": {"score": 1.0}, "length": 1, "finished": True}
    rows = []
    for n in range(20):
        row = {**said, "step": n, "response": f"r{n % 7}", "length": n, "parts": {"score": -n}}
        rows += [{**row, "kind": kind} for kind in ("best", "worst", "longest")]
    write_jsonl(undrawn / "samples.jsonl", rows)
    row = {**said, "place": 0, "answer": None, "greedy": {**said, "response": "g"}}
    rows = [{**row, "step": n, "response": text} for n, text in enumerate("aabba")]
    write_jsonl(undrawn / "eval_samples.jsonl", rows)
    kinds = section(undrawn, "samples").split("<h3>")[1:]
    shown = [re.findall(r"step (\d+): score", part) for part in kinds]
    assert shown == [["0", "1", "2", "3", "4"], *2 * [["19", "18", "17", "16", "15"]]]
    heads = re.findall(r'class="head">(.*?):', section(undrawn, "answers"))
    assert heads == [*(f"steps {steps}, unchanged" for steps in ("0 to 4", "0 to 1", "2 to 3")), "step 4"]


def test_a_conversation_is_shown_turn_by_turn_with_calls_and_results(undrawn):
    """Answers are alike where all turns are, not only the last one. What is said is escaped."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "<中>"}}}
    talk = [
        tiny.assistant("I <b>add</b>", tool_calls=[call]),
        {"role": "tool", "name": "add", "content": "<i>3"},
    ]
    talk.append(tiny.assistant("It is 3."))
    said = {"prompt": "p", "response": "It is 3.", "parts": {"score": 1.0}, "length": 4, "finished": True}
    rows = [said | {"step": n, "kind": "first", "messages": talk[n:]} for n in range(2)]
    write_jsonl(undrawn / "samples.jsonl", [*rows, rows[0] | {"step": 3}])
    answers = [talk, talk, talk[2:]]
    rows = [
        said | {"step": n, "place": 0, "answer": None, "messages": x, "greedy": said | {"messages": x}}
        for n, x in enumerate(answers)
    ]
    write_jsonl(undrawn / "eval_samples.jsonl", rows)
    page = written(undrawn).read_text()
    cards = page.split('id="samples"')[1].split("</section>")[0].split('class="card"')[1:]
    assert [re.findall(r"step (\d):", card) for card in cards] == [["3"], ["1"]]
    assert re.findall(r'class="who">(\w+)', cards[0]) == ["assistant", "tool", "assistant"]
    texts = [
        "I &lt;b&gt;add",
        "add({&#34;a&#34;: 1, &#34;b&#34;: &#34;&lt;中&gt;&#34;})",
        "&lt;i&gt;3",
        "It is 3.",
    ]
    places = [cards[0].index(text) for text in texts]
    assert places == sorted(places)
    assert cards[0].count("It is 3.") == 1  # and not once more as the response
    heads = re.findall(r'class="head">(.*?):', section(undrawn, "answers"))
    assert heads == 2 * ["steps 0 to 1, unchanged", "step 2"]


def test_a_printed_conversation_has_a_line_for_each_turn():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": "中"}}}
    row = {"prompt": [tiny.user("Hm?")], "response": "b", "parts": {"score": 1.0}}
    row["messages"] = [
        tiny.assistant("so\n so", tool_calls=[call, call]),
        {"role": "tool", "content": "x " * 999},
    ]
    row["messages"] += [tiny.assistant("", tool_calls=[call]), tiny.assistant("b")]
    first, asked, *turns = run_logger.sample_text(3, row).splitlines()
    assert (first, asked) == ("  sample at step 3: score +1.00", "    Hm?")
    called = 'add({"a": "中"})'
    assert turns[0] == f"    assistant: so so {called} {called}"
    assert turns[1].startswith("    tool: x x x") and turns[1].endswith("x …") and len(turns[1]) < 420
    assert turns[2:] == [f"    assistant: {called}", "    assistant: b"]


def test_findings_come_first_with_all_they_say(undrawn):
    path = written(undrawn, findings=[finding("wrong", 2), finding("look", 4), finding("look", 4)])
    page, text = Page(path), path.read_text()
    for words in ("1. Wrong", "3. Look at this", "since step 2", "<b>policy</b> is far", "a small --kl_coef"):
        assert words in page.text
    assert text.index("finding-1") < text.index('id="answers"') < text.index('id="curves"')
    assert "No finding" not in page.text
    assert "No finding" in Page(written(undrawn)).text


def test_panels_that_a_run_has_numbers_for_are_drawn_with_marks_at_the_steps_of_findings(tmp_path):
    kl = {"kl/k3": 0.1, "kl/k1": 0.2}
    history = health_of({"step": n, "reward/score": float(n % 2), **kl} for n in range(1, 9)).history
    panels = displays.PPO.panels
    drawn = draw_svgs(history, panels, [finding("wrong", 2), finding("look", 4), finding("look", 4)])
    assert list(drawn) == ["score", "KL to the reference (nats a token)"]
    assert [drawn["score"].count(f"stroke: var(--{level})") for level in ("ca", "cb")] == [1, 2]
    assert list(panels[3].curves(history.values)) == ["kl/k1", "kl/k3"]
    assert draw_svgs(history, displays.SFT.panels, []) == {}
    folders = health_of([{"step": 1, "reward/model_$a_$": 1.0}]).history  # no formula
    draw_png(folders, panels, tmp_path / "curves.png")


def test_it_is_written_as_the_run_goes_and_when_it_is_stopped(files, tmp_path, monkeypatch, capsys):
    states = []

    def noted(run, health, state):
        states.append((run.progress.step, state, run.saved_step))
        return write_report(run, health, state)

    monkeypatch.setitem(sys.modules, forks.PLOTS, forks.NO_PLOTS)
    monkeypatch.setattr(run_logger, "write_report", noted)
    monkeypatch.setattr(run_logger, "REPORT_PAUSE", 0)
    monkeypatch.setenv("FAULT", "os.kill(os.getpid(), 15)")
    monkeypatch.setenv("FAULT_AT", "4")  # two calls are the first evaluation
    with pytest.raises(SystemExit):
        train_ppo.main(flags(**{**files, "max_steps": 9, "eval_interval": 9}, out_dir=tmp_path))
    assert states == [(0, "running", 0), (1, "running", 0), (2, "running", 0), (2, "stopped", 2)]
    text = Page(tmp_path / "r" / "report.html").text
    assert "step 2 of 9, stopped" in text
    assert "The run was stopped, after step 2 of 9." in text
    summary = (tmp_path / "r" / "summary.md").read_text()
    assert "- The run was stopped, after step 2 of 9." in summary
    assert "Files: ppo_actor_32.pth has the weights after step 2" in summary
    places = f"report   {tmp_path / 'r' / 'report.html'}, summary.md and curves.png\n"
    assert f"{summary}\n{places}" in capsys.readouterr().out


def test_writing_it_takes_at_most_a_hundredth_of_the_time(tmp_path, monkeypatch):
    now, written = 0.0, []

    def write(*given, **more):
        nonlocal now
        written.append(now)
        now += 3.0
        return ""

    monkeypatch.setattr(run_logger, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(run_logger, "write_report", write)
    logger = logger_of(tmp_path, total_steps=9)
    for step, now in enumerate((99.0, 100.0, 402.0, 403.0), 1):  # noqa: B007 (the clock reads it)
        logger.log(step, {}, {})
    logger.finish()
    assert written == [100.0, 403.0]  # the first one is assumed to take a second


def test_a_report_that_cannot_be_written_ends_the_run_in_one_line(undrawn):
    (undrawn / "report.html").unlink()
    (undrawn / "report.html").mkdir()
    tiny.refused("copy: cannot be written", written, undrawn)


def test_a_fault_in_the_page_does_not_end_a_run(files, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report, "in_words", lambda *more: 1 / 0)
    train_ppo.main(flags(**{**files, "max_steps": 1}, out_dir=tmp_path))
    assert "note: report.html cannot be made (ZeroDivisionError: division by zero)" in capsys.readouterr().out
    assert (tmp_path / "ppo_actor_32.pth").exists()


def test_the_report_of_many_steps_is_small(copied):
    """180 steps, 61 evaluations, and responses of up to 4,000 characters, with halves of characters."""
    path = written(copied, times=30, long_text="word word, word word\ud83d")
    assert path.stat().st_size < 2e6
    text = Page(path).text
    assert "Shown are 11 of 61 evaluations" in text
    assert "the rest is in the run folder" in text
    assert HTML[3] in text


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium of this machine. Without one these tests are skipped."""
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install -r requirements-dev.txt")
    if CHROMIUM is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    with playwright.sync_playwright() as tools:
        yield tools.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1280, "dark")])
def test_the_page_fits_a_phone_and_is_light_or_dark_with_its_plots(browser, run_folder, width, scheme):
    """Wide things scroll in their own box."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.goto((run_folder / "report.html").as_uri())
    colours = "e => [getComputedStyle(document.body).backgroundColor, getComputedStyle(e).fill]"
    seen = page.locator("#curves svg text").first.evaluate(colours)  # each "rgb(r, g, b)"
    page_is, text_is = (sum(map(int, re.findall(r"\d+", colour)[:3])) / 3 for colour in seen)
    assert page_is > 200 > text_is if scheme == "light" else page_is < 60 < text_is
    assert page.evaluate("document.documentElement.scrollWidth") == width
    widths = page.locator("figure svg").evaluate_all("all => all.map(e => e.getBoundingClientRect().width)")
    assert 250 < min(widths) <= max(widths) < 400
    wider = "all => all.filter(e => e.scrollWidth > e.clientWidth).length"
    assert width > 390 or page.locator(".scroll").evaluate_all(wider) > 0
