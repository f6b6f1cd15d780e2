"""The whole comparison in one run: `make bench BENCH_FOLDER=/mnt/disk`, or `python benchmarks/run.py --folder /mnt/disk --out build/bench`.

Every script of `plan.py` runs in a process of its own, one after the other, and is ended when its time is over, with whatever it started
and left. One that fails, or lacks something, holds nobody up. What they found lies below `--out`: each one's table, JSON, plots and what it
printed; `index.md` with the verdict of each target, the tables and the plots on one page; and `index.json`.

Exit code 1 says that a script failed or that none ran. A target that is missed is no failure: that is what the page is for.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from harness import filesystem_of, machine_facts
from plan import PROFILES, SCRIPTS, Script, lacks
from targets import TARGETS, Verdict, table, verdicts

GRACE_S = 20.0
"""From the request to end until a script is killed: time to remove what it made."""
SPARE = 1.2
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Outcome:
    """What became of a script: ok, failed, ended (out of time) or lacking, and in the last three cases why."""

    name: str
    what: str
    status: str
    why: str
    seconds: float

    @property
    def failed(self) -> bool:
        return self.status in ("failed", "ended")


def main(arguments: Sequence[str] | None = None, scripts: Sequence[Script] = SCRIPTS) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    parser.add_argument("--profile", choices=PROFILES, default="full", help="quick: some 10 minutes, to see that everything runs")
    parser.add_argument("--only", default="", help="names of scripts, with commas between")
    parser.add_argument("--lmcache", type=Path, help="LMCache's environment, for peers: `python3 tools/env.py lmcache` prints it")
    args = parser.parse_args(arguments)
    names = [name for name in args.only.split(",") if name]
    if unknown := set(names) - {script.name for script in scripts}:
        parser.error(f"there is no script {', '.join(sorted(unknown))}; there are {', '.join(script.name for script in scripts)}")
    chosen = [script for script in scripts if not names or script.name in names]
    out = args.out.resolve()
    missing = {script.name: lacks(script, args.lmcache) for script in chosen}
    if problem := shown_needs(chosen, missing, args.profile, args.folder):
        parser.error(problem)

    out.mkdir(parents=True, exist_ok=True)
    facts = machine_facts() | {"filesystem": filesystem_of(args.folder), "profile": args.profile}
    # Above one, others were at work as well.
    facts["load before"] = f"{os.getloadavg()[0]:.1f}"
    outcomes: list[Outcome] = []
    adopt_orphans()
    # So that what a script leaves when it is killed is below one folder, which goes.
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=args.folder, ignore_cleanup_errors=True) as scratch, ended_by_signals():
        try:
            for script in chosen:
                forget(script, out)
                if missing[script.name]:
                    outcomes.append(Outcome(script.name, script.what, "lacking", "it lacks " + ", ".join(missing[script.name]), 0.0))
                else:
                    command = script.command(sys.executable, args.profile, out, Path(scratch), args.lmcache)
                    outcomes.append(run_script(script, command, out / f"{script.name}.log"))
                say(f"{script.name}: {said(outcomes[-1])} ({outcomes[-1].seconds:.0f} s)")
        finally:
            # Also of a run that was interrupted.
            publish(out, chosen, outcomes, facts)
    return 1 if any(outcome.failed for outcome in outcomes) or not any(outcome.status == "ok" for outcome in outcomes) else 0


def shown_needs(chosen: Sequence[Script], missing: dict[str, list[str]], profile: str, folder: Path) -> str:
    """Say what will run and what it takes; the answer is what stands against it, or nothing."""
    running = [script for script in chosen if not missing[script.name]]
    disk_gb = max((script.disk_gb[profile] for script in running if script.disk_gb), default=0.0)
    memory_gb = max((script.memory_gb for script in running), default=0.0)
    say(f"{len(running)} of {len(chosen)} scripts; at most {disk_gb:.0f} GB below {folder} and {memory_gb:.0f} GB of memory at one time")
    for script in chosen:
        if missing[script.name]:
            say(f"{script.name} is left out: it lacks {', '.join(missing[script.name])}")
    free_gb = shutil.disk_usage(folder).free / 1e9
    if free_gb < SPARE * disk_gb:
        return f"{folder} has {free_gb:.0f} GB, it takes {SPARE * disk_gb:.0f}: another --folder, a quick --profile, or less with --only"
    return ""


def run_script(script: Script, command: Sequence[str], log: Path) -> Outcome:
    """Run it to its end, or end it when its time is over; and whatever it started."""
    say(f"{script.name}: {script.what}; at most {script.limit_s:.0f} s")
    began_s = time.monotonic()
    with open(log, "wb") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code: int | None = process.wait(script.limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
    seconds = time.monotonic() - began_s
    if code is None:
        return Outcome(script.name, script.what, "ended", f"it was not done after {script.limit_s:.0f} s, see {log.name}", seconds)
    if code:
        return Outcome(script.name, script.what, "failed", f"exit code {code}, see {log.name}: {last_line(log)}", seconds)
    return Outcome(script.name, script.what, "ok", "", seconds)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a script, if it still runs, and all that is left of what it started."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    # Each pass finds the children of those that the one before ended; what cannot be killed is not waited for.
    until_s = time.monotonic() + GRACE_S
    while (left := descendants(os.getpid())) and time.monotonic() < until_s:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.05)
    process.poll()


def adopt_orphans() -> None:
    """Become the parent of whatever a script leaves behind, also in sessions of its own, so that it can be found and ended."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """Processes below `pid`, zombies included."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                # The name stands in parentheses and may hold anything.
                parent = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry))
    found, waiting = [], [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end this as Ctrl-C does: with what was started ended and what was found published."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def forget(script: Script, out: Path) -> None:
    """Remove what an earlier run of it left: that must not pass for this one's."""
    for path in (*script.files(out).values(), out / f"{script.name}.log"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def publish(out: Path, chosen: Sequence[Script], outcomes: Sequence[Outcome], facts: dict[str, str]) -> None:
    """Write `index.md` and `index.json`."""
    good = [script for script in chosen if any(outcome.name == script.name and outcome.status == "ok" for outcome in outcomes)]
    wanted = {name for script in chosen for name in script.targets}
    rows = [row for name, row in zip(TARGETS, verdicts(found_files(good, out, "json")), strict=True) if name in wanted]
    (out / "index.md").write_text(page(out, good, outcomes, rows, facts))
    body = {"facts": facts, "targets": [asdict(row) for row in rows], "scripts": [asdict(outcome) for outcome in outcomes]}
    (out / "index.json").write_text(json.dumps(body, indent=1) + "\n")
    met, missed, unknown = (sum(row.met is value for row in rows) for value in (True, False, None))
    say(f"{out / 'index.md'}: {met} targets met, {missed} missed, {unknown} not run")


def page(out: Path, good: Sequence[Script], outcomes: Sequence[Outcome], rows: Sequence[Verdict], facts: dict[str, str]) -> str:
    """Everything that was found, in Markdown."""
    parts = ["# Benchmarks\n", ", ".join(f"{name} {value}" for name, value in facts.items()) + ".\n"]
    if rows:
        parts += ["## Targets\n", table(rows)]
    parts.append("## Scripts\n\n| script | what | became | seconds |\n|---|---|---|---|")
    parts += [f"| {o.name} | {o.what} | {cell(said(o))} | {o.seconds:.0f} |" for o in outcomes]
    parts.append("")
    for script in good:
        markdown = script.files(out).get("markdown")
        if markdown and markdown.is_file():
            parts.append(markdown.read_text())
        else:
            parts.append(f"## {script.name}\n\n```\n{(out / f'{script.name}.log').read_text(errors='replace')}```\n")
        parts += [f"![{file.stem}]({file.relative_to(out)})\n" for file in found_files([script], out, "svg")]
    return "\n".join(parts)


def found_files(scripts: Sequence[Script], out: Path, kind: str) -> list[Path]:
    """Those that are there of what the scripts were to write."""
    found: list[Path] = []
    for script in scripts:
        path = script.files(out).get(kind)
        if path is not None and path.is_dir():
            found += sorted(path.glob(f"*.{kind}"))
        elif path is not None and path.is_file():
            found.append(path)
    return found


def said(outcome: Outcome) -> str:
    return f"{outcome.status}: {outcome.why}" if outcome.why else outcome.status


def cell(text: str) -> str:
    """As one cell of a table."""
    return text.replace("|", "\\|").replace("\n", " ")


def last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else ""


def say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
