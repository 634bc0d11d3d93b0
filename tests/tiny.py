"""Helpers for tests: tiny real models, tokenizers and files, and functions that run or start the trainer."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers as T
from forks import Forked
from tokenizers import Tokenizer, models, pre_tokenizers

from dataset.lm_dataset import Prompt
from errors import InputError
from trainer.compute.batch import Dialogue
from trainer.rewards.reward_function import Request
from trainer.runs.health import Health

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data"
CHAT = (
    "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)


def word_tokenizer(words, chat=False):
    """A tokenizer with one token per word; id 0 is the EOS and the pad token, id 1 the unknown word."""
    vocab = {word: i for i, word in enumerate(["</s>", "<unk>", *words])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = T.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", pad_token="</s>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT if chat else None
    return tokenizer


def llama_config(vocab_size, hidden=32, layers=1, **more):
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}
    ids = {"pad_token_id": 0, "eos_token_id": 0, "bos_token_id": None, "tie_word_embeddings": True}
    return T.LlamaConfig(**{"vocab_size": vocab_size, **sizes, **ids, **more})


def tiny_llama(vocab_size, seed=0, spread=1.0, **more):
    """A random Llama whose next-token distribution is far from uniform when ``spread`` is large."""
    torch.manual_seed(seed)
    model = T.LlamaForCausalLM(llama_config(vocab_size, **more)).float().eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(spread)
    return model


def values_of(critic, tokens):
    """The values [B, T] at all positions of tokens [B, T], right-padded."""
    return critic.read(critic.backbone(tokens, use_cache=False).last_hidden_state)


def save_policy_dir(folder, tokenizer, **more):
    """Save a random policy with its tokenizer as a Hugging Face directory -> its path as text."""
    tiny_llama(len(tokenizer), **more).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def save_reward_dir(folder, tokenizer, seed=1, **more):
    """Save a reward model, a sequence classifier with one label and random weights -> its path as text."""
    torch.manual_seed(seed)
    config = llama_config(len(tokenizer), **{"num_labels": 1, **more})
    T.LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def request_of(prompts, responses, answers=None, finished=None, records=None, lengths=None, texts=None):
    """A ``Request`` of rewards; by default all responses have ended, and there are no answers."""
    count = len(responses)
    rows = [prompts, answers or [None] * count, records or [{}] * count, texts or prompts]
    found = [
        Prompt(index, prompt, answer, [0], record, text)
        for index, (prompt, answer, record, text) in enumerate(zip(*rows, strict=True))
    ]
    return Request(found, responses, finished or [True] * count, lengths or [1] * count)


def dialogue(*messages, environment=None, score=None, **counts):
    """A ``Dialogue`` of these messages; an assistant's turn may be given as its text."""
    turns = [assistant(turn) if isinstance(turn, str) else turn for turn in messages]
    return Dialogue(turns, environment, score, **counts)


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return str(path)


def flags(**values):
    """{"batch_size": 8, "model": ""} -> ["--batch_size", "8"]: what is "" is left out."""
    return [text for name, value in values.items() if value != "" for text in (f"--{name}", str(value))]


def train(**values):
    """Run train_ppo.py's main in this process, as its command line would."""
    from trainer import train_ppo

    train_ppo.main(flags(device="cpu", eval_interval=0, log_interval=1000, save_interval=10_000, **values))


def read_jsonl(path):
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def refused(says, call, *args, **more):
    """AssertionError unless this call raises an InputError of one line that ``says`` matches -> the line."""
    with pytest.raises(InputError, match=says or None) as error:
        call(*args, **more)
    line = str(error.value)
    del error  # with its traceback, which keeps open what the call had opened: a run's lock, for example
    assert "\n" not in line
    return line


def load_weights(run_folder, step, name="actor"):
    """The fp32 actor (or critic) of a checkpoint, as a state-dict."""
    from safetensors.torch import load_file

    return load_file(Path(run_folder) / "checkpoints" / f"step_{step}" / f"{name}.safetensors")


PYTHON = sys.executable
LINUX = sys.platform == "linux" and hasattr(os, "fork")  # test_platforms.py hides it

# A reward function that can fail: at call $FAULT_AT, on process $FAULT_RANK, it executes the code $FAULT. The
# call with which it is tried at the start does not count.
FAULTY_REWARD = """import os, sys, time
calls = 0
def score(prompts, responses, answers):
    global calls
    if "The answer is 7." in responses:
        return [0.0] * len(responses)
    calls += 1
    scores = [r.split().count("a") - 0.1 * len(r) for r in responses]
    due = calls == int(os.environ.get("FAULT_AT", 0))
    if due and os.environ.get("RANK", "0") == os.environ.get("FAULT_RANK", "0"):
        exec(os.environ["FAULT"])
    return scores
"""
WORDS = list("abcdefgh")


def run_files(folder, count=40, words=WORDS, template=CHAT):
    """A policy of eight words, a reward model, a reward function and ``count`` prompts of different lengths,
    as flags. The penalty is given: to choose one, a run would call the function once more."""
    folder.mkdir(exist_ok=True)
    tokenizer = word_tokenizer(words, chat=True)
    tokenizer.chat_template = template
    (folder / "combine.py").write_text(FAULTY_REWARD)
    prompts = [{"prompt": " ".join(words[(n + i) % 8] for i in range(1 + n % 7))} for n in range(count)]
    return {
        "model": save_policy_dir(folder / "policy", tokenizer, layers=2, spread=2.0),
        "reward_model": save_reward_dir(folder / "reward", tokenizer),
        "reward_fn": f"{folder / 'combine.py'}:score",
        "data_path": write_jsonl(folder / "prompts.jsonl", prompts),
        "missing_eos_penalty": 1.0,
    }


