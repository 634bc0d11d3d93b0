"""What a PPO run says of itself when it begins: the first lines; facts for the rules of runs/health.py; and
fingerprints of what it begins with, for resuming.

The facts are written to config.json.
"""

import re
from argparse import Namespace
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from dataset.chat_template import learned_pieces
from dataset.lm_dataset import RecordDataset
from errors import InputError
from model.loading import embeddings
from model.lora import describe as describe_adapters
from model.weights import short_hash, weights_hash
from trainer.rewards.reward_function import code_hash, fields_read
from trainer.rewards.reward_models import models_hash
from trainer.runs.base import Run

if TYPE_CHECKING:  # it has these functions as methods
    from trainer.run import PpoRun

USUAL_IDS = 0.95  # of a model's embeddings: a few have no id
ANSWER = "Seven."
THOUGHT = re.compile(r"\s*<think>\s*</think>\s*")  # some templates put an empty thought before an answer


# --------------------------------------------------------------------------------------- the first lines


def describe_run(run: "PpoRun") -> str:
    """What the run is made of, in a few lines."""
    args = run.args
    data = f"{'answers' if args.offline_data_path else 'prompts'}  {run.data.describe()}"
    if run.held_out:
        data += f"\nheld out {(run.held_out_pairs or run.held_out).describe()} {run.display.tested}"
    adapters = describe_adapters(run.actor)
    parts = [name for name in run.reward.names if not name.startswith("score")]
    lines = [
        f"policy   {args.model}: {run.ref.num_parameters() / 1e6:.2f}M parameters, "
        f"{run.actor.config.model_type}",
        f"lora     {adapters}" if adapters else "",
        f"reward   {' + '.join(parts) or 'the scores of the file'}",
        data,
    ]
    if run.ptx:
        texts = run.ptx.data
        lines.append(f"ptx      {texts.path}: {texts.describe()}, weight {run.ptx.coef:g} (--ptx_coef)")
    lines += describe_texts(args, (run.data, run.held_out, run.ptx and run.ptx.data))
    if run.critic:
        lines.append(f"lambda   {args.lam:g}, for answers of up to {args.max_gen_len} tokens (--lam)")
    if args.critic_warmup_steps:
        lines.append(
            f"warm-up  at first only the critic trains: --critic_warmup_steps {args.critic_warmup_steps}"
        )
    return "\n".join(filter(None, [*lines, *run.notes]))


def describe_texts(args: Namespace, datasets: Iterable[object]) -> list[str]:
    """Lines on how the texts of these datasets, or None, were read, for runs of all stages."""
    notes = set()
    for data in datasets:
        if not isinstance(data, RecordDataset):
            continue
        if data.tools:
            notes.add(f"{data.path}: tools are ignored: turns that call one or hold its result are left out")
        if left_out := data.records.left_out:
            notes.add(f"{data.path}: by name or kind not of its split train and not read: {left_out}")
    lines = [f"note     {note}" for note in sorted(notes)]
    if args.system_prompt:
        lines.append(f"system   {args.system_prompt}")
    if args.chat_template_kwargs:
        lines.append(f"template with {args.chat_template_kwargs}")
    return lines


# ------------------------------------------------------------------------------ facts and fingerprints


def start_facts(run: "PpoRun") -> dict[str, Any]:
    """What the health rules read of a run's start, as JSON has it."""
    prompts = run.data
    tokenizer = run.tokenizer
    header, ends = turns_of(tokenizer, run.endings.eos)
    rows = embeddings(run.ref)
    ids = len(tokenizer.get_vocab())
    models = run.reward.models.items()
    plain = [name for name, (model, _) in models if not (model.tokenizer.chat_template or model.pairs)]
    return Run.facts(run) | {
        "prompts": len(prompts),
        "dropped_share": prompts.dropped / prompts.read,  # share of the records that are too long
        "missing_header": header,  # text between a prompt and its answer, "" as it should be
        "template_without_eos": not ends,  # it ends an answer with no token that ends a response
        "fewer_ids": [ids, rows] if ids < USUAL_IDS * rows else None,  # than embeddings
        "without_template": ", ".join(plain) if tokenizer.chat_template else "",  # reward models
        "dtype": str(run.dtype).removeprefix("torch."),
        "suited": run.suited,  # {flag: the learning rate that suits the model's size}
    }


def turns_of(tokenizer: PreTrainedTokenizerBase, eos: Iterable[int]) -> tuple[str, bool]:
    """How the chat template goes from a prompt to an answer and on -> (missing header, has it an EOS?).

    eos: the ids that end a response. ("", True) where the template rewrites what stands before the answer, so
    that nothing can be said.
    """
    try:
        said, _ = learned_pieces(tokenizer, "How many days has a week?", ANSWER)[-1]
    except InputError:
        return "", True
    header, _, end = said.partition(ANSWER)
    ids = tokenizer(end, add_special_tokens=False)["input_ids"]
    return THOUGHT.sub("", header).strip(), not set(eos).isdisjoint(ids)


def fingerprints(run: "PpoRun") -> dict[str, str]:
    """{flag: a hash of what it names}: the weights that the run starts from, its reward models, the texts
    and tokens of its prompts, the code of its reward function; {"data_path <field>": a hash of the field of
    the records, which that function reads}. Call it before frozen weights are rounded."""
    found = {
        "model": short_hash([weights_hash(run.ref), run.endings.eos]),
        "tokenizer": short_hash(sorted(run.tokenizer.get_vocab().items())),
        "offline_data_path" if run.args.offline_data_path else "data_path": run.data.fingerprint,
    }
    if run.ptx:
        found["ptx_data_path"] = run.ptx.data.fingerprint
    if run.reward.models:
        found["reward_model"] = models_hash(run.reward.models)
    if run.reward.function:
        found["reward_fn"] = code_hash(run.args.reward_fn)
        fields = fields_read(run.reward.function, run.data.columns)
        found |= {f"data_path {field}": text for field, text in run.data.field_hashes(fields).items()}
    return found
