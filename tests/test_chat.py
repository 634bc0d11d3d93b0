"""chat.py: prompts from flags, pipes and terminals, history, sampling, streaming, two models side by side."""

import argparse
import os
import pty
import re
import signal
import subprocess
import threading
import time

import pytest
import torch
from forks import Forked
from tiny import LINUX, PYTHON, ROOT, llama_config, save_policy_dir, tiny_llama, word_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import chat
from dataset.chat_template import set_system_prompt
from errors import InputError
from model.loading import load_policy, load_tokenizer
from model.saving import save_policy
from trainer.endings import Endings, keep_endings
from trainer.generation.engine import Sampler, sample
from trainer.generation.sampling import noise_keys
from trainer.generation.stops import StopStrings, response_texts

WORDS = ["user", "assistant", *(f"w{i}" for i in range(20))]
CPU = torch.device("cpu")


def byte_tokenizer():
    """One token per byte, and the EOS: every character beyond ASCII takes several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(["</s>", *alphabet])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="</s>")


def talker(tokenizer, seed=1, positions=256):
    """A Llama whose greedy answers use many different tokens; with tied weights they would not."""
    config = llama_config(len(tokenizer), layers=2)
    config.tie_word_embeddings, config.max_position_embeddings = False, positions
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(8.0 if p.dim() == 2 else 1.0)
    return model


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """A folder with what a run saves: ppo_actor_32.pth of a tiny Llama with a chat template."""
    folder = tmp_path_factory.mktemp("out")
    tokenizer = word_tokenizer(WORDS, chat=True)
    save_policy(talker(tokenizer, seed=1), tokenizer, folder / "ppo_actor_32.pth")
    save_policy(talker(tokenizer, seed=2), tokenizer, folder / "other.pth")
    return folder


def speaker(path, **flags):
    return chat.Speaker(str(path), arguments(**flags), CPU)


def arguments(**flags):
    defaults = vars(chat.parse_args([]))
    return argparse.Namespace(**{**defaults, "max_gen_len": 12, "history": 10, **flags})


def trainers_answer(path, messages, max_gen_len=12):
    """The greedy answer of the trainer's own sampler."""
    model, tokenizer = load_policy(path), load_tokenizer(path.with_suffix(""))
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    rollout = sample(model, [ids], noise_keys(0, 0, [0]), [0], max_gen_len, 0.0)
    return response_texts(rollout, tokenizer)[0]


def user(text):
    return {"role": "user", "content": text}


def converse(speakers, lines, monkeypatch, interactive=True):
    """Run chat.talk as if these lines were typed."""
    lines = iter(lines)

    def typed(question):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", typed)
    chat.talk(speakers, arguments(), chat.typed(interactive), interactive)


@pytest.fixture
def pieces(monkeypatch):
    """What has been shown, piece by piece."""
    pieces = []
    monkeypatch.setattr(chat, "show", pieces.append)
    return pieces


def says(tokenizer, tokens, **flags):
    """A speaker whose model has these tokens for likeliest ones, whatever it is asked."""
    one = object.__new__(chat.Speaker)
    one.name, one.args, one.tokenizer, one.positions = "x", arguments(**flags), tokenizer, 10**6
    one.stops, one.eos, one.system_prompt, one.history = one.args.stop, {0}, "", []
    rest = iter(tokens)

    def model(tokens, past_key_values, use_cache, logits_to_keep):
        logits = torch.zeros(1, tokens.shape[1], len(tokenizer))
        logits[0, -1, next(rest)] = 1
        return argparse.Namespace(logits=logits, past_key_values=None)

    model.device, model.forward = CPU, model
    one.model = model
    return one


# ---------------------------------------------------------------- the command line


def start(*flags, cwd=ROOT, kind=Forked if LINUX else subprocess.Popen, **more):
    pipe = subprocess.PIPE
    streams = {"stdin": pipe, "stdout": pipe, "stderr": pipe, "text": True, "encoding": "utf-8", **more}
    environment = {**os.environ, "COLUMNS": "80", "TERM": "dumb", "PYTHONWARNINGS": "default"}
    command = [PYTHON, str(ROOT / "chat.py"), *map(str, flags)]
    return kind(command, cwd=cwd, env=environment, **streams)


