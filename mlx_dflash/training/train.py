"""The training loop: anchors drawn in the target's own answers, blocks denoised in one pass, AdamW, resumable."""

import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from ..checkpoint import load_arrays
from ..drafters.config import DrafterConfig
from ..drafters.dflash import DFlashDrafter, DFlashModel
from ..drafters.formats.keys import SIZES
from ..errors import RequestError
from ..loading import load_drafter
from ..targets import Target
from .config import TrainingConfig
from .data import MOST_BYTES, Features, Sample, load_features, tap_scales
from .model import draft_hidden, fold_scales, start_from_target, unquantized

CHECKPOINT, BEST = "checkpoint.safetensors", "best.safetensors"


@dataclass
class Batch:
    """One step's input. features (S, context, taps * hidden) scaled; ids (S, K, width) the blocks' true tokens."""

    features: mx.array
    lengths: mx.array  # (S,)
    anchors: mx.array  # (S, K) absolute positions
    ids: mx.array
    known: mx.array  # (S, K, width - 1) label lies inside the answer
    final: mx.array  # (S, K, width - 1, hidden) the target's last layer where it chose each label


def drafter_config(config: TrainingConfig, target: Target) -> DrafterConfig:
    """A drafter of the target's own layer shape."""
    t = target.config
    return DrafterConfig(
        hidden_size=t["hidden_size"],
        intermediate_size=t["intermediate_size"],
        num_hidden_layers=config.layers,
        num_attention_heads=t["num_attention_heads"],
        num_key_value_heads=t["num_key_value_heads"],
        head_dim=t["head_dim"],
        rms_norm_eps=t["rms_norm_eps"],
        rope_theta=float(t["rope_theta"]),
        vocab_size=t["vocab_size"],
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        target_layer_ids=config.taps,
        num_target_layers=t["num_hidden_layers"],
    )


def draw_batch(
    rng: random.Random, config: TrainingConfig, samples: list[Sample], features: Features, scale: np.ndarray
) -> Batch:
    """Draw sequences, a width, and anchors among the answer's tokens that have at least one token after them."""
    width, taps = rng.choice(config.widths), len(scale)
    long = [i for i, s in enumerate(samples) if len(s.answer) > 2]
    chosen = rng.sample(long, min(config.sequences, len(long)))
    states = [features.of(i).astype(np.float32) for i in chosen]
    rows = [s[:, :taps] * scale for s in states]
    context = max(map(len, rows))
    padded = np.stack([np.pad(r, ((0, context - len(r)), (0, 0))) for r in rows])
    anchors, ids, known, final = [], [], [], []
    for i, state in zip(chosen, states, strict=True):
        sample = samples[i]
        text = sample.prompt + sample.answer
        at = sorted(rng.choices(range(len(sample.prompt), len(text) - 1), k=config.anchors))
        anchors.append(at)
        ids.append([(text[a : a + width] + [0] * width)[:width] for a in at])
        known.append([[a + k < len(text) for k in range(1, width)] for a in at])
        chose = np.minimum(np.array(at)[:, None] + np.arange(width - 1), len(state) - 1)
        final.append(state[chose, taps:])
    lengths = mx.array([len(r) for r in rows])
    inputs = (mx.array(padded), lengths, mx.array(anchors), mx.array(ids))
    return Batch(*inputs, mx.array(known), mx.array(np.stack(final)))


def candidates(
    rng: np.random.Generator, config: TrainingConfig, labels: np.ndarray, frequent: np.ndarray, vocab: int
) -> tuple[mx.array, mx.array, mx.array]:
    """The step's softmax: token ids (c,), log-corrections (c,), and each label's place among them."""
    sure = np.union1d(labels.ravel(), frequent)
    rest = np.setdiff1d(rng.integers(0, vocab, config.negatives), sure)
    share = max(len(rest), 1) / max(vocab - len(sure), 1)
    shift = np.concatenate([np.zeros(len(sure)), np.full(len(rest), -np.log(share))]).astype(np.float32)
    place = np.searchsorted(sure, labels)
    return mx.array(np.concatenate([sure, rest])), mx.array(shift), mx.array(place)


