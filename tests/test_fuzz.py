"""Fuzzing: a thousand bad inputs; each is accepted, or refused in one line that names what is wrong.

Hypothesis makes the inputs, the same ones in every run. Inputs that once ended in another way are in a
corpus beside the test of their kind, with what went wrong.
"""

import copy
import io
import json
import pickle
import shutil
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from tiny import flags, refused, request_of, save_policy_dir, tiny_llama, word_tokenizer, write_jsonl

from dataset.demo.make_data import build_tokenizer
from dataset.lm_dataset import PreferenceDataset, RLAIFDataset, SFTDataset
from errors import InputError
from model.loading import check_tokenizer, eos_ids, load_policy, load_tokenizer, tokenizer_source
from trainer import train_ppo
from trainer.rewards.combine import Reward
from trainer.rewards.reward_function import load_reward_functions
from trainer.runs import checkpoints

DATASETS = (RLAIFDataset, SFTDataset, PreferenceDataset)


def fuzz(examples, *corpus, **strategies):
    """Call the test with ``examples`` inputs, the same in every run, and with those of the corpus."""
    rules = settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],  # do not shrink an input that fails: that takes minutes
    )

    def decorate(test):
        test = given(**strategies)(test)
        for inputs in corpus:
            test = example(**inputs)(test)
        return rules(test)

    return decorate


def check_line(line, *named):
    assert "\n" not in line and "\r" not in line and len(line) < 500
    assert not named or any(str(part) in line for part in named), line


@contextmanager
def one_line_or_fine(*named):
    """The block may succeed, or raise an InputError of one short line that contains one of ``named``."""
    try:
        yield
    except InputError as error:
        check_line(str(error), *named)


@contextmanager
def changed(path, data, *others):
    """The file holds ``data`` in this block, afterwards it and the others what they held. Where there are no
    others, nobody may change it."""
    before = {each: each.read_bytes() for each in (path, *others)}
    path.write_bytes(data)
    try:
        yield data != before[path]
        assert others or path.read_bytes() == data
    finally:
        for each, content in before.items():
            each.write_bytes(content)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


ODD = ["<|im_end|>", "</s>", "<unk>", "\ufdd0\U000f0001", "\ud800", "空", "user", "assistant"]
json_scalars = st.sampled_from([None, True, False, *ODD]) | st.integers(-(10**20), 10**20) | st.floats()
keys = st.sampled_from(["role", "content", "prompt", "x"])
json_values = st.recursive(
    json_scalars | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=6,
)
# (where, as a fraction of the length; how many bytes to leave out, double or write over; what to put there)
BYTES = [b"\0", b"\r", b"\r\n", b"\n", b"\xef\xbb\xbf", b"\xff\xfe", b"\\ud800", b"{", b"]", b'"', b"NaN"]
BYTES += [b"-Infinity", b"1e999", b"null", b"<|im_end|>", b"\xed\xa0\x80"]
REST = 3 * 10**9 + 1  # bytes left out: all that follow
new_bytes = st.binary(max_size=4) | st.sampled_from(BYTES)
edit = st.tuples(st.floats(0, 1), st.integers(0, 40) | st.just(REST), new_bytes)


def edited(data, changes):
    """``data`` with pieces put in, left out, doubled and written over."""
    for where, length, new in changes:
        at = int(where * len(data))
        after = (max(0, at - length), at + length, at + len(new))[length % 3]
        data = data[:at] + new + data[after:]
    return data


def of_head(data, size, mutate):
    """Of files with weights only the first bytes are changed: names and shapes."""
    return mutate(data[:size]) + data[size:]


# functions of bytes
mutations = st.lists(edit, min_size=1, max_size=6).map(lambda how: partial(edited, changes=how))


def with_values(data, changes):
    """A JSON object with some of its values, at any depth, replaced or deleted."""
    data = json.loads(data)
    for place, value in changes:
        holder = data
        while holder:
            key = (list(holder) if isinstance(holder, dict) else range(len(holder)))[place % len(holder)]
            place //= len(holder)
            if isinstance(holder[key], dict | list) and holder[key] and place % 3:
                holder = holder[key]
                continue
            if value == "delete":
                del holder[key]
            else:
                holder[key] = copy.deepcopy(value)
            break
    return json.dumps(data).encode()


