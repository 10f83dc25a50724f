"""Fixtures that several folders share, and a count of what was skipped."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# No verdict depends on how busy the machine is, nor on luck: examples are the same in every run.
settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")

# A shell that starts the tests in the background has Ctrl-C ignored, and so would they.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The default model's file; fetched once into the user's cache."""
    from nanoserve.loading.pull import pull

    return pull("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random llama checkpoint in which one byte is one token. Shared: not to be changed."""
    from nanoserve.bench.toy import make_toy

    return make_toy(tmp_path_factory.mktemp("toy") / "llama")


def pytest_collection_finish() -> None:
    """Workers share the cores, so each computes on one thread. Tests that need no torch do not import it here."""
    if "torch" in sys.modules and "PYTEST_XDIST_WORKER" in os.environ:
        sys.modules["torch"].set_num_threads(1)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        reasons[report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)] += 1
    if reasons:
        terminalreporter.write_line(f"{reasons.total()} tests skipped:")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"  {count} x {reason}")
