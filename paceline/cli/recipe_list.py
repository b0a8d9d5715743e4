"""The recipes below a command's `--help`, each with the first line of its file. `train` is shown with it."""

from __future__ import annotations

from typing import Any

import typer.core


class ListsRecipes(typer.core.TyperCommand):
    """A command whose help ends with the recipes, which are looked up only when it is asked for."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        from paceline.run.recipes import recipe_names, recipe_summary

        with formatter.section("Recipes"):
            formatter.write_dl([(name, recipe_summary(name)) for name in recipe_names()])
