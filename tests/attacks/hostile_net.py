"""A web server on public addresses, and fetches from this server, to run in a separate network namespace.

`python -m tests.attacks.hostile_net` prints a JSON object with the fetched content or the refusal of each case. Because
of the namespace, no packet leaves the machine.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import subprocess
from typing import Any

from aiohttp import web

from mindie_mm.errors import MediaError
from mindie_mm.media.fetch.http import fetch
from tools.arguments import parser

PUBLIC, OTHER = "93.184.215.14", "93.184.215.15"
PRIVATE = "127.0.0.1"
HOPS = {
    "to loopback": f"http://{PRIVATE}/media",
    "to a mapped address": f"http://[::ffff:{PRIVATE}]/media",
    "to a number": "http://2130706433/media",
    "to metadata": "http://169.254.169.254/media",
    "to a file": "file:///etc/passwd",
    "to a name of loopback": "http://inside.example/media",
    "with a user": f"http://user@{PRIVATE}/media",
    "with a backslash": f"http://{OTHER}\\@{PRIVATE}/media",
}
CASES = {
    "public": f"http://{PUBLIC}/media",
    "public by a redirect": f"http://{PUBLIC}/to?url=http://{OTHER}/media",
    "rebinding": "http://turning.example/media",
    "one of two": "http://mixed.example/media",
    **{f"first hop {name}": f"http://{PUBLIC}/to?url={url}" for name, url in HOPS.items()},
    **{f"second hop {name}": f"http://{PUBLIC}/to?url=http://{OTHER}/to?url={url}" for name, url in HOPS.items()},
}


async def answer(request: web.Request) -> web.Response:
    if request.path == "/media":
        return web.Response(body=b"SECRET" if request.transport.get_extra_info("sockname")[0] == PRIVATE else b"media")
    return web.Response(status=302, headers={"Location": request.query_string.removeprefix("url=")})


def resolve_as_attackers_do() -> None:
    """Make `socket.getaddrinfo` answer for three names as an attacker's DNS server would.

    One name has a private address, one has a public and a private address, and one alternates between the two.
    """
    turns = itertools.cycle([[PUBLIC], [PRIVATE]])
    names = {"inside.example": lambda: [PRIVATE], "mixed.example": lambda: [PUBLIC, PRIVATE]}
    names["turning.example"] = lambda: next(turns)
    system = socket.getaddrinfo

    def getaddrinfo(host: Any, port: Any, *rest: Any, **further: Any) -> Any:
        if host not in names:
            return system(host, port, *rest, **further)
        return [entry for address in names[host]() for entry in system(address, port, *rest, **further)]

    socket.getaddrinfo = getaddrinfo


async def main() -> None:
    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "0.0.0.0", 80).start()
    resolve_as_attackers_do()
    results = {}
    for name, url in CASES.items():
        try:
            results[name] = (await fetch(url, max_bytes=100, timeout_s=5)).decode()
        except MediaError as error:
            results[name] = f"refused: {error}"
    again = [await _body(CASES["rebinding"]) for _ in range(4)]
    await runner.cleanup()
    print(json.dumps(results | {"rebinding again": again}))


async def _body(url: str) -> str:
    try:
        return (await fetch(url, max_bytes=100, timeout_s=5)).decode()
    except MediaError:
        return "refused"


if __name__ == "__main__":
    parser(__doc__).parse_args()
    for command in ("link set lo up", *(f"addr add {address}/32 dev lo" for address in (PUBLIC, OTHER))):
        subprocess.run(["ip", *command.split()], check=True)
    asyncio.run(main())
