"""What it saves that a later turn computes its new tokens only: CPU seconds of sampling, turn by turn.

    python benchmarks/later_turns.py MODEL        # SmolLM2-135M-Instruct: three minutes

Responses of three turns to prompts of random tokens, as long as a list of tools; behind each turn stands an
observation. Once the sampler keeps keys and values of the turns before (``Engine._go_on``), once it computes
each turn anew. One thread, fp32. Prints a table and writes benchmarks/results/later_turns.json.
"""

import sys
import time

import torch
from common import table, write_results

from model.loading import embeddings, load_policy
from trainer.generation.engine import Sampler
from trainer.generation.sampling import noise_keys

PROMPTS = 4
ANSWERS = 4  # to each
PROMPT = 160  # tokens
TURN = 30  # tokens, of each turn
OBSERVATION = 15  # tokens
TURNS = 3
LONGEST = TURNS * (TURN + OBSERVATION)  # response
END = [0]  # no turn ends by itself


def measure(path: str, keeps: bool) -> list[float]:
    """-> CPU seconds of each turn."""
    model = load_policy(path)
    sampler = Sampler(model)
    sampler.sizes = (PROMPTS * ANSWERS, PROMPT + LONGEST, LONGEST)  # of all turns, as in a run
    vocabulary = embeddings(model)
    draw = torch.Generator().manual_seed(0)
    asked = torch.randint(1, vocabulary, (PROMPTS, PROMPT), generator=draw).repeat_interleave(ANSWERS, 0)
    contexts = asked.tolist()
    places = [0] * len(contexts)
    keys = noise_keys(1, 0, range(len(contexts)))
    seconds = []
    for turn in range(TURNS):
        if not keeps:
            sampler.release()
        length = turn * (TURN + OBSERVATION) + TURN  # of the response, behind this turn: all are equally long
        begin = time.process_time()
        batch = sampler.sample(contexts, keys, END, length, 1.0, min_gen_len=LONGEST, first_places=places)
        seconds.append(time.process_time() - begin)
        said = torch.randint(1, vocabulary, (len(contexts), OBSERVATION), generator=draw).tolist()
        new = [ids + more for ids, more in zip(batch.responses(), said, strict=True)]
        contexts = [ids + more for ids, more in zip(contexts, new, strict=True)]
        places = [place + len(more) for place, more in zip(places, new, strict=True)]
    return seconds


def main(path: str) -> None:
    torch.set_num_threads(1)
    measure(path, keeps=True)  # compiles
    kept = measure(path, keeps=True)
    anew = measure(path, keeps=False)
    rows = [
        {"turn": turn, "context tokens": PROMPT + (turn - 1) * (TURN + OBSERVATION), "kept": a, "anew": b}
        for turn, (a, b) in enumerate(zip(kept, anew, strict=True), 1)
    ]
    write_results("later_turns", {"rows": rows})
    print(table([{**row, "kept": f"{row['kept']:.1f}", "anew": f"{row['anew']:.1f}"} for row in rows]))


if __name__ == "__main__":
    main(sys.argv[1])
