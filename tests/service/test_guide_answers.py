"""Tests that the answers which the guides show below a request are those of a real service."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mindie_mm
from mindie_mm import LLM, SamplingParams
from mindie_mm.models import load_model
from tests import warm
from tests.lora_samples import linear_names, write_adapter
from tests.namespaces import FULL_SHM, require
from tests.service.test_snippets import SERVED_AT, curl, json_values, run, snippet
from tools.demo import data_url, draw_shape
from tools.serving import RunningService

ROOT = Path(__file__).parents[2]
TINY = Path(mindie_mm.__file__).parent / "assets/tiny"
DEPLOY = (ROOT / "docs/deploy.md").read_text(encoding="utf-8")
OTHERS = {
    name: (ROOT / f"docs/{name}.md").read_text(encoding="utf-8")
    for name in ("migrate", "structured-outputs", "tool-calls", "security")
}
"""Pages whose requests the service of all tests answers."""
RENDER = (ROOT / "docs/render.md").read_text(encoding="utf-8")
LORAS = (ROOT / "docs/loras.md").read_text(encoding="utf-8")
SERVED = "Qwen2-VL-2B-Instruct"
"""Name of the checkpoint in the examples. The tests serve the embedded checkpoint under this name."""


def scripts(page: str) -> list[tuple[str, str, str]]:
    """Return each shell block of a page, with the language and the text of the output that the page shows for it.

    The output is the next block, if it has another language and at most one paragraph stands between the two.
    """
    found = re.findall(
        r"^```sh\n(.*?)^```(?=(?:\n\n(?![`#|])(?:.(?!\n\n))*.)?\n\n```(json|text)\n(.*?)^```)?",
        page,
        re.MULTILINE | re.DOTALL,
    )
    return [(script, language, output) for script, language, output in found]


def requests(page: str) -> list[Any]:
    """Return the blocks of a page that call curl, as parameters of a test."""
    return [
        pytest.param(*one, id=f"{place}-{one[0].splitlines()[0][-40:]}")
        for place, one in enumerate(scripts(page))
        if "curl " in one[0]
    ]


def assert_shown(answer: Any, shown: Any) -> None:
    """Compare JSON with a part of it that a page shows. `...` in a string stands for any text."""
    if isinstance(shown, dict):
        assert shown.keys() <= answer.keys()
        for key, value in shown.items():
            assert_shown(answer[key], value)
    elif isinstance(shown, list):
        assert len(answer) == len(shown), answer
        for one, value in zip(answer, shown, strict=True):
            assert_shown(one, value)
    elif isinstance(shown, str):
        assert fits(answer, shown), (answer, shown)
    else:
        assert answer == shown


def fits(text: str, shown: str) -> bool:
    """Return whether a text is the one that a page shows, apart from white space and `...`."""
    pattern = ".*".join(re.escape(part) for part in "".join(shown.split()).split("..."))
    return re.fullmatch(pattern, "".join(text.split())) is not None


def assert_output(printed: str, language: str, shown: str) -> None:
    """Compare what a command printed with the block of a page that shows it."""
    if language == "json":
        values = json_values(printed)
        assert len(values) == len(json_values(" ".join(shown.split())))
        for value, one in zip(values, json_values(" ".join(shown.split())), strict=True):
            assert_shown(value, one)
    elif language:
        assert fits(printed, shown), printed


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the adapters that the guide names."""
    folder = tmp_path_factory.mktemp("adapters")
    plain = load_model(None, "cpu", "float32", prepares=False).module
    names = [name for name in linear_names(plain) if "language_model" in name]
    for seed, name in enumerate(("charts", "forms", "tables")):
        write_adapter(folder / name, plain, names, seed=seed)
    return folder


@pytest.fixture(scope="module")
def with_adapters(adapters: Path, settings: dict[str, object]) -> Iterator[RunningService]:
    loras = [f"{name}={adapters / name}" for name in ("charts", "forms")]
    own = {"lora_dir": adapters, "admin_key": "operators", "served_model_name": SERVED}
    given, environment = settings | own | {"spool": adapters / "spool"}, {"MINDIE_MM_LORA": ",".join(loras)}
    with warm.running_service(given, adapters / "log", environment=environment) as running:
        yield running


