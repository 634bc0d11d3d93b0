"""train_sft.py and train_reward.py: losses as in plain transformers, results, resuming, bad input."""

import json
import math
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import tiny
import torch
import torch.nn.functional as F
from same_runs import same_metrics, same_weights
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import chat
from dataset import lm_dataset
from dataset.chat_template import conversation_ids
from dataset.demo import make_reward
from model.loading import load_policy, load_tokenizer
from model.model_minimind import MiniMindConfig, MiniMindForCausalLM
from model.saving import save_policy
from trainer import train_ppo, train_reward, train_sft
from trainer.compute import precision
from trainer.compute.batching import pad_right
from trainer.inputs import load_actor, load_trained_tokenizer, read_prompts
from trainer.rewards.reward_models import load_reward_model
from trainer.runs.distributed import World
from trainer.runs.optimizer_step import GradientSource

WORDS = list("abcdefgh")
ALONE = World(0, 1, torch.device("cpu"))
SIZES = {"device": "cpu", "dtype": "float32", "run_name": "r", "batch_size": 4, "max_steps": 6}
SIZES |= {"eval_size": 5, "save_interval": 2, "eval_interval": 4, "log_interval": 3, "learning_rate": 3e-3}
SIZES |= {"keep_checkpoints": 9}
MINI = {"hidden_size": 32, "num_hidden_layers": 1, "max_position_embeddings": 512}
SCRIPTS = {"sft": train_sft, "reward": train_reward}


def words(n, i=0):
    return " ".join(WORDS[(i + k) % 8] for k in range(n))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """{name: path} of a policy, demonstrations, pairs with margins, rated answers; lengths vary."""
    folder = tmp_path_factory.mktemp("files")
    demonstrations, pairs, rated = [], [], []
    for n in range(25):
        turns = [words(1 + n % 5, n), words(1 + n % 3, n + 2), words(2, n), words(1 + n % 4, n + 5)]
        demonstrations.append({"conversations": [{"content": text} for text in turns]})
        sides = {"chosen": words(1 + n % 4, n), "rejected": f"{words(1, n)} h {words(n % 3, n + 1)}".strip()}
        pairs.append({"prompt": words(1 + n % 6, n), **sides, "margin": 0.5 * (n % 3)})
        rated.append({"user_input": words(2, n), "completion": words(1 + n % 4, n), "score": n % 5 - 1.5})
    names = {"sft": demonstrations, "pairs": pairs, "rated": rated}
    found = {name: tiny.write_jsonl(folder / f"{name}.jsonl", records) for name, records in names.items()}
    tokenizer = tiny.word_tokenizer([*WORDS, "user", "assistant"], chat=True)
    found["model"] = tiny.save_policy_dir(folder / "policy", tokenizer, layers=2, spread=3.0)
    tokenizer.bos_token = "a"
    tokenizer.save_pretrained(folder / "marked")  # with a special token at which PPO does not end
    return found | {"marked": str(folder / "marked")}


def argv_of(files, kind, out_dir, **more):
    data = files[{"reward": "pairs", "demo": "pairs"}.get(kind, kind)]
    return tiny.flags(**{"model": files["model"], "data_path": data, "out_dir": out_dir, **SIZES, **more})


def build(files, kind, out_dir="/nowhere", **more):
    """The run as its script builds it, before its first step. kind "demo": make_reward.py's."""
    script = SCRIPTS["sft" if kind == "sft" else "reward"]
    args = script.parse_args(argv_of(files, kind, out_dir, **more))
    if kind == "sft":
        return train_sft.SftRun(args, ALONE)
    return (make_reward.DemoRun if kind == "demo" else train_reward.RewardRun)(args, ALONE)


def gradients_of(run, items, budget=4096):
    """A batch's loss and gradients, in micro-batches of ``budget`` tokens -> (means, {name: gradient})"""
    run.model.zero_grad()
    lengths = [run.tokens(x) for x in items]
    source = GradientSource(lengths, lambda rows: run.loss([items[i] for i in rows], run.loss_counts(items)))
    return run.updater.backward([source], budget).means(ALONE), gradients_in(run.model)