def loss_of(
    model: DFlashModel,
    shape: DrafterConfig,
    target: Target,
    batch: Batch,
    softmax: tuple[mx.array, mx.array, mx.array],
    config: TrainingConfig,
    noise_key: mx.array,
) -> mx.array:
    """Weighted mean loss of the drafts (TrainingConfig says of what); embedding and head are the target's, frozen."""
    width = batch.ids.shape[-1]
    masks = mx.full((*batch.ids.shape[:2], width - 1), shape.mask_token_id, batch.ids.dtype)
    noise = target.embed(mx.concatenate([batch.ids[..., :1], masks], axis=-1))
    features = batch.features
    if config.feature_noise:
        features = features + config.feature_noise * mx.random.normal(features.shape, key=noise_key)
    hidden = draft_hidden(model, shape, features, batch.lengths, noise, batch.anchors)[:, :, 1:]
    tokens, shift, place = softmax
    rows = head_rows(target, tokens)
    logits = hidden @ rows.T + shift  # (S, K, width - 1, c)
    if config.targets == "tokens":
        losses = nn.losses.cross_entropy(logits, place)
    else:
        true = mx.stop_gradient(target.norm(batch.final))
        losses = nn.losses.cross_entropy(logits, mx.softmax(true @ rows.T + shift, axis=-1))
        losses = losses + config.alignment * (1 - nn.losses.cosine_similarity_loss(hidden, true, axis=-1))
    weights = batch.known * mx.exp(-mx.arange(width - 1) / config.gamma)
    return (losses * weights).sum() / weights.sum()


def head_rows(target: Target, tokens: mx.array) -> mx.array:
    """Rows of the target's head for some tokens, (c, hidden)."""
    tied = target.config["tie_word_embeddings"]
    head = target.model.model.embed_tokens if tied else target.model.lm_head
    return head.weight[tokens]


def train(
    target: Target,
    config: TrainingConfig,
    folder: Path,
    report: Callable[[str], None] = print,
    save_every: int = 100,
    start: Path | None = None,
    validate: Callable[[DFlashDrafter], float] | None = None,
    most_bytes: int = MOST_BYTES,
    progress: Callable[[str], None] = lambda line: None,
) -> tuple[DFlashModel, DrafterConfig, list[float]]:
    """Train for `config.steps`, going on from the folder's checkpoint if there is one.

    validate: a drafter -> its mean accepted length; asked as the config says, it may end the training early. The best
    weights so far are `best.safetensors`. most_bytes: of features on disk a part. progress: told of every step.

    A new run begins with the target's last layers, or with `start`: another training's checkpoint, or the folder of a
    drafter, quantized or not. Raises RequestError if the folder holds no answers or `start` has another shape. Returns
    the model, its config and the tap scales that its input was multiplied with.
    """
    features = load_features(target, folder, (*config.taps, target.num_layers - 1), most_bytes)
    config.save(folder / "training.json")
    samples = features.samples
    scales = tap_scales(features, len(config.taps) + 1)[:-1]
    scale = np.repeat(np.array(scales, np.float32), target.hidden_size)
    counts = Counter(t for s in samples for t in s.answer)
    frequent = np.array([t for t, _ in counts.most_common(config.frequent)])

    shape = drafter_config(config, target)
    model = DFlashModel(shape)
    if start is None:
        start_from_target(model, shape, target, mx.array([samples[0].prompt + samples[0].answer]))
    else:
        model.load_weights(start_weights(start, shape, target, scales))
    decay = config.weight_decay
    optimizer = optim.AdamW(schedule(config), betas=[0.9, 0.98], weight_decay=decay, bias_correction=True)
    optimizer.init(model.trainable_parameters())
    step, trend = restore(folder, model, optimizer)
    value_and_grad = nn.value_and_grad(model, lambda m, *inputs: loss_of(m, shape, target, *inputs))
    losses: list[float] = []
    started, first = time.perf_counter(), step
    while step < config.steps and trend.misses < config.patience:
        rng = random.Random(f"{config.seed}/{step}")  # of the step alone, so that a resumed run draws the same
        batch = draw_batch(rng, config, samples, features, scale)
        labels = np.array(batch.ids[..., 1:])
        softmax = candidates(np.random.default_rng([config.seed, step]), config, labels, frequent, target.vocab_size)
        loss, grads = value_and_grad(model, batch, softmax, config, mx.random.key(step))
        grads, _ = optim.clip_grad_norm(grads, 1.0)
        optimizer.update(model, grads)
        mx.eval(model.parameters(), optimizer.state, loss)
        losses.append(loss.item())
        step += 1
        pace = (time.perf_counter() - started) / (step - first)
        loss_now = round(float(np.mean(losses[-save_every:])), 4)
        said = f"step {step}/{config.steps}  loss {loss_now:.4f}  {pace:.2f} s/step"
        progress(f"{said}  {(config.steps - step) * pace / 60:.0f} min left")
        due = validate is not None and config.validate_every > 0 and step % config.validate_every == 0
        if step % save_every == 0 or step == config.steps or due:
            line = {"step": step, "loss": loss_now, "seconds_a_step": round(pace, 3)}
            if due and validate is not None:
                tau = validate(as_drafter(model, shape, scales, target))
                line["mean_accepted_length"] = round(tau, 4)
                said += f"  mean accepted length {tau:.3f}"
                trend = trend.after(tau)
                if trend.misses == 0:
                    save_best(folder, model)
            save(folder, model, optimizer, step, trend)
            with (folder / "log.jsonl").open("a") as f:
                f.write(json.dumps(line) + "\n")
            report(said)
    if trend.misses >= config.patience:
        report(f"stopped at step {step}: no better than {trend.best:.3f} for {trend.misses} validations")
    return model, shape, scales