def test_one_prompt_from_any_folder(out, tmp_path):
    flags = ["--weight", "ppo_actor", "--hidden_size", 32, "--out_dir", out, "--max_gen_len", 12]
    flags += ["--prompt", "w1 w2", "--device", "cpu"]
    process = start(*flags, cwd=tmp_path, kind=subprocess.Popen)  # warnings of imports too
    answer, noise = process.communicate(timeout=600)
    assert process.returncode == 0
    expected = trainers_answer(out / "ppo_actor_32.pth", [user("w1 w2")])
    assert answer == expected + "\n"
    assert len(set(expected.split())) > 3
    assert "Warning" not in noise
    about, *cut = noise.splitlines()
    assert about.startswith(f"{out / 'ppo_actor_32.pth'}: ") and about.endswith("parameters on cpu")
    assert all("cut after 12 tokens" in line for line in cut)


def test_prompts_from_a_pipe_and_two_models(out):
    a, b = out / "ppo_actor_32.pth", out / "other.pth"
    process = start("--model", a, "--compare", b, "--max_gen_len", 4)
    typed = f"w1 w2\n\nw4\n{'w3 ' * 300}\nw5\n"
    answers, noise = process.communicate(typed, timeout=600)
    assert process.returncode == 2  # one prompt was too long, and the last one
    *about, error = [line for line in noise.splitlines() if "cut after" not in line]
    assert [line.partition(": ")[0] for line in about] == [str(a), str(b)]
    assert error.startswith("error: prompt and conversation have ")
    lines = answers.splitlines()
    assert [line for line in lines if line.startswith("> ")] == [
        "> w1 w2",
        "> ",
        "> w4",
        "> " + ("w3 " * 300).strip(),
    ]
    for prompt in ("w1 w2", "w4"):  # each on its own
        place = lines.index(f"> {prompt}") + 1
        one, two = (trainers_answer(path, [user(prompt)], 4) for path in (a, b))
        assert lines[place : place + 4] == [f"[{a}]", one, f"[{b}]", two]


def test_no_traceback_for_bad_input_nor_for_a_closed_output(out, tmp_path):
    left = start("--model", out / "ppo_actor_32.pth", "--max_gen_len", 12)
    left.stdout.close()
    bad = start("--model", tmp_path / "none.pth", "--tokenizer", tmp_path, "--prompt", "hi", cwd=tmp_path)
    answer, noise = bad.communicate(timeout=600)
    assert (bad.returncode, answer) == (2, "")
    assert noise == f"error: {tmp_path} has no tokenizer files (tokenizer.json …): pass --tokenizer\n"
    _, noise = left.communicate("w1\nw2\n", timeout=600)
    assert left.returncode == 141 and len(noise.splitlines()) == 1  # it names the model


class Terminal:
    """A session on a pseudo-terminal: send lines, wait for text."""

    def __init__(self, *flags):
        self.master, slave = pty.openpty()
        self.process = start(*flags, stdin=slave, stdout=slave, stderr=slave)
        os.close(slave)
        self.text, self.seen = "", 0
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        try:
            while data := os.read(self.master, 4096):
                self.text += data.decode("utf-8", "replace").replace("\r", "")
        except OSError:  # the other end is closed
            pass

    def wait_for(self, text, seconds=300):
        """-> what came since the last wait, up to and including ``text``"""
        deadline = time.monotonic() + seconds
        while (at := self.text.find(text, self.seen)) < 0:
            assert time.monotonic() < deadline, f"no {text!r} in {self.text[self.seen :]!r}"
            time.sleep(0.01)
        before, self.seen = self.text[self.seen : at], at + len(text)
        return before

    def send(self, text):
        os.write(self.master, text.encode())


