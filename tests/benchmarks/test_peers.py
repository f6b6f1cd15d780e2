"""What is read out of LMCache's own benchmark: wrong units, or chunks that failed, would make a peer look as one likes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture
def peers(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("peers")


def result(**store: Any) -> dict[str, Any]:
    """As `lmcache bench l2 --format json` of LMCache 0.5.6 writes it, as far as it is read."""
    good = {"total_keys": 96, "total_success": 96, "rounds_timed_out": 0, "throughput_avg_mbps": 1000.0}
    operations = {
        "op_0": {"operation": "Store", **good, **store},
        "op_1": {"operation": "Lookup", **good, "total_success": 0, "throughput_avg_mbps": 0.0},
        "op_2": {"operation": "Load", **good, "throughput_avg_mbps": 500.0},
    }
    return {"title": "L2 Adapter Benchmark Result", "metrics": {"config": {"num_keys": 32}, **operations}}


def test_its_mebibytes_become_megabytes(peers: ModuleType) -> None:
    assert peers.l2_rates(result()) == {"put": pytest.approx(1048.576), "get": pytest.approx(524.288)}


@pytest.mark.parametrize("bad", [{"total_success": 95}, {"rounds_timed_out": 1}, {"operation": "Other"}])
def test_a_run_in_which_chunks_failed_has_no_rate(peers: ModuleType, bad: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match="Store failed"):
        peers.l2_rates(result(**bad))


def test_without_its_environment_it_says_what_builds_it(
    peers: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["peers.py", "--lmcache", str(tmp_path), "--folder", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        peers.main()
    assert ended.value.code == 2
    assert "tools/env.py lmcache" in capsys.readouterr().err
