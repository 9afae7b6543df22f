"""Tests that execute each RUN instruction of the Dockerfiles and start the service in the resulting image."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.docker.dockerfile import DEVICES, ROOT, last_stage, of, read
from tests.docker.image import Image, base, build, free_port, machine_of_pip, ready, stop, why_not
from tests.docker.settings import nbytes
from tests.docker.test_compose import FOUND, plain
from tools.demo import data_url, draw_shape

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CACHE = ROOT / "build/docker"
STAND_INS = {
    "cpu": {},
    # The CUDA build of torch takes gigabytes, so it is not installed here. test_resolving.py checks that it exists.
    "cuda": {"TORCH_INDEX_URL": CPU_INDEX},
    # The versions that the simulated NPU of tests/ascend supports.
    "npu": {"TORCH_VERSION": "2.13.0", "TORCH_NPU_VERSION": "2.13.0"},
}
"""Build arguments, by device, where these tests do not use the defaults."""
PREPARE = {
    "npu": "apt-get update && apt-get install --yes --no-install-recommends python3-venv && rm -rf /var/lib/apt/lists/*"
}
"""Commands, by device, that add to Debian what the real base image also contains. The CANN image contains Python."""
CANN = "/usr/local/Ascend/cann"
AT_RUN = {
    "cpu": {},
    "cuda": {"MINDIE_MM_DEVICE": "cpu"},
    # The variables of the real base image, with the values of the simulated CANN.
    "npu": {
        "ASCEND_HOME_PATH": CANN,
        "ASCEND_OPP_PATH": f"{CANN}/opp",
        "LD_LIBRARY_PATH": CANN,
        "PYTHONPATH": f"{CANN}/tests/ascend/site:{CANN}",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "TASK_QUEUE_ENABLE": "0",
        "MINDIE_MM_KV_CACHE_BYTES": str(64 * 2**20),
        "MINDIE_MM_MEASURE_S": "0",
    },
}
"""Environment variables of the running image, by device. The tests use no GPU, and tests/ascend simulates the NPU."""
NOT_SHIPPED = ("gcc", "cc", "make", "git", "curl", "wget")


def torch_index() -> str:
    """Return the URL of an index for the CPU build of torch.

    If this machine is offline, skip the test unless one of pip's wheel folders contains the build.
    """
    try:
        with urllib.request.urlopen(f"{CPU_INDEX}/torch/", timeout=10):
            return CPU_INDEX
    except (urllib.error.URLError, TimeoutError):
        folders = os.environ.get("PIP_FIND_LINKS", "").split()
        if not any(list(Path(folder).glob("torch-2.13.0+cpu-cp311-*.whl")) for folder in folders):
            pytest.skip("no CPU build of torch 2.13.0 for Python 3.11 can be had")
        return "https://pypi.org/simple"


def simulated_cann(root: Path) -> None:
    """Build the simulated CANN for the image's torch_npu, and install it where the real CANN would be."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc, which makes the simulated CANN")
    (site,) = (root / "opt/mindie_mm/lib").glob("python3.*/site-packages")
    command = [sys.executable, str(ROOT / "tests/ascend/cann/build.py")]
    env = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=300)
    place = root / CANN.lstrip("/")
    shutil.copytree(done.stdout.strip(), place)
    shutil.copytree(ROOT / "tests/ascend", place / "tests/ascend")
    place.chmod(0o755)


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def image(device: str) -> Iterator[Image]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    CACHE.mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patched, tempfile.TemporaryDirectory(dir=CACHE) as folder:
        for name, value in machine_of_pip().items():
            patched.setenv(name, value)
        arguments = STAND_INS[device] | {"TORCH_INDEX_URL": torch_index()}
        yield build(device, Path(folder), base(CACHE), arguments, prepare=PREPARE.get(device, ""))


def test_every_run_instruction_is_executed(device: str, image: Image) -> None:
    assert image.ran == [one.value for one in of(read(device), "RUN")]


def test_the_image_has_the_package_and_no_build_tools_or_caches(device: str, image: Image) -> None:
    root = image.stage.root
    for folder in ("bin", "usr/bin", "usr/local/bin", "opt/mindie_mm/bin"):
        assert not [name for name in NOT_SHIPPED if (root / folder / name).exists()]
    assert not [path for path in ("src", "wheels", "root/.cache", "root/.config") if (root / path).exists()]
    assert not list((root / "tmp").iterdir())
    assert not list((root / "var/lib/apt/lists").glob("*Packages*"))
    (site,) = (root / "opt/mindie_mm/lib").glob("python3.*/site-packages")
    installed = {path.name.partition("-")[0] for path in site.glob("*.dist-info")}
    assert {"mindie_mm", "torch", "transformers", "opentelemetry_sdk"} <= installed
    assert not {"pytest", "ray", "mypy"} & installed
    assert ("torch_npu" in installed) is (device == "npu")
    assert (site / "mindie_mm/assets/tiny/config.json").is_file()
    uid = int(of(last_stage(read(device)), "USER")[0].value.partition(":")[0])
    assert not [path for path in site.glob("mindie_mm/**/*") if path.lstat().st_uid == uid], "it may not change itself"


def test_the_service_runs_as_process_1_without_privileges(device: str, image: Image, tmp_path: Path) -> None:
    """The service answers a request although only /tmp and /dev/shm are writable.

    The size of /dev/shm is the size in compose.yaml.
    """
    if device == "npu":
        simulated_cann(image.stage.root)
    service, log = FOUND["services"][device], tmp_path / "log"
    env = AT_RUN[device] | {"MINDIE_MM_HOST": "127.0.0.1", "MINDIE_MM_PORT": str(free_port())}
    assert not image.healthy(env)
    red = data_url(draw_shape("red", (220, 40, 40), "square", x=0.4))
    parts = {"type": "image_url", "image_url": {"url": red}}, {"type": "text", "text": "What is in the image?"}
    with image.run(log, env, shm_bytes=nbytes(plain(service["shm_size"])), tmp_bytes=2**30) as process:
        with httpx2.Client(base_url=ready(process, log), timeout=120) as http:
            assert image.healthy(env)
            body = {"messages": [{"role": "user", "content": parts}], "temperature": 0, "max_tokens": 16}
            answer = http.post("/v1/chat/completions", json=body).raise_for_status().json()
        assert "red square" in answer["choices"][0]["message"]["content"]
        (first,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="utf-8").split()
        status = dict(
            line.split(":\t") for line in Path(f"/proc/{first}/status").read_text(encoding="utf-8").splitlines()
        )
        assert status["NSpid"].split()[1] == "1"
        assert set(status["Uid"].split() + status["Gid"].split()) == {"10001"}
        assert status["Groups"].strip() == ""
        assert {int(status[name], 16) for name in ("CapPrm", "CapEff", "CapBnd", "CapInh")} == {0}
        assert b"serve" in Path(f"/proc/{first}/cmdline").read_bytes().split(b"\0")
        assert stop(process) == 0, log.read_text()[-2000:]
    assert not image.healthy(env)
