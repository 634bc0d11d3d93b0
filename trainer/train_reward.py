"""Stage 2, the reward model: a language model with a score head learns which answers people prefer.

    for each batch of pairs (chosen, rejected), packed one behind the other, or of answers with scores:
        score = one number a conversation, read at its last token
        loss = -log sigmoid(score chosen - score rejected - margin)     # Llama 2, arXiv:2307.09288, eq. 2
          or   (score - given score)^2                                  # records with a "score"
        backward, clip the gradient, AdamW step                         # supervised.py
    subtract the mean score of the reference's answers to held-out prompts

The reference is by default the policy that the reward model starts from. If PPO will start from another
policy, name that one with ``--reference``.

    python trainer/train_reward.py                                       # from the demo's policy and pairs
    python trainer/train_reward.py --model PATH --data_path pairs.jsonl  # from a model you have
    torchrun --nproc_per_node 2 trainer/train_reward.py …                # two GPUs or processes

It writes ``<out_dir>/reward_<hidden_size>/``, which AutoModelForSequenceClassification loads with one label
and ``train_ppo.py --reward_model`` takes. Stopping, resuming and faults: docs/reliability.md.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from errors import InputError, run_script
from trainer.compute.threads import set_up_threads
from trainer.flags import (
    STAGE_FLAGS,
    FlagParser,
    Flags,
    add_stage_flags,
    complete_output_flags,
    minimind_pth,
    path,
)


def flag_parser() -> FlagParser:
    """All flags: this stage's here, the others in flags.py."""
    p = FlagParser(description=__doc__.split("\n\n")[0], common=STAGE_FLAGS)
    add = p.add
    p.group("model (without --model and --hidden_size: the demo's policy and pairs)")
    add("--model", path, "a .pth, a directory or a hub name")
    add("--tokenizer", path, "directory or hub name; default: model's")
    add("--hidden_size", 0, "out/full_sft_512.pth", may_change=True)
    add("--num_hidden_layers", 0, "checked if given", may_change=True)
    add("--use_moe", 0, "1: start from the _moe checkpoint", choices=[0, 1], may_change=True)
    add("--trust_remote_code", bool, "run code that a model brings", may_change=True)
    p.group("centring: the mean score of the reference's answers is subtracted")
    add("--reference", path, "a policy; default: --model")
    add("--reference_samples", 512, "of its answers; 0: no centring")
    add("--max_gen_len", 64, "longest of its answers in tokens", at_least=1)
    p.group("data")
    add("--data_path", path, "pairs, or answers with scores")
    add("--eval_data_path", path, "held-out records of the same kind")
    add("--chosen_key", "", "key of the better answer of a pair; default: chosen")
    add("--rejected_key", "", "key of the worse answer; default: rejected")
    add_stage_flags(p)
    return p


if __name__ == "__main__":  # before the imports below, which take seconds: help and wrong flags
    set_up_threads()  # OpenMP reads the environment when torch is imported
    run_script(flag_parser().parse_args)

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from atomic_files import writing
from dataset.chat_template import encode, prompt_text
from dataset.formats import Keys
from dataset.lm_dataset import PreferenceDataset
from model.loading import (
    check_tokenizer,
    eos_ids,
    load_policy,
    most_positions,
)
from model.saving import save_directory
from model.weights import make_score_heads
from trainer.compute.batching import send
from trainer.evaluation import EVAL_STEP
from trainer.generation.engine import Sampler
from trainer.generation.sampling import noise_keys
from trainer.generation.stops import response_texts
from trainer.inputs import DEMO, check_sampling, load_trained_tokenizer
from trainer.rewards.reward_models import load_reward_model, score_packed
from trainer.rewards.rules import after_thinking, answer_text
from trainer.runs import displays
from trainer.runs.base import command_line, full_path
from trainer.runs.metrics import Metrics
from trainer.runs.resume import short_hash, weights_hash
from trainer.supervised import Items, Part, SupervisedRun, train


def parse_args(argv: list[str] | None = None) -> Flags:
    args = complete_output_flags(flag_parser().parse_args(argv))
    if not args.model and (args.hidden_size or args.use_moe):
        args = args.completed(model=str(minimind_pth(args, "full_sft")))
    if not (args.model or args.data_path):
        demo = f"{ROOT}/dataset/demo/preferences"
        held_out = args.eval_data_path or f"{demo}_eval.jsonl"
        args = args.completed(data_path=f"{demo}.jsonl", eval_data_path=held_out)
    args = args.completed(model=args.model or DEMO["model"])
    if not args.data_path:
        raise InputError("--data_path: name the file with the pairs, or with the answers and scores")
    return args


# --------------------------------------------------------------------------------------- the model, the loss


