"""Stage 2, the reward model: a language model with a score head learns which answers people prefer.

    for each batch of pairs (chosen, rejected), packed one behind the other, or of answers with scores:
        score = one number a conversation, read at its last token
        loss = -log sigmoid(score chosen - score rejected - margin)     # Llama 2, arXiv:2307.09288, eq. 2
          or   (score - given score)^2                                  # records with a "score"
        backward, clip the gradient, AdamW step                         # supervised.py
    subtract the mean score of the held-out answers

    python trainer/train_reward.py                                       # from the demo's policy and pairs
    python trainer/train_reward.py --model PATH --data_path pairs.jsonl  # from a model you have
    torchrun --nproc_per_node 2 trainer/train_reward.py …                # two GPUs or processes

It writes ``<out_dir>/reward_<hidden_size>/``, which AutoModelForSequenceClassification loads with one label
and ``train_ppo.py --reward_model`` takes. Stopping, resuming and faults: docs/reliability.md.
"""

import math
import sys
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from errors import InputError, run_script
from trainer.compute.threads import set_up_threads
from trainer.flags import (
    STAGE_FLAGS,
    FlagParser,
    Flags,
    add_model_flags,
    add_stage_flags,
    complete_output_flags,
    minimind_pth,
)


def flag_parser() -> FlagParser:
    """All flags: this stage's here, the others in flags.py."""
    p = FlagParser(description=__doc__, common=STAGE_FLAGS)
    title = "model (without --model and --hidden_size: the demo's policy and pairs)"
    add_model_flags(p, title, "N: out/full_sft_N.pth")
    p.add("--use_moe", 0, "1: load the _moe checkpoint", choices=[0, 1], may_change=True)
    add_stage_flags(p, "pairs, or answers with scores")
    return p


if __name__ == "__main__":  # before the imports below, which take seconds: help and wrong flags
    set_up_threads()  # OpenMP reads the environment when torch is imported
    run_script(flag_parser().parse_args)

import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from dataset.lm_dataset import PreferenceDataset, RecordDataset
from model.loading import is_moe
from model.saving import save_directory, whole_state
from model.weights import make_score_heads
from trainer.compute.batching import in_fp64, send
from trainer.inputs import DEMO
from trainer.rewards.reward_models import score_packed
from trainer.runs import displays
from trainer.runs.base import SavedAttributes, Say, full_path
from trainer.runs.metrics import Loss, Metrics
from trainer.session import open_session
from trainer.supervised import Items, Means, SupervisedRun, train


def parse_args(argv: list[str] | None) -> Flags:
    args = complete_output_flags(flag_parser().parse_args(argv))
    if not args.model and (args.hidden_size or args.use_moe):
        args.model = str(minimind_pth(args.out_dir, "full_sft", args.hidden_size, args.use_moe))
    if not (args.model or args.data_path):
        args.data_path = f"{ROOT}/dataset/demo/preferences.jsonl"
        args.eval_data_path = args.eval_data_path or f"{ROOT}/dataset/demo/preferences_eval.jsonl"
    args.model = args.model or DEMO["model"]
    if not args.data_path:
        raise InputError("--data_path: name the file with the pairs, or with the answers and scores")
    return args


LOOKED_AT = 256  # pairs whose answers are measured for --max_gen_len
KL_COEF = 0.2  # suited a reward model of human preferences (docs/learning.md)

# --------------------------------------------------------------------------------------- the model, the loss


