"""Stage 2, the reward model: a language model with a score in place of words learns what people prefer.

    for each batch of pairs (chosen, rejected), packed one behind the other, or of answers with scores:
        score = one number a conversation, read at its last token
        loss = -log sigmoid(score chosen - score rejected - margin)     # Llama 2, arXiv:2307.09288, eq. 2
          or   (score - given score)^2                                  # records with a "score"
        backward, clip the gradient, AdamW step
    the mean score of what the reference answers to held-out prompts becomes the zero        centring.py

The reference is the policy that the model began from; name the one that PPO will begin from with
``--reference`` where that is another.

    python trainer/train_reward.py                                       # from the demo's policy and pairs
    python trainer/train_reward.py --model PATH --data_path pairs.jsonl  # from a model you have
    torchrun --nproc_per_node 2 trainer/train_reward.py …                # two GPUs or processes

It writes ``<out_dir>/reward_<hidden_size>/``, which AutoModelForSequenceClassification loads with one label
and ``train_ppo.py --reward_model`` takes. What runs promise: docs/reliability.md.
"""

import copy
import os
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
import torch.nn.functional as F

from dataset.lm_dataset import reward_dataset
from dataset.templates import set_template
from errors import FlagParser, InputError, run_script
from model.classifier import reward_from
from model.loading import load_policy, load_tokenizer, tokenizer_source
from trainer import stage
from trainer.centring import make_reference, write_centred
from trainer.inputs import DEMO, check_flags, check_policy, check_positions
from trainer.logprobs import token_logprobs
from trainer.packing import packed_states, take_rows
from trainer.precision import autocast
from trainer.record import pad_right
from trainer.reward_models import score_places
from trainer.scoring import Balance
from trainer.stage_looks import PAIRS, RATINGS
from trainer.tracking import Metrics

DEMO_DATA = ROOT / "dataset/demo/preferences.jsonl"
DEMO_HELD_OUT = ROOT / "dataset/demo/preferences_eval.jsonl"


def parse_args(argv=None):
    """All flags: those of this stage here, the others in stage.py."""
    p = FlagParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    # model: without --model and --hidden_size, the demo's policy and pairs
    p.add_argument("--model", default="", help="a .pth, a directory or a hub name to start from")
    p.add_argument("--tokenizer", default="", help="directory or hub name; default: beside the model")
    p.add_argument("--hidden_size", type=int, default=0, help="start from out/full_sft_{hidden_size}.pth")
    p.add_argument("--num_hidden_layers", type=int, default=0, help="checked against the model if given")
    p.add_argument("--use_moe", type=int, default=0, choices=[0, 1], help="start from the _moe checkpoint")
    p.add_argument("--trust_remote_code", action="store_true", help="run code that a model brings along")
    # what the demo's tiny model needs besides; Makefile
    p.add_argument(
        "--extra_layers", type=int, default=0, help="new layers on top (Llama, Qwen and their like)"
    )
    p.add_argument("--parting_coef", type=float, default=0.0, help="pair loss where responses part, too")
    p.add_argument("--lm_coef", type=float, default=0.0, help="next-token loss on chosen from there on, too")
    p.add_argument("--score_penalty", type=float, default=0.0, help="weight of the squared scores of pairs")
    # the zero of the scores
    p.add_argument(
        "--reference", default="", help="policy whose answers score 0 on average; default: the start"
    )
    p.add_argument("--reference_samples", type=int, default=512, help="of its answers; 0: no centring")
    p.add_argument("--max_gen_len", type=int, default=64, help="longest of its answers in tokens")
    # data
    p.add_argument("--data_path", default="", help="pairs, or answers with scores: a file or a hub name")
    p.add_argument("--eval_data_path", default="", help="held-out records of the same kind")
    stage.add_flags(p)
    args = p.parse_args(argv)
    check_flags(args)
    args.out_dir = os.path.abspath(args.out_dir)
    if not args.model and (args.hidden_size or args.use_moe):
        name = f"full_sft_{args.hidden_size or 512}{'_moe' if args.use_moe else ''}.pth"
        args.model = str(Path(args.out_dir) / name)
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
    """Scores [B], margins [B] -> -log sigmoid(chosen - rejected - margin), summed. Llama 2, eq. 2."""
    return -F.logsigmoid(chosen - rejected - margin).sum()


def parting(chosen, rejected):
    """The first place at which two lists of ids differ; the last of the shorter one, if none does before."""
    shorter = min(len(chosen), len(rejected))
    return next((i for i in range(shorter) if chosen[i] != rejected[i]), shorter - 1)


