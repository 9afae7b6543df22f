"""Benchmark of each family compared with transformers: preprocessing, towers, prefill, and a request for one token.

The checkpoints are the test checkpoints, with random weights and few layers. They have the published checkpoints' sizes
of images, patches and tiles, and their audio settings.

Preprocessing begins with the bytes of a JPEG, decoded video frames or audio samples. For transformers, libjpeg-turbo
decodes the JPEG, as in torchvision's decoder, and tests/stubs does torchvision's arithmetic. The same photograph is
also preprocessed from decoded pixels, because decoding takes most of the time of a small image. mindie_mm's
preprocessing ends with a published block in shared memory.

The towers of mindie_mm read bytes, but the towers of transformers read normalized floats. The table therefore also
contains the sum of both steps. Prefill compares the layers over KV blocks with a call to transformers' model that keeps
its cache. A request passes through the engine's queue, KV blocks and sampler, and is compared with `generate` for one
token. Families whose reference is golden data are measured without a comparison.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import inspect
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
import torch
from numpy.typing import NDArray

from bench.report import RESULTS, median, write
from mindie_mm.decode.digest import content_digest
from mindie_mm.engine.requests.engine_messages import Add
from mindie_mm.engine.requests.sampling_params import SamplingParams
from mindie_mm.inputs import Kind, Media
from mindie_mm.models import family_named, load_model
from mindie_mm.nn.checkpoint.directory import Checkpoint
from mindie_mm.nn.family import Processor
from mindie_mm.nn.model import MediaModel
from mindie_mm.nn.paged_batch import Chunk, PagedBatch
from mindie_mm.nn.seq2seq import Seq2SeqModel
from mindie_mm.shm import Arena, release
from mindie_mm.tokenize import Tokenizer
from tests.audio_samples import tone
from tests.media_samples import encoded, photograph
from tests.models.contract import FamilyContract
from tests.transformers_reference import AutoTokenizer

IMAGE = (640, 480)
CLIP = (8, 360, 480)
"""Number of frames, height and width of the video."""
SECONDS = 10.0
PROMPT = 1000
"""Number of tokens in the text prompt, unless the checkpoint's context is shorter."""
BLOCK = 16
"""Number of tokens in a KV block."""
TEXT_STEPS = ("prefill", "first token")
FEWEST, MOST, LONG_ENOUGH_S = 5, 60, 0.3
"""Minimum and maximum number of turns, and the seconds of run time after which a variant needs no more turns."""

