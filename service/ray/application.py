"""Builds the application that Ray Serve runs: a worker deployment behind an ingress deployment."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve import Application

from mindie_mm.errors import InputError
from mindie_mm.processes.ray_cluster import KEEP_CHILDREN
from mindie_mm.settings.environment import variable
from mindie_mm.settings.sources import SECRETS
from service.ray.content_router import SURPLUS_TOKENS
from service.ray.ingress import Ingress
from service.ray.plan import configuration_of, plan_of
from service.ray.worker_replica import WorkerReplica

_ROUTER = "service.ray.content_router:ContentRouter"
_POLICY = "service.ray.autoscaling:QueuedTokens"
_PROBES = 16
"""Number of requests such as probes that a replica accepts while it answers `max_concurrent_requests` requests."""
_CLOSE_S = 10.0
"""Time in seconds for a replica to close after its requests have ended."""


class Arguments(BaseModel):
    """Arguments of the application in a Serve config file."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)  # Serve logs the errors

    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of the service by name, as in the TOML file of --config. Further settings are read from the environment
    of each node. Serve logs these values, so API keys are refused here. Set MINDIE_MM_API_KEY instead."""
    num_replicas: int = Field(default=1, ge=1)
    """Number of worker replicas, or their minimum if `max_replicas` is set."""
    max_replicas: int | None = Field(default=None, ge=1)
    """Maximum number of worker replicas. Default: no autoscaling."""
    target_queued_tokens: float = Field(default=16384, gt=0)
    """Number of queued tokens per worker replica above which replicas are added."""
    autoscaling_config: dict[str, Any] = Field(default_factory=dict)
    """Further fields of Serve's `autoscaling_config`, such as `upscale_delay_s`."""
    surplus_tokens: int = Field(default=SURPLUS_TOKENS, ge=0)
    """A replica that holds a request's content gets the request if it has at most this number of queued tokens more
    than the least loaded replica."""
    num_ingresses: int = Field(default=1, ge=1)
    """Number of ingress replicas."""
    max_queued_requests: int = Field(default=256, ge=1)
    """Number of requests that wait in an ingress replica while all worker replicas are full. Further requests get
    status 429."""
    worker_resources: dict[str, float] = Field(default_factory=lambda: {"CPU": 1.0})
    """Ray resources of a worker replica, such as {CPU: 4, NPU: 1} or {CPU: 4, GPU: 1}."""


def build(arguments: Arguments) -> Application:
    """Return the application for a Serve config file, whose `import_path` names this function.

    Serve listens on the address in `http_options`, so the setting `host` does not matter.

    Raises:
        InputError: A setting is invalid, or is a secret.

    """
    if given := sorted(SECRETS & arguments.settings.keys()):
        variables = " and ".join(map(variable, given))
        raise InputError(
            f"settings contain {' and '.join(given)}, but Serve writes settings to its log; set {variables} in the "
            "environment of all nodes instead"
        )
    return application(plan_of({"host": "0.0.0.0", **arguments.settings}), arguments)  # noqa: S104


def application(plan: bytes, arguments: Arguments) -> Application:
    """Return the application with the settings in `plan`. `arguments.settings` is not used."""
    service = configuration_of(plan).service
    resources = dict(arguments.worker_resources)
    actor: dict[str, Any] = {
        "num_cpus": resources.pop("CPU", 1),
        "num_gpus": resources.pop("GPU", 0),
        "resources": resources,
        "runtime_env": {"env_vars": KEEP_CHILDREN},
    }
    scaling: dict[str, Any] = {"num_replicas": arguments.num_replicas}
    if arguments.max_replicas is not None:
        policy = {
            "policy_function": _POLICY,
            "policy_kwargs": {"target_queued_tokens": arguments.target_queued_tokens},
        }
        scaling = {
            "autoscaling_config": {
                "min_replicas": arguments.num_replicas,
                "max_replicas": arguments.max_replicas,
                "policy": policy,
                **arguments.autoscaling_config,
            }
        }
    worker = serve.deployment(WorkerReplica).options(
        **scaling,
        max_ongoing_requests=service.max_concurrent_requests + _PROBES,
        max_queued_requests=arguments.max_queued_requests,
        graceful_shutdown_timeout_s=service.grace_s + _CLOSE_S,
        graceful_shutdown_wait_loop_s=0.5,
        request_router_config={
            "request_router_class": _ROUTER,
            "request_router_kwargs": {"surplus_tokens": arguments.surplus_tokens},
            "request_routing_stats_period_s": 1,
        },
        ray_actor_options=actor,
    )
    ingress = serve.deployment(Ingress).options(
        num_replicas=arguments.num_ingresses,
        max_ongoing_requests=100_000,  # bodies are bounded, and workers bound the requests
        graceful_shutdown_timeout_s=service.grace_s + 2 * _CLOSE_S,  # until the workers have finished
        graceful_shutdown_wait_loop_s=0.5,
        ray_actor_options={"num_cpus": 1},
    )
    built: Application = ingress.bind(plan, worker.bind(plan))
    return built
