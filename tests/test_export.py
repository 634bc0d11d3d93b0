"""export.py: exported directories hold the trained weights and load in plain transformers; bad input."""

import json
import re

import pytest
import torch
from test_families import FAMILIES, build
from tiny import PYTHON, ROOT, WORDS, refused, start_script, word_tokenizer
from transformers import AutoModelForCausalLM

import chat
import export
from model.loading import load_policy, load_tokenizer, quiet
from model.saving import save_policy

DEMO = ROOT / "model" / "demo" / "policy"
GOLDEN = ROOT / "tests" / "fixtures" / "minimind"


def run(*arguments):
    export.main([str(argument) for argument in arguments])


def same_weights(one, other):
    one, other = one.state_dict(), other.state_dict()
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def demo(tmp_path):
    path = tmp_path / "out" / "ppo_actor_128.pth"
    save_policy(load_policy(DEMO), load_tokenizer(DEMO), path)
    return path


TYPES = {"Llama": "float32", "Llama, tied": "float16", "Qwen2": "bfloat16", "Qwen3": "float16"}
TYPES |= {"Qwen3-MoE": "bfloat16", "GPT-2": "float32", "Gemma 3": "bfloat16", "OPT": "float16"}


@pytest.mark.parametrize("family", TYPES)
def test_there_and_back_in_each_type(family, tmp_path):
    model, tokenizer = build(FAMILIES[family]()), word_tokenizer(WORDS, chat=True)
    name = TYPES[family]
    dtype = getattr(torch, name)
    first, pth, folder = (tmp_path / x for x in ("first", "a.pth", "back"))
    with quiet():
        model.save_pretrained(first)
    tokenizer.save_pretrained(first)
    run(first, pth, "--dtype", name)
    run(pth, folder, "--dtype", name)
    for path in (pth, folder):
        again = load_policy(path)
        assert type(again) is type(model)
        same_weights(again, build(FAMILIES[family]()).to(dtype).float())
        again = load_tokenizer(path.with_suffix(""))
        assert (again.get_vocab(), again.chat_template) == (tokenizer.get_vocab(), tokenizer.chat_template)
    assert json.loads((folder / "config.json").read_text())["dtype"] == name
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == dtype


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The demo's policy, exported to the folder ``exported``."""
    folder = tmp_path_factory.mktemp("demo")
    save_policy(load_policy(DEMO), load_tokenizer(DEMO), folder / "ppo_actor_128.pth")
    run(folder / "ppo_actor_128.pth", folder / "exported")
    return folder / "exported"


def code_of(folder, question):
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.S)
    return code.replace("Your question", question)


def test_the_code_of_the_model_card_gives_the_answers_of_chat(exported, monkeypatch, capsys):
    prompt = "What is twelve plus five minus nine?"
    chat.main(["--model", str(DEMO), "--prompt", prompt, "--max_gen_len", "128", "--device", "cpu"])
    answer = capsys.readouterr().out
    assert "<answer>" in answer
    code = code_of(exported, prompt)
    assert set(re.findall(r"^(?:from|import) (\S+)", code, re.M)) <= {"torch", "transformers"}
    monkeypatch.chdir(exported.parent)
    exec(code, {})
    assert capsys.readouterr().out == answer


def test_it_ends_at_stop_strings_and_at_the_tokenizers_eos_too(tmp_path, monkeypatch, capsys):
    """The demo's policy as a run with --stop 'answer' leaves it; settings that contradict each other are
    written all the same."""
    model = load_policy(DEMO)
    model.generation_config.stop_strings = ["answer"]
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = [4, 3], None
    model.generation_config.temperature, model.generation_config.repetition_penalty = 0.5, 9.0
    save_policy(model, load_tokenizer(DEMO), tmp_path / "stops.pth")
    run(tmp_path / "stops.pth", tmp_path / "exported")
    settings = json.loads((tmp_path / "exported" / "generation_config.json").read_text())
    pad = load_tokenizer(DEMO).pad_token_id
    assert (settings["eos_token_id"], settings["pad_token_id"]) == ([2, 3, 4], pad)
    assert settings["temperature"] == 0.5
    assert "repetition_penalty" not in settings  # training and chat.py have none
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    exec(code_of(tmp_path / "exported", "What is 2 plus 3?"), {})
    said = capsys.readouterr().out
    assert said.count("answer") == 1 and "</answer>" not in said