CALL = '<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>'  # one word of the policy's
ENVIRONMENTS = """
def add(a: int) -> str:
    '''Add.

    Args:
        a: a number
    '''
    return "b"

class Env:
    def reset(self, prompt):
        self.calls = 0
        return " c"

    def add(self, a: int) -> str:
        '''Add.

        Args:
            a: a number
        '''
        self.calls += 1
        if self.calls == 3:
            raise ValueError("three times")
        return "b"

    def get_reward(self):
        return self.calls / 4

class Game:
    def reset(self):
        self.turns = 0

    def step(self, text):
        self.turns += 1
        return "a", text.count("b") / 4, self.turns == 3
"""


def turn_files(folder, count=40):
    """A policy that often calls a tool, and prompts, as flags; and "code": a file of environments."""
    words = ["a", "b", "c", CALL, "<tool_call>{</tool_call>", "user", "assistant", "tool", "tools", "add"]
    tokenizer = word_tokenizer(words, chat=True)
    shown = "{% if tools %}{{ 'tools ' + tools[0]['function']['name'] + ' ' }}{% endif %}"
    tokenizer.chat_template = shown + CHAT
    (folder / "environments.py").write_text(ENVIRONMENTS)
    prompts = [{"prompt": " ".join("abc"[(n + i) % 3] for i in range(1 + n % 4))} for n in range(count)]
    return {
        "model": save_policy_dir(folder / "policy_of_turns", tokenizer, layers=2, spread=2.0),
        "data_path": write_jsonl(folder / "prompts_of_turns.jsonl", prompts),
        "missing_eos_penalty": 1.0,
        "code": str(folder / "environments.py"),
    }


DIE = "os.kill(os.getpid(), 9)"


SCRIPT = ROOT / "trainer" / "train_ppo.py"


def launch(argv, script=SCRIPT, **environment):
    """Start train_ppo.py (or ``script``) as a process -> the process. ``environment``: more variables."""
    return start_script([PYTHON, str(script), *argv], environment)


def launch_torchrun(processes, argv, *options, script=SCRIPT, **environment):
    rendezvous = ["--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
    command = [PYTHON, "-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
    command += options or rendezvous
    return _start([*command, str(script), *argv], environment)


def start_script(command, environment):
    """Start [python, script, …] as ``launch`` starts train_ppo.py: forked, where that is possible."""
    return _start(command, environment, Forked if LINUX else subprocess.Popen)


def launch_all(argv, processes, **environment):
    """Processes with the environment that torchrun gives them, but without torchrun, which takes longer to
    start than they take to train. Where a process dies or gets a signal, tests use torchrun."""
    return [launch(argv, **environment, **rank) for rank in ranks(processes)]


def launch_two(argv, **environment):
    return launch_all(argv, 2, **environment)


def ranks(processes):
    """The environment that torchrun would give each of these processes."""
    shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    shared |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes))
    return [shared | {"RANK": str(n), "LOCAL_RANK": str(n)} for n in range(processes)]


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def _start(command, environment, kind=subprocess.Popen):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return kind(command, **pipes, cwd="/", env={**os.environ, **environment}, start_new_session=True)


def finish(process, code=0, seconds=600):
    """Wait for a process that should exit with ``code`` -> (stdout, stderr)."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        raise AssertionError(f"it hangs; it has said {process.communicate()}") from None
    assert process.returncode == code, f"{process.returncode} instead of {code}\n{out}\n{err}"
    return out, err


def wait_for(condition, process, seconds=300):
    """Wait until ``condition()`` holds. AssertionError if the process ends first or it takes too long."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)


def health_of(records, config=None):
    """What a run with these lines of metrics.jsonl and this config.json has logged, and its findings."""
    health = Health({"script": "train_ppo.py", **(config or {})})
    for record in [{"step": 0}, *records]:  # a run logs step 0 first
        health.add(record)
    return health


def without_time(records):
    """Lines of metrics.jsonl without the timings (perf/…), which differ between two equal runs."""
    return [{k: v for k, v in r.items() if not k.startswith("perf/")} for r in records]


def same_run(one, other, step, but="optimizer"):
    """AssertionError unless two run folders hold the same weights, bit for bit, and the same lines."""
    folders = Path(one), Path(other)
    held = sorted((folders[0] / "checkpoints" / f"step_{step}").glob("*.safetensors"))
    for name in [path.stem for path in held if but not in path.stem]:
        left, right = (load_weights(folder, step, name) for folder in folders)
        assert left.keys() == right.keys()
        assert all(left[key].equal(right[key]) for key in left), f"{name} differs"
    samples = {path.name for folder in folders for path in folder.glob("*samples.jsonl")}
    for name in ("metrics.jsonl", *samples):
        left, right = (without_time(read_jsonl(folder / name)) for folder in folders)
        assert left == right, f"{name} differs"
