"""Tests in a locale whose encoding is not UTF-8. Text files and the output of commands are UTF-8 in every locale."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import mindie_mm
from mindie_mm.tokenize import Tokenizer
from tests.cli.shell import BIN, TIMEOUT_S

TINY = Path(mindie_mm.__file__).parent / "assets/tiny"
LOCALE = "de_DE.ISO-8859-1"
MESSAGES = [{"role": "user", "content": "你好"}]
IDS = """
import sys
from mindie_mm.tokenize import Tokenizer
with Tokenizer.from_pretrained(sys.argv[1]) as tokenizer:
    print(tokenizer.tokenize_chat([{"role": "user", "content": "\\u4f60\\u597d"}]).tolist())
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Return the environment variables of a locale whose encoding is not UTF-8.

    The fixture builds a locale with ISO 8859-1. If that fails, it uses the POSIX locale.
    """
    folder = tmp_path_factory.mktemp("locales")
    if shutil.which("localedef") is not None:
        command = ["localedef", "-i", "de_DE", "-f", "ISO-8859-1", folder / LOCALE]
        if not subprocess.run(command, capture_output=True, check=False).returncode:
            return os.environ | {"LOCPATH": str(folder), "LC_ALL": LOCALE, "PYTHONUTF8": "0"}
    return os.environ | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Return a checkpoint whose chat template contains characters outside ASCII."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    shutil.copytree(TINY, folder)
    template = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"]
    content = json.dumps({"chat_template": f"Grüße, 模型!{template}"}, ensure_ascii=False)
    (folder / "chat_template.json").write_text(content, encoding="utf-8")
    return folder


@pytest.mark.slow
def test_a_script_reads_a_checkpoint_as_utf8(environment, checkpoint):
    """Commands of mindie-mm restart themselves in UTF-8 mode, but a script of the user does not."""
    command = [sys.executable, "-c", IDS, str(checkpoint)]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=TIMEOUT_S, check=True)
    with Tokenizer.from_pretrained(checkpoint) as tokenizer:
        assert json.loads(done.stdout) == tokenizer.tokenize_chat(MESSAGES).tolist()


def test_settings_files_and_their_names_are_utf8(environment, tmp_path):
    """The test starts a service, which logs its settings and then ends because its port is in use."""
    (tmp_path / "模型.toml").write_text('served_model_name = "模型"\n', encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = [BIN, "serve", TINY, "--config", "模型.toml", "--spool", "spool", "--port", taken.getsockname()[1]]
        ended = subprocess.run(
            list(map(str, command)), env=environment, cwd=tmp_path, capture_output=True, timeout=TIMEOUT_S, check=False
        )
    log = ended.stderr.decode()
    assert ended.returncode == 1, log
    assert 'served_model_name = ["模型"] (模型.toml)' in log


def test_text_on_the_command_line_is_decoded_with_the_locale(environment, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = [BIN, "serve", "--served-model-name", "Grüße", "--spool", "spool", "--port", taken.getsockname()[1]]
        ended = subprocess.run(
            [str(one).encode("latin-1") for one in command],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    log = ended.stderr.decode()
    if environment["LC_ALL"] == LOCALE:
        assert 'served_model_name = ["Grüße"]' in log
    else:
        assert ended.returncode == 2
        assert "it is encoded neither in UTF-8 nor in the locale's encoding" in log