def gradients_in(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def close(left, right, tolerance=1e-6):
    assert left.keys() == right.keys()
    return all(torch.allclose(left[n], right[n], rtol=1e-4, atol=tolerance) for n in left)


def test_packed_loss_and_gradients_are_those_of_padded_plain_transformers(files):
    run = build(files, "sft")
    items = [run.data[i] for i in range(7)]
    assert len({len(ids) for ids, _ in items}) > 3
    means, gradients = gradients_of(run, items)

    plain = AutoModelForCausalLM.from_pretrained(files["model"], dtype=torch.float32)
    tokens, lengths = pad_right([ids for ids, _ in items])
    learned = pad_right([mask for _, mask in items])[0].bool()
    real = (torch.arange(tokens.shape[1]) < lengths[:, None]).long()
    loss = plain(tokens, attention_mask=real, labels=tokens.masked_fill(~learned, -100)).loss
    loss.backward()
    assert means["train/loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert close({name: p.grad for name, p in plain.named_parameters()}, gradients)


def scores_of(model, rows):
    rows = [torch.tensor(ids) for ids in rows]
    padded = pad_sequence(rows, batch_first=True, padding_value=model.config.pad_token_id)
    return model(padded, attention_mask=None).logits[:, 0]


@pytest.mark.parametrize("kind", ["reward", "demo"])
def test_pair_loss_and_gradients_are_those_of_padded_plain_transformers(files, kind, monkeypatch):
    """With margins; the demo's with its additional losses. Written out for one pair at a time."""
    assert make_reward.first_difference([5, 6, 7], [5, 7, 7]) == 1
    assert make_reward.first_difference([5, 6], [5, 6, 7]) == 1  # one begins the other
    for name, value in {"PARTING_COEF": 0.5, "LM_COEF": 0.7, "SCORE_PENALTY": 0.01}.items():
        monkeypatch.setattr(make_reward, name, value)
    run = build(files, kind)
    items = [run.data[i] for i in range(6)]
    assert {margin for *_, margin in items} == {0.0, 0.5, 1.0}
    means, gradients = gradients_of(run, items)
    plain = run.modules["model"]
    pairs, more, lm_tokens = 0.0, 0.0, run.loss_counts(items)[-1]
    for chosen, rejected, margin in items:
        c, r = scores_of(plain, [chosen, rejected])
        pairs = pairs + F.softplus(-(c - r - margin)) / 6
        if kind == "reward":
            continue
        part = next(i for i, (x, y) in enumerate(zip(chosen, rejected, strict=False)) if x != y)
        states = [plain.base_model(torch.tensor([ids])).last_hidden_state[0] for ids in (chosen, rejected)]
        at_c, at_r = (plain.score(x[part]).squeeze() for x in states)
        logits = run.language_head(states[0][part - 1 : -1])
        nll = F.cross_entropy(logits, torch.tensor(chosen[part:]), reduction="sum")
        more = more + (0.01 * (c**2 + r**2) + 0.5 * F.softplus(-(at_c - at_r))) / 6 + 0.7 * nll / lm_tokens
    assert means["train/loss"] == pytest.approx(pairs.item(), abs=1e-6)
    run.model.zero_grad()
    (pairs + more).backward()
    assert close(gradients_in(run.model), gradients)


def test_regression_by_hand(files):
    run = build(files, "rated")
    items = [run.data[i] for i in range(5)]
    scores = scores_of(run.model, [ids for ids, _ in items]).detach()
    given = torch.tensor([s for _, s in items])
    assert given.tolist() == [-1.5, -0.5, 0.5, 1.5, 2.5]
    error = (scores - given).square().mean().item()
    assert gradients_of(run, items)[0]["train/loss"] == pytest.approx(error, rel=1e-5)
    with torch.no_grad():
        found = run.summarise(run.loss(items, [5], "eval")[1].means(ALONE))
    assert found["eval/rmse"] == pytest.approx(error**0.5, rel=1e-5)
    correlation = torch.corrcoef(torch.stack([scores, given]))[0, 1].item()
    assert found["eval/correlation"] == pytest.approx(correlation, abs=1e-5)


@pytest.fixture(scope="module")
def experts(files, tmp_path_factory):
    """The files, with a MiniMind with experts as the policy."""
    tokenizer = load_tokenizer(files["model"])
    torch.manual_seed(0)
    config = MiniMindConfig(use_moe=True, router_aux_loss_coef=0.1, vocab_size=len(tokenizer), **MINI)
    path = tmp_path_factory.mktemp("experts") / "moe.pth"
    save_policy(MiniMindForCausalLM(config), tokenizer, path)
    return {**files, "model": str(path)}


@pytest.mark.parametrize("kind", ["sft, experts", "rated", "demo"])
def test_gradients_do_not_depend_on_the_cut(files, experts, kind):
    if kind == "sft, experts":
        files, kind = experts, "sft"
    run, cut = build(files, kind), build(files, kind, gradient_checkpointing=1)
    items = [run.data[i] for i in range(7)]
    means, whole = gradients_of(run, items)
    for other, budget in ((run, 1), (cut, 60)):
        again, pieces = gradients_of(other, items, budget)
        assert close(whole, pieces)
        assert again["train/loss"] == pytest.approx(means["train/loss"], abs=1e-6)


def test_a_mixture_of_experts_is_balanced_and_named_and_no_reward_model(experts, tmp_path):
    train_sft.main(argv_of(experts, "sft", tmp_path, max_steps=2))
    assert load_policy(tmp_path / "full_sft_32_moe.pth").config.use_moe
    assert tiny.read_jsonl(tmp_path / "r" / "metrics.jsonl")[-1]["train/balance_loss"] > 0
    run = build(experts, "sft")
    _, gradients = gradients_of(run, [run.data[i] for i in range(5)])
    assert gradients["model.layers.0.mlp.gate.weight"].abs().max() > 0
    says = "--model: no sequence classifier exists for small_lm_minimind"
    tiny.refused(says, train_reward.reward_from, load_policy(experts["model"]), run.tokenizer)


@pytest.fixture(scope="module")
def whole(files, tmp_path_factory):
    """Both stages, run to their end -> {"sft": out_dir, "reward": out_dir}"""
    outs = {}
    for kind, script in SCRIPTS.items():
        outs[kind] = tmp_path_factory.mktemp(kind)
        script.main(argv_of(files, kind, outs[kind]))
    return outs


def test_sft_learns_and_ppo_starts_from_it(files, whole):
    out = whole["sft"]
    evaluations = [m for m in tiny.read_jsonl(out / "r" / "metrics.jsonl") if "eval/loss" in m]
    assert [m["step"] for m in evaluations] == [0, 4, 6]
    assert evaluations[-1]["eval/loss"] < 0.9 * evaluations[0]["eval/loss"]
    assert evaluations[0]["eval/perplexity"] == pytest.approx(math.exp(evaluations[0]["eval/loss"]))
    state = torch.load(out / "full_sft_32.pth", weights_only=True)
    assert {tensor.dtype for tensor in state.values()} == {torch.float16}
    tuned = tiny.load_weights(out / "r", 6, "model")
    assert all(state[name].equal(x.half()) for name, x in tuned.items())
    plain = AutoModelForCausalLM.from_pretrained(out / "full_sft_32", dtype=torch.float32)
    more = {"hidden_size": 32, "reasoning": 0, "out_dir": out, "data_path": files["sft"]}
    args = train_ppo.parse_args(tiny.flags(**more, reward_fn="judge.py:score"))
    tokenizer = load_trained_tokenizer(args)
    prompts, _ = read_prompts(args, tokenizer)
    tokens = torch.tensor([prompts[0].prompt_ids])
    assert torch.equal(load_actor(args, tokenizer)(tokens).logits, plain(tokens).logits)
    assert AutoTokenizer.from_pretrained(out / "full_sft_32").get_vocab() == tokenizer.get_vocab()


def test_a_model_from_nothing(files, tmp_path):
    more = {"model": "", "tokenizer": files["model"], "num_hidden_layers": 1, "max_steps": 1}
    train_sft.main(argv_of(files, "sft", tmp_path, hidden_size=32, **more))
    config = load_policy(tmp_path / "full_sft_32.pth").config  # MiniMind 2's feed-forward, rope and tied head
    assert (config.intermediate_size, config.rope_parameters["rope_theta"]) == (128, 1e6)
    argv = argv_of(files, "sft", tmp_path, hidden_size=64, resume="auto", **more)
    tiny.refused("--hidden_size was 32 and is now 64", train_sft.main, argv)


def offset_in(out):
    return json.loads((out / "reward_32" / "config.json").read_text())["reward_offset"]


def test_a_reward_model_loads_in_plain_transformers_and_is_centred(files, whole):
    folder = whole["reward"] / "reward_32"
    given = {"dtype": torch.float32, "output_loading_info": True}
    plain, report = AutoModelForSequenceClassification.from_pretrained(folder, **given)
    assert not report["missing_keys"]
    assert (plain.config.num_labels, plain.config.pad_token_id) == (1, 0)
    reward_model = load_reward_model(str(folder), ALONE.device)
    records = tiny.read_jsonl(files["pairs"])
    pairs = [(record["prompt"], record["chosen"]) for record in records]
    rows = conversation_ids(AutoTokenizer.from_pretrained(folder), pairs)
    assert offset_in(whole["reward"]) != 0
    scores = scores_of(plain, rows)
    assert torch.allclose(scores - offset_in(whole["reward"]), reward_model(pairs), atol=1e-5)
    alone = torch.cat([plain(torch.tensor([row])).logits[:, 0] for row in rows])
    assert torch.allclose(alone, scores, atol=1e-5)
    held_out = [(r["prompt"], r[side]) for r in records[-5:] for side in ("chosen", "rejected")]
    scores = reward_model(held_out)
    assert scores.std() > 0.01
    assert scores.mean().item() == pytest.approx(0.0, abs=1e-3)  # it was found before weights became fp16
    assert len(list((whole["reward"] / "r" / "checkpoints").iterdir())) == 3


def test_ratings_from_a_dense_minimind(files, tmp_path, capsys):
    """transformers loads it as a Llama. Ratings are centred too, unless no records are held out."""
    tokenizer = load_tokenizer(files["model"])
    mini = MiniMindForCausalLM(MiniMindConfig(**MINI, vocab_size=len(tokenizer)))
    save_policy(mini, tokenizer, tmp_path / "mini.pth")
    start = {**files, "model": tmp_path / "mini.pth"}
    offsets = []
    for name, more in (("a", {}), ("b", {"eval_size": 0})):
        train_reward.main(argv_of(start, "rated", tmp_path / name, max_steps=1, **more))
        offsets.append(offset_in(tmp_path / name))
    assert offsets[0] != 0 == offsets[1]
    said = capsys.readouterr().out
    assert "parameters, llama\n" in said and f"centred  {offsets[0]:.3f} subtracted" in said


@pytest.mark.parametrize("kind", SCRIPTS)
def test_resumed_after_a_kill_equals_never_stopped_bit_for_bit(files, whole, tmp_path, kind):
    """Killed at its last step, before this step was saved."""
    run = shutil.copytree(whole[kind] / "r", tmp_path / "r")
    shutil.rmtree(run / "checkpoints" / "step_6")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:-1]))
    argv = argv_of(files, kind, tmp_path, resume="auto")
    other = {"sft": "reward", "reward": "sft"}[kind]
    says = f"is a run of train_{kind}.py; name one of train_{other}.py"
    tiny.refused(says, SCRIPTS[other].main, argv_of(files, other, tmp_path, resume="auto"))
    others = tiny.write_jsonl(tmp_path / "others.jsonl", tiny.read_jsonl(argv[3])[::-1])
    says = r"--data_path .* does not hold what the run began with"
    tiny.refused(says, SCRIPTS[kind].main, [*argv, "--data_path", others])
    SCRIPTS[kind].main(argv)
    tiny.same_run(whole[kind] / "r", run, 6)
    result = {"sft": "full_sft_32", "reward": "reward_32"}[kind]
    for file in (whole[kind] / result).iterdir():
        assert file.read_bytes() == (tmp_path / result / file.name).read_bytes(), file.name