def test_a_conversation_in_a_terminal(tmp_path):
    """Answers, history, /clear, Ctrl-C in the middle of an answer, Ctrl-D."""
    tokenizer = word_tokenizer(WORDS, chat=True)
    model = talker(tokenizer, positions=1_000_000)
    model.lm_head.weight.data[0] = 0  # its EOS is never the likeliest: it talks until it is stopped
    save_policy(model, tokenizer, tmp_path / "talker.pth")
    terminal = Terminal("--model", tmp_path / "talker.pth", "--max_gen_len", 400_000)
    try:
        assert "/clear forgets" in terminal.wait_for("> ")
        terminal.send("w1 w2\n")
        terminal.wait_for("w1 w2\n")
        terminal.wait_for(" w")  # the answer has begun
        terminal.process.send_signal(signal.SIGINT)
        assert "Traceback" not in terminal.wait_for("\n> ")
        terminal.send("/clear\n")
        terminal.wait_for("/clear\n> ")
        terminal.send("\x04")
        assert terminal.process.wait(300) == 0
        assert "rror" not in terminal.text
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.master)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--model a.pth --weight full_sft", "--weight full_sft: not with --model a.pth"),
        ("--model a.pth --hidden_size 64", "--hidden_size 64: not with --model a.pth"),
        ("--model missing.pth", "missing.pth: no such file"),
        ("--model broken.pth", "not a readable torch file"),
        ("--weight none --hidden_size 64 --use_moe 1", "none_64_moe.pth"),
        ("--temperature -1", "--temperature -1.0"),
        ("--temperature nan", "--temperature nan"),
        ("--temperature inf", "--temperature inf"),
        ("--max_gen_len 0", "--max_gen_len 0"),
        ("--seed -1", "--seed -1"),
        ("--history -1", "--history -1"),
        ("--device nonsense", "--device"),
        ("--compare missing.pth", "missing.pth"),
    ],
)
def test_bad_flags(flags, complaint, out, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.pth").write_bytes(b"not a checkpoint")
    argv = ["--prompt", "hi", "--out_dir", str(out), *flags.split()]
    if "--model" in argv:
        argv += ["--tokenizer", str(out / "ppo_actor_32")]
    with pytest.raises(InputError, match=complaint):
        chat.main(argv)


def test_a_tokenizer_too_large_for_the_model(out, tmp_path):
    word_tokenizer([str(i) for i in range(50)]).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="not this model's tokenizer"):
        speaker(out / "ppo_actor_32.pth", tokenizer=str(tmp_path))


def test_which_model_is_loaded(tmp_path):
    def path(*flags):
        return chat.model_path(chat.parse_args(["--out_dir", str(tmp_path), *flags]))

    assert path() == str(ROOT / "model" / "demo" / "policy")
    names = ("ppo_actor_64.pth", "ppo_actor_512_moe.pth", "ppo_actor_128.pth", "ppo_actor_128_best.pth")
    for seconds, name in enumerate((*names, "ppo_actor_512_moe_ema.pth", "x.pth")):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1000 + seconds, 1000 + seconds))
    assert path() == str(tmp_path / "ppo_actor_128.pth")
    assert path("--model", "x") == "x"
    assert path("--weight", "full_sft") == str(tmp_path / "full_sft_512.pth")
    assert path("--hidden_size", "64") == str(tmp_path / "ppo_actor_64.pth")
    assert path("--use_moe", "1") == str(tmp_path / "ppo_actor_512_moe.pth")


# ---------------------------------------------------------------- the conversation


def test_history_reaches_the_model(out, monkeypatch, capsys):
    path = out / "ppo_actor_32.pth"
    one = speaker(path)
    converse([one], ["w1", "", "w2 w3", "/clear", "w2 w3"], monkeypatch)
    first = trainers_answer(path, [user("w1")])
    turns = [user("w1"), {"role": "assistant", "content": first}, user("w2 w3")]
    second, alone = trainers_answer(path, turns), trainers_answer(path, [user("w2 w3")])
    assert second != alone
    assert capsys.readouterr().out == f"{first}\n{second}\n{alone}\n"
    assert list(one.history) == [user("w2 w3"), {"role": "assistant", "content": alone}]


@pytest.mark.parametrize(
    ("turns", "kept"), [(0, []), (1, ["w3"]), (2, ["w2", "w3"]), (9, ["w1", "w2", "w3"])]
)
def test_how_many_turns_are_remembered(turns, kept, out, monkeypatch, capsys):
    one = speaker(out / "ppo_actor_32.pth", history=turns)
    converse([one], ["w1", "w2", "w3"], monkeypatch)
    assert [turn["content"] for turn in one.history][::2] == kept