# ------------------------------------------------------------------------------------------------- the stages


class Reading(NamedTuple):
    """What the model makes of B conversations of N tokens in all."""

    scores: torch.Tensor  # [B] fp32
    states: torch.Tensor  # [N, H]
    starts: torch.Tensor  # [B] the place of each one's first token among the N
    balance: torch.Tensor  # the balance loss of a mixture of experts


class RewardStage(stage.Stage):
    """What pairs and rated answers share. See ``stage.Stage``."""

    script = "train_reward.py"

    def __init__(self, args, world, tokenizer, modules, data, held_out, reference):
        super().__init__(args, world, tokenizer, modules, data, held_out)
        self.reference, self.balance = reference, Balance(self.model)
        self.hf_dir = Path(args.hf_dir or Path(args.out_dir) / f"reward_{self.model.config.hidden_size}")
        if self.hf_dir.resolve() == Path(args.model).resolve():
            raise InputError(
                f"--model {args.model}: this run would write its result there; copy it elsewhere"
            )

    def fingerprints(self):
        found = super().fingerprints()
        return found | ({"reference": self.reference.fingerprint()} if self.reference else {})

    def read(self, conversations):
        """Lists of ids -> ``Reading``."""
        tokens, lengths = pad_right(conversations, self.world.device)
        with autocast(tokens.device, self.dtype):
            output = packed_states(self.model.base_model, tokens, lengths, **self.balance.extra)
        places = score_places(tokens, lengths, self.model.config.pad_token_id)
        scores = self.head(output.last_hidden_state[places])
        starts = lengths.cumsum(0) - lengths
        return Reading(scores, output.last_hidden_state, starts, self.balance(output, lengths))

    def head(self, states):
        """States [B, H] -> scores [B], in fp32 whatever the mixed precision."""
        return self.model.score(states.float()).squeeze(-1)

    def numbers(self, values, dtype=torch.float32):
        return torch.tensor(values, dtype=dtype, device=self.world.device)

    def save_result(self):
        """Nothing yet: scores have no zero before the end."""

    def complete(self):
        self.centre = write_centred(self, self.hf_dir, self.reference)

    def results(self):
        line = f"model    {self.hf_dir}\nuse      python trainer/train_ppo.py --reward_model {self.hf_dir}"
        if self.reference:
            (mean, spread), count = self.centre, len(self.reference.prompts)
            line += f"\ncentred  {mean:.3f} taken off, the mean of {count} answers of the reference"
            line += f" (spread {spread:.3f})"
        return line


class PairStage(RewardStage):
    """Items: (chosen ids, rejected ids, margin)."""

    look = PAIRS

    def tokens(self, item):
        return len(item[0]) + len(item[1])

    def weigh(self, items):
        """[pairs, tokens of chosen from where they part on]"""
        return [len(items), sum(len(chosen) - start for chosen, start in self.from_parting(items))]

    def from_parting(self, items):
        """[(chosen ids, the place from which they are learned as language)]; nothing predicts place 0."""
        if not self.args.lm_coef:
            return []
        return [(chosen, max(parting(chosen, rejected), 1)) for chosen, rejected, _ in items]

    def judge(self, items, prefix):
        """-> (pair loss, ``Reading`` of all chosen and then all rejected answers, Metrics)"""
        reading, metrics = self.read([x[0] for x in items] + [x[1] for x in items]), Metrics()
        chosen, rejected = reading.scores.chunk(2)
        loss = pair_loss(chosen, rejected, self.numbers([x[2] for x in items]))
        parts = {"loss": loss, "accuracy": (chosen > rejected).sum(), "distance": (chosen - rejected).sum()}
        metrics.add_all({f"{prefix}/{name}": x for name, x in parts.items()}, len(items))
        return loss, reading, metrics

    def loss(self, items, totals):
        args, (pairs, language_tokens) = self.args, totals
        loss, reading, metrics = self.judge(items, "train")
        if self.balance.weight:
            metrics.add("train/balance_loss", reading.balance, 2 * len(items))
        total = (loss + args.score_penalty * reading.scores.square().sum() + reading.balance / 2) / pairs
        if args.parting_coef:  # a score at the very end would have to find the fault itself: here it is named
            places = self.numbers([parting(*x[:2]) for x in items], torch.int64).repeat(2) + reading.starts
            part = pair_loss(*self.head(reading.states[places]).chunk(2), 0.0)
            metrics.add("train/parting_loss", part, len(items))
            total = total + args.parting_coef * part / pairs
        if args.lm_coef and language_tokens:
            nll = self.language_nll(items, reading)
            metrics.add("train/lm_loss", nll.sum(), len(nll))
            total = total + args.lm_coef * nll.sum() / language_tokens
        return total, metrics

    def language_nll(self, items, reading):
        """-log p of each of the N chosen tokens from where the answers part -> [N]"""
        places, targets = [], []
        for (chosen, start), first in zip(self.from_parting(items), reading.starts.tolist(), strict=False):
            places += range(first + start - 1, first + len(chosen) - 1)
            targets += chosen[start:]
        places, targets = (self.numbers(x, torch.int64) for x in (places, targets))
        with autocast(places.device, self.dtype):
            states, head = take_rows(reading.states, places), self.modules["lm_head"]
            return -token_logprobs(head, states, targets, 1.0)[0]

    def measure(self, items):
        *_, metrics = self.judge(items, "eval")
        return metrics


