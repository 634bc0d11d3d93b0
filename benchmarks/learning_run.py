"""One run of learning.py, in a process of its own: this trainer or one of TRL's on one task.

    python benchmarks/learning_run.py '{"who": "ours", "task": "b", …}'      # prints one line of JSON

Both trainers get the same policy, prompts, total score and sizes, compute in fp32, and are measured by the
same code at the same numbers of samples (``Judge``). The time of measuring is not counted.

What TRL's PPOTrainer needs to take any score of a text: its reward model is a network that reads token ids
and has a backbone and a score head. ``TextScores`` has these names, decodes the ids and asks the rewards. A
tokenizer whose pad token is its EOS would hide every EOS from TRL's losses; it gets another pad token.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
from common import ROOT
from learning_rewards import gold, spelling
from learning_tasks import AT_DEFAULTS, FEW_POINTS, POINTS, TASKS, exact_objective
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, TrainerCallback

from dataset.answers import is_correct
from model.loading import eos_ids, load_policy
from model.lora import frozen_copy
from trainer import losses, train_ppo
from trainer.advantages import AdvantageScale
from trainer.compute.scoring import PolicyScorer, score_all
from trainer.evaluation import EVAL_STEP
from trainer.generation.engine import Sampler
from trainer.generation.sampling import noise_keys
from trainer.generation.stops import response_texts
from trainer.inputs import load_actor, load_trained_tokenizer, read_prompts
from trainer.rewards.combine import Request, load_models, make_reward
from trainer.rewards.reward_function import load_reward_functions
from trainer.run import PpoRun

FIXED = {"dtype": "float32", "device": "cpu", "epochs": 10**6, "save_interval": 10**6, "log_interval": 1000}
RATES = ("learning_rate", "critic_learning_rate")


class Judge:
    """Measures a policy: held-out prompts, always the same noise, temperature 1; or exactly, in task (a).

    files: the folder of the task's files; inputs: (args, reward, tokenizer, prompts, held out, reference).
    """

    def __init__(self, task, folder, args, reward, tokenizer, prompts, held_out, reference):
        self.args, self.reward, self.tokenizer = args, reward, tokenizer
        self.exact = None
        if task == "a":
            self.exact = exact_objective(args, reward, tokenizer, prompts[0], reference)
            return
        self.prompts = [held_out[i] for i in range(len(held_out))]
        self.eos, self.reference = eos_ids(tokenizer, reference), PolicyScorer(reference)
        self.sampler = Sampler(reference)
        known = Path(folder) / "known_words.json"
        self.known = set(json.loads(known.read_text())) if known.exists() else None
        self.has_gold = task in "de"

    @torch.no_grad()
    def __call__(self, policy):
        """-> {"score", "kl" (nats a response), "length", and what else the task has}, means."""
        if self.exact:
            return self.exact(policy)
        ids = [p.prompt_ids for p in self.prompts]
        keys = noise_keys(0, EVAL_STEP, [p.index for p in self.prompts])
        rollout = self.sampler.load(policy).sample(ids, keys, self.eos, self.args.max_gen_len, 1.0)
        texts = response_texts(rollout, self.tokenizer)
        scorers = PolicyScorer(policy), self.reference
        log_p, log_q = (score_all(rollout, scorer)[0] for scorer in scorers)
        count = len(self.prompts)
        found = {
            "score": total_scores(self.reward, self.prompts, texts, rollout.finished.tolist()).mean().item(),
            "kl": losses.masked_sum(log_p - log_q, rollout.action_mask).item() / count,
            "length": rollout.response_len.float().mean().item(),
            "finished": rollout.finished.float().mean().item(),
        }
        if self.prompts[0].answer is not None:
            right = [is_correct(t, p.answer, True) for t, p in zip(texts, self.prompts, strict=True)]
            found["accuracy"] = sum(right) / count
        if self.has_gold:
            found["gold"] = sum(gold(None, texts, None)) / count
        if self.known:
            found["spelling"] = sum(spelling(self.known, texts)) / count
        return found


def total_scores(reward, prompts, texts, finished):
    """The sum of all parts of the reward [B], as PPO gets it."""
    return reward(Request(prompts, texts, finished, lengths=[]))["score"]


class Curve:
    """Points of a run: samples, seconds of CPU time (one thread) without measuring, what ``Judge`` says."""

    def __init__(self):
        self.points, self.seconds, self.running_since = [], 0.0, None

    def measure(self, judge, policy, samples, ema=None):
        """Stop the clock, measure, start it again. ema: an ``Ema`` of the policy, which is measured too."""
        now = time.process_time()
        self.seconds += now - (self.running_since or now)
        found = judge(policy)
        if ema and ema.beta:
            with ema.in_place():
                found |= {f"ema_{name}": x for name, x in judge(policy).items()}
        found = {name: round(x, 4) for name, x in found.items()}
        self.points.append({"samples": samples, "seconds": round(self.seconds, 2)} | found)
        self.running_since = time.process_time()


def flags_of(request, out):
    """The request -> flags of train_ppo.py. TRL's run reads the same, for policy, data and rewards."""
    task = TASKS[request["task"]]
    flags = {**task["flags"], **FIXED, **request["files"], "out_dir": out, "run_name": "run"}
    if request["who"] == "ours":
        flags |= task.get("ours", {}) | dict(zip(RATES, request["rates"], strict=True))
    elif (own := AT_DEFAULTS.get(request["who"])) is not None:
        flags |= own | dict(zip(RATES, request["rates"], strict=False))
    flags |= {"seed": request["seed"], **request.get("flags", {})}
    if "ptx_data_path" in flags:
        flags["ptx_data_path"] = ROOT / flags["ptx_data_path"]
    if flags.get("advantage", "gae") != "gae":
        known = train_ppo.flag_parser().flags
        flags = {name: x for name, x in flags.items() if "advantage" not in known[name].not_with}
    steps = request["samples"] // flags["batch_size"]
    points = FEW_POINTS if request["who"] in AT_DEFAULTS else POINTS
    return flags | {"max_steps": steps, "eval_interval": max(1, steps // points)}


def command_line(flags):
    return [text for name, value in flags.items() for text in (f"--{name}", str(value))]


# ------------------------------------------------------------------------------------------- this trainer


def run_ours(request, out):
    """The real command line; only its evaluation is replaced by the one that both trainers get."""
    curve, kept = Curve(), {}

    def evaluate(run):
        if not kept:
            reference = load_policy(run.args.model).eval()  # the run's own is rounded in bf16
            inputs = run.args, run.reward, run.tokenizer, run.data, run.held_out, reference
            kept["judge"] = Judge(request["task"], request["folder"], *inputs)
        curve.measure(kept["judge"], run.models.actor, run.progress.step * run.args.batch_size, run.ema)
        return {}, {}

    PpoRun.evaluate = evaluate
    if request.get("patch"):
        PATCHES[request["patch"]]()
    train_ppo.main(command_line(flags_of(request, out)))
    if request.get("flags", {}).get("filter_groups"):
        count_sampled(curve.points, Path(out) / "run" / "metrics.jsonl")
    return curve.points


def count_sampled(points, metrics):
    """Add to each point how many responses were sampled up to it, those of --filter_groups among them."""
    again = {}
    for line in metrics.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        again[record["step"]] = record.get("rollout/sampled_again", 0)
    size = points[-1]["samples"] / max(again)
    for point in points:
        more = sum(share for step, share in again.items() if step * size <= point["samples"])
        point["sampled"] = round(point["samples"] + size * more)


def no_whitening():
    """Advantages are centred and not divided by their standard deviation."""

    AdvantageScale.divisor = lambda *_: 1.0


def deal_anew():
    """Each PPO epoch cuts the batch into other minibatches, not only into the same ones in another order."""
    one_epoch = train_ppo.update

    def update(args, step, batch, *more):
        epochs, rows = args.ppo_epochs, len(batch.tokens)
        # The first rows are of all batches. ``number`` counts epochs, the warm-up batches.
        warm_up = 10**6 if step < args.critic_warmup_steps else 0
        one = args.completed(replay_batches=0, ppo_epochs=1, critic_warmup_steps=warm_up)
        for number in range(step * epochs, (step + 1) * epochs):
            order = torch.randperm(rows, generator=torch.Generator().manual_seed(number))
            one_epoch(one, number, batch.rows(order.tolist()), *more)

    train_ppo.update = update


def kl_in_deviations():
    """The KL of --advantage group counts in standard deviations of a prompt's answers, as in TRL."""
    whiten = AdvantageScale.whiten

    def divided_alone(scale, batch, *more, **how):
        whiten(scale, batch, *more, **how)
        batch.advantage_scale = 1.0

    AdvantageScale.whiten = divided_alone


def kl_of_trl():
    """The same, and the KL is k3 without a ratio. Its gradient is that of KL(reference || actor)."""

    def kl_loss(logprobs, mb):
        _, _, k3 = losses.kl_estimators(logprobs, mb.ref_logprobs)
        return losses.masked_sum(k3, mb.action_mask)

    kl_in_deviations()
    losses.kl_loss = kl_loss


PATCHES = {
    "no whitening": no_whitening,
    "deal anew": deal_anew,
    "KL in deviations": kl_in_deviations,
    "TRL's KL": kl_of_trl,
}


# --------------------------------------------------------------------------------------------------- TRL


class TextScores(torch.nn.Module):
    """Any score of texts with the names that TRL's ``get_reward`` looks for: a backbone, named by
    ``base_model_prefix``, whose last hidden state goes through ``score``. All positions of a row hold its
    score. Rows are a prompt, padded on the left to ``width``, and its response, padded on the right."""

    base_model_prefix = "read"

    def __init__(self, reward, tokenizer, prompts, width, eos):
        super().__init__()
        self.reward, self.tokenizer, self.width, self.eos = reward, tokenizer, width, eos
        self.prompts = {tuple(p.prompt_ids): p for p in prompts}

    def read(self, input_ids, attention_mask, **rest):
        prompts, responses = [], []
        for ids, real in zip(input_ids, attention_mask.bool(), strict=True):
            prompts.append(self.prompts[tuple(ids[: self.width][real[: self.width]].tolist())])
            responses.append(ids[self.width :][real[self.width :]].tolist())
        finished = [ids[-1:] == [self.eos] for ids in responses]
        ids = [ids[:-1] if ended else ids for ids, ended in zip(responses, finished, strict=True)]
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        scores = total_scores(self.reward, prompts, texts, finished)
        return SimpleNamespace(hidden_states=[scores[:, None, None].expand(*input_ids.shape, 1)])

    def score(self, states):
        return states


class Peer:
    """What a run of TRL is made of: policy, tokenizer, prompts, the reward, and what measures the policy."""

    def __init__(self, request, out):
        self.request, self.out = request, out
        self.args = args = train_ppo.parse_args(command_line(flags_of(request, out)))
        self.tokenizer = load_trained_tokenizer(args)
        prompts, held_out = read_prompts(args, self.tokenizer)
        actor = load_actor(args, self.tokenizer)
        self.reward = make_reward(args, load_reward_functions(args.reward_fn))
        load_models(self.reward, args, torch.device("cpu"), torch.float32)
        self.judged = frozen_copy(actor)  # gets the weights that are measured
        self.curve = Curve()
        self.judge = Judge(
            request["task"],
            request["folder"],
            args,
            self.reward,
            self.tokenizer,
            prompts,
            held_out,
            frozen_copy(actor),
        )
        (self.eos,) = eos_ids(self.tokenizer, actor)
        self.prompts = [prompts[i] for i in range(len(prompts))]

    def settings(self):
        """What the trainers' configurations have in common."""
        return {
            "output_dir": str(self.out),
            "temperature": 1.0,
            "learning_rate": self.request["rates"][0],
            "seed": self.request["seed"],
            "report_to": "none",
            "save_strategy": "no",
            "logging_strategy": "no",
            "gradient_checkpointing": False,
            "bf16": False,
            "use_cpu": True,
            "disable_tqdm": True,
        }

    def load(self):
        """The policy as TRL trains it."""
        return AutoModelForCausalLM.from_pretrained(self.args.model, dtype=torch.float32)

    def measuring(self, model, steps_per_batch):
        """A callback that measures the model. steps_per_batch: of TRL's count, for a batch of samples."""

        def measure(batches):
            self.judged.load_state_dict(model.state_dict())
            self.curve.measure(self.judge, self.judged, batches * self.args.batch_size)

        every, last = self.args.eval_interval, self.args.max_steps

        class Measure(TrainerCallback):
            def on_train_begin(self, *rest, **kwargs):
                measure(0)

            def on_step_end(self, _, state, *rest, **kwargs):
                batches, rest = divmod(state.global_step, steps_per_batch)
                if not rest and (batches % every == 0 or batches == last):
                    measure(batches)

        return Measure()


def run_trl(request, out):
    """TRL's PPOTrainer."""
    from datasets import Dataset
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    peer = Peer(request, out)
    args, tokenizer = peer.args, peer.tokenizer
    width = max(len(p.prompt_ids) for p in peer.prompts)
    if tokenizer.pad_token_id in (None, peer.eos):
        tokenizer.add_special_tokens({"pad_token": "<pad>"})  # TRL never gives it to a model
    pad = tokenizer.pad_token_id

    def collate(rows):
        ids = [row["input_ids"] for row in rows]
        return {"input_ids": torch.tensor([[pad] * (width - len(x)) + x for x in ids])}

    transformers.set_seed(request["seed"])  # numpy's too, which orders the minibatches
    model = peer.load()
    model.generation_config.pad_token_id = 0  # behind an EOS; read by nothing
    value_start = request["files"].get("reward_model", args.model)
    classifier = AutoModelForSequenceClassification.from_pretrained
    config = PPOConfig(
        per_device_train_batch_size=args.batch_size,
        num_mini_batches=args.batch_size // args.mini_batch_size,
        total_episodes=request["samples"],
        response_length=args.max_gen_len,
        local_rollout_forward_batch_size=args.batch_size,
        stop_token="eos",
        kl_coef=args.kl_coef,
        lam=request.get("flags", {}).get("lam", 0.95),
        num_sample_generations=0,
        **peer.settings(),
        **({"num_ppo_epochs": args.ppo_epochs} | TASKS[request["task"]].get("trl", {})),
    )
    PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=model,
        ref_model=peer.load(),
        reward_model=TextScores(peer.reward, tokenizer, peer.prompts, width, peer.eos),
        value_model=classifier(value_start, num_labels=1, dtype=torch.float32),
        train_dataset=Dataset.from_dict({"input_ids": [p.prompt_ids for p in peer.prompts]}),
        data_collator=collate,
        callbacks=[peer.measuring(model, 1)],
    ).train()
    return peer.curve.points


def completion_scores(reward, tokenizer, prompts, eos):
    """-> a reward function of TRL: the total score of each completion. The column ``place`` of the data says
    which of ``prompts`` it answers."""

    def score(completion_ids, place, **rest):
        finished = [ids[-1:] == [eos] for ids in completion_ids]
        ids = [ids[:-1] if ended else ids for ids, ended in zip(completion_ids, finished, strict=True)]
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return total_scores(reward, [prompts[i] for i in place], texts, finished).tolist()

    return score


def run_trl_without_critic(request, out):
    """TRL's GRPOTrainer or RLOOTrainer: its defaults but for sizes, rate, KL coefficient and fp32."""
    import trl
    from datasets import Dataset

    peer = Peer(request, out)
    args, name = peer.args, request["who"].upper()
    ids = {p.text: p.prompt_ids for p in peer.prompts}

    class Trainer(getattr(trl, f"{name}Trainer")):
        def _tokenize_prompts(self, prompts):  # the same ids as here
            return [list(ids[prompt]) for prompt in prompts], None, {}

    model = peer.load()
    per_batch = args.batch_size // args.mini_batch_size
    settings = {
        "per_device_train_batch_size": args.mini_batch_size,
        "steps_per_generation": per_batch,
        "num_iterations": args.ppo_epochs,
        "max_steps": args.max_steps * per_batch * args.ppo_epochs,
        "num_generations": 4,
        "max_completion_length": args.max_gen_len,
        "beta": args.kl_coef,
    }
    Trainer(
        args=getattr(trl, f"{name}Config")(**settings | peer.settings() | request["flags"]),
        processing_class=peer.tokenizer,
        model=model,
        reward_funcs=completion_scores(peer.reward, peer.tokenizer, peer.prompts, peer.eos),
        train_dataset=Dataset.from_dict(
            {"prompt": [p.text for p in peer.prompts], "place": list(range(len(peer.prompts)))}
        ),
        callbacks=[peer.measuring(model, per_batch * args.ppo_epochs)],
    ).train()
    return peer.curve.points


RUNS = {name: run_trl_without_critic if own is None else run_ours for name, own in AT_DEFAULTS.items()}
RUNS |= {"ours": run_ours, "trl": run_trl}


def main(request):
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as out:
        print("\n" + json.dumps(RUNS[request["who"]](request, Path(out))))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main(json.loads(sys.argv[1]))
