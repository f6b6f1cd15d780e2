"""What pytest is told while it runs the suite: which checks to run, what became of them, and how the run ends."""

from __future__ import annotations

import faulthandler
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from kvstore_sdk.backend import ConfigError, KVStoreError
from kvstore_sdk.backend.options import OptionInfo
from kvstore_sdk.backend.options import parse_options as parse_values
from kvstore_sdk_conformance import run as runs
from kvstore_sdk_conformance.check import requirement_of
from kvstore_sdk_conformance.finding import findings_of
from kvstore_sdk_conformance.offer import Offer
from kvstore_sdk_conformance.outcome import Result, Status, judge
from kvstore_sdk_conformance.plain import plain
from kvstore_sdk_conformance.redact import Redactor
from kvstore_sdk_conformance.report import Report, check_path, write
from kvstore_sdk_conformance.report.terminal import block, header, rerun, summary
from kvstore_sdk_conformance.requirement import Requirement
from kvstore_sdk_conformance.requirements import REQUIREMENTS
from kvstore_sdk_conformance.target import Target

__all__ = ["COMMAND_INI", "RUN", "Session"]

RUN = pytest.StashKey[runs.Run]()
"""Where checks find the run: `config.stash[RUN]`."""

_REASON = pytest.StashKey[tuple[Status, str, tuple[str, ...]]]()
COMMAND_INI = Path(__file__).with_name("command.ini")
"""The configuration of pytest under the command `kvstore conformance`."""

CHECK_S = 600.0
"""Longest that one check may take. All of them together took 400 s on a correct store that needs 200 ms for a call."""

_CHECKS = Path(__file__).parent / "checks"
_FINDINGS = "kvstore_findings"
_WORDS = {
    Status.PASS: ("passed", ".", "PASSED"),
    Status.FAIL: ("failed", "F", "FAILED"),
    Status.ADVISORY: ("advisory", "a", "ADVISORY"),
    Status.NOT_APPLICABLE: ("not applicable", "n", "NOT APPLICABLE"),
    Status.DEVIATION: ("deviation", "d", "DEVIATION"),
    Status.BLOCKED: ("blocked", "b", "BLOCKED"),
    Status.ERROR: ("error", "E", "ERROR"),
}
_PRINTED = 20_000
"""Characters of what a backend printed in one check."""
_ORDER = {requirement.id: number for number, requirement in enumerate(REQUIREMENTS)}