class RatingStage(RewardStage):
    """Items: (conversation ids, score)."""

    look = RATINGS

    def tokens(self, item):
        return len(item[0])

    def weigh(self, items):
        return [len(items)]

    def judge(self, items):
        """-> (scores [B], given ones [B], balance loss)"""
        reading = self.read([ids for ids, _ in items])
        return reading.scores, self.numbers([score for _, score in items]), reading.balance

    def loss(self, items, totals):
        (total,), metrics, (scores, given, balance) = totals, Metrics(), self.judge(items)
        error = (scores - given).square().sum()
        metrics.add("train/loss", error, len(items))
        return (error + balance) / total, metrics

    def measure(self, items):
        metrics, (x, y, _) = Metrics(), self.judge(items)
        x, y = x.double(), y.double()
        sums = {"loss": (x - y).square(), "x": x, "y": y, "xx": x * x, "yy": y * y, "xy": x * y}
        metrics.add_all({f"eval/{name}": values.sum() for name, values in sums.items()}, len(items))
        return metrics

    def summarise(self, means):
        """-> mean squared error, its root, Pearson's correlation (0 where one side never varies)"""
        loss, x, y, xx, yy, xy = (means[f"eval/{name}"] for name in ("loss", "x", "y", "xx", "yy", "xy"))
        spread = max(xx - x * x, 0.0) * max(yy - y * y, 0.0)
        correlation = (xy - x * y) / spread**0.5 if spread > 1e-24 else 0.0
        return {"eval/loss": loss, "eval/rmse": loss**0.5, "eval/correlation": correlation}


def build(args, world):
    """Flags -> the run, everything checked."""
    code = args.trust_remote_code
    policy = load_policy(args.model, code)
    tokenizer = load_tokenizer(args.tokenizer or tokenizer_source(args.model), code)
    set_template(tokenizer, args.prompt_template)
    check_policy(args, policy, tokenizer)
    check_positions(args, policy)
    data, held_out = stage.split(
        args, lambda path: reward_dataset(path, tokenizer, args.max_seq_len, args.system_prompt)
    )
    kinds = {len(part[0]) for part in (data, held_out) if part}  # a pair has a margin
    if len(kinds) > 1:
        raise InputError(
            f"--eval_data_path {args.eval_data_path}: pairs here and scores there; give the same kind"
        )
    pairs = kinds == {3}
    if not pairs and (args.parting_coef or args.lm_coef or args.score_penalty):
        raise InputError("--parting_coef, --lm_coef, --score_penalty: are for pairs; leave them out")
    torch.manual_seed(args.seed)
    modules = {"model": reward_from(policy, tokenizer, args.extra_layers)}
    if args.lm_coef:
        modules["lm_head"] = head = copy.deepcopy(policy.get_output_embeddings())
        if policy.config.tie_word_embeddings:
            head.weight = modules["model"].get_input_embeddings().weight
    reference = None
    if args.reference_samples:
        speaker = policy, tokenizer
        if args.reference:
            beside = args.tokenizer and args.reference.endswith(".pth")
            source = args.tokenizer if beside else tokenizer_source(args.reference)
            speaker = load_policy(args.reference, code), load_tokenizer(source, code)
            set_template(speaker[1], args.prompt_template)
        reference = make_reference(*speaker, held_out or data, args.reference_samples, args.max_gen_len)
    kind = PairStage if pairs else RatingStage
    return kind(args, world, tokenizer, modules, data, held_out, reference)


def main(argv=None):
    args = parse_args(argv)
    stage.run_stage(build, args, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    run_script(main)
