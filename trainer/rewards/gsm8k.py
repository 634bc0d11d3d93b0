"""An example of a reward function: is the final number of a response that of GSM8K's answer?

    python trainer/train_ppo.py --data_path train.jsonl --reward_fn trainer/rewards/gsm8k.py:exact_answer …

GSM8K's records are {"question": …, "answer": "… #### 72"}. The function gets the answer "72", as it does from
verl's ground truth.
"""

from dataset.answers import final_number
from trainer.rewards.rules import after_thinking


def exact_answer(prompts, responses, answers):
    """B responses and GSM8K's answers -> 1.0 where the final numbers are equal, else 0.0."""
    rights = [final_number(answer or "") for answer in answers]
    if None in rights:
        raise ValueError(f"no number in the answer {answers[rights.index(None)]!r}")
    said = [after_thinking(response) for response in responses]
    return [float(final_number(r) == right) for r, right in zip(said, rights, strict=True)]
