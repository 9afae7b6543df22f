"""Dense targets for every token of the towers, used in training only.

The answer to a question is one word about a whole image. The towers learn many times faster if each token must also
predict the content at its place. The heads that predict it are discarded after training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from training.scenes import COLOURS, DIRECTIONS, SHAPES, Scene
from training.sounds import MAX_BEEPS, PITCHES, Sound
from training.speech import DIGITS

IGNORED = -100
_COLOURS, _SHAPES = list(COLOURS), list(SHAPES)
# Columns of the vision head: color, shape and motion with "none" first, then center, row and column.
WIDTHS = (len(_COLOURS) + 1, len(_SHAPES) + 1, len(DIRECTIONS) + 1, 1, 2)
OUTPUTS = sum(WIDTHS)
# Columns of the audio head: digit and tone with "none" first, then the number of beeps so far.
HEARD_WIDTHS = (len(DIGITS) + 1, len(PITCHES) + 1, MAX_BEEPS + 1)
HEARD_OUTPUTS = sum(HEARD_WIDTHS)
HEARD = ("digit", "tone", "beeps")
# Duration of an audio token, in seconds.
TOKEN_S = 0.04


def _direction(scenes: Sequence[Scene]) -> int:
    """Return the class of the motion from the first scene to the last, or 0 for none."""
    if len(scenes) < 2:
        return 0
    first, last = scenes[0].things[0], scenes[-1].things[0]
    dx, dy = last.x - first.x, last.y - first.y
    name = ("left" if dx < 0 else "right") if abs(dx) > abs(dy) else ("up" if dy < 0 else "down")
    return 1 + DIRECTIONS.index(name)


def _cells(scene: Scene, rows: int, columns: int, direction: int) -> list[list[float]]:
    short = min(scene.width, scene.height)
    cells = []
    for row in range(rows):
        for column in range(columns):
            x, y = (column + 0.5) / columns, (row + 0.5) / rows
            unknown = float(IGNORED) if not scene.things else 0.0
            cell = [unknown, unknown, 0.0, 0.0, y - 0.5, x - 0.5]
            nearest = math.inf
            for thing in scene.things:
                dx = (thing.x - x) * scene.width / short
                dy = (thing.y - y) * scene.height / short
                inside = int(thing.x * columns) == column and int(thing.y * rows) == row
                distance = 0.0 if inside else math.hypot(dx, dy)
                if distance < min(nearest, 0.5 * thing.size):
                    nearest = distance
                    kinds = _COLOURS.index(thing.colour), _SHAPES.index(thing.shape)
                    cell[:3] = [1.0 + kinds[0], 1.0 + kinds[1], float(direction)]
                    if len(scene.things) > 1:  # the objects are small, and no question asks for their shapes
                        cell[1] = float(IGNORED)
                cell[3] = max(cell[3], float(inside))
            cells.append(cell)
    return cells


def truth(scenes: Sequence[Scene], grid: tuple[int, int, int], merge: int) -> torch.Tensor:
    """Compute the targets of an image (one scene) or a video (a scene per frame), float32 [tokens, 6].

    The columns are the classes of color, shape and motion, the center (0 or 1), and row and column from the middle.
    """
    t, rows, columns = grid[0], grid[1] // merge, grid[2] // merge
    direction = _direction(scenes)
    cells: list[list[float]] = []
    for i in range(t):
        cells += _cells(scenes[i * len(scenes) // t], rows, columns, direction)
    return torch.tensor(cells)


def dense_loss(predicted: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Compute the mean loss of a head's outputs [tokens, OUTPUTS] against targets [tokens, 6]."""
    *kinds, centre, place = predicted.float().split(WIDTHS, dim=1)
    loss = mse_loss(place, wanted[:, 4:6]) * 4
    loss = loss + binary_cross_entropy_with_logits(centre[:, 0], wanted[:, 3])
    for column, logits in enumerate(kinds):
        # Most tokens are empty, so give the others more weight.
        weight = torch.ones(logits.shape[1])
        weight[0] = 0.3
        loss = loss + cross_entropy(logits, wanted[:, column].long(), weight, ignore_index=IGNORED)
    return loss


def tally(predicted: torch.Tensor, wanted: torch.Tensor) -> dict[str, tuple[int, int]]:
    """Count correct predictions and targets by kind, over the tokens on an object. For centers, count all tokens."""
    *kinds, centre, _ = predicted.split(WIDTHS, dim=1)
    scores = {}
    for column, (name, logits) in enumerate(zip(("colour", "shape", "motion"), kinds, strict=True)):
        on = wanted[:, column] > 0
        right = logits[on].argmax(1) == wanted[on, column]
        scores[name] = int(right.sum()), int(on.sum())
    at = wanted[:, 3] > 0
    scores["centre"] = int((centre[at, 0] > 0).sum()), int(at.sum())
    scores["no centre"] = int((centre[~at, 0] < 0).sum()), int((~at).sum())
    return scores


def heard(sound: Sound, spans: Sequence[tuple[float, float]], tokens: int) -> torch.Tensor:
    """Compute a sound's target classes, int64 [tokens, 3]. `spans` come from `training.sounds.make`."""
    middles = (torch.arange(tokens) + 0.5) * TOKEN_S
    wanted = torch.zeros(tokens, 3, dtype=torch.long)
    for start, length in spans:
        within = (middles >= start) & (middles < start + length)
        if sound.kind == "beeps":
            wanted[:, 2] += middles >= start
        else:
            names = DIGITS if sound.kind == "digit" else tuple(PITCHES)
            wanted[within, 0 if sound.kind == "digit" else 1] = 1 + names.index(sound.answer)
    if sound.kind == "beeps":  # beeps have a pitch, but no question asks for it
        wanted[:, 1] = IGNORED
    return wanted


def heard_loss(predicted: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Compute the mean loss of a head's outputs [tokens, HEARD_OUTPUTS] against targets [tokens, 3]."""
    loss = torch.zeros(())
    for column, logits in enumerate(predicted.float().split(HEARD_WIDTHS, dim=1)):
        if (wanted[:, column] != IGNORED).any():
            loss = loss + cross_entropy(logits, wanted[:, column], ignore_index=IGNORED)
    return loss


def heard_tally(predicted: torch.Tensor, wanted: torch.Tensor) -> dict[str, tuple[int, int]]:
    """Count correct predictions and targets by kind, over the tokens that are not silent."""
    scores = {}
    for i, (name, logits) in enumerate(zip(HEARD, predicted.split(HEARD_WIDTHS, dim=1), strict=True)):
        on = wanted[:, i] > 0
        scores[f"heard {name}"] = int((logits[on].argmax(1) == wanted[on, i]).sum()), int(on.sum())
    return scores
