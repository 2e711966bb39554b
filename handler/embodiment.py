"""One embodiment of a checkpoint: the keys, shapes and units that its robots must send, and what they get back.

Everything here is read from the checkpoint's `processor_config.json`, `statistics.json` and `embodiment_id.json`;
together they are the contract that observations are checked against. Arithmetic follows Isaac-GR00T
`gr00t/data/state_action` step by step, float32 and float64 in the same places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

# Projector indices of NVIDIA's pretraining and example embodiments, used for tags that `embodiment_id.json` leaves out
# (Isaac-GR00T `processing_gr00t_n1d7.py`).
KNOWN_IDS = {
    "simpler_env_google": 0,
    "simpler_env_widowx": 1,
    "libero_sim": 2,
    "new_embodiment": 10,
    "robocasa_panda_omron": 10,
    "robocasa_gr1_tabletop": 10,
    "unitree_g1_sonic": 11,
    "oxe_droid_relative_eef_relative_joint": 24,
    "real_g1_relative_eef_relative_joints": 25,
    "unitree_g1_full_body_with_waist_height_nav_cmd": 25,
    "real_r1_pro_sharpa_relative_eef": 26,
    "real_r1_pro_sharpa_relative_eef_human": 26,
    "real_r1_pro_sharpa_relative_eef_maxinsights": 26,
    "real_r1_pro_sharpa_relative_eef_mecka": 26,
    "xdof_relative_eef_relative_joint": 27,
    "xdof_relative_eef_relative_joint_subtask": 27,
}

POSE_WIDTHS = {"xyz_rot6d": 9, "xyz_rotvec": 6}


class ContractError(ValueError):
    """The checkpoint's processor files do not describe this embodiment completely; the text says what is missing."""


@dataclass(frozen=True)
class StateGroup:
    """One state key. method: "sin_cos", "mean_std" or "min_max"; the statistics are float64, (width,) or (T, width)."""

    key: str
    width: int
    method: str
    low: Float64
    high: Float64
    mean: Float64
    std: Float64
    clip: bool

    @cached_property
    def bound(self) -> Float64:
        return _bound(self.low, self.high)

    @property
    def encoded_width(self) -> int:
        return 2 * self.width if self.method == "sin_cos" else self.width

    def encode(self, values: Float32) -> Float32:
        """(..., T, width) raw -> (..., T, encoded_width), for the model; infinite where float32 cannot hold it."""
        if self.method == "sin_cos":
            return np.concatenate([np.sin(values), np.cos(values)], axis=-1)
        with np.errstate(over="ignore"):
            if self.method == "mean_std":
                return _standardize(values, self.mean, self.std)
            return self._unit_range(values, self.clip)

    @cached_property
    def _unit_range(self) -> UnitRange:
        return UnitRange(self.low, self.high)


@dataclass(frozen=True)
class ActionGroup:
    """One action key.

    Attributes:
        method: "min_max" or "mean_std".
        relative_to: state key whose last row the group refers to, or None for an absolute group.
        pose: "xyz_rot6d" or "xyz_rotvec" when the group is a relative end-effector pose, "" otherwise.
        low, high, mean, std: float64 statistics, (width,) or one row per step (horizon, width).
    """

    key: str
    width: int
    method: str
    representation: str
    relative_to: str | None
    pose: str
    low: Float64
    high: Float64
    mean: Float64
    std: Float64
    clip: bool

    @cached_property
    def bound(self) -> Float64:
        return _bound(self.low, self.high)

    def anchor(self, physical: Float64, reference: Float32) -> Float32:
        """Physical units relative to a state, (..., H, width) -> absolute ones, float32.

        reference: (..., 1, width), the last row of state `relative_to`.
        """
        if not self.pose:
            return (physical + reference).astype(np.float32)
        return _from_matrix(_to_matrix(reference, self.pose) @ _to_matrix(physical, self.pose), self.pose)

    def encode(self, physical: Float32, reference: Float32 | None) -> Float32:
        """The inverse of `decode_action`, for the first rows of a chunk: (n, width) physical units -> float32.

        reference: (1, width).
        """
        steps = len(physical)
        values: NDArray[Any] = physical
        if reference is not None and not self.pose:
            values = physical - reference.astype(np.float64)
        elif reference is not None:
            anchor = np.linalg.inv(_to_matrix(reference, self.pose))
            values = _from_matrix(anchor @ _to_matrix(physical, self.pose), self.pose)
        if self.method == "mean_std":
            out = _standardize(values.astype(np.float32), _rows(self.mean, steps), _rows(self.std, steps))
            return np.clip(out, -1.0, 1.0) if self.clip else out
        low, high = _rows(self.low, steps), _rows(self.high, steps)
        return UnitRange(low, high)(values.astype(np.float32), self.clip)


