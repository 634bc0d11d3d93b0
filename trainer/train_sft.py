"""Stage 1, supervised fine-tuning (SFT): a language model learns to answer as the demonstrations do.

    for each batch of conversations, packed one behind the other, each attending only to itself:
        loss = sum over learned tokens of -log p(token | all tokens before it) / number of learned tokens
        backward, clip the gradient, AdamW step

Only what the assistant says is learned, including the token that ends its turn; the rest is context. The loss
on held-out records (``--eval_data_path``, or the last ``--eval_size`` of the file) shows when to stop.

    python trainer/train_sft.py                                       # the demo's policy, from random weights
    python trainer/train_sft.py --model PATH --data_path mine.jsonl   # a model you have
    torchrun --nproc_per_node 2 trainer/train_sft.py …                # two GPUs or processes

It writes ``<out_dir>/full_sft_<hidden_size>.pth``, from which ``train_ppo.py --hidden_size …
--reasoning 0`` starts, and the same model as a Hugging Face directory. What surrounds the loop:
session.py. Stopping, resuming and faults: docs/reliability.md.
"""

import math
import sys
from functools import cached_property
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
    path,
)

HIDDEN_SIZE = 128  # of a new model, by default
LAYERS = 4


def flag_parser() -> FlagParser:
    """All flags: this stage's here, the others in flags.py."""
    p = FlagParser(description=__doc__, common=STAGE_FLAGS)
    add_model_flags(
        p,
        "model (without --model: random weights of these sizes)",
        hidden_size=f"of a NEW model; 0: {HIDDEN_SIZE}",
        layers=f"of a new model; 0: {LAYERS}",
        may_change=False,
    )
    add_stage_flags(p, "demonstrations")
    p.group("tools, shown where records list none (environments.md)")
    p.add("--env", path, "those of a class of yours: path.py:Class")
    p.add("--tools", [], "functions of yours: path.py:f,g …", type=path)
    return p


if __name__ == "__main__":  # before the imports below, which take seconds: help and wrong flags
    set_up_threads()  # OpenMP reads the environment when torch is imported
    run_script(flag_parser().parse_args)

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from dataset.chat_template import is_read
from dataset.formats import Keys, Tools
from dataset.lm_dataset import SFTDataset
from model.loading import eos_ids, is_moe
from model.model_minimind import MiniMindConfig, plain_config
from model.saving import save_directory, save_policy, whole_state
from trainer.compute.scoring import PolicyScorer, score_learned
from trainer.environments.environment import load_environments
from trainer.runs import displays
from trainer.runs.base import Say
from trainer.runs.metrics import Loss, Metrics
from trainer.session import open_session
from trainer.supervised import Items, Means, SupervisedRun, train


def parse_args(argv: list[str] | None) -> Flags:
    args = complete_output_flags(flag_parser().parse_args(argv))
    if not args.model:
        args.tokenizer = args.tokenizer or f"{ROOT}/dataset/demo/tokenizer"
        args.data_path = args.data_path or f"{ROOT}/dataset/demo/sft.jsonl"
    if not args.data_path:
        raise InputError("--data_path: name the file with the demonstrations")
    return args


class SftRun(SupervisedRun):
    """A run of stage 1. Items: (token ids, mask), the mask 1 on learned tokens."""

    script = "train_sft.py"
    display = displays.SFT
    rate = "sft"
    records = SFTDataset

    @cached_property
    def tools(self) -> Tools:
        """The schemas that train_ppo.py shows with the same flags. Raises InputError where the chat template
        shows none."""
        args = self.args
        if not (args.env or args.tools):
            return ()
        tools = load_environments(args.env, args.tools).schemas
        if tools and not (self.tokenizer.chat_template and is_read(self.tokenizer, "tools")):
            raise InputError(
                "--tools, --env: the chat template does not show tools; give another --prompt_template"
            )
        return tools

    def load_records(self, path: str) -> SFTDataset:
        args = self.args
        keys = Keys.of(args)
        return SFTDataset(path, self.tokenizer, args.max_seq_len, args.system_prompt, keys, tools=self.tools)

    def load_policy(self, dtype: torch.dtype | str = torch.float32) -> PreTrainedModel:
        """--model, or a Llama with random weights and MiniMind 2's shape: 8 heads, 2 key-value heads, tied
        embeddings. Raises InputError if --hidden_size is not a multiple of 16."""
        args = self.args
        if args.model:
            return super().load_policy(dtype)
        hidden_size = args.hidden_size or HIDDEN_SIZE
        minimind = MiniMindConfig(
            vocab_size=len(self.tokenizer),
            hidden_size=hidden_size,
            num_hidden_layers=args.num_hidden_layers or LAYERS,
            initializer_range=hidden_size**-0.5,  # keeps activations' size; 0.02 learns slowly at this width
            bos_token_id=self.tokenizer.bos_token_id,
            eos_token_id=self.tokenizer.eos_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(args.seed)
            return AutoModelForCausalLM.from_config(plain_config(minimind)).eval()

    def start_from(self, policy: PreTrainedModel) -> PreTrainedModel:
        args = self.args
        for data in (self.data, self.held_out):
            if isinstance(data, SFTDataset):
                data.end_at(eos_ids(self.tokenizer, policy))
        self.scorer = PolicyScorer(policy, self.dtype)
        hidden_size = policy.config.hidden_size
        self.result_path = minimind_pth(args.out_dir, "full_sft", hidden_size, is_moe(policy))
        self.hf_dir = Path(args.hf_dir or self.result_path.with_suffix(""))
        self.outputs = [self.result_path, self.result_path.with_suffix(""), self.hf_dir]
        if args.hidden_size and not (args.model or args.resume) and self.result_path.exists():
            raise InputError(
                f"--hidden_size {args.hidden_size}: makes a new model, which would replace "
                f"{self.result_path}; move that file, to train it name it with --model, or change --out_dir"
            )
        return policy

    def loss_counts(self, items: Items) -> list[float]:
        """[learned tokens, conversations]. A conversation's first token never counts: nothing predicts it."""
        return [sum(sum(mask[1:]) for _, mask in items), len(items)]

    def loss(self, items: Items, totals: list[float], kind: str = "train") -> Loss:
        tokens, conversations = totals
        logprobs, balance = score_learned(items, self.scorer)
        nll = -logprobs.sum()
        metrics = Metrics()
        metrics.add(f"{kind}/loss", nll, len(logprobs))
        if is_moe(self.model) and kind == "train":
            metrics.add("train/balance_loss", balance, len(items))
        return nll / max(tokens, 1) + balance / conversations, metrics

    def summarise(self, means: Means) -> Means:
        return means | {"eval/perplexity": math.exp(min(means["eval/loss"], 700.0))}

    def save_result(self, say: Say) -> None:
        if self.world.is_main:
            state = whole_state(self.model)
            dtype = self.save_dtype.choose(self.result_path, state, say)
            save_policy(self.model, self.tokenizer, self.result_path, dtype, state)
            save_directory(self.model, self.tokenizer, self.hf_dir, dtype, state)

    def results(self) -> str:
        talk = self.command("chat.py", "--model", self.result_path)
        note = self.save_dtype.note(self.result_path)
        return f"model    {self.result_path}\n         {self.hf_dir}\n{note}talk     {talk}"


def main(argv: list[str] | None = None) -> None:
    with open_session(SftRun, parse_args(argv)) as session:
        train(session)


if __name__ == "__main__":
    run_script(main)
