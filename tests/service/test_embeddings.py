"""Tests for requests with embeddings in place of images and audio clips."""

from __future__ import annotations

import base64
import builtins
import io
import json
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
import torch
from safetensors.torch import save as save_safetensors
from torch import Tensor

from mindie_mm.decode.decoder_messages import DecoderSetup
from mindie_mm.decode.nursery import load_processor
from mindie_mm.errors import MediaError
from mindie_mm.media.embeddings import read_embeddings
from mindie_mm.models import load_model
from mindie_mm.settings.config import MediaCaps
from mindie_mm.tokenize.tokenizer import Tokenizer
from tests.audio_samples import encode_audio, tone
from tests.media_samples import encode_video, moving_frames
from tests.service.conftest import TINY
from tests.warm import running_service
from tools.demo import draw_shape, encode
from tools.serving import RunningService

CHAT = "/v1/chat/completions"
WIDTH = 128
RED = encode(draw_shape("red", (220, 40, 40), "square", x=0.4), "PNG")
AUDIO = encode_audio(tone(1.0), 16_000)
CLIP = encode_video(moving_frames(8))


def to_torch(value: Any, **options: Any) -> bytes:
    """Return the output of `torch.save`."""
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def to_safetensors(tensor: Tensor) -> bytes:
    return save_safetensors({"features": tensor.contiguous()})


def as_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def image(data: bytes | None, grid: bytes | None = None, **more: Any) -> dict[str, Any]:
    files = {"image_embeds": data, "image_grid_thw": grid}
    return {
        "type": "image_embeds",
        "image_embeds": {key: as_base64(file) for key, file in files.items() if file is not None},
        **more,
    }


def rows(count: int = 4, width: int = WIDTH) -> Tensor:
    return torch.zeros(count, width)


def grid_of(*numbers: int) -> bytes:
    return to_torch(torch.tensor([numbers]))


@pytest.fixture(scope="module")
def trusting(tmp_path_factory: pytest.TempPathFactory, settings: dict[str, object]) -> Iterator[RunningService]:
    """Yield a service that accepts embeddings."""
    folder = tmp_path_factory.mktemp("trusting")
    given = settings | {"enable_mm_embeds": True, "enable_prompt_embeds": True, "spool": folder / "spool"}
    with running_service(given, folder / "log", TINY) as running:
        yield running
        assert running.wait_until_free()["blocks"] == 0
        assert running.stop() == 0, (folder / "log").read_text()[-2000:]
    assert not list((folder / "spool").iterdir()), "request directories are left"


@pytest.fixture(scope="module")
def model(device: str) -> Any:
    return load_model(TINY, device=device)


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory, model: Any) -> dict[str, tuple[Tensor, tuple[int, ...]]]:
    """Return the tower's output and the grid for an image, a video and an audio clip."""
    folder = tmp_path_factory.mktemp("tower")
    with Tokenizer.from_pretrained(TINY) as tokenizer:
        ids = tokenizer.tokenize([{"image": RED}, {"video": CLIP}, {"audio": AUDIO}], folder / "shm_name.txt")
        items = model.read(ids.numpy())
        return {
            item.shape.kind: (features.cpu().clone(), item.shape.grid)
            for item, features in zip(items, model.encode(items), strict=True)
        }


@pytest.fixture(scope="module")
def red(embedded: dict[str, Any]) -> tuple[Tensor, bytes]:
    features, grid = embedded["image"]
    return features, grid_of(*grid)