def test_two_processes_with_half_the_batch_equal_one(files, whole, tmp_path):
    for kind in SCRIPTS:
        argv = argv_of(files, kind, tmp_path / kind, batch_size=2)
        script = tiny.ROOT / "trainer" / f"train_{kind}.py"
        for process in tiny.launch_two(argv, script=script):
            tiny.finish(process)
        one, two = whole[kind] / "r", tmp_path / kind / "r"
        same_weights(one, two, 6, ("model",))
        same = {"train/loss", "train/grad_norm", "eval/loss", "eval/accuracy"}
        same_metrics(one, two, same, rel=1e-4, abs=1e-5)
    assert offset_in(whole["reward"]) == pytest.approx(offset_in(tmp_path / "reward"), abs=1e-5)


def test_a_bad_line_found_late_loses_nothing(files, tmp_path, monkeypatch):
    monkeypatch.setattr(lm_dataset, "READ_WHOLE", 5)
    monkeypatch.setattr(lm_dataset, "SAMPLE", 2)
    lines = Path(files["sft"]).read_text().splitlines()
    lines[9] = "{"
    (tmp_path / "bad.jsonl").write_text("\n".join(lines))
    argv = argv_of(files | {"sft": tmp_path / "bad.jsonl"}, "sft", tmp_path, run_name="r", eval_size=2)
    tiny.refused(r"bad\.jsonl:10: not JSON", train_sft.main, [*argv, "--epochs", "9"])
    done = tiny.read_jsonl(tmp_path / "r" / "metrics.jsonl")[-1]["step"]
    assert (tmp_path / "r" / "checkpoints" / f"step_{done}").is_dir()


