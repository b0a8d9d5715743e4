"""The process that renders chat templates: programs that come with a model, so nobody knows whether they end.

`chat_template.py` starts it as `python -m paceline.model.chat_process` and exchanges lines of JSON with it: "ready"
first, then one request in and one reply out at a time. The rendering itself is transformers', so a prompt is what every
other engine makes of it. Memory and time are limited by the kernel; the process must never import torch.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

MAX_MEMORY = 2**30
"""What a template may allocate, in bytes, on top of what the process has after its imports."""
MAX_CHARACTERS = 2**24
"""No prompt is longer."""
LAST_SECONDS = 60
"""The kernel ends a rendering after this long, if the parent, which stops it much earlier, has died."""


def main() -> None:
    """Serve requests until the input ends."""
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # what transformers prints must not reach the replies
    from transformers.utils.chat_template_utils import render_jinja_template

    _limit_memory()
    _reply(replies, {"ready": True})
    for line in requests:
        signal.alarm(LAST_SECONDS)
        _reply(replies, _render(render_jinja_template, json.loads(line)))
        signal.alarm(0)


def _limit_memory() -> None:
    """Make allocations fail where the kernel offers it; elsewhere the time limit has to do."""
    with suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + MAX_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _render(render: Any, request: dict[str, Any]) -> dict[str, str]:
    from jinja2.exceptions import TemplateError

    try:
        (text,), _ = render(
            [request["messages"]],
            tools=request["tools"],
            chat_template=request["template"],
            add_generation_prompt=True,
            **request["variables"],
        )
    except MemoryError:
        return {"error": f"it allocates more than {MAX_MEMORY >> 20:,} MiB"}
    except RecursionError:
        return {"error": "it calls itself without end"}
    except Exception as error:  # a template may raise anything
        # raise_exception("...") in a template raises TemplateError itself: those are its author's own words.
        own_words = type(error) is TemplateError
        return {"error": str(error) if own_words else f"{type(error).__name__}: {error}"}
    if len(text) > MAX_CHARACTERS:
        return {"error": f"it makes a prompt of more than {MAX_CHARACTERS:,} characters"}
    return {"text": text}


def _reply(replies: BinaryIO, record: dict[str, Any]) -> None:
    replies.write(json.dumps(record).encode() + b"\n")
    replies.flush()


if __name__ == "__main__":
    main()
