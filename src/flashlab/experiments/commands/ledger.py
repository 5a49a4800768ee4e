"""`flashlab claims`: published claims, judged by the records."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from flashlab.cli import options as opt
from flashlab.cli.output import answer, as_json, following, say
from flashlab.core.errors import CheckFailedError, ParameterError
from flashlab.core.paths import DATA


def claims(
    *,
    gpu: opt.Gpu = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="First measure what the claims need on this GPU: a few minutes.")
    ] = False,
    write: Annotated[bool, typer.Option("--write", help="Write the verdicts to data/<gpu>/verdicts.json.")] = False,
    compare: Annotated[
        Path | None, typer.Option(help="Another verdicts.json: list verdicts that differ; fail if any does.")
    ] = None,
    device: opt.Device = 0,
    data: opt.Data = DATA,
) -> None:
    """Judge the claims of data/claims.csv by a GPU's records: verdict, measured value, interval, record and reason."""
    from flashlab.experiments import ledger, rules_log
    from flashlab.measure.options import Options
    from flashlab.record import store
    from flashlab.run import gpu as devices

    if measure:
        here = devices.info(device).slug
        if gpu not in (None, "", here):
            raise ParameterError(f"--gpu: wanted {here}, the GPU that --measure uses, got {gpu}")
        with following("measuring") as follow:
            for path in ledger.measure(
                options=Options(data=data, device=device, progress=follow, note=say, resume=True)
            ):
                say(f"recorded in {path}")
    name = store.require_runs(gpu, data)
    verdicts = ledger.verdicts(name, data)
    if write:
        say(f"written to {ledger.write(verdicts, name, data)}")
        log = rules_log.write() if data == DATA else None
        say(f"rules' log written to {log}" if log else "rules' log unchanged: it needs a full clone")
    if compare is not None:
        differences = ledger.differences(verdicts, ledger.read_verdicts(compare))
        rows = [
            {"id": name, "here": here and here.flat(), "there": there and there.flat()}
            for name, (here, there) in differences.items()
        ]
        columns = {"claim": "id", "here": "here.verdict", "there": "there.verdict"}
        if rows or as_json():
            answer(rows, columns | {"reason here": "here.reason", "reason there": "there.reason"})
        if differences:
            raise CheckFailedError(f"{len(differences)} of {len(verdicts)} verdicts differ from those in {compare}")
        say(f"All {len(verdicts)} verdicts match {compare}")
        return
    decisive = {verdict.id: ledger.shown(verdict.decisive) for verdict in verdicts if verdict.decisive}
    answer(
        ledger.as_rows(verdicts),
        {
            "claim": "id",
            "verdict": lambda row: ledger.words(row["verdict"]),
            "ours": lambda row: decisive.get(row["id"]),
            **{"claimed": "claimed", "record": "record", "reason": "reason"},
        },
        title=f"{len(verdicts)} claims, each judged by records of the GPU that it is about, or "
        f"by those of {name} if that has none",
    )
    if not as_json():
        counts = Counter(verdict.verdict for verdict in verdicts)
        say(", ".join(f"{counts[kind]} {ledger.words(kind)}" for kind in ledger.KINDS if counts[kind]))


COMMANDS = {"claims": claims}