def test_a_step_that_is_not_finite_is_no_step_and_the_scale_of_fp16_is_kept(files, tmp_path, monkeypatch):
    loss, bad = train_sft.SftRun.loss, {4}

    def spoiled(run, items, totals, kind="train"):
        total, metrics = loss(run, items, totals, kind)
        return (total * math.nan if run.progress.step in bad else total), metrics

    monkeypatch.setattr(train_sft.SftRun, "loss", spoiled)
    monkeypatch.setattr(precision, "INTERVAL", 2)
    monkeypatch.setattr(precision, "FIRST_SCALE", 2.0**10)  # doubled twice, it still is no overflow
    argv = argv_of(files, "sft", tmp_path, dtype="float16", save_interval=1, hf_dir=tmp_path / "hf")
    train_sft.main(argv)
    before = shutil.copytree(tmp_path / "r", tmp_path / "before")
    train_sft.main([*argv, "--resume", str(tmp_path / "r" / "checkpoints" / "step_3")])
    tiny.same_run(before, tmp_path / "r", 6)
    for folder in (before, tmp_path / "r"):
        lines = tiny.read_jsonl(folder / "metrics.jsonl")[1:]
        assert [m["perf/loss_scale"] / 2**10 for m in lines] == [1, 1, 2, 2, 4, 2]
        assert [m["train/skipped_steps"] for m in lines] == [0, 0, 0, 0, 1, 0]
    one, other = (tiny.load_weights(before, step, "model") for step in (4, 5))
    assert all(one[name].equal(other[name]) for name in one)
    bad |= set(range(6))
    with pytest.raises(SystemExit, match="5 optimizer steps in a row were not finite"):
        train_sft.main(argv_of(files, "sft", tmp_path, run_name="bad"))