def test_the_system_message_of_training_is_found(tmp_path, monkeypatch, capsys):
    """PPO saves it with the tokenizer; --system_prompt replaces it, and '' leaves it out."""
    tokenizer = word_tokenizer(WORDS, chat=True)
    assert set_system_prompt(tokenizer, "w5 w6") == "w5 w6"
    path = tmp_path / "ppo_actor_32.pth"
    save_policy(talker(tokenizer, seed=1), tokenizer, path)
    expected = {
        text: trainers_answer(path, [*([{"role": "system", "content": text}] if text else []), user("w1 w2")])
        for text in ("w5 w6", "w7", "")
    }
    assert len(set(expected.values())) == 3
    for given, used in ((None, "w5 w6"), ("w7", "w7"), ("", "")):
        converse([speaker(path, system_prompt=given)], ["w1 w2"], monkeypatch)
        assert capsys.readouterr().out.strip() == expected[used]


def test_a_system_message_needs_a_template(tmp_path):
    tokenizer = word_tokenizer(WORDS)
    save_policy(talker(tokenizer, seed=1), tokenizer, tmp_path / "x.pth")
    with pytest.raises(InputError, match="--system_prompt: the tokenizer has no chat template"):
        speaker(tmp_path / "x.pth", system_prompt="w1")


def test_lines_from_a_pipe_have_no_history_by_default(out, monkeypatch, capsys):
    path = out / "ppo_actor_32.pth"
    assert chat.parse_args([]).history == 0
    converse([speaker(path, history=0)], ["w1", "w2 w3"], monkeypatch, interactive=False)
    first, second = (trainers_answer(path, [user(text)]) for text in ("w1", "w2 w3"))
    assert capsys.readouterr().out == f"> w1\n{first}\n> w2 w3\n{second}\n"


def test_ctrl_c_forgets_the_question_and_goes_on(out, monkeypatch, capsys):
    one = speaker(out / "ppo_actor_32.pth")
    forward = one.model.forward

    def interrupted(*inputs, **more):
        monkeypatch.setattr(one.model, "forward", forward)
        raise KeyboardInterrupt

    monkeypatch.setattr(one.model, "forward", interrupted)
    converse([one], ["w1", "w2"], monkeypatch)
    assert [turn["content"] for turn in one.history][::2] == ["w2"]
    assert "\nstopped\n" in capsys.readouterr().err


def test_ctrl_c_at_the_prompt_forgets_the_line(monkeypatch, capsys):
    lines = iter([KeyboardInterrupt(), "w1", EOFError()])

    def typed(question):
        line = next(lines)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", typed)
    assert list(chat.typed(True)) == ["w1"]
    lines = iter([KeyboardInterrupt()])
    with pytest.raises(KeyboardInterrupt):
        list(chat.typed(False))


def test_a_model_that_fails_leaves_no_turn_in_the_others_history(out, monkeypatch, capsys):
    one, other = (speaker(out / name) for name in ("ppo_actor_32.pth", "other.pth"))
    other.positions = 1
    converse([one, other], ["w1"], monkeypatch)
    assert not one.history and not other.history


def test_code_from_outside_may_give_all_logits(out, monkeypatch, capsys):
    one = speaker(out / "ppo_actor_32.pth")
    whole, forward = one.answer("w1"), one.model.forward

    def narrow(input_ids, past_key_values, use_cache):
        return forward(input_ids, past_key_values=past_key_values, use_cache=use_cache)

    monkeypatch.setattr(one.model, "forward", narrow)
    assert one.answer("w1") == whole


def test_a_stop_string_may_be_one_text(tmp_path):
    tokenizer = word_tokenizer(WORDS, chat=True)
    model = talker(tokenizer)
    model.generation_config.stop_strings = "w1 w2"
    save_policy(model, tokenizer, tmp_path / "a.pth")
    assert speaker(tmp_path / "a.pth").stops == ["w1 w2"]


def test_a_conversation_that_is_too_long_is_one_line(out, monkeypatch, capsys):
    one = speaker(out / "ppo_actor_32.pth")  # 256 positions
    question = "w1 " * 100
    converse([one], [question, question, question], monkeypatch)
    assert len(one.history) == 4
    line = r"\nprompt and conversation have \d+ tokens, .* takes 1 to 255; /clear"
    assert re.search(line, capsys.readouterr().err)
    converse([one], ["/clear", question], monkeypatch)
    assert len(one.history) == 2 and "takes" not in capsys.readouterr().err


