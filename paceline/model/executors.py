"""The choice of executor for a decoder's device; no other code decides it."""

from __future__ import annotations

from typing import Any

from paceline.model.decoder import Decoder
from paceline.model.executor import Executor, Keeper
from paceline.model.host_executor import HostExecutor
from paceline.model.ops.host import HostOps


def make_executor(
    decoder: Decoder,
    cache: Any,
    max_rows: int,
    graphs: bool = True,
    keeper: Keeper | None = None,
    num_texts: int = 0,
) -> Executor:
    """The executor for the decoder's device; `keeper` is the drafter that reads hidden states, if any.

    `num_texts`: room for so many texts in which the device itself looks for drafts, if it can do that.
    """
    if isinstance(decoder.ops, HostOps):
        return HostExecutor(decoder, cache, keeper)
    from paceline.model.graphs import GraphExecutor  # needs Triton

    return GraphExecutor(decoder, cache, max_rows, graphs, keeper, num_texts)