def test_the_commands_that_the_stages_print_run_as_they_stand(files, tmp_path, capsys, monkeypatch):
    """From a model without a tokenizer, with a template of the flags, relative paths, a space in one."""

    def said(word):
        lines = capsys.readouterr().out.splitlines()
        return shlex.split(next(line for line in lines if line.startswith(word)).removeprefix(word))

    monkeypatch.chdir(tmp_path)
    shutil.copytree(files["model"], "start", ignore=shutil.ignore_patterns("tokenizer*", "chat_template*"))
    shutil.copyfile(files["pairs"], "my pairs.jsonl")
    more = {"tokenizer": files["model"], "prompt_template": "b {prompt} c", "system_prompt": "a"}
    more |= {"max_steps": 1, "run_name": ""}
    train_sft.main(argv_of(files, "sft", "out", **more, model="start"))
    python, script, *argv = said("talk ")
    assert (python, script) == (tiny.PYTHON, str(tiny.ROOT / "chat.py"))
    chat.main([*argv, "--prompt", "a", "--max_gen_len", "2", "--device", "cpu"])
    train_reward.main(argv_of(files | {"pairs": "my pairs.jsonl"}, "reward", "out", **more, model="start"))
    python, script, *argv = said("use ")
    assert (python, script) == (tiny.PYTHON, str(tiny.ROOT / "trainer" / "train_ppo.py"))
    given = dict(zip(argv[::2], argv[1::2], strict=True))
    assert {name: given[f"--{name}"] for name in ("kl_coef", "max_gen_len", "out_dir")} == {
        "kl_coef": "0.2",
        "max_gen_len": "32",
        "out_dir": str(tmp_path / "out"),
    }
    small = {"batch_size": 4, "max_steps": 1, "out_dir": "ppo", "device": "cpu", "dtype": "float32"}
    train_ppo.main([*argv, *tiny.flags(**small)])
    assert json.loads(Path("ppo/run_1/config.json").read_text())["system_prompt"] == "a"
    template = load_tokenizer("ppo/ppo_actor_32").chat_template
    assert template == load_tokenizer("out/reward_32").chat_template
    assert template != load_tokenizer(files["model"]).chat_template