def _bound(low: Float64, high: Float64) -> Float64:
    """The largest size of a value that anything but a broken sensor or client sends: a million times the training's,
    or a million where that saw small values only. Clipping would hide it from the network, but not from relative
    actions, which start at the state."""
    return 1e6 * np.maximum(1.0, np.maximum(np.abs(low), np.abs(high)))


def _rows(statistic: Float64, steps: int) -> Float64:
    """Per-step statistics of the first `steps` steps; plain ones unchanged."""
    return statistic[:steps] if statistic.ndim == 2 else statistic


def _side_by_side(values: Sequence[Any], groups: Sequence[StateGroup | ActionGroup], steps: int) -> NDArray[Any]:
    """A value or statistic of each group, spread over its steps and width: (steps, width of all)."""
    pieces = [np.broadcast_to(value, (steps, group.width)) for value, group in zip(values, groups, strict=True)]
    return np.concatenate(pieces, axis=-1)


class UnitRange:
    """The linear map of [low, high] to [-1, 1]; a constant feature, one that never varied, becomes 0."""

    def __init__(self, low: Float64, high: Float64) -> None:
        constant = np.asarray(np.isclose(high, low))
        self.low, self.spread = low, np.where(constant, 1.0, high - low)
        self.constant = constant if constant.any() else None

    def __call__(self, values: Float32, clip: bool) -> Float32:
        out: Float32 = np.float32(2) * ((values - self.low) / self.spread).astype(np.float32) - np.float32(1)
        if self.constant is not None:
            out = np.where(self.constant, np.float32(0), out)
        return np.clip(out, np.float32(-1), np.float32(1)) if clip else out


def _standardize(values: Float32, mean: Float64, std: Float64) -> Float32:
    """(values - mean) / std; a feature without spread keeps its value."""
    spread = np.where(std != 0, std, 1.0)
    return np.where(std != 0, (values - mean) / spread, values).astype(np.float32)


def _to_matrix(pose: NDArray[Any], kind: str) -> Float64:
    """(..., 9 or 6) translation and rotation -> (..., 4, 4). rot6d: the first two ROWS, made orthonormal."""
    pose = np.asarray(pose, dtype=np.float64)
    out = np.zeros((*pose.shape[:-1], 4, 4))
    out[..., 3, 3] = 1.0
    out[..., :3, 3] = pose[..., :3]
    if kind == "xyz_rotvec":
        turn = Rotation.from_rotvec(pose[..., 3:].reshape(-1, 3)).as_matrix()
        out[..., :3, :3] = turn.reshape(*pose.shape[:-1], 3, 3)
        return out
    first, second = pose[..., 3:6], pose[..., 6:9]
    with np.errstate(all="ignore"):  # zero or parallel rows give NaN, which the caller looks for
        first = first / np.linalg.norm(first, axis=-1, keepdims=True)
        second = second - (first * second).sum(-1, keepdims=True) * first
        second = second / np.linalg.norm(second, axis=-1, keepdims=True)
    out[..., :3, :3] = np.stack((first, second, np.cross(first, second)), axis=-2)
    return out


def _from_matrix(matrix: Float64, kind: str) -> Float32:
    """(..., 4, 4) -> (..., 9 or 6) float32."""
    bad = np.asarray(~np.isfinite(matrix).all(axis=(-2, -1)))
    matrix = np.where(bad[..., None, None], np.eye(4), matrix)  # SciPy raises on it, and takes the other rows along
    if kind == "xyz_rotvec":
        turn = Rotation.from_matrix(matrix[..., :3, :3].reshape(-1, 3, 3)).as_rotvec().reshape(*matrix.shape[:-2], 3)
    else:
        turn = matrix[..., :2, :3].reshape(*matrix.shape[:-2], 6)
    out = np.concatenate([matrix[..., :3, 3], turn], axis=-1).astype(np.float32)
    out[bad] = np.nan
    return out


