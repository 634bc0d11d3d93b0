"""Fuzzing: thousands of bad inputs; each is accepted, or refused in one line that names what is wrong.

Hypothesis makes the inputs, the same ones in every run. Inputs that once ended in another way are kept in
CORPUS, or beside the test of their kind, with what went wrong.
"""

import copy
import io
import json
import math
import pickle
import shutil
import time
from collections import Counter
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tiny import flags, request_of, save_policy_dir, save_reward_dir, tiny_llama, word_tokenizer, write_jsonl

from dataset.demo.make_tokenizer import build_tokenizer
from dataset.lm_dataset import PreferenceDataset, RLAIFDataset, SFTDataset
from errors import InputError
from model.loading import check_tokenizer, eos_ids, load_policy, load_tokenizer, tokenizer_source
from trainer import train_ppo
from trainer.inputs import load_inputs
from trainer.rewards.combine import Reward
from trainer.rewards.reward_function import load_reward_function
from trainer.runs import checkpoints
from trainer.runs.distributed import World

COUNT, SECONDS = Counter(), Counter()  # inputs of the code under test, and its time, by kind of input


def fuzz(examples, **strategies):
    """Call the test with ``examples`` inputs, the same in every run."""
    rules = settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],  # do not shrink an input that fails: that takes minutes
    )
    return lambda test: rules(given(**strategies)(test))


@contextmanager
def counted(name):
    """One input, of the kind ``name``, goes through the code under test in this block."""
    COUNT[name] += 1
    start = time.perf_counter()
    try:
        yield
    finally:
        SECONDS[name] += time.perf_counter() - start


@contextmanager
def one_line_or_fine(*named):
    """The block may succeed, or raise an InputError of one short line that contains one of ``named``."""
    try:
        yield
    except InputError as error:
        check_line(str(error), *named)


def check_line(line, *named):
    assert "\n" not in line and "\r" not in line
    assert len(line) < 500
    assert not named or any(part in line for part in named), line


# ---------------------------------------------------------------------------------------------------------
# Values


json_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(["<|im_end|>", "</s>", "<unk>", "\ufdd0\U000f0001", "\ud800", "空", "user", "assistant"]),
)
json_values = st.recursive(
    json_scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "prompt", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)
turns = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant", "system", "tool"]) | json_values,
        "content": json_values
        | st.lists(st.fixed_dictionaries({"type": json_scalars, "text": json_scalars})),
        "tool_calls": json_values,
    },
)
good_turns = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system", "bad", "<|im_end|>"]),
        "content": st.text(max_size=20),
    }
)
conversations = st.lists(turns | good_turns, max_size=4) | json_values
records = st.fixed_dictionaries(
    {},
    optional={
        "conversations": conversations,
        "prompt": st.text(max_size=20) | conversations,
        "answer": st.text(max_size=20) | json_values,
        "chosen": st.text(max_size=20) | conversations,
        "rejected": st.text(max_size=20) | conversations,
        "question": st.text(max_size=20) | json_values,
        "instruction": st.text(max_size=20) | json_values,
        "output": st.text(max_size=20) | json_values,
        "reward_model": st.dictionaries(st.just("ground_truth"), json_values) | json_values,
        "tools": json_values,
    },
)

GOOD_LINES = [  # good for every dataset
    '{"prompt": "What is two plus three?", "answer": "5", "chosen": "5", "rejected": "6"}',
    '{"conversations": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}],'
    ' "chosen": [{"content": "a"}, {"content": "b"}], "rejected": [{"content": "a"}, {"content": "c"}]}',
    '{"prompt": [{"content": "naïve 你"}], "answer": "\\u00e9 <|im_end|>", "chosen": "", "rejected": "\\n"}',
]
# (where to cut, as a fraction of the length; how many bytes to leave out or double; what to put there)
edits = st.lists(
    st.tuples(
        st.floats(0, 1),
        st.integers(0, 40),
        st.binary(max_size=4)
        | st.sampled_from(
            [b"\0", b"\r", b"\r\n", b"\n", b"\xef\xbb\xbf", b"\xff\xfe", b"\\ud800", b"{", b"]", b'"']
        )
        | st.sampled_from([b"NaN", b"-Infinity", b"1e999", b"null", b"<|im_end|>", b"\xed\xa0\x80"]),
    ),
    min_size=1,
    max_size=4,
)