def reward_from(policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A policy's backbone with a new score head -> a transformers classifier with one label, fp32, eval mode.

    The policy is not changed. Raises InputError for families that have no such classifier.
    """
    config = type(policy.config).from_dict(policy.config.to_dict())
    config.num_labels = 1
    # transformers reads the score at the last token that is not this pad token. Without a pad token in the
    # config, it could not find that token in a padded batch.
    config.pad_token_id = tokenizer.pad_token_id
    try:
        reward = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    except ValueError as error:
        raise InputError(f"--model: no sequence classifier exists for {config.model_type} models") from error
    if not isinstance(getattr(reward, "score", None), torch.nn.Linear):
        raise InputError(f"--model: {type(reward).__name__} has no linear score head to train")
    reward.base_model.load_state_dict(policy.base_model.state_dict(), strict=True)
    make_score_heads(reward)
    return reward.eval()


def usual_max_gen_len(pairs: RecordDataset) -> int:
    """--max_gen_len for answers as long as most of these pairs': a multiple of 32 tokens for 19 of 20 of the
    first pairs. An answer is what follows the tokens that both sides of a pair begin with."""
    lengths = []
    for i in range(min(len(pairs), LOOKED_AT)):
        chosen, rejected, _ = pairs[i]
        shared = takewhile(lambda ids: ids[0] == ids[1], zip(chosen, rejected, strict=False))
        lengths.append(max(len(chosen), len(rejected)) - len(list(shared)))
    return 32 * math.ceil(sorted(lengths)[(len(lengths) - 1) * 19 // 20] / 32)


# ------------------------------------------------------------------------------------------------- the runs


class ScoreOffset(SavedAttributes):
    """``mean``: the mean score of the held-out answers in the last evaluation, which PPO subtracts.

    The loss of pairs fixes only differences between scores, not their level, and PPO clips scores. (Ziegler
    et al. 2019, arXiv:1909.08593, section 2.1, set the variance to 1 as well; here the scores keep their
    unit.) A linear head without a bias cannot hold the shift: it is ``reward_offset`` in config.json."""

    saved = ("mean",)
    mean = 0.0


class RewardRun(SupervisedRun):
    """A run on pairs, whose items are (chosen ids, rejected ids, margin), or on rated answers, whose items
    are (conversation ids, given score)."""

    script = "train_reward.py"
    display = displays.PAIRS
    rate = "reward"
    records = PreferenceDataset

    def split_records(self) -> tuple[RecordDataset, RecordDataset | None]:
        data, held_out = super().split_records()
        if held_out and held_out.pairs != data.pairs:
            raise InputError(
                f"--eval_data_path {self.args.eval_data_path}: one file has pairs, one has scores; give the "
                "same kind"
            )
        return data, held_out

    def start_from(self, policy: PreTrainedModel) -> PreTrainedModel:
        args = self.args
        self.rated = not self.data.pairs
        self.display = displays.RATINGS if self.rated else displays.PAIRS
        self.result_path = self.hf_dir = Path(
            args.hf_dir or f"{args.out_dir}/reward_{policy.config.hidden_size}"
        )
        self.outputs = [self.hf_dir]
        self.offset = self.states["zero"] = ScoreOffset()
        torch.manual_seed(args.seed)
        return reward_from(policy, self.tokenizer)

    def loss(self, items: Items, totals: list[float], kind: str = "train") -> Loss:
        *sides, numbers = zip(*items, strict=True)
        # Of pairs: all chosen, then all rejected answers.
        conversations = [ids for side in sides for ids in side]
        scores, _, balance = score_packed(self.model, conversations, self.dtype)  # read at their last tokens
        targets = send(torch.tensor(numbers, dtype=torch.float32), self.world.device)
        sums = {}
        if self.rated:
            loss = (scores - targets).square().sum()
            x = in_fp64(scores.detach())
            y = in_fp64(targets)
            if kind == "eval":
                sums = {"score_mean_square": x * x, "y": y, "y_mean_square": y * y, "product": x * y}
        else:
            chosen, rejected = scores.chunk(2)
            loss = -F.logsigmoid(chosen - rejected - targets).sum()
            sums = {f"{kind}/accuracy": chosen > rejected, f"{kind}/distance": chosen - rejected}
        metrics = Metrics()
        metrics.add(f"{kind}/loss", loss, len(items))
        if kind == "eval":
            metrics.add("score", in_fp64(scores).sum(), len(scores))
        elif is_moe(self.model):
            metrics.add("train/balance_loss", balance, len(scores))
        metrics.add_all({name: x.sum() for name, x in sums.items()}, len(items))
        return (loss + balance / len(sides)) / totals[0], metrics

    def summarise(self, means: Means) -> Means:
        """Pairs: all but the mean score, which becomes the offset. Ratings: mean squared error, its root,
        Pearson's correlation (0 if a score never varies)."""
        score = self.offset.mean = means.pop("score")
        if not self.rated:
            return means
        loss = means["eval/loss"]
        spread = means["score_std"] * means["y_std"]
        correlation = (means["product"] - score * means["y"]) / spread if spread > 1e-12 else 0.0
        return {"eval/loss": loss, "eval/rmse": loss**0.5, "eval/correlation": correlation}

    def save_result(self, say: Say) -> None:
        if self.world.is_main:
            state = whole_state(self.model)
            dtype = self.save_dtype.choose(self.hf_dir, state, say)
            save_directory(
                self.model, self.tokenizer, self.hf_dir, dtype, state, reward_offset=self.offset.mean
            )

    def results(self) -> str:
        """Where the result is, and the command for PPO. The result's tokenizer has what the flags have made
        of the model's: its chat template and system message."""
        args = self.args
        result = self.hf_dir.resolve()
        flags = {
            "model": full_path(args.model),
            "tokenizer": result,
            "reward_model": result,
            "data_path": full_path(args.data_path),
            "prompt_key": args.prompt_key,
            "max_seq_len": args.max_seq_len,
            "max_gen_len": "" if self.rated else usual_max_gen_len(self.data),
            "kl_coef": KL_COEF,
            "out_dir": args.out_dir,
        }
        words = [str(word) for name, x in flags.items() if x for word in (f"--{name}", x)]
        use = self.command("trainer/train_ppo.py", *words)
        length = "; add --max_gen_len, the longest answer" if self.rated else ", and answers as long as its"
        text = f"model    {self.hf_dir}\n{self.save_dtype.note(self.hf_dir)}use      {use}\n"
        text += f"         (with the prompts of this file{length}; --data_path names others)"
        if self.held_out:
            text += f"\ncentred  {self.offset.mean:.3f} subtracted, the mean score of the held-out answers"
        return text


def main(argv: list[str] | None = None) -> None:
    with open_session(RewardRun, parse_args(argv)) as session:
        train(session)


if __name__ == "__main__":
    run_script(main)
