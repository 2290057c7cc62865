"""The commands: their arguments and help. Bodies import what they need, so that help costs no more than Typer does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from capsule import __version__

app = typer.Typer(
    name="capsule",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Begin with `capsule init`. Exit codes: 0 done and intact, 1 checked and failed, 2 usage, 3 incomplete or "
    "malformed, 4 refused, 5 the machine, 130 and 143 signals.",
)

ProtocolFile = Annotated[Path, typer.Argument(metavar="PROTOCOL", help="The protocol's TOML file.")]
CapsuleFile = Annotated[Path, typer.Argument(metavar="FILE", help="A capsule file.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of words.")]


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"capsule {__version__}")
        raise typer.Exit


@app.callback()
def capsule(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Preregistered experiments and evidence capsules: freeze, run, pack, verify, replay."""


@app.command(
    epilog="Example: capsule init study && cd study && capsule freeze protocol.toml; for a training script of your "
    "own: capsule init study --command"
)
def init(
    directory: Annotated[Path, typer.Argument(metavar="[DIR]", help="A new or empty folder.")] = Path(),
    command: Annotated[
        bool, typer.Option("--command", help="Start from a plain training script instead of a Python function.")
    ] = False,
    json_: Json = False,
) -> None:
    """Start a workspace: a commented protocol and its trial."""
    from capsule.cli import words
    from capsule.steps.init import init as step

    words.emit(json_, *words.initialised(directory, step(directory, command=command)))


@app.command(epilog="Example: capsule freeze protocols/0001-speed.toml")
def freeze(protocol: ProtocolFile, json_: Json = False) -> None:
    """Promise a protocol: its immutable manifest.

    Hashes the sources and writes the manifest beside the protocol; prints its digest. The same inputs give the same
    bytes anywhere. Frozen already and equal is success; a change is refused and belongs into `capsule amend`.
    """
    from capsule.cli import words
    from capsule.cli.progress import bar
    from capsule.steps.freeze import freeze as step

    with bar("hashing sources") as progress:
        frozen = step(protocol, progress=progress)
    words.emit(json_, *words.frozen(frozen))


@app.command(epilog='Example: capsule amend protocols/0001-speed.toml --reason "the wall limit was too short"')
def amend(
    protocol: ProtocolFile,
    reason: Annotated[str, typer.Option("--reason", help="Why; it is published.")],
    json_: Json = False,
) -> None:
    """Freeze a changed protocol as an amendment.

    Ledger and spent budget stay; what had been seen by then is derived from the ledger and goes into the manifest.
    """
    from capsule.cli import words
    from capsule.cli.progress import bar
    from capsule.steps.amend import amend as step

    with bar("hashing sources") as progress:
        frozen = step(protocol, reason, progress=progress)
    words.emit(json_, *words.frozen(frozen))


@app.command(
    epilog="Example: capsule run protocols/0001-speed.toml --device gpu; two attempts side by side: "
    "capsule run protocols/0001-speed.toml --gpu GPU-5c01 --gpu GPU-9f3e; as Slurm jobs: "
    "capsule run protocols/0001-speed.toml --slurm --sbatch=--partition=long --sbatch=--mem=8G"
)
def run(
    protocol: ProtocolFile,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run and what it may cost.")] = False,
    pilot: Annotated[bool, typer.Option("--pilot", help="Run one process, recorded and charged apart.")] = False,
    device: Annotated[
        str | None, typer.Option("--device", help="cpu or gpu, where the protocol leaves it open.")
    ] = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(
            "--gpu", metavar="UUID", help="Use this GPU, by the beginning of its UUID; several times for several."
        ),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for another run of this protocol, and for devices that are held.")
    ] = False,
    from_frozen: Annotated[
        bool, typer.Option("--from-frozen", help="Run the frozen sources although the work tree has changed.")
    ] = False,
    slurm: Annotated[
        bool,
        typer.Option("--slurm", help="Run each attempt as a Slurm job, from a workspace that its nodes share."),
    ] = False,
    sbatch: Annotated[
        list[str] | None,
        typer.Option("--sbatch", metavar="OPTION", help="Give sbatch this long option too, e.g. --sbatch=--mem=8G."),
    ] = None,
    json_: Json = False,
) -> None:
    """Run attempts until all cells are done or the budget ends.

    Goes on where an earlier run stopped or was killed. With k times the devices that the protocol gives one attempt, k
    attempts go side by side on one budget. Interrupt once to stop all in order, twice to kill at once.
    """
    from capsule.cli import accounts, words
    from capsule.cli.progress import run_display
    from capsule.core.errors import UsageError
    from capsule.steps.run import Request
    from capsule.steps.run import run as step

    if sbatch and not slurm:
        raise UsageError("expected --slurm beside --sbatch, found --sbatch alone", hint="capsule run PROTOCOL --slurm")
    request = Request(
        protocol=protocol,
        dry_run=dry_run,
        pilot=pilot,
        device=device,
        gpus=tuple(gpu or ()),
        wait=wait,
        from_frozen=from_frozen,
        slurm=tuple(sbatch or ()) if slurm else None,
    )
    with run_display() as display:
        ran = step(request, display)
    words.emit(json_, *accounts.ran(ran))
    raise typer.Exit(accounts.run_exit_code(ran))