def edited(data, changes):
    """``data`` with pieces put in, left out and doubled."""
    for where, length, new in changes:
        at = int(where * len(data))
        data = data[:at] + new + (data[max(0, at - length) :] if length % 3 == 0 else data[at + length :])
    return data


def truncated(data, where):
    return data[: int(where * len(data))]


def flipped(data, bits):
    data = bytearray(data)
    for where in bits:
        data[int(where * (len(data) - 1))] ^= 1 << int(where * 7919) % 8
    return bytes(data)


mutations = st.one_of(
    st.tuples(st.just(edited), edits),
    st.tuples(st.just(truncated), st.floats(0, 1)),
    st.tuples(st.just(flipped), st.lists(st.floats(0, 1), min_size=1, max_size=8)),
)

# ---------------------------------------------------------------------------------------------------------
# Data files


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(scope="module")
def tokenizers():
    demo = build_tokenizer(["user assistant system", "What is two plus three?", "2 + 3 = 5"])
    picky = word_tokenizer(["user", "assistant", "hi"], chat=True)
    picky.chat_template = (
        "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
        "{{ raise_exception('no ' + m.role + ' here\\nplease') }}{% endif %}"
        "{{ m.content + 1 if m.content == 'a' else m.content + '</s>' }}{% endfor %}"
    )
    return demo, word_tokenizer(["user", "assistant", "hi"]), picky


def read_all(name, path, tokenizers):
    """Read a file as each dataset with each tokenizer: token ids or one error line; the file is unchanged."""
    before = path.read_bytes()
    with counted(name):
        for tokenizer in tokenizers:
            for dataset in (RLAIFDataset, SFTDataset, PreferenceDataset):
                with one_line_or_fine(str(path)):
                    for item in dataset(path, tokenizer, 10**7):
                        ids = item.prompt_ids if dataset is RLAIFDataset else item[0]
                        assert ids and all(type(i) is int for i in ids)
                    COUNT[name + ": read"] += 1
    assert path.read_bytes() == before


@fuzz(300, data=st.binary(max_size=60))
def test_random_bytes(data, folder, tokenizers):
    path = folder / "random.jsonl"
    path.write_bytes(data)
    read_all("data: random bytes", path, tokenizers[:1])


@fuzz(300, lines=st.lists(st.sampled_from(GOOD_LINES), min_size=1, max_size=3), mutation=mutations)
def test_mutated_lines(lines, mutation, folder, tokenizers):
    path = folder / "mutated.jsonl"
    mutate, how = mutation
    path.write_bytes(mutate("\n".join(lines).encode(), how))
    read_all("data: mutated lines", path, tokenizers[:1])


@fuzz(
    80,
    lines=st.lists(st.sampled_from(GOOD_LINES), min_size=1, max_size=3),
    encoding=st.sampled_from(
        ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1", "gb18030", "utf-7"]
    ),
    end=st.sampled_from(["\n", "\r\n", "\r", "\n\n\n", "\n \t\n", "\u2028", "\0\n", "\n\ufeff"]),
)
def test_encodings_and_line_ends(lines, encoding, end, folder, tokenizers):
    path = folder / "encoded.jsonl"
    path.write_bytes((end.join(lines) + end).encode(encoding, "replace"))
    read_all("data: encodings", path, tokenizers[:1])


@fuzz(300, rows=st.lists(records, min_size=1, max_size=2))
def test_wrong_types(rows, folder, tokenizers):
    path = folder / "types.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    read_all("data: wrong types", path, tokenizers)