def with_keys(data, change):
    return json.dumps(json.loads(data) | change).encode()


ODD_VALUES = ["delete", 0, -1, 1, 3, 10**9, 10**18, "</s>", "a", [], {}, [0], True]
new_value = st.tuples(st.integers(0, 10**6), json_values | st.sampled_from(ODD_VALUES))
value_changes = st.lists(new_value, min_size=1, max_size=3).map(lambda x: partial(with_values, changes=x))


GOOD_LINES = [  # good for every dataset
    '{"prompt": "What is two plus three?", "answer": "5", "chosen": "5", "rejected": "6"}',
    '{"conversations": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}],'
    ' "chosen": [{"content": "a"}, {"content": "b"}], "rejected": [{"content": "a"}, {"content": "c"}]}',
    '{"prompt": [{"content": "naïve 你"}], "answer": "\\u00e9 <|im_end|>", "chosen": "", "rejected": "\\n"}',
]
SHAPES = [  # what else a record may be
    '{"conversations": [{"role": "system", "content": [{"type": "text", "text": "be"}]}, {"content": "hi"},'
    ' {"role": "assistant", "content": "yes", "tool_calls": [{"name": "f"}]}], "tools": [{"name": "f"}]}',
    '{"question": "a", "reward_model": {"ground_truth": "5"}, "chosen": [{"role": "user", "content": "b"}]}',
    '{"instruction": "b", "input": "c", "output": "d", "chosen": "", "rejected": [{"role": "tool"}]}',
]
CODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1", "gb18030", "utf-7"]
ENDS = ["\n", "\r\n", "\r", "\n\n\n", "\n \t\n", "\u2028", "\0\n", "\n\ufeff"]
lines = st.lists(st.sampled_from(GOOD_LINES), min_size=1, max_size=3)
contents = (
    st.binary(max_size=60)
    | st.tuples(lines, mutations).map(lambda x: x[1]("\n".join(x[0]).encode()))
    | st.tuples(lines, st.sampled_from(CODINGS), st.sampled_from(ENDS)).map(
        lambda x: (x[2].join(x[0]) + x[2]).encode(x[1], "replace")
    )
    | st.lists(st.tuples(st.sampled_from(GOOD_LINES + SHAPES), value_changes), min_size=1, max_size=2).map(
        lambda x: b"\n".join(change(line) for line, change in x)
    )
)


@pytest.fixture(scope="module")
def tokenizers():
    demo = build_tokenizer(["user assistant system", "What is two plus three?", "2 + 3 = 5"])
    picky = word_tokenizer(["user", "assistant", "hi"], chat=True)
    picky.chat_template = (
        "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
        "{{ raise_exception('no ' + m.role + ' here\\nplease') }}{% endif %}"
        "{{ m.content + 1 if m.content == 'a' else m.content + '</s>' }}{% endfor %}"
    )
    return [demo, word_tokenizer(["user", "assistant", "hi"]), picky]


