"""`generate_dataset`, which `mindie-mm generate` calls, too. It reads the requests of rows as the service does."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from mindie_mm.batch import Dataset
from mindie_mm.batch.progress import Progress, Style, is_shown, shown
from mindie_mm.engine.requests.default_sampling import defaults_of
from mindie_mm.errors import InputError
from mindie_mm.inputs import type_of
from mindie_mm.nn.checkpoint.directory import EMBEDDED
from mindie_mm.nn.checkpoint.hub import checkpoint_name
from mindie_mm.processes.loop_thread import run_to_end
from mindie_mm.processes.progress import loading_shown
from mindie_mm.settings.config import Replicas, WorkerConfig
from mindie_mm.settings.limits import Count, converted
from mindie_mm.settings.paths import is_url, local
from mindie_mm.worker.offline import generate
from mindie_mm.worker.one_lora import with_one_lora
from service.request.batch_lines import BatchLines


def generate_dataset(
    tokenized: str | os.PathLike[str] | Dataset,
    output: str | os.PathLike[str],
    config: WorkerConfig | None = None,
    *,
    model: str | os.PathLike[str] | None = None,
    other_model: bool = False,
    max_tokens: int = 256,
    temperature: float = 0.0,
    limit: int | None = None,
    retry_errors: bool = False,
    generation_config: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    weights: str | None = None,
    tensor_parallel: int | None = None,
    lora: str | Path | None = None,
    replicas: Replicas | None = None,
    ray: str | None = None,
    progress: Style | None = None,
) -> tuple[int, int]:
    """Run the model on tokenized rows, as `mindie-mm generate` does, to the same file.

    A second call with the same arguments continues the file. A script needs no `__main__` guard.

    Args:
        tokenized: Folder that `tokenize_dataset` wrote, its URL in an object store, or its `Dataset`.
        output: File for the answers, one JSON line per row.
        config: Settings of the worker, which the other arguments override. Its checkpoint and family are not used.
        model: Checkpoint directory. The default is the checkpoint that tokenized the rows.
        other_model: Whether to accept a checkpoint with other tokenizer files.
        max_tokens: Maximum number of tokens of an answer to a row that does not state it.
        temperature: Sampling temperature of rows that do not state it. 0 always gives the same answers.
        limit: Number of rows to answer, or None for all rows.
        retry_errors: Whether to run the rows with an error again.
        generation_config: Source of the other sampling parameters, as in `WorkerConfig`.
        device: Device that runs the model, as in `EngineConfig`.
        dtype: Type of weights and activations, as in `EngineConfig`.
        weights: Precision of the text layers, as in `EngineConfig`.
        tensor_parallel: Number of devices that share the model's weights.
        lora: Folder of a LoRA adapter of the model, which computes the answers.
        replicas: Number of engines, as in `WorkerConfig`. The default with `ray` is "auto": as many as the accelerators
            of the cluster allow, or as many as there are nodes if there are none.
        ray: Address of the Ray cluster whose nodes run the engines, or "local" for a new cluster on this machine. The
            default is to run the engines on this machine without Ray. Each node needs the folder of the run and the
            checkpoint at the same paths as this machine.
        progress: Same as in `tokenize_dataset`.

    Returns:
        The number of rows in `output`, and the number of failed rows among them.

    Raises:
        InputError: An argument is invalid, or `output` belongs to another run.
        StorageError: `output` cannot be written, or the store of the run fails.
        CorruptReference: A shard is damaged or missing.
        NoProcess, ProcessDied, DeviceError: The engine does not restart, or every request makes it fail.

    """
    output = local("output", output)
    if output.name == "-":
        raise InputError(
            "standard output (-) is not supported, because an interrupted run could not be resumed from it; give the "
            "name of a file"
        )
    if config is not None and not isinstance(config, WorkerConfig):
        raise InputError(f"config is {type_of(config)}; it must be a WorkerConfig")
    if isinstance(tokenized, Dataset):
        dataset = tokenized
    else:
        is_remote = isinstance(tokenized, str) and is_url(tokenized)
        dataset = Dataset(str(tokenized) if is_remote else local("tokenized", tokenized))
    settings = dataset.manifest.run.settings
    if settings.plan:
        raise InputError(
            f"{dataset.folder} has no media, because it was tokenized with --plan; tokenize without --plan"
        )
    config = config or WorkerConfig()
    of_engine: dict[str, Any] = {
        "device": device,
        "dtype": dtype,
        "weights": weights,
        "tensor_parallel": tensor_parallel,
    }
    engine = replace(config.engine, **{name: value for name, value in of_engine.items() if value is not None})
    if replicas is None and ray is not None and config.replicas == 1:
        replicas = "auto"
    source = config.generation_config if generation_config is None else generation_config
    replicas = config.replicas if replicas is None else replicas
    config = replace(config, engine=engine, generation_config=source, replicas=replicas)
    # The environment may set the checkpoint and family of a service, which need not be those of the rows.
    own = Path(settings.model) if settings.model else None
    config = replace(config, model=own if model is None else local("model", model), family=settings.family or None)
    default = defaults_of(config.model, config.family, config.generation_config)
    config, name = with_one_lora(config, None if lora is None else local("lora", lora))
    params = default.stating(max_tokens=max_tokens, temperature=temperature, lora=name)
    requests = BatchLines(params, checkpoint_name(config.model or EMBEDDED))
    limit = converted("limit", limit, Count | None)
    with shown(progress) as show_rows, ExitStack() as starting:
        loading = starting.enter_context(loading_shown()) if is_shown(progress) else None

        def show(done: Progress, earlier: Progress) -> None:
            starting.close()  # a terminal shows one thing at a time
            show_rows(done, earlier)

        return run_to_end(
            generate(
                dataset,
                output,
                config,
                requests,
                limit,
                ray=ray,
                other_model=other_model,
                retry_errors=retry_errors,
                loading=loading,
                show=show,
            )
        )