class Session:
    """A plugin for the time of one run. With xdist every worker has one, and so has the process that collects what they say."""

    def __init__(self, config: pytest.Config, run: runs.Run) -> None:
        self._config = config
        self._run = run
        self._redact = Redactor(run.target)
        self._found: list[Result] = []
        self._results: dict[str, Result] = {}
        self._stale: list[str] = []
        self._report: Report | None = None
        self._notes: list[str] = []
        self._shown: set[str] = set()
        self._report_paths = [Path(path).absolute() for path in config.getoption("kvstore_report")]
        self._began_s = time.monotonic()
        self._is_worker = hasattr(config, "workerinput")

    @classmethod
    def begin(cls, config: pytest.Config) -> Session:
        """Read the options, and open the backend once, to see what it offers.

        Raises:
            pytest.UsageError: an option is wrong, or the backend cannot be opened; one line says what and where.
        """
        option = config.getoption
        # pytest itself does not look for modules where it was started.
        for path in runs.import_path():
            if path not in sys.path:
                sys.path.insert(0, path)
        seed = getattr(config, "workerinput", {}).get("kvstore_seed", option("kvstore_seed"))
        redact: Callable[[str], str] = str
        try:
            for path in option("kvstore_report"):
                check_path(Path(path))
            target = Target(
                option("kvstore_backend"), runs.parse_options(option("kvstore_option")), option("kvstore_location"), runs.import_path()
            )
            # A vendor's error of opening may say what the backend was given.
            redact = Redactor(target)
            wanted = functools.partial(
                runs.Run,
                target=target,
                profiles=runs.parse_profiles(option("kvstore_profile")),
                seed=runs.parse_seed(str(seed)),
                deviations=runs.read_deviations(option("kvstore_deviations")),
                strict=option("kvstore_strict"),
                largest_bytes=_bytes(option("kvstore_largest")),
                examples=runs.parse_examples(option("kvstore_examples")),
            )
            # Last: a backend is opened for a run that can take place.
            run = wanted(offer=Offer.of(target))
        except KVStoreError as error:
            message = plain(" ".join(redact(str(error)).split())).removeprefix("conformance: ")
            raise pytest.UsageError(f"kvstore-sdk conformance: {message}") from None
        except SystemExit as error:
            # A script without `if __name__ == "__main__"`: its exit code would be taken for the verdict.
            problem = f"the backend's module ended Python with exit code {error.code!r} while it was imported or opened"
            raise pytest.UsageError(f"kvstore-sdk conformance: {problem}") from None
        if not (hasattr(config, "workerinput") or option("collectonly")):
            # A run that does not come to its end must not leave the verdict of another one behind.
            for path in option("kvstore_report"):
                Path(path).unlink(missing_ok=True)
        config.stash[RUN] = run
        return cls(config, run)

    # Which checks.

    def pytest_collect_file(self, file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        """Collect the checks also where `python_files` says that test files have other names."""
        if not (file_path.parent == _CHECKS and file_path.match("test_*.py")):
            return None
        if any(file_path.match(pattern) for pattern in self._config.getini("python_files")):
            return None
        return _Checks.from_parent(parent, path=file_path)

    def pytest_pycollect_makemodule(self, module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
        return _Checks.from_parent(parent, path=module_path) if module_path.parent == _CHECKS else None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out other profiles, and put what others build on first."""
        chosen: list[pytest.Item] = []
        left_out: list[pytest.Item] = []
        for item in items:
            requirement = _requirement(item)
            wanted = requirement is None or requirement.profile in self._run.profiles
            (chosen if wanted else left_out).append(item)
        if left_out:
            config.hook.pytest_deselected(items=left_out)
        # Whoever shuffles tests does so on purpose: then failures are put in order afterwards.
        if not any(config.pluginmanager.hasplugin(name) for name in ("randomly", "random_order")):
            chosen.sort(key=lambda item: _ORDER[found.id] if (found := _requirement(item)) else -1)
        items[:] = chosen

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """For xdist: all workers use one seed."""
        node.workerinput["kvstore_seed"] = self._run.seed

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Bound a check as a whole: calls are, but an object of the backend may hang where it is only looked at."""
        if _requirement(item) is None:
            return (yield)
        timer = threading.Timer(CHECK_S, self._give_up, [item.nodeid])
        timer.daemon = True
        timer.start()
        try:
            return (yield)
        finally:
            timer.cancel()

    def _give_up(self, check: str) -> None:
        """End the process, with what is known by now: whoever hangs cannot be interrupted."""
        capture: Any = self._config.pluginmanager.get_plugin("capturemanager")
        if capture is not None:
            capture.suspend_global_capture(in_=True)
        self._notes.append(f"{check} did not end within {CHECK_S:g} s, in a place where no call is watched; the run was given up.")
        if not self._is_worker:
            self._conclude()
            for line in self._lines():
                sys.stderr.write(f"{line}\n")
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        sys.stderr.flush()
        os._exit(int(pytest.ExitCode.TESTS_FAILED))

    # What became of them.

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Leave out what cannot be judged."""
        requirement = _requirement(item)
        if requirement is None:
            return
        if need := self._run.offer.missing(requirement):
            item.stash[_REASON] = (Status.NOT_APPLICABLE, f"not applicable: {need.value}", ())
        elif blocker := self._run.blocked_by(requirement):
            item.stash[_REASON] = (Status.BLOCKED, f"blocked by {blocker}", (blocker,))
        if _REASON in item.stash:
            pytest.skip(item.stash[_REASON][1])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        requirement = _requirement(item)
        # What the backend printed and logged.
        report.sections = [(title, plain(self._redact(text), _PRINTED)) for title, text in report.sections]
        if requirement is None or (call.when != "call" and report.passed):
            return report
        found = self._findings(item, call, requirement)
        for result in found:
            # One whose own check held is not as broken as that: what builds on it can still be judged.
            if result.status in (Status.FAIL, Status.DEVIATION) and result.requirement.id not in self._run.held:
                self._run.broken.add(result.requirement.id)
            elif result.status is Status.PASS:
                self._run.held.add(result.requirement.id)
        own = found[0]
        if any(result.requirement.id == "KV-LIVE-03" and result.status is Status.FAIL for result in found):
            self._run.hangs += 1
        self._show(report, item, own)
        # Crosses to another process with the report, as text.
        setattr(report, _FINDINGS, json.dumps([result.to_json() for result in found]))
        # What JUnit's file shows.
        item.user_properties += [
            ("kvstore_id", requirement.id),
            ("kvstore_level", requirement.level.value),
            ("kvstore_profile", requirement.profile.value),
            ("kvstore_status", own.status.value),
            *((f"kvstore_{name}", text) for name in ("expected", "seen", "reason") if (text := getattr(own, name))),
        ]
        return report

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        found = _own_findings(report)
        return _WORDS[found[0].status] if found else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = _own_findings(report)
        self._found += found
        # The others are found on the way by a check that is blocked, of which pytest shows nothing.
        if found and found[0].status is Status.FAIL:
            self._shown.add(found[0].requirement.id)

    # How it ends.

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Judge, write reports, and fail a run that pytest alone would let pass."""
        if self._is_worker or session.exitstatus in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERNAL_ERROR):
            return
        empty = session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED
        # Checks that are only listed, or tests of the vendor's own.
        if self._config.getoption("collectonly") or not (self._found or empty):
            return
        good = self._conclude()
        self._move_blocked()
        if session.exitstatus == pytest.ExitCode.OK and not good:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _conclude(self) -> bool:
        """Judge what was found, and write reports. Whether the run is a pass."""
        self._results = judge(self._found)
        statuses = {result.status for result in self._results.values()}
        self._stale = [id_ for id_ in self._run.deviations if self._results[id_].status in (Status.PASS, Status.NOT_APPLICABLE)]
        self._report = Report.of(self._run, self._results, self._stale, self._redact, time.monotonic() - self._began_s)
        nothing = statuses <= {Status.NOT_APPLICABLE, Status.NOT_RUN}
        if nothing:
            self._notes.append("Nothing was checked, so the run is no pass.")
        unwritten = self._write_reports()
        return not (nothing or unwritten or self._stale or statuses & {Status.FAIL, Status.ERROR})

    def _move_blocked(self) -> None:
        """Show no failure that follows from another one, which was found later."""
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is None:
            return
        for category in ("failed", "error"):
            reports = reporter.stats.get(category, [])
            blocked = [report for report in reports if any(self._is_blocked(result) for result in _own_findings(report)[:1])]
            if blocked:
                reporter.stats[category] = [report for report in reports if report not in blocked]
                reporter.stats.setdefault("blocked", []).extend(blocked)

    def _is_blocked(self, result: Result) -> bool:
        return self._results[result.requirement.id].status is Status.BLOCKED

    def _write_reports(self) -> bool:
        """Whether one could not be written."""
        assert self._report is not None
        failed = False
        for path in self._report_paths:
            try:
                note = write(self._report, path)
            except OSError as error:
                failed, note = True, f"{path} could not be written: {error.strerror or error}"
            self._notes += [note] if note else []
        return failed

    def pytest_report_header(self) -> list[str]:
        return header(self._run, self._redact)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._report is None:
            return
        for result in self._results.values():
            if result.status is Status.FAIL and result.requirement.id not in self._shown:
                terminalreporter.write_sep("_", "found while another requirement was checked")
                terminalreporter.write_line(self._block(result))
            elif result.status is Status.ADVISORY:
                terminalreporter.write_sep("_", "advisory")
                terminalreporter.write_line(self._block(result))
        terminalreporter.write_sep("=", "kvstore-sdk conformance")
        for line in self._lines():
            terminalreporter.write_line(line)

    def _lines(self) -> list[str]:
        assert self._report is not None
        return [*summary(self._report), *self._notes]

    def _findings(self, item: pytest.Item, call: pytest.CallInfo[None], requirement: Requirement) -> list[Result]:
        seconds = call.duration
        if _REASON in item.stash:
            status, reason, blockers = item.stash[_REASON]
            return [Result(requirement, status, reason=reason, blockers=blockers, check=item.nodeid, seconds=seconds)]
        store = getattr(item, "funcargs", {}).get("store")
        found = findings_of(requirement, call.excinfo.value if call.excinfo else None, self._redact, self._applies)
        script = store.calls.script() if store is not None else None
        for result in found:
            result.check = item.nodeid
            if result.status is Status.FAIL and script is not None:
                result.replay, result.replays = [plain(self._redact(line)) for line in script.lines], script.is_whole
            if result.status is Status.FAIL:
                if result.requirement.id in self._run.deviations:
                    result.status, result.reason = Status.DEVIATION, self._redact(self._run.deviations[result.requirement.id])
                elif not self._run.is_failure(result.requirement):
                    result.status = Status.ADVISORY
        found[0].seconds = seconds
        found[0].figures = dict(getattr(store, "figures", {}))
        return found

    def _applies(self, requirement: Requirement) -> bool:
        return self._run.offer.missing(requirement) is None

    def _block(self, result: Result) -> str:
        by_command = self._config.inipath is not None and self._config.inipath.samefile(COMMAND_INI)
        return block(result, self._run, self._redact, rerun(self._run, self._redact, result, by_command=by_command))

    def _show(self, report: pytest.TestReport, item: pytest.Item, own: Result) -> None:
        path, line, _ = item.location
        if own.status in (Status.FAIL, Status.ERROR):
            report.outcome = "failed"
            report.longrepr = self._block(own)
        elif own.status is Status.PASS:
            report.outcome = "passed"
        else:
            report.outcome = "skipped"
            text = own.reason or own.seen
            if own.status in (Status.ADVISORY, Status.DEVIATION):
                report.wasxfail = f"{own.requirement.id}: {text}"
            report.longrepr = (path, line or 0, f"Skipped: {text}")


class _Checks(pytest.Module):
    """A module of checks. Which functions of it are checks does not depend on anybody's configuration of pytest."""

    def funcnamefilter(self, name: str) -> bool:
        return name.startswith("test_")

    def classnamefilter(self, name: str) -> bool:
        return False


def _requirement(item: pytest.Item) -> Requirement | None:
    return requirement_of(getattr(item, "function", None))


def _own_findings(report: pytest.TestReport) -> list[Result]:
    return [Result.from_json(found) for found in json.loads(getattr(report, _FINDINGS, "[]"))]


def _bytes(text: str) -> int:
    schema = {"largest_bytes": OptionInfo("largest_bytes", int, 1, runs.LARGEST, "")}
    try:
        return int(parse_values("conformance", schema, {"largest_bytes": text})["largest_bytes"])
    except ConfigError as error:
        raise ConfigError("conformance", "largest", error.problem) from None
