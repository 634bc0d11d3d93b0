"""A real run at the shape of Qwen2.5-0.5B on this CPU: three steps, stopped by force, resumed, exported.

    python benchmarks/half_billion.py [--folder DIR] [flags of train_ppo.py, such as --moments_dtype bfloat16]

Policy and reward model have the sizes of Qwen2.5-0.5B (vocabulary 151,936, tied embeddings), random weights
and are saved in bf16. Batch 4, responses of 16 tokens. The run is killed after step 2 and resumed. Measured:
the peak of each process (VmHWM of /proc: pages of files that it has mapped count) and the time of each phase.
The folder needs 25 GB of disk; it is deleted afterwards.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import takewhile
from pathlib import Path

from common import ROOT, write_results

GIB = 1 << 30
VOCABULARY = 151_936
BODY = {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2}
SIZES = {"batch_size": 4, "max_gen_len": 16, "max_seq_len": 32, "max_steps": 3, "critic_warmup_steps": 1}
SIZES |= {"save_interval": 1, "keep_checkpoints": 1, "eval_interval": 0, "reasoning": 0, "run_name": "r"}
PHASES = ["rollout", "reward", "score", "update"]


def write_inputs(folder):
    """Models, tokenizer and prompts -> the flags that name them. In a process of its own, for its memory."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen2ForSequenceClassification,
    )

    words = {f"w{i}": i for i in range(VOCABULARY)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w2"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="w0", pad_token="w1")
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    ids = {"eos_token_id": 0, "pad_token_id": 1, "bos_token_id": None}
    config = Qwen2Config(
        **BODY, **ids, intermediate_size=4864, vocab_size=VOCABULARY, tie_word_embeddings=True
    )
    Qwen2ForCausalLM(config).save_pretrained(folder / "policy")
    config.num_labels = 1
    Qwen2ForSequenceClassification(config).save_pretrained(folder / "reward")
    for name in ("policy", "reward"):
        tokenizer.save_pretrained(folder / name)
    records = [{"prompt": " ".join(f"w{3 + 7 * n + i}" for i in range(8 + n % 9))} for n in range(64)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def watch(command, until=None):
    """Run a command, end it by force once ``until()`` -> (exit code, peak in GiB, seconds, output)."""
    start, peak = time.time(), 0
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None:
            try:
                status = Path(f"/proc/{process.pid}/status").read_text()
                peak = max(peak, int(status.split("VmHWM:")[1].split()[0]) * 1024)
            except (OSError, IndexError):  # it has just ended
                pass
            if until and until():
                process.kill()
                process.wait()
            time.sleep(0.1)
        output.seek(0)
        return process.returncode, round(peak / GIB, 2), round(time.time() - start, 1), output.read()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--folder", default=None)
    parser.add_argument("--write", default=None, help=argparse.SUPPRESS)
    args, flags = parser.parse_known_args()
    if args.write:
        return write_inputs(Path(args.write))
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        return measure(folder, flags)
    finally:
        shutil.rmtree(folder)


def measure(folder, flags):
    """Everything, in ``folder``; flags: more flags of train_ppo.py."""
    subprocess.run([sys.executable, __file__, "--write", str(folder)], check=True)
    paths = {
        "model": folder / "policy",
        "reward_model": folder / "reward",
        "data_path": folder / "prompts.jsonl",
    }
    sizes = {**paths, **SIZES, "out_dir": folder / "out", "device": "cpu"}
    argv = [str(x) for name, value in sizes.items() for x in (f"--{name}", value)]
    command = [sys.executable, str(ROOT / "trainer/train_ppo.py"), *argv, *flags]
    run, peaks, seconds = folder / "out/r", {}, {}

    def step(name, command, wanted, until=None):
        code, peaks[name], seconds[name], said = watch(command, until)
        print(f"{name}: exit code {code}, peak {peaks[name]} GiB, {seconds[name]} s\n{said}", flush=True)
        if code != wanted:
            raise SystemExit(f"{name}: exit code {code}")
        return said

    said = step("run", command, -9, until=(run / "checkpoints/step_2").exists)
    step("resumed", [*command, "--resume", "auto"], 0)
    result = folder / "out/ppo_actor_896.pth"
    step("exported", [sys.executable, str(ROOT / "export.py"), str(result), str(folder / "exported")], 0)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3] or [line["step"] for line in lines] == [1, 2, 3]
    phases = [
        {phase: round(line[f"perf/{phase}_seconds"], 1) for phase in PHASES} for line in lines if line["step"]
    ]
    said = said.splitlines()
    first = next(i for i, line in enumerate(said) if line.startswith("memory"))
    plan = [said[first], *takewhile(lambda line: line.startswith(" " * 9), said[first + 1 :])]
    rows = {"flags": flags, "peak GiB": peaks, "seconds": seconds, "steps": phases, "plan": plan}
    rows["pth GB"] = round(result.stat().st_size / 1e9, 2)
    write_results("half_billion_cpu", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
