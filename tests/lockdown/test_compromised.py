"""Tests that code in a decoder of a running service cannot exceed the decoder's limits or harm other requests."""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import httpx2
import psutil
import pytest

from mindie_mm.lockdown import support
from tests.attacks.conftest import with_bytes
from tests.lockdown import reply_fuzz
from tests.lockdown.attacker import environment, running
from tests.media_samples import encoded, photograph
from tools.serving import RunningService, running_service

pytestmark = pytest.mark.skipif(bool(support().missing), reason="; ".join(support().missing))
MiB = 2**20
LIMIT = 128 * MiB
PNG = encoded(photograph("chelsea.png", (150, 120)), "PNG")
WRONG = re.compile(
    r"AssertionError|ValueError|IndexError|KeyError|TypeError|OverflowError|unexpected error|tower failed"
)
"""Pattern of log lines about errors outside of mindie_mm.errors."""


FUZZED_S = 600.0


class Client:
    """A client of the service that is attacked."""

    def __init__(self, service: RunningService) -> None:
        self.service = service
        self.http = httpx2.Client(base_url=service.url, timeout=120)
        self.expected = self.ask(PNG).json()["choices"]
        self._processes = self._children()

    def ask(self, image: bytes, salt: str = "", timeout_s: float = 120) -> httpx2.Response:
        body = with_bytes("image", image) | {"cache_salt": salt or None}
        return self.http.post("/v1/chat/completions", json=body, timeout=timeout_s)

    def said(self, source: str, *, ends: bool = True) -> str:
        """Run the statements `source` in a decoder, and return the value of its variable `found`.

        Kill the decoder unless `ends` is false.
        """
        body = "\n".join(f"    {line}" for line in source.splitlines())
        answer = self.ask(running(PNG, f"def attack():\n{body}\n    return say(found)"))
        assert answer.status_code == 400, answer.text
        for decoder in self.decoders() if ends else ():
            decoder.kill()
        return answer.json()["error"]["message"].partition("said: ")[2]

    def decoders(self) -> list[psutil.Process]:
        """Return the decoder processes, which are the children of the nursery."""
        while True:
            with contextlib.suppress(psutil.NoSuchProcess):  # a decoder has ended since it was listed
                processes = psutil.Process(self.service.process.pid).children(recursive=True)
                parents = {process.ppid() for process in processes}
                return [
                    one for one in processes if one.pid not in parents and "decode.nursery" in " ".join(one.cmdline())
                ]

    def is_right(self) -> None:
        """Assert that another client gets the same answer as before the attacks, from the same processes."""
        assert self.ask(PNG).json()["choices"] == self.expected
        assert self._children() == self._processes

    def _children(self) -> set[psutil.Process]:
        """Return the children of the service, among them the tokenizer and the engine."""
        return {*psutil.Process(self.service.process.pid).children()}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    folder = tmp_path_factory.mktemp("compromised")
    settings = {"max_decode_bytes": LIMIT, "decoders": 1, "spool": folder / "spool", "arena_bytes": 64 * MiB}
    with running_service(settings, folder / "log", environment=environment(folder)) as service:
        client = Client(service)
        yield client
        client.http.close()
        assert service.wait_until_free()["blocks"] == 0
        assert service.stop() == 0, (folder / "log").read_text()[-2000:]


MAPPING = """
import ctypes, mmap
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
def mapped(nbytes, protection=3, flags=0x22, address=None):
    place = libc.mmap(address, ctypes.c_size_t(nbytes), protection, flags, -1, ctypes.c_long(0))
    return None if place == 2**64 - 1 else place
limit = 128 << 20
"""


ALLOCATING = {
    "plain": "found = mapped(2 * limit)",
    "read-only": "found = mapped(2 * limit, 1)",
    "growing down": "found = mapped(2 * limit, 3, 0x122)",
    "a page of the stack": """
end = ctypes.c_void_p.in_dll(libc, "__libc_stack_end").value & -4096
new = libc.mremap(ctypes.c_void_p(end - 81920), ctypes.c_size_t(4096), ctypes.c_size_t(2 * limit), 1)
found = None if new == 2**64 - 1 else new
""",
    "made read-only": """
place = mapped(64 << 20)
found = None if libc.mprotect(ctypes.c_void_p(place), ctypes.c_size_t(64 << 20), 1) else place
""",
    "reserved": """
place = mapped(limit, 0, 0x4022)
for at in range(place, place + limit, 1 << 20):
    libc.mprotect(ctypes.c_void_p(at), ctypes.c_size_t(1 << 20), 3)
found = mapped(limit)
""",
    "a file": """
place = libc.mmap(None, ctypes.c_size_t(4096), 1, 1, descriptors[0], ctypes.c_long(0))
found = None if place == 2**64 - 1 else place
""",
}
"""Statements that try to get memory that no limit counts. `found` is an address, or None if they fail."""


