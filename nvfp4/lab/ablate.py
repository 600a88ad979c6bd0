"""`nvfp4 ablate RECIPE --policies a,b --seeds 3`: what does each precision policy cost?

Trains every variant with every seed, then compares: a table, ablate.json, ablate.md, ablate.png.
Variants are in ablate_variants.py, processes in ablate_runs.py, statistics in ablate_table.py.
"""

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from nvfp4.errors import UserError
from nvfp4.lab.ablate_progress import Progress
from nvfp4.lab.ablate_report import text, unfinished, write
from nvfp4.lab.ablate_runs import Start, Task, refuse_changes, run_all, start_training
from nvfp4.lab.ablate_table import tabulate
from nvfp4.lab.ablate_variants import entries, expand

EXIT_OK = 0


def ablate(
    recipe: str,
    override: Sequence[str] = (),
    *,
    policies: str = "",
    variants: Sequence[str] = (),
    seeds: int = 1,
    reference: str = "bf16",
    jobs: int = 2,
    out: str | Path | None = None,
    start: Start = start_training,
    echo: Callable[[str], object] = print,
) -> int:
    """Train what is not trained yet, and compare all of it with the reference; returns 0.

    policies: names of policies or recipes, separated by commas; variants: NAME:[POLICY,]a.b=c,...;
    see ablate_variants.py. seeds: how many, from run.seed on. jobs: processes side by side.
    out: folder of the runs and the report, by default runs/ablate_RECIPE. start: what trains a run.

    UserError: a policy, key or number that does not exist or fit; runs of another recipe in `out`;
    and, after the table, runs that failed (a diverged one is a row of the table).
    KeyboardInterrupt: after the runs have saved; the same call goes on.
    """
    if jobs < 1:
        raise UserError(f"--jobs {jobs}: at least one run at a time")
    folder = Path(out) if out is not None else None
    asked = entries(policies, variants, reference)
    folder, chosen = expand(asked, recipe, override, seeds=seeds, out=folder)
    by_variant = [[Task(r.run.name, r, folder) for r in variant.recipes] for variant in chosen]
    # One seed of all variants before the next, so that a part of the runs is worth a look.
    tasks = [task for same_seed in zip(*by_variant, strict=True) for task in same_seed]
    refuse_changes(tasks, folder)
    progress = Progress(echo)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        outcomes = run_all(tasks, jobs=jobs, progress=progress, start=start)
    except KeyboardInterrupt:
        progress.close()
        echo("stopped; the same command goes on from here")
        raise
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be used ({error.strerror}); choose another --out"
        ) from None
    finally:
        progress.close()
    table = tabulate(chosen, outcomes, recipe)
    for line in ["", *text(table)]:
        echo(line)
    from nvfp4.lab.ablate_plot import ablate_figure
    from nvfp4.lab.plots import save_png  # matplotlib, after the table is on screen

    words = ["nvfp4", "ablate", recipe, "--seeds", str(seeds)]
    words += ["--policies", policies] if policies else []
    words += [word for variant in variants for word in ("--variant", variant)]
    words += ["--reference", reference] if reference != "bf16" else []
    words += [*override, "--out", str(folder)]
    try:
        write(table, folder, shlex.join(words))
        save_png(ablate_figure(table), folder / "ablate.png")
    except OSError as error:
        raise UserError(f"{folder}: cannot write the report there ({error.strerror})") from None
    echo(f"figure: {folder / 'ablate.png'}")
    if failed := unfinished(table):
        raise UserError(
            f"{len(failed)} of {len(tasks)} runs did not finish: {'; '.join(failed[:3])}; logs are "
            f"in {folder / 'logs'}; the same command tries them again"
        )
    return EXIT_OK
