"""The command line. Each command parses its words, calls the library, and prints."""

from __future__ import annotations

import json
import shlex
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape

from fedshuffle import __version__, methods
from fedshuffle._arrays import FloatArray, IntArray, expect
from fedshuffle.auditing import Audit, BlackBoxAudit
from fedshuffle.auditing import audit as run_audit
from fedshuffle.errors import FedShuffleError, unknown
from fedshuffle.federation import Federation
from fedshuffle.local_work import EpochRange, LocalWork
from fedshuffle.methods import Method
from fedshuffle.sampling import Sampling, is_import_path

if TYPE_CHECKING:
    from fedshuffle.comparison import Comparison

app = typer.Typer(
    help="Federated learning that optimises the objective you meant.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a program.")]
Out = Annotated[Path, typer.Option(help="Folder for the results; made if it does not exist.")]
Jobs = Annotated[
    int | None, typer.Option(help="Runs at once, each on one core; as many as cores if none.")
]


def main() -> None:
    """Run the command; what the user can put right is said in one line, without a traceback."""
    try:
        app()
    except FedShuffleError as error:
        Console(stderr=True).print(
            f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True
        )
        sys.exit(2)


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def audit(
    context: typer.Context,
    sizes: Annotated[
        str | None, typer.Option(help="Examples per client: 1,2,3 or @file, one a line.")
    ] = None,
    method: Annotated[
        str, typer.Option(help="See 'fedshuffle methods'; or module:METHOD.")
    ] = "fedavg-rr",
    sampling: Annotated[
        str,
        typer.Option(
            help="full, uniform:B, importance:B, independent:p1,p2,..., one, ais:B,"
            " stratified:B:K, optimal:B, optimal:B:of:SAMPLING."
        ),
    ] = "full",
    epochs: Annotated[
        str, typer.Option(help="2 for all, 1,2,3 per client, or 2..5 at random.")
    ] = "1",
    batch_size: Annotated[int, typer.Option(help="Examples per local step.")] = 1,
    weights: Annotated[
        str | None, typer.Option(help="Objective weights as for --sizes; by size if not given.")
    ] = None,
    momentum: Annotated[
        str | None, typer.Option(help="none, mvr:A (exact) or global:A (cheap); 0.9 is A = 0.1.")
    ] = None,
    flower: Annotated[
        str | None,
        typer.Option(help="Audit a Flower strategy instead: module:STRATEGY, or what makes one."),
    ] = None,
    function: Annotated[
        str | None,
        typer.Option(
            "--callable", help="Audit your server: module:FUNCTION(clients, sizes, updates)."
        ),
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(help="Audit a log: CSV or JSONL of round,client,size,steps,weight."),
    ] = None,
    step_sizes: Annotated[
        str, typer.Option(help="Of clients under --flower or --callable: equal, or scaled.")
    ] = "equal",
    confidence: Annotated[
        float, typer.Option(help="Of intervals, under --flower, --callable and --log.")
    ] = 0.95,
    seed: Annotated[int, typer.Option(help="For audits that have to sample.")] = 0,
    draws: Annotated[
        int | None, typer.Option(help="For audits that have to sample: 32000, others' code 2000.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say which objective a method, or other people's code, really minimises."""
    if flower is not None or function is not None or log is not None:
        from fedshuffle.auditing import commands

        unused = ["method", "momentum"]
        if log is not None:
            unused += ["sampling", "epochs", "batch_size", "step_sizes", "seed", "draws"]
        _unused(context, unused, "--flower, --callable" if log is None else "--log")
        black_box, federation = commands.audit_others(
            flower=flower,
            function=function,
            log=log,
            sizes=None if sizes is None else _numbers(sizes, "--sizes"),
            weights=None if weights is None else _numbers(weights, "--weights"),
            sampling=lambda federation: _own("fedavg", sampling, federation)[1],
            work=LocalWork(epochs=_epochs(epochs), batch_size=batch_size),
            step_sizes=step_sizes,
            confidence=confidence,
            seed=seed,
            draws=draws,
        )
        _show_audit(black_box, federation, as_json)
        return
    _unused(context, ["step_sizes", "confidence"], "--method")
    if sizes is None:
        raise FedShuffleError("give --sizes, such as --sizes 1,2,3, or --log and a file.")
    federation = Federation.from_sizes(
        _numbers(sizes, "--sizes"), None if weights is None else _numbers(weights, "--weights")
    )
    chosen, drawn = _own(method, sampling, federation)
    if momentum is not None:
        chosen = chosen.with_momentum(methods.parse_momentum(momentum))
    work = LocalWork(epochs=_epochs(epochs), batch_size=batch_size)
    result = run_audit(federation, chosen, drawn, work, seed=seed, draws=draws or 32_000)
    _show_audit(result, federation, as_json)


def _unused(context: typer.Context, names: list[str], under: str) -> None:
    """Refuse options that would change nothing, lest somebody thinks that they do."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            raise FedShuffleError(f"{option} changes nothing under {under}: leave it out.")


def _show_audit(result: Audit | BlackBoxAudit, federation: Federation, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result.to_dict()))
        return
    from fedshuffle.report.audit import print_audit

    print_audit(console, result, federation)


def _own(method: str, sampling: str, federation: Federation) -> tuple[Method, str | Sampling]:
    """The method and the sampling, also where these are import paths, from this folder."""
    if not (methods.is_import_path(method) or is_import_path(sampling)):
        return methods.get(method), sampling
    from fedshuffle.config import imports

    here = Path.cwd()
    with imports.importable(here):
        found: Method | str = method
        if methods.is_import_path(method):
            found = imports.find(method, here)
            expect(found, Method, repr(method))
        drawn: str | Sampling = sampling
        if is_import_path(sampling):
            drawn = imports.given(sampling, federation, here)
            expect(drawn, Sampling, f"what {sampling!r} returns")
        return methods.get(found), drawn


@app.command()
def run(
    config: Annotated[Path | None, typer.Argument(help="A TOML file that describes a run.")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the run in this folder instead.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the run, if not that of the config.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds of training in all.")] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="auto, lean, lanes or loop; lean:2 for two threads, lean:2:processes; ray:4."
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(help="HOST:PORT of the Ray cluster, for engine ray; else one is started."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="All that is random follows from it.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Another value for a key, such as work.batch_size=16."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train as a config file says, or go on with a run that was interrupted."""
    from fedshuffle import config as configs

    given = {"rounds": rounds, "engine": engine, "seed": seed}
    changes: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    changes |= dict(configs.setting(text) for text in settings or [])
    if config is not None and resume is None:
        chosen = configs.load(config, changes)
        folder = out or chosen.out
        if folder is None:
            raise FedShuffleError(f"{config}: out is missing: add it, or give --out.")
        with _interruptible(folder):
            result = chosen.run(folder, progress=not as_json, address=address)
    elif resume is not None and config is None:
        if out is not None or changes.keys() - {"rounds"}:
            raise FedShuffleError(
                "a run goes on as it began: --resume takes only --rounds and --address."
            )
        with _interruptible(resume):
            result = configs.resume(resume, progress=not as_json, address=address, **changes)
    else:
        raise FedShuffleError("give either a config file to run, or --resume and a run's folder.")
    from fedshuffle.report.run import print_run, summary

    if as_json:
        print(json.dumps(summary(result)))
    else:
        print_run(console, result, address)


@contextmanager
def _interruptible(folder: Path) -> Iterator[None]:
    """Let Ctrl-C end a run in peace; the run itself says how to go on once it has begun."""
    from fedshuffle.config import begun

    try:
        yield
    except KeyboardInterrupt:
        if not begun(folder):
            print("Interrupted before the first round: nothing was saved.", file=sys.stderr)
        raise typer.Exit(130) from None


@app.command()
def advise(
    config: Annotated[Path, typer.Argument(help="A TOML file that describes a run.")],
    clients: Annotated[int, typer.Option(help="Measure at most so many clients.")] = 50,
    points: Annotated[
        int, typer.Option(help="Measure at so many models: the start, and on the way.")
    ] = 2,
    target: Annotated[
        float, typer.Option(help="Predict rounds until this share of the start is left.")
    ] = 0.01,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Another value for a key, such as work.batch_size=16."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what the theory advises for a run: step sizes and sampling, each number with a source."""
    from fedshuffle import config as configs
    from fedshuffle.config.advising import advise as find_advice

    chosen = configs.load(config, dict(configs.setting(text) for text in settings or []))
    found = find_advice(chosen, clients=clients, points=points, target=target, progress=not as_json)
    if as_json:
        print(json.dumps(found.to_dict()))
        return
    from fedshuffle.report.advice import print_advice

    print_advice(console, found)


@app.command(name="methods")
def list_methods(as_json: AsJson = False) -> None:
    """List the methods: what each is and costs, its options, and when it is consistent."""
    from fedshuffle.report.methods import everything, print_methods

    if as_json:
        print(json.dumps(everything()))
    else:
        print_methods(console)


@app.command()
def conformance(
    method: Annotated[str, typer.Argument(help="A name, or module:METHOD for one of your own.")],
    as_json: AsJson = False,
) -> None:
    """Check that a method does what every method must; ends with 1 if anything fails."""
    from fedshuffle.conformance import check
    from fedshuffle.conformance.showing import find, print_report

    report = check(find(method))
    if as_json:
        print(json.dumps([outcome._asdict() for outcome in report]))
    else:
        print_report(console, report)
    if not report.passed:
        raise typer.Exit(1)


@app.command()
def reproduce(
    experiment: Annotated[
        str,
        typer.Argument(help="quadratic (the toy figures), theory, shakespeare or cifar100."),
    ],
    out: Out,
    rounds: Annotated[int, typer.Option(help="Rounds of training, for quadratic.")] = 1000,
    scale: Annotated[
        str, typer.Option(help="paper, laptop or smoke, for shakespeare and cifar100.")
    ] = "laptop",
    data: Annotated[
        Path | None,
        typer.Option(help="Folder of data sets; that of FEDSHUFFLE_DATA, or a cache, if none."),
    ] = None,
    jobs: Jobs = None,
) -> None:
    """Run an experiment of the paper; what was done before an interruption stays done."""
    known = ["quadratic", "theory", "shakespeare", "cifar100"]
    if experiment not in known:
        raise unknown("experiment", experiment, known)
    if experiment == "quadratic":
        from fedshuffle.experiments.quadratic import reproduce as reproduce_quadratic

        reproduce_quadratic(out, rounds)
        return
    if experiment == "theory":
        from fedshuffle.experiments.theory import reproduce as reproduce_theory

        reproduce_theory(out)
        return
    from fedshuffle.experiments import real

    words = ["fedshuffle", "reproduce", experiment, "--scale", scale, "--out", str(out)]
    words += ["--data", str(data)] if data else []
    _compare(real.load(experiment, scale, out, data), out, jobs, shlex.join(words))


@app.command()
def compare(
    config: Annotated[
        Path | None, typer.Argument(help="A TOML file of a run with a section [compare].")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the comparison in this folder instead.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the comparison, if not that of the config.")
    ] = None,
    jobs: Jobs = None,
    scale: Annotated[
        str | None, typer.Option(help="A section [scale.NAME] whose keys come first.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Another value for a key, such as compare.seeds=[0,1]."),
    ] = None,
) -> None:
    """Compare methods over seeds, each at its best step size; again, it goes on where it was."""
    from fedshuffle import comparison
    from fedshuffle.config import setting

    if resume is not None and config is None:
        if out is not None or scale is not None or settings:
            raise FedShuffleError("a comparison goes on as it began: --resume takes only --jobs.")
        if not (resume / "compare.toml").exists():
            raise FedShuffleError(f"{str(resume)!r} holds no comparison to go on with.")
        _compare(comparison.load(resume / "compare.toml"), resume, jobs, None)
    elif config is not None and resume is None:
        found = comparison.load(config, dict(setting(text) for text in settings or []), scale)
        folder = out or found.base.out
        if folder is None:
            raise FedShuffleError(f"{config}: out is missing: add it, or give --out.")
        words = ["fedshuffle", "compare", str(config)]
        words += ["--scale", scale] if scale else []
        words += [word for text in settings or [] for word in ("--set", text)]
        words += ["--out", str(out)] if out else []
        _compare(found, folder, jobs, shlex.join(words))
    else:
        raise FedShuffleError(
            "give either a file of a comparison, or --resume and a comparison's folder."
        )


def _compare(found: Comparison, out: Path, jobs: int | None, command: str | None) -> None:
    """Do a comparison, and say what came of it."""
    from fedshuffle.comparison.showing import print_results
    from fedshuffle.report.comparison import write

    try:
        results = found.run(out, jobs=jobs, progress=True, command=command)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    print_results(console, results, write(results, out), out)
    if not results["complete"]:
        raise typer.Exit(1)


@app.command()
def demo(
    out: Out = Path("fedshuffle-demo"),
    rounds: Annotated[int, typer.Option(help="Rounds of training.")] = 400,
    seed: Annotated[int, typer.Option(help="Seed of the split and of the training.")] = 0,
) -> None:
    """Audit and train three methods on real data, and write a one-page report."""
    from fedshuffle.experiments.demo import demo as run_demo
    from fedshuffle.report.demo import print_summary

    print_summary(console, run_demo(out, rounds=rounds, seed=seed))


data = typer.Typer(help="Populations on disk: import them, look at them.", no_args_is_help=True)
app.add_typer(data, name="data")


@data.command(name="import")
def import_data(
    source: Annotated[Path, typer.Argument(help="A file, or a folder of files.")],
    out: Annotated[Path, typer.Option(help="Folder for the store; made at the end.")],
    client: Annotated[
        str | None, typer.Option(help="For tables: the column that says whose row it is.")
    ] = None,
    fields: Annotated[
        str | None, typer.Option(help="Fields a,b in the order in which the loss takes them.")
    ] = None,
    inputs: Annotated[
        str | None,
        typer.Option("--input", help="Columns a,b that form one input; all other numbers if none."),
    ] = None,
    label: Annotated[str | None, typer.Option(help="The column of the label.")] = None,
    format: Annotated[
        str | None, typer.Option(help="parquet, csv, tsv, leaf or hdf5; by the suffix if none.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="What to store fields as: input=float64,label=int32.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the store that is there.")
    ] = False,
) -> None:
    """Import examples and their clients into a store that training maps instead of reading."""
    from fedshuffle.populations import import_file, open_store
    from fedshuffle.report.population import print_store

    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        import_file(
            source,
            out,
            client=client,
            fields=_names(fields),
            input=_names(inputs),
            label=label,
            dtype=_dtypes(dtype),
            format=format,
            overwrite=overwrite,
            progress=True,
        )
    for note in notes:
        console.print(f"[bold yellow]![/] {escape(str(note.message))}", highlight=False)
    print_store(console, open_store(out))


@data.command(name="get")
def get_data(
    name: Annotated[str, typer.Argument(help="shakespeare, cifar100 or femnist.")],
    data: Annotated[
        Path | None,
        typer.Option(help="Folder of data sets; that of FEDSHUFFLE_DATA, or a cache, if none."),
    ] = None,
) -> None:
    """Download a data set, or go on with it after an interruption; check it if it is there."""
    from fedshuffle import datasets

    folder = datasets.get(name, data, progress=True)
    for file, holds in datasets.SOURCES[name].files.items():
        what = "clients" if file.endswith(".h5") else "images"
        print(f"{folder / file}: {holds:,} {what}")


@data.command(name="show")
def show_data(
    folder: Annotated[Path, typer.Argument(help="The folder of a store.")], as_json: AsJson = False
) -> None:
    """Say what a store holds: clients, examples, fields, and how the sizes are spread."""
    from fedshuffle.populations import open_store
    from fedshuffle.report.population import describe, print_store

    store = open_store(folder)
    if as_json:
        print(json.dumps(describe(store)))
    else:
        print_store(console, store)


new = typer.Typer(help="Something to begin with, written into a folder.", no_args_is_help=True)
app.add_typer(new, name="new")


@new.command(name="flower-app")
def new_flower_app(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder; names the app.")],
) -> None:
    """Write a small Flower app: a model, data, a client and a server, ready to run."""
    from fedshuffle.flower.new_app import new_app

    made = new_app(folder)
    print(f"A Flower app is in {made}. Its README says what to change. To try it:\n")
    print(f"    fedshuffle flower up --clients 3 --app {shlex.quote(str(folder))}")


flower = typer.Typer(help="Flower: real clients, on this machine for now.", no_args_is_help=True)
app.add_typer(flower, name="flower")


@flower.command()
def up(
    clients: Annotated[int, typer.Option(help="How many SuperNodes to start.")] = 3,
    app_folder: Annotated[
        Path | None,
        typer.Option("--app", metavar="DIR", help="Run this app, and end with its exit status."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="With --app: another value for a key, such as num-rounds=5."),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--dir", help="For keys and logs; temporary, gone at a good end, if none."),
    ] = None,
    port: Annotated[int | None, typer.Option(help="Of the SuperLink; a free one if none.")] = None,
) -> None:
    """Bring up a SuperLink and SuperNodes on this machine only, with TLS and node keys."""
    from fedshuffle.config import setting
    from fedshuffle.flower import local
    from fedshuffle.flower.processes import ended_by_signals

    changes = dict(setting(text) for text in settings or [])
    if app_folder is None and settings:
        raise FedShuffleError("--set changes nothing without --app: leave it out.")
    if app_folder is not None and "clients" in local.app_config(app_folder, changes):
        changes = {"clients": clients, **changes}
    deployment = local.Deployment(clients, folder, port=port, progress=_say)
    try:
        with ended_by_signals(), deployment:
            _say(f"logs in {deployment.logs}")
            if app_folder is None:
                with suppress(KeyboardInterrupt):  # from the moment on that it is promised
                    command = deployment.command("DIR")
                    _show(f"\nTo run an app here:\n\n    {command}\n\nCtrl-C ends it.\n")
                    deployment.wait()
                _say("stopping")
                return
            run = deployment.run(app_folder, changes, show=_show)
            _say(f"the run is {run.status} {run.details}".rstrip())
            if not run.completed:
                raise typer.Exit(1)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _say(line: str) -> None:
    console.print(f"[dim]·[/] {escape(line)}", highlight=False, soft_wrap=True)


def _show(text: str) -> None:
    print(text, end="", flush=True)


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [word.strip() for word in text.split(",")]


def _dtypes(text: str | None) -> dict[str, str]:
    pairs = [word.partition("=") for word in _names(text) or []]
    for name, _, kind in pairs:
        if not (name and kind):
            raise FedShuffleError(
                f"--dtype: cannot read {text!r}. Write input=float64,label=int32."
            )
    return {name: kind for name, _, kind in pairs}


def _numbers(text: str, option: str) -> FloatArray | IntArray:
    """Numbers from ``1,2,3`` or from ``@file`` with one a line."""
    if text.startswith("@"):
        path = Path(text[1:])
        try:
            lines = path.read_text(encoding="utf-8-sig").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise FedShuffleError(f"{option}: cannot read {str(path)!r}: {error}.") from error
        words = [(f"line {k}", line.strip()) for k, line in enumerate(lines, 1) if line.strip()]
    else:
        words = [(f"entry {k}", word.strip()) for k, word in enumerate(text.split(","), 1)]
    numbers = []
    for where, word in words:
        try:
            numbers.append(float(word))
        except ValueError:
            raise FedShuffleError(
                f"{option}: {where} is {word!r}, which is not a number."
            ) from None
    return np.array(numbers)


def _epochs(text: str) -> int | list[int] | EpochRange:
    try:
        if ".." in text:
            low, high = text.split("..")
            return EpochRange(int(low), int(high))
        epochs = [int(word) for word in text.split(",")]
    except FedShuffleError:
        raise
    except ValueError:
        raise FedShuffleError(
            f"--epochs: cannot read {text!r}. Write 2 for all, 1,2,3 per client, or 2..5."
        ) from None
    return epochs[0] if len(epochs) == 1 else epochs


if __name__ == "__main__":
    main()