Watch = Annotated[
    bool, typer.Option("--watch", help="Show it again until nobody is at work; on a pipe, a line for each change.")
]


@app.command(epilog="Example: capsule status protocols/0001-speed.toml --watch")
def status(protocol: ProtocolFile, watch: Watch = False, json_: Json = False) -> None:
    """Say where a protocol stands and what it cost.

    Cells, what remains and may cost, budgets, every attempt with its end, and who holds the devices of this machine.
    """
    from capsule.cli import accounts, watching
    from capsule.host.lease import lease_directory
    from capsule.steps.slots import Machine
    from capsule.steps.status import Jobs
    from capsule.steps.status import status as step

    machine, jobs = Machine(lease_directory()), Jobs()
    watching.show(
        lambda: accounts.status(step(protocol, machine, jobs, note=watching.note)), json_, watch, accounts.status_news
    )


@app.command(epilog="Example: capsule ledger protocols/0001-speed.toml --events")
def ledger(
    protocol: ProtocolFile,
    events: Annotated[bool, typer.Option("--events", help="List every event instead.")] = False,
    watch: Watch = False,
    json_: Json = False,
) -> None:
    """Say what every attempt cost, with totals by outcome.

    With --json every event is listed.
    """
    from capsule.cli import accounts, watching
    from capsule.steps.status import Jobs
    from capsule.steps.status import ledger as step

    jobs = Jobs()
    watching.show(
        lambda: accounts.ledger(step(protocol, jobs, note=watching.note), events=events),
        json_,
        watch,
        accounts.ledger_news,
    )


@app.command(epilog="Example: capsule reconcile protocols/0001-speed.toml")
def reconcile(protocol: ProtocolFile, json_: Json = False) -> None:
    """Settle what a crash left open.

    Charges the upper bound; a second call changes nothing. `capsule run` does this by itself.
    """
    from capsule.cli import words
    from capsule.steps.reconcile import reconcile as step

    words.emit(json_, *words.reconciled(step(protocol)))


@app.command(epilog="Example: capsule pack protocols/0001-speed.toml --output speed.capsule")
def pack(
    protocol: ProtocolFile,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write; default: beside the protocol.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace another capsule that is there.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be packed.")] = False,
    json_: Json = False,
) -> None:
    """Put all evidence into one capsule."""
    from capsule.cli import words
    from capsule.cli.progress import bar
    from capsule.host.workspace import find_workspace
    from capsule.steps import pack as step

    if dry_run:
        items, _ = step.plan(find_workspace(protocol))
        with items:
            words.emit_planned(json_, items)
        return
    with bar("packing") as progress:
        packed = step.pack(protocol, output, force=force, progress=progress)
    words.emit(json_, *words.packed(packed))


@app.command(epilog="Example: capsule verify speed.capsule --against sha256:…")
def verify(
    file: Annotated[str, typer.Argument(metavar="FILE|-", help="A capsule file, or - for standard input.")],
    against: Annotated[
        list[str] | None, typer.Option("--against", metavar="DIGEST", help="An identity published elsewhere.")
    ] = None,
    require_signature: Annotated[
        Path | None,
        typer.Option(
            "--require-signature", metavar="SIGNERS", help="Allowed signers; unsigned by one of them is incomplete."
        ),
    ] = None,
    signature_of: Annotated[
        str, typer.Option("--signature-of", help="What they must have signed: any, capsule, manifest or both.")
    ] = "any",
    signature: Annotated[
        list[Path] | None,
        typer.Option("--signature", metavar="SIG", help="A signature of the capsule; default: FILE.sig beside it."),
    ] = None,
    tsa_ca: Annotated[
        Path | None, typer.Option("--tsa-ca", metavar="PEM", help="A timestamp authority; no token of it: incomplete.")
    ] = None,
    fail_on_outcome: Annotated[
        bool, typer.Option("--fail-on-outcome", help="Exit 1 unless every hypothesis is supported.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Every check by name, those that passed too.")
    ] = False,
    json_: Json = False,
) -> None:
    """Check a capsule, hostile or honest.

    Integrity and outcome are two answers. Never executes, never extracts. A manifest's signature vouches for the
    promise only: ask for the capsule's with --signature-of capsule.
    """
    import sys

    from capsule.cli import words
    from capsule.host.pipes import widen
    from capsule.steps.trust import trust
    from capsule.steps.verify import open_capsule
    from capsule.steps.verify import verify as step

    brought = trust(
        None if file == "-" else Path(file),
        signers=require_signature,
        signature_of=signature_of,
        signatures=signature or (),
        authority=tsa_ca,
    )
    with sys.stdin.buffer if file == "-" else open_capsule(Path(file)) as stream:
        widen(stream)
        verdict = step(stream, against=against or (), trust=brought)
    words.emit(json_, *words.verdict(verdict, verbose))
    raise typer.Exit(words.verdict_exit_code(verdict, fail_on_outcome))