def test_the_flags_of_make_demo_assets_exist():
    command = ["make", "-n", "demo-assets"]
    done = subprocess.run(command, cwd=tiny.ROOT, capture_output=True, text=True, check=True)
    lines = done.stdout.replace("\\\n", " ").splitlines()
    commands = [line.split()[1:] for line in lines if "trainer/" in line or "demo/make" in line]
    assert len(commands) == 6
    for script, *argv in commands:
        assert (tiny.ROOT / script).is_file()
        if "--dtype" in argv:
            args = (train_sft if "sft" in script else train_reward).parse_args(argv)
            made = args.data_path == "out/demo_tools/sft.jsonl"  # by make_tools.py, one of the commands
            assert made or Path(args.data_path).is_file()


ENDLESS = "{% for m in messages %}{{ m['content'] + ' a ' }}{% endfor %}"
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "x"}
SCORED = {"user_input": "a", "completion": "b", "score": "x"}


@pytest.mark.parametrize(
    ("kind", "more", "says"),
    [
        ("sft", {"data_path": "nowhere.jsonl"}, "nowhere.jsonl"),
        ("sft", {"data_path": ""}, "--data_path"),
        ("sft", {"eval_size": 25}, "--eval_size 25: leaves nothing to train on"),
        ("sft", {"max_seq_len": 5}, "--max_seq_len"),
        ("sft", {"max_seq_len": 500}, "--max_seq_len 500: .* has 256 positions"),
        ("sft", {"hidden_size": 64}, "--hidden_size 64: .* has 32"),
        ("sft", {"model": "", "hidden_size": 100}, "--hidden_size 100: must be a multiple of 16"),
        ("sft", {"model": "/nowhere.pth"}, "/nowhere.pth: no such file"),
        ("sft", {"kl_coef": 1}, "kl_coef"),
        ("sft", {"hf_dir": "/"}, "/: is there, and nothing is overwritten"),
        ("sft", {"hf_dir": "{out}/sft_1", "run_name": ""}, "/sft_1: is a run folder, .* --hf_dir"),
        ("sft", {"hf_dir": "{out}/a", "run_name": "full_sft_32"}, "/full_sft_32: is a run folder"),
        ("reward", {"run_name": "reward_32"}, "/reward_32: is a run folder, .* change --run_name"),
        (
            "sft",
            {"prompt_template": ENDLESS, "tokenizer": "{marked}"},
            "sft.jsonl:1: .*does not end answers with the tokenizer's EOS",
        ),
        ("reward", {"data_path": "{sft}"}, "sft.jsonl:1: "),
        ("reward", {"data_path": PAIR}, 'x.jsonl:1: "margin" must be a number'),
        ("reward", {"data_path": SCORED}, 'x.jsonl:1: "score" must be a number'),
        ("reward", {"eval_data_path": "{rated}", "eval_size": 0}, "--eval_data_path .* give the same kind"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(files, tmp_path, kind, more, says):
    for name, given in more.items():
        if isinstance(given, dict):
            more = {name: tiny.write_jsonl(tmp_path / "x.jsonl", [given])}
        elif isinstance(given, str) and given != ENDLESS:
            more = {**more, name: given.format(**files, out=tmp_path / "out")}
    tiny.refused(says, SCRIPTS[kind].main, argv_of(files, kind, tmp_path / "out", **more))
    assert not (tmp_path / "out").exists()


def test_answers_end_where_those_of_the_policy_do(files, tmp_path):
    run = build(files, "sft", prompt_template=ENDLESS)
    for data in (run.data, run.held_out):
        assert data.ends == [0]
        assert all((ids[-1], mask[-1]) == (0, 1) for ids, mask in data)
    note = f"note     {files['sft']}: the chat template ends no answer; </s> is put behind the last one"
    assert run.about().count(note) == 1


def test_a_result_never_replaces_its_own_start_nor_a_new_model_a_file_that_is_there(files, tmp_path):
    """--hidden_size names a start in train_ppo.py, a new model in train_sft.py: easily confused."""
    start = shutil.copytree(files["model"], tmp_path / "full_sft_32")
    argv = argv_of(files, "sft", tmp_path, model=start)
    tiny.refused("this run would write its result there", train_sft.main, argv)
    path = tmp_path / "new" / "full_sft_32.pth"
    path.parent.mkdir()
    path.write_bytes(b"mine")
    more = {"model": "", "tokenizer": files["model"], "hidden_size": 32, "num_hidden_layers": 1}
    argv = argv_of(files, "sft", path.parent, **more)
    tiny.refused(r"--hidden_size 32: makes a new model, .*full_sft_32.pth", train_sft.main, argv)
    assert path.read_bytes() == b"mine" and list(path.parent.iterdir()) == [path]
