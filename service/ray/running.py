"""Applications that run on a cluster: their names, and why they failed."""

from __future__ import annotations

from ray import serve
from ray.serve.schema import ApplicationStatus

from mindie_mm.errors import InputError

_OUR_ERRORS = "mindie_mm.errors."


def require_free(name: str, address: str) -> None:
    """Raise InputError if an application called `name` runs on the cluster at `address`.

    Serve would silently replace this application, and end the requests of another `mindie-mm serve --ray`.
    """
    found = serve.status().applications.get(name)
    if found is not None and found.status not in (ApplicationStatus.DELETING, ApplicationStatus.NOT_STARTED):
        raise InputError(
            f"--ray {address}: the application {name!r} already runs on this cluster (status {found.status.value}); "
            f"end its `mindie-mm serve --ray`, delete it with serve.delete({name!r}), or use another cluster"
        )


def failure_of(name: str) -> str:
    """Return why replicas of the application `name` do not start, or an empty string if Serve gives no reason."""
    found = serve.status().applications.get(name)
    deployments = found.deployments.values() if found else ()
    return "; ".join(sorted({reason(one.message) for one in deployments if one.message}))


def reason(message: str) -> str:
    """Return the last line of a replica's traceback, which names the error, without the name of our error class.

    Args:
        message: Message of a deployment, which contains the traceback of the replica that failed last.

    """
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith(_OUR_ERRORS)]
    if ours:
        return ours[-1].partition(": ")[2]
    return lines[-1] if lines else ""