@app.command(epilog="Example: capsule sign protocols/0001-speed.toml --key ~/.ssh/id_ed25519")
def sign(
    file: Annotated[Path, typer.Argument(metavar="PROTOCOL|FILE", help="A frozen protocol, or a capsule.")],
    key: Annotated[
        Path | None,
        typer.Option("--key", help="An SSH key, or the public key of one in the agent; default: your usual one."),
    ] = None,
    json_: Json = False,
) -> None:
    """Vouch for a frozen manifest or a capsule.

    Signs through ssh-keygen. A manifest's signature lies beside it and is packed; a capsule's is FILE.sig. Others may
    add theirs.
    """
    from capsule.cli import signed, words
    from capsule.steps.sign import sign as step

    words.emit(json_, *signed.signed(step(file, key)))


@app.command(epilog="Example: capsule timestamp protocols/0001-speed.toml --url https://freetsa.org/tsr")
def timestamp(
    protocol: ProtocolFile,
    url: Annotated[str | None, typer.Option("--url", help="Ask this authority (RFC 3161) over the network.")] = None,
    query: Annotated[
        Path | None, typer.Option("--query", metavar="OUT", help="Write the query, to be sent by other means.")
    ] = None,
    token: Annotated[
        Path | None, typer.Option("--token", metavar="REPLY", help="Take an authority's reply from a file.")
    ] = None,
    json_: Json = False,
) -> None:
    """Let an authority say when a manifest existed.

    The token lies beside the manifest and is packed. Stamp before the first attempt. Only --url uses the network, and
    sends nothing but the manifest's digest.
    """
    from capsule.cli import signed, words
    from capsule.steps.timestamp import timestamp as step

    words.emit(json_, *signed.stamped(step(protocol, url=url, query=query, token=token)))


@app.command(epilog="Example: capsule replay speed.capsule --execute --limit 4")
def replay(
    file: CapsuleFile,
    execute: Annotated[
        bool, typer.Option("--execute", help="Run the capsule's own code on this CPU to recompute observations.")
    ] = False,
    cells: Annotated[str, typer.Option("--cells", help="Recompute these cells, e.g. c000001,c000007.")] = "",
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", min=1, help="Recompute so many cells, drawn by the frozen seed; default: the frozen sample."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A new folder for the replay's own records.")
    ] = None,
    json_: Json = False,
) -> None:
    """Derive a capsule's tables and verdict again.

    With --execute, recompute chosen observations on this CPU and compare them by the frozen tolerance.
    """
    import sys

    from capsule.cli import words
    from capsule.cli.progress import bar
    from capsule.steps.replay import replay as step

    if execute:
        print(f"capsule: --execute runs the code inside {file}, after verification", file=sys.stderr)
    chosen = tuple(name for name in cells.split(",") if name)
    with bar("recomputing") as progress:
        replayed = step(file, execute=execute, cells=chosen, limit=limit, output=output, progress=progress)
    words.emit(json_, *words.replayed(replayed))
    raise typer.Exit(words.replay_exit_code(replayed))


@app.command(epilog="Example: capsule report speed.capsule --output report.html")
def report(
    file: CapsuleFile,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write here, .html with plots; default: Markdown to standard output."),
    ] = None,
    json_: Json = False,
) -> None:
    """Write a report with every cell, as Markdown or HTML.

    An HTML report is one file with plots; it holds no script and fetches nothing.
    """
    from capsule.cli import words
    from capsule.steps import report as step

    if output is None:
        words.emit(json_, *words.reported(step.report(file)))
    else:
        words.emit(json_, *words.report_written(output, step.write_report(file, output)))


