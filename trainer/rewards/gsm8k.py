"""An example of a reward function: is the final number of a response that of GSM8K's answer?

    python trainer/train_ppo.py --data_path train.jsonl --reward_fn trainer/rewards/gsm8k.py:exact_answer …

GSM8K's records are {"question": …, "answer": "… #### 72"}. verl's ground truth, "72", is read as well.
"""

import re
from decimal import Decimal

NUMBER = r"(?:(?<![\w.)])-)?(?:\d+(?:\.\d+)?|(?<![\w.])\.\d+)"  # the minus of "10-3" is no sign
SKIPPED = re.compile(r"(?<=\d),(?=\d{3}(?!\d))|\\?\$")  # the comma of 1,000 and the sign of $5
MARKED = re.compile(rf"####\s*({NUMBER})|\\boxed\{{([^{{}}]*)|<answer>(.*?)</answer>", re.DOTALL)


def exact_answer(prompts, responses, answers):
    """B responses and GSM8K's answers -> 1.0 where the final numbers are equal, else 0.0."""
    rights = [final_number(answer or "") for answer in answers]
    if None in rights:
        raise ValueError(f"no number in the answer {answers[rights.index(None)]!r}")
    return [float(final_number(r) == right) for r, right in zip(responses, rights, strict=True)]


def final_number(text):
    """The number after the last ####, or the last one in the last \\boxed{…} or <answer>…</answer>, or of the
    whole text if it has none of these; None if there is no number."""
    text = SKIPPED.sub("", text)
    marks = list(MARKED.finditer(text))
    numbers = re.findall(NUMBER, marks[-1][marks[-1].lastindex] if marks else text)
    return Decimal(numbers[-1]) if numbers else None
