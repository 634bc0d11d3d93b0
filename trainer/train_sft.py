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
--reasoning 0`` starts, and the same model as a Hugging Face directory. The training loop is in supervised.py.
Stopping, resuming and faults: docs/reliability.md.
"""

import math
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from errors import InputError, run_script
from trainer.compute.threads import set_up_threads
from trainer.flags import MANY, FlagParser, add_stage_flags, complete_output_flags, path

HIDDEN_SIZE, LAYERS = 128, 4  # the default sizes of a new model


def flag_parser():
    """All flags: this stage's here, the others in flags.py."""
    p = FlagParser(description=__doc__.split("\n\n")[0])
    add = p.add_argument
    p.group("model (without --model: random weights of these sizes)")
    add("--model", default="", type=path, may_change=True, help="a .pth, a directory or a hub name")
    add("--tokenizer", default="", type=path, may_change=True, help="directory or hub name; default: model's")
    add("--hidden_size", default=0, at_least=0, at_most=MANY, help=f"of a NEW model; 0: {HIDDEN_SIZE}")
    add("--num_hidden_layers", default=0, at_least=0, at_most=MANY, help=f"of a new model; 0: {LAYERS}")
    add("--use_moe", default=0, choices=[0, 1], may_change=True, help="1: insist on a mixture of experts")
    add("--trust_remote_code", action="store_true", may_change=True, help="run code that a model brings")
    p.group("data")
    add("--data_path", default="", type=path, may_change=True, help="demonstrations: a file or a hub name")
    add("--eval_data_path", default="", type=path, may_change=True, help="held-out demonstrations")
    add_stage_flags(p)
    return p


if __name__ == "__main__":  # before the imports below, which take seconds: help and wrong flags
    set_up_threads()  # OpenMP reads the environment when torch is imported
    run_script(flag_parser().parse_args)

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from atomic_files import writing
from dataset.keys import Keys
from dataset.lm_dataset import SFTDataset
from model.compatibility import check_ends, is_moe
from model.loading import load_policy, tokenizer_source
from model.saving import save_directory, save_policy
from trainer import supervised
from trainer.compute.scoring import PolicyScorer, score_learned
from trainer.inputs import check_positions, load_trained_tokenizer
from trainer.policy_checks import check_policy
from trainer.runs import displays
from trainer.runs.commands import command_line
from trainer.runs.metrics import Metrics

DEMO_DATA, DEMO_TOKENIZER = ROOT / "dataset/demo/sft.jsonl", ROOT / "dataset/demo/tokenizer"


def parse_args(argv=None):
    args = flag_parser().parse_args(argv)
    complete_output_flags(args)
    if not args.data_path and args.model:
        raise InputError("--data_path: name the file with the demonstrations")
    args.data_path = args.data_path or str(DEMO_DATA)
    return args


def new_model(hidden_size, num_hidden_layers, tokenizer):
    """A Llama with random weights and MiniMind 2's shape: 8 heads, 2 key-value heads, tied embeddings.

    Raises InputError if ``hidden_size`` is not a multiple of 16.
    """
    if hidden_size % 16:
        raise InputError(f"--hidden_size {hidden_size}: must be a multiple of 16, for 8 heads of even size")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=64 * ((int(hidden_size * 8 / 3) + 63) // 64),
        max_position_embeddings=32768,
        rms_norm_eps=1e-5,
        initializer_range=hidden_size**-0.5,  # keeps activations' size; 0.02 learns slowly at this width
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config).eval()


class SftRun(supervised.SupervisedRun):
    """A run of stage 1. Items: (token ids, mask), the mask 1 on learned tokens; see ``SupervisedRun``."""

    script, display, rate = "train_sft.py", displays.SFT, "sft"

    def __init__(self, args, world, tokenizer, model, data, held_out):
        super().__init__(args, flag_parser().flags, world, tokenizer, {"model": model}, data, held_out)
        self.scorer = PolicyScorer(model, self.dtype)
        if args.model and Path(args.model).resolve() in (self.pth_path.resolve(), self.hf_dir.resolve()):
            raise InputError(
                f"--model {args.model}: this run would write its result there; copy it elsewhere"
            )
        if args.hidden_size and not (args.model or args.resume) and self.pth_path.exists():
            raise InputError(
                f"--hidden_size {args.hidden_size}: makes a new model, which would replace {self.pth_path}; "
                "to train that file, move it and name it with --model, else move it or name another --out_dir"
            )

    @property
    def pth_path(self):
        moe = "_moe" if is_moe(self.model) else ""
        return Path(self.args.out_dir) / f"full_sft_{self.model.config.hidden_size}{moe}.pth"

    result_path = result_file = pth_path

    @property
    def hf_dir(self):
        return Path(self.args.hf_dir) if self.args.hf_dir else self.pth_path.with_suffix("")

    def tokens(self, item):
        return len(item[0])

    def loss_counts(self, items):
        """[learned tokens, conversations]. A conversation's first token never counts: nothing predicts it."""
        return [sum(sum(mask[1:]) for _, mask in items), len(items)]

    def nll(self, items):
        """-> (minus the log-probs of the N learned tokens [N], the balance loss of a mixture of experts)."""
        logprobs, balance = score_learned(items, self.scorer)
        return -logprobs, balance

    def loss(self, items, totals):
        (tokens, conversations), metrics = totals, Metrics()
        nll, balance = self.nll(items)
        metrics.add("train/loss", nll.sum(), len(nll))
        if self.scorer.balance.weight:
            metrics.add("train/balance_loss", balance, len(items))
        return nll.sum() / max(tokens, 1) + balance / conversations, metrics

    def measure(self, items):
        metrics, (nll, _) = Metrics(), self.nll(items)
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


def build(args, world):
    """Flags -> the run, with all inputs checked. Raises InputError."""
    model = load_policy(args.model, args.trust_remote_code) if args.model else None
    source = args.tokenizer or (tokenizer_source(args.model) if args.model else str(DEMO_TOKENIZER))
    tokenizer = load_trained_tokenizer(args, source)
    if model is None:
        torch.manual_seed(args.seed)
        model = new_model(args.hidden_size or HIDDEN_SIZE, args.num_hidden_layers or LAYERS, tokenizer)
    check_policy(args, model, tokenizer)
    check_positions(args, model)
    keys = Keys(args.prompt_key, args.answer_key)
    data, held_out = supervised.split_records(
        args, lambda path: SFTDataset(path, tokenizer, args.max_seq_len, args.system_prompt, keys)
    )
    check_ends(data[0], tokenizer, model)
    return SftRun(args, world, tokenizer, model, data, held_out)


def main(argv=None):
    args = parse_args(argv)
    supervised.run_stage(build, args, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    run_script(main)