_CLIP_336 = {
    "config": {"vision_config": {"image_size": 336, "patch_size": 14}},
    "preprocessor_config": {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}},
    "processor_config": {"patch_size": 14},
}
_VISION_384 = {"vision_config": {"image_size": 384, "patch_size": 16}}
_SIDE_384 = {"size": {"height": 384, "width": 384}, "min_size": 14}
_QWEN_PIXELS = {"min_pixels": 56 * 56, "max_pixels": 12_845_056}
_QWEN_VIDEOS = {"min_pixels": 128 * 28 * 28, "max_pixels": 768 * 28 * 28}
_AUDIO = {"feature_size": 128, "chunk_length": 30, "n_samples": 480_000, "nb_max_frames": 3000}
_LONG_AUDIO = {"feature_size": 128, "chunk_length": 300, "n_samples": 4_800_000, "nb_max_frames": 30_000}
REAL: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "qwen2_vl": {"preprocessor_config": _QWEN_PIXELS},
    "qwen2_5_vl": {"preprocessor_config": _QWEN_PIXELS, "video_preprocessor_config": _QWEN_VIDEOS},
    "qwen3_vl": {
        "preprocessor_config": {"size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}},
        "video_preprocessor_config": {"size": {"shortest_edge": 4096, "longest_edge": 25_165_824}},
    },
    "qwen2_5_omni": {
        "config": {"audio_config": {"num_mel_bins": 128, "max_source_positions": 1500}},
        "processor_config": {
            "image_processor": {"size": {"shortest_edge": 56 * 56, "longest_edge": 12_845_056}},
            "video_processor": {"size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28}},
            "feature_extractor": _LONG_AUDIO,
        },
    },
    "qwen2_audio": {
        "config": {"audio_config": {"num_mel_bins": 128, "max_source_positions": 1500}},
        "processor_config": {"feature_extractor": _AUDIO},
    },
    "llava": _CLIP_336,
    "llava_next": {
        **_CLIP_336,
        "config": {
            **_CLIP_336["config"],
            "image_grid_pinpoints": (pins := [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]),
        },
        "preprocessor_config": {**_CLIP_336["preprocessor_config"], "image_grid_pinpoints": pins},
    },
    "llava_onevision": {
        "config": {
            "vision_config": {"image_size": 384, "patch_size": 14},
            "image_grid_pinpoints": (many := [[384 * h, 384 * w] for h in range(1, 7) for w in range(1, 7)]),
            "vision_aspect_ratio": "anyres_max_9",
        },
        "preprocessor_config": {"size": {"height": 384, "width": 384}, "image_grid_pinpoints": many},
        "video_preprocessor_config": {"size": {"height": 384, "width": 384}},
        "processor_config": {"num_image_tokens": 729, "vision_aspect_ratio": "anyres_max_9"},
    },
    "internvl": {
        "config": {"vision_config": {"image_size": [448, 448], "patch_size": [14, 14]}, "image_seq_length": 256},
        "preprocessor_config": {
            "size": {"height": 448, "width": 448},
            "crop_to_patches": True,
            "min_patches": 1,
            "max_patches": 12,
        },
        "video_preprocessor_config": {"size": {"height": 448, "width": 448}},
        "processor_config": {"image_seq_length": 256},
    },
    "gemma3": {
        "config": {"vision_config": {"image_size": 896, "patch_size": 14}, "mm_tokens_per_image": 256},
        "preprocessor_config": {"size": {"height": 896, "width": 896}},
        "processor_config": {"image_seq_length": 256},
    },
    "idefics3": {
        "config": {"vision_config": {"image_size": 364, "patch_size": 14}},
        "preprocessor_config": {"size": {"longest_edge": 1456}, "max_image_size": {"longest_edge": 364}},
        "processor_config": {"image_seq_len": 169},
    },
    "smolvlm": {
        "config": {"vision_config": {"image_size": 512, "patch_size": 16}, "scale_factor": 4},
        "preprocessor_config": {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}},
        "video_preprocessor_config": {
            "size": {"longest_edge": 512},
            "max_image_size": {"longest_edge": 512},
            "video_sampling": {"video_size": {"longest_edge": 512}, "max_frames": 64, "fps": 1},
        },
        "processor_config": {"image_seq_len": 64},
    },
    "molmo2": {"video_preprocessor_config": {"num_frames": 64}},
    "fuyu": {
        "config": {"patch_size": 30},
        "preprocessor_config": {"size": {"height": 1080, "width": 1920}, "patch_size": {"height": 30, "width": 30}},
    },
    "chameleon": {
        "config": {"vq_config": {"resolution": 512, "channel_multiplier": [1, 1, 2, 2, 4]}},
        "preprocessor_config": {"size": {"shortest_edge": 512}, "crop_size": {"height": 512, "width": 512}},
        "processor_config": {"image_seq_length": 1024},
    },
    "blip_2": {
        "config": {"vision_config": {"image_size": 224, "patch_size": 14}},
        "preprocessor_config": {"size": {"height": 224, "width": 224}},
    },
    "florence2": {
        "preprocessor_config": {"size": {"height": 768, "width": 768}, "image_seq_length": 577},
    },
    "deepseek_vl": {
        "config": _VISION_384,
        "preprocessor_config": _SIDE_384,
        "processor_config": {"num_image_tokens": 576},
    },
    "deepseek_vl_hybrid": {
        "config": {**_VISION_384, "high_res_vision_config": {"image_size": 1024, "patch_size": 16, "window_size": 14}},
        "preprocessor_config": {**_SIDE_384, "high_res_size": {"height": 1024, "width": 1024}},
        "processor_config": {"num_image_tokens": 576},
    },
}
"""Settings of the published checkpoints that differ from the small ones of the tests, by file. None removes a key."""

Contestants = dict[str, Callable[[], object]]
OURS, THEIRS = "ours", "transformers"


def contracts() -> dict[str, type[FamilyContract]]:
    """Return the test class of each family, by the family's name."""
    folder = Path(__file__).parents[1] / "mindie_mm" / "models"
    classes: dict[str, type[FamilyContract]] = {}
    for file in sorted(folder.glob("[a-z]*.py")):
        module = importlib.import_module(f"tests.models.test_{file.stem}")
        classes[file.stem] = next(
            value
            for name, value in vars(module).items()
            if name.startswith("Test") and getattr(value, "name", None) == file.stem
        )
    # This test shrinks videos through its own class. The benchmark needs the published processor's defaults.
    small = importlib.import_module("tests.models.test_qwen2_5_omni").SmallVideosProcessor
    small.videos_kwargs = small.__base__.videos_kwargs
    return classes


