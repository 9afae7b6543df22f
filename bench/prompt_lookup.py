"""Benchmark of prompt lookup: decoding with and without guesses, in float32 on the CPU.

Each checkpoint has the sizes of the embedded checkpoint or 37 million parameters. In both, the weights give each token
one likely successor. A prompt of 251 tokens is therefore followed by 200 tokens that repeat it. Every 16th token of
another prompt is replaced, so that the answer differs there. At temperature 100, all tokens are equally likely, so that
the answer does not repeat anything. Both engines answer in turns on one thread. The results are the best of several
rounds in processor time, so that other programs on the machine affect them little.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from bench.report import write
from mindie_mm.engine.core import Engine
from mindie_mm.engine.requests.engine_messages import Add
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.models import load_model
from mindie_mm.nn.checkpoint.directory import EMBEDDED
from mindie_mm.settings.config import EngineConfig
from tools.arguments import parser
from tools.random_checkpoint import write_checkpoint

FIRST_ID, PROMPT, OUTPUT, GUESSES, ROUNDS, EDITED = 10, 250, 200, 7, 5, 16
TEXTS = ("the prompt", "the prompt with changes", "nothing")
"""What the answers repeat."""


def write_chain(source: Path, out: Path) -> Path:
    """Write the checkpoint `source` to `out` with weights that make `successor` the likeliest next token."""
    shutil.copytree(source, out)
    config = json.loads((out / "config.json").read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = False
    (out / "config.json").write_text(json.dumps(config))
    weights = load_file(out / "model.safetensors")
    for name, weight in weights.items():
        if name.startswith("model.layers.") and name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
    embeddings = torch.randn(weights["model.embed_tokens.weight"].shape, generator=torch.Generator().manual_seed(0))
    embeddings = torch.nn.functional.normalize(embeddings) * 10
    head = embeddings.clone()
    head[successor(np.arange(len(head)))] = embeddings
    weights |= {"model.embed_tokens.weight": embeddings, "lm_head.weight": head}
    weights["model.norm.weight"].fill_(1)
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    return out


def successor(ids: np.ndarray) -> np.ndarray:
    """Return the token that follows each token. PROMPT tokens form a cycle, and other tokens follow themselves."""
    order = np.random.default_rng(0).permutation(PROMPT)
    following = np.arange(max(int(ids.max()) + 1, FIRST_ID + PROMPT))
    following[FIRST_ID + order] = FIRST_ID + np.roll(order, -1)
    return following[ids]


def prompt(text: str, start: int) -> np.ndarray:
    """Return a prompt whose last token is its first token, at place `start` of the cycle."""
    ids = [FIRST_ID + start]
    while len(ids) <= PROMPT:
        ids.append(int(successor(np.array(ids[-1:]))[0]))
    if text == "the prompt with changes":
        ids[EDITED - 1 : -1 : EDITED] = np.roll(ids[EDITED - 1 : -1 : EDITED], 1)
    return np.array(ids, np.int64)


def answer(engine: Engine, text: str, clients: int) -> tuple[float, float]:
    """Return the tokens per second of processor time after the first tokens, and the tokens per step of a request."""
    temperature = 100.0 if text == "nothing" else 0.0
    for i in range(clients):
        params = SamplingParams(temperature=temperature, seed=i, max_tokens=OUTPUT, ignore_eos=True)
        assert engine.add(Add(str(i), prompt(text, i * 50).tobytes(), params)) is None
    engine.step()
    accepted, start = engine.stats.accepted_tokens, time.process_time()
    while engine.has_work():
        engine.step()
    seconds, tokens = time.process_time() - start, clients * (OUTPUT - 1)
    return tokens / seconds, tokens / (tokens - (engine.stats.accepted_tokens - accepted))


def measure(path: Path) -> dict[str, Any]:
    model = load_model(path, "cpu", "float32")
    engines = [Engine(model, EngineConfig(num_speculative_tokens=number), 2**28) for number in (0, GUESSES)]
    figures: dict[str, Any] = {}
    for clients in (1, 4):
        for text in TEXTS:
            rounds = [[answer(engine, text, clients) for engine in engines] for _ in range(ROUNDS)]
            (plain, _), (guessing, per_step) = np.max(np.array(rounds), axis=0).tolist()
            figures[f"{clients} at once, repeats {text}"] = {
                "tokens_per_s_without_guesses": round(plain, 1),
                "tokens_per_s": round(guessing, 1),
                "ratio": round(guessing / plain, 2),
                "tokens_per_step": round(per_step, 2),
            }
            print(path.name, clients, text, figures[f"{clients} at once, repeats {text}"], flush=True)
    return figures


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        mid = write_checkpoint(Path(folder) / "mid", "mid")
        sources = {"embedded": EMBEDDED, "mid": mid}
        figures = {name: measure(write_chain(path, Path(folder) / f"{name} chain")) for name, path in sources.items()}
    write("prompt_lookup", {"prompt": PROMPT + 1, "output": OUTPUT, "num_speculative_tokens": GUESSES, **figures})


if __name__ == "__main__":
    parser(__doc__).parse_args()
    main()
