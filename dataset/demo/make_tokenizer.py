"""Makes the demo's tokenizer: a byte-level BPE of at most 512 entries with one token per digit.

    python dataset/demo/make_tokenizer.py       # reads sft.jsonl beside it, writes dataset/demo/tokenizer/

Any text can be encoded (all 256 bytes are in the vocabulary); the words of the demo are one token each.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from dataset.record_files import open_records
from errors import run_script

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


def build_tokenizer(texts: Iterable[str], vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """Train on an iterable of texts -> a transformers tokenizer with the demo's tags and chat template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(TAGS),
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    # Not special: decode(skip_special_tokens=True) must keep the tags that the policy writes.
    bpe.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        bos_token=START,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=256,
    )


def corpus(path: str | Path) -> Iterator[str]:
    """The demo's sentences and the words of the chat template, without the tags."""
    yield "system\nuser\nassistant\n"
    records = open_records(path)
    for record in map(records.__getitem__, range(len(records))):
        yield record["prompt"]
        answer = record["answer"]
        for tag in TAGS:
            answer = answer.replace(tag, "")
        yield answer


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="make the demo's tokenizer")
    parser.add_argument("--data_path", default=HERE / "sft.jsonl", help="text to learn merges from")
    parser.add_argument("--out_dir", type=Path, default=HERE / "tokenizer")
    args = parser.parse_args(argv)
    tokenizer = build_tokenizer(corpus(args.data_path))
    tokenizer.save_pretrained(args.out_dir)
    print(f"{args.out_dir}: {len(tokenizer)} entries")


if __name__ == "__main__":
    run_script(main)