@app.command(epilog="Example: capsule diff before.capsule after.capsule")
def diff(
    left: Annotated[Path, typer.Argument(metavar="A", help="A capsule file.")],
    right: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    limit: Annotated[int, typer.Option("--limit", min=0, help="List so many differences of each section.")] = 20,
    json_: Json = False,
) -> None:
    """Say what differs between two capsules.

    What was promised, what was tried, what was observed, what it shows; exit code 0 if they are equal, 1 if not.
    """
    from capsule.cli import exchange, words
    from capsule.steps.diff import diff as step

    compared = step(left, right, limit=limit)
    words.emit(json_, *exchange.compared(compared))
    raise typer.Exit(0 if compared.equal else 1)


@app.command(
    epilog="Example: capsule export speed.capsule --as ro-crate --output crate; a signed statement: "
    "capsule export speed.capsule --as in-toto --key key.pem --output speed.intoto.json"
)
def export(
    file: CapsuleFile,
    form: Annotated[str, typer.Option("--as", metavar="FORM", help="bagit, ro-crate, in-toto or mlflow.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR|FILE", help="A new folder; for in-toto a new file.")
    ],
    force: Annotated[
        bool, typer.Option("--force", help="Export a capsule that is not intact; what is written says so.")
    ] = False,
    key: Annotated[
        Path | None,
        typer.Option("--key", metavar="PEM", help="For in-toto: sign with this Ed25519 or P-256 key, by openssl."),
    ] = None,
    json_: Json = False,
) -> None:
    """Write a verified capsule in a form of others.

    BagIt and RO-Crate hold all members; in-toto is a statement of the verdict, in a DSSE envelope with --key; mlflow is
    a folder that MLflow reads. The same capsule gives the same bytes.
    """
    from capsule.cli import exchange, words
    from capsule.steps.export import export as step

    words.emit(json_, *exchange.exported(step(file, form, output, force=force, key=key)))


@app.command(epilog="Example: capsule show speed.capsule 7-results/results.json")
def show(
    file: CapsuleFile,
    member: Annotated[str | None, typer.Argument(help="A member's name; without it, all are listed.")] = None,
    json_: Json = False,
) -> None:
    """List a capsule's members, or print one."""
    from capsule.cli import words
    from capsule.steps import show as step

    if member is None:
        words.emit_members(json_, step.members(file))
    else:
        words.emit_bytes(json_, member, step.member(file, member))


@app.command(epilog="Example: capsule extract speed.capsule sources --sources")
def extract(
    file: CapsuleFile,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")],
    sources: Annotated[bool, typer.Option("--sources", help="Write the frozen source tree instead.")] = False,
    json_: Json = False,
) -> None:
    """Write a sound capsule's files below a fresh folder."""
    from capsule.cli import words
    from capsule.steps import extract as step

    result = step.extract_sources(file, directory) if sources else step.extract(file, directory)
    words.emit_extracted(json_, directory, result)


@app.command(epilog="Example: capsule schema protocol")
def schema(
    name: Annotated[str, typer.Argument(help="protocol, manifest, cell, source, event, results or verdict.")],
    json_: Json = False,
) -> None:
    """Print the JSON Schema of one of the formats."""
    from capsule.cli import words
    from capsule.steps.schema import schema as step

    words.emit(True, step(name), "")


@app.command(epilog="Example: capsule doctor --readmit GPU-5c01")
def doctor(
    readmit: Annotated[
        str | None,
        typer.Option("--readmit", metavar="UUID", help="Lift the quarantine of this device: it is sound again."),
    ] = None,
    json_: Json = False,
) -> None:
    """Say what this machine offers, and who holds its devices.

    A device that did not come back from an attempt as it was before is in quarantine until it is readmitted.
    """
    from capsule.cli import accounts, words
    from capsule.steps import doctor as step

    if readmit is not None:
        words.emit(json_, *accounts.readmitted(step.readmit(readmit)))
    else:
        words.emit(json_, *accounts.examined(step.doctor()))


@app.command(epilog="Example: capsule clean protocols/0001-speed.toml")
def clean(protocol: ProtocolFile, json_: Json = False) -> None:
    """Remove what can be made again; never evidence."""
    from capsule.cli import words
    from capsule.steps.clean import clean as step

    words.emit(json_, *words.cleaned(step(protocol)))


@app.command(epilog="Example: capsule completion bash >> ~/.bashrc")
def completion(shell: Annotated[str, typer.Argument(help="bash, zsh or fish.")], json_: Json = False) -> None:
    """Print the completion script for a shell."""
    from capsule.cli import words
    from capsule.cli.completion import script

    words.emit(json_, {"shell": shell, "script": script(shell)}, script(shell))
