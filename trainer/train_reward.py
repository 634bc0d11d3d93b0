"""Stage 2, the reward model: a language model with a score head learns which answers people prefer.

    for each batch of pairs (chosen, rejected), packed one behind the other, or of answers with scores:
        score = one number a conversation, read at its last token
        loss = -log sigmoid(score chosen - score rejected - margin)     # Llama 2, arXiv:2307.09288, eq. 2
          or   (score - given score)^2                                  # records with a "score"
        backward, clip the gradient, AdamW step                         # supervised.py
    subtract the mean score of the reference's answers to held-out prompts              # reward_offset.py

The reference is by default the policy that the reward model starts from. If PPO will start from another
policy, name that one with ``--reference``.

    python trainer/train_reward.py                                       # from the demo's policy and pairs
    python trainer/train_reward.py --model PATH --data_path pairs.jsonl  # from a model you have
    torchrun --nproc_per_node 2 trainer/train_reward.py …                # two GPUs or processes

It writes ``<out_dir>/reward_<hidden_size>/``, which AutoModelForSequenceClassification loads with one label
and ``train_ppo.py --reward_model`` takes. Stopping, resuming and faults: docs/reliability.md.
"""

import copy
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from errors import InputError, run_script
from trainer.compute.threads import set_up_threads
from trainer.flags import MANY, FlagParser, add_stage_flags, complete_output_flags, path


def flag_parser():
    """All flags: this stage's here, the others in flags.py."""
    p = FlagParser(description=__doc__.split("\n\n")[0])
    add = p.add_argument
    p.group("model (without --model and --hidden_size: the demo's policy and pairs)")
    add("--model", default="", type=path, may_change=True, help="a .pth, a directory or a hub name")
    add("--tokenizer", default="", type=path, may_change=True, help="directory or hub name; default: model's")
    add("--hidden_size", default=0, at_least=0, at_most=MANY, may_change=True, help="out/full_sft_512.pth")
    add("--num_hidden_layers", default=0, at_least=0, at_most=MANY, may_change=True, help="checked if given")
    add("--use_moe", default=0, choices=[0, 1], may_change=True, help="1: start from the _moe checkpoint")
    add("--trust_remote_code", action="store_true", may_change=True, help="run code that a model brings")
    p.group("what only the demo's tiny model needs (Makefile)")
    add("--extra_layers", default=0, at_least=0, at_most=64, help="new layers on top of the model's")
    add("--parting_coef", default=0.0, at_least=0, help="pair loss where answers first differ")
    add("--lm_coef", default=0.0, at_least=0, help="next-token loss from there on")
    add("--score_penalty", default=0.0, at_least=0, help="weight of squared scores")
    p.group("centring: the mean score of the reference's answers is subtracted")
    add("--reference", default="", type=path, may_change=True, help="a policy; default: --model")
    add("--reference_samples", default=512, at_least=0, at_most=MANY, help="of its answers; 0: no centring")
    add("--max_gen_len", default=64, at_least=1, at_most=MANY, help="longest of its answers in tokens")
    p.group("data")
    add("--data_path", default="", type=path, may_change=True, help="pairs, or answers with scores")
    add("--eval_data_path", default="", type=path, may_change=True, help="held-out records of the same kind")
    add("--chosen_key", default="", help="key of the better answer of a pair; default: chosen")
    add("--rejected_key", default="", help="key of the worse answer; default: rejected")
    add_stage_flags(p)
    return p


if __name__ == "__main__":  # before the imports below, which take seconds: help and wrong flags
    set_up_threads()  # OpenMP reads the environment when torch is imported
    run_script(flag_parser().parse_args)

import torch
import torch.nn.functional as F

from dataset.keys import Keys
from dataset.lm_dataset import reward_dataset
from model.classifier import reward_from
from model.half_precision import fp32_head
from model.loading import load_policy, tokenizer_source
from trainer import supervised
from trainer.compute.balance_loss import BalanceLoss
from trainer.compute.batching import pad_right, send
from trainer.compute.layout import Layout
from trainer.compute.logprobs import token_logprobs
from trainer.compute.packing import packed_states, take_rows
from trainer.compute.precision import autocast
from trainer.inputs import DEMO, check_positions, load_trained_tokenizer
from trainer.policy_checks import check_policy
from trainer.reward_offset import load_reference, make_reference, write_centred
from trainer.rewards.reward_models import score_places
from trainer.runs import displays
from trainer.runs.commands import command_line, full_path
from trainer.runs.metrics import Metrics

