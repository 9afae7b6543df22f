"""Training losses of the embedded checkpoint for views, clips and conversations."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn
from torch.nn.functional import cross_entropy

from training.samples import sample
from training.scenes import DIRECTIONS, MAX_COUNT, TRAIN, draw_all, moving, several, single
from training.sounds import SOUNDS, make
from training.tiny_inputs import Batch, Medium, audio_tokens, collate, encode, mels, normalise, patches
from training.tiny_layout import IMAGE_PIXELS, MERGE, VIDEO_PIXELS
from training.tiny_truth import (
    HEARD_OUTPUTS,
    IGNORED,
    OUTPUTS,
    dense_loss,
    heard,
    heard_loss,
    heard_tally,
    tally,
    truth,
)

# Views and clips per worker and step, in the stages before answering.
VIEWS, CLIPS = 16, 32
CLIP_KINDS = ("digit", "beeps", "digit", "tone", "digit", "beeps", "digit", "beeps")
# Samples of each task per worker and step. The model processes them in parts of similar length to
# reduce the padding.
SHARES = (
    {"name": 2, "where": 2, "count": 5, "chat": 1, "drill": 2, "tone": 1, "beeps": 3, "digit": 3},
    {"compare": 5, "motion": 2, "mixed": 4},
)


class Heads(nn.Module):
    """Heads that predict the towers' dense targets. They are discarded after training."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.seen = nn.Linear(width, OUTPUTS)
        self.heard = nn.Linear(width, HEARD_OUTPUTS)


def draw_batch(tokenizer: Tokenizer, seed: int, number: int) -> list[Batch]:
    """Draw the parts of batch `number`."""
    rng = random.Random(seed * 1_000_003 + number)
    pad: int = tokenizer.token_to_id("<|endoftext|>") or 0
    parts = []
    for shares in SHARES:
        tasks = [task for task, share in shares.items() for _ in range(share)]
        items = []
        for task in tasks:
            # Vary the pace, because the rate that a request states for its video may be wrong.
            pace = 1.0 if rng.random() < 0.7 else rng.uniform(0.3, 2.0)
            items.append(encode(tokenizer, sample(rng, TRAIN, task), second_per_grid=pace))
        parts.append(collate(items, tasks, pad))
    return parts


def _view(rng: random.Random, i: int) -> Medium:
    """Draw an image, or a pair of a video's frames, without a question."""
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
    return Medium("image", raw, grid, truth(scenes, grid, MERGE))


def _clip(rng: random.Random, i: int) -> Medium:
    """Draw a sound without a question."""
    sound = SOUNDS[CLIP_KINDS[i % len(CLIP_KINDS)]](rng, TRAIN)
    samples, spans = make(sound)
    features = mels(samples)
    tokens = audio_tokens(features.shape[1])
    return Medium("audio", features, (tokens, 1, 1), heard(sound, spans, tokens))


def _count(score: Counter[str], scores: dict[str, tuple[int, int]]) -> None:
    for name, (right, asked) in scores.items():
        score[name] += asked
        score[f"{name} right"] += right


def see(model: Any, heads: Heads, media: Sequence[Medium], score: Counter[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the features [tokens, hidden] of images and videos, and their dense loss."""
    pixels = normalise(torch.cat([medium.array for medium in media]))
    grids = torch.tensor([medium.grid for medium in media])
    features = model.model.visual(pixels, grid_thw=grids, return_dict=True).pooler_output
    logits, wanted = heads.seen(features), torch.cat([medium.truth for medium in media])
    _count(score, tally(logits.detach(), wanted))
    return features, dense_loss(logits, wanted)


def hear(model: Any, heads: Heads, media: Sequence[Medium], score: Counter[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the features [tokens, hidden] of sounds, and their dense loss."""
    lengths = torch.tensor([medium.array.shape[1] for medium in media])
    joined = torch.cat([medium.array for medium in media], dim=1)
    features = model.model.audio_tower(joined, feature_lens=lengths, return_dict=True).last_hidden_state
    logits, wanted = heads.heard(features), torch.cat([medium.truth for medium in media])
    _count(score, heard_tally(logits.detach(), wanted))
    return features, heard_loss(logits, wanted)


def seeing_loss(model: Any, heads: Heads, rng: random.Random, score: Counter[str]) -> torch.Tensor:
    """Compute the dense loss of a batch of views."""
    return see(model, heads, [_view(rng, i) for i in range(VIEWS)], score)[1]


def hearing_loss(model: Any, heads: Heads, rng: random.Random, score: Counter[str]) -> torch.Tensor:
    """Compute the dense loss of a batch of clips."""
    return hear(model, heads, [_clip(rng, i) for i in range(CLIPS)], score)[1]


def answering_loss(model: Any, heads: Heads, batch: Batch, score: Counter[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the summed loss over the answers' tokens, and the dense losses of the towers' features."""
    config, language = model.config, model.model.language_model
    embedded = language.embed_tokens(batch.ids)
    dense = torch.zeros(())
    quiet = Counter[str]()
    for senses, tokens, tower in (
        (("image", "video"), (config.image_token_id, config.video_token_id), see),
        (("audio",), (config.audio_token_id,), hear),
    ):
        media = [medium for medium in batch.media if medium.kind in senses]
        if media:
            features, loss = tower(model, heads, media, quiet)
            places = torch.isin(batch.ids, torch.tensor(tokens))
            embedded = embedded.masked_scatter(places[..., None], features.to(embedded.dtype))
            dense = dense + loss
    hidden = language(inputs_embeds=embedded, position_ids=batch.positions, use_cache=False)[0]
    wanted = batch.labels[:, 1:]
    learned = wanted != IGNORED
    logits = model.lm_head(hidden[:, :-1][learned]).float()
    right = torch.ones_like(learned)
    right[learned] = logits.argmax(-1) == wanted[learned]
    for task, hit in zip(batch.tasks, right.all(1).tolist(), strict=True):
        score[task] += 1
        score[f"{task} right"] += hit
    return cross_entropy(logits, wanted[learned], reduction="sum"), dense
