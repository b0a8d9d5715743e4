"""`bench/kills.py` in small: runs that are killed end like those that are not, and it finds what does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parent.parent / "bench"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="runs are forked, and their orphans adopted")

CALLS = """
import json, sys
sys.path.insert(0, sys.argv[1])
import kills
print("codes:", [kills.main(argv) for argv in json.loads(sys.argv[2])])
"""


def call(*calls: list[str]) -> tuple[list[int], str]:
    """Run the script once or more in one process, which loads everything only once; its exit codes and its output."""
    done = subprocess.run(
        [sys.executable, "-c", CALLS, str(BENCH), json.dumps(calls)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    out, _, codes = done.stdout.rpartition("codes:")
    return json.loads(codes), out


@pytest.mark.slow
def test_a_handful_of_kills_and_a_fault(tmp_path: Path) -> None:
    """Of a run alone: some kills, three more after those, and some whose resumed run miscounts its draws."""
    out, more = tmp_path / "kills.json", tmp_path / "more.json"
    kill = {"kind": "single", "start": "forked", "attack": "SIGKILL", "steps": 1, "code": -9, "end_s": 0.1}
    lines = [{"case": case, "kills": [{**kill, "case": case, "problems": []}]} for case in range(3)]
    (tmp_path / "more.progress.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    common = ["--kinds", "single", "--cold", "0"]
    codes, said = call(
        [*common, "--kills", "4", "--out", str(out)],
        [*common, "--kills", "3", "--continue", "--out", str(more)],
        [*common, "--kills", "4", "--soft", "0", "--fault", "draws", "--out", str(out)],
    )
    assert codes == [0, 0, 1], said
    assert "the run's rollouts differ" in said and "the run's weights differ" in said
    found = json.loads(out.read_text())
    assert found["bench"] == "kills" and found["summary"]["with_faults"] == 0
    assert sum(row["faultless"] for row in found["rows"]) == found["summary"]["kills"] >= 4
    assert json.loads(more.read_text())["summary"]["kills"] == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kills.json", "more.json"]


@pytest.mark.slow
@pytest.mark.parametrize("fault, said", [("orphan", "left process"), ("file", "left /")])
def test_what_is_left_behind_is_found(tmp_path: Path, fault: str, said: str) -> None:
    common = ["--kinds", "single", "--kills", "1", "--cold", "0", "--out", str(tmp_path / "kills.json")]
    codes, out = call([*common, "--fault", fault])
    assert codes == [1] and said in out


@pytest.mark.slow
def test_sixty_kills_of_every_kind(tmp_path: Path) -> None:
    """Half of them ask the run to end; some meet a process that is still loading."""
    out = tmp_path / "kills.json"
    codes, said = call(["--kills", "60", "--cold", "5", "--soft", "0.5", "--seed", "7", "--out", str(out)])
    assert codes == [0], said
    rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
    assert {row["kind"] for row in rows} == {"single", "ahead", "spot", "fleet"}


@pytest.mark.slow
def test_two_processes_share_the_kills(tmp_path: Path) -> None:
    """Each has a seed of its own; one result is left, and a fault in any of them is the result of all."""
    out = tmp_path / "kills.json"
    common = ["--kinds", "single", "--cold", "0", "--jobs", "2", "--out", str(out)]
    codes, said = call([*common, "--kills", "5"], [*common, "--kills", "2", "--soft", "0", "--fault", "file"])
    assert codes == [0, 1], said
    found = json.loads(out.read_text())
    assert found["summary"]["seeds"] == [0, 1] and found["summary"]["with_faults"] == 0
    assert sum(row["faultless"] for row in found["rows"]) == found["summary"]["kills"] >= 6
    assert [path.name for path in tmp_path.iterdir()] == ["kills.json"]