@pytest.mark.parametrize("source", ALLOCATING.values(), ids=ALLOCATING)
def test_no_memory_beyond_the_limit_can_be_allocated(client: Client, source: str) -> None:
    assert client.said(MAPPING + source) == "None"
    client.is_right()


def test_page_tables_of_scattered_memory_are_limited(client: Client) -> None:
    """Keep one page of every 2 MiB, so that each page needs a page table, and measure them from outside."""
    number = client.said(
        MAPPING + "kept = 0\n"
        "while (place := mapped(64 << 20)) is not None:\n"
        "    for at in range(place, place + (64 << 20), 2 << 20):\n"
        "        ctypes.memset(at, 1, 1)\n"
        "        libc.munmap(ctypes.c_void_p(at + 4096), ctypes.c_size_t((2 << 20) - 4096))\n"
        "        kept += 1\n"
        "found = kept",
        ends=False,
    )
    assert 0 < int(number) < 65536
    deadline = time.monotonic() + 60
    while (held := [*map(held_bytes, client.decoders())]) and max(held) - min(held) > LIMIT + 256 * MiB:
        assert time.monotonic() < deadline, "the tokenizer does not end the decoder"
        time.sleep(0.1)
    client.is_right()


def held_bytes(process: psutil.Process) -> int:
    """Return the size of the private memory and the page tables of a process, or 0 if it has ended."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text("utf-8")
    except OSError:
        return 0
    return sum(1024 * int(number) for number in re.findall(r"(?:RssAnon|VmPTE):\s+(\d+)", status))


@pytest.mark.parametrize(
    "act",
    [
        "time.clock_gettime(~1 << 3 | 2)",
        "os.sched_getaffinity(os.getppid())",
        "signal.signal(signal.SIGXCPU, signal.SIG_IGN)",
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGXCPU})",
        "os.kill(os.getpid(), signal.SIGSTOP)",
        "resource.setrlimit(resource.RLIMIT_CPU, (-1, -1))",
        "os.open('/etc/passwd', 0)",
        "socket.socket()",
        "socket.socket(fileno=3).send(b'a', socket.MSG_OOB)",
    ],
)
def test_other_processes_and_signals_are_out_of_reach(client: Client, act: str) -> None:
    tried = f"try:\n    {act}\n    found = 'done'\nexcept (PermissionError, ValueError):\n    found = 'refused'"
    assert client.said(f"import os, resource, signal, socket, time\n{tried}") == "refused"
    client.is_right()


OTHER_SIZE = """
def attack():
    if not isinstance(message, module.PlanItem):
        return module.Written()
    plan = go_on()
    module.count = getattr(module, "count", 0) + 1
    if module.count == 1:
        return plan
    fields = msgspec.to_builtins(plan)
    frames, rows, columns = fields["grid"]
    fields["grid"] = [frames, rows, 2 * columns]
    fields["num_features"] *= 2
    pixels = next(iter(fields["specs"].values()))
    pixels["shape"] = [2 * pixels["shape"][0], *pixels["shape"][1:]]
    return raw(msgspec.msgpack.encode(fields))
"""


def test_two_sizes_of_one_file_are_two_items(client: Client) -> None:
    """The settings of both plans are equal. With equal digests, the engine would use one item's features for both."""
    body = with_bytes("image", running(PNG, OTHER_SIZE)) | {"cache_salt": "two sizes"}
    content = body["messages"][-1]["content"]
    content += [part for part in content if part["type"] != "text"]
    answer = client.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    client.is_right()


