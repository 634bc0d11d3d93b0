"""Tiny tokenizers of three kinds, and random tokens that cut text and characters in every way."""

from tiny import word_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PIECES = ["a", "b", "ab", "ba", "c", "\n", "\n\n", "b\n", "\na", " ", " a", " b", "你", "a你"]


def fast(model, decoder):
    backend = Tokenizer(model)
    backend.decoder = decoder
    plain = {"eos_token": "</s>", "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **plain)


def byte_level():
    """Tokens are pieces of bytes, as GPT-2's and Qwen's: characters may be cut anywhere."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    words = [of_bytes(piece)[0][0] for piece in PIECES]
    half = of_bytes("a你b")[0][0]
    names = dict.fromkeys(["</s>", *words, half[:2], half[1:3], half[2:], *alphabet])
    return fast(models.BPE({name: i for i, name in enumerate(names)}, []), decoders.ByteLevel())


def byte_fallback():
    """Pieces of text with ▁ for spaces, and single bytes for what is in no piece, as Llama 2's."""
    names = ["</s>", "<unk>", "▁", *(f"<0x{i:02X}>" for i in range(256)), "▁▁"]
    names = dict.fromkeys(names + [piece.replace(" ", "▁") for piece in PIECES])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    model = models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True, unk_token="<unk>")
    return fast(model, decoders.Sequence(steps))


TOKENIZERS = {
    "byte level": byte_level,
    "byte fallback": byte_fallback,
    "words": lambda: word_tokenizer(["a", "b", "ab", "你", "\n"]),
}


def ids_of(tokenizer, generator, length):
    """Random ids: pieces as one token, or byte by byte and sometimes not all of them, and special tokens."""
    vocabulary, chunks = tokenizer.get_vocab(), [["</s>"]]
    for piece in [*PIECES, "你好"]:
        of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(piece)
        name = of_bytes[0][0]
        chunks += [[piece], [piece.replace(" ", "▁")], [name], [f"<0x{x:02X}>" for x in piece.encode()]]
        chunks += [list(name), [name[:2], name[2:]], [name[:1], name[1:3], name[3:]]]
    chunks = [[vocabulary[x] for x in chunk if x in vocabulary] for chunk in chunks]
    few, found = generator.choices([chunk for chunk in chunks if chunk], k=generator.randint(2, 6)), []
    while len(found) < length:
        chunk = generator.choice(few)
        found += chunk if generator.random() < 0.8 else chunk[: generator.randint(0, len(chunk))]
    return found[:length]
