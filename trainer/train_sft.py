"""Stage 1, supervised fine-tuning: a language model learns to answer as the demonstrations do.

    for each batch of conversations, packed one behind the other, none seeing its neighbours:
        loss = sum over what the assistant says of -log p(token | everything before) / how many tokens that is
        backward, clip the gradient, AdamW step

Only what the assistant says is learned, its end-of-turn token included; prompts are context. The loss on
held-out records (``--eval_data_path``, or the last ``--eval_size`` of the file) tells when to stop.

    python trainer/train_sft.py                                          # the demo's policy, from nothing
    python trainer/train_sft.py --model PATH --data_path mine.jsonl      # a model you have
    torchrun --nproc_per_node 2 trainer/train_sft.py …                   # two GPUs or processes

It writes ``<out_dir>/full_sft_<hidden_size>.pth`` (fp16), from which ``train_ppo.py --hidden_size …
--reasoning 0`` starts, and the same model as a Hugging Face directory. What runs promise:
docs/reliability.md.
"""

import math
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dataset.lm_dataset import SFTDataset
from dataset.templates import set_template
from errors import FlagParser, InputError, run_script
from files import writing
from model.checks import eos_ids, is_moe
from model.loading import load_policy, load_tokenizer, tokenizer_source
from model.saving import save_directory, save_policy
from trainer import stage
from trainer.inputs import check_flags, check_policy, check_positions
from trainer.record import pad_right
from trainer.scoring import PolicyScorer
from trainer.stage_looks import DEMONSTRATIONS
from trainer.tracking import Metrics

DEMO_DATA, DEMO_TOKENIZER = ROOT / "dataset/demo/sft.jsonl", ROOT / "dataset/demo/tokenizer"
HIDDEN_SIZE, LAYERS = 128, 4  # of a model from nothing


def parse_args(argv=None):
    """All flags: those of this stage here, the others in stage.py."""
    p = FlagParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    # model: without --model, random weights of the sizes below
    p.add_argument("--model", default="", help="a .pth, a directory or a hub name to start from")
    p.add_argument(
        "--tokenizer", default="", help="directory or hub name; default: beside the model, or the demo's"
    )
    p.add_argument("--hidden_size", type=int, default=0, help=f"of a new model, {HIDDEN_SIZE} if not given")
    p.add_argument("--num_hidden_layers", type=int, default=0, help=f"of a new model, {LAYERS} if not given")
    p.add_argument("--use_moe", type=int, default=0, choices=[0, 1], help="insist on a mixture of experts")
    p.add_argument("--trust_remote_code", action="store_true", help="run code that a model brings along")
    # data
    p.add_argument("--data_path", default="", help="demonstrations: a file or a hub name; docs/data.md")
    p.add_argument("--eval_data_path", default="", help="held-out demonstrations")
    stage.add_flags(p, learning_rate=2e-3)
    args = p.parse_args(argv)
    check_flags(args)
    args.out_dir = os.path.abspath(args.out_dir)
    if not args.data_path and args.model:
        raise InputError("--data_path: name the file with the demonstrations")
    args.data_path = args.data_path or str(DEMO_DATA)
    return args


def new_model(hidden_size, num_hidden_layers, tokenizer):
    """A Llama with random weights, by MiniMind 2's conventions: 8 heads, 2 key-value, tied embeddings."""
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
        initializer_range=hidden_size
        ** -0.5,  # keeps the size of what passes; 0.02 learns slowly at this width
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config).eval()


class FineTuning(stage.Stage):
    """Items: (token ids, mask), 1 on what is learned. See ``stage.Stage``."""

    script, look = "train_sft.py", DEMONSTRATIONS
    judged_by_name = frozenset({"hidden_size", "num_hidden_layers"})

    def __init__(self, args, world, tokenizer, model, data, held_out):
        super().__init__(args, world, tokenizer, {"model": model}, data, held_out)
        self.scorer = PolicyScorer(model, self.dtype)
        if args.model and Path(args.model).resolve() in (self.pth_path.resolve(), self.hf_dir.resolve()):
            raise InputError(
                f"--model {args.model}: this run would write its result there; copy it elsewhere"
            )

    @property
    def pth_path(self):
        moe = "_moe" if is_moe(self.model) else ""
        return Path(self.args.out_dir) / f"full_sft_{self.model.config.hidden_size}{moe}.pth"

    @property
    def hf_dir(self):
        return Path(self.args.hf_dir) if self.args.hf_dir else self.pth_path.with_suffix("")

    def tokens(self, item):
        return len(item[0])

    def weigh(self, items):
        """[learned tokens, conversations]; the first token of all is predicted by nothing."""
        return [sum(sum(mask[1:]) for _, mask in items), len(items)]

    def nll(self, items):
        """-> (minus the log-probs of the N learned tokens [N], the balance loss of a mixture of experts)"""
        tokens, lengths = pad_right([ids for ids, _ in items], self.world.device)
        learned, _ = pad_right([[0, *mask[1:]] for _, mask in items], self.world.device)
        logprobs, _, balance = self.scorer.at(tokens, lengths, *learned.nonzero(as_tuple=True))
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
        talk = f"talk     python chat.py --model {self.pth_path}"
        return f"model    {self.pth_path}\n         {self.hf_dir}\n{talk}"


def build(args, world):
    """Flags -> the run, everything checked."""
    model = load_policy(args.model, args.trust_remote_code) if args.model else None
    source = args.tokenizer or (tokenizer_source(args.model) if args.model else str(DEMO_TOKENIZER))
    tokenizer = load_tokenizer(source, args.trust_remote_code)
    set_template(tokenizer, args.prompt_template)
    if model is None:
        torch.manual_seed(args.seed)
        model = new_model(args.hidden_size or HIDDEN_SIZE, args.num_hidden_layers or LAYERS, tokenizer)
    check_policy(args, model, tokenizer)
    check_positions(args, model)
    data, held_out = stage.split(
        args, lambda path: SFTDataset(path, tokenizer, args.max_seq_len, args.system_prompt)
    )
    check_ends(data[0], tokenizer, model)
    return FineTuning(args, world, tokenizer, model, data, held_out)


def check_ends(item, tokenizer, model):
    """InputError if a model would learn to end its answers with what PPO and chat.py do not stop at."""
    if not any(mask and token in eos_ids(tokenizer, model) for token, mask in zip(*item, strict=True)):
        raise InputError(
            f"the chat template does not end answers with the tokenizer's EOS, {tokenizer.eos_token}: name "
            "what ends a turn as eos_token in tokenizer_config.json, or give another --prompt_template"
        )


def main(argv=None):
    args = parse_args(argv)
    stage.run_stage(build, args, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    run_script(main)
