"""A model's folder before any weight is read: where it is, its config, and the names of its files.

`checkpoint.py` reads and writes the weights; `run/checks.py` finds a user's mistakes with this alone. A name is a local
folder, `shipped:NAME`, `random:SIZE` or a hub id. Nothing here imports torch or opens a file of weights.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import Field

from paceline.core.config import nearest
from paceline.core.documents import brief, plain, read_json
from paceline.core.schema import Schema, check
from paceline.model.config import ModelConfig, read_end_ids
from paceline.model.random_config import RANDOM, random_config, random_names
from paceline.model.shipped import SHIPPED, shipped_folder, shipped_names
from paceline.model.tokenizer import TOKENIZER_FILES

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_SHARD = re.compile(r"\w[\w.+-]{0,200}\.safetensors", re.ASCII)
MAX_HUB_ID = 200
HUB_SECONDS = 20.0
_HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt"]
# Folders below the root and `consolidated` files hold the same weights again, under other names.
_HUB_EXTRAS = ["*/*", "consolidated*"]


def resolve(path_or_hub_id: str | Path) -> Path:
    """The local folder of a model: the given one, `shipped:NAME`'s, or the download of a hub id "Qwen/Qwen3-0.6B"."""
    name = str(path_or_hub_id)
    return find_folder(name) or _download(name, _all_files)


def find_folder(name: str) -> Path | None:
    """A model's folder on this machine; None for a hub id, and a ValueError for what can be neither."""
    if name.startswith(SHIPPED):
        return shipped_folder(name.removeprefix(SHIPPED))
    folder = Path(name).expanduser()
    if name and os.path.isdir(folder):  # unlike `is_dir`, no error for what cannot be a name
        return folder
    if not _HUB_ID.fullmatch(name) or len(name) > MAX_HUB_ID:
        wanted = f"give a folder with {CONFIG} and {WEIGHTS}, or a hub id"
        raise ValueError(f"no model folder at {brief(name)}{_suggestion(name)}; {wanted}")
    if "/" not in name and (guess := _suggestion(name)):  # no supported model has a hub id of one word
        raise ValueError(f"no model folder at {brief(name)}{guess}; a hub id has the form OWNER/NAME")
    return None


def model_config(name: str) -> ModelConfig:
    """The config of a model by any name, also of one still to be made or downloaded: the hub is asked for it alone."""
    if name.startswith(RANDOM):
        return random_config(name.removeprefix(RANDOM))
    return load_config(find_folder(name) or _download(name, _config_file))


def check_model(name: str, needs_weights: bool = True) -> ModelConfig:
    """The config of a model, found and checked as far as its weights' file names and without opening any of them."""
    config = model_config(name)
    folder = None if name.startswith(RANDOM) else find_folder(name)
    if needs_weights and folder is not None:
        shards(folder)
    return config


def _suggestion(name: str) -> str:
    """What a model's name may have meant: one of the package's, or a folder beside the missing one."""
    known = [*(f"{SHIPPED}{own}" for own in shipped_names()), *random_names()]
    place = Path(name).expanduser()
    try:
        beside = sorted(entry.name for entry in place.absolute().parent.iterdir() if (entry / CONFIG).is_file())
    except (OSError, ValueError):
        beside = []
    named = next((own for own in known if own.partition(":")[2] == name), None) or nearest(name, known)
    near = nearest(place.name, beside)
    guess = named or (str(place.parent / near) if near else None)
    return f" (did you mean {plain(guess, 400)}?)" if guess else ""


def _download(name: str, fetch: Callable[[str], str | Path]) -> Path:
    try:
        return Path(fetch(name))
    except Exception as error:  # Many unrelated types (network, sign-in, unknown name), one meaning for the user.
        raise ValueError(
            f"{name!r} is not a local folder, and downloading it from the hub failed ({type(error).__name__}: {error})"
            f"{_suggestion(name)}; check the name and the network, or give the path of a folder with {CONFIG} and "
            f"{WEIGHTS}"
        ) from error


def _all_files(name: str) -> str:
    from huggingface_hub import snapshot_download

    return snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_EXTRAS)


