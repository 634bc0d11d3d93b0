"""The demo's data and tokenizer: made from a seed, right and wrong answers, held-out problems kept apart."""

from transformers import AutoTokenizer

from dataset.demo import make_data, make_tools
from dataset.lm_dataset import RLAIFDataset
from dataset.record_files import open_records


def test_committed_data_is_what_the_script_makes_and_another_seed_makes_other_data(tmp_path):
    few = ["--demonstrations", "9", "--prompts", "9", "--references", "9", "--pairs", "9"]
    for name, more in (("a", []), ("b", ["--seed", "1", *few])):
        make_data.main(["--out_dir", str(tmp_path / name), *more])
    for file in (tmp_path / "a").glob("*.jsonl"):
        made = file.read_bytes()
        assert made == (make_data.HERE / file.name).read_bytes(), file.name
        assert not made.startswith((tmp_path / "b" / file.name).read_bytes()), file.name
    folders = [make_data.HERE, tmp_path / "a", tmp_path / "b"]
    committed, same, other = (AutoTokenizer.from_pretrained(folder / "tokenizer") for folder in folders)
    assert committed.get_vocab() == same.get_vocab() != other.get_vocab()
    assert committed.chat_template == same.chat_template


def test_the_data_of_the_demo_with_a_tool_is_what_its_script_makes(tmp_path):
    make_tools.main(["--out_dir", str(tmp_path), "--stage1_dir", str(tmp_path / "a")])
    for file in tmp_path.glob("*.jsonl"):
        assert file.read_bytes() == (make_data.HERE / file.name).read_bytes(), file.name
    policy = make_data.HERE.parents[1] / "model" / "demo" / "tools_policy"
    committed, made = (AutoTokenizer.from_pretrained(x) for x in (policy, tmp_path / "a" / "tokenizer"))
    assert committed.get_vocab() == made.get_vocab() and committed.chat_template == made.chat_template
    rows = [open_records(path) for path in (*tmp_path.glob("*.jsonl"), tmp_path / "a" / "sft.jsonl")]
    asked = [{tuple(question_of(x).rstrip("?.").split()[-3:]) for x in file} for file in rows]
    assert sum(map(len, asked)) == len(set().union(*asked)) == sum(map(len, rows))
    firsts = [x["messages"][1]["content"] for x in rows[-1]]
    guesses = sum("<tool_call>" not in text for text in firsts) / len(firsts)
    assert abs(guesses - make_tools.KINDS["guess"]) < 0.02


def question_of(record):
    return record.get("prompt") or record["messages"][0]["content"]


def problem_of(text):
    """A question -> (a, op, b, op, c)."""
    words = text.rstrip("?.").split()[-5:]
    symbols = {word: symbol for symbol, word in make_data.SPOKEN.items()}
    return tuple(symbols[w] if w in symbols else make_data.WORDS.index(w) for w in words)


def test_held_out_problems_occur_in_no_training_file():
    def problems(name):
        return {problem_of(record["prompt"]) for record in open_records(make_data.HERE / name)}

    held_out = problems("eval.jsonl")
    terms = {make_data.terms(problem) for problem in held_out}
    assert len(held_out) == 500 and problems("preferences_eval.jsonl") == held_out
    for name in ("sft.jsonl", "preferences.jsonl", "ppo.jsonl", "references.jsonl"):
        assert not {make_data.terms(problem) for problem in problems(name)} & terms, name


def test_demo_tokenizer_keeps_digits_apart_and_encodes_anything():
    tokenizer = AutoTokenizer.from_pretrained(make_data.HERE / "tokenizer")
    assert len(tokenizer) <= 512
    response = "<think>\n27 + 15 = 42\n</think>\n<answer>\n42\n</answer>"
    ids = tokenizer(response)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids).count("4") == 2 and len(ids) == 21
    assert tokenizer.decode(ids, skip_special_tokens=True) == response
    for text in ("naïve 空 🎉\t\r\n", "  two  spaces ", "<answer>"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert RLAIFDataset(make_data.HERE / "eval.jsonl", tokenizer, 64).dropped == 0