def start_weights(start: Path, shape: DrafterConfig, target: Target, scales: list[float]) -> list[tuple[str, mx.array]]:
    """fp32 weights to begin with, for input that is multiplied with `scales`; RequestError if the shape differs."""
    if start.is_file():
        return model_weights(load_arrays(start)[0])
    drafter = load_drafter(str(start), target)
    assert isinstance(drafter, DFlashDrafter)  # a folder never is lookup
    wanted = {k: getattr(shape, k) for k in (*SIZES, "target_layer_ids", "mask_token_id")}
    found = {k: getattr(drafter.config, k) for k in wanted}
    if found != wanted:
        raise RequestError(f"{start} is a drafter of {found}; this training makes one of {wanted}")
    fold_scales(drafter.model, [1 / scale for scale in scales], shape.hidden_size)
    return [(name, w.astype(mx.float32)) for name, w in unquantized(drafter.model).items()]


@dataclass(frozen=True)
class Trend:
    """Validation so far: the best mean accepted length, and how often since then it was not beaten."""

    best: float = 0.0
    misses: int = 0

    def after(self, tau: float) -> "Trend":
        return Trend(tau, 0) if tau > self.best else Trend(self.best, self.misses + 1)


def as_drafter(model: DFlashModel, shape: DrafterConfig, scales: list[float], target: Target) -> DFlashDrafter:
    """The drafter that an export of the model as it is would be, unquantized; the model is left alone."""
    copy = DFlashModel(shape)
    copy.load_weights(tree_flatten(model.parameters()))
    fold_scales(copy, scales, shape.hidden_size)
    return DFlashDrafter(copy, shape, target)


def schedule(config: TrainingConfig) -> Callable[[mx.array], mx.array]:
    warm = optim.linear_schedule(0, config.learning_rate, config.warmup)
    decay = optim.cosine_decay(config.learning_rate, max(config.steps - config.warmup, 1))
    return optim.join_schedules([warm, decay], [config.warmup])


def save_best(folder: Path, model: DFlashModel) -> None:
    write_arrays(folder / BEST, {f"model.{k}": v for k, v in tree_flatten(model.parameters())})


def trained_weights(folder: Path) -> list[tuple[str, mx.array]]:
    """Of the best validation, else of the last checkpoint. Raises RequestError if nothing was trained there."""
    found = [path for name in (BEST, CHECKPOINT) if (path := folder / name).exists()]
    if not found:
        raise RequestError(f"{folder} holds no trained drafter; run the train command first")
    return model_weights(load_arrays(found[0])[0])


def save(folder: Path, model: DFlashModel, optimizer: optim.Optimizer, step: int, trend: Trend) -> None:
    arrays = {f"model.{k}": v for k, v in tree_flatten(model.parameters())}
    arrays |= {f"optimizer.{k}": v for k, v in tree_flatten(optimizer.state)}
    meta = {"step": str(step), "best": repr(trend.best), "misses": str(trend.misses)}
    write_arrays(folder / CHECKPOINT, arrays, meta)


def write_arrays(path: Path, arrays: dict[str, mx.array], meta: dict[str, str] | None = None) -> None:
    """Write beside the old file, then put it in its place."""
    part = path.with_suffix(".part.safetensors")
    mx.save_safetensors(str(part), arrays, meta or {})
    part.replace(path)


def restore(folder: Path, model: DFlashModel, optimizer: optim.Optimizer) -> tuple[int, Trend]:
    """Load the folder's checkpoint, if any; returns the step to go on from, and how validation went until then."""
    path = folder / CHECKPOINT
    if not path.exists():
        return 0, Trend()
    arrays, meta = load_arrays(path)
    model.load_weights(model_weights(arrays))
    state = [(k.removeprefix("optimizer."), v) for k, v in arrays.items() if k.startswith("optimizer.")]
    optimizer.state = tree_unflatten(state)
    mx.eval(model.parameters(), optimizer.state)
    return int(meta["step"]), Trend(float(meta.get("best", 0.0)), int(meta.get("misses", 0)))


def model_weights(arrays: dict[str, mx.array]) -> list[tuple[str, mx.array]]:
    """The drafter's weights among a checkpoint's arrays."""
    return [(k.removeprefix("model."), v) for k, v in arrays.items() if k.startswith("model.")]
