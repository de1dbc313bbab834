"""Whether a drafter was made for a target: facts of both configs, compared before any weight is read."""

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
