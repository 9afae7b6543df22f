"""Rounds of `bench.loras` in vLLM. `bench.loras` starts this program with the Python of an environment that has vLLM.

Each line of the standard input is a number of adapters. The answer is the number of requests per second.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path


def main(checkpoint: Path, adapters: list[Path], prompts: list[list[int]], output: int, rank: int) -> None:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    llm = LLM(
        model=str(checkpoint),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=len(prompts),
        enable_lora=True,
        max_loras=len(adapters),
        max_lora_rank=rank,
        enable_prefix_caching=False,
        limit_mm_per_prompt={"image": 0, "video": 0},
    )
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
    loras = [LoRARequest(folder.name, number + 1, str(folder)) for number, folder in enumerate(adapters)]
    for line in sys.stdin:
        used = loras[: int(line)] or [None]
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        start = time.process_time()
        llm.generate(
            inputs, params, lora_request=[used[number % len(used)] for number in range(len(prompts))], use_tqdm=False
        )
        print(f"RESULT {len(prompts) / (time.process_time() - start)}", flush=True)


if __name__ == "__main__":
    parsed = argparse.ArgumentParser(description=__doc__)
    parsed.add_argument("checkpoint", type=Path)
    parsed.add_argument("adapters", type=Path, help="folder with one folder for each adapter")
    parsed.add_argument("prompts", type=Path, help="file with the token ids of a prompt in each line")
    parsed.add_argument("output", type=int, help="tokens of each answer")
    parsed.add_argument("rank", type=int)
    given = parsed.parse_args()
    lines = given.prompts.read_text(encoding="utf-8").splitlines()
    folders = sorted(given.adapters.iterdir())
    main(given.checkpoint, folders, [[*map(int, line.split())] for line in lines], given.output, given.rank)
