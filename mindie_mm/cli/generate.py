"""mindie-mm generate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from mindie_mm.cli.paths import PATH
from mindie_mm.cli.resuming import ROWS_FAILED, resuming
from mindie_mm.cli.settings import configured


@click.command("generate")
@click.option("--tokenized", "folder", type=PATH, required=True, help="What `tokenize` wrote.")
@click.option("--output", type=PATH, required=True, help="JSON lines, a row each.")
@click.option("--model", type=PATH, help="Checkpoint directory; the rows' own if not given.")
@click.option("--other-model", is_flag=True, help="Take a checkpoint whose tokenising files did not make the rows.")
@click.option("--max-tokens", type=click.IntRange(1), default=256, show_default=True, help="Most tokens of an answer.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 always gives the same answer.")
@click.option("--limit", type=click.IntRange(1), help="Only the first rows.")
@click.option("--device", help="auto, or a device that `doctor` lists.")
@click.option("--dtype", help="auto, float32, bfloat16 or float16.")
@click.option("--tensor-parallel", type=click.IntRange(1), help="Processes, and devices, that share the weights.")
@resuming()
def command(
    folder: Path,
    output: Path,
    *,
    model: Path | None,
    other_model: bool,
    max_tokens: int,
    temperature: float,
    limit: int | None,
    device: str | None,
    dtype: str | None,
    tensor_parallel: int | None,
) -> None:
    """Run the model on rows that are tokenised: no preprocessing, the arrays are mapped where they lie.

    A line has row, id, text, token_ids and finish_reason, or error, in the order of the rows. A second call goes on
    behind the last line of OUTPUT; OUTPUT.origin.json tells whether it is the same call. Exits with 1 if it is finished
    and a row failed, with 130 if it was interrupted, and 3 if it is not finished for another reason.
    """
    import asyncio

    from mindie_mm.batch import Dataset
    from mindie_mm.cli.offline import generate  # late: it takes seconds to import
    from mindie_mm.engine.sampling_params import SamplingParams

    if output.name == "-":
        raise click.BadParameter("answers go to a file, behind which a second call goes on", param_hint="--output")
    dataset = Dataset(folder)
    settings = dataset.manifest.run.settings
    flags = {"device": device, "dtype": dtype, "tensor_parallel": tensor_parallel, "arena_bytes": 1 << 20}
    # Not the environment's: its checkpoint and family are a service's, these are the rows' own.
    own = Path(settings.model) if settings.model else None
    config = replace(configured(None, flags).worker, model=model or own, family=settings.family or None)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    rows, errors = asyncio.run(generate(dataset, output, config, params, limit, other_model=other_model))
    click.echo(f"{rows} rows in {output}; {errors or 'no'} row{'' if errors == 1 or not errors else 's'} failed")
    if errors:
        raise SystemExit(ROWS_FAILED)
