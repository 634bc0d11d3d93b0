"""Stage 1, supervised fine-tuning (SFT): a language model learns to answer as the demonstrations do.

    for each batch of conversations, packed one behind the other, each attending only to itself:
        loss = sum over learned tokens of -log p(token | all tokens before it) / number of learned tokens
        backward, clip the gradient, AdamW step

Only what the assistant says is learned, including the token that ends its turn; the rest is context. The loss
on held-out records (``--eval_data_path``, or the last ``--eval_size`` of the file) shows when to stop.

    python trainer/train_sft.py                                       # the demo's policy, from random weights
    python trainer/train_sft.py --model PATH --data_path mine.jsonl   # a model you have
    torchrun --nproc_per_node 2 trainer/train_sft.py …                # two GPUs or processes

It writes ``<out_dir>/full_sft_<hidden_size>.pth`` (fp16), from which ``train_ppo.py --hidden_size …
--reasoning 0`` starts, and the same model as a Hugging Face directory. The loop is in
loop.py. Stopping, resuming and faults: docs/reliability.md.
"""

import math
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from errors import InputError, run_script
from trainer.compute.threads import set_up_threads
from trainer.flags import STAGE_FLAGS, FlagParser, add_stage_flags, complete_output_flags, path

HIDDEN_SIZE = 128  # of a new model, by default
LAYERS = 4


def flag_parser():
    """All flags: this stage's here, the others in flags.py."""
    p = FlagParser(description=__doc__.split("\n\n")[0], common=STAGE_FLAGS)
    add = p.add
    p.group("model (without --model: random weights of these sizes)")
    add("--model", path, "a .pth, a directory or a hub name")
    add("--tokenizer", path, "directory or hub name; default: model's")
    add("--hidden_size", 0, f"of a NEW model; 0: {HIDDEN_SIZE}")
    add("--num_hidden_layers", 0, f"of a new model; 0: {LAYERS}")
    add("--use_moe", 0, "1: insist on a mixture of experts", choices=[0, 1], may_change=True)
    add("--trust_remote_code", bool, "run code that a model brings", may_change=True)
    p.group("data")
    add("--data_path", path, "demonstrations: a file or a hub name")
    add("--eval_data_path", path, "held-out demonstrations")
    add_stage_flags(p)
    return p


if __name__ == "__main__":  # before the imports below, which take seconds: help and wrong flags
    set_up_threads()  # OpenMP reads the environment when torch is imported
    run_script(flag_parser().parse_args)

import torch
from transformers import LlamaForCausalLM

from atomic_files import writing
from dataset.lm_dataset import SFTDataset
from model.loading import check_ends, is_moe
from model.model_minimind import MiniMindConfig, plain_config
from model.saving import save_directory, save_policy
from trainer import supervised
from trainer.compute.scoring import PolicyScorer, score_learned
from trainer.runs import displays
from trainer.runs.commands import command_line
from trainer.runs.metrics import Metrics


def parse_args(argv=None):
    args = complete_output_flags(flag_parser().parse_args(argv))
    if not args.model:
        args = args.completed(
            tokenizer=args.tokenizer or f"{ROOT}/dataset/demo/tokenizer",
            data_path=args.data_path or f"{ROOT}/dataset/demo/sft.jsonl",
        )
    if not args.data_path:
        raise InputError("--data_path: name the file with the demonstrations")
    return args


class SftRun(supervised.SupervisedRun):
    """A run of stage 1. Items: (token ids, mask), the mask 1 on learned tokens; see ``SupervisedRun``."""

    script = "train_sft.py"
    display = displays.SFT
    rate = "sft"

    dataset = SFTDataset

    def __init__(self, args, world):
        super().__init__(args, world)
        self.scorer = PolicyScorer(self.model, self.dtype)
        if args.hidden_size and not (args.model or args.resume) and self.pth_path.exists():
            raise InputError(
                f"--hidden_size {args.hidden_size}: makes a new model, which would replace {self.pth_path}; "
                "to train that file, move it and name it with --model, else move it or name another --out_dir"
            )

    def new_model(self) -> LlamaForCausalLM:
        """A Llama with random weights and MiniMind 2's shape: 8 heads, 2 key-value heads, tied embeddings.

        Raises InputError if --hidden_size is not a multiple of 16.
        """
        args = self.args
        tokenizer = self.tokenizer
        torch.manual_seed(args.seed)
        hidden_size = args.hidden_size or HIDDEN_SIZE
        minimind = MiniMindConfig(
            vocab_size=len(tokenizer),
            hidden_size=hidden_size,
            num_hidden_layers=args.num_hidden_layers or LAYERS,
            initializer_range=hidden_size**-0.5,  # keeps activations' size; 0.02 learns slowly at this width
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        config = plain_config(minimind)
        del config.minimind_version  # it never was one
        return LlamaForCausalLM(config).eval()

    def start_from(self, policy):
        check_ends(self.data[0], self.tokenizer, policy)
        return {"model": policy}

    @property
    def pth_path(self):
        moe = "_moe" if is_moe(self.model) else ""
        return Path(self.args.out_dir) / f"full_sft_{self.model.config.hidden_size}{moe}.pth"

    result_path = result_file = pth_path

    @property
    def hf_dir(self):
        return Path(self.args.hf_dir or self.pth_path.with_suffix(""))

    def loss_counts(self, items):
        """[learned tokens, conversations]. A conversation's first token never counts: nothing predicts it."""
        return [sum(sum(mask[1:]) for _, mask in items), len(items)]

    def nll(self, items):
        """-> (minus the log-probs of the N learned tokens [N], the balance loss of a mixture of experts)."""
        logprobs, balance = score_learned(items, self.scorer)
        return -logprobs, balance

    def loss(self, items, totals):
        tokens, conversations = totals
        nll, balance = self.nll(items)
        metrics = Metrics()
        metrics.add("train/loss", nll.sum(), len(nll))
        if self.balance.weight:
            metrics.add("train/balance_loss", balance, len(items))
        return nll.sum() / max(tokens, 1) + balance / conversations, metrics

    def measure(self, items):
        nll, _ = self.nll(items)
        metrics = Metrics()
        metrics.add("eval/loss", nll.sum(), len(nll))
        return metrics

    def summarise(self, means):
        return means | {"eval/perplexity": math.exp(min(means["eval/loss"], 700.0))}

    def save_result(self):
        with writing(self.pth_path):
            save_policy(self.model, self.tokenizer, self.pth_path)
        with writing(self.hf_dir):
            save_directory(self.model, self.tokenizer, self.hf_dir)

    def results(self):
        own_code = ["--trust_remote_code"] if self.args.trust_remote_code else []
        talk = command_line("chat.py", "--model", self.pth_path, *own_code)
        return f"model    {self.pth_path}\n         {self.hf_dir}\ntalk     {talk}"


def main(argv=None):
    supervised.train(SftRun, parse_args(argv), argv)


if __name__ == "__main__":
    run_script(main)
