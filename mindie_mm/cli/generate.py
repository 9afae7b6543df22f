"""mindie-mm generate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mindie_mm.cli.paths import PATH, RUN_FOLDER
from mindie_mm.cli.resuming import ROWS_FAILED, resuming
from mindie_mm.cli.settings import configured
from mindie_mm.inputs.checks import counted
from mindie_mm.processes.interrupts import importing


@click.command("generate")
@click.option("--tokenized", "folder", type=RUN_FOLDER, required=True,
              help="Folder that `mindie-mm tokenize` wrote, or its URL, such as s3://bucket/run/.")  # fmt: skip
@click.option("--output", type=PATH, required=True, help="File for the answers, one JSON line per row.")
@click.option("--model", type=PATH, help="Checkpoint directory.  [default: the checkpoint that tokenized the rows]")
@click.option(
    "--other-model",
    is_flag=True,
    help="Accept a checkpoint even if its tokenizer files differ from the files that were used to tokenize the rows.",
)
@click.option("--max-tokens", type=click.IntRange(1), default=256, show_default=True,
              help="Maximum number of tokens of an answer to a row that does not state it.")  # fmt: skip
@click.option("--temperature", type=float, default=0.0, show_default=True,
              help="Sampling temperature of rows that do not state it. 0 always gives the same answers.")  # fmt: skip
@click.option("--retry-errors", is_flag=True,
              help="Ask the rows again whose line in the output has an error. Other lines are kept.")  # fmt: skip
@click.option("--limit", type=click.IntRange(1), help="Run only the first N rows.", metavar="N")
@click.option("--generation-config", metavar="auto|vllm|FOLDER",
              help="Source of the other sampling parameters: the checkpoint's generation_config.json (auto), "
              "neutral values (vllm), or a folder with a generation_config.json. OUTPUT.origin.json records the values "
              "that were used.  [default: auto]")  # fmt: skip
@click.option(
    "--device",
    help="Device that runs the model: auto, npu, cuda, cpu, or a single device, such as cuda:1.  [default: auto]",
)
@click.option("--dtype", help="Type of weights and activations: auto, float32, bfloat16 or float16.  [default: auto]")
@click.option("--weights", type=click.Choice(["auto", "int8"]),
              help="Precision of the text layers: auto, or int8 on the CPU.  [default: auto]")  # fmt: skip
@click.option("--lora", type=PATH, help="Folder of a LoRA adapter of the model, which computes the answers.")
@click.option("--tensor-parallel", type=click.IntRange(1),
              help="Number of devices that share the model's weights.  [default: 1]")  # fmt: skip
@click.option("--replicas", metavar="N|auto",
              help="Number of engines, each with its own device, or with --tensor-parallel devices. auto: as many as "
              "the devices allow.  [default: 1, or auto with --ray]")  # fmt: skip
@click.option("--ray", is_flag=False, flag_value="local", metavar="[ADDRESS]",
              help="Run the engines on the nodes of the Ray cluster at ADDRESS, or of a local cluster. Each node needs "
              "the tokenized rows and the checkpoint at the same paths. Requires the extra `ray`.")  # fmt: skip
@resuming()
def command(
    folder: Path | str,
    output: Path,
    *,
    generation_config: str | None,
    device: str | None,
    dtype: str | None,
    weights: str | None,
    tensor_parallel: int | None,
    **given: Any,
) -> None:
    """Run the model on rows that `mindie-mm tokenize` has prepared.

    Each line of the output has row, id, text, token_ids and finish_reason, or row, id and error. A row from a line of
    OpenAI's Batch API gets a line in that format: id, custom_id, response and error. The lines are in the order of the
    rows. Run the same command again to continue an unfinished output file. OUTPUT.origin.json records the settings, and
    a command with other settings is refused.

    Exit status: 0 if every row has an answer, 1 if some rows failed, 130 if interrupted, 3 if the run is not finished
    for another reason.
    """
    with importing():
        from service.offline import generate_dataset

    flags = {
        "device": device,
        "dtype": dtype,
        "weights": weights,
        "tensor_parallel": tensor_parallel,
        "generation_config": generation_config,
    }
    config = configured(None, flags).worker
    rows, errors = generate_dataset(folder, output, config, progress="auto", **given)
    click.echo(f"{counted(rows, 'row')} in {output}; {counted(errors, 'row') if errors else 'no row'} failed")
    if errors:
        raise SystemExit(ROWS_FAILED)
