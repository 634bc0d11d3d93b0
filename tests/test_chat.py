"""chat.py: prompts from flags, pipes and terminals, sampling, stop strings, what is shown."""

import argparse
import io
import os
import pty
import signal
import subprocess

import pytest
import tiny
import torch
from forks import Forked
from tiny import LINUX, PYTHON, ROOT, refused, save_policy_dir, user, word_tokenizer
from tiny_tokenizers import TOKENIZERS
from transformers import LlamaForCausalLM

import chat
from dataset.chat_template import set_system_prompt
from model.loading import load_policy, load_tokenizer
from model.saving import save_policy
from trainer.generation.engine import Sampler
from trainer.generation.sampling import noise_keys
from trainer.generation.stops import Endings, StopStrings, keep_endings, response_texts

WORDS = ["user", "assistant", *(f"w{i}" for i in range(20))]


def talker(tokenizer, seed=1, positions=256):
    """A Llama whose greedy answers use many different tokens; with tied weights they would not."""
    config = tiny.llama_config(len(tokenizer), layers=2)
    config.tie_word_embeddings, config.max_position_embeddings = False, positions
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(8.0 if p.dim() == 2 else 1.0)
    return model


TOKENIZER = word_tokenizer(WORDS, chat=True)


def saved(model, folder, tokenizer=TOKENIZER):
    save_policy(model, tokenizer, folder / "ppo_actor_32.pth")
    return folder / "ppo_actor_32.pth"


def endless(**more):
    """A talker whose EOS is never the likeliest: it talks until it is stopped."""
    model = talker(TOKENIZER, **more)
    model.lm_head.weight.data[0] = 0
    return model


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """A folder with what a run saves: ppo_actor_32.pth of a tiny Llama with a chat template."""
    folder = tmp_path_factory.mktemp("out")
    saved(talker(TOKENIZER), folder)
    return folder


def speaker(path, **flags):
    defaults = vars(chat.parse_args([]))
    args = argparse.Namespace(**{**defaults, "max_gen_len": 12, **flags})
    return chat.Speaker(str(path), args, torch.device("cpu"))


def trainers_answer(path, messages, max_gen_len=12):
    """The greedy answer of the trainer's own sampler."""
    model, tokenizer = load_policy(path), load_tokenizer(path.with_suffix(""))
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    rollout = Sampler(model).sample([ids], noise_keys(0, 0, [0]), [0], max_gen_len, 0.0)
    return response_texts(rollout, tokenizer)[0]


def piped(path, lines, monkeypatch, **flags):
    """Run chat.py on a file of these lines."""
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    more = {"max_gen_len": 12, "device": "cpu", **flags}
    chat.main(["--model", str(path), *(text for name, x in more.items() for text in (f"--{name}", str(x)))])


def start(*flags, cwd=ROOT, **more):
    pipe = subprocess.PIPE
    streams = {"stdin": pipe, "stdout": pipe, "stderr": pipe, "text": True, "encoding": "utf-8", **more}
    environment = {**os.environ, "COLUMNS": "80", "TERM": "dumb", "PYTHONWARNINGS": "default"}
    command = [PYTHON, str(ROOT / "chat.py"), *map(str, flags)]
    return (Forked if LINUX else subprocess.Popen)(command, cwd=cwd, env=environment, **streams)


def test_ids_without_a_text_are_not_said(tmp_path):
    model = talker(TOKENIZER)
    model.resize_token_embeddings(40)
    model.lm_head.weight.data[len(TOKENIZER) :] = 0
    answers = [speaker(saved(model, tmp_path)).answer("w1 w2")]
    first = model.lm_head.weight.data[:1]
    model.lm_head.weight.data[len(TOKENIZER) :] = 9 * first.sign()
    model.lm_head.weight.data[len(TOKENIZER) + 1 :] *= -1  # one of the two wins always
    answers.append(speaker(saved(model, tmp_path)).answer("w1 w2"))
    assert answers[0] == answers[1]


def test_one_prompt_from_any_folder(out, tmp_path):
    process = start(
        "--out_dir", out, "--max_gen_len", 12, "--prompt", "w1 w2", "--device", "cpu", cwd=tmp_path
    )
    answer, noise = process.communicate(timeout=600)
    assert process.returncode == 0
    expected = trainers_answer(out / "ppo_actor_32.pth", [user("w1 w2")])
    assert answer == expected + "\n" and len(set(expected.split())) > 3
    about, *cut = noise.splitlines()
    assert about.startswith(f"{out / 'ppo_actor_32.pth'}: ") and about.endswith("parameters on cpu")
    assert all("cut after 12 tokens" in line for line in cut)


