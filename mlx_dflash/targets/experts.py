"""Expert weights in whichever layout a file has them -> the stacked one of mlx-lm's `SwitchGLU`.

Hugging Face's files hold one tensor an expert (`experts.3.up_proj.weight`), or all of a layer's in one with gate and up
joined (`experts.gate_up_proj`); transformers 5 saves the first and runs the second. mlx-lm reads one of them a family.
Packed experts have scales and biases beside each weight, which go the same way.
"""

import re

import mlx.core as mx

ONE = re.compile(r"(.*\.mlp)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.(weight|scales|biases|global_scale)")
JOINED, DOWN = ".experts.gate_up_proj", ".experts.down_proj"


def stack_experts(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """`experts...` under any `mlp` -> `switch_mlp.{gate,up,down}_proj.weight` (experts, out, in); the rest as it is."""
    out: dict[str, mx.array] = {}
    single: dict[str, dict[int, mx.array]] = {}
    for name, value in weights.items():
        if match := ONE.fullmatch(name):
            mlp, expert, projection, leaf = match.groups()
            single.setdefault(f"{mlp}.switch_mlp.{projection}.{leaf}", {})[int(expert)] = value
        elif name.endswith(JOINED):
            switch = name.removesuffix(JOINED) + ".switch_mlp"
            gate, up = mx.split(value, 2, axis=-2)  # each (experts, width, hidden)
            out |= {f"{switch}.gate_proj.weight": gate, f"{switch}.up_proj.weight": up}
        elif name.endswith(DOWN):
            out[name.removesuffix(DOWN) + ".switch_mlp.down_proj.weight"] = value
        else:
            out[name] = value
    for name, experts in single.items():
        out[name] = mx.stack([experts[i] for i in range(len(experts))])
    return out