def valid_pose(pose: Float32, kind: str) -> bool:
    """Whether (..., width) end-effector poses name a rotation: two rot6d rows that are neither zero nor parallel."""
    if kind != "xyz_rot6d":
        return True
    first, second = np.asarray(pose[..., 3:6], np.float64), np.asarray(pose[..., 6:9], np.float64)
    lengths = np.linalg.norm(first, axis=-1) * np.linalg.norm(second, axis=-1)
    # The sine of the angle between them; rounding alone gives parallel float32 rows one of about 1e-7.
    return bool((np.linalg.norm(np.cross(first, second), axis=-1) > 1e-4 * lengths).all() and (lengths > 1e-12).all())


@dataclass(frozen=True)
class Embodiment:
    """The contract of one embodiment.

    Attributes:
        tag, id: its name, and which weight set it uses.
        cameras, frames: video keys in model order, and how many frames each must bring (T).
        states, state_steps: state groups in model order, and how many rows each must bring (T).
        exclude_state: trained without state; the model gets zeros.
        language_keys: the first is the instruction; others are accepted and not used.
        actions, horizon: action groups in model order, and how many steps a chunk has.
        deltas: {video, state, action}: the control steps of its frames, state rows and actions, 0 being now.
    """

    tag: str
    id: int
    cameras: tuple[str, ...]
    frames: int
    states: tuple[StateGroup, ...]
    state_steps: int
    exclude_state: bool
    language_keys: tuple[str, ...]
    actions: tuple[ActionGroup, ...]
    horizon: int
    deltas: dict[str, list[int]]

    def encode_state(self, state: dict[str, Float32], max_state_dim: int) -> Float32:
        """{key: (..., T, width)} -> (..., T, max_state_dim), normalised, zero-padded; infinite where float32 cannot
        hold it."""
        first = next(iter(state.values()))
        out = np.zeros((*first.shape[:-1], max_state_dim), np.float32)
        if not self.exclude_state:
            if self._state_map is None:
                encoded = np.concatenate([group.encode(state[group.key]) for group in self.states], axis=-1)
            else:
                encoded = self._state_map(np.concatenate([state[group.key] for group in self.states], axis=-1))
            out[..., : encoded.shape[-1]] = encoded
        return out

    @cached_property
    def state_bound(self) -> Float64:
        """The groups' `bound` side by side: (T, width of all)."""
        return _side_by_side([group.bound for group in self.states], self.states, self.state_steps)

    @cached_property
    def _state_map(self) -> Callable[[Float32], Float32] | None:
        """`encode` of all groups side by side, so that NumPy is called once; None where one is no linear map."""
        if any(group.method == "sin_cos" for group in self.states):
            return None

        def join(values: list[Any]) -> NDArray[Any]:
            return _side_by_side(values, self.states, self.state_steps)

        standard = join([group.method == "mean_std" for group in self.states])
        low, high, mean, std = (
            join([getattr(group, name) for group in self.states]) for name in ("low", "high", "mean", "std")
        )
        constant = np.where(standard, std == 0, np.isclose(high, low))
        zero = constant & ~standard  # what never varied becomes 0, or keeps its value
        any_zero = bool(zero.any())
        shift = np.where(standard, np.where(constant, 0.0, mean), low)
        scale = np.where(constant, 1.0, np.where(standard, std, high - low))
        factor = np.where(standard, np.float32(1), np.float32(2))
        offset = np.where(standard, np.float32(0), np.float32(1))
        limit = np.where(standard | ~join([group.clip for group in self.states]), np.float32(np.inf), np.float32(1))

        def encode(values: Float32) -> Float32:
            with np.errstate(over="ignore"):
                out: Float32 = factor * ((values - shift) / scale).astype(np.float32) - offset
            if any_zero:
                out = np.where(zero, np.float32(0), out)
            return np.minimum(np.maximum(out, -limit), limit)

        return encode

    def decode_action(self, chunk: Float32, state: dict[str, Float32]) -> dict[str, Float32]:
        """Chunks (..., H, max_action_dim) as the model predicts them and raw states {key: (..., T, width)}, of the keys
        that actions refer to -> {key: float32 (..., horizon, width)} in physical units."""
        low, spread, mean, std, standard = self._joined_actions
        normalized = chunk[..., : self.horizon, : low.shape[-1]]
        physical = (np.clip(normalized, -1.0, 1.0) + np.float32(1)) / np.float32(2) * spread + low
        if standard.any():
            plain = np.where(std != 0, normalized * std + mean, normalized)
            physical = np.where(standard, plain, physical)
        absolute = physical.astype(np.float32)
        out, start = {}, 0
        for group in self.actions:
            end = start + group.width
            if group.relative_to is None:
                out[group.key] = absolute[..., start:end]
            else:
                out[group.key] = group.anchor(physical[..., start:end], state[group.relative_to][..., -1:, :])
            start = end
        return out

    @cached_property
    def _joined_actions(self) -> tuple[Float64, Float64, Float64, Float64, NDArray[np.bool_]]:
        """All groups side by side, so that NumPy is called once: low, high - low, mean, std, and whether these two
        hold, each (horizon, width of all)."""

        def join(values: list[Any]) -> NDArray[Any]:
            return _side_by_side(values, self.actions, self.horizon)

        return (
            join([g.low for g in self.actions]),
            join([g.high - g.low for g in self.actions]),
            join([g.mean for g in self.actions]),
            join([g.std for g in self.actions]),
            join([g.method == "mean_std" for g in self.actions]),
        )

    def encode_prefix(self, rows: dict[str, Float32], state: dict[str, Float32], width: int) -> Float32:
        """Rows of a previous chunk {key: (n, D)} as the first rows of a new one -> (n, width) float32, zero-padded.

        They get the statistics of the steps that they now stand on, and relative groups refer to the new state, so
        decoding gives the same physical values again, where these lie in the statistics' range.
        """
        out, start = np.zeros((len(next(iter(rows.values()))), width), np.float32), 0
        for group in self.actions:
            reference = None if group.relative_to is None else state[group.relative_to][-1:]
            with np.errstate(over="ignore"):
                out[:, start : start + group.width] = group.encode(rows[group.key], reference)
            start += group.width
        return out


