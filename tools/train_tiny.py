"""Trains the embedded checkpoint: `python -m tools.train_tiny --out mindie_mm/assets/tiny`.

Two stages. First the vision tower alone learns what lies under each of its tokens, which needs no
language and a quarter of the work; then the whole model learns to answer, the tower at half the
rate. Needs about half an hour of two cores (2,400 steps at 0.2 s and 2,100 at 0.6 to 0.75 s, timed over 100
steps each) and nothing from the network. Every batch is
drawn from its own number and nothing else is left to chance; an interrupted run goes on from its
state file.

The shipped weights saw these 4,500 steps, but the recipe settled on the way: their first 1,600 steps
had more things to a view and a rate of 1.5e-3, "yes" or "no" stood alone until step 3,500, the drill
came at 3,800 and the shares of the tasks changed twice. A run from scratch gives other weights.
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
from torch.nn.functional import cross_entropy

from tools.samples import sample
from tools.scenes import DIRECTIONS, MAX_COUNT, TRAIN, draw_all, moving, several, single
from tools.tiny_inputs import Batch, collate, encode, normalise, patches
from tools.tiny_layout import IMAGE_PIXELS, MERGE, VIDEO_PIXELS, write_layout
from tools.tiny_model import build_model, save, use_fast_tower
from tools.tiny_positions import use_papers_positions
from tools.tiny_truth import IGNORED, OUTPUTS, dense_loss, tally, truth

SEED = 20
SEEING_STEPS = 2400
STEPS = 2100
# Views that a worker takes in one step of the first stage.
VIEWS = 16
SEEING_RATE = 1e-3
ANSWERING_RATE = 1.5e-3
# The tower's part of the rate while the language model learns to answer.
TOWER_SHARE = 0.5
WARM_UP = 100
PLATEAU = 0.8
REPORT_EVERY = 50
# Two processes of one thread each waste less than one of two: most of a step is small operations.
WORKERS = 2
# The dense loss of the vision tower beside the loss of the answers.
DENSE_SHARE = 0.5
# Without the instructions for it bfloat16 is several times slower than float32.
FAST_BFLOAT16 = torch.cpu._is_avx512_bf16_supported()  # noqa: SLF001 - there is no public name
SAVE_EVERY = 100
# Samples of each task that a worker takes in one step. They go through the model in parts of about
# equal length, so that little of a batch is padding.
SHARES = ({"name": 3, "where": 3, "count": 8, "chat": 1, "drill": 5}, {"compare": 6, "motion": 3})


def draw_batch(tokenizer: Tokenizer, seed: int, number: int) -> list[Batch]:
    """The parts of batch `number`."""
    rng = random.Random(seed * 1_000_003 + number)
    pad: int = tokenizer.token_to_id("<|endoftext|>") or 0
    parts = []
    for shares in SHARES:
        tasks = [task for task, share in shares.items() for _ in range(share)]
        items = [encode(tokenizer, sample(rng, TRAIN, task)) for task in tasks]
        parts.append(collate(items, tasks, pad))
    return parts


def draw_views(rng: random.Random, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pictures and pairs of a video's frames with nothing asked: patches, grids and targets."""
    found, grids, targets = [], [], []
    for i in range(count):
        kind = i % 8
        if kind < 5:
            scenes = [single(rng, TRAIN)]
        elif kind < 7:
            scenes = [several(rng, TRAIN, rng.randint(1, MAX_COUNT))]
        else:
            video = moving(rng, TRAIN, rng.choice(DIRECTIONS), rng.choice((4, 6, 8, 10)))
            start = rng.randrange(0, len(video), 2)
            scenes = video[start : start + 2]
        raw, grid = patches(draw_all(scenes), IMAGE_PIXELS if len(scenes) == 1 else VIDEO_PIXELS)
        found.append(raw)
        grids.append(grid)
        targets.append(truth(scenes, grid, MERGE))
    return torch.cat(found), torch.tensor(grids), torch.cat(targets)


