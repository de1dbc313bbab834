"""A drafter's folder, of any format -> the plan of an MLX folder in the same format, quantized or not.

Only the matrices of the draft layers are quantized. `fc`, norms, convolutions and the selector stay: they are small,
and acceptance hangs on them. Embedding and head are the target's, or the drafter's own and kept.
"""

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_dflash.checkpoint import Checkpoint
from mlx_dflash.drafters import DFlashDrafter, check_pair, model_class
from mlx_dflash.drafters.formats import read_layout, refuse_other_methods
from mlx_dflash.errors import CheckpointError
from mlx_dflash.targets import Target

from .decode import Tensors, decode
from .plan import Options, Plan, check_names, check_shapes, fill, quantize

LEFT_OUT = ("auto_map", "_name_or_path", "transformers_version")


class DrafterPort:
    """An opened drafter: its empty module and its tensors under the module's names."""

    def __init__(self, checkpoint: Checkpoint, tensors: Tensors):
        folder, self.config = checkpoint.folder, dict(checkpoint.config)
        self.where = str(folder)
        refuse_other_methods(self.config, f"{folder}/config.json")
        if not checkpoint.is_drafter:
            raise CheckpointError(
                f"{folder} is a full model, not a DFlash drafter (no fc and hidden_norm); convert it as a target"
            )
        decoded = decode(self.config, tensors, self.where)
        if "quantization" not in self.config:
            self.config.pop("quantization_config", None)
        self.notes, self.dropped = decoded.notes, dict(decoded.dropped)
        self.layout = read_layout(self.config, f"{folder}/config.json", list(decoded.tensors))
        self.tensors: Tensors = {}
        for name, value in decoded.tensors.items():
            if (new := self.layout.rename(name)) is None:
                self.dropped[name] = "drafting does not need it"
            else:
                self.tensors[new] = value
        if self.layout.split is not None:
            self.tensors = self.layout.split(self.tensors, self.layout.config)
        self.model: Any = model_class(self.layout.config)(self.layout.config)
        self.given = self.layout.config.quantization
        check_names({name for name, _ in tree_flatten(self.model.parameters())}, set(self.tensors), self.where)
        check_shapes(self.model, self.tensors, self.where)

    def plan(self, options: Options) -> Plan:
        config = {k: v for k, v in self.config.items() if k not in LEFT_OUT}
        if options.dtype:
            config |= {"dtype": options.dtype}
            config.pop("torch_dtype", None)
        plan = Plan(config, dropped=dict(self.dropped), notes=list(self.notes))
        if options.dtype == "float16":
            plan.notes.append("float16 activations are too narrow for some drafters; measure acceptance with --verify")
        quantize(plan, self.model, dict(self.tensors), self.given, options, keep)
        return plan

    def check(self, target: Target) -> None:
        """Raise PairError where it does not fit."""
        check_pair(self.layout.config, target, self.where)

    def reference(self, target: Target) -> DFlashDrafter:
        """The drafter with the source's own values, bound to `target`."""
        model = model_class(self.layout.config)(self.layout.config)
        fill(model, self.tensors, self.given)
        mx.eval(model.parameters())
        return DFlashDrafter(model, self.layout.config, target)


def keep(path: str) -> str | None:
    """Why a module of a drafter stays as it is; None for the layers' own matrices."""
    if "_conv" in path or "selector" in path:
        return "a small part of DFlash 2 that acceptance hangs on"
    if path == "fc":
        return "acceptance hangs on it"
    if not path.startswith("layers."):
        return "an embedding or head of its own"
    return None