SAME_IN_PPO = ("prompt_key", "answer_key", "max_seq_len", "max_gen_len")  # flags that mean the same there
DEMO_DATA, DEMO_HELD_OUT = (ROOT / f"dataset/demo/preferences{end}.jsonl" for end in ("", "_eval"))


def parse_args(argv=None):
    args = flag_parser().parse_args(argv)
    complete_output_flags(args)
    if not args.model and (args.hidden_size or args.use_moe):
        args.model = str(Path(args.out_dir, f"full_sft_{args.hidden_size or 512}{'_moe' * args.use_moe}.pth"))
    if not args.model:
        args.model = str(DEMO["model"])
        if not args.data_path:
            args.data_path = str(DEMO_DATA)
            args.eval_data_path = args.eval_data_path or str(DEMO_HELD_OUT)
    if not args.data_path:
        raise InputError("--data_path: name the file with the pairs, or with the answers and scores")
    return args


# ------------------------------------------------------------------------------------- losses: pure functions


def pair_loss(chosen, rejected, margin):
    """Scores [B] and margins [B] -> sum of -log sigmoid(chosen - rejected - margin). Llama 2, eq. 2."""
    return -F.logsigmoid(chosen - rejected - margin).sum()


def first_difference(chosen, rejected):
    """The first place at which two lists of ids differ; if there is none, the last of the shorter list."""
    shorter = min(len(chosen), len(rejected))
    return next((i for i in range(shorter) if chosen[i] != rejected[i]), shorter - 1)


# ------------------------------------------------------------------------------------------------- the runs


class Outputs(NamedTuple):
    """The model's outputs for B conversations, packed, of N tokens in all."""

    scores: torch.Tensor  # [B] fp32
    states: torch.Tensor  # [N, H] the last hidden states
    starts: list  # of B + 1 ints: each conversation's first place among the N, and the end
    balance: torch.Tensor  # the balance loss of a mixture of experts


class RewardRun(supervised.SupervisedRun):
    """What runs on pairs and on rated answers share. See ``supervised.SupervisedRun``."""

    script, rate = "train_reward.py", "reward"
    result_path = None  # the result is written at the end

    def __init__(self, args, world, tokenizer, modules, data, held_out, reference):
        super().__init__(args, flag_parser().flags, world, tokenizer, modules, data, held_out)
        self.reference, self.balance = reference, BalanceLoss(self.model)
        self.hf_dir = Path(args.hf_dir or Path(args.out_dir) / f"reward_{self.model.config.hidden_size}")
        if self.hf_dir.resolve() == Path(args.model).resolve():
            raise InputError(f"--model {args.model}: the result would be written there; copy it elsewhere")

    @property
    def result_file(self):
        return self.hf_dir / "config.json"

    def fingerprints(self):
        found = super().fingerprints()
        return found | ({"reference": self.reference.fingerprint()} if self.reference else {})

    def outputs(self, conversations):
        """B lists of ids -> ``Outputs``."""
        tokens, lengths = pad_right(conversations, self.world.device)
        layout = Layout(map(len, conversations))
        with autocast(tokens.device, self.dtype):
            output = packed_states(self.model.base_model, tokens, layout, **self.balance.extra)
        states = output.last_hidden_state
        scores = self.head(states[score_places(tokens, lengths, self.model.config.pad_token_id)])
        return Outputs(scores, states, layout.starts.tolist(), self.balance(output, lengths))

    def head(self, states):
        """States [B, H] -> scores [B], in fp32 whatever the mixed precision."""
        return fp32_head(self.model.score, states).squeeze(-1)

    def numbers(self, values, dtype=torch.float32):
        return send(torch.tensor(values, dtype=dtype), self.world.device)

    def save_result(self):
        """Do nothing: the result is written at the end, because its zero is not known before."""

    def complete(self):
        self.centre = write_centred(self, self.hf_dir, self.reference)
        self.result_path = self.hf_dir

    def results(self):
        line = f"model    {self.hf_dir}\nuse      {self.use()}"
        if self.reference:
            (mean, spread), count = self.centre, len(self.reference.prompts)
            line += f"\ncentred  {mean:.3f} subtracted, the mean of {count} answers of the reference"
            line += f" (spread {spread:.3f})"
        return line

    def use(self) -> str:
        """The command for PPO, and what to change in it. The result's tokenizer has what the flags have made
        of the model's: its chat template and system message."""
        args = self.args
        result = self.hf_dir.resolve()
        words = ["--model", full_path(args.model), "--tokenizer", result, "--reward_model", result]
        if args.trust_remote_code:
            words.append("--trust_remote_code")
        for name in SAME_IN_PPO:
            if (value := getattr(args, name)) != self.flags[name].default:
                words += [f"--{name}", value]
        prompts = full_path(args.data_path)
        note = "with the prompts of this file; --data_path names others"
        if args.chosen_key or args.rejected_key:  # PPO does not read pairs under keys of their own
            prompts = "prompts.jsonl"
            note = "put the file with your prompts in place of prompts.jsonl"
        command = command_line("trainer/train_ppo.py", *words, "--data_path", prompts)
        return f"{command}\n         ({note})"


