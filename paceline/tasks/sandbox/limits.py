"""What a sandbox takes away from the code in it, and what it says about itself. Knows nothing of the kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SandboxLimits:
    """What the code may do. Reading the disk and starting processes is always allowed."""

    is_enforced: bool = True
    """False: only what it starts ends with it; network and disk are free."""
    has_network: bool = False
    writable: tuple[str, ...] = ()
    """Folders it may write to, besides its own temporary one."""
    visible: tuple[str, ...] = ()
    """Files and folders it reads; its temporary folder is mounted where it hides none of them."""
    max_processes: int = 512
    """How many processes and threads may exist at once, where the kernel can count them."""


def limits_from(record: Mapping[str, Any]) -> SandboxLimits:
    """Limits that went through JSON, which knows no tuples."""
    fields: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in record.items()}
    return SandboxLimits(**fields)


@dataclass(frozen=True)
class Sandbox:
    """What the kernel enforces on this process and all that it starts: by what means, or "" for not at all."""

    limits: SandboxLimits
    network: str = ""
    disk: str = ""
    processes: str = ""
    num_processes: str = ""
    scratch: str | None = None
    """The private temporary folder, which disappears with the sandbox."""
    obstacle: str = ""
    """Why there are no namespaces."""

    @property
    def missing(self) -> list[str]:
        """What was asked for and is not enforced."""
        limits = self.limits
        gaps = {
            "rewards can reach the network": limits.is_enforced and not limits.has_network and not self.network,
            "rewards can write to the disk": limits.is_enforced and not self.disk,
            "processes that a reward starts may outlive it": not self.processes,
        }
        return [gap for gap, is_open in gaps.items() if is_open]

    def describe(self) -> str:
        """One line for people."""
        if not self.limits.is_enforced:
            return "off (task.grader_sandbox)"
        parts = {
            "no network": self.network,
            "disk read-only": self.disk,
            "what a reward starts ends with it": self.processes,
            "number of processes limited": self.num_processes,
        }
        held = "; ".join(f"{what} ({means})" for what, means in parts.items() if means) or "nothing is enforced"
        open_ends = f"; but {', '.join(self.missing)}" if self.missing else ""
        why = f" (no namespaces: {self.obstacle})" if self.obstacle else ""
        return f"{held}{open_ends}{why}"