def write_checkpoint(contract: type[FamilyContract], out: Path) -> None:
    """Write the checkpoint of a family's test, with the image sizes of the published checkpoint."""
    contract.write_checkpoint(out)
    changes = REAL.get(contract.name, {})
    kind = type(contract.make_reference(out).model) if "config" in changes else None
    for name, change in changes.items():
        file = out / f"{name}.json"
        known = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        file.write_text(json.dumps(merged(known, change)), encoding="utf-8")
    if kind is not None:
        from transformers import GenerationConfig  # must follow the setup of tests/stubs in bench/__init__.py

        torch.manual_seed(0)
        model = kind(kind.config_class.from_pretrained(out))
        model.generation_config = GenerationConfig.from_pretrained(out)
        model.save_pretrained(out)
    if contract.name in {"idefics3", "smolvlm"}:  # the small vocabularies lack tags for the tiles of large images
        tokenizer = AutoTokenizer.from_pretrained(out)
        tags = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
        tokenizer.add_tokens(tags, special_tokens=True)
        tokenizer.save_pretrained(out)


def merged(known: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    out = {**known}
    for name, value in change.items():
        inner = isinstance(value, Mapping) and isinstance(known.get(name), Mapping) and name.endswith(("fig", "or"))
        out[name] = merged(known[name], value) if inner else value
    return {name: value for name, value in out.items() if value is not None}


def sources() -> dict[Kind, Any]:
    """Return an input item of each kind."""
    frames = np.stack([np.asarray(photograph("coffee.png", (CLIP[2], CLIP[1])))] * CLIP[0])
    for index, frame in enumerate(frames):
        frames[index] = np.roll(frame, 4 * index, axis=1)
    return {"image": encoded(photograph("coffee.png", IMAGE), quality=90), "video": frames, "audio": tone(SECONDS)}


def preprocessing(
    kind: Kind, data: Any, processor: Processor, reference: Any, arena: Arena, path_file: Path
) -> Contestants:
    """Return the functions to compare that turn an item into a published block, or into the arrays of transformers."""

    def ours() -> None:
        plan, write = processor.plan(Media(kind, data), data, {kind: 1})
        with arena.allocate(plan.specs, path_file=path_file) as block:
            write(block)
            block.publish(content_digest(plan.settings, data))

    def theirs() -> object:
        if kind == "image":
            pixels = data if isinstance(data, np.ndarray) else simplejpeg.decode_jpeg(data, "RGB")
            rgb = torch.from_numpy(pixels).permute(2, 0, 1)
            return reference.processor.image_processor(images=[rgb], return_tensors="pt")
        if kind == "video":
            return reference.processor.video_processor(videos=[data], return_tensors="pt")
        settings = {"sampling_rate": 16_000, "padding": "max_length", "return_attention_mask": True}
        return reference.processor.feature_extractor(data, return_tensors="pt", **settings)

    return {OURS: ours} if reference is None else {OURS: ours, THEIRS: theirs}


def towers(
    kind: Kind, data: Any, model: MediaModel, tokenizer: Tokenizer, reference: Any, path_file: Path
) -> Contestants:
    """Return the functions to compare that turn arrays into features."""
    ids = tokenizer.tokenize([{kind: data}], path_file)
    items = model.read(ids.numpy())
    contestants: Contestants = {OURS: lambda: model.encode(items)}
    if reference is not None:
        pixels = simplejpeg.decode_jpeg(data, "RGB") if kind == "image" else data
        contestants[THEIRS] = reference_tower(reference, kind, pixels)
    return contestants


def reference_tower(reference: Any, kind: Kind, item: NDArray[Any]) -> Callable[[], object]:
    inputs = dict(reference.inputs([{kind: item}, {"text": "?"}]))
    methods = (f"get_{kind}_features", "get_image_features")
    owners = (reference.model, getattr(reference.model, "model", None))
    method = next((getattr(o, name) for name in methods for o in owners if hasattr(o, name)), None)
    if method is None:  # Qwen2-Audio has these steps only in the model's `forward`
        parts = dict(reference.model.named_modules())
        tower, projector = (
            next(part for name, part in parts.items() if name.endswith(end)) for end in ("_tower", "_projector")
        )

        def hear() -> object:
            with torch.inference_mode():
                return projector(tower(inputs["input_features"]).last_hidden_state)

        return hear
    names = inspect.signature(method).parameters
    given = {name: inputs[name] for name in names if name in inputs}
    if "pixel_values" in names and "pixel_values" not in given:
        given["pixel_values"] = next(
            inputs[name] for name in ("pixel_values_videos", "image_patches") if name in inputs
        )

    def see() -> object:
        with torch.inference_mode():
            return method(**given)

    return see


def text_steps(contract: type[FamilyContract], model: Any, reference: Any, length: int) -> dict[str, Contestants]:
    """Return the functions to compare for a text prompt: prefill of the KV cache, and a request for one token."""
    ids = np.random.default_rng(0).integers(30, 100, length, dtype=np.int64)
    engine = contract().engine(model, prefix_caching=False, kv_cache_bytes=2**27)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)

    def request() -> None:
        engine.add(Add("0", ids.tobytes(), params))
        while engine.has_work():
            engine.step()

    steps: dict[str, Contestants] = {
        "prefill": {OURS: layers(model, torch.from_numpy(ids))},
        "first token": {OURS: request},
    }
    if reference is None:
        return steps
    # The whole BLIP-2 model requires pixels.
    whole = reference.model.language_model if type(reference.model).__name__.startswith("Blip2") else reference.model
    batch = torch.from_numpy(ids)[None]
    encoded = isinstance(model, Seq2SeqModel)
    further = {"decoder_input_ids": torch.tensor([[model.rules.start_token_id]])} if encoded else {"logits_to_keep": 1}

    def call() -> None:
        with torch.inference_mode():
            whole(input_ids=batch, use_cache=True, **further)

    def generate() -> None:
        whole.generate(input_ids=batch, max_new_tokens=1, do_sample=False)

    steps["prefill"][THEIRS] = call
    steps["first token"][THEIRS] = generate
    return steps