def seeing_loss(model: Any, head: nn.Linear, rng: random.Random, score: Counter[str]) -> torch.Tensor:
    """The dense loss of a batch of views; counts what lies under the tokens of things."""
    raw, grids, wanted = draw_views(rng, VIEWS)
    seen = model.model.get_image_features(normalise(raw), grids, return_dict=True).pooler_output
    said = head(torch.cat(seen))
    for name, (right, asked) in tally(said.detach(), wanted).items():
        score[name] += asked
        score[f"{name} right"] += right
    return dense_loss(said, wanted)


def loss_of(model: Any, head: nn.Linear, batch: Batch, score: Counter[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """The summed loss over the answers' tokens, and the dense loss of what the tower saw."""
    inner, config = model.model, model.config
    seen: dict[str, Any] = {}
    grids: dict[str, torch.Tensor] = {}
    dense = torch.zeros(())
    if batch.image_patches is not None and batch.image_grids is not None:
        pixels = normalise(batch.image_patches)
        seen["image"] = inner.get_image_features(pixels, batch.image_grids, return_dict=True)
        grids["image_grid_thw"] = batch.image_grids
        dense = dense + dense_loss(head(torch.cat(seen["image"].pooler_output)), batch.image_truths)
    if batch.video_patches is not None and batch.video_grids is not None:
        pixels = normalise(batch.video_patches)
        seen["video"] = inner.get_video_features(pixels, batch.video_grids, return_dict=True)
        grids["video_grid_thw"] = batch.video_grids
        dense = dense + dense_loss(head(torch.cat(seen["video"].pooler_output)), batch.video_truths)
    kinds = (batch.ids == config.image_token_id).int()
    kinds += 2 * (batch.ids == config.video_token_id).int()
    hidden = inner(
        input_ids=batch.ids,
        mm_token_type_ids=kinds,
        mm_encoder_outputs=seen,
        use_cache=False,
        **grids,
    )[0]
    wanted = batch.labels[:, 1:]
    learned = wanted != IGNORED
    logits = model.lm_head(hidden[:, :-1][learned]).float()
    right = torch.ones_like(learned)
    right[learned] = logits.argmax(-1) == wanted[learned]
    for task, hit in zip(batch.tasks, right.all(1).tolist(), strict=True):
        score[task] += 1
        score[f"{task} right"] += hit
    return cross_entropy(logits, wanted[learned], reduction="sum"), dense


def rate(step: int, steps: int) -> float:
    """The learning rate of a step: a warm-up in each stage, a cosine to zero at the end."""
    if step < SEEING_STEPS:
        return SEEING_RATE * min(1.0, (step + 1) / WARM_UP)
    step -= SEEING_STEPS
    done = max(0.0, step / steps - PLATEAU) / (1 - PLATEAU)
    return ANSWERING_RATE / 2 * (1 + math.cos(math.pi * done)) * min(1.0, (step + 1) / WARM_UP)


def new_optimizer(model: Any, head: nn.Module) -> torch.optim.AdamW:
    """AdamW over the tower and the rest; only matrices decay."""
    tower = [*model.model.visual.parameters(), *head.parameters()]
    rest = [*model.model.language_model.parameters()]
    groups = [
        {
            "params": [p for p in parameters if (p.ndim > 1) == matrices],
            "weight_decay": 0.05 if matrices else 0.0,
            "tower": parameters is tower,
        }
        for parameters in (tower, rest)
        for matrices in (True, False)
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), fused=True)


def _average(parameters: list[nn.Parameter]) -> None:
    """Gradients become their mean over the workers, in one message; the untouched stay so."""
    touched = [(p, p.grad) for p in parameters if p.grad is not None]
    flat = torch.cat([grad.view(-1) for _, grad in touched])
    distributed.all_reduce(flat)
    flat /= WORKERS
    for (p, _), part in zip(touched, flat.split([p.numel() for p, _ in touched]), strict=True):
        p.grad = part.view_as(p)


class Log:
    """What worker 0 has seen since its last report."""

    def __init__(self) -> None:
        self.score = Counter[str]()
        self.losses = [0.0, 0.0]
        self.started = time.perf_counter()

    def add(self, loss: float, dense: float) -> None:
        """Takes one part's share of a step's losses."""
        self.losses[0] += loss
        self.losses[1] += dense

    def report(self, step: int) -> None:
        """Prints the means and begins again."""
        line: dict[str, Any] = {"step": step, "s": round(time.perf_counter() - self.started)}
        line |= {"loss": round(self.losses[0] / REPORT_EVERY, 4)}
        line |= {"dense": round(self.losses[1] / REPORT_EVERY, 4)}
        tasks = [task for task in self.score if not task.endswith(" right")]
        line |= {task: f"{self.score[f'{task} right'] / self.score[task]:.2f}" for task in tasks}
        print(json.dumps(line), flush=True)
        self.score.clear()
        self.losses = [0.0, 0.0]


def answer_step(model: Any, head: nn.Linear, parts: list[Batch], log: Log) -> None:
    """Gradients of one batch of conversations."""
    tokens = sum(int((part.labels[:, 1:] != IGNORED).sum()) for part in parts)
    for part in parts:
        loss, dense = loss_of(model, head, part, log.score)
        loss, dense = loss / tokens, dense / len(parts)
        (loss + DENSE_SHARE * dense).backward()
        log.add(loss.item(), dense.item())


def work(rank: int, out: Path, state: Path, meeting: str, steps: int, seed: int) -> None:
    """One worker's part of the whole recipe; worker 0 saves every `SAVE_EVERY` steps."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    distributed.init_process_group("gloo", meeting, rank=rank, world_size=WORKERS)
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    model = build_model(out).train()
    head = nn.Linear(model.config.text_config.hidden_size, OUTPUTS)
    use_papers_positions()
    use_fast_tower()
    everything = [*model.parameters(), *head.parameters()]
    optimizer = new_optimizer(model, head)
    first = 0
    if state.exists():
        saved = torch.load(state)
        first = saved["step"]
        model.load_state_dict(saved["model"])
        head.load_state_dict(saved["head"])
        if first != SEEING_STEPS:
            optimizer.load_state_dict(saved["optimizer"])
    log = Log()
    for step in range(first, SEEING_STEPS + steps):
        if step == SEEING_STEPS:
            optimizer = new_optimizer(model, head)
        for group in optimizer.param_groups:
            tamed = TOWER_SHARE if group["tower"] and step >= SEEING_STEPS else 1.0
            group["lr"] = rate(step, steps) * tamed
        number = step * WORKERS + rank
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=FAST_BFLOAT16):
            if step < SEEING_STEPS:
                rng = random.Random(seed * 1_000_003 + number)
                dense = seeing_loss(model, head, rng, log.score)
                dense.backward()
                log.add(0.0, dense.item())
            else:
                answer_step(model, head, draw_batch(tokenizer, seed, number), log)
        _average(everything)
        nn.utils.clip_grad_norm_(everything, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if rank == 0 and (step + 1) % REPORT_EVERY == 0:
            log.report(step + 1)
        if rank == 0 and ((step + 1) % SAVE_EVERY == 0 or step + 1 == SEEING_STEPS + steps):
            save(model, out)
            run = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({"step": step + 1, "head": head.state_dict(), **run}, state)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--state", type=Path, required=True, help="where an interrupted run resumes")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=SEED)
    args = parser.parse_args()
    write_layout(args.out)
    with tempfile.TemporaryDirectory() as folder:
        meeting = (Path(folder) / "meeting").as_uri()
        run = (args.out, args.state, meeting, args.steps, args.seed)
        multiprocessing.spawn(work, run, WORKERS)  # type: ignore[attr-defined, no-untyped-call]


if __name__ == "__main__":
    main()