def ask(service: RunningService, *parts: Any, status: int = 200, kwargs: Any = None) -> Any:
    """Return two parts of the answer: tokens with usage, and log-probabilities. For an error, return its message."""
    content = [*parts, {"type": "text", "text": "What is in the image?"}]
    body = {
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 12,
        "logprobs": True,
        "top_logprobs": 5,
        "return_token_ids": True,
        "mm_processor_kwargs": kwargs,
    }
    answer = httpx2.post(service.url + CHAT, json=body, timeout=300)
    assert answer.status_code == status, answer.text[:2000]
    if status != 200:
        message: str = answer.json()["error"]["message"]
        return message
    found = answer.json()
    (choice,) = found["choices"]
    usage = {key: value for key, value in found["usage"].items() if "details" not in key}
    logprobs = [one["logprob"] for token in choice.pop("logprobs")["content"] for one in token["top_logprobs"]]
    return (choice, usage, found["prompt_token_ids"]), logprobs


def require_same(found: Any, expected: Any) -> None:
    """Assert that two answers of `ask` are equal.

    Log-probabilities may differ slightly, because the towers of the service and of the test may use different numbers
    of threads, and then add numbers in a different order.
    """
    assert found[0] == expected[0]
    assert found[1] == pytest.approx(expected[1], abs=1e-4)


def image_content(data: bytes = RED) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{as_base64(data)}"}}


@pytest.mark.parametrize("save", [to_torch, to_safetensors])
@pytest.mark.parametrize(
    "form", [lambda t: t, lambda t: t.unsqueeze(0), torch.nn.Parameter, lambda t: torch.cat([t, t])[: len(t)]]
)
def test_the_towers_output_gives_the_answer_of_the_image(
    trusting: RunningService, red: tuple[Tensor, bytes], save: Callable[[Tensor], bytes], form: Callable[[Tensor], Any]
) -> None:
    expected = ask(trusting, image_content())
    assert "red square" in expected[0][0]["message"]["content"]
    features, grid = red
    require_same(ask(trusting, image(save(form(features)), grid)), expected)


def test_the_towers_output_gives_the_answer_of_the_audio(
    trusting: RunningService, embedded: dict[str, tuple[Tensor, Any]]
) -> None:
    audio = {"type": "input_audio", "input_audio": {"data": as_base64(AUDIO), "format": "wav"}}
    data = as_base64(to_torch(embedded["audio"][0]))
    expected = ask(trusting, audio)
    for value in (data, {"audio_embeds": data}):
        require_same(ask(trusting, {"type": "audio_embeds", "audio_embeds": value}), expected)