class PairRun(RewardRun):
    """A run on pairs. Items: (chosen ids, rejected ids, margin)."""

    display = displays.PAIRS

    def tokens(self, item):
        return len(item[0]) + len(item[1])

    def loss_counts(self, items):
        """[pairs, tokens of the chosen answers from where they differ from the rejected ones]."""
        return [len(items), sum(len(chosen) - start for chosen, start in self.from_first_difference(items))]

    def from_first_difference(self, items):
        """[(chosen ids, the place from which the next-token loss counts)]; at least 1: nothing predicts 0."""
        if not self.args.lm_coef:
            return []
        return [(chosen, max(first_difference(chosen, rejected), 1)) for chosen, rejected, _ in items]

    def score_items(self, items, prefix):
        """-> (summed pair loss, ``Outputs`` of all chosen and then all rejected answers, Metrics)."""
        outputs, metrics = self.outputs([x[0] for x in items] + [x[1] for x in items]), Metrics()
        chosen, rejected = outputs.scores.chunk(2)
        loss = pair_loss(chosen, rejected, self.numbers([x[2] for x in items]))
        parts = {"loss": loss, "accuracy": (chosen > rejected).sum(), "distance": (chosen - rejected).sum()}
        metrics.add_all({f"{prefix}/{name}": x for name, x in parts.items()}, len(items))
        return loss, outputs, metrics

    def loss(self, items, totals):
        args, (pairs, language_tokens) = self.args, totals
        loss, outputs, metrics = self.score_items(items, "train")
        if self.balance.weight:
            metrics.add("train/balance_loss", outputs.balance, 2 * len(items))
        total = (loss + args.score_penalty * outputs.scores.square().sum() + outputs.balance / 2) / pairs
        if args.parting_coef:  # points at the first difference; the score at the end would have to find it
            places = [a + first_difference(*x[:2]) for a, x in zip(outputs.starts, items * 2, strict=False)]
            part = pair_loss(*self.head(outputs.states[self.numbers(places, torch.int64)]).chunk(2), 0.0)
            metrics.add("train/parting_loss", part, len(items))
            total = total + args.parting_coef * part / pairs
        if args.lm_coef and language_tokens:
            nll = self.language_nll(items, outputs)
            metrics.add("train/lm_loss", nll.sum(), len(nll))
            total = total + args.lm_coef * nll.sum() / language_tokens
        return total, metrics

    def language_nll(self, items, outputs):
        """-log p [N] of the N tokens of the chosen answers, each from where it differs from the rejected."""
        places, targets = [], []
        for (chosen, start), first in zip(self.from_first_difference(items), outputs.starts, strict=False):
            places += range(first + start - 1, first + len(chosen) - 1)
            targets += chosen[start:]
        places, targets = (self.numbers(x, torch.int64) for x in (places, targets))
        with autocast(places.device, self.dtype):
            states, head = take_rows(outputs.states, places), self.modules["lm_head"]
            return -token_logprobs(head, states, targets, 1.0)[0]

    def measure(self, items):
        *_, metrics = self.score_items(items, "eval")
        return metrics


