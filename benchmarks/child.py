"""A child process that does one side of a comparison, told what to do line by line.

Both sides run in children of the same make, so that neither pays for the other. vLLM's C file module loses a reference to None in each call
(vLLM 0.32) and aborts Python 3.11 after some 50,000 of them: a child is replaced before it has made 20,000.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, TextIO

CALLS_PER_CHILD = 20_000


class Child:
    """Starts `script` with `arguments` on demand; `ask` sends a JSON object and returns the JSON object that comes back.

    `python` runs it, by default the one that runs this.
    """

    def __init__(self, script: Path, *arguments: str, python: str = sys.executable) -> None:
        self._command = [python, str(script), *arguments]
        self._process: subprocess.Popen[str] | None = None
        self._calls = 0

    def ask(self, question: dict[str, Any], calls: int = 1) -> dict[str, Any]:
        """Ask; `calls` is how many calls of the measured code that makes."""
        if self._calls + calls > CALLS_PER_CHILD:
            self.close()
        if self._process is None:
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self._calls = 0
        self._calls += calls
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{' '.join(self._command)} ended with {self._process.wait(10)}")
        found: dict[str, Any] = json.loads(answer)
        return found

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(30)
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._process = None


def serve(answer: Any, to: TextIO | None = None) -> None:
    """The child's side: call `answer` with each question until the questions end. Answers go to the standard output, or `to`."""
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=to, flush=True)