def test_the_towers_output_gives_the_answer_of_the_video(
    trusting: RunningService, embedded: dict[str, tuple[Tensor, tuple[int, ...]]]
) -> None:
    features, grid = embedded["video"]
    expected = ask(trusting, {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{as_base64(CLIP)}"}})
    files = {"video_embeds": as_base64(to_torch(features)), "video_grid_thw": as_base64(grid_of(*grid))}
    for part in ({"video_embeds": files}, files):
        require_same(ask(trusting, {"type": "video_embeds", **part}), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("save", [to_torch, to_safetensors])
def test_half_precision_gives_the_answer_of_the_rounded_features(
    trusting: RunningService, red: tuple[Tensor, bytes], save: Callable[[Tensor], bytes], dtype: torch.dtype
) -> None:
    features, grid = red
    rounded = features.to(dtype)
    require_same(ask(trusting, image(save(rounded), grid)), ask(trusting, image(to_torch(rounded.float()), grid)))


def test_embeddings_can_stand_beside_images_and_default_options(
    trusting: RunningService, red: tuple[Tensor, bytes]
) -> None:
    features, grid = red
    pixels = {"max_pixels": 8000}
    expected = ask(trusting, image_content(), image_content(), image_content())
    embeddings = image(to_torch(features), grid)
    require_same(ask(trusting, embeddings, image_content(), embeddings), expected)
    require_same(ask(trusting, embeddings, embeddings, kwargs=pixels), ask(trusting, image_content(), image_content()))


def test_embeddings_are_kept_by_uuid_apart_from_images(trusting: RunningService, red: tuple[Tensor, bytes]) -> None:
    features, grid = red
    expected = ask(trusting, image(to_torch(features), grid, uuid="red"))
    require_same(ask(trusting, {"type": "image_embeds", "image_embeds": None, "uuid": "red"}), expected)
    message = ask(trusting, {"type": "image_url", "image_url": None, "uuid": "red"}, status=400)
    assert "no data are kept" in message


def test_other_routes_accept_embeddings(trusting: RunningService, red: tuple[Tensor, bytes]) -> None:
    features, grid = red
    part = image(to_torch(features), grid)
    answers = []
    for item in (part, {"image": f"data:;base64,{as_base64(RED)}"}):
        body = {"inputs": [item, {"text": "?"}], "parameters": {"max_new_tokens": 8, "details": True}}
        infer = httpx2.post(trusting.url + "/infer", json=body, timeout=300).raise_for_status().json()
        tokens = httpx2.post(trusting.url + "/tokenize", json={"inputs": [item]}).raise_for_status().json()
        answers.append((infer["details"]["generated_token_ids"], tokens))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("kind", ["image", "audio"])
def test_embeddings_are_refused_unless_enabled(service: RunningService, kind: str) -> None:
    key = f"{kind}_embeds"
    message = ask(service, {"type": key, key: as_base64(to_torch(rows()))}, status=400)
    assert "--enable-mm-embeds" in message


TEXTS = ("Hello! Show me", "What is in the image? A red")


def complete(service: RunningService, status: int = 200, **body: Any) -> Any:
    """Return the choices of a completion and its usage, or the error."""
    body = {"temperature": 0, "max_tokens": 8, "logprobs": 3, "return_token_ids": True} | body
    answer = httpx2.post(service.url + "/v1/completions", json=body, timeout=300)
    assert answer.status_code == status, answer.text[:2000]
    found = answer.json()
    return (found["choices"], found["usage"]) if status == 200 else found["error"]


@pytest.fixture(scope="module")
def of_text(trusting: RunningService, model: Any) -> Callable[[str], tuple[list[int], Tensor]]:
    """Return a function that returns the token ids of a text and their embeddings."""

    def embed(text: str) -> tuple[list[int], Tensor]:
        body = {"prompt": text, "add_special_tokens": False}
        ids = httpx2.post(trusting.url + "/tokenize", json=body).raise_for_status().json()["tokens"]
        with torch.inference_mode():
            return ids, model.embed(torch.tensor(ids, device=model.spec.device)).cpu().float().clone()

    return embed


def shown(choice: dict[str, Any]) -> tuple[Any, list[float]]:
    """Return what a choice has generated and, separately, its log-probabilities."""
    logprobs = [one for top in choice["logprobs"]["top_logprobs"] for one in top.values()]
    return (choice["text"], choice["token_ids"], choice["finish_reason"], choice["logprobs"]["tokens"]), logprobs


@pytest.mark.parametrize("save", [to_torch, to_safetensors])
def test_embeddings_of_tokens_give_the_completion_of_the_tokens(
    trusting: RunningService, of_text: Callable[[str], tuple[list[int], Tensor]], save: Callable[[Tensor], bytes]
) -> None:
    (ids, rows_of_ids), (others, rows_of_others) = map(of_text, TEXTS)
    given = [as_base64(save(rows_of_ids)), as_base64(save(rows_of_others.unsqueeze(0)))]
    expected, usage = complete(trusting, prompt=[ids, others])
    found, used = complete(trusting, prompt_embeds=given)
    assert (used["prompt_tokens"], used["completion_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    for choice, own in zip(found, expected, strict=True):
        require_same(shown(choice), shown(own))
    beside, _ = complete(trusting, prompt_embeds=given[0], prompt=[others], n=2, seed=1)
    assert [shown(choice)[0] for choice in beside] == [shown(expected[index])[0] for index in (0, 0, 1, 1)]
    text, _ = complete(trusting, prompt_embeds=given[0], prompt=TEXTS[1], add_special_tokens=False)
    assert [shown(choice)[0] for choice in text] == [shown(choice)[0] for choice in expected]
    (one,), _ = complete(trusting, prompt_embeds=as_base64(save(rows_of_ids[:1])))
    (own,), _ = complete(trusting, prompt=ids[:1])
    require_same(shown(one), shown(own))
    assert trusting.wait_until_free()["blocks"] == 0


def test_embeddings_of_tokens_are_streamed(
    trusting: RunningService, of_text: Callable[[str], tuple[list[int], Tensor]]
) -> None:
    _, rows_of_ids = of_text(TEXTS[0])
    body = {"prompt_embeds": as_base64(to_torch(rows_of_ids)), "temperature": 0, "max_tokens": 8}
    (whole,), _ = complete(trusting, **body)
    with httpx2.stream("POST", trusting.url + "/v1/completions", json=body | {"stream": True}) as stream:
        events = [line[6:] for line in stream.iter_lines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == whole["text"]


def test_embeddings_of_tokens_give_the_chat_of_the_text(
    trusting: RunningService, red: tuple[Tensor, bytes], of_text: Callable[[str], tuple[list[int], Tensor]]
) -> None:
    text = " a red square? "
    data = as_base64(to_torch(of_text(text)[1]))
    features, grid = red
    in_text = {"type": "text", "text": text}
    image_part, control = image(to_torch(features), grid), {"type": "text", "text": "<|im_end|>"}
    for form in ({"type": "prompt_embeds", "data": data}, {"prompt_embeds": data}):
        for parts in ([in_text], [image_part, in_text], [in_text, image_part, in_text], [in_text, control]):
            given = [form if part is in_text else part for part in parts]
            (choice, usage, _), logprobs = ask(trusting, *given)
            (own, expected_usage, _), expected = ask(trusting, *parts)
            require_same(((choice, usage), logprobs), ((own, expected_usage), expected))


class _Code:
    def __reduce__(self) -> Any:
        return (exec, ("import builtins; builtins.embeddings_ran_code = True",))


def _archive(data: bytes, change: Callable[[str, bytes], bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """Return the archive `data` with each record changed."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(file, "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))
    return file.getvalue()


def _pickled(old: bytes, new: bytes) -> bytes:
    """Return an archive with 4 rows, with `old` replaced in its pickle."""

    def change(name: str, data: bytes) -> bytes:
        if not name.endswith(".pkl"):
            return data
        assert old in data
        return data.replace(old, new)

    return _archive(to_torch(rows()), change)


def _safetensors(shape: list[int], size: int, dtype: str = "F32", tail: bytes = b"") -> bytes:
    head = json.dumps({"x": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}).encode()
    return struct.pack("<Q", len(head)) + head + tail


def _nested() -> bytes:
    with warnings.catch_warnings(action="ignore"):  # nested tensors are a prototype
        return to_torch(torch.nested.nested_tensor([rows(), rows(2)]))


def _compressed(size: int) -> bytes:
    """Return an archive whose storage is compressed to a thousandth."""
    return _archive(
        to_torch(rows()), lambda name, data: bytes(size) if "/data/" in name else data, zipfile.ZIP_DEFLATED
    )


def _overlapping() -> bytes:
    """Return an archive whose directory lists the same record 40 times."""
    data = to_torch(rows(400))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        record = max(archive.infolist(), key=lambda one: one.file_size)
    file = io.BytesIO(data)
    with zipfile.ZipFile(file, "a") as archive:
        archive.filelist += [record] * 40
        archive._didModify = True  # type: ignore[attr-defined] # write the directory again
    return file.getvalue()


BILLION = struct.pack("<i", 10**9)
ROWS = b"K\x04K\x80\x86"
"""Pickle opcodes of the shape [4, 128]."""
GOOD = to_torch(rows())
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "text": (b"not a tensor" * 20, "neither a complete safetensors file"),
    "an image": (RED, "neither a complete safetensors file"),
    "truncated archive": (GOOD[:-100], "cannot be read with torch.load"),
    "truncated in the middle": (GOOD[: len(GOOD) // 2], "cannot be read with torch.load"),
    "head of an archive": (GOOD[:4], "cannot be read with torch.load"),
    "truncated safetensors": (to_safetensors(rows())[:-1], "cannot be read as safetensors"),
    "safetensors without data": (_safetensors([4, WIDTH], 4 * WIDTH * 4), "cannot be read as safetensors"),
    "7 bytes": (b"\1\0\0\0\0\0\0", "neither a complete safetensors file"),
    "header longer than the file": (struct.pack("<Q", 2**62) + b"{}", "neither a complete safetensors file"),
    "huge header": (struct.pack("<Q", 2**20) + b"[" * 2**20, "a safetensors header of 1048576 bytes"),
    "deep header": (struct.pack("<Q", 2**15) + b'{"x":' + b"[" * (2**15 - 5), "cannot be read as safetensors"),
    "two tensors": (save_safetensors({"a": rows(), "b": rows()}), "with 2 tensors"),
    "no tensor": (struct.pack("<Q", 2) + b"{}", "with 0 tensors"),
    "10^9 rows": (_safetensors([10**9, WIDTH], 10**9 * WIDTH * 4), "cannot be read as safetensors"),
    "rows times width overflow": (_safetensors([2**62, 2**62], 0), "cannot be read as safetensors"),
    "zero rows": (_safetensors([0, WIDTH], 0), "at least one row"),
    "integers": (to_safetensors(torch.ones(4, WIDTH, dtype=torch.int64)), "dtype int64"),
    "float64": (to_torch(rows().double()), "dtype float64"),
    "float8": (to_safetensors(rows().to(torch.float8_e4m3fn)), "dtype float8_e4m3fn"),
    "complex": (to_torch(rows().to(torch.complex64)), "dtype complex64"),
    "one axis": (to_torch(torch.zeros(WIDTH)), "shape [128]"),
    "two images": (to_torch(torch.zeros(2, 4, WIDTH)), "shape [2, 4, 128]"),
    "wrong width": (to_torch(rows(width=WIDTH + 1)), "have width 129; the model needs 128"),
    "NaN": (to_torch(rows() * float("nan")), "infinite values or NaN"),
    "infinity": (to_torch(rows() + float("inf")), "infinite values or NaN"),
    "infinities that cancel": (to_torch(torch.tensor([[float("inf"), float("-inf")] * 64] * 4)), "infinite values"),
    "code": (to_torch(_Code()), "cannot be read with torch.load"),
    "a bare pickle of code": (pickle.dumps(_Code()), "neither a complete safetensors file"),
    "an old file of torch.save": (
        to_torch(rows(), _use_new_zipfile_serialization=False),
        "neither a complete safetensors file",
    ),
    "a list": (to_torch([rows()]), "an object of type list"),
    "a dict": (to_torch({"image_embeds": rows()}), "an object of type dict"),
    "sparse": (to_torch(torch.eye(4, WIDTH).to_sparse()), "dense tensor"),
    "negative bit": (to_torch(torch._neg_view(rows())), "dense tensor"),
    "nested": (_nested(), "dense tensor"),
    "meta": (to_torch(torch.empty(4, WIDTH, device="meta")), "an object of type Tensor"),
    "expanded": (to_torch(torch.zeros(1, 1).expand(10**9, WIDTH)), "with all its elements"),
    "10^9 rows of a small storage": (_pickled(ROWS, b"J" + BILLION + b"K\x80\x86"), "cannot be read with torch.load"),
    "storage larger than its record": (_pickled(b"M\x00\x02", b"J" + BILLION), "cannot be read with torch.load"),
    "offset outside the storage": (_pickled(b"QK\x00", b"QJ" + BILLION), "cannot be read with torch.load"),
    "negative offset": (_pickled(b"QK\x00", b"QJ" + struct.pack("<i", -64)), "cannot be read with torch.load"),
    "compressed": (_compressed(4 * WIDTH * 4), "compressed archive"),
    "bomb": (_compressed(2**26), "compressed archive"),
    "overlapping records": (_overlapping(), "more bytes than the archive"),
    "many records": (
        _archive(GOOD, lambda name, data: data) + b"PK\1\2" * 100,
        "an archive of 107 records",
    ),
    "long pickle": (_archive(GOOD, lambda name, data: b"N0" * 2**17 if name.endswith(".pkl") else data), "a pickle of"),
}


@pytest.mark.parametrize(("data", "message"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_file_is_refused(trusting: RunningService, data: bytes, message: str) -> None:
    assert message in ask(trusting, image(data, grid_of(1, 4, 4)), status=400)
    assert trusting.wait_until_free()["blocks"] == 0


def test_code_in_a_pickle_does_not_run_outside_of_a_sandbox_either() -> None:
    with pytest.raises(MediaError, match=r"cannot be read with torch\.load"):
        read_embeddings(HOSTILE["code"][0])
    assert not hasattr(builtins, "embeddings_ran_code")


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (None, "this model needs image_grid_thw"),
        (b"", "is empty"),
        (grid_of(1, 4, 6), "this model has no image with this combination"),
        (grid_of(1, 2, 8, 1), "this model has no image with this combination"),
        (grid_of(-1, -4, 4), "this model has no image"),
        (grid_of(0, 4, 4), "this model has no image"),
        (grid_of(1, 16, 1), "this model has no image"),
        (grid_of(1, 2**62, 4), "this model has no image"),
        (to_torch(torch.tensor([1.0, 4.0, 4.0])), "dtype float32"),
        (to_torch(torch.zeros(1, dtype=torch.int64).expand(10**9)), "with all its elements"),
        (GOOD[:-100], "the file of image_grid_thw cannot be read"),
    ],
)
def test_a_wrong_grid_is_refused(trusting: RunningService, grid: bytes | None, message: str) -> None:
    assert message in ask(trusting, image(GOOD, grid), status=400)


def test_more_rows_than_an_image_can_have_are_refused(trusting: RunningService) -> None:
    processor = load_processor(DecoderSetup(str(TINY), None, MediaCaps()))
    most = processor.max_tokens("image")
    message = ask(trusting, image(to_torch(rows(most + 1)), grid_of(1, 2, 2 * (most + 1))), status=400)
    assert f"have {most + 1} rows; the limit of this model is {most}" in message


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"image_embeds": 5}, "must be base64"),
        ({"image_embeds": [1, 2]}, "must be base64"),
        ({"image_embeds": {}}, "must be base64"),
        ({"image_embeds": {"image_grid_thw": "AAAA"}}, "must be base64"),
        ({"image_embeds": {"image_embeds": "AAAA", "image_grid_thw": [1, 4, 4]}}, "must be base64"),
        ({"image_embeds": {"image_embeds": "AAAA", "image_sizes": "AAAA"}}, "unknown key 'image_sizes'"),
        ({"image_embeds": "AAAA", "max_pixels": 5}, "embeddings have no options"),
        ({"image_embeds": "AAAA", "image_url": "AAAA"}, "exactly one of"),
        ({"image_embeds": "AAAA", "audio_embeds": "AAAA"}, "exactly one of"),
        ({"type": "image_embeds", "audio_embeds": "AAAA"}, "has the key 'audio_embeds'"),
        ({"type": "image_embeds", "image_embeds": None}, "must have exactly one"),
        ({"image_embeds": "no base64!"}, "base64"),
        ({"image_embeds": ""}, "is empty"),
        ({"audio_embeds": as_base64(to_torch(rows(1501)))}, "the limit of this model is 750"),
        ({"audio_embeds": {"audio_embeds": as_base64(GOOD), "image_grid_thw": "AAAA"}}, "unknown key"),
        ({"image_embeds": "A" * 6 * 2**20}, "the limit for one item is 4194304"),
        ({"video_embeds": as_base64(GOOD)}, "this model needs video_grid_thw"),
        ({"image_embeds": [as_base64(GOOD)]}, "of type list"),
        ({"type": "prompt_embeds", "data": "AAAA", "prompt_embeds": "AAAA"}, "give the embeddings only once"),
        ({"type": "prompt_embeds", "data": None}, "null in ['data']"),
        (
            {
                "video_embeds": {
                    "video_embeds": as_base64(GOOD),
                    "video_grid_thw": as_base64(to_torch(torch.zeros(4097).int())),
                }
            },
            "has 4097 numbers",
        ),
    ],
)
def test_a_malformed_part_is_refused(trusting: RunningService, part: dict[str, Any], message: str) -> None:
    assert message in ask(trusting, part, status=400)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "prompt", "prompt is missing"),
        ({"prompt_embeds": []}, "prompt", "prompt is missing"),
        ({"prompt_embeds": [], "prompt": ""}, "prompt", "prompt is empty"),
        ({"prompt_embeds": ""}, "prompt_embeds", "is empty"),
        ({"prompt_embeds": [""]}, "prompt_embeds", "is empty"),
        ({"prompt_embeds": 5}, "prompt_embeds", "base64"),
        ({"prompt_embeds": [[1.0]]}, "prompt_embeds", "base64"),
        ({"prompt_embeds": "no base64!"}, "prompt_embeds", "base64"),
        ({"prompt_embeds": as_base64(to_torch(rows(width=WIDTH + 1)))}, "prompt_embeds", "the model needs 128"),
        ({"prompt_embeds": as_base64(to_torch(rows(5000)))}, "prompt_embeds", "the prompt has 5000 tokens; the limit"),
        ({"prompt_embeds": as_base64(to_torch(rows())), "echo": True}, "echo", "not compatible"),
        ({"prompt_embeds": as_base64(to_torch(rows())), "prompt_logprobs": 0}, "prompt_logprobs", "not compatible"),
        ({"prompt_embeds": as_base64(to_torch(rows())), "truncate_prompt_tokens": 2}, None, "cuts through"),
        ({"prompt_embeds": [as_base64(GOOD)] * 5}, "prompt_embeds", "5 media items; the limit is 4"),
    ],
)
def test_wrong_embeddings_of_tokens_are_refused(
    trusting: RunningService, body: dict[str, Any], param: str | None, message: str
) -> None:
    error = complete(trusting, status=400, **body)
    assert message in error["message"]
    assert param is None or error["param"] == param
    assert trusting.wait_until_free()["blocks"] == 0


@pytest.mark.parametrize("name", ["code", "NaN", "bomb", "10^9 rows", "expanded", "zero rows"])
def test_a_hostile_file_of_a_prompt_is_refused(trusting: RunningService, name: str) -> None:
    data, message = HOSTILE[name]
    assert message in complete(trusting, status=400, prompt_embeds=as_base64(data))["message"]


def test_an_error_in_a_text_beside_embeddings_of_tokens_is_not_blamed_on_the_embeddings(
    trusting: RunningService,
) -> None:
    body = {"prompt": "What? " * 5000}
    alone = complete(trusting, status=400, **body)
    beside = complete(trusting, status=400, prompt_embeds=as_base64(to_torch(rows())), **body)
    assert beside == alone


def test_embeddings_of_tokens_are_refused_unless_enabled(service: RunningService) -> None:
    data = as_base64(to_torch(rows()))
    assert "--enable-prompt-embeds" in complete(service, status=400, prompt_embeds=data)["message"]
    assert "--enable-prompt-embeds" in ask(service, {"type": "prompt_embeds", "data": data}, status=400)