def reward_from(policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A policy's backbone with a new score head -> a transformers classifier with one label, fp32, eval mode.

    The policy is not changed. Raises InputError for families that have no such classifier.
    """
    if hasattr(policy.config, "minimind_version"):
        type(policy)(policy.config)  # its random numbers come before the head's, in runs of earlier versions
    config = type(policy.config).from_dict(policy.config.to_dict())
    config.num_labels = 1
    # transformers reads the score at the last token that is not this pad token. Without a pad token in the
    # config, it could not find that token in a padded batch.
    config.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    try:
        reward = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    except ValueError as error:
        raise InputError(f"--model: no sequence classifier exists for {config.model_type} models") from error
    if not isinstance(getattr(reward, "score", None), torch.nn.Linear):
        raise InputError(f"--model: {type(reward).__name__} has no linear score head to train")
    reward.base_model.load_state_dict(policy.base_model.state_dict(), strict=True)
    make_score_heads(reward)
    return reward.eval()


def pair_loss(chosen: Tensor, rejected: Tensor, margin: Tensor | float = 0.0) -> Tensor:
    """Scores [B] and margins [B] -> sum of -log sigmoid(chosen - rejected - margin). Llama 2, eq. 2."""
    return -F.logsigmoid(chosen - rejected - margin).sum()


# ------------------------------------------------------------------------------------------------- the runs


class Outputs(NamedTuple):
    """The model's outputs for B conversations, packed one behind the other, of N tokens in all."""

    scores: Tensor  # [B] fp32
    states: Tensor  # [N, H] the last hidden states
    balance: Tensor  # the balance loss of a mixture of experts


class RewardRun(SupervisedRun):
    """A run on pairs, whose items are (chosen ids, rejected ids, margin), or on rated answers, whose items
    are (conversation ids, given score)."""

    script = "train_reward.py"
    rate = "reward"
    result_path = None  # the result is written at the end, because its zero is not known before
    reference: "Reference | None" = None  # scores are not centred
    centre = 0.0  # the mean score of the reference's answers

    def load_records(self, path: str) -> PreferenceDataset:
        args = self.args
        keys = Keys(args.prompt_key, args.answer_key, args.chosen_key, args.rejected_key)
        return PreferenceDataset(path, self.tokenizer, args.max_seq_len, args.system_prompt, keys)

    def start_from(self, policy: PreTrainedModel) -> PreTrainedModel:
        args = self.args
        self.rated = not self.data.dataset.pairs
        if self.held_out and self.held_out.dataset.pairs == self.rated:
            raise InputError(
                f"--eval_data_path {args.eval_data_path}: one file has pairs, one has scores; give the same "
                "kind"
            )
        self.display = displays.RATINGS if self.rated else displays.PAIRS
        self.hf_dir = Path(args.hf_dir or f"{args.out_dir}/reward_{policy.config.hidden_size}")
        self.result_file = self.hf_dir / "config.json"
        if args.reference_samples:
            speaker = policy
            tokenizer = self.tokenizer
            if args.reference:
                beside = args.reference.endswith(".pth")  # then its tokenizer may be that of the flags
                named = args.completed(
                    model=args.reference,
                    tokenizer=args.tokenizer if beside else "",
                    system_prompt=None,  # its own
                    chat_template_kwargs=None,
                )
                speaker = load_policy(named.model, args.trust_remote_code)
                _, tokenizer = load_trained_tokenizer(named)
            self.reference = Reference(speaker, tokenizer, self.held_out or self.data, args)
        torch.manual_seed(args.seed)
        return self.learning(policy)

    def learning(self, policy: PreTrainedModel) -> PreTrainedModel:
        """A policy -> the reward model that trains."""
        return reward_from(policy, self.tokenizer)

    def outputs(self, conversations: list[list[int]]) -> Outputs:
        """B lists of ids -> their scores, read at the last token."""
        scores, output, layout = score_packed(self.model, conversations, self.dtype, **self.balance.extra)
        return Outputs(scores, output.last_hidden_state, self.balance(output, layout))

    def loss(self, items: Items, totals: list[float], kind: str = "train") -> tuple[Tensor, Metrics]:
        loss, outputs, metrics = self.score_items(items, kind)
        if self.balance.weight and kind == "train":
            metrics.add("train/balance_loss", outputs.balance, len(outputs.scores))
        conversations = len(outputs.scores) // len(items)  # of an item
        return (loss + outputs.balance / conversations) / totals[0], metrics

    def score_items(self, items: Items, kind: str) -> tuple[Tensor, Outputs, Metrics]:
        """-> (summed loss, ``Outputs``, of pairs of all chosen and then all rejected answers, Metrics)."""
        *sides, given = zip(*items, strict=True)
        outputs = self.outputs([ids for side in sides for ids in side])
        wanted = send(torch.tensor(given, dtype=torch.float32), self.world.device)
        scores = outputs.scores
        sums = {}
        if self.rated:
            loss = (scores - wanted).square().sum()
            if kind == "eval":
                x = scores.double()
                y = wanted.double()
                sums = {"x": x, "y": y, "xy": x * y, "x_mean_square": x * x, "y_mean_square": y * y}
        else:
            chosen, rejected = scores.chunk(2)
            loss = pair_loss(chosen, rejected, wanted)
            sums = {f"{kind}/accuracy": chosen > rejected, f"{kind}/distance": chosen - rejected}
        metrics = Metrics()
        metrics.add(f"{kind}/loss", loss, len(items))
        metrics.add_all({name: x.sum() for name, x in sums.items()}, len(items))
        return loss, outputs, metrics

    def summarise(self, means: dict[str, float]) -> dict[str, float]:
        """Ratings -> mean squared error, its root, Pearson's correlation (0 if a score never varies)."""
        if not self.rated:
            return means
        loss = means["eval/loss"]
        spread = means["x_std"] * means["y_std"]
        correlation = (means["xy"] - means["x"] * means["y"]) / spread if spread > 1e-12 else 0.0
        return {"eval/loss": loss, "eval/rmse": loss**0.5, "eval/correlation": correlation}

    def fingerprints(self) -> dict[str, str]:
        found = super().fingerprints()
        if self.reference:
            weights = weights_hash(self.reference.model)
            found["reference"] = short_hash([weights, self.reference.eos, self.reference.prompts])
        return found

    def save_result(self) -> None:
        """Do nothing: see ``result_path``."""

    def complete(self) -> None:
        with self.world.all_or_none(), writing(self.hf_dir):
            if self.world.is_main:
                if self.reference:
                    self.centre = self.reference.mean_score(self)
                save_directory(self.model, self.tokenizer, self.hf_dir, reward_offset=self.centre)
        self.result_path = self.hf_dir

    def results(self) -> str:
        """Where the result is, and the command for PPO. The result's tokenizer has what the flags have made
        of the model's: its chat template and system message."""
        args = self.args
        result = self.hf_dir.resolve()
        words: list[str | Path] = [
            "--model",
            full_path(args.model),
            "--tokenizer",
            result,
            "--reward_model",
            result,
        ]
        if args.trust_remote_code:
            words.append("--trust_remote_code")
        use = command_line("trainer/train_ppo.py", *words, "--data_path", full_path(args.data_path))
        text = (
            f"model    {self.hf_dir}\nuse      {use}\n"
            "         (with the prompts of this file; --data_path names others)"
        )
        if self.reference:
            count = len(self.reference.prompts)
            text += f"\ncentred  {self.centre:.3f} subtracted, the mean of {count} answers of the reference"
        return text


# ------------------------------------------------------- centring: the mean score of the reference becomes 0
#
# The loss of pairs fixes only differences between scores, not their level. (Ziegler et al. 2019,
# arXiv:1909.08593, section 2.1, set the variance to 1 as well; here the scores keep their unit.) A linear
# head without a bias cannot hold the shift, so it is written to config.json as ``reward_offset``, and
# ``ClassifierRewardModel`` (rewards/reward_models.py) subtracts it from every score.


class Reference:
    """The policy whose answers define the zero. It stays on the CPU until it samples once, after training.

    It gets those of the first --reference_samples prompts of ``records`` that leave room for --max_gen_len
    tokens. Raises InputError if there are none, or if the policy cannot be sampled from.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, records: Part, args: Flags
    ):
        check_tokenizer(tokenizer, model)
        check_sampling(model)
        self.model = model
        self.tokenizer = tokenizer
        self.eos = eos_ids(tokenizer, model)
        self.max_gen_len = args.max_gen_len
        self.prompts = []  # (messages or text, token ids)
        assert isinstance(records.dataset, PreferenceDataset)
        for place in records.indices[: args.reference_samples]:
            prompt = records.dataset.prompt(place)
            ids = encode(tokenizer, [prompt_text(tokenizer, prompt)])[0]
            if 0 < len(ids) <= most_positions(model.config) - args.max_gen_len:
                self.prompts.append((prompt, ids))
        if not self.prompts:
            raise InputError(
                f"--max_gen_len {args.max_gen_len}: the reference has no room for any prompt; lower it"
            )

    def answers(self, device: torch.device, dtype: torch.dtype, seed: int) -> list[tuple[list | str, str]]:
        """Sample an answer to each prompt, as PPO does -> [(prompt, response text)], without the thoughts
        that PPO does not show to a reward model."""
        ids = [ids for _, ids in self.prompts]
        keys = noise_keys(seed, EVAL_STEP, range(len(ids)))
        sampler = Sampler(self.model, dtype, device=device)
        rollout = sampler.sample(ids, keys, self.eos, self.max_gen_len, temperature=1.0)
        texts = response_texts(rollout, self.tokenizer)
        said = [text if answer_text(text) is not None else after_thinking(text) for text in texts]
        return [(prompt, text) for (prompt, _), text in zip(self.prompts, said, strict=True)]

    def mean_score(self, run: RewardRun) -> float:
        """The mean of the answers' scores. They are scored by written files, loaded as PPO loads them, so
        that the offset fits what PPO will compute."""
        device = run.world.device
        with TemporaryDirectory(dir=run.args.out_dir, prefix=".reward_", ignore_cleanup_errors=True) as draft:
            save_directory(run.model, run.tokenizer, draft)
            reward_model = load_reward_model(draft, device, dtype=run.dtype)
            scores = reward_model(self.answers(device, run.dtype, run.args.seed))
        return scores.double().mean().item()


def main(argv: list[str] | None = None, kind: type[RewardRun] = RewardRun) -> None:
    train(kind, parse_args(argv), argv)


if __name__ == "__main__":
    run_script(main)
