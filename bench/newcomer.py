"""Times a newcomer's way from a clean clone to the first training step with their own reward function.

    python bench/newcomer.py            clone, install, own reward
    python bench/newcomer.py --demo     and then `make demo`, with kernels compiled once more

It follows docs/quickstart.md: files and commands come from its section on rewards. Everything happens in an empty
folder with empty caches, so that packages are unpacked and kernels compiled anew; only committed files are cloned. How
fast packages arrive depends on their source, which the result names. The demo, first on the page, runs last here: it
would leave compiled kernels for what is timed after it.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from record import package_versions, result_path, write_result

ROOT = Path(__file__).resolve().parent.parent
SECTION = re.compile(r"^## \d+\. Your own reward$(.*?)^## ", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FIRST_STEP = re.compile(r"^step +1/\d+ +reward")
KEPT_LINES = 40
"""How many lines at the end of a training's output go into the result: pages quote them."""

Row = dict[str, Any]


class Newcomer:
    """A folder, an environment with empty caches, and a clock."""

    def __init__(self, home: Path) -> None:
        self.home, self.clone = home, home / "paceline"
        self.rows: list[Row] = []
        cleared = {"PYTHONPATH", "VIRTUAL_ENV", "NUMBA_CACHE_DIR", "OMP_NUM_THREADS"}
        self._environment = {name: value for name, value in os.environ.items() if name not in cleared}
        self._environment |= {
            "UV_NO_CACHE": "1",
            "PIP_NO_CACHE_DIR": "1",
            "XDG_CACHE_HOME": str(home / "cache"),
            "PATH": f"{self.clone / '.venv' / 'bin'}:{os.environ['PATH']}",
        }

    def run(self, part: str, command: Sequence[str], folder: Path) -> None:
        """Run a command and record how long it took, for training also until the first step."""
        print(f"{part}: {shlex.join(command)}", flush=True)
        begun = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=folder, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        lines: list[str] = []
        for line in process.stdout:
            if FIRST_STEP.match(line) and not any(map(FIRST_STEP.match, lines)):
                self._write(f"{part}, first step", time.perf_counter() - begun)
            lines.append(line.rstrip("\n"))
        code = process.wait()
        is_training = any(map(FIRST_STEP.match, lines))
        self._write(part, time.perf_counter() - begun, **({"output": lines[-KEPT_LINES:]} if is_training else {}))
        if code:
            sys.exit("\n".join([*lines[-KEPT_LINES:], f"{part} failed with exit code {code}"]))

    def _write(self, part: str, seconds: float, **extra: Any) -> None:
        print(f"{part}: {seconds:.1f} s", flush=True)
        self.rows.append({"part": part, "seconds": round(seconds, 2), **extra})

    def go(self, has_demo: bool) -> None:
        """Run everything."""
        self.run("clone", ["git", "clone", "--quiet", str(ROOT), str(self.clone)], self.home)
        self.run("install", ["make", ".venv/.installed"], self.clone)
        own = self.home / "own"
        own.mkdir()
        for command in write_files((self.clone / "docs" / "quickstart.md").read_text(encoding="utf-8"), own):
            self.run("own reward" if command[0] == "paceline" else "data", command, own)
        if has_demo:
            self._environment["XDG_CACHE_HOME"] = str(self.home / "cache of the demo")
            self.run("demo", ["make", "demo"], self.clone)


def write_files(page: str, folder: Path) -> Iterator[list[str]]:
    """Save the files that the section on rewards shows; yields its commands one by one."""
    found = SECTION.search(page)
    assert found is not None, "docs/quickstart.md has no section on rewards"
    for language, text in BLOCK.findall(found[1]):
        if language == "python":
            (folder / text.splitlines()[0].removeprefix("# ")).write_text(text)
        else:
            yield from (shlex.split(line, comments=True) for line in text.splitlines())


def seconds_by_part(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {row["part"]: row["seconds"] for row in rows}


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", action="store_true", help="also run `make demo`, which takes five to ten minutes")
    parser.add_argument("--packages", default="unknown", help="where packages came from, in words")
    parser.add_argument("--out", type=Path, help="JSON file (default: bench/results/newcomer-<hardware>.json)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="newcomer-") as home:
        newcomer = Newcomer(Path(home))
        load_before = os.getloadavg()[0]
        newcomer.go(args.demo)
    found = seconds_by_part(newcomer.rows)
    way = found["clone"] + found["install"] + found["data"] + found["own reward, first step"]
    print(f"clean clone to the first step with an own reward: {way:.1f} s")
    write_result(
        args.out or result_path("newcomer"),
        "newcomer",
        newcomer.rows,
        argv=[sys.argv[0], *argv],
        versions=package_versions(("paceline", "torch", "transformers", "numba")),
        packages=args.packages,
        load_before=load_before,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
