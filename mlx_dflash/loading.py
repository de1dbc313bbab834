"""From a name to a target or a drafter in memory: what `load` and `load_drafter` do."""

from pathlib import Path

from mlx_lm.tokenizer_utils import TokenizerWrapper

from . import hub, memory, registry
from .drafters import DFlashDrafter, evaluate_drafter, open_drafter
from .errors import RequestError
from .lookup import Lookup
from .targets import Target, evaluate, open_target


def load(path_or_name: str | Path = "demo", revision: str | None = None) -> tuple[Target, TokenizerWrapper]:
    """Load a target: a local folder, a Hugging Face name, a .gguf file, or "demo" (SmolLM2-135M-Instruct).

    A .gguf file (or `owner/repository/file.gguf`) is converted into the cache when it is first loaded. revision:
    branch, tag or commit of a Hugging Face name; None: what the cache has, else the newest. Raises CheckpointError
    (missing, cut or wrong files), UnsupportedError (another model family).
    """
    folder = hub.target_folder(str(path_or_name), revision)
    target = open_target(folder)
    target.asked_for = str(path_or_name)
    memory.warn(memory.estimate(target), str(path_or_name))
    return target, evaluate(target, folder)


def load_drafter(path_or_name: str | Path, model: Target, revision: str | None = None) -> DFlashDrafter | Lookup:
    """Load a drafter, a local folder, a Hugging Face name, a .gguf file, "demo" or "auto", and bind it to `model`.

    "lookup" loads nothing: drafts are what followed the last tokens where they stood before in the text.
    "auto" is the drafter that the registry knows for the target that `load` loaded, at its pinned revision. Raises
    CheckpointError, UnsupportedError, RequestError where "auto" finds none, or PairError where it does not fit.
    """
    if path_or_name == Lookup.name:
        return Lookup(model)
    folder = drafter_folder(path_or_name, model, revision)
    drafter = open_drafter(folder, model)
    memory.warn(memory.estimate(model, drafter), f"{model.asked_for or 'this model'} with {path_or_name}")
    return evaluate_drafter(drafter, str(folder))


def drafter_folder(path_or_name: str | Path, model: Target, revision: str | None = None) -> Path:
    """The local folder of a drafter for an opened target, as `load_drafter` finds it."""
    if path_or_name != "auto":
        return hub.drafter_folder(str(path_or_name), revision)
    if model.asked_for == "demo":
        return hub.drafter_folder("demo")
    pair = registry.pair_of(model.asked_for, model.folder)
    if pair is None:
        raise RequestError(
            f"no drafter is known for {model.asked_for or 'this model'}; give its folder or hub name with --draft-model"
        )
    folder = hub.drafter_folder(pair.drafter, revision or pair.revision)
    registry.check_drafter(pair, folder)
    return folder
