"""The root of all settings: one field per section, each owned by the folder it configures. Read by the command line."""

from __future__ import annotations

from paceline.budget.settings import BudgetSettings
from paceline.config import Settings
from paceline.engine.settings import EngineSettings, SamplingSettings
from paceline.model.settings import ModelSettings


class RootSettings(Settings):
    model: ModelSettings = ModelSettings()
    sampling: SamplingSettings = SamplingSettings()
    engine: EngineSettings = EngineSettings()
    budget: BudgetSettings = BudgetSettings()