CORPUS = [  # (what once went wrong, the line that caused it)
    ("RecursionError", '{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}"),
    ("RecursionError", '{"prompt": "a", "x": ' + '{"a": ' * 3000 + "1" + "}" * 3000 + "}"),
    ("ValueError: Exceeds the limit (4300 digits)", '{"prompt": "a", "answer": ' + "9" * 5000 + "}"),
    ("TypeError from the template", '{"prompt": "a", "answer": "a"}'),
    ("fine: a few MB in a line", '{"prompt": "' + "hi you " * 300_000 + '", "answer": "x"}'),
    ("fine: a few MB of special tokens", '{"prompt": "' + "<|im_end|> " * 30_000 + '", "answer": "x"}'),
    ("fine: numbers that JSON does not have", '{"prompt": "a", "x": [NaN, -Infinity, 1e999], "answer": "b"}'),
    ("fine: marks of our own", '{"prompt": "\ufdd0\U000f0001\ufdd0", "answer": "\ufdd0\U000ffffd"}'),
]


@pytest.mark.parametrize(("what", "line"), CORPUS, ids=[f"{i}" for i in range(len(CORPUS))])
def test_corpus_of_lines(what, line, tmp_path, tokenizers):
    path = tmp_path / "corpus.jsonl"
    path.write_text(line + "\n", "utf-8")
    read_all("data: corpus", path, tokenizers if len(line) < 10**6 else tokenizers[:1])


@pytest.mark.parametrize("path", ["a\0b", "\ud800", "x" * 5000, "", "."])
def test_paths_that_are_invalid(path, tokenizers):
    for dataset in (RLAIFDataset, SFTDataset, PreferenceDataset):
        with pytest.raises(InputError):
            dataset(path, tokenizers[0], 10)
    for load in (load_policy, load_tokenizer):
        with pytest.raises(InputError):
            load(path)
    with suppress(InputError):  # there may be a tokenizer in model/
        tokenizer_source(f"{path}.pth")


def test_a_tokenizer_without_an_end(tmp_path):
    """It once raised a TypeError: text + None."""
    tokenizer = word_tokenizer(["a"])
    tokenizer.eos_token = None
    path = write_jsonl(tmp_path / "data.jsonl", [{"prompt": "a", "answer": "a"}])
    with pytest.raises(InputError, match="EOS"):
        SFTDataset(path, tokenizer, 10)


# ---------------------------------------------------------------------------------------------------------
# Flags

FLAGS = sorted(vars(train_ppo.parse_args([])))
VALUES = st.one_of(
    st.integers(-(10**30), 10**30).map(str),
    st.integers(-3, 300).map(str),
    st.floats().map(str),
    st.floats(0, 2).map(str),
    st.sampled_from(
        ["nan", "inf", "-inf", "1e400", "1e-400", "", " ", "0x10", "1_0", "１２", "--", "-1e5", "\0"]
    ),
    st.sampled_from(["9" * 250, "1" + "0" * 200, "\ud800", "a\nb", "x" * 300, "auto", "loss", "float32"]),
    st.text(max_size=10),
)


@fuzz(
    600,
    chosen=st.lists(st.tuples(st.sampled_from(FLAGS), VALUES), min_size=1, max_size=3),
    together=st.booleans(),
)
def test_flags(chosen, together):
    argv = [f"--{name}={value}" for name, value in chosen]
    if not together:
        argv = [text for name, value in chosen for text in (f"--{name}", value)]
    if any(text in ("-h", "--help") for text in argv):
        return
    with counted("flags"):
        try:
            args = train_ppo.parse_args(argv)
        except InputError as error:
            check_line(" ".join(str(error).split()))  # as run_script prints what argparse says
        else:
            assert 1 <= args.batch_size <= 2**20 and args.num_workers <= 64
            COUNT["flags: accepted"] += 1


@pytest.mark.parametrize(
    "argv",
    [
        ["--batch_size", str(10**12)],
        ["--num_workers", "10000"],
        ["--max_gen_len", str(2**40)],
        ["--epochs", "9" * 400],  # was an OverflowError
        ["--hidden_size", "9" * 4000],  # was an OSError: file name too long
        ["--temperature", "1e-45"],  # would divide the logits into infinities
        ["--learning_rate", "1e30"],
        ["--model", "x" * 5000],
        ["--out_dir", "a\0b"],
    ],
)
def test_values_that_would_take_all_memory_or_time(argv):
    with pytest.raises(InputError, match=argv[0]) as error:
        train_ppo.parse_args(argv)
    check_line(str(error.value))


@pytest.fixture(scope="module")
def run_files(folder):
    tokenizer = word_tokenizer(list("abcdefgh"), chat=True)
    function = folder / "combine.py"
    function.write_text(
        "def f(prompts, responses, answers):\n    return [float(len(r)) for r in responses]\n"
    )
    return {
        "model": save_policy_dir(folder / "policy", tokenizer, spread=2.0),
        "reward_model": save_reward_dir(folder / "reward", tokenizer),
        "reward_fn": f"{function}:f",
        "data_path": write_jsonl(folder / "prompts.jsonl", [{"prompt": a, "answer": a} for a in "abcdefgh"]),
    }


SMALL = ["-1", "0", "1", "2", "3", "4"]
NUMBERS = [
    "-1",
    "0",
    "1e-300",
    "1e-8",
    "0.5",
    "1",
    "50",
    "1e5",
    "1e6",
    "1e38",
    "1e300",
    "nan",
    "inf",
    "1e400",
]
SET_BELOW = {"epochs", "max_steps", "num_workers", "eval_interval"}  # by the test, or they start processes


def values_of(flag):
    """Values for a number flag, in its range and out of it, with which a tiny run stays tiny."""
    return NUMBERS if flag.kind is float else [*SMALL, "9" * 30]


BOUNDED = {  # every number that the script declares, so that no new flag is left out
    name: values_of(flag)
    for name, flag in train_ppo.flag_parser().flags.items()
    if max(flag.at_least, flag.above) > -math.inf and name not in SET_BELOW
} | {
    "seed": ["-1", "0", str(2**63 - 1), str(2**63), "9" * 30],
    "kl_in": ["loss", "reward", "both"],
    "reasoning": ["0", "1", "2"],
    "critic_init": ["auto", "actor", "reward"],
    "gradient_checkpointing": ["0", "1"],
    "dtype": ["float32", "bfloat16", "float16", "float64"],
    "run_name": ["", "é", "a/b", "..", "x" * 300, "a\0b", " "],
    "resume": ["auto", "nowhere", "\0"],
    "device": ["cpu", "gpu", "cpu:3", "meta", "\0"],
    "tokenizer": ["", "/nowhere", "a/b/c"],  # no hub name: looking for that takes minutes
    "reward_model": ["", "/nowhere"],
    "reward_fn": ["", "nowhere:f", ":", "f"],
    "eval_data_path": ["", "nowhere"],
    "use_moe": ["0", "1"],
}


CHOICES = [(name, value) for name, values in BOUNDED.items() for value in values]


@fuzz(
    30,
    chosen=st.lists(st.sampled_from(CHOICES), min_size=1, max_size=3, unique=True),
    steps=st.integers(1, 2),
)
def test_runs(chosen, steps, run_files, folder):
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    sizes = {
        "batch_size": 4,
        "mini_batch_size": 2,
        "max_gen_len": 4,
        "critic_warmup_steps": 0,
        "max_seq_len": 32,
    }
    more = {"device": "cpu", "eval_interval": 0, "out_dir": out, "max_steps": steps}
    with counted("runs"), one_line_or_fine():
        try:
            train_ppo.main(flags(**{**run_files, **sizes, **more, **dict(chosen)}))
        except SystemExit as error:
            check_line(str(error))
        COUNT["runs: finished"] += 1


# ---------------------------------------------------------------------------------------------------------
# Models


class Evil:
    """Unpickling it would create the file ``path``."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def minimind_state():
    policy = tiny_llama(10, intermediate_size=64, num_attention_heads=8, num_key_value_heads=2)
    return dict(policy.state_dict())


def saved(thing):
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def pth_bytes():
    return saved(minimind_state())


def load_and_look(path):
    model = load_policy(path)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    eos_ids(word_tokenizer(["a"]), model)


@fuzz(250, mutation=mutations, start=st.booleans())
def test_mutated_pth(mutation, start, folder, pth_bytes):
    mutate, how = mutation
    if start:  # most of the file is weights, where changes are not noticed
        data = mutate(pth_bytes[:2500], how) + pth_bytes[2500:]
    else:
        data = mutate(pth_bytes, how)
    path = folder / "mutated.pth"
    path.write_bytes(data)
    with counted("pth: mutated"), one_line_or_fine(str(path)):
        load_and_look(path)
        COUNT["pth: read"] += 1
    assert path.read_bytes() == data


tensors = st.one_of(
    st.lists(st.integers(0, 70), max_size=3).map(lambda shape: torch.zeros(shape)),
    st.sampled_from([torch.zeros(32, 32, dtype=torch.int64), torch.zeros(8, 32, dtype=torch.complex64)]),
    st.sampled_from([torch.zeros(10, 32).to_sparse(), torch.full((10, 32), torch.nan), torch.tensor(1.0)]),
    st.sampled_from([torch.zeros(10, 32, device="meta"), torch.zeros(64, 32, dtype=torch.float64)]),
    st.sampled_from([torch.zeros(1).expand(50_000, 32), torch.zeros(10**9, device="meta")]),
    st.none() | st.integers() | st.text(max_size=3),
)


@fuzz(
    200,
    changes=st.dictionaries(
        st.sampled_from([*minimind_state(), "model.layers.1.x", "model.layers.0.mlp.gate.weight", "x"]),
        tensors,
        min_size=1,
        max_size=3,
    ),
    drop=st.booleans(),
)
def test_state_dicts_of_wrong_things(changes, drop, folder):
    state = {**minimind_state(), **changes}
    if drop:
        state = {name: x for name, x in state.items() if x is not None}
    path = folder / "wrong.pth"
    torch.save(state, path)
    with counted("pth: wrong tensors"), one_line_or_fine(str(path)):
        load_and_look(path)
        COUNT["pth: read"] += 1


@fuzz(100, thing=json_values, form=st.sampled_from(["pickle", "torch", "json", "protocol 0"]))
def test_pickles_of_other_things(thing, form, folder):
    path = folder / "other.pth"
    if form == "torch":
        torch.save(thing, path)
    elif form == "json":
        path.write_text(json.dumps(thing))
    else:
        path.write_bytes(pickle.dumps(thing, protocol=0 if form == "protocol 0" else None))
    with counted("pth: other pickles"), one_line_or_fine(str(path)):
        load_and_look(path)


@pytest.mark.parametrize("save", [torch.save, lambda x, path: path.write_bytes(pickle.dumps(x))])
@pytest.mark.parametrize("inside", [False, True])
def test_a_malicious_pickle_does_not_run(save, inside, tmp_path):
    evil = Evil(tmp_path / "it ran")
    save({**minimind_state(), "x": evil} if inside else evil, tmp_path / "evil.pth")
    with pytest.raises(InputError) as error:
        load_policy(tmp_path / "evil.pth")
    check_line(str(error.value), str(tmp_path / "evil.pth"))
    assert not (tmp_path / "it ran").exists()


@pytest.fixture(scope="module")
def model_folder(folder):
    path = folder / "model"
    save_policy_dir(path, word_tokenizer(list("abcdefgh"), chat=True))
    return path


def json_mutation(data, changes):
    """A JSON object with some of its values, at any depth, replaced or deleted."""
    data = json.loads(data)
    for place, value in changes:
        holder = data
        while True:
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            key = keys[place % len(keys)]
            place //= len(keys)
            if isinstance(holder[key], dict | list) and holder[key] and place % 3:
                holder = holder[key]
                continue
            if value == "delete":
                del holder[key]
            else:
                holder[key] = copy.deepcopy(value)
            break
        if not data:
            break
    return json.dumps(data).encode()


json_changes = st.lists(
    st.tuples(
        st.integers(0, 10**6),
        json_values | st.sampled_from(["delete", 0, -1, 1, 3, 10**9, 10**18, "</s>", "a", [], {}, [0], True]),
    ),
    min_size=1,
    max_size=3,
)


def small(data, name="config.json"):
    """The same JSON, in a config with whole numbers below 100: a model of 10**9 layers would be built."""
    if name == "config.json":
        with suppress(ValueError):
            return json.dumps(json.loads(data, parse_int=lambda digits: int(digits[-2:]))).encode()
    return data


@contextmanager
def changed(path, data):
    """The file holds ``data`` in this block."""
    before = path.read_bytes()
    path.write_bytes(data)
    try:
        yield
        assert path.read_bytes() == data
    finally:
        path.write_bytes(before)


def read_model(name, folder):
    with counted(name), one_line_or_fine(str(folder), "eos_token_id", "--tokenizer"):
        load_and_look(folder)
        COUNT[name + ": read"] += 1


@fuzz(200, changes=json_changes)
def test_changed_configs(changes, model_folder):
    path = model_folder / "config.json"
    with changed(path, small(json_mutation(path.read_bytes(), changes))):
        read_model("model: config.json", model_folder)


@fuzz(60, changes=json_changes)
def test_changed_generation_configs(changes, model_folder):
    path = model_folder / "generation_config.json"
    with changed(path, json_mutation(path.read_bytes(), changes)):
        read_model("model: generation_config.json", model_folder)


@fuzz(
    150,
    mutation=mutations,
    file=st.sampled_from(["config.json", "generation_config.json", "model.safetensors"]),
)
def test_mutated_model_files(mutation, file, model_folder):
    path, (mutate, how) = model_folder / file, mutation
    data = path.read_bytes()
    head = 900 if file == "model.safetensors" else len(data)  # the names and shapes
    with changed(path, small(mutate(data[:head], how) + data[head:], file)):
        read_model("model: mutated files", model_folder)


@fuzz(
    80,
    changes=json_changes,
    file=st.sampled_from(
        ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"]
    ),
)
def test_everything_that_a_run_loads(changes, file, model_folder, folder):
    data = write_jsonl(folder / "ab.jsonl", [{"prompt": "a b"}])
    argv = flags(model=model_folder, data_path=data, reward_fn="f", max_gen_len=4, max_seq_len=64)
    path = model_folder / file
    with (
        changed(path, small(json_mutation(path.read_bytes(), changes), file)),
        counted("run: loading"),
        one_line_or_fine(),
    ):
        inputs = load_inputs(train_ppo.parse_args(argv), World(0, 1, torch.device("cpu")))
        eos_ids(inputs.tokenizer, inputs.actor)
        COUNT["run: loading: read"] += 1


MODEL_CORPUS = [  # (what once went wrong, the file, its change)
    ("AttributeError: None has no endswith", "config.json", {"architectures": [None]}),
    ("TypeError: not iterable", "config.json", {"architectures": 1}),
    ("it tried to allocate 1.3 TB", "config.json", {"vocab_size": 10**10}),
    ("TypeError: unhashable", "generation_config.json", {"eos_token_id": [[0]]}),
    ("TypeError: unhashable", "generation_config.json", {"eos_token_id": {}}),
    ("TypeError: not comparable", "generation_config.json", {"eos_token_id": ["a", 0]}),
]


@pytest.mark.parametrize(("what", "file", "change"), MODEL_CORPUS)
def test_corpus_of_model_folders(what, file, change, model_folder):
    path = model_folder / file
    with changed(path, json.dumps(json.loads(path.read_bytes()) | change).encode()):
        read_model("model: corpus", model_folder)


PTH_CORPUS = [  # (what once went wrong, the tensor that caused it)
    ("NotImplementedError", torch.zeros(10, 32).to_sparse()),
    ("no numbers at all", torch.zeros(10, 32, device="meta")),
    ("IndexError in MiniMind's model", torch.zeros(0, 32)),
]


@pytest.mark.parametrize(("what", "tensor"), PTH_CORPUS, ids=[case[0] for case in PTH_CORPUS])
def test_corpus_of_pth(what, tensor, tmp_path):
    torch.save({**minimind_state(), "model.embed_tokens.weight": tensor}, tmp_path / "odd.pth")
    with pytest.raises(InputError) as error:
        load_policy(tmp_path / "odd.pth")
    check_line(str(error.value), "odd.pth")


# ---------------------------------------------------------------------------------------------------------
# Tokenizers


@pytest.fixture(scope="module")
def tokenizer_folder(folder):
    path = folder / "tokenizer"
    tokenizer = build_tokenizer(["user assistant", "What is two plus three?", "hello"], vocab_size=280)
    tokenizer.save_pretrained(path)
    (path / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}')
    write_jsonl(
        path / "data.jsonl", [{"prompt": "hello two", "answer": "<|im_end|>"}, {"prompt": "naïve 你好"}]
    )
    return path


def read_tokenizer(name, folder):
    data = folder / "data.jsonl"
    with counted(name), one_line_or_fine(str(folder)):
        tokenizer = load_tokenizer(folder)
        check_tokenizer(tokenizer, tiny_llama(400))
        for dataset in (RLAIFDataset, SFTDataset):
            with one_line_or_fine(str(folder)):
                dataset(data, tokenizer, 10**6)
                COUNT[name + ": read"] += 1


@fuzz(
    150,
    changes=json_changes,
    file=st.sampled_from(
        ["tokenizer.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]
    ),
)
def test_changed_tokenizers(changes, file, tokenizer_folder):
    path = tokenizer_folder / file
    with changed(path, json_mutation(path.read_bytes(), changes)):
        read_tokenizer("tokenizer: values", tokenizer_folder)


@fuzz(
    150,
    mutation=mutations,
    file=st.sampled_from(
        ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"]
    ),
)
def test_mutated_tokenizers(mutation, file, tokenizer_folder):
    path, (mutate, how) = tokenizer_folder / file, mutation
    with changed(path, mutate(path.read_bytes(), how)):
        read_tokenizer("tokenizer: bytes", tokenizer_folder)


TOKENIZER_CORPUS = [  # each causes a Rust panic, which is no Exception (and prints more than one line)
    {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    {"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "x"}},
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8AAAAA"}},
    {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "B", "type_id": 0}}],
            "pair": [],
            "special_tokens": {},
        }
    },
]


@pytest.mark.parametrize("change", TOKENIZER_CORPUS, ids=[str(i) for i in range(len(TOKENIZER_CORPUS))])
def test_corpus_of_tokenizers(change, tokenizer_folder):
    path = tokenizer_folder / "tokenizer.json"
    with changed(path, json.dumps(json.loads(path.read_bytes()) | change).encode()):
        with pytest.raises(InputError) as error:
            RLAIFDataset(tokenizer_folder / "data.jsonl", load_tokenizer(tokenizer_folder), 100)
        check_line(str(error.value), str(tokenizer_folder))
        read_tokenizer("tokenizer: corpus", tokenizer_folder)


TEMPLATES = [
    "{% for m in messages %}",
    "{{ nothing.there }}",
    "{{ messages[7].content }}",
    "{{ messages + 1 }}",
    "{{ 1 / 0 }}",
    "{{ raise_exception('no\nlines') }}",
    "{{ raise_exception(messages[0].content * 1000) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ 'a' * 10**12 }}",
    "{{ messages[0].content.encode('ascii') }}",
    "{{ [].pop() }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages[0].content[1:] }}<|im_end|>",
    "{{ messages | tojson }}",
    "{{ messages[0].content | upper }}",
    "",
    " ",
    "{{",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_chat_templates(template, tokenizer_folder):
    with changed(tokenizer_folder / "chat_template.jinja", template.encode()):
        read_tokenizer("tokenizer: templates", tokenizer_folder)


# ---------------------------------------------------------------------------------------------------------
# Reward functions

RETURNS = [
    "None", "3", "[]", "[1.0]", "[1, 'x']", "[None, None]", "['1', '2']", "(1, 2)", "{1: 2, 3: 4}", "'12'",
    "[float('nan'), 1]", "[1, float('inf')]", "[1e300, 1]", "[10**400, 1]", "[True, False]", "range(2)",
    "iter([1, 2])", "(x for x in (1, 1 / 0))", "[[1], [2]]", "[1j, 2]", "torch.ones(2)", "torch.ones(2, 1)",
    "torch.ones(2, requires_grad=True)", "1 / 0", "responses", "object()", "[object(), 1]", "f", "exit()",
    "prompts.clear()", "responses.append('x') or [1, 2]", "[1, 2] * 100", "undefined", "itertools.count()",
    "[[(0, 1)], 2]", "[[], []]", "[[(None, 1), (1, float('inf'))], 1]", "[[(0, 1e300)], ((True, 1),)]",
    "[[(9, 1)], 1]", "[[(0, 1e300), (0, -1e300)], 1]", "[['ab'], 1]", "[[(10**99, 1)], 1]",
]  # fmt: skip


PYTHON_LINES = [
    "def f(p, r, a):", "    return [1.0, 2.0]", "    return r[9]", "import nothing_like_this", "f = 3",
    "raise ValueError('x\\ny')", "class f: pass", "f = print", "def f(): pass", "1/0", "x = (",
    "f = lambda *a: [0, 0]", "def f(p, r, a, **x):", "def f(prompts, answers, responses):",
]  # fmt: skip


def reward_of(folder, text, number=[0]):  # noqa: B006  (a name of its own for each file)
    number[0] += 1
    path = folder / f"reward_{number[0]}.py"
    path.write_text(text, "utf-8", errors="surrogateescape")
    with counted("reward functions"), one_line_or_fine("--reward_fn"):
        function = load_reward_function(f"{path}:f")
        asked = request_of(["p", "q"], ["r", "s"], [None, "a"], [True, False])
        parts = Reward(function=function, reasoning=False)(asked)
        assert parts["score"].shape == (2,) and parts["score"].isfinite().all()
        COUNT["reward functions: scores"] += 1


@pytest.mark.parametrize("value", RETURNS)
def test_what_reward_functions_return(value, folder):
    reward_of(folder, f"import torch\ndef f(prompts, responses, answers):\n    return {value}\n")


@fuzz(
    150,
    lines=st.lists(
        st.sampled_from(PYTHON_LINES) | st.text(max_size=15),
        max_size=4,
    ),
)
def test_reward_files(lines, folder):
    reward_of(folder, "\n".join(lines))


# ---------------------------------------------------------------------------------------------------------
# Checkpoints

TINY_RUN = {"batch_size": 4, "mini_batch_size": 2, "max_gen_len": 4, "max_seq_len": 32, "max_steps": 2}
TINY_RUN |= {
    "critic_warmup_steps": 0,
    "device": "cpu",
    "eval_interval": 0,
    "save_interval": 1,
    "run_name": "r",
}


@pytest.fixture(scope="module")
def trained(run_files, tmp_path_factory):
    """A finished run with two checkpoints -> its folder, its flags."""
    out = tmp_path_factory.mktemp("trained")
    argv = flags(**run_files, **TINY_RUN, out_dir=out)
    train_ppo.main(argv)
    return out / "r", argv


@contextmanager
def altered(path, data):
    """A file has other content in this block."""
    before = path.read_bytes()
    path.write_bytes(data)
    try:
        yield data != before
    finally:
        path.write_bytes(before)


@fuzz(300, mutation=mutations, number=st.integers(0, 5))
def test_mutated_checkpoints(mutation, number, trained):
    newest = trained[0] / "checkpoints" / "step_2"
    files = sorted(newest.iterdir())
    path = files[number % len(files)]
    mutate, how = mutation
    with altered(path, mutate(path.read_bytes(), how)) as differs, counted("checkpoints: mutated"):
        found, notes = checkpoints.newest_intact(checkpoints.list_checkpoints(trained[0]))
        if path.name != "SHA256SUMS":  # a blank at its end, say, changes nothing
            assert found.name == ("step_1" if differs else "step_2")
        assert len(notes) == (found.name == "step_1")
        for note in notes:
            check_line(note, "step_2 is damaged")


@pytest.mark.slow
@fuzz(
    25,
    values=st.dictionaries(st.integers(0, 60), json_values, min_size=1, max_size=2),
    whole=st.booleans(),
)
def test_checkpoints_with_right_checksums_and_wrong_content(values, whole, trained):
    """The checksums agree, but no run would have written this content."""
    name = "state.json"
    newest = trained[0] / "checkpoints" / "step_2"
    content = json.loads((newest / name).read_text())
    for number, value in values.items():
        content[sorted(content)[number % len(content)]] = value
    data = json.dumps(next(iter(values.values())) if whole else content, allow_nan=True).encode()
    sums = (newest / "SHA256SUMS").read_text().splitlines()
    sums = [f"{sha256(data).hexdigest()}  {name}" if line.endswith(name) else line for line in sums]
    logs = {path: path.read_bytes() for path in trained[0].glob("*.jsonl")}
    config = trained[0] / "config.json"
    with (
        altered(newest / name, data),
        altered(newest / "SHA256SUMS", "\n".join(sums).encode()),
        altered(config, config.read_bytes()),
        counted("checkpoints: another making"),
        one_line_or_fine(),
    ):
        train_ppo.main([*trained[1], "--resume", "auto"])
        COUNT["checkpoints: another making: read"] += 1
    for path, before in logs.items():
        path.write_bytes(before)


# ---------------------------------------------------------------------------------------------------------


def test_enough_inputs_were_tried(request):
    """Prints how many inputs there were (pytest -s shows it)."""
    inputs = {
        name: n for name, n in COUNT.items() if not name.endswith((": read", ": accepted", ": finished"))
    }
    total, seconds = sum(inputs.values()), sum(SECONDS.values())
    print(f"\n{total:,} inputs in {seconds:.1f} s of the code under test")
    for name, n in sorted(COUNT.items()):
        print(f"{n:6,}  {name}")
    if request.session.testscollected > 60:  # the whole file was run
        assert total >= 2000
