"""Where the responses of a run end: EOS ids, ``--stop``, ``--stop_token_ids``, ``--min_gen_len``.

The stopping criteria of the sampler: generation/stops.py says how they are looked at while it decodes.
"""

from argparse import Namespace
from typing import NamedTuple

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from errors import InputError
from model.loading import TAGS, eos_ids
from trainer.generation.stops import HALF, Forbidden, StopStrings, with_roles, without_text


class Endings(NamedTuple):
    """What ends a response, besides --max_gen_len."""

    eos: list[int]  # the token ids that do
    stops: StopStrings | None
    forbidden: Forbidden  # these ids where a response is still too short, and ids without a text


def load_endings(args: Namespace, tokenizer: PreTrainedTokenizerBase, policy: PreTrainedModel) -> Endings:
    """Flags -> ``Endings``. Raises InputError for an id that the tokenizer does not have, and as
    ``read_stops``."""
    known = set(tokenizer.get_vocab().values())
    for i in args.stop_token_ids:
        if i not in known:
            raise InputError(f"--stop_token_ids {i}: the tokenizer has no such id; correct it")
    texts, ids = read_stops(args.stop, tokenizer, args.reasoning)
    ends = sorted({*eos_ids(tokenizer, policy), *args.stop_token_ids, *ids})
    stops = StopStrings(texts, tokenizer) if texts else None
    never = without_text(tokenizer, len(policy.get_output_embeddings().weight), ends)
    return Endings(ends, stops, Forbidden(args.min_gen_len, tuple(ends), never))


def keep_endings(endings: Endings, policy: PreTrainedModel) -> None:
    """Put the endings of a run into the policy's generation config, which is saved beside its weights: with
    them chat.py and transformers' ``generate`` end an answer where training did."""
    config = policy.generation_config
    if len(endings.eos) > 1:  # a single one is that of the model or of the tokenizer
        config.eos_token_id = endings.eos
    config.stop_strings = endings.stops.texts if endings.stops else None


def read_stops(
    given: list[str], tokenizer: PreTrainedTokenizerBase, reasoning: int = 0
) -> tuple[list[str], set[int]]:
    """--stop as on the command line -> (stop strings, the ids of those that are special tokens). Raises
    InputError for a text that cannot be one, or that --reasoning needs."""
    texts = []
    ids = set()
    special = {str(token): i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    roles = with_roles(tokenizer)
    for written in given:
        text = written.replace("\\n", "\n").replace("\\t", "\t")
        if text in special:
            ids.add(special[text])
            continue
        if not text or HALF in text:
            raise InputError(
                f"--stop {written!r}: must be a text, without U+FFFD; correct it or leave it out"
            )
        if held := [token for token, i in special.items() if i in roles and token in text]:
            raise InputError(f"--stop {written!r}: texts have no special token as {held[0]}; name that alone")
        if reasoning and any(tag in text or text in tag for tag in TAGS):
            raise InputError(
                f"--stop {written!r}: the text ends before it, and --reasoning 1 rewards {' '.join(TAGS)}; "
                "choose another, or --reasoning 0"
            )
        texts.append(text)
    return texts, ids