def test_a_closed_input_has_nothing_to_answer(out, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", None)
    chat.main(["--model", str(out / "ppo_actor_32.pth"), "--device", "cpu"])
    assert capsys.readouterr().out == ""


def test_prompts_from_a_pipe_are_answered_each_on_its_own(out):
    path = out / "ppo_actor_32.pth"
    process = start("--model", path, "--max_gen_len", 4)
    long = ("w3 " * 300).strip()
    answers, noise = process.communicate(f"\ufeffw1 w2\n\nw4\n{long}\nw5\n", timeout=600)
    assert process.returncode == 2  # one prompt was too long, and the last one
    assert noise.splitlines()[-1].startswith("error: the prompt has ")
    one, two = (trainers_answer(path, [user(prompt)], 4) for prompt in ("w1 w2", "w4"))
    assert answers.splitlines() == ["> w1 w2", one, "> ", "> w4", two, f"> {long}"]


def test_no_traceback_for_bad_input_nor_for_a_closed_output(out, tmp_path):
    left = start("--model", out / "ppo_actor_32.pth", "--max_gen_len", 12)
    left.stdout.close()
    bad = start("--model", tmp_path / "none.pth", "--tokenizer", tmp_path, "--prompt", "hi", cwd=tmp_path)
    answer, noise = bad.communicate(timeout=600)
    assert (bad.returncode, answer) == (2, "")
    assert noise == f"error: {tmp_path} has no tokenizer files (tokenizer.json …): pass --tokenizer\n"
    _, noise = left.communicate("w1\nw2\n", timeout=600)
    assert left.returncode == 141 and len(noise.splitlines()) == 1  # it names the model


def test_questions_typed_in_a_terminal(tmp_path):
    path = saved(talker(TOKENIZER), tmp_path)
    master, slave = pty.openpty()
    process = start("--model", path, "--max_gen_len", 4, "--device", "cpu", stdin=slave)
    os.close(slave)
    for prompt in ("w1 w2", "w4"):
        os.write(master, f"{prompt}\n".encode())
        assert process.stdout.readline() == trainers_answer(path, [user(prompt)], 4) + "\n"
    os.write(master, b"\x04")
    assert process.wait(300) == 0
    process.communicate()
    os.close(master)


def test_ctrl_c_ends_it(tmp_path):
    path = saved(endless(positions=1_000_000), tmp_path)
    process = start("--model", path, "--max_gen_len", 400_000, "--prompt", "w1", "--device", "cpu")
    assert process.stdout.read(1)  # the answer has begun
    process.send_signal(signal.SIGINT)
    _, noise = process.communicate(timeout=300)
    assert process.returncode == 130 and "Traceback" not in noise


BAD = {
    "--weight full_sft": "--weight: it is called --model here",
    "--model missing.pth": "missing.pth: no such file",
    "--temperature -1": "--temperature -1.0",
    "--temperature inf": "--temperature inf",
    "--max_gen_len 0": "--max_gen_len 0",
    "--seed -1": "--seed -1",
    "--device nonsense": "--device",
    "--stop=": "--stop ''",
}


@pytest.mark.parametrize("flags", BAD)
def test_bad_flags(flags, out):
    argv = ["--prompt", "hi", "--out_dir", str(out), "--tokenizer", str(out / "ppo_actor_32"), *flags.split()]
    refused(BAD[flags], chat.main, argv)


def test_the_newest_actor_is_loaded(tmp_path):
    def path(*flags):
        return chat.model_path(chat.parse_args(["--out_dir", str(tmp_path), *flags]))

    assert path() == str(ROOT / "model" / "demo" / "policy")
    names = "64.pth 512_moe.pth 128.pth 128_best.pth 512_moe_ema.pth 128.txt"
    for seconds, name in enumerate(names.split(), 1000):
        (tmp_path / f"ppo_actor_{name}").touch()
        os.utime(tmp_path / f"ppo_actor_{name}", (seconds, seconds))
    assert path() == str(tmp_path / "ppo_actor_128.pth")
    assert path("--model", "x") == "x"


def test_the_system_message_of_training_is_found(tmp_path, capsys):
    """PPO saves it with the tokenizer; --system_prompt replaces it, and '' leaves it out."""
    tokenizer = word_tokenizer(WORDS, chat=True)
    set_system_prompt(tokenizer, "w5 w6")
    path = saved(talker(tokenizer), tmp_path, tokenizer)
    found = set()
    for given, used in ((None, "w5 w6"), ("w7", "w7"), ("", "")):
        speaker(path, system_prompt=given).answer("w1 w2")
        system = [{"role": "system", "content": used}] if used else []
        answer = trainers_answer(path, [*system, user("w1 w2")])
        assert capsys.readouterr().out.strip() == answer
        found.add(answer)
    assert len(found) == 3


def test_without_a_template_there_is_no_system_message(tmp_path):
    path = save_policy_dir(tmp_path / "plain", word_tokenizer(WORDS), spread=3.0)
    one = speaker(path)
    assert one.encode("w0 w1") == [4, 5]
    refused("the tokenizer ", one.answer, "w1 \udcff")  # a stray byte, as a shell passes it on
    refused("--system_prompt: the tokenizer has no chat template", speaker, path, system_prompt="w1")


def test_a_prompt_that_is_too_long_is_one_line_and_an_answer_is_cut(out, capsys):
    one = speaker(out / "ppo_actor_32.pth", max_gen_len=500)  # 256 positions
    question = "w1 " * 240
    room = 256 - len(one.encode(question))
    assert 0 < len(one.answer(question).split()) <= room
    refused(r"the prompt has 2\d\d tokens, .* takes 1 to 255; shorten it", one.answer, "w1 " * 260)


def test_an_answer_ends_where_the_trainers_sampler_ends_it(tmp_path, capsys):
    """The stop strings are saved beside the weights. What ends the answer is shown, but no part of it."""
    model = endless()
    path = saved(model, tmp_path)
    whole = trainers_answer(path, [user("w1")])
    stop = f" {whole.split()[6][:2]}"  # w and a digit: the stop string can end inside of a word
    stops = StopStrings([stop], TOKENIZER)
    keep_endings(Endings([0], stops, None), model)
    one = speaker(saved(model, tmp_path))
    model, keys = load_policy(path), noise_keys(0, 0, [0])
    rollout = Sampler(model, model.dtype, 2).sample([one.encode("w1")], keys, [0], 12, 0.0, 0, stops)
    answer = one.answer("w1")
    said = capsys.readouterr()
    shown = said.out.removesuffix("\n")
    assert shown.startswith(answer + stop) and whole.startswith(shown) and "cut after" not in said.err
    assert answer == response_texts(rollout, TOKENIZER, stops)[0] == whole.split(stop)[0] != ""


def test_stop_strings_and_special_tokens_can_be_given(out, tmp_path, capsys):
    path = out / "ppo_actor_32.pth"
    whole = trainers_answer(path, [user("w1")])
    words = whole.split()
    for given in ([words[2]], [words[2], words[3]], [f"{words[1]} {words[2]}"]):
        one = speaker(path, stop=given)
        assert one.answer("w1") == whole[: min(whole.find(text) for text in given)]
    assert "cut after" not in capsys.readouterr().err
    one = speaker(path, stop=["</s>"])
    assert (one.endings.stops, one.endings.eos) == (None, [0])
    model = talker(TOKENIZER)
    model.generation_config.stop_strings = "w1 w2"  # a checkpoint may have one text
    assert speaker(saved(model, tmp_path)).endings.stops.texts == ["w1 w2"]


def test_a_special_token_of_the_users_is_shown_and_kept(tmp_path, monkeypatch, capsys):
    """<|eot|> is an EOS of the generation config; the tokenizer does not know what it is for."""
    tokenizer = word_tokenizer(WORDS, chat=True)
    tokenizer.add_tokens(["<|eot|>", "[ANS]"], special_tokens=True)
    ids = tokenizer.get_vocab()
    model = talker(tokenizer)
    model.generation_config.eos_token_id = ids["<|eot|>"]
    one = speaker(saved(model, tmp_path, tokenizer))
    said = torch.tensor([ids[name] for name in ("w1", "[ANS]", "w2", "<|eot|>")])

    def generate(prompt, streamer, **more):
        for part in (prompt, said[:2], said[2:3], said[3:]):
            streamer.put(part)
        streamer.end()
        return torch.cat([prompt, said[None]], 1)

    monkeypatch.setattr(one.model, "generate", generate)
    assert one.answer("w3") == "w1 [ANS] w2"
    assert capsys.readouterr().out == "w1 [ANS] w2\n"


def test_sampling_is_from_the_whole_distribution(tmp_path, monkeypatch):
    """Whatever the model's generation config says, and without the top-k of 50 that transformers adds."""
    tokenizer = word_tokenizer([f"w{i}" for i in range(98)])
    model = tiny.tiny_llama(100, spread=3.0)
    settings = {"top_k": 1, "repetition_penalty": 9.0, "suppress_tokens": list(range(50))}
    model.generation_config.update(do_sample=True, **settings)
    one = speaker(saved(model, tmp_path, tokenizer), temperature=0.7, max_gen_len=1)
    generate, found = one.model.generate, []

    def noted(*given, **more):
        found.append(generate(*given, **more, return_dict_in_generate=True, output_scores=True))
        return found[-1].sequences

    monkeypatch.setattr(one.model, "generate", noted)
    answers = {one.answer("w3 w4") for _ in range(20)}
    assert len(answers) > 5  # drawn, and not the likeliest
    with torch.no_grad():
        logits = one.model(torch.tensor([[5, 6]])).logits[:, -1]
    assert all(torch.allclose(each.scores[0], logits / 0.7, atol=1e-5) for each in found)


def test_what_is_shown_is_the_text_of_the_answer_and_the_seed_decides(tmp_path, monkeypatch, capsys):
    """Random bytes, most of them no UTF-8."""
    model = save_policy_dir(tmp_path / "bytes", TOKENIZERS["byte level"]())
    one = speaker(model, temperature=1.0, max_gen_len=100)
    torch.manual_seed(0)
    for _ in range(3):
        answer = one.answer("ab")
        assert capsys.readouterr().out == answer + "\n" and answer.count("\ufffd") > 5
    shown = []
    for seed in (1, 1, 2):
        piped(model, ["ab"], monkeypatch, seed=seed, temperature=1.0, max_gen_len=100)
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] != shown[2]
