"""Schemas of strangers' documents: which values a key may have, in types and in ranges.

A subclass of `Schema` lists the keys a loader reads, each with `whole`, `number` or a `Field` whose description says
what is accepted; keys that nobody reads pass. `check` raises one line that names the document, the key, the value and
what the key accepts. It checks values one by one; how they fit together is up to the loader.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline.core.documents import brief


class Schema(BaseModel):
    """Base of the schemas: values are not converted, `true` is no integer, `"3"` no number."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", protected_namespaces=())


Checked = TypeVar("Checked", bound=Schema)


def whole(least: int, most: int, default: Any = ...) -> Any:
    """A field for integers in a range."""
    what = "a positive integer" if least == 1 else f"an integer from {least}"
    return Field(default, ge=least, le=most, description=f"{what} {'up ' if least == 1 else ''}to {most}")


def number(most: float, default: Any = None, least: float | None = None) -> Any:
    """A field for numbers above 0, or from `least`, up to a limit."""
    if least is None:
        return Field(default, gt=0, le=most, allow_inf_nan=False, description=f"a number above 0, up to {most:g}")
    limits = f"a number from {least:g} to {most:g}"
    return Field(default, ge=least, le=most, allow_inf_nan=False, description=limits)


def check(schema: type[Checked], content: Mapping[str, Any], document: str) -> Checked:
    """The values of a document, or a ValueError about the first that its schema does not accept."""
    try:
        return schema.model_validate(dict(content))
    except ValidationError as error:
        key = str(error.errors(include_url=False, include_input=False)[0]["loc"][0])
        accepted = schema.model_fields[key].description
        found = f"found {brief(content[key])}" if key in content else "it is missing"
        raise ValueError(f"{document} must give {key} as {accepted}; {found}") from None
