"""Train the embedded checkpoint: `python -m training.train_tiny --out mindie_mm/assets/tiny --state STATE`.

Training has three stages. First the vision tower alone learns the content at each of its tokens. Then the audio tower
alone learns the sound at each of its tokens. Both stages need no language, and their steps take a quarter of the time.
Finally the whole model learns to answer, with a lower learning rate for the towers.

Each batch is drawn from its number, which is the only source of randomness. An interrupted run resumes from its state
file. The spoken digits come from espeak-ng. The script does not access the network.

The shipped weights started from an earlier embedded checkpoint, a Qwen2-VL, with `--start FOLDER`. They therefore
skipped the first stage. An earlier script trained that checkpoint from random weights in 4,500 steps and half an hour.
The checkpoint is in git:

    git archive 7a802e3 mindie_mm/assets/tiny | tar x -C FOLDER --strip-components=3

From this checkpoint, the audio stage took 10 minutes and the answering stage 39 minutes, on two cores that other
programs also used. Including the earlier script, training took 79 minutes. The weights are not the result of one
uninterrupted run of this script. Until an interruption at step 1,000, the 400th step of answering, a batch had 4
counts, 4 comparisons, 2 tones, 4 rows of beeps and 5 digits. No run without `--start` has completed all three stages. A
new run produces different weights.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import distributed, multiprocessing, nn

from training.tiny_inputs import Batch
from training.tiny_layout import write_layout
from training.tiny_learning import Heads, answering_loss, draw_batch, hearing_loss, seeing_loss
from training.tiny_model import build_model, save, start_from, use_fast_towers
from training.tiny_truth import IGNORED

SEED = 20
# Steps of each stage. A run that starts from a Qwen2-VL skips the first stage.
SEEING_STEPS = 2400
HEARING_STEPS = 600
STEPS = 1200
TOWER_RATE = 1e-3
ANSWERING_RATE = 1.2e-3
# Factors of the towers' learning rate while the language model learns to answer.
TOWER_SHARE = {"visual": 0.25, "audio_tower": 0.5, "language_model": 1.0}
WARM_UP = 100
PLATEAU = 0.5
REPORT_EVERY = 50
# A step consists mostly of small operations, so two processes with one thread each waste less time than one process
# with two threads.
WORKERS = 2
# Weight of the towers' dense losses relative to the loss of the answers.
DENSE_SHARE = 0.3
# Without instructions for bfloat16, a processor computes in bfloat16 several times more slowly than in float32.
FAST_BFLOAT16 = torch.cpu._is_avx512_bf16_supported()  # noqa: SLF001 - there is no public name
SAVE_EVERY = 100


def rate(stage: str, step: int, steps: int) -> float:
    """Return the learning rate of a step: a warm-up, then in the last stage a cosine to zero."""
    warm = min(1.0, (step + 1) / WARM_UP)
    if stage != "answering":
        return TOWER_RATE * warm
    done = max(0.0, step / steps - PLATEAU) / (1 - PLATEAU)
    return ANSWERING_RATE / 2 * (1 + math.cos(math.pi * done)) * warm


def new_optimizer(model: Any, heads: nn.Module) -> torch.optim.AdamW:
    """Create an AdamW optimizer for the towers, the language model and the heads. Only matrices decay."""
    groups = []
    for part, share in TOWER_SHARE.items():
        parameters = [*getattr(model.model, part).parameters()]
        if part == "visual":
            parameters += heads.parameters()
        for matrices in (True, False):
            chosen = [p for p in parameters if (p.ndim > 1) == matrices]
            groups.append({"params": chosen, "weight_decay": 0.05 if matrices else 0.0, "share": share})
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), fused=True)


def _average(parameters: list[nn.Parameter]) -> None:
    """Average the gradients over the workers in one message. Parameters without a gradient keep none."""
    touched = [(p, p.grad) for p in parameters if p.grad is not None]
    flat = torch.cat([grad.view(-1) for _, grad in touched])
    distributed.all_reduce(flat)
    flat /= WORKERS
    for (p, _), part in zip(touched, flat.split([p.numel() for p, _ in touched]), strict=True):
        p.grad = part.view_as(p)


class Log:
    """Scores and losses of worker 0 since its last report."""

    def __init__(self) -> None:
        self.score = Counter[str]()
        self.losses = [0.0, 0.0]
        self.started = time.perf_counter()

    def add(self, loss: float, dense: float) -> None:
        """Add the losses of one part of a step."""
        self.losses[0] += loss
        self.losses[1] += dense

    def report(self, step: int) -> None:
        """Print the means and reset them."""
        line: dict[str, Any] = {"step": step, "s": round(time.perf_counter() - self.started)}
        line |= {"loss": round(self.losses[0] / REPORT_EVERY, 4)}
        line |= {"dense": round(self.losses[1] / REPORT_EVERY, 4)}
        tasks = [task for task in self.score if not task.endswith(" right")]
        line |= {task: f"{self.score[f'{task} right'] / self.score[task]:.2f}" for task in tasks}
        print(json.dumps(line), flush=True)
        self.score.clear()
        self.losses = [0.0, 0.0]


def answer_step(model: Any, heads: Heads, parts: list[Batch], log: Log) -> None:
    """Accumulate the gradients of one batch of conversations."""
    tokens = sum(int((part.labels[:, 1:] != IGNORED).sum()) for part in parts)
    for part in parts:
        loss, dense = answering_loss(model, heads, part, log.score)
        loss, dense = loss / tokens, dense / len(parts)
        (loss + DENSE_SHARE * dense).backward()
        log.add(loss.item(), dense.item())


def work(rank: int, out: Path, state: Path, start: Path | None, meeting: str, steps: int, seed: int) -> None:
    """Run one worker through all stages. Worker 0 saves every `SAVE_EVERY` steps."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    distributed.init_process_group("gloo", meeting, rank=rank, world_size=WORKERS)
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    model = build_model(out).train()
    heads = Heads(model.config.text_config.hidden_size)
    use_fast_towers()
    if start is not None:
        start_from(model, tokenizer, start)
    everything = [*model.parameters(), *heads.parameters()]
    stages = {"seeing": 0 if start else SEEING_STEPS, "hearing": HEARING_STEPS, "answering": steps}
    saved: dict[str, Any] = torch.load(state) if state.exists() else {"step": 0}
    if saved["step"]:
        model.load_state_dict(saved["model"])
        heads.load_state_dict(saved["heads"])
    log = Log()
    begun = 0
    for stage, length in stages.items():
        optimizer = new_optimizer(model, heads)
        first = max(0, saved["step"] - begun)
        if 0 < first < length:
            optimizer.load_state_dict(saved["optimizer"])
        for step in range(first, length):
            for group in optimizer.param_groups:
                group["lr"] = rate(stage, step, length) * (group["share"] if stage == "answering" else 1.0)
            number = (begun + step) * WORKERS + rank
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=FAST_BFLOAT16):
                if stage == "answering":
                    answer_step(model, heads, draw_batch(tokenizer, seed, number), log)
                else:
                    rng = random.Random(seed * 1_000_003 + number)
                    dense = (seeing_loss if stage == "seeing" else hearing_loss)(model, heads, rng, log.score)
                    dense.backward()
                    log.add(0.0, dense.item())
            _average(everything)
            nn.utils.clip_grad_norm_(everything, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            done = begun + step + 1
            if rank == 0 and done % REPORT_EVERY == 0:
                log.report(done)
            if rank == 0 and (done % SAVE_EVERY == 0 or step + 1 == length):
                save(model, out)
                run = {"model": model.state_dict(), "heads": heads.state_dict(), "optimizer": optimizer.state_dict()}
                part = state.with_suffix(".part")
                torch.save({"step": done, **run}, part)
                part.replace(state)
        begun += length


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--state", type=Path, required=True, help="file from which an interrupted run resumes")
    parser.add_argument("--start", type=Path, help="checkpoint of a Qwen2-VL of the same sizes to start from")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=SEED)
    args = parser.parse_args()
    write_layout(args.out)
    with tempfile.TemporaryDirectory() as folder:
        meeting = (Path(folder) / "meeting").as_uri()
        run = (args.out, args.state, args.start, meeting, args.steps, args.seed)
        multiprocessing.spawn(work, run, WORKERS)  # type: ignore[attr-defined, no-untyped-call]


if __name__ == "__main__":
    main()