def test_the_card_has_the_facts(exported):
    card = (exported / "README.md").read_text()
    for line in ("architecture | `LlamaForCausalLM`", "parameters | 804,608", "weights | float16"):
        assert f"| {line} |\n" in card
    names = "README.md chat_template.jinja config.json generation_config.json model.safetensors"
    names += " tokenizer.json tokenizer_config.json"
    assert sorted(path.name for path in exported.iterdir()) == names.split()


def test_the_card_reads_the_tokenizer_right(tmp_path):
    """Beside a Qwen2, transformers would read any tokenizer as Qwen2's."""
    save_policy(build(FAMILIES["Qwen2"]()), word_tokenizer(WORDS), tmp_path / "a.pth")
    run(tmp_path / "a.pth", tmp_path / "exported")
    assert "PreTrainedTokenizerFast.from_pretrained" in (tmp_path / "exported" / "README.md").read_text()
    assert load_tokenizer(tmp_path / "exported").get_vocab() == word_tokenizer(WORDS).get_vocab()


BAD = {  # what is said: the arguments
    "full: is there": ("PTH", "full"),
    "full.pth: is there": (DEMO, "full.pth"),
    "one has to end in .pth": ("PTH", "new.pth"),
    "the other is a directory": (DEMO, "new"),
    "no such file": ("missing.pth", "new"),
    "no such directory": ("missing", "new.pth"),
    "cannot be written": ("PTH", "text.pth/new"),
    "not this model's tokenizer": (GOLDEN / "minimind2_dense.pth", "new", "--tokenizer", DEMO),
    "required: target": ("PTH",),
    "with experts is no class of transformers": (GOLDEN / "minimind3_moe.pth", "new", "--tokenizer", "words"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_input(kind, tmp_path, demo, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    for name in ("full/file", "full.pth", "text.pth"):
        (tmp_path / name).write_text("mine")
    word_tokenizer([f"w{i}" for i in range(158)]).save_pretrained("words")
    arguments = [demo if argument == "PTH" else argument for argument in BAD[kind]]
    before = sorted(tmp_path.rglob("*"))
    refused(re.escape(kind), run, *arguments)
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "full" / "file").read_text() == (tmp_path / "full.pth").read_text() == "mine"


def test_the_real_command_line(demo, tmp_path, capsys):
    """Success is one line, bad input one line and exit code 2. The folder beside a .pth stays."""
    run(demo, tmp_path / "new")
    assert capsys.readouterr().out.count("\n") == 1
    bad = start_script([PYTHON, str(ROOT / "export.py"), str(demo), str(tmp_path / "new")], {})
    out, err = bad.communicate(timeout=600)
    assert (bad.returncode, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: {tmp_path / 'new'}: is there")
    demo.unlink()
    refused("ppo_actor_128: is there", run, DEMO, demo)


def test_without_dtype_nothing_is_lost_and_what_another_loses_is_said(tmp_path, capsys):
    """These weights have more digits than bf16, and one of them is too small for fp16."""
    model = load_policy(DEMO)
    model.model.norm.weight.data[0] = 2.0**-30
    for p in model.parameters():
        p.data = (1 + 2.0**-20) * p.data.bfloat16().float()
    save_policy(model, load_tokenizer(DEMO), tmp_path / "float32.pth", torch.float32)
    for name in ("float32", "bfloat16", "float16"):
        run(tmp_path / "float32.pth", tmp_path / f"{name}_folder", "--dtype", name)
        said = capsys.readouterr().out
        lost = "" if name == "float32" else "; rounding has moved them by 9.5e-07 of their norm, as much as"
        assert f" parameters in {name}{lost}" in said and said.count("\n") == 1
        assert ("; rounding" in said) == (name != "float32")
        run(tmp_path / f"{name}_folder", tmp_path / f"{name}_again.pth")
        assert f" parameters in {name}\n" in capsys.readouterr().out
        state = torch.load(tmp_path / f"{name}_again.pth", weights_only=True)
        assert {x.dtype for x in state.values()} == {getattr(torch, name)}