def _config_file(name: str) -> Path:
    """The folder in the hub's cache that has it."""
    from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache

    cached = try_to_load_from_cache(name, CONFIG)
    if not isinstance(cached, str):
        HfApi().model_info(name, timeout=HUB_SECONDS)  # fails at once where a download would try again and again
        cached = hf_hub_download(name, CONFIG)
    return Path(cached).parent


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter and no model's weights: another folder has those."""
    return (folder / ADAPTER_CONFIG).is_file() and not any(
        (folder / name).is_file() for name in (WEIGHTS, WEIGHTS_INDEX)
    )


def base_folder(folder: Path) -> Path:
    """The folder of the model that an adapter belongs to, downloaded if need be."""
    file = folder / ADAPTER_CONFIG
    name = read_json(file).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{file} names no base model; set base_model_name_or_path to a folder or a hub id")
    try:
        found = resolve(name)
    except ValueError as error:
        raise ValueError(f"{file}: the base model is missing: {error}") from error
    if is_adapter(found):
        raise ValueError(f"{file}: the base model {found} is an adapter itself; name the model behind it")
    return found


def lasting_name(name: str) -> str:
    """A name under which other programs and later runs find the same model: a hub id as it is, else a full path."""
    folder = find_folder(name)
    return name if folder is None else str(folder.absolute())


def load_config(folder: Path) -> ModelConfig:
    """The model config of a folder; ValueError if it is missing, broken or describes an unsupported model.

    An adapter's folder has that of its base, unless it brings its own.
    """
    if not (folder / CONFIG).is_file() and is_adapter(folder):
        folder = base_folder(folder)
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} has no {CONFIG}, so it is not a model folder")
    config, generation = read_json(folder / CONFIG), None
    if (folder / GENERATION_CONFIG).is_file():
        generation = read_json(folder / GENERATION_CONFIG)
        with _about(folder / GENERATION_CONFIG):
            read_end_ids({}, generation)
    with _about(folder / CONFIG):
        return ModelConfig.from_hf(config, generation)


@contextmanager
def _about(file: Path) -> Iterator[None]:
    """Name the file in a ValueError about its contents."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def tokenizer_files(folder: Path) -> list[Path]:
    """The tokenizer files of a model folder, in order of their names; those of its base for an adapter without."""
    return _tokenizer_files(folder) or (_tokenizer_files(base_folder(folder)) if is_adapter(folder) else [])


def _tokenizer_files(folder: Path) -> list[Path]:
    return sorted({file for pattern in TOKENIZER_FILES for file in folder.glob(pattern) if file.is_file()})


def shards(folder: Path) -> dict[Path, list[str]]:
    """The safetensors files of a folder, all of them present, with the tensors that an index says they hold.

    An adapter's are those of its base.
    """
    if is_adapter(folder):
        if not (folder / ADAPTER_WEIGHTS).is_file():
            raise ValueError(f"{folder} has no {ADAPTER_WEIGHTS}, the adapter's weights; copy it again")
        folder = base_folder(folder)
    if (folder / WEIGHTS).is_file():
        return {folder / WEIGHTS: []}
    if (folder / WEIGHTS_INDEX).is_file():
        return _read_index(folder)
    if pickles := sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pt*")):
        raise ValueError(
            f"{pickles[0]} is a pickle, which can run code and is not opened; if you trust it, convert it: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)"
        )
    raise ValueError(f"{folder} has no weights: neither {WEIGHTS} nor {WEIGHTS_INDEX}")


class _Index(Schema):
    weight_map: dict[str, str] = Field(min_length=1, description="an object that names the file of every tensor")


def _read_index(folder: Path) -> dict[Path, list[str]]:
    """The files that the index names, all in the folder itself.

    A file may be a link to anywhere, as in the hub's cache, where whoever set up the folder put it. A name cannot lead
    out of the folder, because whoever wrote the index is a stranger.
    """
    index = folder / WEIGHTS_INDEX
    weight_map = check(_Index, read_json(index), str(index)).weight_map
    files: dict[Path, list[str]] = {}
    for tensor, name in sorted(weight_map.items(), key=lambda entry: entry[1]):
        if not _SHARD.fullmatch(name):
            raise ValueError(
                f"{index} names the file {brief(name)}; weight files are NAME.safetensors beside the index"
            )
        if folder / name not in files and not (folder / name).is_file():
            raise ValueError(f"weight file {folder / name} is missing, though {WEIGHTS_INDEX} names it; copy it again")
        files.setdefault(folder / name, []).append(tensor)
    return files