class RatingRun(RewardRun):
    """A run on rated answers. Items: (conversation ids, given score)."""

    display = displays.RATINGS

    def tokens(self, item):
        return len(item[0])

    def loss_counts(self, items):
        return [len(items)]

    def score_items(self, items):
        """-> (scores [B], given scores [B], balance loss)."""
        outputs = self.outputs([ids for ids, _ in items])
        return outputs.scores, self.numbers([score for _, score in items]), outputs.balance

    def loss(self, items, totals):
        (total,), metrics, (scores, given, balance) = totals, Metrics(), self.score_items(items)
        error = (scores - given).square().sum()
        metrics.add("train/loss", error, len(items))
        return (error + balance) / total, metrics

    def measure(self, items):
        metrics, (x, y, _) = Metrics(), self.score_items(items)
        x, y = x.double(), y.double()
        sums = {"loss": (x - y).square(), "x": x, "y": y, "xx": x * x, "yy": y * y, "xy": x * y}
        metrics.add_all({f"eval/{name}": values.sum() for name, values in sums.items()}, len(items))
        return metrics

    def summarise(self, means):
        """-> mean squared error, its root, Pearson's correlation (0 if either score never varies)."""
        loss, x, y, xx, yy, xy = (means[f"eval/{name}"] for name in ("loss", "x", "y", "xx", "yy", "xy"))
        spread = max(xx - x * x, 0.0) * max(yy - y * y, 0.0)
        correlation = (xy - x * y) / spread**0.5 if spread > 1e-24 else 0.0
        return {"eval/loss": loss, "eval/rmse": loss**0.5, "eval/correlation": correlation}


def build(args, world):
    """Flags -> the run, with all inputs checked. Raises InputError."""
    policy = load_policy(args.model, args.trust_remote_code)
    tokenizer = load_trained_tokenizer(args, args.tokenizer or tokenizer_source(args.model))
    check_policy(args, policy, tokenizer)
    check_positions(args, policy)
    keys = Keys(args.prompt_key, args.answer_key, args.chosen_key, args.rejected_key)
    data, held_out = supervised.split_records(
        args, lambda path: reward_dataset(path, tokenizer, args.max_seq_len, args.system_prompt, keys)
    )
    kinds = {len(part[0]) for part in (data, held_out) if part}  # 3 for a pair, 2 for a rated answer
    if len(kinds) > 1:
        raise InputError(
            f"--eval_data_path {args.eval_data_path}: one file has pairs, one has scores; give the same kind"
        )
    pairs = kinds == {3}
    if not pairs and (args.parting_coef or args.lm_coef or args.score_penalty):
        raise InputError("--parting_coef, --lm_coef, --score_penalty: are only for pairs; leave them out")
    torch.manual_seed(args.seed)
    modules = {"model": reward_from(policy, tokenizer, args.extra_layers)}
    if args.lm_coef:
        modules["lm_head"] = head = copy.deepcopy(policy.get_output_embeddings())
        if policy.config.tie_word_embeddings:
            head.weight = modules["model"].get_input_embeddings().weight
    reference = None
    if args.reference_samples:
        speaker = load_reference(args) if args.reference else (policy, tokenizer)
        reference = make_reference(*speaker, held_out or data, args.reference_samples, args.max_gen_len)
    kind = PairRun if pairs else RatingRun
    run = kind(args, world, tokenizer, modules, data, held_out, reference)
    run.model_type = policy.config.model_type  # a MiniMind, of which the classifier is a Llama or Qwen3
    return run


def main(argv=None):
    args = parse_args(argv)
    supervised.run_stage(build, args, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    run_script(main)