SPEC = {"shape": [4], "dtype": "int64"}
FORGED: dict[str, str] = {
    "the description": "fields['specs']['item'] = SPEC",
    "the description first": "fields['specs'] = {'item': SPEC, **fields['specs']}",
    "the description alone": "fields['specs'] = {'item': SPEC}",
    "embeddings": "fields['specs'] = {'embeddings': {'shape': [fields['num_features'], 64], 'dtype': 'float32'}}",
    "embeddings, too": "fields['specs']['embeddings'] = {'shape': [fields['num_features'], 64], 'dtype': 'float32'}",
    "one more array": "fields['specs']['more'] = SPEC",
    "no array": "fields['specs'] = {}",
    "a thousand arrays": "fields['specs'] |= {str(n): SPEC for n in range(1000)}",
    "another name": "fields['specs'] = {'pixels': pixels}",
    "another dtype": "pixels['dtype'] = 'float64'",
    "no dtype": "pixels['dtype'] = 'object'",
    "more rows": "pixels['shape'][0] += 4",
    "fewer rows": "pixels['shape'][0] -= 4",
    "more columns": "pixels['shape'][1] += 1",
    "another axis": "pixels['shape'].append(1)",
    "seven axes": "pixels['shape'] = [1] * 7",
    "no axis": "pixels['shape'] = []",
    "no rows": "pixels['shape'][0] = 0",
    "negative rows": "pixels['shape'][0] = -1",
    "terabytes": "pixels['shape'][0] = 2**40",
    "no features": "fields['num_features'] = 0",
    "negative features": "fields['num_features'] = -1",
    "one more feature": "fields['num_features'] += 1",
    "many features": "fields['num_features'] = 2**24",
    "more features than fit": "fields['num_features'] = 2**62",
    "no grid": "fields['grid'] = []",
    "a longer grid": "fields['grid'] = [*fields['grid'], 1]",
    "an empty grid": "fields['grid'] = [0, 0, 0]",
    "a negative grid": "fields['grid'] = [-n for n in fields['grid']]",
    "a large grid": "fields['grid'] = [2**62] * 3",
    "a large grid that is consistent": "fields |= {'grid': [1, 2**12, 2**12], 'num_features': 2**22}",
    "a grid of fractions": "fields['grid'] = [1.5, 2.5, 3.5]",
    "a zero byte in the settings": "fields['settings'] += chr(0) + 'bytes' + chr(0)",
    "settings that are no text": "fields['settings'] = 7",
    "lines in the log": "fields['left_out'] = 'a' + chr(10) + 'b'",
    "a long warning": "fields['left_out'] = 'a' * 10**5",
    "negative pixels": "fields['image_pixels'] = -10**9",
    "too many pixels": "fields['image_pixels'] = 10**15",
    "negative pages": "fields['num_pages'] = -1",
    "an array of MindIE's": "fields['mindie_specs'] = {'item': SPEC}",
    "another type": "fields['type'] = 'written'",
    "no type": "fields = {}",
    "an unknown error": "fields = refused('ZeroDivisionError')",
    "an error that is no class of errors": "fields = refused('Iterator')",
    "the death of a process": "fields = refused('ProcessDied')",
    "the reload of an engine": "fields = refused('EngineReloaded')",
    "a long message": "fields = refused('MediaError', 'a' * 10**5)",
    "an error": "fields = refused('OperationalError')",
    "a miscounted video": "fields = refused('Miscounted')",
}
"""Statements that change the fields of a plan. `pixels` is the spec of the plan's only array."""
FORGING = f"""
SPEC = {SPEC}

def refused(name, text="a reason"):
    return {{"type": "refused", "error": {{"type": "failed", "name": name, "message": text}}}}

def attack():
    plan = go_on()
    if not isinstance(message, module.PlanItem):
        return plan
    fields = msgspec.to_builtins(plan)
    pixels = next(iter(fields["specs"].values()))
    pixels["shape"] = list(pixels["shape"])
    """


@pytest.mark.parametrize("forgery", FORGED.values(), ids=FORGED)
def test_a_forged_plan_fails_its_own_request_with_an_error_of_ours(client: Client, forgery: str) -> None:
    start = client.service.log.stat().st_size
    answer = client.ask(running(PNG, f"{FORGING}{forgery}\n    return raw(msgspec.msgpack.encode(fields))"))
    assert answer.status_code in {400, 500, 503}, answer.text
    client.is_right()
    with client.service.log.open("rb") as log:
        log.seek(start)
        assert not WRONG.search(added := log.read().decode()), added


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_no_reply_of_a_decoder_affects_others(client: Client) -> None:
    """Replies are well-formed or not, late, sent twice, or sent after the client has left. Seeds are fixed."""
    random, end = Random(7), time.monotonic() + FUZZED_S
    start = client.service.log.stat().st_size
    seeds = itertools.count()

    def attack() -> list[int]:
        statuses = []
        while time.monotonic() < end:
            seed = next(seeds)
            with contextlib.suppress(httpx2.TimeoutException):
                timeout_s = random.choice([0.05, 0.3, 60])
                image = running(PNG, reply_fuzz.attack(seed))
                statuses.append(client.ask(image, "attacker", timeout_s).status_code)
        return statuses

    with ThreadPoolExecutor(3) as pool:
        attacks = [pool.submit(attack) for _ in range(3)]
        while time.monotonic() < end:
            client.is_right()
        statuses = Counter(status for one in attacks for status in one.result())
    client.is_right()
    assert {*statuses} <= {200, 400, 500, 503}, statuses
    with client.service.log.open("rb") as log:
        log.seek(start)
        found = [line for line in log.read().decode().splitlines() if WRONG.search(line)]
    assert not found, found[:5]
