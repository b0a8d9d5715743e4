"""Settings: files, dotted overrides, and errors that name the key and the nearest valid one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.config import SettingsError, dump, fields_of, load, nearest, validate
from paceline.core.types import MAX_TEMPERATURE, MIN_TEMPERATURE, Sampling
from paceline.rollout.settings import SamplingSettings
from paceline.run.settings import RootSettings


def write(folder: Path, text: str) -> Path:
    file = folder / "settings.yaml"
    file.write_text(text)
    return file


def test_defaults_need_no_file() -> None:
    assert load(RootSettings) == RootSettings()


def test_override_wins_over_file_and_file_over_default(tmp_path: Path) -> None:
    file = write(tmp_path, "engine:\n  drafter: ngram\n  max_rows: 32\nsampling:\n  temperature: 0.5\n")
    settings = load(RootSettings, file, {"engine.drafter": "none", "sampling.n": "3"})
    assert (settings.engine.drafter, settings.engine.max_rows) == ("none", 32)
    assert (settings.sampling.temperature, settings.sampling.n) == (0.5, 3)
    assert settings.engine.prefill_chunk == RootSettings().engine.prefill_chunk


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("engine.exact", "false", False),
        ("engine.exact", "off", False),
        ("engine.kv_tokens", "null", None),
        ("engine.kv_tokens", "4096", 4096),
        ("sampling.temperature", "1e-3", 0.001),
        ("sampling.seed", "-1", -1),
        ("sampling.stop", "END", ("END",)),
        ("sampling.stop", '["a", "b\\n"]', ("a", "b\n")),
        ("sampling.stop_token_ids", "[1, 2]", (1, 2)),
        ("model.path", "007", "007"),
        ("model.path", "C: on", "C: on"),
        ("engine.drafter", "none", "none"),
    ],
)
def test_override_texts_become_values(key: str, text: str, value: Any) -> None:
    section, name = key.split(".")
    assert getattr(getattr(load(RootSettings, None, {key: text}), section), name) == value


@pytest.mark.parametrize(
    ("key", "guess"),
    [
        ("engine.drafte", "engine.drafter"),
        ("engine.max-rows", "engine.max_rows"),
        ("modle.path", "model.path"),
        ("sampling.temprature", "sampling.temperature"),
        ("sampling.drafter", "engine.drafter"),
        ("drafter", "engine.drafter"),
        ("sampel.seed", "sampling.seed"),
    ],
)
def test_unknown_key_names_the_nearest(key: str, guess: str) -> None:
    with pytest.raises(SettingsError, match=rf"unknown setting {key}: did you mean {guess}\?"):
        load(RootSettings, None, {key: "1"})


def test_unknown_key_far_from_everything_lists_the_sections() -> None:
    with pytest.raises(
        SettingsError, match=r"unknown setting zzz\.qqq: there are model, task, sampling, engine, budget"
    ):
        load(RootSettings, None, {"zzz.qqq": "1"})


def test_unknown_key_in_a_section_lists_what_the_section_has() -> None:
    with pytest.raises(SettingsError, match=r"unknown setting rl\.learning_rate: there are rl\.steps, rl\.lr"):
        load(RootSettings, None, {"rl.learning_rate": "1"})


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("engine.max_rows", "many", "engine.max_rows: .*integer.*'many'"),
        ("engine.max_rows", "0", "engine.max_rows: .*greater than or equal to 1, got 0"),
        ("engine.precision", "fp8", "engine.precision: .*'float32'.*'fp8'"),
        ("engine.exact", "maybe", "engine.exact: .*boolean.*'maybe'"),
        ("sampling.temperature", "-1", "sampling.temperature: .*0, got -1"),
        ("sampling.temperature", ".nan", "sampling.temperature: .*finite"),
        ("sampling.temperature", "5e-324", r"sampling.temperature: .*0 \(greedy\) or at least 0\.0001, got .5e-324"),
        ("sampling.stop", '[""]', r"sampling\.stop\.0: .*at least 1 character"),
        ("sampling.stop", "[a", "sampling.stop: .*not a YAML value"),
        ("engine.drafter.name", "x", "engine.drafter: .*string"),
        ("task.dials", "{digits: [1]}", r"^task\.dials\.digits: should be a number, text, true or false, got \[1\]$"),
        ("task.dials", "digits:2", r"task\.dials: needs names with values: {NAME: VALUE}, .* got 'digits:2'"),
    ],
)
def test_wrong_value_names_its_key(key: str, text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load(RootSettings, None, {key: text})


def test_a_missing_space_is_one_message_with_the_right_spelling(tmp_path: Path) -> None:
    said = r"^task\.dials: 'digits:2' was read as a name without a value; write {digits: 2}, .*--task.dials.digits=2$"
    with pytest.raises(SettingsError, match=said):
        load(RootSettings, None, {"task.dials": "{digits:2}"})
    with pytest.raises(SettingsError, match=said):
        load(RootSettings, write(tmp_path, "task:\n  dials: {size: 3, digits:2}\n"))
    for right in ({"task.dials": "{digits: 2}"}, {"task.dials.digits": "2"}):
        assert load(RootSettings, None, right).task.dials == {"digits": 2}


def test_override_below_a_value_of_the_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="engine holds 'suffix', not a section"):
        load(RootSettings, write(tmp_path, "engine: suffix\n"), {"engine.drafter": "none"})


def test_all_mistakes_are_reported_at_once() -> None:
    with pytest.raises(SettingsError, match=r"engine\.max_rows.*unknown setting engine\.foo"):
        validate(RootSettings, {"engine": {"max_rows": 0, "foo": 1}})


@pytest.mark.parametrize(("text", "message"), [("a: [", "not valid YAML"), ("- a\n", "must contain sections")])
def test_bad_files_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=rf"settings\.yaml .*{message}"):
        load(RootSettings, write(tmp_path, text))


def test_empty_file_and_empty_section_are_defaults(tmp_path: Path) -> None:
    assert load(RootSettings, write(tmp_path, "# nothing\n")) == RootSettings()
    assert load(RootSettings, write(tmp_path, "engine:\n"), {"engine.max_rows": "9"}).engine.max_rows == 9


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.just(0.0) | st.floats(MIN_TEMPERATURE, 5),
            "top_p": st.floats(0.01, 1),
            "stop": st.lists(st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1)),
            "stop_token_ids": st.lists(st.integers(0, 10**6)),
            "seed": st.integers(-(2**40), 2**40),
            "ignore_eos": st.booleans(),
        },
    ),
)
def test_dump_reads_back_equal(tmp_path: Path, sampling: dict[str, Any]) -> None:
    settings = validate(RootSettings, {"sampling": sampling})
    assert load(RootSettings, write(tmp_path, dump(settings))) == settings


def test_settings_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        RootSettings().engine.max_rows = 3  # type: ignore[misc]


def test_sampling_section_mirrors_sampling() -> None:
    assert list(SamplingSettings.model_fields) == [field.name for field in dataclasses.fields(Sampling)]
    assert SamplingSettings().build() == Sampling()
    for temperature in (0.0, MIN_TEMPERATURE, MAX_TEMPERATURE):
        SamplingSettings(temperature=temperature).build()
    changed = SamplingSettings(temperature=0.5, stop=("x",), n=2)
    assert changed.build() == Sampling(temperature=0.5, stop=("x",), n=2)


def test_every_setting_says_what_it_is() -> None:
    fields = dict(fields_of(RootSettings))
    assert "engine.drafter" in fields
    assert not [key for key, field in fields.items() if not field.description]


def test_nearest_gives_nothing_for_nonsense() -> None:
    assert nearest("qqqq.wwww", ["engine.drafter", "model.path"]) is None


@pytest.mark.parametrize(
    ("text", "stop"),
    [("###", ("###",)), ("Q: ", ("Q: ",)), ("42", ("42",)), ('["a", "b"]', ("a", "b")), ('"quoted"', ("quoted",))],
)
def test_a_stop_string_is_taken_as_it_stands(text: str, stop: tuple[str, ...]) -> None:
    from paceline.run.settings import RootSettings

    assert load(RootSettings, overrides={"sampling.stop": text}).sampling.stop == stop


@pytest.mark.parametrize("name", ["x" * 70_000, "\x1b[31m", "two\nlines"])
def test_a_complaint_is_one_line_of_moderate_length(name: str) -> None:
    with pytest.raises(SettingsError) as raised:
        validate(RootSettings, {"rl": {"optimizer": name}, name: 1})
    assert str(raised.value).isprintable() and len(str(raised.value)) < 4000
    assert len(str(SettingsError(f"task.name: unknown task {name}"))) < 4000


def test_a_list_of_many_mistakes_is_one_line_of_moderate_length() -> None:
    with pytest.raises(SettingsError, match=r"^sampling\.stop\.0: .*; and \d+ more$") as raised:
        validate(RootSettings, {"sampling": {"stop": [80] * 3000}})
    assert len(str(raised.value)) < 4000