@pytest.mark.parametrize(("script", "language", "shown"), requests(LORAS))
def test_a_request_of_the_guide_to_adapters_has_the_answer_shown(
    with_adapters: RunningService, adapters: Path, script: str, language: str, shown: str
) -> None:
    printed = curl(script.replace("$ADMIN_KEY", "operators"), with_adapters, refused='"error"' in shown)
    assert_output(printed.replace(str(adapters), "/adapters"), language, shown)


def test_the_guide_to_adapters_shows_what_doctor_finds(adapters: Path) -> None:
    ((script, language, shown),) = [one for one in scripts(LORAS) if "mindie-mm doctor" in one[0]]
    command = script.replace("\\\n", " ").replace(f"Qwen/{SERVED}", str(TINY)).replace("/adapters", str(adapters))
    ended = warm.run(command.split(), timeout=240, env=os.environ | {"MINDIE_MM_DEVICE": "cpu"})
    (line,) = [line for line in ended.stdout.splitlines() if "LoRA" in line]
    assert_output(line.replace(str(adapters), "/adapters"), language, shown)


@pytest.mark.slow
@pytest.mark.usefixtures("copied_workers")
def test_the_script_of_the_guide_answers_with_and_without_an_adapter(
    adapters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("adapters").symlink_to(adapters)
    Path("qwen2-vl").symlink_to(TINY)
    names = run(snippet(LORAS, "python", "with_adapter"))
    assert names["without"].text.startswith("Hello! ")
    assert names["with_adapter"].text != names["without"].text


@pytest.mark.slow
@pytest.mark.usefixtures("copied_workers")
def test_the_adapter_that_the_guide_writes_with_peft_changes_nothing(
    random_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft", reason="make test-peft installs peft")
    monkeypatch.chdir(tmp_path)
    run(snippet(LORAS, "python", "get_peft_model").replace(f"Qwen/{SERVED}", str(random_checkpoint)))
    config = json.loads(Path("adapters/charts/adapter_config.json").read_text(encoding="utf-8"))
    assert (config["peft_type"], config["r"]) == ("LORA", 8)
    with LLM(random_checkpoint, loras={"charts": "adapters/charts"}) as llm:
        outputs = llm.generate(["Hello!"] * 2, SamplingParams(temperature=0), lora=["charts", None])
    assert outputs[0].token_ids == outputs[1].token_ids


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("render")
    given = {"model_id": f"Qwen/{SERVED}", "spool": folder / "spool"}
    with warm.running_service(given, folder / "log", command="render") as running:
        yield running


@pytest.fixture(scope="module")
def scaled_out(tmp_path_factory: pytest.TempPathFactory, settings: dict[str, object]) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("scaled_out")
    given = settings | {"enable_scale_out": True, "spool": folder / "spool"}
    with warm.running_service(given, folder / "log") as running:
        yield running


def test_the_guide_to_render_shows_the_line_that_says_that_it_is_ready(renderer: RunningService) -> None:
    (line,) = [text for script, _, text in scripts(RENDER) if "--max-model-len 32768" in script]
    assert renderer.announcement == line.replace("http://127.0.0.1:8100", renderer.url)


@pytest.mark.parametrize(
    ("script", "language", "shown"), [one for one in requests(RENDER) if "chat.json" not in one.values[0]]
)
def test_a_request_of_the_guide_to_render_has_the_answer_shown(
    renderer: RunningService, scaled_out: RunningService, script: str, language: str, shown: str
) -> None:
    script = script.replace("localhost:8100", renderer.url).replace("localhost:8000", scaled_out.url)
    assert_output(curl(script, renderer, refused='"error"' in shown), language, shown)


@pytest.mark.parametrize(("code", "name"), [(403, "service"), (400, "renderer")])
def test_the_guide_to_render_shows_why_a_route_or_a_payload_is_refused(
    request: pytest.FixtureRequest, code: int, name: str
) -> None:
    """The request is the first of the guide, which asks for tensors if it does not ask for none."""
    script = next(one for one, *_ in scripts(RENDER) if "red_circle" in one)
    shown = snippet(RENDER, "json", "--enable-scale-out" if code == 403 else "mm_payload=tensors")
    service = request.getfixturevalue(name)
    script = script.replace("localhost:8100", service.url).replace('"mm_payload": "none", ', "")
    assert_output(curl(script, service, refused=True), "json", shown)


@pytest.mark.slow
def test_tensors_of_the_guide_to_render_go_from_one_server_to_the_other(
    random_checkpoint: Path, settings: dict[str, object], tmp_path: Path
) -> None:
    given = settings | {"enable_scale_out": True, "like": "vllm", "spool": tmp_path / "spool"}
    url = data_url(draw_shape("red", (220, 40, 40), "circle", x=0.4))
    part = {"type": "image_url", "image_url": {"url": url}}
    (tmp_path / "chat.json").write_text(
        json.dumps({"messages": [{"role": "user", "content": [part]}], "max_tokens": 4})
    )
    ((script, *_),) = [one for one in scripts(RENDER) if "chat.json" in one[0]]
    script = script.replace("chat.json", str(tmp_path / "chat.json"))
    with warm.running_service(given, tmp_path / "log", random_checkpoint) as running:
        answer = json.loads(curl(re.sub(r"localhost:8\d00", running.url, script), running))
    assert answer["usage"]["completion_tokens"] == len(answer["choices"][0]["token_ids"]) > 0
    assert answer["usage"]["prompt_tokens_details"]["image_tokens"] > 0


def test_the_guide_to_deploying_shows_the_answer_to_a_request_without_the_key(
    settings: dict[str, object], tmp_path: Path
) -> None:
    ((script, language, shown),) = [one for one in scripts(DEPLOY) if "Authorization: Bearer $MINDIE" in one[0]]
    with warm.running_service(settings | {"api_key": "key", "spool": tmp_path / "spool"}, tmp_path / "log") as running:
        assert json.loads(curl(script.replace("$MINDIE_MM_API_KEY", "key"), running))["object"] == "list"
        without = script.replace(' -H "Authorization: Bearer $MINDIE_MM_API_KEY"', "")
        assert_output(curl(without, running, refused=True), language, shown)


def test_the_guide_to_deploying_shows_why_a_service_does_not_start_in_a_full_dev_shm() -> None:
    require(FULL_SHM)
    command = [*FULL_SHM, Path(sys.executable).with_name("mindie-mm"), "serve", "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode, ended.stdout
    shown = snippet(DEPLOY, "text", "but the arena needs")
    assert fits(ended.stderr.splitlines()[-1], shown), ended.stderr


def test_the_guide_to_scaling_shows_why_a_service_with_too_many_engines_does_not_start() -> None:
    shown = snippet((ROOT / "docs/scale.md").read_text(encoding="utf-8"), "text", "number of CPUs")
    command = [Path(sys.executable).with_name("mindie-mm"), "serve", "--replicas", "99", "--device", "cpu"]
    ended = warm.run(command, timeout=240, env=dict(os.environ))
    assert fits(ended.stderr.splitlines()[-1].replace("99", "4"), shown.replace(" 2;", "...;")), ended.stderr


@pytest.mark.parametrize(
    ("script", "language", "shown"),
    [one for page in OTHERS.values() for one in requests(page) if one.values[1] and '"seen"' not in one.values[0]],
)
def test_a_request_of_a_guide_has_the_answer_shown(
    scaled_out: RunningService, script: str, language: str, shown: str
) -> None:
    assert_output(curl(script, scaled_out, refused='"error"' in shown), language, shown)


def test_the_guide_to_tools_calls_a_function_and_sends_its_result(
    service: RunningService, capsys: pytest.CaptureFixture[str]
) -> None:
    calling, sending = (snippet(OTHERS["tool-calls"], "python", one) for one in ("import json", "result ="))
    names = run(calling.replace(SERVED_AT, service.url) + sending)
    names["client"].close()
    assert capsys.readouterr().out == "get_weather {'city': 'Rome'}\n"
    assert names["answer"].choices[0].message.content