READ = []
LINES = [  # and what went wrong
    (0, '{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}"),  # RecursionError
    (1, '{"prompt": "a", "x": ' + '{"a": ' * 3000 + "1" + "}" * 3000 + "}"),  # RecursionError
    (1, '{"prompt": "a", "answer": ' + "9" * 5000 + "}"),  # ValueError: Exceeds the limit (4300 digits)
    (2, '{"prompt": "a", "answer": "a"}'),  # TypeError from the template
    (1, '{"prompt": [{"content": []}], "chosen": "", "rejected": "\\n"}'),  # a conversation of no tokens
    (0, '{"prompt": "' + "hi you " * 30_000 + '", "answer": "x"}'),  # fine: 200 KB in a line
    (0, '{"prompt": "' + "<|im_end|> " * 5_000 + '", "answer": "x"}'),  # fine: 5,000 special tokens
    (1, '{"prompt": "a", "x": [NaN, -Infinity, 1e999], "answer": "b"}'),  # fine: numbers JSON has not
    (0, '{"prompt": "\ufdd0\U000f0001\ufdd0", "answer": "\ufdd0\U000ffffd"}'),  # fine: marks of our own
    (1, '[{"prompt": "a", "chosen": {"content": "b"}, "rejected": "c"}, []]'),  # an array, a single turn
]
LINES = [{"number": number, "data": f"{line}\n".encode()} for number, line in LINES]


@fuzz(250, *LINES, data=contents, number=st.integers(0, 2))
def test_data_files(data, number, folder, tokenizers):
    """Each dataset reads token ids, or there is one error line."""
    path = folder / "data.jsonl"
    path.write_bytes(data)
    READ.append(0)
    for dataset in DATASETS:
        with one_line_or_fine(path):
            for item in dataset(path, tokenizers[number], 10**7):
                ids = item.prompt_ids if dataset is RLAIFDataset else item[0]
                assert ids and all(type(i) is int for i in ids)
            READ[-1] += 1
    assert path.read_bytes() == data


def test_many_of_these_files_could_be_read_and_many_not():
    assert not READ or min(READ.count(0), len(READ) - READ.count(0)) > 40


@pytest.mark.parametrize("path", ["a\0b", "\ud800", "x" * 5000, "", "."])
def test_paths_that_are_invalid(path, tokenizers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # "." is an empty folder
    for kind in DATASETS:
        with pytest.raises(InputError):
            kind(path, tokenizers[0], 10)
    for load in (load_policy, load_tokenizer):
        with pytest.raises(InputError):
            load(path)
    with suppress(InputError):  # there may be a tokenizer in model/
        tokenizer_source(f"{path}.pth")


def test_a_tokenizer_without_an_end(tmp_path):
    tokenizer = word_tokenizer(["a"])
    tokenizer.eos_token = None
    path = write_jsonl(tmp_path / "data.jsonl", [{"prompt": "a", "answer": "a"}])
    check_line(refused("EOS", SFTDataset, path, tokenizer, 10))


PARSER = train_ppo.flag_parser()
FLAGS = PARSER.flags
NUMBERS = {x.dest for x in PARSER._actions if x.type in (int, float) and not (x.choices or x.nargs)}
ODD_TEXTS = ["nan", "inf", "-inf", "1e400", "1e-400", "", " ", "0x10", "1_0", "１２", "--", "-1e5", "\0"]
ODD_TEXTS += ["9" * 250, "1" + "0" * 200, "\ud800", "a\nb", "x" * 300, "auto", "loss", "float32"]
numbers = st.integers(-(10**30), 10**30) | st.integers(-3, 300) | st.floats() | st.floats(0, 2)
values = numbers.map(str) | st.sampled_from(ODD_TEXTS) | st.text(max_size=10)
chosen_flags = st.lists(st.tuples(st.sampled_from(sorted(FLAGS)), values), min_size=1, max_size=3)


@fuzz(120, chosen=chosen_flags, together=st.booleans())
def test_flags(chosen, together):
    argv = [f"--{name}={value}" for name, value in chosen]
    if not together:
        argv = [word for name, value in chosen for word in (f"--{name}", value)]
    if any(word in ("-h", "--help") for word in argv):
        return
    try:
        args = train_ppo.parse_args(argv)
    except InputError as error:
        check_line(" ".join(str(error).split()))  # as run_script prints what argparse says
    else:
        assert 1 <= args.batch_size <= 2**20


TOO_MUCH = {"batch_size": 10**12, "max_gen_len": 2**40, "learning_rate": "1e30"}
TOO_MUCH |= {"epochs": "9" * 400, "hidden_size": "9" * 4000}  # an OverflowError, a file name too long
TOO_MUCH |= {"temperature": "1e-45"}  # would divide the logits into infinities
TOO_MUCH |= {"model": "x" * 5000, "out_dir": "a\0b"}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_values_that_would_take_all_memory_or_time(name):
    check_line(refused(f"--{name}", train_ppo.parse_args, [f"--{name}={TOO_MUCH[name]}"]))


TINY_RUN = {"batch_size": 4, "mini_batch_size": 2, "max_gen_len": 4, "max_seq_len": 32, "eval_interval": 0}
TINY_RUN |= {"critic_warmup_steps": 0, "device": "cpu", "max_steps": 2}
SMALL = ["-1", "0", "1", "2", "3", "4", "9" * 30]
FLOATS = ["-1", "0", "1e-300", "1e-8", "0.5", "1", "50", "1e5", "1e6", "1e38", "1e300", "nan", "inf", "1e400"]
OTHERS = {  # values with which a tiny run stays tiny; wrong files and devices: test_cli.py
    "seed": ["-1", "0", str(2**63 - 1), str(2**63), "9" * 30],
    "kl_in": ["loss", "reward", "both"],
    "reasoning": ["0", "1", "2"],
    "critic_init": ["auto", "actor", "reward"],
    "gradient_checkpointing": ["0", "1"],
    "dtype": ["float32", "bfloat16", "float16", "float64"],
    "run_name": ["", "é", "a/b", "..", "x" * 300, "a\0b", " "],
    "use_moe": ["0", "1"],
}
SET_BELOW = ("epochs", "max_steps", "eval_interval")  # by the test
OF_NUMBERS = {  # every number that the script declares, so that no new flag is left out
    name: FLOATS if flag.kind is float else SMALL
    for name, flag in FLAGS.items()
    if name in NUMBERS and name not in SET_BELOW
}
CHOICES = [(name, value) for name, these in (OF_NUMBERS | OTHERS).items() for value in these]


@fuzz(14, chosen=st.lists(st.sampled_from(CHOICES), min_size=1, max_size=3, unique=True))
def test_runs(chosen, files, folder):
    shutil.rmtree(folder / "out", ignore_errors=True)
    with one_line_or_fine():
        try:
            train_ppo.main(flags(**files | TINY_RUN | {"out_dir": folder / "out"} | dict(chosen)))
        except SystemExit as error:
            check_line(str(error))


def minimind_state():
    return tiny_llama(10, intermediate_size=64, num_attention_heads=8, num_key_value_heads=2).state_dict()


def saved(thing):
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


WEIGHTS = saved(minimind_state())
TENSORS = [torch.zeros(32, 32, dtype=torch.int64), torch.zeros(8, 32, dtype=torch.complex64)]
TENSORS += [torch.zeros(10, 32).to_sparse(), torch.full((10, 32), torch.nan), torch.tensor(1.0)]
TENSORS += [torch.zeros(10, 32, device="meta"), torch.zeros(64, 32, dtype=torch.float64)]
TENSORS += [torch.zeros(1).expand(50_000, 32), torch.zeros(10**9, device="meta"), None, -1, "a"]
tensors = st.lists(st.integers(0, 70), max_size=3).map(torch.zeros) | st.sampled_from(TENSORS)
names = st.sampled_from([*minimind_state(), "model.layers.1.x", "model.layers.0.mlp.gate.weight", "x"])
pth_files = (
    mutations.map(lambda mutate: mutate(WEIGHTS))
    | mutations.map(lambda mutate: of_head(WEIGHTS, 2500, mutate))
    | st.dictionaries(names, tensors, min_size=1, max_size=3).map(lambda x: saved({**minimind_state(), **x}))
    | json_values.map(saved)
    | json_values.map(lambda x: json.dumps(x).encode())
    | st.tuples(json_values, st.sampled_from([0, None])).map(lambda x: pickle.dumps(*x))
)


def load_and_look(path):
    model = load_policy(path)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    eos_ids(word_tokenizer(["a"]), model)


@fuzz(150, data=pth_files)
def test_pth(data, folder):
    path = folder / "mutated.pth"
    path.write_bytes(data)
    with one_line_or_fine(path):
        load_and_look(path)
    assert path.read_bytes() == data


class Evil:
    """Unpickling it would create the file "it ran"."""

    def __reduce__(self):
        return (Path.touch, (Path("it ran"),))


NONE = [torch.zeros(10, 32).to_sparse(), torch.zeros(10, 32, device="meta"), torch.zeros(0, 32)]  # no weights
REFUSED = [{"model.embed_tokens.weight": x} for x in NONE] + [{"x": Evil()}]


@pytest.mark.parametrize("save", [saved, pickle.dumps])
def test_weights_that_are_none_and_pickles_that_do_something(save, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for thing in (Evil(), *(minimind_state() | change for change in REFUSED)):
        Path("odd.pth").write_bytes(save(thing))
        check_line(refused("odd.pth", load_policy, "odd.pth"))
        assert not Path("it ran").exists()


@pytest.fixture(scope="module")
def model_folder(folder):
    path = folder / "model"
    save_policy_dir(path, word_tokenizer(list("abcdefgh"), chat=True))
    return path


def with_small_numbers(data, mutate):
    """Whole numbers end below 100, or a model of 10**9 layers would be built."""
    data = mutate(data)
    with suppress(ValueError):
        return json.dumps(json.loads(data, parse_int=lambda digits: int(digits[-2:]))).encode()
    return data


json_changes = mutations | value_changes | value_changes
of_config = st.tuples(
    st.just("config.json"), json_changes.map(lambda x: partial(with_small_numbers, mutate=x))
)
of_generation = st.tuples(st.just("generation_config.json"), json_changes)
of_weights = st.tuples(
    st.just("model.safetensors"), mutations.map(lambda x: partial(of_head, size=900, mutate=x))
)
FOLDERS = [  # and what went wrong
    ("config.json", {"architectures": [None]}),  # AttributeError: None has no endswith
    ("config.json", {"architectures": 1}),  # TypeError: not iterable
    ("config.json", {"vocab_size": 10**10}),  # terabytes were allocated
    ("generation_config.json", {"eos_token_id": [[0]]}),  # TypeError: unhashable
    ("generation_config.json", {"eos_token_id": {}}),  # TypeError: unhashable
    ("generation_config.json", {"eos_token_id": ["a", 0]}),  # TypeError: not comparable
]
FOLDERS = [{"change": (file, partial(with_keys, change=change))} for file, change in FOLDERS]


@fuzz(90, *FOLDERS, change=of_config | of_config | of_generation | of_weights)
def test_model_folders(change, model_folder):
    file, mutate = change
    data = mutate((model_folder / file).read_bytes())
    with changed(model_folder / file, data), one_line_or_fine(model_folder, "eos_token_id", "--tokenizer"):
        load_and_look(model_folder)


@pytest.fixture(scope="module")
def tokenizer_folder(folder):
    path = folder / "tokenizer"
    tokenizer = build_tokenizer(["user assistant", "What is two plus three?", "hello"], vocab_size=280)
    tokenizer.save_pretrained(path)
    (path / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}')
    said = [{"prompt": "hello two", "answer": "<|im_end|>"}, {"prompt": "naïve 你好"}]
    write_jsonl(path / "data.jsonl", said)
    return path


OF_TOKENIZER = ["tokenizer.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]
of_json = st.tuples(st.sampled_from(OF_TOKENIZER), mutations | value_changes)
of_template = st.tuples(st.just("chat_template.jinja"), mutations)
TEMPLATES = [
    "{% for m in messages %}", "{{ nothing.there }}", "{{ messages[7].content }}", "{{ messages + 1 }}",
    "{{ 1 / 0 }}", "{{ raise_exception('no\nlines') }}", "{{ raise_exception(messages[0].content * 1000) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ 'a' * 10**12 }}", "{{ [].pop() }}", "", " ", "{{",
    "{{ messages[0].content.encode('ascii') }}", "{{ ''.__class__.__mro__ }}", "{{ messages | tojson }}",
    "{{ messages[0].content[1:] }}<|im_end|>", "{{ messages[0].content | upper }}",
]  # fmt: skip
PROCESSOR = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "B", "type_id": 0}}]}
PANICS = [  # of Rust, which are no Exception, and print more than one line
    {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    {"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "x"}},
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8AAAAA"}},
    {"post_processor": PROCESSOR | {"pair": [], "special_tokens": {}}},
]
TOKENIZERS = [("chat_template.jinja", lambda data, text=text: text.encode()) for text in TEMPLATES]
TOKENIZERS += [("tokenizer.json", partial(with_keys, change=change)) for change in PANICS]
TOKENIZERS = [{"change": change} for change in TOKENIZERS]


@fuzz(120, *TOKENIZERS, change=of_json | of_json | of_json | of_template)
def test_tokenizers(change, tokenizer_folder):
    file, mutate = change
    path = tokenizer_folder / file
    with changed(path, mutate(path.read_bytes())), one_line_or_fine(tokenizer_folder):
        tokenizer = load_tokenizer(tokenizer_folder)
        check_tokenizer(tokenizer, tiny_llama(400))
        for dataset in (RLAIFDataset, SFTDataset):
            with one_line_or_fine(tokenizer_folder):
                dataset(tokenizer_folder / "data.jsonl", tokenizer, 10**6)


RETURNS = [  # beside those of test_reward_function.py
    "[1e300, 1]", "[[(0, 1e300), (0, -1e300)], 1]", "[[(0, 1e300)], ((True, 1),)]", "[[(10**99, 1)], 1]",
    "(x for x in (1, 1 / 0))", "torch.ones(2, requires_grad=True)", "[object(), 1]", "f", "exit()",
    "prompts.clear()", "responses.append('x') or [1, 2]", "undefined",
]  # fmt: skip
PYTHON_LINES = [
    "def f(p, r, a):", "    return [1.0, 2.0]", "    return r[9]", "import nothing_like_this", "f = 3",
    "raise ValueError('x\\ny')", "class f: pass", "f = print", "def f(): pass", "1/0", "x = (",
    "f = lambda *a: [0, 0]", "def f(p, r, a, **x):", "def f(prompts, answers, responses):",
]  # fmt: skip


RETURNS = [
    {"lines": ["import torch", "def f(prompts, responses, answers):", f"    return {x}"]} for x in RETURNS
]


@fuzz(100, *RETURNS, lines=st.lists(st.sampled_from(PYTHON_LINES) | st.text(max_size=15), max_size=4))
def test_reward_files(lines, folder):
    text = "\n".join(lines)
    path = folder / f"reward_{sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()}.py"
    path.write_text(text, "utf-8", errors="surrogateescape")
    with one_line_or_fine("--reward_fn"):
        functions = load_reward_functions([f"{path}:f"])
        asked = request_of(["p", "q"], ["r", "s"], [None, "a"], [True, False])
        parts = Reward(functions=functions, reasoning=False)(asked)
        assert parts["score"].shape == (2,) and parts["score"].isfinite().all()


@pytest.fixture(scope="module")
def trained(files, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained")
    argv = flags(**files, **TINY_RUN, save_interval=1, run_name="r", out_dir=out)
    train_ppo.main(argv)
    return out / "r", argv


@fuzz(60, mutate=mutations, number=st.integers(0, 5))
def test_mutated_checkpoints(mutate, number, trained):
    saved_files = sorted((trained[0] / "checkpoints" / "step_2").iterdir())
    path = saved_files[number % len(saved_files)]
    with changed(path, mutate(path.read_bytes())) as differs:
        found, notes = checkpoints.newest_intact(checkpoints.list_checkpoints(trained[0]))
        if path.name != "SHA256SUMS":  # a blank at its end, say, changes nothing
            assert found.name == ("step_1" if differs else "step_2")
        assert len(notes) == (found.name == "step_1")
        for note in notes:
            check_line(note, "step_2 is damaged")


@pytest.mark.slow
@fuzz(25, new=st.dictionaries(st.integers(0, 60), json_values, min_size=1, max_size=2), whole=st.booleans())
def test_checkpoints_with_right_checksums_and_wrong_content(new, whole, trained):
    """Nothing is found wrong with the file, but no run would have written this content."""
    folder, argv = trained
    state = folder / "checkpoints" / "step_2" / "state.json"
    content = json.loads(state.read_text())
    for number, value in new.items():
        content[sorted(content)[number % len(content)]] = value
    data = json.dumps(next(iter(new.values())) if whole else content, allow_nan=True).encode()
    others = (folder / "config.json", *folder.glob("*.jsonl"))
    with pytest.MonkeyPatch.context() as patch, changed(state, data, *others), one_line_or_fine():
        patch.setattr(checkpoints, "damage", lambda path: "")
        train_ppo.main([*argv, "--resume", "auto"])
