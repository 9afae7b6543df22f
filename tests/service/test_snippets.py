"""Tests that run the code blocks of README.md and of the guides with a real service and real engines."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pyarrow import Table, parquet

from mindie_mm.shm import release, survey
from tests import warm
from tests.cli.shell import run_warm
from tools.serving import RunningService

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PYTHON_PAGE = (ROOT / "docs/python.md").read_text()
MINDIE_PAGE = (ROOT / "docs/migrate.md").read_text()
BATCH_PAGE = (ROOT / "docs/batch.md").read_text()
SERVE_PAGE = (ROOT / "docs/serve.md").read_text()
STRUCTURED_PAGE = (ROOT / "docs/structured-outputs.md").read_text()
QUICKSTART = (ROOT / "docs/quickstart.md").read_text()
GUIDES = (
    "quickstart",
    "index",
    "serve",
    "scale",
    "deploy",
    "operate",
    "monitoring",
    "structured-outputs",
    "tool-calls",
    "migrate",
)
SERVED_AT = "http://127.0.0.1:8000"


def snippet(page: str, language: str, holding: str) -> str:
    """Return the only code block of `page` that contains `holding`."""
    (block,) = [
        code for code in re.findall(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL) if holding in code
    ]
    return str(block)


def output(page: str, holding: str) -> str:
    """Return the code block of `page` that follows the only code block that contains `holding`."""
    blocks = re.findall(r"^```\w+\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (place,) = [place for place, code in enumerate(blocks) if holding in code]
    return str(blocks[place + 1])


def json_values(text: str) -> list[Any]:
    """Return the JSON values that follow each other in `text`."""
    values, start = [], 0
    while start < len(text.rstrip()):
        value, end = json.JSONDecoder().raw_decode(text, start)
        values.append(value)
        start = end + len(text[end:]) - len(text[end:].lstrip())
    return values


def shape(value: Any) -> Any:
    """Return a JSON value with its types in place of its values, and with the text of an answer."""
    if isinstance(value, dict):
        return {key: one if key == "content" else shape(one) for key, one in value.items()}
    return [shape(one) for one in value] if isinstance(value, list) else type(value).__name__


def run(source: str) -> dict[str, Any]:
    """Run a Python code block, and return its variables by name."""
    names: dict[str, Any] = {}
    exec(compile(source, "snippet", "exec"), names)
    return names


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change into a folder that contains the files used in the code blocks, and return the folder."""
    (tmp_path / "docs/images").mkdir(parents=True)
    shutil.copy(ROOT / "docs/images/red_circle.png", tmp_path / "docs/images")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def curl(script: str, service: RunningService, *, refused: bool = False) -> str:
    """Run a code block from its first call to curl on, and return the output. `refused` requests get an error."""
    if shutil.which("curl") is None:
        pytest.skip("no curl")
    script = script[script.index("curl ") :].replace(SERVED_AT, service.url)
    script = script.replace("/run/user/1000/mindie_mm", str(service.log.with_name("socket")))
    script = script.replace("curl ", "curl --silent --show-error --fail-with-body ").replace(" -sf ", " ")
    ended = subprocess.run(["sh", "-c", script], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == (22 if refused else 0), (ended.stdout, ended.stderr)
    return ended.stdout


def curl_commands() -> list[Any]:
    """Return the calls to curl in the guides, but not those that reload the engines, or get an error."""
    pages = [(name, (ROOT / f"docs/{name}.md").read_text()) for name in GUIDES]
    return [
        pytest.param(code, id=f"{name}-{place}")
        for name, page in pages
        for place, code in enumerate(re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
        if "curl " in code and not re.search('admin/reload|10.0.0.7|num_beams|web_search|"not"', code)
    ]


def test_the_curl_command_is_answered(service: RunningService) -> None:
    answer = json.loads(curl(snippet(README, "sh", "curl"), service))
    assert "circle" in answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize("script", curl_commands())
def test_each_curl_command_of_the_guides_is_answered(service: RunningService, script: str) -> None:
    assert curl(script, service)


def test_the_quickstart_shows_the_answer_about_an_image(service: RunningService) -> None:
    answer = json.loads(curl(snippet(QUICKSTART, "sh", "/v1/chat"), service))
    assert [shape(answer)] == [shape(one) for one in json_values(output(QUICKSTART, "/v1/chat"))]


def test_the_guide_shows_why_a_request_is_refused(service: RunningService) -> None:
    answer = curl(snippet(SERVE_PAGE, "sh", "10.0.0.7/cat"), service, refused=True)
    assert json.loads(answer) == json.loads(" ".join(output(SERVE_PAGE, "10.0.0.7/cat").split()))


def test_the_guide_to_structured_outputs_shows_the_answer(service: RunningService) -> None:
    answer = json.loads(curl(snippet(STRUCTURED_PAGE, "sh", '"name": "seen"'), service))
    assert answer["choices"][0]["message"]["content"] + "\n" == output(
        STRUCTURED_PAGE, '"json_schema": {"name": "seen"'
    )


def test_the_quickstart_shows_the_streamed_answer(service: RunningService, capsys: pytest.CaptureFixture[str]) -> None:
    names = run(snippet(QUICKSTART, "python", "stream=True").replace(SERVED_AT, service.url))
    names["client"].close()
    assert capsys.readouterr().out == output(QUICKSTART, "stream=True").rstrip("\n")


@pytest.mark.slow
@pytest.mark.usefixtures("checkout", "copied_workers")
def test_the_quickstart_shows_the_output_of_llm(capsys: pytest.CaptureFixture[str]) -> None:
    run(snippet(QUICKSTART, "python", "LLM()"))
    assert capsys.readouterr().out == output(QUICKSTART, "LLM()")


@pytest.mark.slow
@pytest.mark.usefixtures("copied_workers")
def test_the_quickstart_shows_the_answers_to_a_file(checkout: Path) -> None:
    rows, tokenize = snippet(QUICKSTART, "sh", "rows.jsonl").rsplit("mindie-mm ", 1)
    subprocess.run(["sh", "-c", rows], check=True, timeout=60)
    told = output(QUICKSTART, "rows.jsonl").replace("/home/you/mindie_mm", str(checkout))
    assert run_warm(*tokenize.split()) == told
    generate = snippet(QUICKSTART, "sh", "--tokenized").splitlines()[0]
    run_warm(*generate.split()[1:])
    answers = [json.loads(line) for line in (checkout / "answers.jsonl").read_text().splitlines()]
    assert answers == json_values(output(QUICKSTART, "--tokenized"))


@pytest.mark.usefixtures("checkout")
def test_the_openai_client_is_answered(service: RunningService, capsys: pytest.CaptureFixture[str]) -> None:
    names = run(snippet(README, "python", "OpenAI").replace(SERVED_AT, service.url))
    names["client"].close()
    assert "circle" in capsys.readouterr().out


@pytest.mark.usefixtures("checkout", "copied_workers")
def test_llm_answers_about_an_image(capsys: pytest.CaptureFixture[str]) -> None:
    run(snippet(README, "python", "with LLM()"))
    assert "circle" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("checkout", "copied_workers")
def test_llm_answers_with_one_of_the_choices(capsys: pytest.CaptureFixture[str]) -> None:
    run(snippet(STRUCTURED_PAGE, "python", "StructuredOutputs"))
    assert capsys.readouterr().out == "red\n"


@pytest.mark.slow
@pytest.mark.usefixtures("checkout", "copied_workers")
def test_llm_with_decoders_answers_about_an_image(capsys: pytest.CaptureFixture[str]) -> None:
    run(snippet(PYTHON_PAGE, "python", "decoders=2"))
    assert "circle" in capsys.readouterr().out


@pytest.mark.usefixtures("checkout", "copied_workers")
@pytest.mark.slow
def test_llm_answers_several_inputs_and_a_chat(capsys: pytest.CaptureFixture[str]) -> None:
    run(snippet(PYTHON_PAGE, "python", "llm.chat"))
    first, second, chat = capsys.readouterr().out.splitlines()
    assert (first, chat) == ("red circle", "red")
    assert second.endswith(" stop")


@pytest.mark.slow
@pytest.mark.usefixtures("checkout", "copied_workers")
@pytest.mark.parametrize(
    ("holding", "shown"),
    [
        ("llm.stream", r"Hello! .*\.\nred\n"),
        ("sampling_rate", r"red circle\n.+\n.+\n"),
        ("llm.embed(", r"(.*\b64\b.* \d+\n){2}"),
        ("llm.score(", r"\[0\.\d+, -?0\.\d+\]\n"),
    ],
)
def test_an_example_of_llm_prints(holding: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(snippet(PYTHON_PAGE, "python", holding))
    assert re.fullmatch(shown, printed := capsys.readouterr().out), printed


@pytest.mark.usefixtures("checkout")
def test_a_block_of_the_library_is_read_by_its_two_numbers() -> None:
    assert run(snippet(PYTHON_PAGE, "python", "ArraySpec"))["total"] == 4 * 588
    assert not Path("shm_name.txt").exists()


@pytest.mark.usefixtures("checkout", "copied_workers")
@pytest.mark.slow
def test_encoded_features_take_the_place_of_an_image(capsys: pytest.CaptureFixture[str]) -> None:
    source = snippet(PYTHON_PAGE, "python", "llm.encode")
    run(source)
    shape, text = capsys.readouterr().out.splitlines()
    assert f"# {shape}" in source
    assert text == "red circle"


def test_the_rows_of_the_guide_are_tokenized_and_read(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```json\n(.*?)^```$", BATCH_PAGE.partition("\n### Labels")[0], re.MULTILINE | re.DOTALL)
    rows = [row for block in blocks for row in json_values(block) if "finish_reason" not in row]
    assert len(rows) == 6
    (checkout / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "6 rows, " in run_warm("tokenize", "rows.jsonl", "--output", "run/")
    assert run_warm("inspect", "run/", "0") == output(BATCH_PAGE, "inspect run/ 0")
    run(snippet(BATCH_PAGE, "python", "safe_open"))
    assert capsys.readouterr().out.splitlines() == ["0 28", "(48, 588)"]
    reading = snippet(BATCH_PAGE, "python", "sample.ids")
    run(reading + snippet(BATCH_PAGE, "python", "packing=64"))
    printed = capsys.readouterr().out.splitlines()
    assert printed[:3] == ["0 0 (28,)", "4 16", "(48, 588)"]
    assert "pixel_values" in printed[3]
    assert printed[4] == "torch.Size([1, 64])"


def write(file: str, text: str) -> None:
    Path(file).write_text(text, encoding="utf-8")


def write_inputs(command: str) -> None:
    """Write the input files that a command of the guide to offline runs reads."""
    image = "docs/images/red_circle.png"
    rows = [{"prompt": "Hello!", "label": 3, "source": "web"}]
    rows += [{"prompt": "What color is it?", "image": image, "label": 5}]
    if "--select-columns" in command:
        rows = [{"id": "a", "messages": [{"role": "user", "content": "Hello!"}], "answer": "Hi."}]
    parquet.write_table(Table.from_pylist(rows), "rows.parquet")
    rows = json_values(snippet(BATCH_PAGE, "json", "What color"))
    if "boxes=json" in command:
        rows = [row | {"label": 1, "boxes": []} for row in rows]
    write("rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    write("llava.json", "[" + snippet(BATCH_PAGE, "json", '"conversations"') + "]")
    (request,) = json_values(snippet(BATCH_PAGE, "json", '"method"'))
    write("requests.jsonl", json.dumps(request) + "\n")
    Path("photos").mkdir(exist_ok=True)
    shutil.copy(image, "photos")


def show(command: str) -> str:
    """Run a command of the guide to offline runs, and return the output that the guide may show."""
    if not command.startswith("mindie-mm "):
        return subprocess.run(["sh", "-ec", command], check=True, capture_output=True, text=True, timeout=60).stdout
    write_inputs(command)
    arguments, _, errors = command.partition("2>")
    _, *given = shlex.split(arguments, comments=True)
    if given[0] == "tokenize" and "--retry-errors" not in given:
        shutil.rmtree(given[given.index("--output") + 1], ignore_errors=True)
    if given[0] == "generate":
        for file in Path().glob("answers.jsonl*"):
            file.unlink()
    ended = warm.run(["mindie-mm", *given], timeout=240, env=os.environ | {"COLUMNS": "200"})
    assert ended.returncode == 0, (command, ended.stderr)
    if errors:
        return str(ended.stderr.splitlines()[-1])
    return Path("answers.jsonl").read_text(encoding="utf-8") if given[0] == "generate" else str(ended.stdout)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("copied_workers")
def test_each_command_of_the_offline_guide_runs_and_has_the_output_shown(checkout: Path) -> None:
    """Commands for object stores and Ray need services that a test does not have."""
    page = BATCH_PAGE.replace("CHECKPOINT", str(ROOT / "mindie_mm/assets/tiny"))
    follows = r"(?:\n\n[^`#|\n](?:[^\n]|\n(?!\n))*:)?\n\n```(\w+)\n(.*?)^```"
    blocks = re.findall(rf"^```sh\n(.*?)^```(?=(?:{follows})?)", page, re.MULTILINE | re.DOTALL)
    num_shown = 0
    for script, language, shown in blocks:
        if re.search("s3://|--ray|^cat ", script):
            continue
        for command in re.sub("^pip .*\n", "", script).replace("\\\n", " ").splitlines():
            out = show(command)
        if language == "text":
            assert out == shown.replace("/home/you/mindie_mm", str(checkout)), script
        elif language == "json":
            if out.endswith("no row failed\n"):
                out = show("mindie-mm generate --tokenized run/ --output answers.jsonl")
            written = [shape(one) | {"id": one.get("id")} for one in json_values(out)]
            assert all(shape(one) | {"id": one.get("id")} in written for one in json_values(shown)), script
        num_shown += language in ("text", "json")
    assert num_shown >= 5


@pytest.mark.slow
@pytest.mark.usefixtures("checkout", "copied_workers")
def test_rows_of_a_program_keep_their_labels(capsys: pytest.CaptureFixture[str]) -> None:
    run(snippet(BATCH_PAGE, "python", "keep_columns"))
    assert capsys.readouterr().out == "2 0\n{'label': 5}\n"


@pytest.mark.slow
@pytest.mark.usefixtures("copied_workers")
def test_rows_of_a_program_are_tokenized_and_answered(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(snippet(PYTHON_PAGE, "python", "tokenize_dataset"))
    assert capsys.readouterr().out.startswith("2 0\n[")
    assert len((checkout / "answers.jsonl").read_text().splitlines()) == 2


def test_release_frees_the_blocks_of_tokenize(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = run(snippet(PYTHON_PAGE, "python", "tokenize_ids"))
    assert capsys.readouterr().out == "3\n"
    for ids in (names["ids"], names["chat_ids"], names["more_ids"]):
        assert (ids < 0).sum() == 2, "the two words of a handle"
    assert (names["more_ids"][0], names["more_ids"][-1]) == (64, 65)
    assert (checkout / "shm_name.txt").read_text()
    assert names["release"]("shm_name.txt") == 0, "nothing is left to free"


@pytest.mark.usefixtures("checkout")
def test_a_plan_counts_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    names = run(snippet(PYTHON_PAGE, "python", "tokenizer.plan("))
    (span,) = names["plan"].spans
    assert capsys.readouterr().out.startswith(f"{len(names['plan'])} tokens\nimage {span.start} {span.stop} ")


@pytest.mark.slow
@pytest.mark.usefixtures("copied_workers")
def test_llm_answers_about_the_image_of_the_ids(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(snippet(PYTHON_PAGE, "python", "llm.generate([ids]"))
    assert capsys.readouterr().out == "red circle\n"
    assert not (checkout / "shm_name.txt").exists()


def test_the_mindie_wire_leaves_no_segments_after_release(checkout: Path, random_checkpoint: Path) -> None:
    (checkout / "qwen2-vl").symlink_to(random_checkpoint)
    segments = {path.name for path in Path("/dev/shm").glob("psm_*")}
    before = {arena.name for arena in survey()}
    names = run(snippet(PYTHON_PAGE, "python", 'wire="mindie"'))
    ids = names["ids"].numpy()
    assert ids.dtype == np.int64
    assert {path.name for path in Path("/dev/shm").glob("psm_*")} == segments, "release has freed them"
    assert {arena.name for arena in survey()} == before


@pytest.mark.slow
def test_mindie_calls_the_tokenizer_over_a_socket(checkout: Path, random_checkpoint: Path) -> None:
    """The same segments and ids arrive in MindIE's process, and errors arrive as ValueError."""
    socket, mindie = checkout / "tokenizer", SimpleNamespace(input_builder=SimpleNamespace())
    (checkout / "tokenizer_server.py").write_text(snippet(MINDIE_PAGE, "python", "Listener"))
    command = [sys.executable, "tokenizer_server.py", str(random_checkpoint), str(socket)]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}) as server:
        try:
            while not socket.exists():
                assert server.poll() is None
                time.sleep(0.05)
            source = snippet(MINDIE_PAGE, "python", "def ask").replace("/run/user/1000/mindie/tokenizer", str(socket))
            exec(compile(source, "snippet", "exec"), {"self": mindie})
            inputs = [{"image": "docs/images/red_circle.png"}, {"text": "What is it?"}]
            ids = mindie.tokenize(inputs, shm_name_save_path=str(checkout / "shm_name.txt"))
            assert (ids < 0).sum() == 3
            chat = mindie.input_builder.make_context(0, [{"role": "user", "content": "Hello"}])
            assert (chat >= 0).all()
            with pytest.raises(ValueError, match="InputError: "):
                mindie.tokenize([{"picture": "x"}])
            assert release(checkout / "shm_name.txt") == 1
        finally:
            server.terminate()