def layers(model: Any, ids: torch.Tensor) -> Callable[[], object]:
    """Return a function that computes the KV cache of `ids` and the logits of the last token."""
    if isinstance(model, Seq2SeqModel):
        return lambda: model.decode(model.encode_prompt(ids, []), [model.rules.start_token_id])
    cache = model.spec.allocate_cache(len(ids) // BLOCK + 1, BLOCK)
    positions, device = model.positions(len(ids), []).prompt, model.spec.device

    def run() -> None:
        paged = PagedBatch([Chunk(0, len(ids), range(cache.padding))], cache, device)
        model.head(model.states(ids, positions, [], paged, torch.tensor([len(ids) - 1])))

    return run


def milliseconds(
    contestants: Contestants, clock: Callable[[], float], path_file: Path | None = None
) -> dict[str, float]:
    """Return the milliseconds of each function. The functions run alternately, in random order.

    For CPU time, return the median. For wall time, return the minimum, because other load increases wall time. The
    blocks in `path_file` are released after each turn.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for entry in contestants.values():  # warm-up
        entry()
    order = random.Random(0)
    gc.collect()
    while True:
        for name in order.sample(list(contestants), len(contestants)):
            start = clock()
            contestants[name]()
            seconds[name].append(clock() - start)
            if path_file is not None:
                release(path_file)
                path_file.unlink(missing_ok=True)
        turns = len(seconds[OURS])
        if turns >= MOST or (turns >= FEWEST and min(map(sum, seconds.values())) >= LONG_ENOUGH_S):
            middle = median if clock is time.process_time else min
            return {name: 1e3 * middle(values) for name, values in seconds.items()}


def figures_of(ms: Mapping[str, float], scale: float = 1.0) -> dict[str, float]:
    figures = {name: round(value * scale, 2) for name, value in ms.items()}
    return {**figures, "ratio": round(ms[THEIRS] / ms[OURS], 2)} if THEIRS in ms else figures


@contextmanager
def threads(count: int) -> Iterator[Callable[[], float]]:
    """Set the number of PyTorch threads, and yield the clock to use.

    For one thread, the clock measures CPU time, which depends little on other load. For several threads, it measures
    wall time.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield time.process_time if count == 1 else time.perf_counter
    finally:
        torch.set_num_threads(before)


def measure(contract: type[FamilyContract], arena: Arena, folder: Path, cores: Sequence[int]) -> dict[str, Any]:
    """Return all figures of one family for each number of cores."""
    write_checkpoint(contract, folder)
    family = family_named(contract.name)
    reference = None if "golden" in family.reference else contract.make_reference(folder)
    processor, model = family.processor(Checkpoint.open(folder)), load_model(folder, device="cpu", dtype="float32")
    length, path_file = min(PROMPT, model.spec.max_model_len - 2), folder / "shm_name.txt"
    figures: dict[str, Any] = {"reference": family.reference}
    data = {kind: value for kind, value in sources().items() if kind in family.kinds}
    with Tokenizer.from_pretrained(folder, arena=arena) as tokenizer:
        steps: dict[str, Contestants] = {}
        for kind, item in data.items():
            steps[f"preprocess {kind}"] = preprocessing(kind, item, processor, reference, arena, path_file)
            if kind == "image":
                pixels = simplejpeg.decode_jpeg(item, "RGB")
                steps["preprocess pixels"] = preprocessing(kind, pixels, processor, reference, arena, path_file)
            steps[f"tower {kind}"] = towers(kind, item, model, tokenizer, reference, folder / f"{kind}.txt")
        steps |= text_steps(contract, model, reference, length)
        for count in cores:
            with threads(count) as clock:
                measured = {
                    step: milliseconds(entries, clock, path_file if step.startswith("preprocess") else None)
                    for step, entries in steps.items()
                }
            for step in TEXT_STEPS:
                measured[step] = {name: value * 1000 / length for name, value in measured[step].items()}
            for kind in data:
                parts = [measured[f"preprocess {kind}"], measured[f"tower {kind}"]]
                measured[f"both {kind}"] = {name: sum(part[name] for part in parts) for name in parts[0]}
            figures[f"{count} cores"] = {step: figures_of(ms) for step, ms in measured.items()}
        for kind in data:
            release(folder / f"{kind}.txt")
    return figures


def table(families: Mapping[str, Any], count: int) -> str:
    """Return a Markdown table of mindie_mm's times in milliseconds, and of the ratios of transformers' times to them.

    The table has a row per kind of media.
    """

    def cell(figures: Mapping[str, float]) -> str:
        return f"{figures[OURS]:.1f} ({figures['ratio']:.2f}x)" if "ratio" in figures else f"{figures[OURS]:.1f} (-)"

    cores = {1: "one core", 2: "two cores"}[count]
    lines = [
        (
            f"On {cores}: time in ms, and in parentheses the time of transformers divided by it. A dash (-) means that "
            "there is only golden data to compare with."
        ),
        "",
        "| family | item | preprocess | of it decoded | tower | both | 1,000 tokens: prefill | a request |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, family in families.items():
        figures = family[f"{count} cores"]
        kinds = [step.removeprefix("tower ") for step in figures if step.startswith("tower ")]
        for kind in kinds:
            decoded = [cell(figures["preprocess pixels"]) if kind == "image" else ""]
            steps = [cell(figures[f"{step} {kind}"]) for step in ("preprocess", "tower", "both")]
            steps[1:1] = decoded
            steps += [cell(figures[step]) for step in TEXT_STEPS]
            lines.append(f"| {name} | {kind} | {' | '.join(steps)} |")
    return "\n".join([*lines, ""])


def main(names: Sequence[str] = (), cores: Sequence[int] = (1, 2)) -> None:
    classes = contracts()
    figures: dict[str, Any] = {}
    with Arena.create(512 * 2**20) as arena:
        arena.populated.wait()
        for name in names or classes:
            with tempfile.TemporaryDirectory() as folder:
                figures[name] = measure(classes[name], arena, Path(folder), cores)
            print(name, json.dumps(figures[name]), flush=True)
    if not names:
        settings = {"image": IMAGE, "clip": CLIP, "seconds_of_audio": SECONDS, "prompt": PROMPT}
        write("models", {**settings, "unit": "milliseconds", "families": figures})
        tables = [table(figures, count) for count in cores]
        (RESULTS / "models.md").write_text(
            "\n".join(["# Each family compared with transformers", "", *tables]), encoding="utf-8"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names",
        nargs="*",
        help="families to measure; default: all families, whose figures are written to bench/results",
    )
    parser.add_argument("--cores", nargs="+", type=int, choices=(1, 2), default=(1, 2))
    options = parser.parse_args()
    main(options.names, options.cores)
