"""The example of a reward function: GSM8K's exact answer, on records of its shape."""

import inspect

import pytest
from tiny import ROOT, read_jsonl, run_files, train, write_jsonl

from dataset.formats import to_prompt
from trainer.rewards.rules import exact_answer

FILE = ROOT / "trainer/rewards/rules.py"
RECORDS = [  # written for this test, in the shape of GSM8K's files
    {
        "question": "Ann fills 6 boxes with 12 eggs each. How many eggs are in the boxes?",
        "answer": "There are 6*12 = <<6*12=72>>72 eggs.\n#### 72",
    },
    {
        "question": "Bo sells 50 pens for $25 each and pays $10. How much is left?",
        "answer": "He gets 50*25 = $<<50*25=1250>>1250.\n1250-10 = $<<1250-10=1240>>1240.\n#### 1,240",
    },
    {"question": "It is 3 degrees and falls by 5. What is it now?", "answer": "3-5 = <<3-5=-2>>-2\n#### -2"},
]


def test_the_reference_itself_is_right_and_another_number_wrong():
    asked, answers = zip(*map(to_prompt, RECORDS), strict=True)
    assert answers == ("72", "1240", "-2")
    solutions = [record["answer"] for record in RECORDS]
    for responses in (answers, solutions):
        assert exact_answer(asked, responses, answers) == [1.0, 1.0, 1.0]
    assert exact_answer(asked, ["#### 73", "#### 124", "#### 2"], answers) == [0.0, 0.0, 0.0]
    assert exact_answer(asked, ["so 72", "$1,240.00", "it is -2."], answers) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        ("12 + 60 = 72", "72", 1),
        ("<think>\n\\boxed{71}?\n</think>\n\nIt is 72.", "72", 1),  # a thought is no answer
        ("72 is the answer to 6 times 12", "72", 0),  # the last number counts
        ("#### 72\nThat took 3 steps", "72", 1),  # but not after a mark
        ("#### 72 eggs, not 73", "72", 1),
        ("#### Step 1\nThe answer is 72", "72", 1),  # a heading is no mark
        (r"so \boxed{72}, which is 6 * 12", "72", 1),
        (r"\boxed{x = 72}", "72", 1),
        (r"first \boxed{70}, then \boxed{72}", "72", 1),
        ("<think>\n70\n</think>\n<answer>\n72\n</answer> 5", "72", 1),
        ("<answer>\nnone\n</answer> 72", "72", 0),
        ("72.00", "72", 1),
        ("72.5", "72", 0),
        ("It costs $1,250,000.", "1250000", 1),
        (r"\$5", "5", 1),
        ("$.50", "0.5", 1),
        ("one of 1,24", "24", 1),  # no comma of thousands
        ("10-2", "2", 1),  # no sign
        ("it is -2", "-2", 1),
        ("it is -$2", "-2", 1),
        ("it is $-2", "-2", 1),
        ("it is 2", "-2", 0),
        ("", "0", 0),
        ("no idea", "72", 0),
        ("72", "72", 1),  # verl's ground truth
    ],
)
def test_final_numbers(response, answer, right):
    assert exact_answer(["q"], [response], [answer]) == [right]


def test_the_page_shows_the_function_as_it_is():
    page = (ROOT / "docs/rewards.md").read_text(encoding="utf-8")
    code = inspect.getsource(exact_answer)
    assert code in page
    assert "--reward_fn trainer/rewards/rules.py:exact_answer" in page


def test_a_run_on_records_of_this_shape(tmp_path, capsys):
    files = run_files(tmp_path) | {"reward_fn": f"{FILE}:exact_answer", "out_dir": tmp_path / "out"}
    files |= {"data_path": write_jsonl(tmp_path / "train.jsonl", RECORDS * 2), "run_name": "r"}
    files["eval_data_path"] = files["data_path"]
    sizes = {"batch_size": 6, "mini_batch_size": 3, "max_gen_len": 4, "max_steps": 1}
    train(**files, **sizes, critic_warmup_steps=0, reasoning=0)
    assert read_jsonl(tmp_path / "out/r/metrics.jsonl")[1]["reward/function"] == 0.0
    assert read_jsonl(tmp_path / "out/r/samples.jsonl")[0]["prompt"] in {r["question"] for r in RECORDS}
    said = capsys.readouterr().out
    assert "  held out at step 1: accuracy 0.000 | greedy 0.000 | " in said
    assert "- No held-out answer was right, before or after (accuracy 0)." in said
    assert "because eval/function was never above 0.000\n" in said