def test_broken_characters_in_a_prompt_are_one_line(tmp_path, monkeypatch, capsys):
    one = speaker(save_policy_dir(tmp_path / "plain", word_tokenizer(WORDS)))
    converse([one], ["w1 \udcff", "w1"], monkeypatch)  # as a shell passes on a stray byte
    assert "\nthe tokenizer " in capsys.readouterr().err


def test_an_answer_never_exceeds_the_positions(out, capsys):
    one = speaker(out / "ppo_actor_32.pth", max_gen_len=500)
    asked = "w1 " * 240
    room = 256 - len(one.encode(asked))
    assert 0 < len(one.answer(asked).split()) <= room


def test_no_template_no_history(tmp_path, monkeypatch, capsys):
    path = save_policy_dir(tmp_path / "plain", word_tokenizer(WORDS), spread=3.0)
    one = speaker(path)
    assert one.encode("w0 w1") == [4, 5]
    converse([one], ["w1", "w2"], monkeypatch)
    assert not one.history


# ---------------------------------------------------------------- stop strings


def test_an_answer_ends_before_the_stop_strings_of_training(tmp_path, capsys):
    """They are saved beside the weights. The trainer's sampler ends its answers at the same token."""
    tokenizer = word_tokenizer(WORDS, chat=True)
    model = talker(tokenizer)
    model.lm_head.weight.data[0] = 0  # no EOS
    path = tmp_path / "ppo_actor_32.pth"
    save_policy(model, tokenizer, path)
    whole = trainers_answer(path, [user("w1")])
    word = whole.split()[6]
    stop = f" {word[:2]}"  # w and a digit: the stop string can end inside of a word
    stops = StopStrings([stop], tokenizer)
    keep_endings(Endings([0], stops, None), model)
    save_policy(model, tokenizer, path)
    one = speaker(path)
    ids, model = one.encode("w1"), load_policy(path)
    rollout = Sampler(model, model.dtype, 2).sample([ids], noise_keys(0, 0, [0]), [0], 12, 0.0, 0, stops)
    answer = one.answer("w1")
    said = capsys.readouterr()
    assert said.out == f"{answer}\n" and "cut after" not in said.err
    assert answer == response_texts(rollout, tokenizer, stops)[0] == whole.split(stop)[0]
    assert 0 < len(answer) < len(whole)


def test_transformers_ends_there_too_if_it_has_the_tokenizer(tmp_path):
    tokenizer, asked = byte_tokenizer(), torch.tensor([[40, 41]])
    model = talker(tokenizer)
    whole = model.generate(asked, max_new_tokens=40, do_sample=False)[0, 2:].tolist()
    ascii_ids = [i for i in whole if tokenizer.decode([i]).isalnum()]
    keep_endings(Endings([0], StopStrings([tokenizer.decode(ascii_ids[2:3])], tokenizer), None), model)
    save_policy(model, tokenizer, tmp_path / "a.pth")
    model = load_policy(tmp_path / "a.pth")
    ended = model.generate(asked, tokenizer=tokenizer, max_new_tokens=40, do_sample=False)[0, 2:].tolist()
    assert ended == whole[: whole.index(ascii_ids[2]) + 1] and len(ended) < 40
    answer = speaker(tmp_path / "a.pth", max_gen_len=40).answer(tokenizer.decode([40, 41]))
    assert answer == tokenizer.decode(ended[:-1])


def test_stop_strings_and_special_tokens_can_be_given(out, capsys):
    path = out / "ppo_actor_32.pth"
    whole = trainers_answer(path, [user("w1")])
    words = whole.split()
    for given in ([words[2]], [words[2], words[3]], [f"{words[1]} {words[2]}"]):
        one = speaker(path, stop=given)
        assert one.answer("w1") == whole[: min(whole.find(text) for text in given)]
    assert "cut after" not in capsys.readouterr().err
    assert speaker(path, stop=["</s>"]).stops == [] and speaker(path, stop=["</s>"]).eos == {0}
    with pytest.raises(InputError, match="--stop ''"):
        speaker(path, stop=[""])


