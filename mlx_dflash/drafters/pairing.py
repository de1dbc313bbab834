"""Whether a drafter was made for a target: facts of both configs, compared before any weight is read."""

from pathlib import Path

from ..checkpoint import read_json
from ..errors import PairError, UnsupportedError
from ..targets import Target
from .config import DrafterConfig


def check_pair(config: DrafterConfig, target: Target, where: str) -> None:
    """Raise PairError, naming both sides, if the drafter can't run on this target."""
    kind = target.config["model_type"]

    def refuse(made_for: str, has: str) -> None:
        made_for += f" (made for {config.verifier})" if config.verifier else ""
        raise PairError(f"{where} {made_for}, this {kind} has {has}; use the drafter made for it")

    if config.hidden_size != target.hidden_size:
        refuse(f"is for a target of hidden size {config.hidden_size}", str(target.hidden_size))
    last = max(config.target_layer_ids)
    if last >= target.num_layers or config.num_target_layers not in (None, target.num_layers):
        trained = config.num_target_layers or f"at least {last + 1}"
        taps = list(config.target_layer_ids)
        refuse(f"taps layers {taps} of a target with {trained} layers", str(target.num_layers))
    if config.vocab_size not in (None, target.vocab_size):
        refuse(f"is for a table of {config.vocab_size} tokens", str(target.vocab_size))
    if not 0 <= config.mask_token_id < target.vocab_size:
        raise PairError(
            f"{where} has mask token {config.mask_token_id}, outside this {kind}'s table of {target.vocab_size} rows; "
            "use the drafter made for it"
        )
    begin = target.config.get("bos_token_id")
    if None not in (config.bos_token_id, begin) and config.bos_token_id != begin:
        refuse(f"is for a tokenizer that begins with token {config.bos_token_id}", f"token {begin}")
    if config.vocabulary is not None and not config.vocabulary.own_embedding and "gemma" in kind:
        raise UnsupportedError(
            f"{where} takes bare embedding rows, but this {kind} scales its own; not supported: use one that "
            "holds its embedding, or one in z-lab's format"
        )


def check_tokenizers(drafter: Path, target: Path | None) -> None:
    """Raise PairError if the drafter's folder brings a tokenizer of its own that gives tokens other ids.

    Most drafters bring none. Ids are compared for the tokens that both know: a longer list of added ones is no fault.
    """
    files = [folder / "tokenizer.json" for folder in (drafter, target) if folder is not None]
    if len(files) < 2 or not all(file.exists() for file in files):
        return
    theirs, ours = (token_ids(file) for file in files)
    shared = theirs.keys() & ours.keys()
    wrong = next((token for token in sorted(shared) if theirs[token] != ours[token]), None)
    if wrong is not None or len(shared) < min(len(theirs), len(ours)) // 2:
        what = (
            f"{len(shared)} tokens in common" if wrong is None else f"{wrong!r} as {theirs[wrong]}, not {ours[wrong]}"
        )
        raise PairError(f"{drafter} has another tokenizer than {target} ({what}); use the drafter made for this target")


def token_ids(file: Path) -> dict[str, int]:
    """Token -> id of a tokenizer.json; empty where it lists none in a known way."""
    content = read_json(file)
    model = content.get("model") or {}
    listed = model.get("vocab")
    ids = dict(listed) if isinstance(listed, dict) else {}
    if isinstance(listed, list):  # Unigram: [token, score] in order of ids
        ids = {entry[0]: i for i, entry in enumerate(listed)}
    return ids | {entry["content"]: entry["id"] for entry in content.get("added_tokens") or []}