def load_embodiments(
    processor: dict[str, Any], statistics: dict[str, Any], ids: dict[str, Any]
) -> tuple[dict[str, Embodiment], dict[str, str]]:
    """Reads every embodiment that the processor files describe.

    Args:
        processor: `processor_kwargs` of `processor_config.json`.
        statistics: `statistics.json`.
        ids: `embodiment_id.json`.

    Returns:
        The embodiments that can be served, and for each of the others the reason why not.
    """
    served, refused = {}, {}
    for tag, modality in (processor.get("modality_configs") or {}).items():
        try:
            if tag not in statistics:
                raise ContractError("statistics.json has no statistics for it")
            identity = ids.get(tag, KNOWN_IDS.get(tag))
            if type(identity) is not int or identity < 0:
                raise ContractError("embodiment_id.json has no id for it")
            served[tag] = _embodiment(tag, identity, modality, statistics[tag], processor)
        except ContractError as error:
            refused[tag] = str(error)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            refused[tag] = f"its processor files cannot be read: {type(error).__name__}: {error}"
    return served, refused


def _embodiment(tag: str, identity: int, modality: dict[str, Any], stats: dict[str, Any],
                processor: dict[str, Any]) -> Embodiment:
    for name in ("video", "state", "action", "language"):
        if not modality[name]["modality_keys"] or not modality[name]["delta_indices"]:
            raise ContractError(f"processor_config.json gives it no {name} keys or no {name} delta_indices")
    state, action = modality["state"], modality["action"]
    sin_cos = set(state.get("sin_cos_embedding_keys") or ()) if processor.get("apply_sincos_state_encoding") else set()
    mean_std = set(state.get("mean_std_embedding_keys") or ())
    clip = bool(processor.get("clip_outliers", True))
    percentiles = bool(processor.get("use_percentiles", False))
    states = []
    for key in state["modality_keys"]:
        s = _statistics(stats.get("state"), key, "state", percentiles)
        method = "sin_cos" if key in sin_cos else "mean_std" if key in mean_std else "min_max"
        for statistic in s.values():
            if statistic.ndim == 2 and len(statistic) != len(state["delta_indices"]):
                raise ContractError(f"statistics of state {key!r} have shape {list(statistic.shape)}")
        states.append(StateGroup(key, s["low"].shape[-1], method, s["low"], s["high"], s["mean"], s["std"], clip))
    widths = {group.key: group.width for group in states}

    horizon = len(action["delta_indices"])
    configs = action.get("action_configs") or [{}] * len(action["modality_keys"])
    mean_std = set(action.get("mean_std_embedding_keys") or ())
    actions = []
    for key, config in zip(action["modality_keys"], configs, strict=True):
        representation = str(config.get("rep", "ABSOLUTE")).upper()
        relative = representation == "RELATIVE" and bool(processor.get("use_relative_action"))
        s = _statistics(stats.get("action"), key, "action", percentiles)
        width = s["low"].shape[-1]
        relative_to, pose = None, ""
        if relative:
            # A relative group is normalised by the range of the differences, also where percentiles are on.
            s = _statistics(stats.get("relative_action"), key, "relative_action", percentiles=False)
            relative_to = config.get("state_key") or key
            if widths.get(relative_to) != width:
                raise ContractError(f"action {key!r} refers to state {relative_to!r}, which has another width")
            if str(config.get("type", "NON_EEF")).upper() == "EEF":
                pose = str(config.get("format", "")).lower().replace("+", "_")
                if POSE_WIDTHS.get(pose) != width:
                    raise ContractError(f"action {key!r} has format {config.get('format')!r} with width {width}")
        for statistic in s.values():
            if statistic.shape[-1] != width or (statistic.ndim == 2 and len(statistic) < horizon):
                raise ContractError(f"statistics of action {key!r} have shape {list(statistic.shape)}")
        s = {name: _rows(statistic, horizon) for name, statistic in s.items()}  # per-step ones may go on beyond a chunk
        method = "mean_std" if key in mean_std else "min_max"
        actions.append(
            ActionGroup(key, width, method, representation, relative_to, pose,
                        s["low"], s["high"], s["mean"], s["std"], clip)
        )
    return Embodiment(
        tag=tag,
        id=identity,
        cameras=tuple(modality["video"]["modality_keys"]),
        frames=len(modality["video"]["delta_indices"]),
        states=tuple(states),
        state_steps=len(state["delta_indices"]),
        exclude_state=bool(processor.get("exclude_state") or state.get("exclude_state")),
        language_keys=tuple(modality["language"]["modality_keys"]),
        actions=tuple(actions),
        horizon=horizon,
        deltas={name: list(map(int, modality[name]["delta_indices"])) for name in ("video", "state", "action")},
    )


def _statistics(stats: dict[str, Any] | None, key: str, modality: str, percentiles: bool) -> dict[str, Float64]:
    """One group's statistics as float64 arrays, finite, of one shape."""
    if key not in (stats or {}):
        raise ContractError(f"statistics.json has no {modality} statistics for {key!r}")
    entry = (stats or {})[key]
    names = {"low": "q01" if percentiles else "min", "high": "q99" if percentiles else "max"}
    for source in names.values():
        if source not in entry:
            raise ContractError(f"statistics.json has no {source} of {modality} {key!r}")
    out = {name: np.atleast_1d(np.asarray(entry[source], np.float64)) for name, source in names.items()}
    for name in ("mean", "std"):
        out[name] = np.atleast_1d(np.asarray(entry.get(name, np.zeros_like(out["low"])), np.float64))
    for name, value in out.items():
        if value.shape[-1] != out["low"].shape[-1] or value.ndim > 2 or not np.isfinite(value).all():
            source = names.get(name, name)
            raise ContractError(f"statistics.json: {source} of {modality} {key!r} is not finite or has another width")
    return out