def test_what_may_begin_a_stop_string_is_shown_late(pieces):
    tokenizer = byte_tokenizer()
    tokens = tokenizer("a\nYo E EN\nYou: and more")["input_ids"]
    one = says(tokenizer, tokens, stop=["\nYou:", "END"], max_gen_len=99)
    assert one.answer("x") == "a\nYo E EN"
    assert "".join(pieces) == "a\nYo E EN\n"
    assert "\nY" not in pieces and " E" not in pieces  # they came with what follows
    assert len([piece for piece in pieces if piece]) > 4
    pieces.clear()
    one = says(tokenizer, tokenizer("\nYou: and more")["input_ids"], stop=["\nYou:"], max_gen_len=99)
    assert one.answer("x") == "" and "".join(pieces) == "\n"


# ---------------------------------------------------------------- sampling and streaming


def test_sampling_is_from_the_whole_distribution(tmp_path):
    """Whatever the model's generation config says, and without the top-k of 50 that transformers adds."""
    tokenizer = word_tokenizer([f"w{i}" for i in range(98)])
    model = tiny_llama(100, spread=3.0)
    model.generation_config.update(do_sample=True, top_k=1, suppress_tokens=list(range(50)))
    save_policy(model, tokenizer, tmp_path / "a.pth")
    one = speaker(tmp_path / "a.pth", temperature=0.7, max_gen_len=1)
    torch.manual_seed(0)
    assert one.encode("w3 w4") == [5, 6]
    answers = [one.answer("w3 w4") for _ in range(500)]
    drawn = torch.tensor([tokenizer.convert_tokens_to_ids(text) if text else 0 for text in answers])
    with torch.no_grad():
        probs = (one.model(torch.tensor([[5, 6]])).logits[0, -1] / 0.7).softmax(-1)
    order = probs.argsort(descending=True)
    for group in (order[:5], order[5:50], order[50:]):
        assert probs[group].sum() > 0.1
        assert abs(torch.isin(drawn, group).float().mean() - probs[group].sum()) < 0.07  # 3 standard errors


def test_the_seed_decides(out, capsys):
    def answers(seed):
        one = speaker(out / "ppo_actor_32.pth", temperature=2.0)
        chat.talk([one], arguments(seed=seed), ["w1"], False)
        return capsys.readouterr().out

    assert answers(1) == answers(1) != answers(2)


@pytest.mark.parametrize("text", ["naïve 你好，世界\n  🙂 e\u0301 <think>\n", "한국어 � \t \n\n x", ""])
def test_streaming_whole_characters(text, pieces):
    tokenizer = byte_tokenizer()
    one = says(tokenizer, [*tokenizer(text)["input_ids"], 0], max_gen_len=99)
    assert one.answer("x") == text
    shown = ""
    for piece in pieces:
        shown += piece
        assert f"{text}\n".startswith(shown)
    assert shown == f"{text}\n"
    assert len([piece for piece in pieces if piece]) >= len(text) - text.count("�")  # one by one


def test_streaming_an_answer_that_is_cut_inside_a_character(pieces, capsys):
    tokenizer = byte_tokenizer()
    tokens = tokenizer("a界")["input_ids"][:-1]
    assert says(tokenizer, tokens, max_gen_len=len(tokens)).answer("x") == "a�"
    assert "".join(pieces[:-1]) == "a" and pieces[-1] == "�\n"
    assert capsys.readouterr().err == "(x: cut after 3 tokens)\n"


def test_streaming_a_model_that_talks_nonsense(tmp_path, pieces):
    """Random bytes, most of them no UTF-8: what was shown is the text of the answer."""
    one = speaker(save_policy_dir(tmp_path / "bytes", byte_tokenizer()), temperature=1.0, max_gen_len=100)
    torch.manual_seed(0)
    for _ in range(3):
        pieces.clear()
        answer = one.answer("ab")
        assert "".join(pieces) == answer + "\n" and answer.count("\ufffd") > 5


# ---------------------------------------------------------------- two models


def test_two_models_answer_one_after_the_other(out, capsys):
    a, b = out / "ppo_actor_32.pth", out / "other.pth"
    chat.talk([speaker(a), speaker(b)], arguments(), ["w1"], False)
    texts = [trainers_answer(path, [user("w1")]) for path in (a, b)]
    assert capsys.readouterr().out == f"[{a}]\n{texts[0]}\n[{b}]\n{texts[1]}\n"
