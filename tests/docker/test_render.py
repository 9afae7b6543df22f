"""Tests for the Compose file of a render server with vLLM servers, and for the client that it runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mindie_mm.settings.config import GiB, WorkerConfig
from tests.docker.dockerfile import FOLDER, ROOT
from tests.docker.settings import VARIABLES
from tests.docker.test_compose import VERSION, validate
from tests.warm import running_service

pytestmark = pytest.mark.slow

FILE = FOLDER / "render/compose.yaml"
CLIENT = ROOT / "examples/router_client.py"
SERVICES = yaml.safe_load(FILE.read_text())["services"]
VLLM = ("vllm-0", "vllm-1")
ASKED = re.compile(r"^(\w+): (\S+) held (\d+) of (\d+) tokens: ", re.MULTILINE)


def test_the_file_conforms_to_the_compose_specification() -> None:
    checked = validate(FILE)
    assert checked.returncode == 0, checked.stdout


def test_the_render_server_has_the_model_and_context_of_the_vllm_servers() -> None:
    render, (model, length) = SERVICES["render"], (SERVICES["vllm-0"]["command"][index] for index in (1, 3))
    environment = render["environment"]
    assert (environment["MINDIE_MM_MODEL"], environment["MINDIE_MM_MODEL_ID"]) == (model, model)
    assert environment["MINDIE_MM_MAX_MODEL_LEN"] == length
    assert {name for name in environment if name.startswith("MINDIE_MM_")} <= VARIABLES
    assert render["image"] == f"mindie_mm:{VERSION}-cpu"
    assert "ports" not in render, "it has no key"


def test_dev_shm_has_room_for_the_arena_of_each_worker() -> None:
    render = SERVICES["render"]
    workers = render["environment"]["MINDIE_MM_WORKERS"]
    assert render["shm_size"] == f"{workers}g"
    assert "MINDIE_MM_ARENA_BYTES" not in render["environment"]
    assert WorkerConfig().arena_bytes <= GiB // 2


def test_each_vllm_server_has_a_device_of_its_own_and_the_client_knows_all() -> None:
    devices = [SERVICES[name]["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for name in VLLM]
    assert devices == [["0"], ["1"]]
    client = SERVICES["client"]
    assert client["command"][2:] == ["http://render:8100", *(f"http://{name}:8000" for name in VLLM)]
    assert client["depends_on"].keys() == {"render", *VLLM} == SERVICES.keys() - {"client"}
    (script,) = client["volumes"]
    assert (FILE.parent / script.split(":")[0]).resolve() == CLIENT


def test_the_client_asks_the_server_that_holds_an_image(tmp_path: Path) -> None:
    """Two addresses of one service stand for two servers, because the client only compares their names."""
    with running_service({"enable_scale_out": True, "decoders": 1}, tmp_path / "log") as service:
        servers = [service.url, service.url.replace("127.0.0.1", "localhost")]
        command = [sys.executable, str(CLIENT), service.url, *servers]
        printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    guide = (ROOT / "docs/render.md").read_text(encoding="utf-8")
    first, second = servers
    shown = printed.replace(second, "http://localhost:8002").replace(first, "http://localhost:8001")
    assert f"```text\n{shown}```" in guide
    asked = [(color, server, int(held), int(length)) for color, server, held, length in ASKED.findall(printed)]
    first, second = asked[:3], asked[3:]
    assert [color for color, *_ in first] == [color for color, *_ in second], printed
    assert {server for _, server, *_ in first} == {*servers}, "new images are spread"
    assert [server for _, server, *_ in first] == [server for _, server, *_ in second], "known images stay"
    assert all(held > 0 for _, _, held, _ in second), printed
    assert all(held == 0 for _, _, held, _ in first), printed
